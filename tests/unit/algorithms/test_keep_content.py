"""Length, copies, form, outcome: what is masked, what drops the group, and with which reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.keep import DropNoAdvantage, DropZeroVariance
from astraflow.algorithms.keep_content import (
    DropDuplicates,
    DropIllFormed,
    DropOverlong,
    MeanReward,
    MinCompleted,
)
from astraflow.errors import ConfigError
from astraflow.testing.check_algorithm import check_algorithm
from astraflow.types import Outcome
from tests.unit.algorithms.test_keep import summary
from tests.unit.dataflow_pure.build import episode, scored, settled, table, trajectory

NONE = np.zeros(0, np.float32)
DONE, CUT, FAILED = Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.FAILED


def ask(keep, group):
    return keep.verdict(group, np.zeros(len(group.units), np.float32)), keep.mask(group)


@pytest.mark.parametrize(
    "make",
    [
        MinCompleted,
        lambda: MeanReward(low=0.2, high=0.8),
        lambda: DropOverlong(tokens=40),
        DropDuplicates,
        DropIllFormed,
        DropNoAdvantage,
    ],
)
def test_conformance(make):
    check_algorithm(make)


# ── outcomes ──


@pytest.mark.parametrize(
    ("outcomes", "share", "reason"),
    [
        ((DONE, DONE, CUT, FAILED), 0.5, None),
        ((DONE, CUT, CUT, FAILED), 0.5, "few_completed"),
        ((DONE, CUT, CUT, FAILED), 0.25, None),
        ((DONE, DONE, DONE, CUT), 1.0, "few_completed"),
        ((CUT, CUT), 0.0, None),
    ],
)
def test_a_group_needs_its_share_of_completed_members(outcomes, share, reason):
    group = replace(summary(table([1.0] * len(outcomes))), outcomes=outcomes, size=len(outcomes))
    assert MinCompleted(share=share).verdict(group, NONE) == reason


def test_f63_the_share_of_completed_members_is_exact():
    """25 x 0.28 is 7.000000000000001 in binary floats: 7 of 25 are enough all the same."""
    for completed, reason in ((7, None), (6, "few_completed")):
        outcomes = (DONE,) * completed + (CUT,) * (25 - completed)
        group = replace(summary(table([1.0] * 25)), outcomes=outcomes, size=25)
        assert MinCompleted(share=0.28).verdict(group, NONE) == reason


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0, 0, 0, 0], "too_hard"),
        ([1, 1, 1, 1], "too_easy"),
        ([0, 0, 0, 1], None),
        ([0, 1, 1, 1], None),
        ([None, None], None),
        ([0, None], "too_hard"),
    ],
)
def test_a_group_within_the_bounds_is_kept(rewards, reason):
    """The bounds themselves are within."""
    assert MeanReward(low=0.25, high=0.75).verdict(summary(table(rewards)), NONE) == reason


def test_the_mean_is_over_episodes_not_turns():
    units = table([1, 1, 1, 0], episodes=[0, 0, 0, 1])
    assert MeanReward(high=0.5).verdict(summary(units), NONE) is None
    assert MeanReward(high=0.49).verdict(summary(units), NONE) == "too_easy"


# ── length ──


def test_long_samples_are_masked_and_nothing_but_long_ones_is_dropped():
    units = replace(table([1, 0, 1]), tokens=np.array([10, 11, 300]))
    assert ask(DropOverlong(tokens=10), summary(units)) == (
        None,
        {"0/1/solver/0": "overlong", "0/2/solver/0": "overlong"},
    )
    assert ask(DropOverlong(tokens=9), summary(units))[0] == "overlong"


def test_turns_of_a_sample_count_together():
    units = replace(table([1, 1, 0], episodes=[0, 0, 1]), tokens=np.array([6, 6, 11]))
    assert ask(DropOverlong(tokens=11), summary(units))[1] == {"0/0/solver/0": "overlong"}


# ── copies ──


def hashed(hashes, rewards=None):
    units = table([1.0] * len(hashes) if rewards is None else rewards)
    rows = np.array([[np.nan, np.nan] if each is None else [each, 7] for each in hashes], np.float64)
    return replace(summary(units), features={"episode.content_hash/m0": rows})


def test_the_first_copy_is_trained():
    assert ask(DropDuplicates(), hashed([5, 6, 5, 5])) == (
        None,
        {"0/2/solver/0": "duplicate", "0/3/solver/0": "duplicate"},
    )
    assert ask(DropDuplicates(copies=2), hashed([5, 6, 5, 5]))[1] == {"0/3/solver/0": "duplicate"}
    assert ask(DropDuplicates(), hashed([1, 2, 3, 4])) == (None, {})


def test_a_group_of_copies_is_dropped():
    assert DropDuplicates().verdict(hashed([5, 5, 5]), NONE) == "duplicate"
    assert DropDuplicates().verdict(hashed([5]), NONE) is None, "one alone is no copy"
    assert DropDuplicates().verdict(hashed([5, None, 5]), NONE) is None, "nobody knows of the second"


def test_a_member_that_does_not_count_is_no_first_copy():
    assert ask(DropDuplicates(), hashed([5, 5, 6], [None, 1.0, 0.0])) == (None, {})


def test_without_hashes_nothing_is_a_copy():
    assert ask(DropDuplicates(), summary(table([1.0, 1.0]))) == (None, {})
    assert ask(DropDuplicates(), hashed([None, None])) == (None, {})


# ── form ──


def formed(flags):
    rows = np.array([np.nan if each is None else each for each in flags], np.float64)
    return replace(summary(table([1.0] * len(flags))), features={"episode.format": rows})


def test_ill_formed_members_are_masked_and_nothing_but_such_is_dropped():
    assert ask(DropIllFormed(), formed([1, 0, None])) == (None, {"0/1/solver/0": "ill_formed"})
    assert ask(DropIllFormed(), formed([0, 0]))[0] == "ill_formed"
    assert ask(DropIllFormed(name="tags"), formed([0, 0])) == (None, {})


# ── advantages ──


def test_no_advantage_is_told_from_no_variance():
    units = table([1.0, 1.0])
    other = np.array([0.5, -0.5], np.float32)
    assert DropNoAdvantage().verdict(summary(units), other) is None
    assert DropZeroVariance().verdict(summary(units), other) == "zero_variance"
    assert DropNoAdvantage().verdict(summary(units), GroupMean().group(units)) == "zero_advantage"
    assert DropNoAdvantage().verdict(summary(table([None])), np.ones(1, np.float32)) == "zero_advantage"


# ── through settling ──


def test_features_of_episodes_reach_the_keeps_and_reasons_the_samples():
    hashes = [np.array([2**32 - 1, n], np.uint32) for n in (1, 1, 2)]
    plays = [
        episode(trajectory(reward), features={"content_hash/m0": each, "format": np.array(form)})
        for reward, each, form in zip((0.0, 1.0, 1.0), hashes, (1.0, 1.0, 0.0), strict=True)
    ]
    verdict = settled(plays, keep=(DropDuplicates(), DropIllFormed()))["m0"]
    assert verdict.reason is None
    assert [each.masked for each in verdict.samples] == [None, "duplicate", "ill_formed"]


def test_all_masked_by_several_reasons_drops_the_group_with_the_first():
    plays = [
        episode(trajectory(reward), features={"content_hash/m0": np.array([1, 1], np.uint32), "format": np.array(form)})
        for reward, form in ((0.0, 0.0), (1.0, 1.0))
    ]
    verdict = settled(plays, keep=(DropIllFormed(), DropDuplicates()))["m0"]
    assert verdict.reason == "duplicate"
    plays[1] = episode(trajectory(1.0), features={"format": np.array(0.0)})
    assert settled(plays, keep=(DropIllFormed(),))["m0"].reason == "ill_formed"


def test_what_an_episode_scored_and_would_have_scored_is_in_the_units():
    plays = [
        episode(trajectory(1.0), score=0.75, features={"without/solver": np.array([0.25]), "without/x": np.array(9.0)}),
        scored(0.0),
    ]
    units = settled(plays)["m0"].summary.units
    assert units.score is not None and units.without is not None
    np.testing.assert_array_equal(units.score, [0.75, np.nan])
    np.testing.assert_array_equal(units.without, [0.25, np.nan])
    assert units.dataset == "tasks"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MinCompleted(share=1.1), r"MinCompleted.share must be in \[0, 1\], found 1.1"),
        (lambda: MeanReward(low=1, high=0), "found low 1, high 0"),
        (lambda: MeanReward(low=float("nan")), "found low nan"),
        (lambda: DropOverlong(tokens=0), "DropOverlong.tokens must be at least 1, found 0"),
        (lambda: DropDuplicates(copies=0), "DropDuplicates.copies must be at least 1, found 0"),
    ],
)
def test_options_out_of_range_are_refused_by_name(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
