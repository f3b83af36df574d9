"""Conformance kit of ``weights.store.WeightStore``: call ``check_store`` with two views of one empty store.

    asyncio.run(check_store(MyStore(...), MyStore(...), tmp_path))

Proves: bit-exact, content-addressed, idempotent, nothing torn visible, errors of the tree. Raises AssertionError.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable
from pathlib import Path

from astraflow.errors import AstraFlowError, BadRequest, NotFound
from astraflow.types import WeightFile
from astraflow.weights.store import WeightStore

SIZES = (0, 1, 4095, 1 << 20, (5 << 20) + 3)


async def check_store(writer: WeightStore, reader: WeightStore, scratch: Path) -> None:
    """``writer`` and ``reader`` may be one object or two processes' views; ``scratch`` is an empty folder."""
    await _is_bit_exact(writer, reader, scratch)
    await _is_idempotent(writer, reader, scratch)
    await _names_do_not_matter(writer, reader, scratch)
    await _refuses_what_is_not_there(reader, scratch)
    await _refuses_wild_names(writer, reader, scratch)
    await _takes_concurrent_writers(writer, reader, scratch)


def content(size: int, *, seed: int = 0) -> bytes:
    """Bytes that compress badly and differ by seed."""
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(size)


def write(folder: Path, name: str, data: bytes) -> Path:
    """A file with a name of its own."""
    path = folder / name
    path.write_bytes(data)
    return path


async def _is_bit_exact(writer: WeightStore, reader: WeightStore, scratch: Path) -> None:
    for index, size in enumerate(SIZES):
        data = content(size, seed=index)
        source = write(scratch, f"exact-{index}.safetensors", data)
        file = await writer.put(source)
        expected = WeightFile(name=source.name, sha256=hashlib.sha256(data).hexdigest(), size_bytes=size)
        assert file == expected, f"put described {file}, not {expected}"
        assert source.read_bytes() == data, "put changed its source"
        assert await reader.has(file.sha256), "what was put is not there"
        into = scratch / f"copy-{index}.safetensors"
        await reader.get(file, into)
        assert into.read_bytes() == data, f"{size} bytes came back different"
        source.unlink()
        into.unlink()


async def _is_idempotent(writer: WeightStore, reader: WeightStore, scratch: Path) -> None:
    data = content(5000, seed=100)
    source = write(scratch, "twice.safetensors", data)
    assert await writer.put(source) == await writer.put(source), "a second put described the file differently"
    linked = write(scratch, "linked.safetensors", content(5001, seed=101))
    file = await writer.put(linked, may_link=True)
    linked.unlink()
    into = write(scratch, "there-already.safetensors", b"old")
    await reader.get(file, into)
    assert into.read_bytes() == content(5001, seed=101), "get did not replace what lay there"


async def _names_do_not_matter(writer: WeightStore, reader: WeightStore, scratch: Path) -> None:
    data = content(7000, seed=102)
    one = await writer.put(write(scratch, "one.safetensors", data))
    two = await writer.put(write(scratch, "two.safetensors", data))
    assert one.sha256 == two.sha256 and (one.name, two.name) == ("one.safetensors", "two.safetensors")
    await reader.get(two, scratch / "named.safetensors")
    assert (scratch / "named.safetensors").read_bytes() == data


async def _refuses_what_is_not_there(reader: WeightStore, scratch: Path) -> None:
    absent = WeightFile(name="absent.safetensors", sha256="0" * 64, size_bytes=10)
    into = scratch / "absent.safetensors"
    assert not await reader.has(absent.sha256)
    assert isinstance(await _error(reader.get(absent, into)), NotFound), "a missing file must be NotFound"
    assert not into.exists(), "a failed get left a file"


async def _refuses_wild_names(writer: WeightStore, reader: WeightStore, scratch: Path) -> None:
    for wild in ("../../etc/passwd", "", "A" * 64, "0" * 63):
        assert isinstance(await _error(reader.has(wild)), BadRequest), f"sha256 {wild!r} must be refused"
    source = write(scratch, "a b.safetensors", b"x")
    assert isinstance(await _error(writer.put(source)), BadRequest), "a wild file name must be refused"


async def _takes_concurrent_writers(writer: WeightStore, reader: WeightStore, scratch: Path) -> None:
    data = content(3 << 20, seed=103)
    sources = [write(scratch, f"race-{n}.safetensors", data) for n in range(4)]
    files = await asyncio.gather(*(writer.put(source) for source in sources))
    assert len({file.sha256 for file in files}) == 1
    await reader.get(files[0], scratch / "raced.safetensors")
    assert (scratch / "raced.safetensors").read_bytes() == data


async def _error(call: Awaitable[object]) -> AstraFlowError | None:
    try:
        await call
    except AstraFlowError as error:
        return error
    return None
