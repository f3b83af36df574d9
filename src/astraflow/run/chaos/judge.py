"""Was anything lost or trained twice? Decided by the trainers' own record of what is in their weights. Pure.

``history`` is what the newest checkpoint says: (sample_id, use) of every optimiser step whose effect is in its weights.
The ledger only claims; where the two differ, the ledger is wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astraflow.run.chaos.injury import Injury
from astraflow.run.chaos.plan import Component
from astraflow.trainer.checkpoints import TrainedStep

Use = tuple[str, int]
"""(sample_id, use)"""
SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """What the ledger says at the end."""

    trained: Mapping[str, frozenset[Use]]
    """By policy."""
    without_end: Sequence[str]
    """What should have ended long ago and has not, in words."""
    difference: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    lost: int
    trained_twice: int
    only_in_history: int
    """Trained, and the ledger says otherwise."""
    ledger_difference: int
    problems: tuple[str, ...]
    """The first of each kind, in words."""


def judge(histories: Mapping[str, Sequence[TrainedStep]], claims: Claims) -> Verdict:
    """``histories``: by policy, the surviving one."""
    lost, twice, unknown = len(claims.without_end), 0, 0
    problems = list(claims.without_end[:SHOWN])
    for policy in sorted(claims.trained.keys() | histories.keys()):
        counts = Counter(use for step in histories.get(policy, ()) for use in step.trained)
        claimed = claims.trained.get(policy, frozenset())
        missing, extra = claimed - counts.keys(), counts.keys() - claimed
        doubles = {use: count for use, count in counts.items() if count > 1}
        lost += len(missing)
        unknown += len(extra)
        twice += sum(count - 1 for count in doubles.values())
        problems += _some(f"{policy}: trained for the ledger, not in the weights", missing)
        problems += _some(f"{policy}: in the weights, not trained for the ledger", extra)
        problems += _some(f"{policy}: in the weights more than once", doubles)
    return Verdict(
        lost=lost,
        trained_twice=twice,
        only_in_history=unknown,
        ledger_difference=claims.difference,
        problems=tuple(problems),
    )


def _some(what: str, uses: Iterable[Use]) -> list[str]:
    found = sorted(uses)
    return [f"{what}: {len(found)}, for example {found[:SHOWN]}"] if found else []


# ── times ──


def figures(injuries: Sequence[Injury]) -> dict[str, Any]:
    """``detect_s``, ``recovery_s`` and ``cold_start_s`` per component, ``recovery_overhead_s``; seconds."""
    cold = {
        component: _percentile([s for each in own if (s := each.cold_start_s) is not None], 0.5)
        for component in Component
        if (own := _of(injuries, component))
    }
    overhead = [
        (each.fault.component, recovery - usual)
        for each in injuries
        if (recovery := each.recovery_s) is not None and (usual := cold[each.fault.component]) is not None
    ]
    return {
        "detect_s": _summary([s for each in injuries if (s := each.detect_s) is not None]),
        "detect_by_component_s": {
            component.value: _summary([s for each in own if (s := each.detect_s) is not None])
            for component in Component
            if (own := _of(injuries, component))
        },
        "recovery_s": {
            component.value: _summary([s for each in own if (s := each.recovery_s) is not None])
            for component in Component
            if (own := _of(injuries, component))
        },
        "recovery_after_s": {
            kind: _summary([s for each in injuries if each.fault.kind == kind and (s := each.recovery_s) is not None])
            for kind in sorted({each.fault.kind.value for each in injuries})
        },
        "cold_start_s": {component.value: usual for component, usual in cold.items()},
        "recovery_overhead_s": _summary([seconds for _, seconds in overhead]),
        "recovery_overhead_by_component_s": {
            component.value: _summary([seconds for which, seconds in overhead if which is component])
            for component in Component
            if _of(injuries, component)
        },
        "not_recovered": sum(each.recovery_s is None for each in injuries),
        "longest": _longest(injuries),
    }


def _longest(injuries: Sequence[Injury]) -> list[str]:
    """The faults that were noticed last after they were done, in words: where to look in the log."""
    known = sorted(((s, each) for each in injuries if (s := each.detect_s) is not None), key=lambda pair: -pair[0])
    return [
        f"fault {each.fault.number} ({each.fault.kind} {each.fault.point or '-'}) of {each.name}: noticed after "
        f"{seconds:.1f} s, recovery {'not seen' if each.recovery_s is None else f'{each.recovery_s:.1f} s'}"
        for seconds, each in known[:SHOWN]
    ]


def _of(injuries: Sequence[Injury], component: Component) -> list[Injury]:
    return [each for each in injuries if each.fault.component is component]


def _summary(values: Sequence[float]) -> dict[str, float | int | None]:
    found: dict[str, float | int | None] = {
        name: _percentile(values, share) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }
    return {**found, "count": len(values)}


def _percentile(values: Sequence[float], share: float) -> float | None:
    """By nearest rank: always a value that was measured."""
    if not values:
        return None
    return round(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], 3)
