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


class Stoppable(DataflowService):
    """Its own time stands still while the process is stopped; so does what it hears and says, in ``Host``."""

    world: World

    async def tick(self) -> None:
        loop = asyncio.get_running_loop()
        stopped = loop.time()
        await self.world.host.going_on()
        stopped_s = loop.time() - stopped
        await super().tick()
        if stopped_s > deaf_after_s(self.spec.limits):
            self.world.history.woken.append(self._commits.now)


async def dataflow_life(world: World, life: Life) -> None:
    spec = run_spec(world.plan)
    service = Stoppable(spec, Ledger(world.database.connect(), spec), clock=world.clock(), in_thread=True)
    service.world = world
    for manifest in world.version_0.values():
        await service.publish_initial(manifest)
    life.check()
    world.host.open(service)
    await service.run()
