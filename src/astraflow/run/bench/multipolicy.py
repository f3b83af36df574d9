"""Policies without a barrier against the same run under ``schedule=barrier`` and ``sync``, in virtual time.

Real: dataflow with its ledger, the rollout service, agents, subscribers, staleness. Modelled: decoding (a fixed time a
token, four sequences at once, an engine per policy), optimiser steps (1 : 3 by policy) and tools, whose time is
log-normal with p99 / p50 = 8. Nothing shares a core: what differs is waiting alone. What is learned is not seen here.

    bound         the busiest engine or trainer, surplus counted: no schedule could be faster with what it generated
    bound_ratio   bound / time taken
    speedups      by the time per trained token
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import mean
from typing import Any

from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pace_rounds import SCHEDULES
from astraflow.run.bench._workload import Run, Took

LATENCIES = (0, 1, 4)
"""Median of a tool, in generation times of one episode."""
MODES = ("default", *SCHEDULES)
STEPS, SEEDS = 40, 3
STEPS_OF_EIGHT, SEEDS_OF_EIGHT = 24, 1

Found = dict[str, dict[str, list[Took]]]
"""Latency → mode → of each seed."""


def main(seed: int = 0) -> dict[str, Any]:
    """Two policies, then eight; ``SEEDS`` seeds from ``seed`` on, as many at once as there are cores."""
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        two = measure(policies=2, steps=STEPS, seeds=range(seed, seed + SEEDS), play=pool.map)
        eight = measure(policies=8, steps=STEPS_OF_EIGHT, seeds=range(seed, seed + SEEDS_OF_EIGHT), play=pool.map)
    return {**two, "eight": eight}


def measure(
    *,
    policies: int,
    steps: int,
    seeds: Sequence[int],
    latencies: Sequence[int] = LATENCIES,
    play: Callable[..., Iterable[Took]] = map,
) -> dict[str, Any]:
    generation_s = Run(policies=policies, steps=steps, seed=seeds[0], tool_s=0.0).generation_s()
    jobs = [
        (mode, Run(policies=policies, steps=steps, seed=seed, tool_s=latency * generation_s))
        for latency in latencies
        for mode in MODES
        for seed in seeds
    ]
    took = iter(play(_took, jobs))
    found: Found = {str(at): {mode: [next(took) for _ in seeds] for mode in MODES} for at in latencies}
    figures = {name: {at: figure(modes) for at, modes in found.items()} for name, figure in FIGURES.items()}
    return {
        "virtual_time": True,
        "policies": policies,
        "steps": steps,
        "seeds": list(seeds),
        "generation_s": round(generation_s, 3),
        **{name: {at: round(mean(each), 3) for at, each in by.items()} for name, by in figures.items()},
        "spread": {
            name: {at: [round(min(each), 3), round(max(each), 3)] for at, each in by.items()}
            for name, by in figures.items()
        },
        "waits_s": {at: _waits(modes["default"]) for at, modes in found.items()},
        "modes": {at: {name: [as_json(each) for each in runs] for name, runs in modes.items()}
                  for at, modes in found.items()},
    }  # fmt: skip


def _took(job: tuple[str, Run]) -> Took:
    mode, run = job
    return run.under(SCHEDULES[mode]() if mode in SCHEDULES else BoundedStaleness())


def _speedup(rival: str) -> Callable[[dict[str, list[Took]]], list[float]]:
    def speedups(modes: dict[str, list[Took]]) -> list[float]:
        pairs = zip(modes[rival], modes["default"], strict=True)
        return [(theirs.wall_s / theirs.trained) / (ours.wall_s / ours.trained) for theirs, ours in pairs]

    return speedups


def _of_default(figure: Callable[[Took], float]) -> Callable[[dict[str, list[Took]]], list[float]]:
    return lambda modes: [figure(each) for each in modes["default"]]


FIGURES: dict[str, Callable[[dict[str, list[Took]]], list[float]]] = {
    "speedup_vs_sync": _speedup("sync"),
    "speedup_vs_barrier": _speedup("barrier"),
    "bound_ratio": _of_default(lambda took: took.bound_s / took.wall_s),
    "needed_ratio": _of_default(lambda took: took.needed_s / took.wall_s),
    "steady_ratio": _of_default(lambda took: took.steady_ratio),
    "surplus": _of_default(lambda took: took.generated / took.trained - 1),
    "barrier_over_bound": lambda modes: [
        theirs.wall_s / ours.bound_s for theirs, ours in zip(modes["barrier"], modes["default"], strict=True)
    ],
}
"""Of every seed. ``barrier_over_bound`` is the most that ``speedup_vs_barrier`` could be with what was generated."""


def _waits(runs: Sequence[Took]) -> dict[str, dict[str, float]]:
    """Mean over the seeds: who waited for what."""
    waits: dict[str, dict[str, float]] = {}
    for took in runs:
        for who, found in took.waits_s.items():
            mine = waits.setdefault(who, {})
            for what, seconds in found.items():
                mine[what] = mine.get(what, 0.0) + seconds / len(runs)
    return {who: {what: round(seconds, 1) for what, seconds in found.items()} for who, found in waits.items()}


def as_json(took: Took) -> dict[str, Any]:
    busy = {name: round(seconds, 2) for name, seconds in took.busy_s.items()}
    numbers = {"wall_s": took.wall_s, "bound_s": took.bound_s, "needed_s": took.needed_s}
    rounded = {name: round(value, 2) for name, value in numbers.items()}
    return {**rounded, "busy_s": busy, "generated_tokens": took.generated, "trained_tokens": took.trained}
