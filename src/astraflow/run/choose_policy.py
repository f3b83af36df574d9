"""Which policy a command means."""

from __future__ import annotations

from astraflow.errors import ConfigError
from astraflow.run.recipe import Recipe


def choose_policy(recipe: Recipe, policy: str | None) -> str:
    """The only trainable one may be left out. Raises ConfigError."""
    if policy is None and len(recipe.trainable) == 1:
        return recipe.trainable[0]
    if policy not in recipe.policies:
        found = "none" if policy is None else repr(policy)
        raise ConfigError(f"--policy must be one of {', '.join(recipe.policies)}, found {found}")
    return policy
