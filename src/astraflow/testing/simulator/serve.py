"""One life of dataflow: every object is made anew from the recipe and the database, as after a real restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.service import DataflowService
from astraflow.testing.simulator.parts import run_spec
from astraflow.testing.simulator.process import Life

if TYPE_CHECKING:
    from astraflow.testing.simulator.world import World


async def dataflow_life(world: World, life: Life) -> None:
    spec = run_spec(world.plan)
    service = DataflowService(spec, Ledger(world.database.connect(), spec), clock=world.clock(), in_thread=True)
    for manifest in world.version_0.values():
        await service.publish_initial(manifest)
    life.check()
    world.host.open(service)
    await service.run()
