"""Projected gradients of tasks, which ``Less`` compares: one backward pass a task, so for small models.

    features = gradient_features(folder, tasks, size=512)            # key → float32 [512]
    save_features(features, "gradients.safetensors")                 # tasks.features.stored_features reads it

A task's gradient is that of the mean negative log-likelihood of the assistant's replies in its conversation.
Projections are of random signs, P(g)_k = Σ_i s_ik g_i / √size, which keep inner products in expectation (Johnson and
Lindenstrauss; LESS, Xia et al. 2024, arXiv 2402.04333). LESS weighs the gradients of training tasks by Adam's state;
here there is no optimiser yet, both sides are plain gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from astraflow.backends.models import choose_device, load_model
from astraflow.errors import BadRequest, ConfigError
from astraflow.rollout.template import ChatTemplate
from astraflow.tasks.base import TaskSource
from astraflow.types import Array, Sample, Task
from astraflow.workflows.supervised import tokenised

BLOCK = 4096
"""Weights that are projected at once: [BLOCK, size] signs."""
HELD_BYTES = 256 << 20
"""Of whole gradients that wait for their projection."""

Messages = Callable[[Task], Any]
"""A list of role and content, as in supervised rows; what else it gives is refused with the task's name."""


def own_messages(task: Task) -> Any:
    return task.payload.get("messages")


def gradient_features(
    folder: Path,
    tasks: TaskSource,
    *,
    size: int = 512,
    seed: int = 0,
    messages: Messages = own_messages,
    device: str = "auto",
) -> dict[str, Array]:
    """Key → float32 [size] of every task of a sized source, by the weights in ``folder``.

    ``messages``: the conversation of a task; by default ``payload["messages"]``. Features can be compared only where
    folder, ``size`` and ``seed`` are the same. Raises ConfigError naming the task.
    """
    if size < 1:
        raise ConfigError(f"gradient_features: size must be at least 1, found {size}")
    if tasks.size is None:
        raise ConfigError(f"gradient_features needs a task source of a known size, {tasks.name!r} is unbounded")
    place = choose_device(device)
    model, template = load_model(folder, place), ChatTemplate.from_folder(folder)
    weights = [each for each in model.parameters() if each.requires_grad]
    at_once = max(1, HELD_BYTES // (4 * sum(each.numel() for each in weights)))
    found: dict[str, Array] = {}
    for start in range(0, tasks.size, at_once):
        held = [tasks.task(index) for index in range(start, min(start + at_once, tasks.size))]
        gradients = [_gradient(model, weights, _samples(template, task, messages)) for task in held]
        projected = project(torch.stack(gradients), size=size, seed=seed).cpu().numpy()
        found |= {task.key: row for task, row in zip(held, projected, strict=True)}
    return found


def save_features(features: Mapping[str, Array], path: Path | str) -> None:
    save_file({key: np.ascontiguousarray(value) for key, value in features.items()}, path)


def project(gradients: Tensor, *, size: int, seed: int) -> Tensor:
    """float32 [N, size] of [N, P]. Signs depend on the seed and on the place of a weight alone."""
    total = torch.zeros(len(gradients), size, dtype=torch.float64, device=gradients.device)
    for block, start in enumerate(range(0, gradients.shape[1], BLOCK)):
        part = gradients[:, start : start + BLOCK].to(torch.float64)
        bits = np.random.PCG64([seed, block]).random_raw(-(-part.shape[1] * size // 64)).astype("<u8")
        signs = np.unpackbits(bits.view(np.uint8), count=part.shape[1] * size).astype(np.float64) * 2 - 1
        total += part @ torch.from_numpy(signs.reshape(part.shape[1], size)).to(part.device)
    projected: Tensor = (total / size**0.5).to(torch.float32)
    return projected


def _samples(template: ChatTemplate, task: Task, messages: Messages) -> tuple[Sample, ...]:
    try:
        return tokenised(template, messages(task))
    except BadRequest as error:
        raise ConfigError(f"gradient_features: task {task.key!r}: {error}") from error


def _gradient(model: Any, weights: Sequence[Tensor], samples: Sequence[Sample]) -> Tensor:
    """float32 [P], on the model's device."""
    loss = torch.zeros((), device=weights[0].device)
    targets = sum(int(sample.sampled.sum()) for sample in samples)
    for sample in samples:
        ids = torch.from_numpy(sample.tokens.astype(np.int64)).to(loss.device)[None]
        sampled = torch.from_numpy(sample.sampled[1:].copy()).to(loss.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        loss = loss + losses[sampled].sum() / targets
    found = torch.autograd.grad(loss, list(weights), allow_unused=True)
    parts = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]
    return torch.cat([part.reshape(-1).to(torch.float32) for part in parts])
