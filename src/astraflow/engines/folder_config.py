"""The config of a model folder: as its file states it where that is all, else by transformers, who knows the defaults.

transformers' config classes import its model code, which takes a worker longer than all else before its first reply.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from astraflow.engines.lean_weights import shape_of

_STATED = frozenset({
    "model_type", "hidden_act", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "dtype",
    "eos_token_id", "rope_parameters", "head_dim",
})  # fmt: skip
"""What the engine asks of a config."""
_STATED_TOO = {"llama": frozenset[str](), "qwen3": frozenset({"use_sliding_window", "layer_types"})}
"""Families that the lean forward pass computes, and what else it asks of them."""


def read_config(folder: Path) -> Any:
    """With the attributes of a transformers config that the engine reads; all of them where its model is generic."""
    stated = _stated(folder)
    if stated is not None and shape_of(stated) is not None:
        return stated
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


def _stated(folder: Path) -> SimpleNamespace | None:
    """None: not everything is there, or needs more than reading."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None  # transformers says what is wrong with it
    if not isinstance(found, dict) or not found.keys() >= _STATED:
        return None
    too = _STATED_TOO.get(found["model_type"])
    if too is None or not found.keys() >= too or any(found[name] is None for name in _STATED - {"eos_token_id"}):
        return None
    rope = found["rope_parameters"]
    if not isinstance(rope, dict) or rope.get("rope_type") != "default" or "rope_theta" not in rope:
        return None
    return SimpleNamespace(**found)
