"""A run folder as a run would leave it, row by row: what the doctor reads and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.dataflow.store import Store, connect
from astraflow.run.layout import RunFolder

HEALTHY = {
    "loss/total": 0.001,
    "loss/clip_fraction": 0.01,
    "loss/ratio_clamped": 0.0,
    "loss/entropy": 1.2,
    "logprob/gap": 0.01,
    "staleness/mean": 1.0,
    "step/grad_norm": 0.4,
    "step/lr": 1e-5,
}
"""Metrics of a step."""
CRITIC = {
    "critic__lr": 1e-5,
    "critic__explained_variance": 0.4,
    "critic__value_deviation": 0.3,
    "critic__return_deviation": 0.5,
    "critic__relative_error": 0.4,
    "loss__value": 0.1,
}
"""Those of a step with a critic that is of use, as arguments of ``steps``."""


class MadeRun:
    """Groups of two episodes with one sample of ten tokens each."""

    def __init__(self, folder: Path, *, policies: tuple[str, ...] = ("main",), max_staleness: int = 2) -> None:
        folder.mkdir(parents=True)
        self.run = RunFolder(folder)
        config = {"policies": {name: {"max_staleness": max_staleness} for name in policies}}
        self.run.config.write_text(json.dumps({"config": config}))
        self.store = Store(connect(self.run.database))
        self.store.run("PRAGMA synchronous = OFF")  # of a test
        self.store.set("state", "running")
        self._groups = 0
        for name in policies:
            self.store.run("INSERT INTO policies (name, trainable) VALUES (?, 1)", (name,))

    def steps(self, count: int, *, policy: str = "main", **metrics: float | None) -> MadeRun:
        """Committed ones. A metric that is None is left out; names have ``__`` for the slash."""
        changed = {name.replace("__", "/"): value for name, value in metrics.items()}
        numbers = {name: value for name, value in {**HEALTHY, **changed}.items() if value is not None}
        for _ in range(count):
            (version,) = self.store.one("SELECT version FROM policies WHERE name = ?", policy) or (0,)
            self._batch(policy, "committed", None, version, numbers)
            self.store.run("UPDATE policies SET version = version + 1 WHERE name = ?", (policy,))
        return self

    def dropped_batches(self, count: int, reason: str, *, policy: str = "main") -> MadeRun:
        for _ in range(count):
            self._batch(policy, "dropped", reason, 0, {})
        return self

    def groups(
        self,
        count: int,
        *,
        state: str = "trained",
        reason: str | None = None,
        rewards: tuple[float, float] = (0.0, 1.0),
        advantages: tuple[float, float] | None = (-0.7, 0.7),
        masked: str | None = None,
        policy: str = "main",
        purpose: str = "train",
        batch: int | None = None,
    ) -> MadeRun:
        """``masked``: reason of every second sample. ``batch``: the one that they were cut into."""
        for _ in range(count):
            self._groups += 1
            number = self._groups
            self.store.run(
                "INSERT INTO groups (id, purpose, state, size, left_episodes, supervised, task, task_key, opened_at) "
                "VALUES (?, ?, 'closed', 2, 0, 0, x'', 'k', 0)",
                (number, purpose),
            )
            verdict = None if advantages is None else np.array(advantages, np.float32).tobytes()
            (version,) = self.store.one("SELECT version FROM policies WHERE name = ?", policy) or (0,)
            trained = version if state == "trained" else None
            self.store.run(
                "INSERT INTO group_policy (group_id, policy, state, reason, reward, verdict, version, batch) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (number, policy, state, reason, sum(rewards) / 2, verdict, trained, batch),
            )
            for index, reward in enumerate(rewards):
                self._episode(number, index, "done", reward=reward)
                why = masked if masked and index else None
                sample = ("masked" if why else "trained") if state == "trained" else "dropped"
                self.store.run(
                    "INSERT INTO samples (group_id, policy, idx, agent, n, state, mask, tokens) "
                    "VALUES (?, ?, ?, 'a', 0, ?, ?, 10)",
                    (number, policy, index, sample, why),
                )
        return self

    def given_up(self, count: int, kind: str) -> MadeRun:
        for index in range(count):
            self._episode(10_000, index, "given_up", kind=kind)
        return self

    def healthy(self) -> MadeRun:
        """Twenty steps of two groups each."""
        return self.steps(20).groups(40)

    def ended(self, state: str, error: str | None = None) -> MadeRun:
        self.store.set("state", state)
        if error is not None:
            self.store.set("error", error)
        return self

    def close(self) -> RunFolder:
        self.store.connection.close()
        return self.run

    def _episode(self, group: int, index: int, state: str, *, reward: Any = None, kind: str | None = None) -> None:
        self.store.run(
            "INSERT INTO episodes (group_id, idx, state, kind, lane, supervised, score) VALUES (?, ?, ?, ?, 0, 0, ?)",
            (group, index, state, kind, reward),
        )

    def _batch(self, policy: str, state: str, reason: str | None, version: int, metrics: dict[str, float]) -> None:
        self.store.run(
            "INSERT INTO batches (policy, state, reason, version, tokens, sequences, metrics, cut_at) "
            "VALUES (?, ?, ?, ?, 40, 4, ?, 0)",
            (policy, state, reason, version, json.dumps(metrics)),
        )
