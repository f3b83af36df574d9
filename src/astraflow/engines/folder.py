"""What a Hugging Face model folder says: its config, the ids that end a reply, how tokens become text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from astraflow.engines.folder_config import read_config
from astraflow.engines.generic import GenericModel
from astraflow.engines.lean import LeanModel
from astraflow.engines.lean_weights import shape_of
from astraflow.engines.rows import Model
from astraflow.engines.settings import EngineSettings
from astraflow.errors import ConfigError
from astraflow.processor import multiplies


@dataclass(frozen=True, slots=True)
class ModelFolder:
    model: Model
    max_context: int
    end_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    text_of: Callable[[list[int]], str]


def open_folder(folder: Path, settings: EngineSettings) -> ModelFolder:
    """Raises ConfigError: not a model folder, or a context longer than the model's."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
    config = read_config(folder)
    device = torch.device(_device(settings.device))
    dtype = _dtype(settings.dtype, config, device)
    model = _model(config, settings, dtype=dtype, device=device)
    if settings.max_context > model.context:
        raise ConfigError(f"max_context {settings.max_context} is longer than the model's {model.context}")
    return ModelFolder(
        model=model,
        max_context=settings.max_context or model.context,
        end_ids=_end_ids(folder, config, settings),
        dtype=dtype,
        device=device,
        text_of=_LazyText(folder),
    )


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    if name == "auto":
        stored = config.dtype or torch.float32
        name = stored if isinstance(stored, str) else str(stored).removeprefix("torch.")
        if device.type == "cpu" and not multiplies(name):
            name = "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _model(config: Any, settings: EngineSettings, *, dtype: torch.dtype, device: torch.device) -> Model:
    shape = shape_of(config)
    if shape is not None:
        return LeanModel(shape, inverse_frequencies(config), slots=settings.slots, dtype=dtype, device=device)
    return GenericModel(config, dtype=dtype, device=device)


def inverse_frequencies(config: Any) -> torch.Tensor:
    """float32 [head_dim / 2]: the rotary frequencies that transformers computes for this config.

    theta^(-2 i / head_dim), rescaled where ``rope_type`` says so. Not by its model code: importing that takes longer
    than all else that a worker does before its first reply.
    """
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled: torch.Tensor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)[0]
        return scaled
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies: torch.Tensor = 1.0 / rope["rope_theta"] ** exponents
    return frequencies


def _end_ids(folder: Path, config: Any, settings: EngineSettings) -> frozenset[int]:
    if settings.end_ids is not None:
        return frozenset(settings.end_ids)
    found = config.eos_token_id
    path = folder / "generation_config.json"
    if path.is_file():
        found = json.loads(path.read_text()).get("eos_token_id", found)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


class _LazyText:
    """Tokens as text; the tokenizer is read when the first request with a stop string comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Any = None

    def __call__(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._folder)
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
