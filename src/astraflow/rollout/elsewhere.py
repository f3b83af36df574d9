"""Policies that other workers serve: an Engine per policy that asks their endpoints.

Where they are, dataflow tells with every heartbeat. One that does not answer is left out until it answers again;
a policy without any is not offered in the capabilities, so that no further lease needs it. A request is asked again
elsewhere, within one budget: replies depend on the request alone, so asking twice does no harm.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from astraflow.engines.base import EngineInfo, GenerateReply, GenerateRequest
from astraflow.errors import AstraFlowError, EngineFailed, Unavailable
from astraflow.types import Manifest
from astraflow.wire.codec import encode
from astraflow.wire.transport import Retry, Transport

PATH = "/v1/policies"
REPLY_BYTES = 64 << 20
ONCE = Retry(budget_s=600.0, attempts=1)
"""Asking again is decided here, not by the transport (F87)."""
INFO_S = 2.0
"""Of a heartbeat, which must not be late."""
PAUSE_S = 0.2


class RemoteEngine:
    """``Engine`` of one policy over the endpoints that are known; its weights are somebody else's business."""

    def __init__(
        self, policy: str, *, token: str | None, patience_s: float = 30.0, trust: ssl.SSLContext | None = None
    ) -> None:
        """``patience_s``: how long one request looks for an endpoint that answers. ``trust``: for those with TLS."""
        self.policy = policy
        self._token, self._trust = token, trust
        self._patience_s = patience_s
        self._places: dict[str, Transport] = {}
        self._live: dict[str, EngineInfo] = {}
        self._seen: EngineInfo | None = None
        self._turn = itertools.count()

    @property
    def is_reachable(self) -> bool:
        return bool(self._live)

    async def know(self, urls: Sequence[str]) -> None:
        """Where it is served now; every place is asked whether it answers."""
        for url in [known for known in self._places if known not in urls]:
            self._live.pop(url, None)
            await self._places.pop(url).close()
        for url in urls:
            if url not in self._places:
                self._places[url] = Transport(
                    url, self._token, retry=ONCE, timeout_s=600.0, connections=0, ssl_context=self._trust
                )
        await asyncio.gather(*(self._look(url) for url in urls))

    async def _look(self, url: str) -> None:
        try:
            async with asyncio.timeout(INFO_S):
                info = await self._places[url].fetch(f"{PATH}/{self.policy}", EngineInfo, limit_bytes=1 << 20)
        except (AstraFlowError, TimeoutError):
            self._live.pop(url, None)
            return
        if info.versions:
            self._live[url] = info
            self._seen = min(self._live.values(), key=lambda each: each.max_context)

    def info(self) -> EngineInfo:
        """What every place can do: the shortest context. Raises EngineFailed when none was ever reached."""
        if self._seen is None:
            raise EngineFailed(f"{self.policy}: no worker that serves it can be reached from here")
        return self._seen

    async def start(self) -> None: ...

    async def load(self, manifest: Manifest, files: list[Path]) -> None:
        raise EngineFailed(f"{self.policy} is served by other workers, which load its weights themselves")

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Raises BadRequest and NotFound as the engine does, Unavailable when no place answered in time."""
        body = encode(request)
        path = f"{PATH}/{self.policy}/generate"
        last: Exception | None = None
        try:
            async with asyncio.timeout(self._patience_s) as patience:
                while True:
                    url = self._next()
                    if url is None:
                        await asyncio.sleep(PAUSE_S)
                        continue
                    patience.reschedule(None)  # somebody is there: his work may take as long as the episode may
                    try:
                        return await self._places[url].call(path, body, GenerateReply, limit_bytes=REPLY_BYTES)
                    except Unavailable as error:
                        last = error
                        self._live.pop(url, None)
                        patience.reschedule(asyncio.get_running_loop().time() + self._patience_s)
        except TimeoutError as error:
            raise Unavailable(
                f"{self.policy}: no worker that serves it answered within {self._patience_s:g} s"
                + (f" (last: {last})" if last else "")
            ) from error

    def _next(self) -> str | None:
        """Places in turn."""
        live = sorted(self._live)
        return live[next(self._turn) % len(live)] if live else None

    async def close(self) -> None:
        self._live.clear()
        for place in self._places.values():
            await place.close()
        self._places.clear()


class Endpoint(Protocol):
    """What is used of ``rollout.endpoint.PolicyEndpoint``."""

    @property
    def url(self) -> str: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Elsewhere:
    """A worker's place among others: what it plays but does not serve, and what it serves to others."""

    def __init__(self, engines: Iterable[RemoteEngine] = (), endpoint: Endpoint | None = None) -> None:
        self.engines = {engine.policy: engine for engine in engines}
        self._endpoint = endpoint

    @property
    def url(self) -> str:
        """Of the own endpoint; empty: it has none."""
        return "" if self._endpoint is None else self._endpoint.url

    @property
    def reachable(self) -> tuple[str, ...]:
        return tuple(policy for policy, engine in self.engines.items() if engine.is_reachable)

    async def know(self, endpoints: Mapping[str, Sequence[str]]) -> None:
        await asyncio.gather(*(engine.know(endpoints.get(policy, ())) for policy, engine in self.engines.items()))

    async def start(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.start()

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()
        for engine in tuple(self.engines.values()):
            await engine.close()
