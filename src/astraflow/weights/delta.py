"""Lossless deltas between two versions of weights: what changed, to the bit, checked before anything is touched.

    encode_delta(base, new) -> bytes      apply_delta(base, delta)
    merge_deltas(first, second) -> bytes  compact_delta(delta, target) -> bytes: smaller, and not to be merged any more

Weights are mappings of names to numpy arrays, or to ``weights.tensors.Tensor`` where the dtype is one that numpy lacks
(``weights.delta_torch`` makes those of torch tensors, in the same memory). Bits are compared, never values: -0.0 is not
0.0 and a NaN equals itself (F72). Tied tensors travel once (F74). The format is described in ``weights.delta_file``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock
from typing import Any, TypeVar

import xxhash

from astraflow.errors import DigestMismatch, FullTransferNeeded
from astraflow.types import Array
from astraflow.weights.delta_compact import compact
from astraflow.weights.delta_file import PAGE, WHOLE_PAGE, DeltaHeader, Entry, build, parse
from astraflow.weights.delta_merge import merge_entries
from astraflow.weights.delta_streams import find_changes, pack_stream, pcodec_header
from astraflow.weights.delta_write import Write, name_of
from astraflow.weights.digest import TensorDigest, combine, quick_tensor
from astraflow.weights.tensors import SIZES, Tensor, of_array

T = TypeVar("T")
R = TypeVar("R")
DONE = object()
Weights = Mapping[str, Array | Tensor]
MERGE_LIMIT_BYTES = 16 << 30


def encode_delta(
    base: Weights, new: Weights, *, base_digest: str = "", target_digest: str = "", threads: int = 0
) -> bytes:
    """The delta from ``base`` to ``new``. ``base_digest``, ``target_digest``: what manifests call the two, if they do.

    ``threads``: 0 takes the cores of this process. Raises FullTransferNeeded if names, dtypes or shapes differ.
    """
    old, now = _tensors(base), _tensors(new)
    _require_same_form(old, now)
    names = sorted(old, key=lambda name: -old[name].data.nbytes)  # longest first: threads end together
    with _pool(threads) as pool:
        before = dict(zip(names, pool.map(lambda name: quick_tensor(old[name]), names), strict=True))
        after = dict(zip(names, pool.map(lambda name: quick_tensor(now[name]), names), strict=True))
        groups = _groups(names, before, after)
        packed = pool.map(lambda group: _encode(old[group[0]], now[group[0]], tuple(group[1:])), groups)
        streams = [each for each in packed if each is not None]
    streams.sort(key=lambda each: each[0].name)
    lineage = (base_digest, target_digest, combine(before.values()), combine(after.values()))
    return build(lineage, pcodec_header(), streams)


def apply_delta(base: Weights, delta: bytes, *, threads: int = 0) -> None:
    """Turn ``base`` into the delta's target, in place. Either all of it, or an error and it is what it was.

    What is checked: the delta's checksum and counts, names, dtypes, shapes, and every bit of what is there
    (DigestMismatch unless it is the base) before anything is touched; every position; every bit of what comes out, else
    what was changed is taken back: nobody may read the arrays meanwhile. By xxh3-128, which finds accidents; against
    people, the SHA-256 of the manifest decides. Raises WeightsRefused if the delta is malformed, FullTransferNeeded if
    the base has another form or cannot be written to.
    """
    parsed = parse(delta)
    tensors = _tensors(base, writable=True)
    write = Write(parsed, tensors)
    with _pool(threads) as pool:
        cores = _cores(threads)

        def each(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
            return _each(pool, cores, call, items)

        write.run(each)


def merge_deltas(first: bytes, second: bytes, *, threads: int = 0, limit_bytes: int = MERGE_LIMIT_BYTES) -> bytes:
    """One delta that does what both do, one after the other. What was changed and changed back is not in it.

    Raises DigestMismatch if ``second`` does not start where ``first`` ends, WeightsRefused if either is malformed or
    would take more than ``limit_bytes`` unpacked.
    """
    one, two = parse(first), parse(second)
    if one.header.target != two.header.base or one.header.target_xxh3 != two.header.base_xxh3:
        raise DigestMismatch(
            f"delta: the second starts from {name_of(two.header.base, two.header.base_xxh3)}, "
            f"the first ends at {name_of(one.header.target, one.header.target_xxh3)}"
        )
    with _pool(threads) as pool:
        streams = merge_entries(one, two, limit_bytes, lambda call, items: list(pool.map(call, items)))
    lineage = (one.header.base, two.header.target, one.header.base_xxh3, two.header.target_xxh3)
    return build(lineage, pcodec_header(), streams)


def compact_delta(delta: bytes, target: Weights, *, threads: int = 0) -> bytes:
    """The same changes in fewer bytes, for the way; the delta itself where that would not pay. See ``delta_classes``.

    ``target``: the weights that it leads to, which its maker has. What comes out is applied like any delta, and cannot
    be merged: its positions mean nothing without the base. Raises DigestMismatch if ``target`` is something else.
    """
    parsed = parse(delta)
    tensors = _tensors(target)
    with _pool(threads) as pool:
        found = combine(pool.map(quick_tensor, tensors.values()))
        if found != parsed.header.target_xxh3:
            raise DigestMismatch(
                f"delta: it leads to {name_of(parsed.header.target, parsed.header.target_xxh3)}, these weights are "
                "others"
            )
        compacted = compact(parsed, tensors, lambda call, items: list(pool.map(call, items)))
    return build(parsed.header[:4], parsed.pcodec, *compacted) if compacted is not None else delta


def read_header(delta: bytes) -> DeltaHeader:
    """Lineage and counts, after the checksum. Raises WeightsRefused, DigestMismatch."""
    return parse(delta).header


def _encode(old: Tensor, now: Tensor, aliases: tuple[str, ...]) -> tuple[Entry, list[bytes]] | None:
    base, new = bits_of(old), bits_of(now)
    changes = find_changes(base, new)
    if changes is None:
        values = pack_stream(new, page=WHOLE_PAGE)
        gaps: list[bytes] = []
        check, count = xxhash.xxh3_128_digest(now.data.data), len(new)
    elif not len(changes.gaps):
        return None
    else:
        gaps, values = pack_stream(changes.gaps, page=PAGE), pack_stream(changes.values, page=PAGE)
        check, count = b"", len(changes.gaps)
    entry = Entry(old.name, old.dtype, old.shape, count, tuple(map(len, values)), tuple(map(len, gaps)), check, aliases)
    return entry, [*gaps, *values]


def bits_of(tensor: Tensor) -> Array:
    """Its elements as unsigned integers [n], a view where memory is aligned."""
    view: Array = tensor.data.view(f"<u{SIZES[tensor.dtype]}")
    return view if view.flags.aligned else view.copy()


def _groups(
    names: Iterable[str], before: Mapping[str, TensorDigest], after: Mapping[str, TensorDigest]
) -> list[list[str]]:
    """Names of changed tensors; those with the same form and bits before and after, tied ones for example, together."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name in names:
        old, now = before[name], after[name]
        if old.sha256 != now.sha256:
            found.setdefault((old.dtype, old.shape, old.sha256, now.sha256), []).append(name)
    return [sorted(group) for group in found.values()]


def _tensors(weights: Weights, *, writable: bool = False) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, each in weights.items():
        if isinstance(each, Tensor):
            found[name] = each if each.name == name else each._replace(name=name)
        else:
            found[name] = of_array(name, each)
            if writable and not each.flags.c_contiguous:
                raise FullTransferNeeded(
                    f"delta: tensor {name} does not lie in one piece, so it cannot be changed in place"
                )
        if writable and not (found[name].data.flags.writeable):
            raise FullTransferNeeded(f"delta: tensor {name} is read-only and cannot be changed in place")
    return found


def _require_same_form(old: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    gone, added = sorted(old.keys() - now.keys()), sorted(now.keys() - old.keys())
    if gone or added:
        what = f"tensor {gone[0]} is gone" if gone else f"tensor {added[0]} is new"
        raise FullTransferNeeded(f"delta: {what}: full transfer needed")
    for name, tensor in old.items():
        if (tensor.dtype, tensor.shape) != (now[name].dtype, now[name].shape):
            raise FullTransferNeeded(
                f"delta: tensor {name} was {tensor.dtype} {list(tensor.shape)}, is {now[name].dtype} "
                f"{list(now[name].shape)}: full transfer needed"
            )


def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_cores(threads), thread_name_prefix="delta")


def _cores(threads: int) -> int:
    return threads or len(os.sched_getaffinity(0))


def _each(pool: ThreadPoolExecutor, threads: int, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Of every item, in no order; when it returns or raises, none is running any more. After an error nothing begins.

    A thread takes the next item when it has done one: a future for each would take more memory than a delta."""
    left, lock, found = iter(items), Lock(), list[R]()

    def work() -> None:
        nonlocal left
        while True:
            with lock:
                item = next(left, DONE)
            if item is DONE:
                return
            try:
                found.append(call(item))  # type: ignore[arg-type]  # not DONE
            except BaseException:
                with lock:
                    left = iter(())
                raise

    futures = [pool.submit(work) for _ in range(threads)]
    try:
        for future in futures:
            future.result()
    finally:
        wait(futures)
    return found
