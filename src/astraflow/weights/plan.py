"""The cheapest way to a version, in bytes, from whatever weights are at hand. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import NamedTuple

from astraflow.types import Manifest, WeightDelta


class Plan(NamedTuple):
    """Take the weights ``start``, then these deltas in this order."""

    start: str
    """Digest. Held already, or ``full``: the manifest's files are pulled for it."""
    full: bool
    deltas: tuple[WeightDelta, ...]
    size_bytes: int
    """To be transferred."""


def plan_path(have: Collection[str], want: Manifest, *, without: Collection[str] = ()) -> Plan | None:
    """Cheapest in bytes among the deltas one by one, merged ones, and full; ties go to fewer files.

    ``have``: digests of full weights that are held. ``without``: SHA-256 of deltas not to use. None: no way is left.
    """
    full = want.files_digest or want.digest
    size = sum(file.size_bytes for file in want.files)
    # (bytes, files, order of insertion, digest, plan so far): Dijkstra (1959) over digests
    heap: list[tuple[int, int, int, str, Plan]] = [
        (0, 0, n, digest, Plan(digest, False, (), 0)) for n, digest in enumerate(sorted(have))
    ]
    if want.files:
        heap.append((size, len(want.files), len(heap), full, Plan(full, True, (), size)))
    heapq.heapify(heap)
    ways: dict[str, list[WeightDelta]] = {}
    for delta in want.deltas:
        if delta.file.sha256 not in without:
            ways.setdefault(delta.base_digest, []).append(delta)
    seen: set[str] = set()
    count = len(heap)
    while heap:
        cost, files, _, digest, plan = heapq.heappop(heap)
        if digest == want.digest:
            return plan
        if digest in seen:
            continue
        seen.add(digest)
        for delta in ways.get(digest, ()):
            more = cost + delta.file.size_bytes
            longer = Plan(plan.start, plan.full, (*plan.deltas, delta), more)
            heapq.heappush(heap, (more, files + 1, count, delta.digest, longer))
            count += 1
    return None
