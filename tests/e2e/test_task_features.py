"""Dots on a file of tasks, by features that the command made of the policy's own model: real engine and trainer."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from astraflow.algorithms.curate import Dots
from astraflow.dataflow.ledger import StoredState
from astraflow.rollout.workflow import Agents, Reward
from astraflow.run.cli import main
from astraflow.run.run_db import open_run_db
from astraflow.tasks.features import WithFeatures, stored_features
from astraflow.tasks.jsonl import JsonlTasks
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Task
from astraflow.wire.codec import decode
from tests.e2e.micro import MODEL, play, recipe

pytestmark = pytest.mark.slow
TASKS = 60


def is_hard(task: Task) -> bool:
    return set(task.payload["question"]) <= set("789")


async def half_or_never(task: Task, agents: Agents) -> Reward:
    """Questions of high digits are never answered right, others half of the time, whatever is learned."""
    reply = await agents["main"].chat([{"role": "user", "content": task.payload["question"]}])
    right = zlib.crc32(repr((task.key, reply.tokens)).encode()) % 2
    return Reward(0.0 if is_hard(task) else float(right))


def test_dots_tells_how_hard_unseen_tasks_are_from_the_models_own_features(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    rows, features = tmp_path / "rows.jsonl", tmp_path / "rows.safetensors"
    questions = ["".join(dice.choice(list("789" if number % 2 else "012"), 6)) for number in range(TASKS)]
    rows.write_text("".join(json.dumps({"id": n, "question": text}) + "\n" for n, text in enumerate(questions)))
    assert main(["tasks", "features", str(rows), str(features), "--model", str(MODEL.build(tmp_path / "model"))]) == 0

    tasks = WithFeatures(JsonlTasks(rows), "embedding", stored_features(features))

    def dots() -> Dots:
        return Dots(tasks, group_size=8, feature="embedding", reward_range=(0.0, 1.0), refresh=4)

    run = play(
        recipe(
            TrainerSettings(lr=1e-4, dtype="float32"),
            tasks=tasks,
            workflow=half_or_never,
            steps=6,
            schedule="sync",
            pipeline={"curate": dots()},
        ),
        tmp_path / "run",
    )
    with open_run_db(run.database) as db:
        (stored,) = db.connection.execute("SELECT state FROM algorithms").fetchone()
        played = {key for (key,) in db.connection.execute("SELECT task_key FROM groups WHERE state = 'closed'")}
        (version,) = db.connection.execute("SELECT version FROM policies").fetchone()
    assert version == 6
    curate = dots()
    curate.load_state_dict(decode(stored, StoredState).state["curate"])
    told: dict[bool, list[float]] = {True: [], False: []}
    for place, difficulty in enumerate(curate.difficulty()):
        if tasks.task(place).key not in played:
            told[is_hard(tasks.task(place))].append(float(difficulty))
    assert len(told[True]) > 5 and len(told[False]) > 5, "of both kinds some were never played"
    assert min(told[True]) > max(told[False]), told
    assert np.mean(told[True]) > 0.8 and 0.3 < np.mean(told[False]) < 0.7
