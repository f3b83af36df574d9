"""The dataflow process: service, its clock, the HTTP server, the recorder and the store's housekeeping."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl as ssl_module
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.service import DataflowService
from astraflow.errors import AstraFlowError
from astraflow.observe.metrics import Registry
from astraflow.observe.waits import Wait
from astraflow.run.child import LIFELINE
from astraflow.run.config import Resolved
from astraflow.run.initial import read_initial
from astraflow.run.layout import RunFolder, write_json
from astraflow.run.logs import configure_logging
from astraflow.run.over import stored_name
from astraflow.run.recorder import Recorder
from astraflow.run.registry import fill_registry
from astraflow.run.run_db import readable
from astraflow.run.spec import run_spec
from astraflow.run.stores import claim_store
from astraflow.types import Manifest
from astraflow.weights.store import DirStore, WeightStore
from astraflow.wire.messages import StatusReply
from astraflow.wire.rate import ByteRate
from astraflow.wire.server import Server
from astraflow.wire.tokens import Tokens

log = logging.getLogger("astraflow.dataflow")

COLLECT_S = 20.0
LOOK_S = 1.0
LEAVE_S = 60.0
"""How long a dataflow without a launcher stays up after the end, for workers to hear of it."""


async def serve_dataflow(
    run: RunFolder,
    resolved: Resolved,
    *,
    host: str,
    port: int,
    ssl: ssl_module.SSLContext | None = None,
    tensorboard: bool = False,
    rate: ByteRate | None = None,
) -> int:
    """Until SIGTERM; without a launcher, until the run has ended and its workers have left. Exit code."""
    configure_logging()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    store = DirStore(run.weights)
    async with open_service(run, resolved, store, tensorboard=tensorboard) as service:
        registry = Registry()
        server = Server(
            LocalDataflow(service),
            store,
            host=host,
            port=port,
            tokens=Tokens.read(run.path),
            ssl=ssl,
            rate=rate,
            metrics=lambda: registry.prometheus({"run": run.name}),
        )
        await server.start()
        try:
            write_json(run.endpoint, {"url": server.url, "pid": os.getpid()})
            log.info("listening url=%s run=%s", server.url, run.path)
            return await _until_over(service, registry, stop)
        finally:
            await server.close()


@asynccontextmanager
async def open_service(
    run: RunFolder, resolved: Resolved, store: DirStore, *, tensorboard: bool = False
) -> AsyncIterator[DataflowService]:
    """The service with version 0 published, its time passing, its recorder writing. A bug in any of them ends it."""
    initial = read_initial(run)
    stores: list[WeightStore] = [each for each in (store, await claim_store(run, resolved.recipe)) if each is not None]
    with readable(run.database):
        service = DataflowService.open(run_spec(resolved, stored_name(run)), run.path, in_thread=True)
    recorder = Recorder(run, tensorboard=tensorboard)
    try:
        for manifest in initial.values():
            await service.publish_initial(manifest)
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(service.run()),
                tasks.create_task(recorder.follow()),
                tasks.create_task(_collect(service, stores, tuple(initial.values()))),
            ]
            try:
                yield service
            finally:
                for helper in helpers:
                    helper.cancel()
    finally:
        recorder.close()
        await service.close()


async def _collect(service: DataflowService, stores: Sequence[WeightStore], always: tuple[Manifest, ...]) -> None:
    """Delete weight files that nothing needs any more; version 0 stays."""
    while True:
        await asyncio.sleep(COLLECT_S)
        spare_s = publishing_s(await service.status())
        live = (*always, *await service.live_manifests())
        keep = {file.sha256 for manifest in live for file in manifest.stored}
        for store in stores:
            try:
                await store.collect(keep, spare_s=spare_s)
            except (AstraFlowError, OSError) as error:
                # Out of reach, or credentials that have run out: it is tidied another time; nothing waits for it.
                log.warning("collect_failed error=%s", error)


def publishing_s(status: StatusReply) -> float:
    """For how long, at most, a living trainer has been storing a version that no manifest names yet."""
    busy = (Wait.PUBLISH.value, Wait.COMMIT.value)
    alive = [each for each in status.components if each.state == "alive" and each.report.doing in busy]
    return max((each.report.since_s + each.heard_s for each in alive), default=0.0)


async def _until_over(service: DataflowService, registry: Registry, stop: asyncio.Event) -> int:
    loop = asyncio.get_running_loop()
    ended_at: float | None = None
    while not stop.is_set():
        status = await service.status()
        fill_registry(registry, status)
        if status.state != "running" and ended_at is None:
            ended_at = loop.time()
            log.info("run %s %s", status.state, status.error or "")
        alone = ended_at is not None and not os.environ.get(LIFELINE)
        if alone and (not _anybody(status) or loop.time() - (ended_at or 0.0) > LEAVE_S):
            return 0 if status.state == "finished" else 1
        try:
            await asyncio.wait_for(stop.wait(), LOOK_S)
        except TimeoutError:
            continue
    return 0


def _anybody(status: StatusReply) -> bool:
    return any(each.state == "alive" for each in status.components if each.component != "dataflow")
