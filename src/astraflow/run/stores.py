"""Where a process of a run reads and writes weights: the run's folder, dataflow, a bucket; by way of relays or not."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import ConfigError
from astraflow.run.config import Resolved
from astraflow.run.layout import RunFolder
from astraflow.run.recipe import Recipe
from astraflow.run.tls import server_context
from astraflow.weights.neighbours import Neighbours
from astraflow.weights.object_store import ObjectStore
from astraflow.weights.relay import RelayStore
from astraflow.weights.shelf import Shelf
from astraflow.weights.store import DirStore, HttpStore, WeightStore
from astraflow.wire.client import HttpDataflow, RelayLink
from astraflow.wire.names import require_name
from astraflow.wire.rate import ByteRate, rate_of_mbit
from astraflow.wire.serve_relay import RelayServer, relay_token
from astraflow.wire.tokens import from_environment


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How a rollout process shares weights with others: its command line's part of it."""

    region: str = ""
    relay_port: int | None = None
    """Of the data port, 0 is any free one; None: there is none."""
    relay_host: str = "127.0.0.1"
    relay_address: str = ""
    relay_gib: float = 16.0
    """Disk for files that only the relay still holds."""
    weights_mbit: float | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        if self.region:
            require_name(self.region, "--region")
        if self.relay_port is not None and not 0 <= self.relay_port < 65536:
            raise ConfigError(f"--relay-port must be in [0, 65535], found {self.relay_port}")
        if not 0 <= self.relay_gib < 1 << 20:
            raise ConfigError(f"--relay-gib must be in [0, {1 << 20}) GiB, found {self.relay_gib}")

    def rate(self) -> ByteRate | None:
        """Of all weights that this process sends and receives."""
        return rate_of_mbit(self.weights_mbit, "--weights-mbit")


def require_region(recipe: Recipe, region: str) -> None:
    """Raises ConfigError for a region that the recipe does not name; one that names none takes any."""
    if recipe.regions and region not in recipe.regions:
        raise ConfigError(
            f"region {region!r} is none of this recipe's: say --region with one of {', '.join(recipe.regions)}"
        )


def origin_store(
    recipe: Recipe, client: HttpDataflow, run_dir: Path | None, rate: ByteRate | None = None
) -> WeightStore:
    """What needs no other worker: the recipe's bucket, else the folder of a run on this machine, else dataflow."""
    if recipe.store:
        return ObjectStore.open(recipe.store, rate=rate)
    return HttpStore(client.weights) if run_dir is None else DirStore(RunFolder(run_dir).weights)


async def claim_store(run: RunFolder, recipe: Recipe) -> ObjectStore | None:
    """The recipe's bucket, whose files this run may delete; None: it has none. ConfigError if another run uses it."""
    if not recipe.store:
        return None
    store = ObjectStore.open(recipe.store, owner=True)
    await store.claim(f"{socket.gethostname()}:{run.path.resolve()}")
    return store


@asynccontextmanager
async def sharing_store(
    resolved: Resolved, sharing: Sharing, origin: WeightStore, *, cache: Path, ca: Path | None, rate: ByteRate | None
) -> AsyncIterator[RelayStore]:
    """``origin`` by way of relays, and its own data port for as long as the context lasts, where one is asked for."""
    require_region(resolved.recipe, sharing.region)
    token = relay_token(from_environment())
    neighbours = Neighbours(lambda url: RelayLink(url, token, ca=ca, rate=rate), region=sharing.region)
    shelf = None
    if sharing.relay_port is not None:
        shelf = Shelf(cache / "relay", limit_bytes=int(sharing.relay_gib * (1 << 30)))
    store = RelayStore(origin, neighbours, shelf=shelf, origin_is_near=isinstance(origin, DirStore))
    server: RelayServer | None = None
    try:
        if sharing.relay_port is not None:
            server = RelayServer(
                store,
                store.pull,
                token=token,
                host=sharing.relay_host,
                port=sharing.relay_port,
                address=sharing.relay_address,
                ssl=server_context(sharing.tls_cert, sharing.tls_key),
                rate=rate,
            )
            await server.start()
            store.url = server.url
        yield store
    finally:
        if server is not None:
            await server.close()
        await store.close()
