"""The evaluation lane: groups pinned to a version. They cancel nothing, and what is lost counts as wrong."""

from __future__ import annotations

import json

from astraflow.algorithms.passk import draws, mean_pass_at_k
from astraflow.dataflow.groups import Groups
from astraflow.dataflow.policies import Policies
from astraflow.dataflow.settings import RunSpec
from astraflow.dataflow.store import Store
from astraflow.types import Purpose
from astraflow.wire.messages import EvalPoint


class Evals:
    def __init__(self, store: Store, spec: RunSpec, policies: Policies, groups: Groups) -> None:
        self._store = store
        self._spec = spec
        self._policies = policies
        self._groups = groups

    def open_if_due(self, now: float) -> bool:
        """Open the evaluation of the newest version, unless it is not due or was opened before."""
        spec = self._spec.eval
        policy = self._spec.evaluated
        if spec is None or not self._policies.complete:
            return False
        manifest = self._policies.newest[policy]
        if not spec.due(manifest.version, steps=self._policies.steps[policy]):
            return False
        opened = self._store.run(
            "INSERT INTO evals (policy, version, digest, dataset, state, episodes, left_groups, opened_at) "
            "VALUES (?, ?, ?, ?, 'open', ?, ?, ?) ON CONFLICT DO NOTHING",
            (
                policy,
                manifest.version,
                manifest.digest,
                spec.tasks.name,
                spec.count * spec.episodes,
                spec.count,
                now,
            ),
        )
        if not opened.rowcount:
            return False
        pins = {name: newest.version for name, newest in self._policies.newest.items()}
        for index in range(spec.count):
            self._groups.admit(
                now,
                task=spec.tasks.task(index),
                size=spec.episodes,
                purpose=Purpose.EVAL,
                versions=pins,
                eval_id=opened.lastrowid,
            )
        self._store.event(now, "eval_opened", policy=policy, version=manifest.version, eval=opened.lastrowid)
        return True

    def close_ready(self, now: float) -> bool:
        """Close groups that are ready, and evaluations without open groups; True if one is done."""
        closed = False
        for group, eval_id in self._store.all(
            "SELECT id, eval_id FROM groups WHERE state = 'ready' AND purpose = 'eval' ORDER BY arrival"
        ):
            self._groups.close(group)
            self._store.run("UPDATE evals SET left_groups = left_groups - 1 WHERE id = ?", (eval_id,))
            if self._store.number("SELECT left_groups FROM evals WHERE id = ?", eval_id) == 0:
                self._finish(now, eval_id)
                closed = True
        return closed

    def _finish(self, now: float, eval_id: int) -> None:
        row = self._store.one(
            "SELECT v.episodes, SUM(CASE WHEN e.state = 'done' THEN COALESCE(e.score, 0) ELSE 0 END), "
            "SUM(e.state = 'done' AND e.score IS NOT NULL) FROM evals v JOIN groups g ON g.eval_id = v.id "
            "JOIN episodes e ON e.group_id = g.id WHERE v.id = ?",
            eval_id,
        )
        assert row is not None
        episodes, total, graded = row
        self._store.run(
            "UPDATE evals SET state = 'done', score = ?, coverage = ?, ended_at = ? WHERE id = ?",
            (total / episodes, graded / episodes, now, eval_id),
        )
        self._keep_pass_at(eval_id)
        self._store.event(now, "eval_done", eval=eval_id, score=total / episodes, coverage=graded / episodes)

    def _keep_pass_at(self, eval_id: int) -> None:
        """pass@k over the attempts of each task: episodes, never turns or sub-agents; what was lost did not pass."""
        spec = self._spec.eval
        if spec is None or spec.episodes == 1:
            return
        solved: list[tuple[int, int]] = self._store.all(
            "SELECT g.size, SUM(e.state = 'done' AND e.score IS NOT NULL AND e.score >= ?) FROM groups g "
            "JOIN episodes e ON e.group_id = g.id WHERE g.eval_id = ? GROUP BY g.id ORDER BY g.id",
            spec.passing,
            eval_id,
        )
        found = {str(k): mean_pass_at_k(solved, k=k) for k in draws(spec.episodes)}
        self._store.set(f"pass_at/{eval_id}", json.dumps(found))

    @property
    def open(self) -> int:
        return self._store.number("SELECT COUNT(*) FROM evals WHERE state = 'open'")

    def pinned(self) -> set[tuple[str, int]]:
        """(policy, version) that open evaluations still need."""
        return {
            (policy, int(version))
            for policy, version in self._store.all(
                "SELECT DISTINCT j.key, j.value FROM groups g, json_each(g.versions) j "
                "WHERE g.purpose = 'eval' AND g.state <> 'closed'"
            )
        }

    def points(self, since: float) -> tuple[EvalPoint, ...]:
        """Finished ones by version, whatever order they ended in (F71); times from ``since``."""
        return tuple(
            EvalPoint(
                policy=policy,
                version=version,
                digest=digest,
                dataset=dataset,
                score=score,
                coverage=coverage,
                episodes=episodes,
                at_s=ended_at - since,
                pass_at=json.loads(pass_at) if pass_at else {},
            )
            for policy, version, digest, dataset, score, coverage, episodes, ended_at, pass_at in self._store.all(
                "SELECT policy, version, digest, dataset, score, coverage, episodes, ended_at, value FROM evals "
                "LEFT JOIN meta ON key = 'pass_at/' || id WHERE state = 'done' ORDER BY policy, version, id"
            )
        )
