"""Dataflow, rollout services and every trainer in one event loop, by direct calls: for a debugger.

One rollout service; where the recipe has places, one a place, which ask each other as they would between machines.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from astraflow.dataflow.local import LocalDataflow
from astraflow.errors import RunFailed
from astraflow.rollout.service import RolloutService
from astraflow.run.config import Resolved
from astraflow.run.joined import initial_folder, need_trainers, place_of
from astraflow.run.layout import RunFolder
from astraflow.run.serve_average import build_average
from astraflow.run.serve_dataflow import open_service
from astraflow.run.serve_rollout import Serves, build_rollout
from astraflow.run.serve_trainer import build_trainer
from astraflow.trainer.average import AverageLoop
from astraflow.trainer.loop import TrainLoop
from astraflow.weights.object_store import ObjectStore
from astraflow.weights.store import DirStore, WeightStore
from astraflow.wire.messages import OperatorRequest, StatusReply
from astraflow.wire.protocol import Dataflow

POLL_S = 0.5


async def run_in_process(
    run: RunFolder,
    resolved: Resolved,
    *,
    watch: Callable[[StatusReply], None],
    tensorboard: bool = False,
    although_failed: bool = False,
) -> StatusReply:
    """The last status. Raises RunFailed, or whatever ended a component, with its traceback whole."""
    store = DirStore(run.weights)
    with tempfile.TemporaryDirectory(prefix="cache-", dir=run.path) as cache:
        async with open_service(run, resolved, store, tensorboard=tensorboard) as service:
            dataflow = LocalDataflow(service)
            run.endpoint.unlink(missing_ok=True)  # of an earlier dataflow, which is dead: here nobody can ask
            if although_failed:
                await dataflow.operate(OperatorRequest(action="resume"))
            weights: WeightStore = ObjectStore.open(resolved.recipe.store) if resolved.recipe.store else store
            rollouts = _rollouts(resolved, dataflow, weights, Path(cache))
            recipe = resolved.recipe
            joined = need_trainers(recipe, await dataflow.status())
            wanted = (*recipe.trainable, *recipe.averages, *joined) if recipe.steps else ()
            trainers = await trainers_of(wanted, run, resolved, dataflow, weights, Path(cache) / "averages")
            async with asyncio.TaskGroup() as tasks:
                components = [tasks.create_task(each.run()) for each in (*rollouts, *trainers)]
                last = await _follow(dataflow, watch)
                if last.state == "failed":
                    for component in components:
                        component.cancel()
            watch(last)
    if last.state == "failed":
        raise RunFailed(last.error or "the run failed without a cause")
    return last


def _rollouts(resolved: Resolved, dataflow: Dataflow, store: WeightStore, cache: Path) -> list[RolloutService]:
    places = resolved.recipe.places
    serves = [Serves(policies=place, port=0) for place in places] or [Serves()]
    return [
        build_rollout(resolved, dataflow, name=f"rollout-{n}", store=store, cache=cache / str(n), serves=each)
        for n, each in enumerate(serves)
    ]


async def trainers_of(
    policies: Iterable[str], run: RunFolder, resolved: Resolved, dataflow: Dataflow, store: WeightStore, cache: Path
) -> list[TrainLoop | AverageLoop]:
    """Of policies of the recipe, and of what has joined the run. ``cache``: of the averages among them."""
    recipe = resolved.recipe
    found: list[TrainLoop | AverageLoop] = []
    for policy in policies:
        place, folder = await place_of(recipe, dataflow, policy), run.checkpoints / policy
        if place.average_of:
            average = build_average(resolved, dataflow, place, store=store, folder=folder, cache=cache / policy)
            found.append(average)
            continue
        model = await initial_folder(recipe, dataflow, store, place, folder)
        found.append(
            build_trainer(
                resolved, dataflow, policy=policy, like=place.like, model=model, store=store, checkpoints=folder
            )
        )
    return found


async def _follow(dataflow: Dataflow, watch: Callable[[StatusReply], None]) -> StatusReply:
    while True:
        status = await dataflow.status()
        watch(status)
        if status.state != "running":
            return status
        await asyncio.sleep(POLL_S)
