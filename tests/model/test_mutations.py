"""Seeded bugs: the state machine is worth something because each of them makes it fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from astraflow.dataflow import batches, cut, episodes, groups, ledger, policies, retention, store, trainers
from astraflow.types import Batch
from tests.model.machine import LedgerMachine
from tests.model.replay_machine import ReplayMachine

Patch = Callable[[pytest.MonkeyPatch], None]


def sql(old: str, new: str) -> Patch:
    """Every statement of the ledger that holds ``old`` says ``new`` there."""

    def patch(monkey: pytest.MonkeyPatch) -> None:
        real = store.Store.__init__

        def made(self: Any, connection: Any) -> None:
            real(self, connection)
            run, run_many = self.run, self.run_many
            self.run = lambda text, *values: run(text.replace(old, new), *values)
            self.run_many = lambda text, *values: run_many(text.replace(old, new), *values)

        monkey.setattr(store.Store, "__init__", made)

    return patch


def instead(owner: Any, name: str, function: Callable[..., Any]) -> Patch:
    return lambda monkey: monkey.setattr(owner, name, function)


def both(*patches: Patch) -> Patch:
    def patch(monkey: pytest.MonkeyPatch) -> None:
        for each in patches:
            each(monkey)

    return patch


def _shuffled(monkey: pytest.MonkeyPatch) -> None:
    real = batches.Batches.issue

    def issue(self: Any, now: float, batch: int, trainer_epoch: int) -> Batch:
        found = real(self, now, batch, trainer_epoch)
        rows = list(found.rows)
        random.Random(trainer_epoch).shuffle(rows)
        return msgspec.structs.replace(found, rows=tuple(rows))

    monkey.setattr(batches.Batches, "issue", issue)


def _undo_without_version(monkey: pytest.MonkeyPatch) -> None:
    real = batches.Batches.undo

    def undo(self: Any, now: float, policy: str, version: int) -> tuple[int, ...]:
        before = self._policies.versions[policy]
        undone = real(self, now, policy, version)
        self._policies.set_version(policy, before)
        return undone

    monkey.setattr(batches.Batches, "undo", undo)


def _untold(monkey: pytest.MonkeyPatch) -> None:
    real = store.Store.event

    def event(self: Any, now: float, kind: str, **more: Any) -> None:
        if kind != "undone":
            real(self, now, kind, **more)

    monkey.setattr(store.Store, "event", event)


MUTANTS: dict[str, Patch] = {
    "attempts never grow": sql("attempt = attempt + 1", "attempt = MAX(attempt, 1)"),
    "an accepted attempt is forgotten": sql("submitted = ?", "submitted = 0 * ?"),
    "leases never expire": sql("(expires_at <= ? OR", "(expires_at < 0 * ? - 1 OR"),
    "a member ends twice": sql("left_episodes = left_episodes - 1", "left_episodes = left_episodes - 2"),
    "given up, but the group does not know": instead(groups.Groups, "member_ended", lambda *a, **k: False),
    "samples of a step stay held": sql("WHEN mask IS NULL THEN 'trained' ELSE 'masked'", "WHEN 1 THEN 'held'"),
    "undone groups stay trained": sql("UPDATE group_policy SET state = ?, reason = ?", "UPDATE group_policy SET reason = ?2, batch = batch + 0 * ?1, reason = ?2"),  # noqa: E501
    "newest batch first": sql("ORDER BY version, id LIMIT 1", "ORDER BY version DESC, id DESC LIMIT 1"),
    "undone but the version stays": _undo_without_version,
    "no staleness sweep": both(
        instead(cut, "is_stale", lambda *a, **k: False),
        instead(groups.Groups, "sweep", lambda *a, **k: 0),
        instead(groups.Groups, "_is_stale", lambda *a, **k: False),
    ),
    "the bound is one too loose": both(
        instead(cut, "is_stale", lambda s, *, version, max_staleness: version - s.min_version > max_staleness + 1),
        instead(groups.Groups, "sweep", lambda *a, **k: 0),
        instead(groups.Groups, "_is_stale", lambda *a, **k: False),
    ),
    "an old trainer is served": instead(policies.Policies, "require_epoch", lambda *a, **k: None),
    "a batch is issued in another order": _shuffled,
    "a rolled back transaction is committed": sql("ROLLBACK", "COMMIT"),
    "a group is cut into two batches": sql("SET state = 'batched', batch = ?", "SET batch = ?"),
    "the commit is not published": instead(policies.Policies, "publish", lambda self, now, manifest, **k: self.newest.get(manifest.policy) or _published(self, now, manifest)),  # noqa: E501
    "the run never ends": instead(ledger.Ledger, "finish_if_done", lambda *a, **k: False),
    "ready groups are never settled": instead(groups.Groups, "any_ready", False),
    "a handed back lease is lost": sql("SET state = 'pending', worker = NULL WHERE group_id = ? AND idx = ? AND attempt", "SET worker = NULL WHERE group_id = ? AND idx = ? AND attempt"),  # noqa: E501
    "rows are pruned that a resume still needs": sql("state = 'committed' AND version < ?", "state = 'committed' AND version <= ?"),  # noqa: E501
    "bytes are pruned before their group is through": instead(retention, "is_spent", lambda *a: True),
    "a resume further back than pruned is served": instead(trainers, "require_bytes", lambda *a: None),
    "a state changes and no event tells": _untold,
    "an episode is stored without its bytes": instead(episodes.Payloads, "put_episode", lambda *a, **k: None),
}  # fmt: skip

REPLAY_MUTANTS: dict[str, Patch] = {
    "a replay is no further use": sql("SELECT 1 + COALESCE(MAX(g.use), 0)", "SELECT 1"),
    "a replay is a first use": sql("SELECT 1 + COALESCE(MAX(g.use), 0)", "SELECT 0"),
    "what is replayed may be of any age": both(
        sql("state = 'trained' AND fresh_version >= ?", "state = 'trained' AND fresh_version >= ? - 100"),
        instead(cut, "is_stale", lambda *a, **k: False),
    ),
    "a replay is credited anew": sql("SET verdict = ?1 WHERE group_id = ?2", "SET batch = batch WHERE ?1 <> ?1 AND group_id = ?2"),  # noqa: E501
    "groups follow every batch that they are in": sql("WHERE batch = ? AND use = 0", "WHERE batch = ?"),
}  # fmt: skip

_publish = policies.Policies.publish


def _published(self: Any, now: float, manifest: Any) -> Any:
    return _publish(self, now, manifest)


@pytest.mark.parametrize("name", MUTANTS)
def test_seeded_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    _is_caught(LedgerMachine)


@pytest.mark.parametrize("name", REPLAY_MUTANTS)
def test_seeded_bug_of_replay_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    REPLAY_MUTANTS[name](monkeypatch)
    _is_caught(ReplayMachine)


def _is_caught(machine: type[LedgerMachine]) -> None:
    quick = settings(
        max_examples=150,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=tuple(HealthCheck),
    )
    with pytest.raises(BaseException):  # noqa: B017 - an assertion, a refusal or a hang's timeout: it is seen
        run_state_machine_as_test(machine, settings=quick)
