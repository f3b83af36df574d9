"""A Hugging Face model folder as something that can be trained: loaded, checked, exported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from astraflow.errors import ConfigError
from astraflow.processor import multiplies
from astraflow.weights import tensors as bits

SMALL_PARAMETERS = 5_000_000
"""Below this, casting costs more than bf16 saves."""


def load_model(folder: Path, device: torch.device) -> Any:
    """In fp32, ready to compute (no dropout). Raises ConfigError with one sentence."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model folder {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
    return model.to(device).eval()


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def choose_dtype(name: str, *, parameters: int, device: torch.device) -> torch.dtype:
    """The same on every start of one machine, so that a resumed run computes the same bits."""
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if parameters > SMALL_PARAMETERS and multiplies("bfloat16") else torch.float32


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Dtype of each tensor as the folder stores it. Every exported version has version 0's names, dtypes, shapes."""
    from safetensors import safe_open

    if not (folder / "config.json").exists():
        raise ConfigError(f"model folder {folder} has no config.json")
    found: dict[str, torch.dtype] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                found[name] = file.get_slice(name)[:0].dtype if file.get_slice(name).get_shape() else torch.float32
    if not found:
        raise ConfigError(f"model folder {folder} has no .safetensors file")
    return found


def as_bits(tensors: dict[str, Tensor]) -> Iterator[bits.Tensor]:
    """What ``weights.digest`` reads: views where the tensor is on the CPU and contiguous."""
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().cpu()
        if flat.dtype is torch.bfloat16:
            yield bits.of_array(name, flat.view(torch.int16).numpy().view(np.uint16), dtype="BF16")
        else:
            yield bits.of_array(name, flat.numpy())


def sliding_window(model: Any) -> int | None:
    """Longest distance that attention reaches, where the model limits it. Packed rows ignore such a limit."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    return int(window) if window and getattr(config, "use_sliding_window", True) else None
