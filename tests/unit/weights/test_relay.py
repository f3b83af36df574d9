"""Weights by way of other workers: nearest first, the origin whenever that fails, and never a byte that is wrong."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from astraflow.errors import ConfigError, DigestMismatch, NotFound, StorageFull, Unavailable
from astraflow.run.chaos.proxy import Proxy
from astraflow.testing.check_store import check_store, content, write
from astraflow.types import WeightFile
from astraflow.weights import shelf as shelf_module
from astraflow.weights.neighbours import Neighbours, Patience
from astraflow.weights.relay import RelayStore
from astraflow.weights.shelf import Shelf
from astraflow.weights.store import DirStore
from astraflow.wire.client import RelayLink
from astraflow.wire.messages import RelayPlace
from astraflow.wire.serve_relay import RelayServer, relay_token

TOKEN = relay_token("a worker's token of a run")
PATIENCE = Patience(silence_s=1.0, slowest_bytes_per_s=1e6, rest_s=60.0)


class Origin:
    """A folder that counts who asks, and can be slow or out of reach."""

    def __init__(self, folder: Path) -> None:
        self.inner = DirStore(folder)
        self.asked: list[str] = []
        self.down = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def put(self, path: Path, *, may_link: bool = False) -> WeightFile:
        return await self.inner.put(path, may_link=may_link)

    async def get(self, file: WeightFile, into: Path) -> None:
        self.asked.append(file.sha256)
        await self.gate.wait()
        if self.down:
            raise Unavailable("the origin did not answer")
        await self.inner.get(file, into)

    async def has(self, sha256: str) -> bool:
        return await self.inner.has(sha256)

    async def collect(self, keep: Any, *, spare_s: float = 0.0) -> int:
        return await self.inner.collect(keep, spare_s=spare_s)


class Region:
    """Workers over one origin, each with or without a data port."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path
        self.origin = Origin(tmp_path / "origin")
        self.servers: list[RelayServer] = []
        self.stores: list[RelayStore] = []
        self.places: list[RelayPlace] = []

    async def file(self, size: int = 300_000, *, seed: int = 0) -> WeightFile:
        return await self.origin.put(write(self.path, f"f{seed}.safetensors", content(size, seed=seed)))

    def worker(self, region: str = "eu", *, patience: Patience = PATIENCE, shelf: Shelf | None = None) -> RelayStore:
        neighbours = Neighbours(lambda url: RelayLink(url, TOKEN), region=region, patience=patience)
        store = RelayStore(self.origin, neighbours, shelf=shelf)
        store.know(self.places)
        self.stores.append(store)
        return store

    async def relay(self, name: str, region: str = "eu", *, limit_bytes: int = 1 << 30) -> RelayStore:
        store = self.worker(region, shelf=Shelf(self.path / f"shelf-{name}", limit_bytes=limit_bytes))
        await self.announce(name, store, store.pull, region)
        return store

    async def announce(self, name: str, files: Any, pull: Any, region: str = "eu") -> RelayPlace:
        server = RelayServer(files, pull, token=TOKEN)
        await server.start()
        self.servers.append(server)
        return self.know(RelayPlace(worker=name, incarnation=f"{name}-1", url=server.url, region=region))

    def know(self, place: RelayPlace) -> RelayPlace:
        self.places.append(place)
        for store in self.stores:
            store.know(self.places)
        return place

    async def close(self) -> None:
        for server in self.servers:
            await server.close()
        for store in self.stores:
            await store.close()


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[Region]:
    region = Region(tmp_path)
    try:
        yield region
    finally:
        await region.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(main())


async def got(store: RelayStore, file: WeightFile, into: Path) -> bytes:
    await store.get(file, into)
    data = await asyncio.to_thread(into.read_bytes)
    assert hashlib.sha256(data).hexdigest() == file.sha256
    return data


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".part")]


@pytest.mark.parametrize("with_port", [False, True])
def test_relay_store_conforms(tmp_path: Path, with_port: bool) -> None:
    """With and without a data port of its own, a relay beside it."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    async def scenario() -> None:
        async with opened(tmp_path) as region:
            await region.relay("r")
            await check_store(region.worker(), await region.relay("s") if with_port else region.worker(), scratch)

    run(scenario)


def test_a_region_crosses_the_link_once(tmp_path: Path) -> None:
    """Ten workers begin at once, nobody holds the file: the origin is read by the relay alone."""

    async def scenario() -> None:
        async with opened(tmp_path) as region:
            relay = await region.relay("r")
            file = await region.file(3 << 20)
            workers = [region.worker() for _ in range(10)]
            await asyncio.gather(*(got(each, file, tmp_path / f"w{n}") for n, each in enumerate(workers)))
            assert region.origin.asked == [file.sha256]
            assert relay.metrics()["weights/bytes/origin"] == file.size_bytes
            assert all(each.metrics()["weights/bytes/relay"] == file.size_bytes for each in workers)
            assert not leftovers(tmp_path)

    run(scenario)


def test_the_relays_own_pull_and_what_others_ask_are_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region:
            relay = await region.relay("r")
            file = await region.file()
            region.origin.gate.clear()
            pulls = asyncio.gather(got(relay, file, tmp_path / "own"), got(region.worker(), file, tmp_path / "other"))
            await asyncio.sleep(0.3)
            region.origin.gate.set()
            assert len(set(await pulls)) == 1
            assert region.origin.asked == [file.sha256]

    run(scenario)


def test_two_who_take_a_file_into_one_folder_do_not_take_each_other_s(tmp_path: Path) -> None:
    """Each links to a name of its own before the file is looked at and moved to its place."""
    shelf, data = Shelf(tmp_path / "shelf", limit_bytes=1 << 30), bytes(range(256)) * 4096
    file = WeightFile(name="w", sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    (tmp_path / "source").write_bytes(data)
    shelf.add(file, tmp_path / "source")
    with ThreadPoolExecutor(8) as pool:
        places = [tmp_path / f"taken-{n}" for n in range(160)]
        assert all(pool.map(lambda into: shelf.lend(file, into), places))
    assert {place.read_bytes() for place in places} == {data}
    assert not list(tmp_path.glob(".part*"))


def test_relays_never_wait_for_each_other_in_a_circle(tmp_path: Path) -> None:
    """Each knows the others; all begin at once: every one ends, by the origin or by one that holds the file."""

    async def scenario() -> None:
        async with opened(tmp_path) as region:
            relays = [await region.relay(f"r{n}") for n in range(4)]
            file = await region.file()
            await asyncio.gather(*(got(each, file, tmp_path / f"w{n}") for n, each in enumerate(relays)))
            assert 1 <= len(region.origin.asked) <= 4
            late = await region.relay("late")
            before = len(region.origin.asked)
            await got(late, file, tmp_path / "late")
            assert len(region.origin.asked) == before

    run(scenario)


def test_other_regions_are_asked_only_when_the_origin_is_down(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region:
            far = await region.relay("far", "us")
            file = await region.file()
            await got(far, file, tmp_path / "far-own")
            worker = region.worker("eu")
            await got(worker, file, tmp_path / "a")
            assert len(region.origin.asked) == 2
            region.origin.down = True
            await got(worker, file, tmp_path / "b")
            assert worker.metrics()["weights/bytes/relay"] == file.size_bytes
            other = await region.file(seed=1)
            with pytest.raises(Unavailable, match="origin"):
                await worker.get(other, tmp_path / "c")
            assert not (tmp_path / "c").exists()

    run(scenario)


def test_an_origin_on_the_same_disk_is_nearer_than_any_relay(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region:
            relay = await region.relay("r")
            file = await region.file()
            await got(relay, file, tmp_path / "own")
            neighbours = Neighbours(lambda url: RelayLink(url, TOKEN), region="eu", patience=PATIENCE)
            worker = RelayStore(region.origin, neighbours, origin_is_near=True)
            region.stores.append(worker)
            worker.know(region.places)
            await got(worker, file, tmp_path / "a")
            assert len(region.origin.asked) == 2 and "weights/bytes/relay" not in worker.metrics()
            region.origin.down = True
            await got(worker, file, tmp_path / "b")
            assert worker.metrics()["weights/bytes/relay"] == file.size_bytes

    run(scenario)


def test_a_shelf_that_rots_is_found_out_by_whoever_reads_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region:
            relay = await region.relay("r")
            file = await region.file()
            await got(relay, file, tmp_path / "own")
            held = relay.path(file.sha256)
            assert held is not None
            held.unlink()
            held.write_bytes(bytes(file.size_bytes))
            worker = region.worker()
            await got(worker, file, tmp_path / "a")
            assert worker.metrics()["relay/dropped"] == 1
            await got(relay, file, tmp_path / "again")  # and it heals when its own worker wants the file
            healed = relay.path(file.sha256)
            assert healed is not None and hashlib.sha256(healed.read_bytes()).hexdigest() == file.sha256

    run(scenario)


class Liar:
    """Says that it has every file, and serves bytes of its own."""

    def __init__(self, folder: Path, data: bytes) -> None:
        self._path = folder / "lie"
        self._path.write_bytes(data)

    def path(self, sha256: str) -> Path:
        return self._path


LIES = {
    "other-bytes": lambda data: bytes(len(data)),
    "one-bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "longer": lambda data: data + b"x",
    "shorter": lambda data: data[:-1],
    "empty": lambda data: b"",
}
OF_ANOTHER_SIZE = {"longer", "shorter", "empty"}


@pytest.mark.parametrize("lie", LIES)
def test_a_relay_that_lies_is_dropped_loudly_and_does_no_harm(
    tmp_path: Path, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region:
            file = await region.file()
            data = (tmp_path / "f0.safetensors").read_bytes()
            liar = Liar(tmp_path, LIES[lie](data))
            place = await region.announce("liar", liar, lambda *_: None)
            worker = region.worker()
            assert await got(worker, file, tmp_path / "a") == data
            again = await region.file(seed=1)
            await got(worker, again, tmp_path / "b")
            assert region.origin.asked == [file.sha256, again.sha256]
            assert not leftovers(tmp_path)
            metrics = worker.metrics()
            if lie in OF_ANOTHER_SIZE:  # not this file: who asked may have been told a wrong size himself
                assert not {"relay/failed", "relay/dropped", "weights/bytes/relay"} & metrics.keys()
                return
            assert metrics["relay/dropped"] == 1
            (error,) = [each for each in caplog.records if each.levelno == logging.ERROR]
            assert "relay_dropped worker=liar" in error.getMessage() and place.url in error.getMessage()
            # Another process at the same address is another relay.
            region.places.clear()
            region.know(RelayPlace(worker="liar", incarnation="liar-2", url=place.url, region="eu"))
            await got(worker, await region.file(seed=2), tmp_path / "c")
            assert worker.metrics()["relay/dropped"] == 2

    run(scenario)


def test_a_lie_is_not_mixed_with_good_bytes(tmp_path: Path) -> None:
    """The liar's half is not what the origin's pull goes on with."""

    async def scenario() -> None:
        async with opened(tmp_path) as region:
            good = await region.relay("good")
            file = await region.file(2 << 20)
            await got(good, file, tmp_path / "own")
            await region.announce("liar", Liar(tmp_path, bytes(file.size_bytes)), lambda *_: None)
            await got(region.worker(), file, tmp_path / "a")

    run(scenario)


async def proxied(region: Region, relay: RelayStore) -> tuple[Proxy, RelayPlace]:
    proxy = Proxy()
    port = await proxy.open()
    host, target = region.servers[0].url.removeprefix("http://").split(":")
    proxy.lead_to(host, int(target))
    region.places.clear()
    return proxy, region.know(
        RelayPlace(worker="r", incarnation="r-1", url=f"http://127.0.0.1:{port}", region=relay.region)
    )


def test_a_relay_that_is_cut_off_rests_and_the_origin_serves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region:
            relay = await region.relay("r")
            file = await region.file(8 << 20)
            await got(relay, file, tmp_path / "own")
            proxy, _ = await proxied(region, relay)
            worker = region.worker(patience=Patience(silence_s=3.0, slowest_bytes_per_s=1e6, rest_s=60.0))
            proxy.slow = True
            pull = asyncio.create_task(got(worker, file, tmp_path / "a"))
            await asyncio.sleep(0.6)
            proxy.cut = True
            await pull
            assert worker.metrics()["relay/failed"] == 1
            assert region.origin.asked == [file.sha256] * 2
            before = asyncio.get_running_loop().time()
            await got(worker, await region.file(seed=1), tmp_path / "b")
            assert asyncio.get_running_loop().time() - before < 2.0
            assert not leftovers(tmp_path)
            await proxy.close()

    run(scenario)


def test_a_slow_relay_is_given_up(tmp_path: Path) -> None:
    """Bytes keep coming, so that no silence ends it: the whole download has a limit."""

    async def scenario() -> None:
        async with opened(tmp_path) as region:
            relay = await region.relay("r")
            file = await region.file(2 << 20)
            await got(relay, file, tmp_path / "own")
            proxy, _ = await proxied(region, relay)
            proxy.slow = True
            worker = region.worker(patience=Patience(silence_s=0.5, slowest_bytes_per_s=4e6, rest_s=60.0))
            await got(worker, file, tmp_path / "a")
            assert region.origin.asked == [file.sha256] * 2 and worker.metrics()["relay/failed"] == 1
            await proxy.close()

    run(scenario)


def test_a_relay_that_stands_still_while_it_gets_a_file_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region:
            file = await region.file()
            await region.announce("stuck", Nothing(), lambda *_: 5)
            worker = region.worker(patience=Patience(silence_s=0.5, slowest_bytes_per_s=1e6, rest_s=60.0))
            await got(worker, file, tmp_path / "a")
            assert region.origin.asked == [file.sha256] and worker.metrics()["relay/failed"] == 1

    run(scenario)


def test_a_relay_that_tells_a_byte_more_each_time_is_given_up(tmp_path: Path) -> None:
    """It is never silent, and never done."""

    async def scenario() -> None:
        async with opened(tmp_path) as region:
            file = await region.file()
            told = iter(range(file.size_bytes))
            await region.announce("drip", Nothing(), lambda *_: next(told))
            worker = region.worker(patience=Patience(silence_s=0.8, slowest_bytes_per_s=1e6, rest_s=60.0))
            async with asyncio.timeout(10):
                await got(worker, file, tmp_path / "a")
            assert region.origin.asked == [file.sha256] and worker.metrics()["relay/failed"] == 1

    run(scenario)


class Nothing:
    def path(self, sha256: str) -> None:
        return None


def test_dead_relays_cost_little(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region:
            await region.relay("r")
            await region.servers[0].close()
            worker = region.worker()
            began = asyncio.get_running_loop().time()
            for seed in range(3):
                await got(worker, await region.file(seed=seed), tmp_path / f"w{seed}")
            assert asyncio.get_running_loop().time() - began < 5.0
            assert worker.metrics()["relay/failed"] == 1

    run(scenario)


def test_what_the_origin_does_not_know_is_brought_by_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region:
            relay = await region.relay("r")
            absent = WeightFile(name="absent.safetensors", sha256="0" * 64, size_bytes=10)
            with pytest.raises(NotFound):
                await region.worker().get(absent, tmp_path / "a")
            with pytest.raises(NotFound):
                await relay.get(absent, tmp_path / "b")
            assert relay.pull("0" * 64, 10) is None  # refused for a while: no second pull for every poll
            file = await region.file()
            assert await got(relay, file, tmp_path / "c")

    run(scenario)


def test_a_pull_with_a_wrong_size_does_not_spoil_the_relays_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region:
            relay = await region.relay("r")
            file = await region.file()
            region.origin.gate.clear()
            assert relay.pull(file.sha256, 17) == 0
            own = asyncio.create_task(got(relay, file, tmp_path / "own"))
            await asyncio.sleep(0.1)
            region.origin.gate.set()
            await own
            await asyncio.gather(*(flight.task for flight in relay._flights.values()), return_exceptions=True)
            assert await region.origin.has(file.sha256)  # nor the origin's

    run(scenario)


def test_a_full_disk_is_ours_not_the_relays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region:
            relay = await region.relay("r")
            file = await region.file()
            await got(relay, file, tmp_path / "own")
            worker = region.worker()

            async def full(*_: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(RelayLink, "download", full)
            with pytest.raises(OSError, match="No space"):
                await worker.get(file, tmp_path / "a")
            assert "relay/failed" not in worker.metrics()
            monkeypatch.undo()
            await got(worker, file, tmp_path / "a")

    run(scenario)


def test_a_relay_without_space_sends_others_to_the_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StorageFull("the disk is full")

    async def scenario() -> None:
        async with opened(tmp_path) as region:
            await region.relay("r")
            file = await region.file()
            monkeypatch.setattr(Shelf, "add", full)
            worker = region.worker()
            await got(worker, file, tmp_path / "a")
            assert worker.metrics()["weights/bytes/origin"] == file.size_bytes

    run(scenario)


# ── the data port ──


def test_f96_the_data_port_reads_weights_for_workers_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region, aiohttp.ClientSession() as session:
            relay = await region.relay("r")
            file = await region.file()
            await got(relay, file, tmp_path / "own")
            url = f"{region.servers[0].url}/v1/weights/{file.sha256}"
            good = {"Authorization": f"Bearer {TOKEN}"}
            for headers in ({}, {"Authorization": "Bearer a worker's token of a run"}, {"Authorization": "Basic x"}):
                async with session.get(url, headers=headers) as response:
                    assert response.status == 401
            async with session.get(url, headers=good) as response:
                assert (response.status, len(await response.read())) == (200, file.size_bytes)
            for method, path, status in (
                ("PUT", url, 405),
                ("DELETE", url, 405),
                ("GET", f"{region.servers[0].url}/v1/status", 404),
                ("POST", f"{region.servers[0].url}/v1/lease", 404),
                ("GET", f"{region.servers[0].url}/v1/weights/..%2f..%2fetc%2fpasswd", 400),
                ("GET", f"{region.servers[0].url}/v1/weights/{'0' * 64}?pull=-1", 400),
                ("GET", f"{region.servers[0].url}/v1/weights/{'0' * 64}?pull={'9' * 40}", 400),
                ("GET", f"{region.servers[0].url}/v1/weights/{'0' * 64}", 404),
            ):
                async with session.request(method, path, headers=good) as response:
                    assert response.status == status, (method, path)

    run(scenario)


def test_the_token_of_the_data_port_is_not_the_workers() -> None:
    assert relay_token(None) is None
    assert relay_token("a") != relay_token("b") and relay_token("a") == relay_token("a")
    assert "secret" not in str(relay_token("secret"))


def test_a_data_port_for_everybody_needs_a_token_and_an_address() -> None:
    with pytest.raises(ConfigError, match="without a token"):
        RelayServer(Nothing(), lambda *_: None, token=None, host="0.0.0.0")
    with pytest.raises(ConfigError, match="must say its address"):
        RelayServer(Nothing(), lambda *_: None, token="t", host="0.0.0.0")
    server = RelayServer(Nothing(), lambda *_: None, token="t", host="0.0.0.0", port=7, address="w1.example")
    assert server.url == "http://w1.example:7"
    assert RelayServer(Nothing(), lambda *_: None, token="t", host="::1", port=7).url == "http://[::1]:7"


# ── the shelf ──


def filed(folder: Path, name: str, size: int, *, seed: int) -> tuple[WeightFile, Path]:
    data = content(size, seed=seed)
    path = write(folder, name, data)
    return WeightFile(name=name, sha256=hashlib.sha256(data).hexdigest(), size_bytes=size), path


def test_a_shelf_costs_nothing_while_the_worker_keeps_the_file(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "s", limit_bytes=0)
    kept = [filed(tmp_path, f"{n}", 1000, seed=n) for n in range(4)]
    for file, path in kept:
        shelf.add(file, path)
    assert all(shelf.path(file.sha256) for file, _ in kept)
    for _, path in kept[:2]:
        path.unlink()
    shelf.add(*filed(tmp_path, "new", 1000, seed=9))
    assert [shelf.path(file.sha256) is not None for file, _ in kept] == [False, False, True, True]


def test_a_shelf_keeps_the_newest_that_fit(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "s", limit_bytes=2500)
    files = []
    for n in range(5):
        file, path = filed(tmp_path, f"{n}", 1000, seed=n)
        shelf.add(file, path)
        path.unlink()
        files.append(file)
    last, path = filed(tmp_path, "last", 1000, seed=9)
    shelf.add(last, path)
    held = [shelf.path(file.sha256) is not None for file in files]
    assert held == [False, False, False, True, True]
    assert not leftovers(tmp_path / "s")


def test_a_shelf_lends_by_link_or_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(tmp_path / "s", limit_bytes=1 << 20)
    file, path = filed(tmp_path, "a", 1000, seed=0)
    assert not shelf.lend(file, tmp_path / "b")
    shelf.add(file, path)
    assert shelf.lend(file, tmp_path / "b") and (tmp_path / "b").stat().st_ino == path.stat().st_ino

    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(shelf_module.os, "link", refuse)
    assert shelf.lend(file, tmp_path / "c") and (tmp_path / "c").read_bytes() == path.read_bytes()
    other, source = filed(tmp_path, "d", 1000, seed=1)
    shelf.add(other, source)
    copied = shelf.path(other.sha256)
    assert copied is not None and copied.stat().st_nlink == 1
    shelf.drop(other.sha256)
    assert shelf.path(other.sha256) is None and not shelf.lend(other, tmp_path / "e")


def test_a_shelf_takes_calls_of_many_threads(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "s", limit_bytes=3000)

    def use(thread: int) -> None:
        for n in range(30):
            file, path = filed(tmp_path, f"{thread}-{n}", 1000, seed=100 * thread + n)
            shelf.add(file, path)
            path.unlink()
            shelf.lend(file, tmp_path / f"lent-{thread}")

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(use, thread) for thread in range(6)]:
            done.result()
    for path in tmp_path.glob("lent-*"):
        path.unlink()
    last, path = filed(tmp_path, "last", 1000, seed=999)
    shelf.add(last, path)  # linked from here, so that it takes nothing
    assert len(list((tmp_path / "s").iterdir())) == 4 and shelf.path(last.sha256) is not None


def test_tidying_spares_a_pull_that_begins_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region:
            relay = await region.relay("r")
            folders = [tmp_path / f".part-{letter * 64}.d" for letter in "abc"]

            class Slow:
                """A folder that is long enough in listing for another pull to begin."""

                def glob(self, _: str) -> Iterator[Path]:
                    for number, folder in enumerate(folders):
                        folder.mkdir()
                        if number == 1:
                            relay._flights["b" * 64] = None  # type: ignore[assignment]
                        yield folder

            relay._clear(SimpleNamespace(folder=Slow()), spare=folders[2])  # type: ignore[arg-type]
            relay._flights.clear()
            assert [folder.is_dir() for folder in folders] == [False, True, True]

    run(scenario)


def test_settings_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        Shelf(tmp_path / "s", limit_bytes=-1)
    for name in ("silence_s", "slowest_bytes_per_s", "rest_s"):
        with pytest.raises(ConfigError, match=name):
            Patience(**{name: 0.0})
    assert Patience(silence_s=10, slowest_bytes_per_s=1e6).limit_s(5_000_000) == 15.0


def test_the_origin_that_lies_is_still_found_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as region:
            file = await region.file()
            path = region.origin.inner.path(file.sha256)
            assert path is not None
            path.chmod(0o644)
            path.write_bytes(bytes(file.size_bytes))
            with pytest.raises(DigestMismatch):
                await region.worker().get(file, tmp_path / "a")
            assert not (tmp_path / "a").exists()

    run(scenario)
