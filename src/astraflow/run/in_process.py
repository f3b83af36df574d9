"""Dataflow, one rollout service and every trainer in one event loop, by direct calls: for a debugger."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from astraflow.dataflow.local import LocalDataflow
from astraflow.errors import RunFailed
from astraflow.run.config import Resolved
from astraflow.run.layout import RunFolder
from astraflow.run.serve_dataflow import open_service
from astraflow.run.serve_rollout import build_rollout
from astraflow.run.serve_trainer import build_trainer
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
            if although_failed:
                await dataflow.operate(OperatorRequest(action="resume"))
            weights: WeightStore = ObjectStore.open(resolved.recipe.store) if resolved.recipe.store else store
            rollout = build_rollout(resolved, dataflow, name="rollout-0", store=weights, cache=Path(cache))
            recipe = resolved.recipe
            trainers = [
                build_trainer(resolved, dataflow, policy=policy, store=weights, checkpoints=run.checkpoints / policy)
                for policy in (recipe.trainable if recipe.steps else ())
            ]
            async with asyncio.TaskGroup() as tasks:
                components = [tasks.create_task(rollout.run()), *(tasks.create_task(each.run()) for each in trainers)]
                last = await _follow(dataflow, watch)
                if last.state == "failed":
                    for component in components:
                        component.cancel()
            watch(last)
    if last.state == "failed":
        raise RunFailed(last.error or "the run failed without a cause")
    return last


async def _follow(dataflow: Dataflow, watch: Callable[[StatusReply], None]) -> StatusReply:
    while True:
        status = await dataflow.status()
        watch(status)
        if status.state != "running":
            return status
        await asyncio.sleep(POLL_S)
