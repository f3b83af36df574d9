"""What a model makes of a task's text: a vector a task, by which ``Dots`` tells similar ones. One forward pass a task.

    features = embedding_features(folder, tasks, field="question")   # key → float32 [H]

``astraflow tasks features`` does this and writes the file that ``tasks.features.stored_features`` reads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from astraflow.backends.models import choose_device, load_model
from astraflow.errors import BadRequest, ConfigError
from astraflow.rollout.template import ChatTemplate
from astraflow.tasks.base import TaskSource
from astraflow.types import Array, Task


@torch.inference_mode()
def embedding_features(folder: Path, tasks: TaskSource, *, field: str, device: str = "auto") -> dict[str, Array]:
    """Key → float32 [H] of every task of a sized source: the mean of the last hidden states over the user's message
    ``payload[field]``, by the weights in ``folder``.

    Less the mean over all tasks: what they have in common (the template, a direction that all texts share) would make
    all cosines nearly 1. Only features that were made together can be compared. Raises ConfigError naming the task.
    """
    if tasks.size is None:
        raise ConfigError(f"embedding_features needs a task source of a known size, {tasks.name!r} is unbounded")
    place = choose_device(device)
    template = ChatTemplate.from_folder(folder)
    body = load_model(folder, place).base_model
    found: dict[str, Array] = {}
    for index in range(tasks.size):
        task = tasks.task(index)
        ids = torch.tensor([_tokens(template, task, field)], device=place)
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state[0]
        found[task.key] = hidden.double().mean(dim=0).cpu().numpy()
    middle = np.mean(list(found.values()), axis=0)
    return {key: (value - middle).astype(np.float32) for key, value in found.items()}


def _tokens(template: ChatTemplate, task: Task, field: str) -> list[int]:
    text = task.payload.get(field)
    if not isinstance(text, str):
        known = ", ".join(task.payload) or "nothing"
        raise ConfigError(f"task {task.key!r} has no text in {field!r}; it has {known}")
    try:
        return template.encode(template.render([{"role": "user", "content": text}]))
    except BadRequest as error:
        raise ConfigError(f"task {task.key!r}: {error}") from error
