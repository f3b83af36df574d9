"""What happens to a run from outside, at the plan's times. After ``faults_stop_s`` nothing does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from astraflow.errors import AstraFlowError
from astraflow.testing.simulator.lives import forget_checkpoints_after, lose_newest_checkpoint
from astraflow.testing.simulator.plan import Act
from astraflow.wire import messages as m

if TYPE_CHECKING:
    from astraflow.testing.simulator.process import Process
    from astraflow.testing.simulator.world import World

T = TypeVar("T")

UNWRITTEN_LOOKS, UNWRITTEN_LOOK_S = 400, 0.01
"""How long somebody waits for a transaction that is being written."""
UNDONE_LOOKS, UNDONE_LOOK_S = 80, 0.05
"""How long an operator waits for a trainer that comes back without a checkpoint."""
STATEMENTS = 60
"""A crash within a transaction comes after 0 to so many further statements."""


async def chaos(world: World) -> None:
    """The whole plan, then calm."""
    loop = asyncio.get_running_loop()
    for act in world.plan.acts:
        await asyncio.sleep(max(0.0, act.at_s - loop.time()))
        if await _happen(world, act):
            world.history.note(f"act {act.what} for {act.seconds:.3f} s")
            world.history.faults[f"act/{act.what}"] += 1
        world.check()
    await asyncio.sleep(max(0.0, world.plan.faults_stop_s - loop.time()))
    world.be_calm()


async def _happen(world: World, act: Act) -> bool:
    """Whether it could happen."""
    match act.what:
        case "dataflow":
            return world.dataflow.crash(act.seconds)
        case "dataflow_transaction":
            return _light_fuse(world, act)
        case "dataflow_unwritten":
            return await _die_unwritten(world, act)
        case "dataflow_paused":
            return world.host.pause(act.seconds)
        case "worker_told" | "trainer_told":
            told = _pick(_alive(world) if act.what == "worker_told" else list(world.trainers.values()), act.pick)
            return told is not None and told.tell(act.seconds)
        case "worker":
            worker = _pick(_alive(world), act.pick)
            return worker is not None and worker.crash(act.seconds)
        case "second_trainer":
            policy = _pick(sorted(world.trainers), act.pick)
            return policy is not None and world.second_trainer(policy, act.seconds)
        case "trainer" | "trainer_old_checkpoint":
            return _crash_trainer(world, act)
        case "cut":
            connection = _pick(list(world.current.values()), act.pick)
            if connection is not None:
                connection.cut(act.seconds)
            return connection is not None
        case "wall_jump":
            for clock in world.clocks:
                clock.jump_wall((act.pick - 0.5) * 1e6)
            return bool(world.clocks)
        case "slow_worker":
            worker = _pick(_alive(world), act.pick)
            if worker is not None:
                world.slow_until[worker.name] = asyncio.get_running_loop().time() + act.seconds
            return worker is not None
        case "disk_full":
            world.database.room = int(act.pick * STATEMENTS)
            asyncio.get_running_loop().call_later(act.seconds, _space_again, world)
            return True
        case "join":
            world.add_worker()
            return True
        case "leave":
            return _leave(world, act)
        case "drain":
            return await _drain(world, act)
        case "rollback":
            return await _roll_back(world, act)
    raise AssertionError(f"unknown act {act.what}")


def _light_fuse(world: World, act: Act) -> bool:
    if not world.dataflow.alive:
        return False
    world.database.light_fuse(int(act.pick * STATEMENTS), lambda: _boom(world, "in_transaction", act.seconds))
    return True


async def _die_unwritten(world: World, act: Act) -> bool:
    """A transaction is decided and not on disk: it is gone with the process, and nobody may have heard of it. Or it
    gets there, and nobody has heard of it either."""
    if not world.dataflow.alive:
        return False
    if act.pick < 0.5:
        world.database.die_when_written(lambda: _boom(world, "unanswered", act.seconds))
        return True
    for _ in range(UNWRITTEN_LOOKS):
        if world.database.is_writing:
            _boom(world, "unwritten", act.seconds)
            return True
        await asyncio.sleep(UNWRITTEN_LOOK_S)
    return False


def _space_again(world: World) -> None:
    world.database.room = None


def _boom(world: World, where: str, seconds: float) -> None:
    world.history.faults[f"act/died_{where}"] += 1
    world.history.note(f"dataflow dies {where}")
    world.dataflow.crash(seconds)


def _crash_trainer(world: World, act: Act) -> bool:
    policy = _pick(sorted(world.trainers), act.pick)
    if policy is None or not world.trainers[policy].crash(act.seconds):
        return False
    if act.what == "trainer_old_checkpoint" and lose_newest_checkpoint(world, policy):
        world.history.faults["act/checkpoint_lost"] += 1
    return True


def _leave(world: World, act: Act) -> bool:
    """The service was told to stop (SIGTERM): it drains by itself. Another one comes in its place."""
    worker = _pick(_alive(world), act.pick)
    if worker is None or worker.name not in world.services:
        return False
    world.services[worker.name].stop()
    return True


async def _drain(world: World, act: Act) -> bool:
    worker = _pick(_alive(world), act.pick)
    if worker is None:
        return False
    try:
        await world.host.operate(m.OperatorRequest(action="drain", worker=worker.name))
    except AstraFlowError:
        return False
    return True


async def _roll_back(world: World, act: Act) -> bool:
    """The operator stops the trainer, goes back one or two versions and throws newer checkpoints away."""
    policy = _pick(sorted(world.trainers), act.pick)
    if policy is None or world.trainers[policy].finished:
        return False
    if act.seconds < 5.0:  # let it come back without a checkpoint first: its undone batches then wait in line
        world.trainers[policy].crash(0.1)
        forget_checkpoints_after(world, policy, -1)
        await _until_undone(world, policy)
        if world.trainers[policy].finished:
            return False
    world.trainers[policy].crash(act.seconds)
    version = max(0, world.version(policy) - (1 if act.pick < 0.7 else 2))
    try:
        await world.host.operate(m.OperatorRequest(action="rollback", policy=policy, version=version))
    except AstraFlowError:
        return False
    forget_checkpoints_after(world, policy, version)
    return True


async def _until_undone(world: World, policy: str) -> None:
    """Its trainer has come back at version 0 and has not trained again what was undone; or there was nothing."""
    waiting = "SELECT COUNT(*) FROM batches WHERE policy = ? AND state = 'cut'"
    for _ in range(UNDONE_LOOKS):
        await asyncio.sleep(UNDONE_LOOK_S)
        if world.database.keeper.execute(waiting, (policy,)).fetchone()[0]:
            return


def _alive(world: World) -> list[Process]:
    return [worker for worker in world.workers if worker.alive]


def _pick(items: list[T], pick: float) -> T | None:
    return items[int(pick * len(items))] if items else None
