"""AstraFlow: reinforcement learning for LLM agents, organised around the flow of data."""
