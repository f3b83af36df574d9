"""One life of dataflow: every object is made anew from the recipe and the database, as after a real restart."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.service import DataflowService
from astraflow.dataflow.sweeps import deaf_after_s
from astraflow.testing.simulator.parts import run_spec
from astraflow.testing.simulator.process import Life

if TYPE_CHECKING:
    from astraflow.testing.simulator.world import World


def _stop_with(world: World, service: DataflowService) -> None:
    """Its own time stands still while the process is stopped; so does what it hears and says, in ``Host``."""
    look = service.tick

    async def tick() -> None:
        loop = asyncio.get_running_loop()
        stopped = loop.time()
        await world.host.going_on()
        stopped_s = loop.time() - stopped
        await look()
        if stopped_s > deaf_after_s(service.spec.limits):
            world.history.woken.append(service._commits.now)

    service.tick = tick  # type: ignore[method-assign]  # SIGSTOP is nothing that a service knows of


async def dataflow_life(world: World, life: Life) -> None:
    spec = run_spec(world.plan)
    service = DataflowService(spec, Ledger(world.database.connect(), spec), clock=world.clock(), in_thread=True)
    _stop_with(world, service)
    for manifest in world.version_0.values():
        await service.publish_initial(manifest)
    life.check()
    world.host.open(service)
    await service.run()
