"""What will be done to a run: a list of faults drawn by a seed. Pure; the same seed gives the same list.

Half of the faults come at random times (killed, stopped for a while, cut off, slowed), half kill at a named point of
the code. Victims are drawn per kind of component: one trainer is hit as often as all rollout services together.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from astraflow.errors import ConfigError
from astraflow.observe.points import POINTS

T = TypeVar("T")


class Component(StrEnum):
    ROLLOUT = "rollout"
    TRAINER = "trainer"
    DATAFLOW = "dataflow"


class Kind(StrEnum):
    KILL = "kill"
    """SIGKILL at any time."""
    POINT = "point"
    """SIGKILL at a named point."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after a while: longer than the others wait before they call it dead."""
    SECOND = "second"
    """A trainer is stopped before a commit, a second one takes over, then the first goes on: it must be refused."""
    CUT = "cut"
    """No connection to dataflow for a while."""
    SLOW = "slow"
    """A connection with so much delay and so little bandwidth for a while."""


RESTARTED = (Kind.KILL, Kind.POINT, Kind.SECOND)
"""After these the supervisor starts the component again."""
STOP_S = 15.0
LONGEST_CUT_S = 8.0
LONGEST_GAP_S = 2.0
OVERLAPS = 0.15
"""Share of faults that do not wait until the one before is over; none while dataflow is stopped, cut off or slow: it
would be that fault's length that is measured."""
BEFORE_COMMIT = "trainer.before_commit"
"""Where a trainer is stopped that a second one replaces: it has trained a batch and will ask to commit it."""
AT_ANY_TIME = (Kind.KILL,) * 5 + (Kind.STOP,) * 2 + (Kind.CUT, Kind.SLOW)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One of them."""

    number: int
    """From 0."""
    component: Component
    kind: Kind
    point: str = ""
    """Of POINT and SECOND."""
    gap_s: float
    """Pause before it."""
    length_s: float = 0.0
    """How long a STOP, CUT or SLOW lasts."""
    overlaps: bool
    """It does not wait for the fault before to be over."""
    pick: float
    """In [0, 1): which one, where there are several."""


def make_plan(kills: int, seed: int, *, components: Sequence[Component] = tuple(Component)) -> tuple[Fault, ...]:
    """``kills`` faults."""
    if kills < 1:
        raise ConfigError(f"--kills must be at least 1, found {kills}")
    rng = random.Random(f"chaos/{seed}")
    victims = _deck(rng, components, kills)
    at_point = _deck(rng, (True, False), kills)
    drawn = list(zip(victims, at_point, strict=True))
    points = {each: iter(_deck(rng, POINTS[each], drawn.count((each, True)))) for each in components}
    plan = []
    may_overlap = False
    for number, (victim, named) in enumerate(drawn):
        kind = Kind.POINT if named else _kind(rng, victim)
        lasts = victim is Component.DATAFLOW and kind not in RESTARTED
        overlaps = rng.random() < OVERLAPS and may_overlap and not lasts
        may_overlap = not lasts
        plan.append(
            Fault(
                number=number,
                component=victim,
                kind=kind,
                point=next(points[victim]) if named else BEFORE_COMMIT if kind is Kind.SECOND else "",
                gap_s=rng.uniform(0.0, LONGEST_GAP_S),
                length_s=_length_s(rng, kind),
                overlaps=overlaps,
                pick=rng.random(),
            )
        )
    return tuple(plan)


def _deck(rng: random.Random, cards: Sequence[T], count: int) -> list[T]:
    """``count`` cards, each kind as often as the others (± 1), in random order."""
    deck = [cards[n % len(cards)] for n in range(count)]
    rng.shuffle(deck)
    return deck


def _kind(rng: random.Random, victim: Component) -> Kind:
    kinds = (*AT_ANY_TIME, Kind.SECOND) if victim is Component.TRAINER else AT_ANY_TIME
    return rng.choice(kinds)


def _length_s(rng: random.Random, kind: Kind) -> float:
    if kind is Kind.STOP:
        return STOP_S
    return rng.uniform(1.0, LONGEST_CUT_S) if kind in (Kind.CUT, Kind.SLOW) else 0.0
