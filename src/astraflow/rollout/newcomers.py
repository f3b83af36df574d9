"""Policies that join the run while this worker is at work: made, loaded, and only then offered to play.

    heartbeat ─ added ─► make an engine, or find who else serves it ─► its weights are loaded ─► in the capabilities

One that cannot be made or loaded is told, left out, and tried again with a later heartbeat; what the worker serves
already is not touched by it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from astraflow.engines.base import Engine
from astraflow.errors import AstraFlowError
from astraflow.rollout.cast import Cast
from astraflow.rollout.elsewhere import Elsewhere, RemoteEngine
from astraflow.rollout.served import ServedPolicy
from astraflow.rollout.template import ChatTemplate
from astraflow.wire.messages import AddedPolicy, ManifestRequest
from astraflow.wire.protocol import Dataflow

log = logging.getLogger("astraflow.rollout")

AGAIN_S = 10.0
LOAD_S = 600.0

Make = Callable[[AddedPolicy], tuple[ServedPolicy | RemoteEngine, ChatTemplate]]
"""Blocking. Raises ConfigError."""


@dataclass(kw_only=True, slots=True)
class Newcomers:
    """``policies`` and ``cast`` are the worker's own: what is put there is served."""

    make: Make
    policies: dict[str, ServedPolicy]
    cast: Cast
    elsewhere: Elsewhere
    dataflow: Dataflow
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def hear(self, added: Iterable[AddedPolicy], tasks: asyncio.TaskGroup) -> None:
        """With every heartbeat: all that have ever joined."""
        for each in added:
            if each.name not in self._tasks:
                self._tasks[each.name] = tasks.create_task(self._join(each), name=f"join {each.name}")

    def leave(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _join(self, added: AddedPolicy) -> None:
        """Follows its weights for as long as the worker lives."""
        while True:
            try:
                made, template = await asyncio.to_thread(self.make, added)
                if isinstance(made, RemoteEngine):
                    self._ready(added, made, template)
                    self.elsewhere.engines[added.name] = made
                    return
                await self._serve(added, made, template)
            except AstraFlowError as error:
                log.warning("join_failed policy=%s again_in_s=%.0f: %s", added.name, AGAIN_S, error)
                await asyncio.sleep(AGAIN_S)

    async def _serve(self, added: AddedPolicy, made: ServedPolicy, template: ChatTemplate) -> None:
        follower: asyncio.Task[None] | None = None
        try:
            await made.engine.start()
            made.subscriber.offer(await self.dataflow.manifest(ManifestRequest(policy=added.name)))
            follower = asyncio.ensure_future(made.subscriber.run())
            await made.subscriber.until_loaded(0, deadline_s=LOAD_S)
            self._ready(added, made.engine, template)
            self.policies[added.name] = made
            await follower
        finally:
            if follower is not None:
                follower.cancel()
            if added.name not in self.policies:
                await made.engine.close()

    def _ready(self, added: AddedPolicy, engine: Engine, template: ChatTemplate) -> None:
        self.cast.join(added.name, engine, template)
        log.info("joined policy=%s like=%s", added.name, added.like)
