"""The cheapest way to a version, by bytes."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.types import Manifest, WeightDelta, WeightFile
from astraflow.weights.plan import plan_path

FULL = 1000


def digest(n: int) -> str:
    return f"{n:064x}"


def link(begin: int, end: int, size: int) -> WeightDelta:
    file = WeightFile(name=f"{begin}-{end}", sha256=digest(1000 * begin + end), size_bytes=size)
    return WeightDelta(base_digest=digest(begin), digest=digest(end), file=file)


def manifest(at: int, *links: WeightDelta, anchor: int | None = None, full: int = FULL) -> Manifest:
    files = (WeightFile(name="model.safetensors", sha256=digest(7), size_bytes=full),)
    anchored = "" if anchor is None else digest(anchor)
    return Manifest(policy="p", version=at, digest=digest(at), files=files, files_digest=anchored, deltas=links)


def taken(have: set[int], want: Manifest, **more: set[str]) -> tuple[int, bool, list[str], int]:
    plan = plan_path({digest(n) for n in have}, want, **more)
    assert plan is not None
    return int(plan.start, 16), plan.full, [delta.file.name for delta in plan.deltas], plan.size_bytes


CHAIN = [link(n, n + 1, 40) for n in range(8)]


def test_what_is_held_needs_nothing() -> None:
    assert taken({4, 8}, manifest(8, *CHAIN)) == (8, False, [], 0)


def test_f73_one_step_behind_takes_one_delta_two_behind_two() -> None:
    assert taken({7}, manifest(8, *CHAIN)) == (7, False, ["7-8"], 40)
    assert taken({6}, manifest(8, *CHAIN)) == (6, False, ["6-7", "7-8"], 80)
    assert taken({3, 6}, manifest(8, *CHAIN))[0] == 6


def test_a_merged_delta_where_it_is_smaller() -> None:
    assert taken({4}, manifest(8, *CHAIN, link(4, 8, 90))) == (4, False, ["4-8"], 90)
    assert taken({3}, manifest(8, *CHAIN, link(4, 8, 90))) == (3, False, ["3-4", "4-8"], 130)
    assert len(taken({4}, manifest(8, *CHAIN, link(4, 8, 161)))[2]) == 4
    assert taken({4}, manifest(8, *CHAIN, link(4, 8, 160)))[2] == ["4-8"]  # the same bytes in fewer files


def test_full_where_that_is_smaller_or_the_only_way() -> None:
    assert taken({0}, manifest(8, *CHAIN, full=300)) == (8, True, [], 300)
    assert taken({0}, manifest(8, *CHAIN, full=321))[:2] == (0, False)
    assert taken({99}, manifest(8, *CHAIN)) == (8, True, [], FULL)
    assert taken(set(), manifest(8)) == (8, True, [], FULL)


def test_from_the_anchor_where_the_version_itself_is_not_there_in_full() -> None:
    assert taken(set(), manifest(8, *CHAIN, anchor=5)) == (5, True, ["5-6", "6-7", "7-8"], FULL + 120)
    assert taken({2}, manifest(8, *CHAIN, anchor=5))[:2] == (2, False)


def test_what_failed_is_avoided_and_no_way_is_said() -> None:
    want = manifest(8, *CHAIN, link(4, 8, 90), anchor=4)
    assert taken({4}, want, without={link(4, 8, 90).file.sha256})[2] == ["4-5", "5-6", "6-7", "7-8"]
    bad = {link(4, 8, 90).file.sha256, CHAIN[6].file.sha256}
    assert plan_path({digest(4)}, want, without=bad) is None
    assert taken({7}, want, without=bad)[2] == ["7-8"]


def test_links_that_lead_round_in_a_circle() -> None:
    want = manifest(3, link(1, 2, 0), link(2, 1, 0), link(2, 3, 5))
    assert taken({1}, want) == (1, False, ["1-2", "2-3"], 5)
    assert plan_path((), msgspec.structs.replace(want, files_digest=digest(9))) is None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_never_dearer_than_any_other_way(data: st.DataObject) -> None:
    """Against every way there is, found by trying all."""
    sizes = st.integers(0, 300)
    links = [link(a, b, data.draw(sizes)) for a, b in pairwise(range(7))]
    for _ in range(data.draw(st.integers(0, 4))):
        begin = data.draw(st.integers(0, 5))
        links.append(link(begin, data.draw(st.integers(begin + 1, 6)), data.draw(sizes)))
    have = data.draw(st.sets(st.integers(0, 6)))
    anchor = data.draw(st.sampled_from([None, *range(6)]))
    want = manifest(6, *links, anchor=anchor, full=data.draw(st.integers(0, 900)))

    def costs(at: int) -> list[int]:
        if at == 6:
            return [0]
        ways = [each for each in links if each.base_digest == digest(at)]
        return [each.file.size_bytes + cost for each in ways for cost in costs(int(each.digest, 16))]

    starts = [(n, 0) for n in have] + [(6 if anchor is None else anchor, want.files[0].size_bytes)]
    best = min(first + cost for at, first in starts for cost in costs(at))
    assert taken(have, want)[3] == best


@pytest.mark.parametrize("missed", [1, 5, 20, 24])
def test_catching_up_costs_at_most_the_cheaper_of_full_and_the_sum(missed: int) -> None:
    chain = [link(n, n + 1, 30 + n % 7) for n in range(24)]
    plan = plan_path({digest(24 - missed)}, manifest(24, *chain))
    assert plan is not None
    assert plan.size_bytes <= min(FULL, sum(each.file.size_bytes for each in chain[24 - missed :]))
