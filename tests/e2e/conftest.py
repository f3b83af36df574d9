"""A run that takes seconds: a model of a few thousand parameters, rewarded by the hash of what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RECIPE = """
import random
import zlib
from astraflow.rollout.settings import RolloutSettings
from astraflow.rollout.workflow import Agents, Reward
from astraflow.run.recipe import Eval, Policy, Recipe
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.held_out import held_out
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling, Task

MODEL = TinyModel(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, context=32, characters="0123456789")


def make(index: int) -> Task:
    return Task(key=str(random.Random(f"e2e/{{index}}").randrange(1000)))


async def hashed(task: Task, agents: Agents) -> Reward:
    reply = await agents["main"].chat([{{"role": "user", "content": task.key}}])
    {body}


def recipe() -> Recipe:
    split = held_out(GeneratedTasks("digits", make), count=8)
    trainer = TrainerSettings(lr=1e-4, dtype="float32", checkpoint_every=2)
    return Recipe(
        name="micro",
        policies={{"main": Policy(model=MODEL, groups_per_batch=2, trainer=trainer)}},
        workflow=hashed,
        tasks=split.train,
        eval=Eval(tasks=split.held_out, count=8),
        sampling=Sampling(max_tokens=2),
        rollout=RolloutSettings(slots=16),
        group_size=4,
        steps=6,
    )
"""
GOOD = "return Reward(float(zlib.crc32(repr((task.key, reply.tokens)).encode()) % 2))"
"""Nothing to be learned: groups keep their signal for as many steps as a test wants."""

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "ASTRAFLOW_CACHE": str(cache), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[..., Path]:
    """A recipe file whose workflow ends with ``body``."""

    def write(body: str = GOOD, *, change: tuple[str, str] = ("", ""), name: str = "micro.py") -> Path:
        text = RECIPE.format(body=body)
        assert change[0] in text
        path = tmp_path / name
        path.write_text(text.replace(*change) if change[0] else text)
        return path

    return write


@pytest.fixture
def cli(environment: dict[str, str], tmp_path: Path) -> Iterator[Cli]:
    """Run ``astraflow …`` to its end in a folder of its own."""

    def call(*arguments: str | Path, timeout: float = 300.0, token: str = "") -> subprocess.CompletedProcess[str]:
        given = {"ASTRAFLOW_TOKEN": token} if token else {}
        command = [sys.executable, "-m", "astraflow.run.cli", *map(str, arguments)]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**environment, **given},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    yield call
