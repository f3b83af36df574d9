"""Writing a delta into arrays so that it is whole or not at all.

1 decode tensors that came whole   against their checksums; nothing is touched yet
2 add the differences              taken back, by subtracting them, if anything raises
3 hash what was changed            taken back if it is not the target
4 write tensors that came whole    what step 1 has decoded and checked
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import xxhash

from astraflow.errors import DigestMismatch, FullTransferNeeded, WeightsRefused
from astraflow.types import Array
from astraflow.weights.delta_classes import Operation, inverses, operations
from astraflow.weights.delta_file import Delta, Entry
from astraflow.weights.delta_streams import Streams
from astraflow.weights.digest import QUICK, TensorDigest, combine, quick_tensor
from astraflow.weights.tensors import SIZES, Tensor

Each = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
"""Calls for every item, perhaps at once; returns or raises when none of them runs any more."""

ATTEMPTS = 3
"""At what must be ended when memory runs out. Meanwhile less and less else is going on here."""


class _Part(NamedTuple):
    entry: Entry
    streams: Streams
    targets: tuple[Array, ...]
    """The bits of each tensor of this name or an alias; memory that is shared once."""
    tensors: tuple[Tensor, ...]

    def operations(self) -> Iterator[Operation]:
        return operations(self.streams, self.targets) if self.entry.parts else self._plain()

    def inverses(self, done: int) -> Iterator[Operation]:
        if self.entry.parts:
            return inverses(self.streams, self.targets, done)
        return islice(self._plain(stop=-(-done // len(self.targets))), done)

    def _plain(self, *, stop: int | None = None) -> Iterator[Operation]:
        """One for each page and target."""
        for positions, differences in self.streams.changes(stop=stop):
            for target in self.targets:
                yield Operation(target, positions, differences)


class Write:
    """One delta on its way into one set of tensors."""

    def __init__(self, delta: Delta, tensors: Mapping[str, Tensor]) -> None:
        """Raises FullTransferNeeded if the tensors have another form. Touches nothing."""
        self._delta = delta
        self._tensors = tensors
        tied = _tied(tensors)
        self._parts = [
            _part(entry, Streams(delta, number), tensors, tied) for number, entry in enumerate(delta.entries)
        ]
        self._parts.sort(key=lambda part: -part.entry.size)
        self._done: dict[str, int] = {}
        """Operations that were run, by name."""

    def run(self, each: Each, digests: Mapping[str, TensorDigest]) -> None:
        """``digests``: ``quick_tensor`` of every tensor, which are the delta's base."""
        wholes = [part for part in self._parts if part.entry.whole]
        parts = [part for part in self._parts if not part.entry.whole]
        each(_check, wholes)
        try:
            changed = [digest for found in each(self._add, parts) for digest in found]
            self._require_target({**digests, **{digest.name: digest for digest in changed}})
        except BaseException:
            begun = [(part, self._done[part.entry.name]) for part in parts if self._done.get(part.entry.name)]
            lost = [part.entry.name for part, done in begun if not _take_back(part, done)]
            if lost:
                raise _out_of_memory("take back", lost) from None
            raise
        lost = [name for name in each(_replace, wholes) if name]
        if lost:
            raise _out_of_memory("write", lost)

    def _add(self, part: _Part) -> list[TensorDigest]:
        """One tensor: its differences, and what it is then, while it is in the cache."""
        name = part.entry.name
        self._done[name] = 0
        for operation in part.operations():
            operation.run()
            self._done[name] += 1
        return [quick_tensor(tensor) for tensor in part.tensors]

    def _require_target(self, found: dict[str, TensorDigest]) -> None:
        for part in self._parts:
            if part.entry.whole:
                check = QUICK + part.entry.check.hex()
                found |= {tensor.name: found[tensor.name]._replace(sha256=check) for tensor in part.tensors}
        if combine(found.values()) != self._delta.header.target_xxh3:
            raise DigestMismatch(
                f"delta: it does not lead to the weights that it names ({self._delta.header.target[:12]}); nothing is "
                "changed, full transfer needed"
            )


def _part(entry: Entry, streams: Streams, tensors: Mapping[str, Tensor], tied: Mapping[str, frozenset[str]]) -> _Part:
    own: dict[int, Array] = {}
    for name in entry.names:
        tensor = tensors.get(name)
        if tensor is None or (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
            found = "is not here" if tensor is None else f"is {tensor.dtype} {list(tensor.shape)} here"
            raise FullTransferNeeded(f"delta: tensor {name[:100]} {found}: full transfer needed")
        untold = tied.get(name, frozenset()) - set(entry.names)
        if untold:
            raise FullTransferNeeded(
                f"delta: tensor {name} shares memory with {min(untold)} here, and not where the delta was made: "
                "full transfer needed"
            )
        own[_place(tensor)[0]] = tensor.data.view(f"<u{SIZES[entry.dtype]}")
    return _Part(entry, streams, tuple(own.values()), tuple(tensors[name] for name in entry.names))


def _tied(tensors: Mapping[str, Tensor]) -> dict[str, frozenset[str]]:
    """Names that lie in the same memory. Raises FullTransferNeeded if two overlap in part."""
    groups: dict[tuple[int, int], set[str]] = {}
    for name, tensor in tensors.items():
        if tensor.data.nbytes:
            groups.setdefault(_place(tensor), set()).add(name)
    end, before = 0, ""
    for start, stop in sorted(groups):
        if start < end:
            raise FullTransferNeeded(f"delta: tensors {before} and {min(groups[start, stop])} overlap in memory")
        end, before = stop, min(groups[start, stop])
    return {name: frozenset(group) for group in groups.values() if len(group) > 1 for name in group}


def _place(tensor: Tensor) -> tuple[int, int]:
    start = int(tensor.data.__array_interface__["data"][0])
    return start, start + tensor.data.nbytes


def _check(part: _Part) -> None:
    """Decode a tensor that came whole. Raises WeightsRefused."""
    hasher = xxhash.xxh3_128()
    for bits in part.streams.bits():
        hasher.update(bits.data)
    if hasher.digest() != part.entry.check:
        raise WeightsRefused(f"delta: tensor {part.entry.name[:100]} is not what its checksum says")


def _take_back(part: _Part, done: int) -> bool:
    """``done``: of its operations, at least one, so that what they took has been decoded before.

    Goes on where it was when memory runs out: by now nothing else decodes. False: it ran out again and again."""
    undone = 0
    for _ in range(ATTEMPTS):
        with suppress(MemoryError):
            for operation in islice(part.inverses(done), undone, None):
                operation.undo()
                undone += 1
            return True
        gc.collect()
    return False


def _replace(part: _Part) -> str:
    """Its name if memory ran out again and again: what was there is gone, so this can only go on."""
    for _ in range(ATTEMPTS):
        with suppress(MemoryError):
            at = 0
            for bits in part.streams.bits():
                for target in part.targets:
                    np.copyto(target[at : at + len(bits)], bits)
                at += len(bits)
            return ""
        gc.collect()
    return part.entry.name


def _out_of_memory(what: str, lost: list[str]) -> MemoryError:
    return MemoryError(
        f"delta: there is no memory to {what} the changes of {len(lost)} tensors, {lost[0][:100]} for one: "
        "these weights are neither base nor target now, drop them and make a full transfer"
    )
