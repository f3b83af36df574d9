"""The fault simulator: the real components in virtual time, under crashes and a bad network. One seed, one history.

    outcome = simulate(42)          # raises Broken, with the seed and the last events, if an invariant does not hold

`python -m astraflow.testing.simulator --seeds 2000` runs many and prints how often each fault and each edge occurred.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from astraflow.testing.simulator.plan import Plan
from astraflow.testing.simulator.process import Killed
from astraflow.testing.simulator.world import Broken, Outcome, World
from astraflow.testing.virtual_loop import Deadlock, OutOfTime, run_virtual

__all__ = ["Broken", "Outcome", "Plan", "World", "simulate"]

PROGRESS_S = 1800.0
"""Virtual time in which a run must end once faults have stopped."""
MEMORY = Path("/dev/shm")
"""Ledger, checkpoints and caches go there where it exists: syncing them then costs nothing."""
DISK_S = (0.0, 0.05)
"""Virtual time that a transaction of the ledger takes until it is on disk; others are asked for meanwhile."""


def simulate(seed: int, plan: Plan | None = None) -> Outcome:
    """One run. Raises Broken, also when the run hangs; any other exception is a bug of a component."""
    plan = plan or Plan.draw(seed)
    parent = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="astraflow-sim-", dir=parent) as folder:
        world: list[World] = []

        async def main() -> Outcome:
            world.append(World(plan, Path(folder)))
            return await world[0].run()

        try:
            limit_s = plan.faults_stop_s + PROGRESS_S
            return run_virtual(
                main, seed=seed, limit_s=limit_s, thread_s=(0.0, 0.2), executor_s=DISK_S, ignore=(Killed,)
            )
        except (Deadlock, OutOfTime) as error:
            tail = "\n  ".join(world[0].history.lines[-40:])
            raise Broken(f"seed {seed}: no progress: {error}\nlast events:\n  {tail}\n{plan}") from error
