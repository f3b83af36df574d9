"""One life of each kind of process: what its ``main`` does with the real components, until it returns or dies."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from astraflow.engines.base import Engine
from astraflow.rollout.agents import Seat
from astraflow.rollout.play import Player, WorkflowPlayer
from astraflow.rollout.served import Load, ServedPolicy
from astraflow.rollout.service import RolloutService
from astraflow.rollout.settings import RolloutSettings
from astraflow.testing.fake_backend import FakeBackend
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.simulator.parts import VOCABULARY, Duel
from astraflow.testing.simulator.plan import PolicyPlan
from astraflow.testing.simulator.process import Life
from astraflow.trainer.checkpoints import Checkpoints
from astraflow.trainer.loop import TrainerIdentity, TrainLoop
from astraflow.types import Batch, Manifest, Sampling
from astraflow.weights.publish import Publisher
from astraflow.weights.subscribe import Subscriber
from astraflow.wire.goodbye import TOLD
from astraflow.wire.messages import Capabilities
from astraflow.workflows.supervised import NAME, Supervised

if TYPE_CHECKING:
    from astraflow.testing.simulator.world import World

CONTEXT = 64
SAMPLING = Sampling(max_tokens=10)


async def worker_life(world: World, name: str, life: Life) -> None:
    dice = world.dice(f"{name}/{life.number}")
    clock = world.clock()
    connection = world.connect(name, life)
    policies = {
        plan.name: _served(world, name, plan.name, life, tick_s=dice.choice((0.01, 0.05, 0.2)))
        for plan in world.plan.policies
    }
    seats = {
        role: Seat(policy=policy, engine=policies[policy].engine, template=world.template, sampling=SAMPLING)
        for role, policy in world.spec.roles.items()
    }
    workflow = Duel(rng=dice, faults=world.plan.workflow_faults, pause_s=lambda: world.pause_s(name))

    async def hold(policy: str, version: int) -> None:
        await service.hold(policy, version)

    player = WorkflowPlayer(workflow=workflow, seats=seats, hold=hold, clock=clock)
    players: dict[str, Player] = {"": player, NAME: Supervised(dict.fromkeys(policies, world.template))}
    service = RolloutService(
        name=name,
        incarnation=f"{name}#{life.number}",
        dataflow=connection,
        players=players,
        policies=policies,
        capabilities=Capabilities(policies=tuple(policies), max_context=CONTEXT),
        settings=RolloutSettings(slots=world.plan.slots, sampling=SAMPLING, patience_s=60.0),
        clock=clock,
    )
    world.services[name] = service
    life.stop = service.stop
    await service.run()


def _served(world: World, name: str, policy: str, life: Life, *, tick_s: float) -> ServedPolicy:
    def may_load(manifest: Manifest) -> None:
        life.check()

    engine: Engine = FakeEngine(
        policy=policy,
        slots=world.plan.slots,
        vocabulary=VOCABULARY,
        max_context=CONTEXT,
        tick_s=tick_s,
        load_s=0.1,
        versions_held=2 if world.plan.version_choice else 1,
        before_load=may_load,
    )

    def follow(load: Load) -> Subscriber:
        return Subscriber(policy, world.store, world.folder / name / policy, load, seed=life.number)

    return ServedPolicy(policy, engine, follow)


async def trainer_life(world: World, plan: PolicyPlan, life: Life, *, second: str = "") -> None:
    """``second``: which one, of those that are started beside another; each has the same name and files."""
    backend = FakeBackend(
        before_step=_before_step(world, plan.name, life), is_dull=lambda batch: _is_dull(world, batch)
    )
    name = f"trainer-{plan.name}"
    loop = TrainLoop(
        identity=TrainerIdentity(policy=plan.name, name=name, incarnation=f"{name}{second}#{life.number}"),
        dataflow=world.connect(f"{name}{second}", life),
        backend=backend,
        publisher=Publisher(world.store, plan.name),
        checkpoints=checkpoints(world, plan.name),
        checkpoint_every=plan.checkpoint_every,
        clock=world.clock(),
    )
    work = asyncio.ensure_future(loop.run())
    life.stop = work.cancel
    try:
        await work
    except asyncio.CancelledError:
        work.cancel()
        if life.dead or not life.comes_back:  # killed, not told
            raise
        await loop.say_goodbye(TOLD)


def checkpoints(world: World, policy: str) -> Checkpoints:
    return Checkpoints(world.folder / f"checkpoints-{policy}", kept=2)


def lose_newest_checkpoint(world: World, policy: str) -> bool:
    """The disk lost it: the next start finds an older one, or none."""
    found = checkpoints(world, policy).newest()
    if found is None:
        return False
    shutil.rmtree(found[1])
    return True


def forget_checkpoints_after(world: World, policy: str, version: int) -> None:
    while (found := checkpoints(world, policy).newest()) is not None and found[0] > version:
        shutil.rmtree(found[1])


def surviving_backend(world: World, policy: str) -> FakeBackend:
    """What a trainer would find if it were started once more."""
    backend = FakeBackend()
    found = checkpoints(world, policy).newest()
    if found is not None:
        backend.load(found[1])
    return backend


def _before_step(world: World, policy: str, life: Life) -> Callable[[Batch], None]:
    def check(batch: Batch) -> None:
        life.check()
        if world.plan.poison and batch.version == 1 and world.poisoned[policy] < 2:
            world.poisoned[policy] += 1
            world.history.faults["poison"] += 1
            raise MemoryError("this batch does not fit")

    return check


def _is_dull(world: World, batch: Batch) -> bool:
    """Depends on the batch alone: issued again it is dull again."""
    dull = world.dice(f"dull/{batch.policy}/{batch.id}").random() < world.plan.dull
    world.history.faults["dull"] += dull
    return dull


def write_version_0(folder: Path) -> tuple[list[Path], str]:
    """What the launcher publishes before anything starts."""
    folder.mkdir(parents=True)
    backend = FakeBackend()
    return backend.export(folder), backend.digest()
