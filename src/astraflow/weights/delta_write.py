"""Writing a delta into arrays so that it is whole or not at all.

1 decode tensors that came whole   against their checksums; nothing is touched yet
2 hash, add the differences, hash  page by page: memory is passed once, the rest happens in a core's cache
3 compare both with the header     what was there is the base, what is there the target
4 write tensors that came whole    what step 1 has decoded and checked

Whatever raises in 2 or 3, the differences are taken back by subtracting them, which needs no memory of what was there.
A delta with classes cannot tell its positions in anything but its base: that is asked for before 2.
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
from astraflow.weights.digest import combine, quick_of
from astraflow.weights.tensors import SIZES, Tensor

Each = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
"""Calls for every item, perhaps at once; returns or raises when none of them runs any more."""

AT_ONCE = 1 << 18
"""Elements hashed together where nothing changes."""
ATTEMPTS = 3
"""At what must be ended when memory runs out. Meanwhile less and less else is going on here."""


class _Part(NamedTuple):
    entry: Entry
    streams: Streams
    targets: tuple[Array, ...]
    """The bits of each tensor of this name or an alias; memory that is shared once."""
    names: tuple[tuple[str, int], ...]
    """Each of these, and which of ``targets`` it is."""

    def operations(self, seen: Sequence[_Seen]) -> Iterator[Operation]:
        """Each to be run before the next is asked for. ``seen``: of each target, told all of it in the end."""
        if not self.entry.parts:
            return self._plain(seen)
        return self._classes(seen)

    def inverses(self, done: int) -> Iterator[Operation]:
        if self.entry.parts:
            return inverses(self.streams, self.targets, done)
        pages = self.streams.changes(stop=-(-done // len(self.targets)))
        return islice((Operation(target, *page) for page in pages for target in self.targets), done)

    def _plain(self, seen: Sequence[_Seen]) -> Iterator[Operation]:
        """One for each page and target."""
        begin = 0
        for positions, differences in self.streams.changes():
            end = int(positions[-1]) + 1
            for target, each in zip(self.targets, seen, strict=True):
                each.before.update(target[begin:end].data)
                yield Operation(target, positions, differences)
                each.after.update(target[begin:end].data)
            begin = end
        for target, each in zip(self.targets, seen, strict=True):
            each.unchanged(target[begin:])

    def _classes(self, seen: Sequence[_Seen]) -> Iterator[Operation]:
        for target, each in zip(self.targets, seen, strict=True):
            each.before.update(target.data)
        yield from operations(self.streams, self.targets)
        for target, each in zip(self.targets, seen, strict=True):
            each.after.update(target.data)


class _Seen:
    """What one tensor was and is, hashed."""

    __slots__ = ("after", "before")

    def __init__(self) -> None:
        self.before, self.after = xxhash.xxh3_128(), xxhash.xxh3_128()

    def unchanged(self, bits: Array) -> None:
        for at in range(0, len(bits), AT_ONCE):
            self.before.update(bits[at : at + AT_ONCE].data)
            self.after.update(bits[at : at + AT_ONCE].data)


class Write:
    """One delta on its way into one set of tensors. Of a tensor little is held but while it is looked at."""

    def __init__(self, delta: Delta, tensors: Mapping[str, Tensor]) -> None:
        """Raises FullTransferNeeded if the tensors have another form. Touches nothing."""
        self._delta = delta
        self._tensors = tensors
        self._tied = _tied(tensors)
        self._done: dict[int, int] = {}
        """Operations that were run, by number of the entry."""
        self._seen: dict[str, bytes] = {}
        """xxh3-128 of each tensor before, then after."""
        self._wholes: list[int] = []
        others = dict(tensors)
        parts: list[tuple[int, int]] = []
        for number, entry in enumerate(delta.entries):
            part = self._part(number)
            if entry.whole:
                self._wholes.append(number)
                continue
            parts.append((-part.targets[0].nbytes, number))
            for name in entry.names:
                del others[name]
        work: list[tuple[int, int | Tensor]] = [*parts, *((-each.data.nbytes, each) for each in others.values())]
        self._work = [item for _, item in sorted(work, key=lambda sized: sized[0])]
        """Entries and tensors that are in none, the largest first: threads end together."""

    def run(self, each: Each) -> None:
        """Raises DigestMismatch if the tensors are not the base or would not become the target, WeightsRefused if the
        delta is malformed; then they are what they were."""
        entries = self._delta.entries
        each(lambda number: _check(self._part(number)), self._wholes)
        try:
            each(self._look, self._work)
            self._require()
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

    def _look(self, item: int | Tensor) -> None:
        """At one tensor: add its differences if it has some, and note what it was before and is now."""
        if isinstance(item, Tensor):
            self._seen[item.name] = 2 * xxhash.xxh3_128_digest(item.data.data)
        else:
            self._add(item, self._part(item))

    def _add(self, number: int, part: _Part) -> None:
        seen = [_Seen() for _ in part.targets]
        self._done[number] = 0
        for operation in part.operations(seen):
            operation.run()
            self._done[number] += 1
        for name, target in part.names:
            self._seen[name] = seen[target].before.digest() + seen[target].after.digest()

    def _require(self) -> None:
        """What was is the base, what is will be the target."""
        header, seen, tensors = self._delta.header, self._seen, self._tensors
        if combine(quick_of(tensors[name], both[:16]) for name, both in seen.items()) != header.base_xxh3:
            raise DigestMismatch("delta: these weights are not what it starts from; nothing is changed")
        checks = {name: entry.check for entry in self._delta.entries if entry.whole for name in entry.names}
        after = (quick_of(tensors[name], checks.get(name, both[16:])) for name, both in seen.items())
        if combine(after) != header.target_xxh3:
            raise DigestMismatch(
                f"delta: it does not lead to the weights that it names ({header.target[:12]}); nothing is "
                "changed, full transfer needed"
            )

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
