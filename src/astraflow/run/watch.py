"""From dataflow's status and the recorder's metrics.jsonl to what a person sees."""

from __future__ import annotations

import time
from collections.abc import Sequence

from astraflow.observe.metrics_file import Point, read_points
from astraflow.observe.progress import Progress, Snapshot
from astraflow.observe.status import wait_words
from astraflow.run.layout import RunFolder
from astraflow.run.recipe import Recipe
from astraflow.wire.messages import StatusReply

RATE_S = 10.0
REWARDS = 500
"""Points in which every policy is looked for."""


class Watch:
    """Give ``show`` every status."""

    def __init__(self, run: RunFolder, recipe: Recipe, progress: Progress) -> None:
        self._run, self._recipe, self._progress = run, recipe, progress
        self._began = time.monotonic()
        self._tokens: list[tuple[float, float]] = []
        self._size = -1
        self._points: list[Point] = []

    def show(self, status: StatusReply) -> None:
        points = [point for point in self._read() if not point.superseded]
        last = next((point for point in reversed(points) if point.kind == "step"), None)
        trainable = [policy for policy in status.policies if policy.trainable]
        late = min(trainable, key=lambda policy: policy.version - policy.steps, default=None)
        newest = max(status.evals, key=lambda point: point.version, default=None)
        self._progress.show(
            Snapshot(
                run=status.run,
                elapsed_s=time.monotonic() - self._began,
                version=0 if late is None else late.version,
                steps=self._recipe.steps if late is None else late.steps,
                policy="" if late is None or len(trainable) == 1 else late.policy,
                rewards=_rewards(points),
                accuracy=None if newest is None else newest.score,
                accuracy_version=None if newest is None else newest.version,
                coverage=1.0 if newest is None else newest.coverage,
                staleness=None if last is None else last.metrics.get("staleness/mean"),
                tokens_per_s=self._rate(status),
                parts=_parts(status),
            )
        )

    def _read(self) -> list[Point]:
        """Again only when the file has grown."""
        size = self._run.metrics.stat().st_size if self._run.metrics.exists() else 0
        if size != self._size:
            self._size, self._points = size, read_points(self._run.metrics)
        return self._points

    def _rate(self, status: StatusReply) -> float | None:
        """Tokens that rollout services sampled a second, over the last few seconds."""
        now = time.monotonic()
        total = sum(each.report.metrics.get("token/sampled", 0.0) for each in status.components)
        if self._tokens and total < self._tokens[-1][1]:
            self._tokens.clear()  # a service began again
        self._tokens.append((now, total))
        while len(self._tokens) > 2 and now - self._tokens[0][0] > RATE_S:
            self._tokens.pop(0)
        (began, before), (ended, after) = self._tokens[0], self._tokens[-1]
        return (after - before) / (ended - began) if ended - began >= 1.0 else None


def _rewards(points: Sequence[Point]) -> dict[str, float]:
    """Of every policy the latest, by name."""
    latest = {point.policy: point.metrics.get("reward/train") for point in points[-REWARDS:] if point.kind == "step"}
    return {policy: reward for policy, reward in sorted(latest.items()) if reward is not None}


def _parts(status: StatusReply) -> dict[str, str]:
    alive = [component for component in status.components if component.state == "alive"]
    parts = {f"{component.component} {component.name}": wait_words(component) for component in alive}
    parts |= {f"policy {policy.policy}": policy.waits for policy in status.policies if policy.waits}
    failed = {
        kind: int(count) for name, count in status.counters.items() if (kind := name.removeprefix("failed/")) != name
    }
    if failed:  # nobody waits for these, and a run may have nothing else
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(failed.items()))
        parts["failures"] = f"{kinds}; {status.episodes.get('given_up', 0)} episodes given up"
    return parts
