"""Many seeds, one after the other or in several processes at a time: the outcomes come in the order of the seeds."""

from __future__ import annotations

import gc
import logging
import multiprocessing
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor

from astraflow.testing.simulator import simulate
from astraflow.testing.simulator.edges import Edge

SEEDS_AT_A_TIME = 5
"""Given to a process."""

Seen = tuple[int, Counter[str], dict[Edge, int], str | None]
"""Seed, its faults, its edges, and what broke, if anything did."""


def run_all(
    seeds: Sequence[int], *, jobs: int, run: Callable[[int], Seen] | None = None
) -> Generator[Seen, None, None]:
    """In the order of the seeds, however many processes there are. ``run``: what is done for each; a simulation."""
    run = run or simulated
    if jobs <= 1 or len(seeds) == 1:
        _be_quiet()
        yield from map(run, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_be_quiet) as pool:
        yield from pool.map(run, seeds, chunksize=SEEDS_AT_A_TIME)


def _be_quiet() -> None:
    logging.disable(logging.CRITICAL)  # faults by the thousand are expected here
    gc.set_threshold(50_000, 20, 20)  # a run is many small objects that end with it: looking for cycles finds nothing


def simulated(seed: int) -> Seen:
    try:
        outcome = simulate(seed)
    except Exception as error:  # noqa: BLE001 - one broken seed: the others tell how common it is
        return seed, Counter(), {}, f"{type(error).__name__}: {error}"
    return seed, outcome.faults, outcome.edges, None
