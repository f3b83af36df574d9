"""Writing a delta into arrays so that it is whole or not at all.

1 hash what is there               it is the base; nothing is touched yet
2 decode tensors that came whole   against their checksums; nothing is touched yet
3 add the differences              of one tensor after the other
4 hash what was changed            what will be there is the target
5 write tensors that came whole    what step 2 has decoded and checked

Whatever raises in 3 or 4, the differences are taken back by subtracting them, which needs no memory of what was there.

Threads hash side by side, for xxhash lets go of the interpreter. One adds: decoding and adding are thousands of short
calls that hold it, and two threads of them take longer than one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from astraflow.weights.digest import combine, quick_of
from astraflow.weights.tensors import SIZES, Tensor

Each = Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]
"""Calls for every item, perhaps at once; returns or raises when none of them runs any more."""

ATTEMPTS = 3
"""At what must be ended when memory runs out. Meanwhile less and less else is going on here."""


class _Part(NamedTuple):
    entry: Entry
    streams: Streams
    targets: tuple[Array, ...]
    """The bits of each tensor of this name or an alias; memory that is shared once."""
    names: tuple[tuple[str, int], ...]
    """Each of these, and which of ``targets`` it is."""

    def operations(self) -> Iterator[Operation]:
        """Each to be run before the next is asked for."""
        if self.entry.parts:
            return operations(self.streams, self.targets)
        return (Operation(target, *page) for page in self.streams.changes() for target in self.targets)

    def inverses(self, done: int) -> Iterator[Operation]:
        if self.entry.parts:
            return inverses(self.streams, self.targets, done)
        pages = self.streams.changes(stop=-(-done // len(self.targets)))
        return islice((Operation(target, *page) for page in pages for target in self.targets), done)


class Write:
    """One delta on its way into one set of tensors. Of a tensor little is held but while it is looked at."""

    def __init__(self, delta: Delta, tensors: Mapping[str, Tensor]) -> None:
        """Raises FullTransferNeeded if the tensors have another form. Touches nothing."""
        self._delta = delta
        self._tensors = tensors
        self._tied = _tied(tensors)
        self._done: dict[int, int] = {}
        """Operations that were run, by number of the entry."""
        self._wholes: list[int] = []
        self._changed: list[int] = []
        for number, entry in enumerate(delta.entries):
            self._part(number)
            (self._wholes if entry.whole else self._changed).append(number)

    def run(self, each: Each) -> None:
        """Nothing where the tensors are the target already. Raises DigestMismatch if they are not the base or would not
        become the target, WeightsRefused if the delta is malformed; then they are what they were."""
        before = dict(each(_digest, _longest_first(self._tensors.values())))
        if not self._is_base(before):
            return
        entries = self._delta.entries
        each(lambda number: _check(self._part(number)), self._wholes)
        try:
            for number in self._changed:
                self._add(number)
            self._require(before, each)
        except BaseException:
            lost = [entries[number].name for number, done in self._done.items() if done and not self._take_back(number)]
            if lost:
                raise _out_of_memory("take back", lost) from None
            raise
        written = set(each(self._replace, self._wholes))
        lost = [entries[number].name for number in self._wholes if number not in written]
        if lost:
            raise _out_of_memory("write", lost)

    def _part(self, number: int) -> _Part:
        return _part(self._delta.entries[number], Streams(self._delta, number), self._tensors, self._tied)

    def _is_base(self, before: Mapping[str, bytes]) -> bool:
        """False: these are the target already, and applying twice changes nothing (F73). DigestMismatch if neither."""
        header, found = self._delta.header, self._combined(before)
        if found not in (header.base_xxh3, header.target_xxh3):
            raise DigestMismatch(
                f"delta: it leads from {name_of(header.base, header.base_xxh3)} to "
                f"{name_of(header.target, header.target_xxh3)}, these weights are neither: full transfer "
                "needed, or the deltas in between"
            )
        return found != header.target_xxh3

    def _add(self, number: int) -> None:
        self._done[number] = 0
        for operation in self._part(number).operations():
            operation.run()
            self._done[number] += 1

    def _require(self, before: Mapping[str, bytes], each: Each) -> None:
        """What will be there is the target."""
        header, entries = self._delta.header, self._delta.entries
        changed = (self._tensors[name] for number in self._changed for name in entries[number].names)
        checks = {name: entries[number].check for number in self._wholes for name in entries[number].names}
        if self._combined({**before, **dict(each(_digest, _longest_first(changed))), **checks}) != header.target_xxh3:
            raise DigestMismatch(
                f"delta: it does not lead to the weights that it names ({header.target[:12]}); nothing is "
                "changed, full transfer needed"
            )

    def _combined(self, digests: Mapping[str, bytes]) -> str:
        return combine(quick_of(self._tensors[name], digest) for name, digest in digests.items())

    def _take_back(self, number: int) -> bool:
        """What was run of its operations, at least one, so that what they took has been decoded before.

        Goes on where it was when memory runs out: by now nothing else decodes. False: it ran out again and again."""
        undone = 0
        for _ in range(ATTEMPTS):
            with suppress(MemoryError):
                for operation in islice(self._part(number).inverses(self._done[number]), undone, None):
                    operation.undo()
                    undone += 1
                return True
            gc.collect()
        return False

    def _replace(self, number: int) -> int | None:
        """None if memory ran out again and again: what was there is gone, so this can only go on."""
        for _ in range(ATTEMPTS):
            with suppress(MemoryError):
                part, at = self._part(number), 0
                for bits in part.streams.bits():
                    for target in part.targets:
                        np.copyto(target[at : at + len(bits)], bits)
                    at += len(bits)
                return number
            gc.collect()
        return None


def name_of(digest: str, xxh3: str) -> str:
    return digest[:12] or f"xxh3 {xxh3[:12]}"


def _longest_first(tensors: Iterable[Tensor]) -> list[Tensor]:
    """So that threads end together."""
    return sorted(tensors, key=lambda tensor: -tensor.data.nbytes)


def _digest(tensor: Tensor) -> tuple[str, bytes]:
    return tensor.name, xxhash.xxh3_128_digest(tensor.data.data)


def _part(entry: Entry, streams: Streams, tensors: Mapping[str, Tensor], tied: Mapping[str, frozenset[str]]) -> _Part:
    own: dict[int, Array] = {}
    places = []
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
        places.append(_place(tensor)[0])
        own[places[-1]] = tensor.data.view(f"<u{SIZES[entry.dtype]}")
    numbers = [list(own).index(place) for place in places]
    return _Part(entry, streams, tuple(own.values()), tuple(zip(entry.names, numbers, strict=True)))


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


def _out_of_memory(what: str, lost: list[str]) -> MemoryError:
    return MemoryError(
        f"delta: there is no memory to {what} the changes of {len(lost)} tensors, {lost[0][:100]} for one: "
        "these weights are neither base nor target now, drop them and make a full transfer"
    )
