"""What weights say to given prompts, by one plain forward pass of transformers in float32: a canary's reference.

Neither a trainer's own path nor an engine's: where one of those is wrong, they must not agree by accident.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from astraflow.engines.generic import GenericModel

DTYPE = "float32"
Asked = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of a reply."""


def reference_logprobs(model_dir: Path, files: Sequence[Path], asked: Sequence[Asked]) -> list[tuple[float, ...]]:
    """Of every reply's tokens, at temperature 1, by the weights in ``files``. Blocking: loads the model each time."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = GenericModel(AutoConfig.from_pretrained(model_dir), dtype=torch.float32, device=torch.device("cpu"))
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    module, _ = model.prepare(tensors)
    return [_score(module, prompt, reply) for prompt, reply in asked]


@torch.inference_mode()
def _score(module: Any, prompt: Sequence[int], reply: Sequence[int]) -> tuple[float, ...]:
    tokens = torch.tensor([*prompt, *reply])
    logits = module(input_ids=tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    found = torch.log_softmax(logits.float(), dim=-1).gather(1, tokens[len(prompt) :, None])[:, 0]
    return tuple(found.clamp(max=0.0).tolist())
