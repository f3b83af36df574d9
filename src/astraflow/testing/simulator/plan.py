"""What one seed stands for: the shape of the run, how bad the network is, and when somebody pulls which plug."""

from __future__ import annotations

import random
from dataclasses import dataclass

from astraflow.testing.faulty import Faults

CRASHES = ("dataflow", "dataflow_transaction", "worker", "trainer", "trainer_old_checkpoint")
DRAWN = (*CRASHES, "cut", "wall_jump", "slow_worker", "disk_full", "join", "leave", "drain", "rollback")
UNWRITTEN = "dataflow_unwritten"
INTERRUPTIONS = ("dataflow_paused", "worker_told", "trainer_told")
"""SIGSTOP and later SIGCONT; SIGTERM, and after a while a new start."""
SECOND = "second_trainer"
"""Somebody starts one more for a policy whose trainer lives, on the same checkpoints."""
ACTIONS = (*DRAWN, UNWRITTEN, *INTERRUPTIONS, SECOND)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyPlan:
    name: str
    max_staleness: int
    groups_per_batch: int
    checkpoint_every: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """Something that happens to the run at a virtual time."""

    at_s: float
    what: str
    """One of ``ACTIONS``."""
    pick: float
    """In [0, 1): which worker, which policy, which statement of a transaction."""
    seconds: float
    """How long it lasts: the outage, the cut, the size of a jump."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Drawn from a seed alone; two equal plans give one history."""

    seed: int
    steps: int
    workers: int
    slots: int
    group_size: int
    policies: tuple[PolicyPlan, ...]
    shared_roles: bool
    """Two roles play one policy, or each its own."""
    evaluate: bool
    supervised_groups: int
    """So many groups of supervised rows before reinforcement begins."""
    window: int | None
    wait_for_all: bool
    """Pace: all policies need room, else the hungriest sets it."""
    replay: str
    """Half of each batch is replayed, in this order; empty: nothing is."""
    version_choice: float
    """Chance that an older version samples a turn; engines then hold two."""
    workflow_faults: float
    """Chance that an episode raises, hangs, or is graded with nonsense."""
    poison: bool
    """One batch kills its trainer twice."""
    dull: float
    """Chance that a batch has no signal: no step, its groups are dropped."""
    faults: Faults
    acts: tuple[Act, ...]
    faults_stop_s: float
    """From here on everything works: the run must end."""

    @staticmethod
    def draw(seed: int) -> Plan:
        rng = random.Random(f"plan/{seed}")
        count = rng.choice((1, 1, 2))
        policies = tuple(
            PolicyPlan(
                name=("solver", "critic")[n],
                max_staleness=rng.choice((0, 1, 1, 2, 4)),
                groups_per_batch=rng.choice((1, 2, 3)),
                checkpoint_every=rng.choice((1, 1, 2, 3)),
            )
            for n in range(count)
        )
        stop = rng.uniform(20, 120)
        rate = rng.choice((0.0, 0.01, 0.05, 0.15))
        patience_s = rng.choice((0.0, 5.0, 60.0))
        data = random.Random(f"plan/data/{seed}")
        return Plan(
            seed=seed,
            steps=rng.randint(3, 6),
            workers=rng.randint(1, 4),
            slots=rng.choice((1, 2, 4, 8)),
            group_size=rng.choice((2, 2, 3, 4)),
            policies=policies,
            shared_roles=rng.random() < 0.3,
            evaluate=rng.random() < 0.5,
            supervised_groups=rng.choice((0, 0, 0, 2)),
            window=rng.choice((None, None, 8)),
            wait_for_all=rng.random() < 0.3,
            replay=data.choice(("", "", "latest", "uniform", "prioritised")),
            version_choice=data.choice((0.0, 0.0, 0.0, 0.3)),
            workflow_faults=rng.choice((0.0, 0.05, 0.15, 0.4)),
            poison=rng.random() < 0.2,
            dull=rng.choice((0.0, 0.0, 0.15)),
            faults=Faults.some(rate, patience_s=patience_s),
            acts=in_order(
                *_acts(rng, stop), *_unwritten(seed, stop), *_interruptions(seed, stop), *_seconds(seed, stop)
            ),
            faults_stop_s=stop,
        )


def in_order(*acts: Act) -> tuple[Act, ...]:
    return tuple(sorted(acts, key=lambda act: act.at_s))


def _acts(rng: random.Random, stop: float) -> tuple[Act, ...]:
    """Some runs are left in peace, most get a few blows, some get one after the other."""
    mean_s = rng.choice((1e9, 20.0, 8.0, 4.0))
    acts: list[Act] = []
    at = rng.expovariate(1 / mean_s)
    while at < stop:
        seconds = rng.choice((0.2, 3.0, 12.0, 25.0)) * rng.uniform(0.5, 1.5)
        acts.append(Act(at_s=at, what=rng.choice(DRAWN), pick=rng.random(), seconds=seconds))
        at += rng.expovariate(1 / mean_s)
    return tuple(acts)


def _unwritten(seed: int, stop: float) -> list[Act]:
    """From a stream of its own: every transaction passes there, so that it is hit more often than by chance."""
    rng = random.Random(f"plan/unwritten/{seed}")
    times = [rng.uniform(2.0, stop) for _ in range(rng.choice((0, 0, 1, 2, 4)))]
    return [Act(at_s=at, what=UNWRITTEN, pick=rng.random(), seconds=rng.choice((0.2, 3.0, 12.0))) for at in times]


def _interruptions(seed: int, stop: float) -> list[Act]:
    """From a stream of its own. Long ones: what is stopped for less than a term is only slow."""
    rng = random.Random(f"plan/interruptions/{seed}")
    times = [rng.uniform(1.0, stop) for _ in range(rng.choice((0, 0, 1, 2)))]
    return [
        Act(at_s=at, what=rng.choice(INTERRUPTIONS), pick=rng.random(), seconds=rng.choice((1.0, 15.0, 30.0)))
        for at in times
    ]


def _seconds(seed: int, stop: float) -> list[Act]:
    """From a stream of its own. ``seconds``: after which it is killed, if the other has not replaced it before."""
    rng = random.Random(f"plan/seconds/{seed}")
    times = [rng.uniform(1.0, stop) for _ in range(rng.choice((0, 0, 1, 2)))]
    return [Act(at_s=at, what=SECOND, pick=rng.random(), seconds=rng.choice((0.3, 3.0, 30.0))) for at in times]
