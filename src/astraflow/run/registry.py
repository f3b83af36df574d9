"""Dataflow's status as metrics: what ``/metrics`` shows."""

from __future__ import annotations

from collections.abc import Mapping

from astraflow.observe.metrics import Kind, Metric, Registry
from astraflow.observe.waits import Wait
from astraflow.wire.messages import EvalPoint, StatusReply

SUMMED = (
    *("weights/bytes", "weights/download_s", "weights/decode_s", "weights/load_s", "weights/pause_s"),
    *("weights/attest_s", "weights/refused", "weights/believed", "relay/failed", "relay/dropped"),
)
"""Counters of weights, over the workers that are alive."""


def fill_registry(registry: Registry, status: StatusReply) -> None:
    """Every call replaces the values of the one before."""
    counters, episodes = status.counters, status.episodes
    trainable = [policy for policy in status.policies if policy.trainable]
    groups: dict[str, float] = {}
    for policy in trainable:
        for state, count in policy.groups.items():
            groups[state.partition("/")[0]] = groups.get(state.partition("/")[0], 0.0) + count
    registry.put("episode/admitted", sum(episodes.values()))
    registry.put("episode/done", episodes.get("done", 0))
    registry.put("episode/given_up", episodes.get("given_up", 0))
    registry.put("episode/failed", sum(value for name, value in counters.items() if name.startswith("failed/")))
    registry.put("group/trained", groups.get("trained", 0))
    registry.put("group/dropped", groups.get("dropped", 0))
    registry.put("step/committed", sum(policy.version for policy in trainable))
    registry.put("loop/lag_s", counters.get("loop_lag_s", 0.0))
    registry.put("loop/lag_max_s", counters.get("loop_lag_max_s", 0.0))
    registry.put("policy/version", min((policy.version for policy in trainable), default=0))
    registry.put("refused/fenced", counters.get("fenced", 0.0))
    registry.put("refused/closed", counters.get("closed", 0.0))
    newest = max(status.evals, key=lambda point: point.version, default=None)
    if newest is not None:
        registry.put("eval/score", newest.score)
        registry.put("eval/coverage", newest.coverage)
        _put_pass_at(registry, newest)
    reports = [component.report.metrics for component in status.components]
    registry.put("token/sampled", sum(report.get("token/sampled", 0.0) for report in reports))
    for wait in Wait:
        name = f"wait_s/{wait.value}"
        registry.put(name, sum(report.get(name, 0.0) for report in reports))
    _put_weights(registry, status)
    _put_dropped(registry, status)


def _put_weights(registry: Registry, status: StatusReply) -> None:
    """Of workers that are alive now: who left took its counters along."""
    newest = {policy.policy: policy.version for policy in status.policies}
    workers = [each.report for each in status.components if each.component == "rollout" and each.state == "alive"]
    lags = [newest.get(policy, at) - at for report in workers for policy, at in report.versions.items()]
    registry.put("weights/lag", max([0, *lags]))
    for name in SUMMED:
        registry.put(name, sum(_under(report.metrics, name) for report in workers))
    longest = "weights/longest_pause_s"
    registry.put(longest, max([0.0, *(report.metrics.get(longest, 0.0) for report in workers)]))


def _under(metrics: Mapping[str, float], name: str) -> float:
    """A counter, or the sum of its parts where it is told by parts."""
    parts = [value for key, value in metrics.items() if key.startswith(f"{name}/")]
    return sum(parts) if parts else metrics.get(name, 0.0)


def _put_pass_at(registry: Registry, point: EvalPoint) -> None:
    """``pass@4`` as ``eval/pass_at/4``: which k there are is the recipe's."""
    known = {metric.name for metric in registry.catalogue()}
    for k, value in point.pass_at.items():
        name = f"eval/pass_at/{k}"
        if name not in known:
            text = f"pass@{k} of the latest evaluated version, by the unbiased estimator"
            registry.register(Metric(name=name, kind=Kind.GAUGE, unit="fraction", help=text))
        registry.put(name, value)


def _put_dropped(registry: Registry, status: StatusReply) -> None:
    """One series a reason; reasons come from algorithms, so that they are registered when they first occur."""
    known = {metric.name for metric in registry.catalogue()}
    totals: dict[str, float] = {}
    for policy in status.policies:
        for state, count in policy.groups.items():
            if state.startswith("dropped/"):
                name = "group/" + state
                totals[name] = totals.get(name, 0.0) + count
    for name, total in totals.items():
        if name not in known:
            registry.register(Metric(name=name, kind=Kind.COUNTER, unit="groups", help="groups dropped, by reason"))
        registry.put(name, total)
