"""Changes counted among elements of like magnitude: what both sides know says where changes are likely.

An update of Adam moves every weight by about the same amount, so a small weight, whose last bit is worth less, changes
far more often than a large one. A change of a class is placed by its rank among the members of the class; one that
would leave its class is placed by its position, with all others of any magnitude. So changes of a class never change
who is a member: the members can be told before and after, and what was written can be taken back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from astraflow.errors import WeightsRefused
from astraflow.types import Array
from astraflow.weights.delta_streams import Streams

BLOCK = 1 << 17
"""Elements looked at together: they and what is made of them fit into a core's cache."""


class Members:
    """Who is in which class, block by block."""

    def __init__(self, edges: Sequence[int], dtype: np.dtype[np.unsignedinteger]) -> None:
        self.edges = np.array(edges, dtype)
        self._mask = dtype.type((1 << (8 * dtype.itemsize - 1)) - 1)
        self._magnitudes = np.empty(BLOCK, dtype)
        self._small = np.empty(BLOCK, np.bool)

    def of(self, block: Array) -> list[Array]:
        """Places in the block (at most ``BLOCK`` bits), increasing, of each class."""
        magnitudes, small = self._magnitudes[: len(block)], self._small[: len(block)]
        np.bitwise_and(block, self._mask, out=magnitudes)
        np.less(magnitudes, self.edges[-1], out=small)
        places = np.flatnonzero(small)
        magnitudes = magnitudes[places]
        found = []
        for edge in self.edges[:-1]:
            lower = magnitudes < edge
            found.append(places[lower])
            np.logical_not(lower, out=lower)
            places, magnitudes = places[lower], magnitudes[lower]
        return [*found, places]

    def class_of(self, bits: Array) -> Array:
        """Number of the class; ``len(edges)`` for those in none."""
        found: Array = np.searchsorted(self.edges, bits & self._mask, "right")
        return found


class Operation:
    """Differences (unsigned bits) to add at places of a block of a tensor."""

    __slots__ = ("block", "places", "values")

    def __init__(self, block: Array, places: Array, values: Array) -> None:
        self.block, self.places, self.values = block, places, values

    def run(self) -> None:
        np.add.at(self.block, self.places, self.values)  # memory is passed once: += gathers, then scatters

    def undo(self) -> None:
        np.subtract.at(self.block, self.places, self.values)


def operations(streams: Streams, targets: Sequence[Array]) -> Iterator[Operation]:
    """Two for each block and target, to be run before the next is asked for. WeightsRefused if the streams lie.

    ``targets``: arrays with the same bits."""
    walk = _Walk(streams, targets[0].dtype)
    for at in range(0, streams.entry.size, BLOCK):
        blocks = [target[at : at + BLOCK] for target in targets]
        ranked, rest = walk.ranked(blocks[0]), walk.rest(blocks[0])
        walk.require_same_class(blocks[0], *ranked)
        for block in blocks:
            yield Operation(block, *ranked)
            yield Operation(block, *rest)
    walk.require_end()


def inverses(streams: Streams, targets: Sequence[Array], done: int) -> Iterator[Operation]:
    """The first ``done`` of ``operations``, each to be undone before the next is asked for.

    Those that were undone already may be passed over, from the first on."""
    blocks, more = divmod(done, 2 * len(targets))
    for number, target in enumerate(targets):
        walk = _Walk(streams, target.dtype)
        ranked = blocks + (more > 2 * number)
        rest = blocks + (more > 2 * number + 1)
        for index, at in enumerate(range(0, ranked * BLOCK, BLOCK)):
            block = target[at : at + BLOCK]
            if index < rest:
                yield Operation(block, *walk.rest(block))
            yield Operation(block, *walk.ranked(block))


class _Walk:
    """One way through a tensor, block after block."""

    def __init__(self, streams: Streams, dtype: np.dtype[np.unsignedinteger]) -> None:
        assert streams.scheme is not None, "checked by parse"
        self._name = streams.entry.name
        self._members = Members(streams.scheme.edges, dtype)
        self._cursors = [_Cursor(streams.part(number)) for number in range(len(streams.entry.parts))]

    def ranked(self, block: Array) -> tuple[Array, Array]:
        """(places, values) of all classes, in a block of which everything else is as it was before."""
        places, values = [], []
        for members, cursor in zip(self._members.of(block), self._cursors, strict=False):
            ranks, found = cursor.take(len(members))
            if len(ranks):
                places.append(members[ranks])
                values.append(found)
        if not places:
            return np.empty(0, np.int64), np.empty(0, block.dtype)
        return np.concatenate(places), np.concatenate(values)

    def rest(self, block: Array) -> tuple[Array, Array]:
        return self._cursors[-1].take(len(block))

    def require_same_class(self, block: Array, places: Array, values: Array) -> None:
        old = block[places]
        if not np.array_equal(self._members.class_of(old), self._members.class_of(old + values)):
            raise WeightsRefused(f"delta: a change of tensor {self._name[:100]} leaves its class")

    def require_end(self) -> None:
        if not all(cursor.is_at_end() for cursor in self._cursors):
            raise WeightsRefused(f"delta: a position of tensor {self._name[:100]} is outside of its class")


class _Cursor:
    """Where a class's changes have been taken up to."""

    def __init__(self, pages: Iterator[tuple[Array, Array]]) -> None:
        self._pages = pages
        self._at = 0
        """Ranks before."""
        self._ranks: Array = np.empty(0, np.int64)
        self._values: Array = np.empty(0, np.uint8)
        self._next()

    def take(self, count: int) -> tuple[Array, Array]:
        """(ranks, values) among the next ``count`` members; ranks from the first of these on."""
        begin, self._at = self._at, self._at + count
        ranks, values = [], []
        while True:
            stop = int(np.searchsorted(self._ranks, self._at))
            ranks.append(self._ranks[:stop] - begin)
            values.append(self._values[:stop])
            self._ranks, self._values = self._ranks[stop:], self._values[stop:]
            if len(self._ranks) or self._ended:
                break
            values[-1] = values[-1].copy()  # the next page is read into the same memory
            self._next()
        return (ranks[0], values[0]) if len(ranks) == 1 else (np.concatenate(ranks), np.concatenate(values))

    def is_at_end(self) -> bool:
        return self._ended and not len(self._ranks)

    def _next(self) -> None:
        page = next(self._pages, None)
        self._ended = page is None
        if page is not None:
            self._ranks, self._values = page
