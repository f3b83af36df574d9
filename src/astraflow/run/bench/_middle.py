"""What the tables are about: a tiny model that answers with one of three digits, and is rewarded for the middle one.

``started`` makes the start of every run: the model after a few supervised steps on any of the three, by seed.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np

from astraflow.rollout.template import ChatTemplate
from astraflow.rollout.workflow import Agents, Reward
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.base import TaskSource
from astraflow.tasks.held_out import Split, held_out
from astraflow.tasks.lists import ListTasks
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import AdvantageRun, Batch, Row, SampleKind, Task
from astraflow.workflows.supervised import tokenised

POLICY = "main"
MODEL = TinyModel(hidden=64, layers=2, intermediate=192, context=32, characters="0123456789 ")
HELD_OUT = 120
POOL = 200
SHOWN = 32
"""Demonstrations of one supervised step."""


def digits(task: Task) -> list[int]:
    return [int(each) for each in task.key.split()]


def split() -> Split:
    """All 720 orders of three different digits: 600 to train on, 120 held out."""
    keys = [f"{a} {b} {c}" for a in range(10) for b in range(10) for c in range(10) if len({a, b, c}) == 3]
    return held_out(ListTasks("middle-of-three", [Task(key=key) for key in keys]), count=HELD_OUT)


def pool() -> Split:
    """Few tasks to train on, so that each comes several times: for algorithms that learn about tasks."""
    train, unseen = split()
    return Split(train=ListTasks(train.name, [train.task(n) for n in range(POOL)]), held_out=unseen)


async def middle(task: Task, agents: Agents) -> Reward:
    """The workflow: 1 for the digit between the other two and nothing else."""
    reply = await agents[POLICY].chat([{"role": "user", "content": task.key}])
    return Reward(float(reply.text == str(sorted(digits(task))[1])))


def started(folder: Path, *, seed: int, steps: int) -> Path:
    """A model folder after ``steps`` supervised steps; one that is there is used. The same seed gives the same bits."""
    target = folder / f"start-{seed}-{steps}"
    if target.exists():
        return target
    from astraflow.backends.torch_single import TorchBackend

    base = MODEL.build()
    settings = TrainerSettings(lr=2e-3, betas=(0.9, 0.95), dtype="float32", threads=1)
    backend = TorchBackend(base, settings, steps=steps)
    template = ChatTemplate.from_folder(base)
    tasks = split().train
    dice = random.Random(f"demonstrations/{seed}")
    for version in range(steps):
        rows = tuple(_row(template, tasks, dice, f"{version}/{n}/main/0") for n in range(SHOWN))
        tokens = sum(int(row.mask.sum()) for row in rows)
        batch = Batch(
            id=version + 1, policy=POLICY, version=version, trainer_epoch=1, tokens=tokens, sequences=SHOWN, rows=rows
        )
        backend.step(batch)
    partial = folder / f".{target.name}"
    shutil.copytree(base, partial, ignore=shutil.ignore_patterns("*.safetensors"))
    backend.export(partial)
    return partial.rename(target)


def _row(template: ChatTemplate, tasks: TaskSource, dice: random.Random, sample_id: str) -> Row:
    task = tasks.task(dice.randrange(tasks.size or 1))
    messages = [{"role": "user", "content": task.key}, {"role": "assistant", "content": str(dice.choice(digits(task)))}]
    sample = tokenised(template, messages)[0]
    mask = sample.sampled
    places = np.flatnonzero(mask)
    run = AdvantageRun(start=int(places[0]), stop=int(places[-1]) + 1, value=1.0)
    return Row(
        sample_id=sample_id,
        tokens=sample.tokens,
        mask=mask,
        logprobs=sample.logprobs,
        spans=sample.spans,
        advantages=(run,),
        kind=SampleKind.SUPERVISED,
    )
