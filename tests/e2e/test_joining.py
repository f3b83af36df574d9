"""Real models, engines, trainers and an average in one process, while policies join, are frozen and trained again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.dataflow.conservation import balance
from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.service import DataflowService
from astraflow.dataflow.verify import verify
from astraflow.run.config import Resolved, resolve
from astraflow.run.in_process import trainers_of
from astraflow.run.layout import RunFolder
from astraflow.run.prepare import create_run
from astraflow.run.run_db import open_run_db
from astraflow.run.serve_dataflow import open_service
from astraflow.run.serve_rollout import build_rollout
from astraflow.weights.store import DirStore
from astraflow.wire.messages import OperatorRequest
from tests.e2e.test_many_policies import RECIPE, THREE


class Played:
    """A run that goes on until it is told to end, and hands to change it."""

    def __init__(self, run: RunFolder, resolved: Resolved, service: DataflowService, tasks: asyncio.TaskGroup) -> None:
        self.run, self.resolved, self.service, self.tasks = run, resolved, service, tasks
        self.flow, self.store = LocalDataflow(service), DirStore(run.weights)

    async def operate(self, action: str, **fields: object) -> None:
        await self.flow.operate(OperatorRequest(action=action, **fields))  # type: ignore[arg-type]

    async def start(self, *policies: str) -> None:
        """Their trainers, as the launcher starts them."""
        for each in await trainers_of(
            policies, self.run, self.resolved, self.flow, self.store, self.run.path / "averages"
        ):
            self.tasks.create_task(each.run())

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(600):
            while not true():  # noqa: ASYNC110 - of a run that nobody tells us of
                await asyncio.sleep(0.05)

    def version(self, policy: str) -> int:
        return self.service.ledger.policies.versions[policy]

    def count(self, sql: str) -> int:
        return self.service.ledger.store.number(sql)


@pytest.mark.slow
def test_policies_join_follow_and_are_trained_again(tmp_path: Path) -> None:
    path = tmp_path / "many.py"
    average = THREE.replace("trainable=False)", 'trainable=False, average_of="small", decay=0.5)')
    path.write_text(RECIPE + average)
    resolved = resolve(str(path), ["steps=100000", "policies.small.steps=100000", "limits.retain=all"], 0)
    run = create_run(resolved, tmp_path / "run")

    async def main() -> None:
        async with open_service(run, resolved, DirStore(run.weights)) as service, asyncio.TaskGroup() as tasks:
            played = Played(run, resolved, service, tasks)
            rollout = build_rollout(
                resolved, played.flow, name="rollout-0", store=played.store, cache=tmp_path / "cache"
            )
            tasks.create_task(rollout.run())
            await played.start("large", "small", "judge")
            await _change(played)
            for policy in ("large", "small", "late"):
                await played.operate("freeze", policy=policy)

    asyncio.run(main())
    _look(run)


async def _change(played: Played) -> None:
    averaged = "SELECT COUNT(*) FROM events WHERE kind = 'averaged' AND policy = 'judge'"
    await played.until(lambda: played.count(averaged) >= 2)
    await played.operate("freeze", policy="small")
    await played.until(
        lambda: played.count("SELECT COUNT(*) FROM components WHERE name = 'small' AND state = 'left'") > 0
    )
    frozen = played.version("small")
    await played.operate("unfreeze", policy="small")
    await played.start("small")
    await played.until(lambda: played.version("small") > frozen)
    await played.operate("add", policy="late", source="small", version=0, role="verifier")
    await played.start("late")
    await played.until(lambda: played.version("late") >= 2)


def _look(run: RunFolder) -> None:
    with open_run_db(run.database) as db:
        assert balance(db.connection)["difference"] == 0
        assert not verify(db.connection).differences
        averages = [
            digest for (digest,) in db.connection.execute("SELECT digest FROM publications WHERE policy = 'judge'")
        ]
        assert len(averages) == len(set(averages)) > 2, "an average moves with every version"
        known = set(db.connection.execute("SELECT policy, version, digest FROM publications").fetchall())
        cast = dict(db.connection.execute("SELECT group_id, roles FROM casts").fetchall())
        seen = set()
        for group, idx in db.connection.execute("SELECT group_id, idx FROM episodes WHERE state = 'done'").fetchall():
            episode = db.episode(group, idx, run.payloads)
            assert episode is not None
            for each in episode.trajectories:
                if each.role == "verifier":
                    assert each.policy == ("late" if group in cast else "small")
                for sample in each.samples:
                    for span in sample.spans:
                        assert (each.policy, span.version, span.digest) in known
                        seen.add((each.policy, span.version))
        assert {version for policy, version in seen if policy == "judge"} - {0}, "who averages is followed"
        assert {version for policy, version in seen if policy == "late"} - {0}, "who joined is trained and followed"
