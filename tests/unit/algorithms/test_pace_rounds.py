"""Rounds of steps: who may step, when groups are admitted, and that nobody ever waits for ever."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.algorithms.base import Pace, PolicyRoom, StepPace
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pace_rounds import SCHEDULES, Barrier, Sync
from astraflow.testing.check_algorithm import check_algorithm


def room(version: int = 0, *, opened: int = 0, kept: int = 0, out: int = 0, left: int = 10) -> PolicyRoom:
    return PolicyRoom(
        version=version,
        max_staleness=1,
        groups_per_batch=2,
        open_groups=opened,
        kept_groups=kept,
        batched_groups=out,
        steps_left=left,
    )


@pytest.mark.parametrize(
    ("a", "b", "barrier", "sync"),
    [
        (room(), room(), True, True),
        (room(opened=2), room(opened=2), True, False),
        (room(opened=4), room(opened=4), False, False),
        (room(kept=2), room(kept=1), True, True),
        (room(kept=2), room(kept=2), True, False),
        (room(out=2), room(kept=1), True, False),
        (room(1), room(kept=1), True, True),
        (room(1), room(kept=4), False, False),
        (room(1, out=2), room(kept=1), True, False),
        (room(left=0), room(kept=1), True, True),
        (room(left=0), room(left=0), False, False),
    ],
)
def test_groups_are_admitted_for_who_is_behind(a: PolicyRoom, b: PolicyRoom, barrier: bool, sync: bool) -> None:
    assert Barrier().may_admit({"a": a, "b": b}) is barrier
    assert Sync().may_admit({"a": a, "b": b}) is sync


@pytest.mark.parametrize(
    ("a", "b", "barrier", "sync"),
    [
        (room(kept=2), room(), True, False),
        (room(kept=2), room(kept=2), True, True),
        (room(kept=2), room(out=2), True, True),
        (room(kept=2), room(1), True, True),
        (room(1, kept=2), room(kept=2), False, False),
        (room(3, kept=2), room(left=0), True, True),
        (room(kept=1), room(kept=2), True, False),
    ],
)
def test_who_may_step(a: PolicyRoom, b: PolicyRoom, barrier: bool, sync: bool) -> None:
    assert Barrier().may_step("a", {"a": a, "b": b}) is barrier
    assert Sync().may_step("a", {"a": a, "b": b}) is sync


PACES = {"barrier": Barrier(), "sync": Sync()}


@dataclass
class Policy:
    """Groups are born at a version; a batch that is out ends some time, with or without a step."""

    steps: int
    per_batch: int
    version: int = 0
    kept: int = 0
    out: int = 0


@dataclass
class World:
    """Groups end in any order and are kept or not, trainers end in any order: what dataflow does to a Pace."""

    pace: Barrier | Sync
    policies: dict[str, Policy]
    draw: random.Random
    opened: int = 0
    most_apart: int = 0
    admitted_while_out: int = 0
    stepped_unfed: int = 0

    def rooms(self) -> dict[str, PolicyRoom]:
        return {
            name: PolicyRoom(
                version=each.version,
                max_staleness=1,
                groups_per_batch=each.per_batch,
                open_groups=self.opened,
                kept_groups=each.kept,
                batched_groups=each.out,
                steps_left=max(0, each.steps - each.version),
            )
            for name, each in self.policies.items()
        }

    def turn(self) -> None:
        moves = [self._close] if self.opened else []
        moves += [lambda p=p: self._commit(p) for p in self.policies.values() if p.out]
        moves += [lambda n=n: self._cut(n) for n, p in self.policies.items() if self._may_cut(n, p)]
        if self.pace.may_admit(self.rooms()):
            moves.append(self._admit)
        assert moves, f"nothing can happen any more: a deadlock in {self.rooms()}"
        self.draw.choice(moves)()
        hungry = [p.version for p in self.policies.values() if p.version < p.steps]
        done_together = max((p.version for p in self.policies.values() if p.version < p.steps), default=0)
        self.most_apart = max(self.most_apart, done_together - min(hungry, default=0))

    def _may_cut(self, name: str, policy: Policy) -> bool:
        ready = policy.version < policy.steps and not policy.out and policy.kept >= policy.per_batch
        return ready and self.pace.may_step(name, self.rooms())

    def _admit(self) -> None:
        self.admitted_while_out += any(p.out for p in self.policies.values() if p.version < p.steps)
        self.opened += 1

    def _close(self) -> None:
        self.opened -= 1
        for policy in self.policies.values():
            if self.draw.random() < 0.7:  # else dropped for this policy: no variance, not played
                policy.kept = min(policy.kept + 1, 2 * policy.per_batch)  # beyond: surplus

    def _cut(self, name: str) -> None:
        policy = self.policies[name]
        late = [p for p in self.policies.values() if p.version == policy.version and p.version < p.steps]
        self.stepped_unfed += any(p.kept + p.out < p.per_batch for p in late)
        policy.kept, policy.out = policy.kept - policy.per_batch, policy.per_batch

    def _commit(self, policy: Policy) -> None:
        policy.out = 0
        policy.version += self.draw.random() < 0.9  # else a batch without signal: no step


@settings(max_examples=150, deadline=None)
@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_rounds_never_deadlock_and_policies_stay_together(
    schedule: str, shapes: list[tuple[int, int]], seed: int
) -> None:
    policies = {f"m{i}": Policy(steps=steps, per_batch=size) for i, (steps, size) in enumerate(shapes)}
    world = World(PACES[schedule], policies, random.Random(seed))
    for _ in range(20_000):
        if all(each.version >= each.steps for each in policies.values()):
            break
        world.turn()
    assert all(each.version == each.steps for each in policies.values()), "no end in sight"
    assert world.most_apart <= 1
    if schedule == "sync":
        assert (world.admitted_while_out, world.stepped_unfed) == (0, 0)


def test_they_are_paces_of_steps_and_the_usual_one_holds_nobody_back() -> None:
    for pace in (Barrier(), Sync()):
        assert isinstance(pace, Pace) and isinstance(pace, StepPace)
        check_algorithm(lambda pace=pace: pace)
    assert not isinstance(BoundedStaleness(), StepPace)
    assert {name: make() for name, make in SCHEDULES.items()} == PACES
