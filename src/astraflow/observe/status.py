"""One line per component: what it does or waits for, since when, why. Text for people; ``--json`` has the record."""

from __future__ import annotations

from collections.abc import Mapping

from astraflow.observe.terminal import harmless
from astraflow.observe.waits import Wait, WaitReason
from astraflow.wire.messages import ComponentStatus, EvalPoint, PolicyStatus, StatusReply

_WAITS = {wait.value for wait in Wait}
_REASONS: dict[str, str] = {
    WaitReason.NO_ROOM: "as many groups are alive as can be trained before they are stale",
    WaitReason.NO_TASK: "the tasks are used up",
    WaitReason.NO_CAPABLE: "what is pending needs a policy that it does not serve",
    WaitReason.TOO_SLOW: "a faster worker plays what is pending before it is stale, this one would not",
    WaitReason.TOO_OLD: "its weights are older than the staleness bound allows, what it plays would not be trained",
    WaitReason.NO_READY: "too few groups are kept",
    WaitReason.EVAL_FIRST: "its share of evaluation is used",
    WaitReason.STORAGE_FULL: "the disk of the run folder is full",
    WaitReason.FINISHED: "the run has ended",
}
"""Dataflow's reasons in words."""


def status_lines(status: StatusReply) -> list[str]:
    """The whole answer of ``astraflow status``, one screen."""
    lines = [f"run {status.run}: {status.state}" + (f" ({status.error})" if status.error else "")]
    lines += [component_line(component) for component in sorted(status.components, key=_order)]
    lines += [policy_line(policy) for policy in status.policies]
    lines.append("episodes      " + _counts(status.episodes))
    for point in status.evals[-3:]:
        lines.append(
            f"eval          {point.policy} v{point.version}: {point.score:.3f} on {point.episodes} episodes of "
            f"{point.dataset} ({point.coverage:.0%} graded){pass_words(point)}"
        )
    shown = {name: value for name, value in status.counters.items() if value}
    if shown:
        lines.append("counters      " + _counts(shown))
    return [harmless(line) for line in lines]


def pass_words(point: EvalPoint) -> str:
    """``, pass@1 0.500, pass@4 0.750``; nothing where every task had one attempt."""
    return "".join(f", pass@{k} {value:.3f}" for k, value in sorted(point.pass_at.items(), key=lambda i: int(i[0])))


def component_line(component: ComponentStatus) -> str:
    """``trainer main waits 12 s for a batch: 5/8 groups; oldest episode 40 s on b2``"""
    report = component.report
    who = f"{component.component} {component.name}".ljust(13)
    if component.state != "alive":
        why = report.why if component.state == "left" else None
        return f"{who} {component.state}, last heard of {_seconds(component.heard_s)} ago" + _because(
            report.error or why
        )
    since = _seconds(report.since_s + component.heard_s)
    doing = f"waits {since} for {_article(report.doing)}" if report.doing in _WAITS else f"{report.doing} for {since}"
    held = f", holds {component.held} leases" if component.held else ""
    versions = "".join(f", {policy} v{version}" for policy, version in sorted(report.versions.items()))
    return f"{who} {doing}{_because(_REASONS.get(report.why, report.why))}{held}{versions}{_because(report.error)}"


def policy_line(policy: PolicyStatus) -> str:
    """Version of steps, groups by state, staleness histogram, what the next batch lacks."""
    ended = ", frozen" if policy.frozen else ""
    kind = f"{policy.version}/{policy.steps} steps{ended}" if policy.trainable else "frozen"
    groups = f"; groups {_counts(policy.groups)}" if policy.groups else ""
    ages = "; staleness " + " ".join(f"{age}:{n}" for age, n in sorted(policy.staleness.items(), key=_age))
    waits = f"; {policy.waits}" if policy.waits else ""
    return f"policy {policy.policy}".ljust(13) + f" {kind}{groups}{ages if policy.staleness else ''}{waits}"


def wait_words(component: ComponentStatus) -> str:
    """Short form for the live display."""
    report = component.report
    if component.state != "alive":
        return component.state
    if report.doing in _WAITS:
        return f"waits for {_article(report.doing)}" + _because(_REASONS.get(report.why, report.why))
    return report.doing


def _order(component: ComponentStatus) -> tuple[bool, str, str]:
    return component.component != "dataflow", component.component, component.name


def _age(item: tuple[str, int]) -> tuple[int, str]:
    return (int(item[0]), "") if item[0].lstrip("-").isdigit() else (1 << 30, item[0])


def _article(wait: str) -> str:
    words = {
        "batch": "a batch",
        "lease": "an episode",
        "slot": "a slot",
        "commit": "its commit",
        "grader": "the grader",
        "storage": "space on a full disk",
    }
    return words.get(wait, wait)


def _because(text: str | None) -> str:
    return f": {text}" if text else ""


def _seconds(value: float) -> str:
    if value < 10:
        return f"{value:.1f} s"
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"


def _counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sorted(counts.items())) or "none"
