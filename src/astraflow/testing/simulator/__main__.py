"""`python -m astraflow.testing.simulator [--seeds N] [--first N] [--seed N] [--jobs N]`: what many seeds covered.

The report is that of the seeds alone: it does not depend on how many processes there were.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing

from astraflow.testing.simulator.edges import ALLOWED, Edge
from astraflow.testing.simulator.many import run_all

PROGRESS_SEEDS = 250
"""So many between two lines of progress."""


def main(words: Sequence[str] | None = None) -> int:
    """Exit code. ``words``: the command line; None: this process's own."""
    arguments = argparse.ArgumentParser(prog="astraflow.testing.simulator")
    arguments.add_argument("--seeds", type=int, default=200, help="how many")
    arguments.add_argument("--first", type=int, default=0, help="the first one")
    arguments.add_argument("--seed", type=int, default=None, help="only this one")
    arguments.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    given = arguments.parse_args(words)
    seeds = range(given.first, given.first + given.seeds) if given.seed is None else [given.seed]
    began = time.monotonic()
    faults: Counter[str] = Counter()
    edges: Counter[Edge] = Counter()
    failed: list[int] = []
    with closing(run_all(seeds, jobs=given.jobs)) as outcomes:
        for done, (seed, its_faults, its_edges, broken) in enumerate(outcomes, start=1):
            faults.update(its_faults)
            edges.update(its_edges)
            if broken is not None:
                failed.append(seed)
                _say(f"seed {seed} FAILED: {broken}")
            if done % PROGRESS_SEEDS == 0:
                _say(f"{done} seeds, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    report(faults, edges)
    _say(f"{len(seeds)} seeds, {len(failed)} failed {failed[:20]}, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def report(faults: Counter[str], edges: Counter[Edge]) -> None:
    """How often each fault and each edge occurred; what was never taken was never tested."""
    for name, count in sorted(faults.items()):
        _say(f"{count:10d}  {name}")
    for table, old, new in sorted(ALLOWED | edges.keys()):
        _say(f"{edges[table, old, new]:10d}  {table}: {old or 'new'} -> {new}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
