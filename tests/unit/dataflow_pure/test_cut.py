"""From selected groups to the rows of one batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.algorithms.base import PolicyRoom, ReadyGroup
from astraflow.algorithms.credit import GroupMean, Returns, Whitened
from astraflow.algorithms.keep import DropTruncated, DropZeroVariance
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.select import EarliestDeadline
from astraflow.dataflow.cut import Cut, CutGroup, build_rows, is_stale
from astraflow.errors import RunFailed
from astraflow.types import AdvantageRun, Outcome, Row, SampleKind, Trajectory, Turn
from tests.unit.dataflow_pure.build import (
    episode,
    pipeline,
    sample,
    scored,
    settled,
    supervised,
    trajectory,
)


def group(episodes, *, number: int = 7, policy: str = "m0", use: int = 0, **parts) -> CutGroup:
    policies = {policy: True}
    verdict = settled(episodes, group=number, policies=policies, min_group=1, **parts)[policy]
    return CutGroup(
        group=number,
        episodes=episodes,
        advantages=verdict.advantages,
        masked={each.sample_id: each.masked for each in verdict.samples if each.masked is not None},
        use=use,
    )


def cut(*groups: CutGroup, version: int = 0, bound: int = 1, policy: str = "m0", **parts) -> Cut:
    return build_rows(groups, pipeline=pipeline(**parts), policy=policy, version=version, max_staleness=bound)


def ids(made: Cut) -> list[str]:
    return [row.sample_id for row in made.rows]


def test_rows_of_a_group():
    made = cut(group([scored(1), scored(0)], credit=GroupMean(std=False)))
    assert ids(made) == ["7/0/solver/0", "7/1/solver/0"]
    assert (made.tokens, made.sequences, made.masked, made.stale_groups) == (6, 2, {}, ())
    row = made.rows[0]
    assert row.mask.tolist() == [False, False, True, True, True]
    assert row.advantages == (AdvantageRun(start=2, stop=5, value=0.5),)
    assert (row.use, row.kind, row.pair, len(row.spans)) == (0, SampleKind.RL, None, 1)
    np.testing.assert_array_equal(row.logprobs, np.float32([0, 0, -0.5, -0.5, -0.5]))
    assert row.tokens.dtype == np.int32


def test_order_is_selection_then_index_agent_n():
    two = [episode(trajectory(1.0, agent="solver#2"), trajectory(0.0)), scored(0.5)]
    made = cut(group(two, number=9), group([scored(1), scored(0)], number=3))
    assert ids(made) == ["9/0/solver/0", "9/0/solver#2/0", "9/1/solver/0", "3/0/solver/0", "3/1/solver/0"]


def test_each_unit_gets_its_advantage_on_exactly_its_tokens():
    """Two turns of one sample, P A P B, and a turn whose reply was interrupted by a tool's tokens."""
    made = cut(group([episode(trajectory(1.0, 3.0))], credit=Returns()))
    assert made.rows[0].advantages == (
        AdvantageRun(start=2, stop=5, value=1.0),
        AdvantageRun(start=7, stop=10, value=3.0),
    )
    broken = Trajectory(
        agent="solver",
        role="solver",
        policy="m0",
        samples=(sample([0, 0]),),
        turns=(Turn(index=0, sample=0, start=1, stop=9, reward=2.0),),
    )
    row = cut(group([episode(broken)], credit=Returns())).rows[0]
    assert row.advantages == (AdvantageRun(start=2, stop=5, value=2.0), AdvantageRun(start=7, stop=9, value=2.0))
    assert row.mask.tolist() == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2 + [False]


def test_a_second_sample_of_a_trajectory_has_its_own_row():
    """An edited history starts a new sample: turn 1 is in it, a branch without any scored turn is masked."""
    branched = Trajectory(
        agent="solver",
        role="solver",
        policy="m0",
        samples=(sample(1), sample(2, reply=5), sample(3)),
        turns=(
            Turn(index=1, sample=1, start=2, stop=7, reward=2.0),
            Turn(index=0, sample=0, start=2, stop=5, reward=1.0),
            Turn(index=2, sample=2, start=2, stop=5),
        ),
    )
    made = cut(group([episode(branched)], credit=Returns()))
    assert [(row.sample_id, row.advantages) for row in made.rows] == [
        ("7/0/solver/0", (AdvantageRun(start=2, stop=5, value=1.0),)),
        ("7/0/solver/1", (AdvantageRun(start=2, stop=7, value=2.0),)),
    ]
    assert (made.masked, made.tokens, made.sequences) == ({"7/0/solver/2": "unscored"}, 8, 2)
    only = cut(group([episode(branched)], credit=Returns()), version=3, bound=1)
    assert (ids(only), only.masked["7/0/solver/0"]) == (["7/0/solver/1"], "stale")


def test_a_turn_that_was_not_scored_is_masked_within_its_row():
    made = cut(group([episode(trajectory(1.0, None))], credit=Returns()))
    assert made.rows[0].advantages == (AdvantageRun(start=2, stop=5, value=1.0),)
    assert made.tokens == 3, "masked tokens are not in the denominator"


def test_masked_samples_have_no_row_but_a_reason():
    plays = [scored(1), scored(None), scored(0, outcome=Outcome.FAILED), None, scored(0, outcome=Outcome.TRUNCATED)]
    made = cut(group(plays, keep=(DropTruncated(),)))
    assert ids(made) == ["7/0/solver/0"]
    assert made.masked == {"7/1/solver/0": "unscored", "7/2/solver/0": "failed", "7/4/solver/0": "truncated"}
    assert (made.tokens, made.sequences) == (3, 1)


def test_a_sample_without_a_scored_token_is_reported():
    """Not masked by anyone, yet nothing of it is in a turn."""
    orphan = Trajectory(agent="solver", role="solver", policy="m0", samples=(sample(),))
    made = cut(CutGroup(group=7, episodes=[episode(orphan)], advantages=np.zeros(0, np.float32)))
    assert (made.rows, made.masked) == ((), {"7/0/solver/0": "no_tokens"})


# ── staleness ──


@pytest.mark.parametrize(
    ("version", "current", "bound", "stale"),
    [
        (7, 10, 2, True),
        (8, 10, 2, False),
        (9, 10, 2, False),
        (10, 10, 2, False),
        (0, 0, 0, False),
        (0, 1, 0, True),
        (0, 3, 2, True),
        (11, 10, 2, False),
        (11, 10, 0, False),
    ],
)
def test_f54_current_minus_oldest_is_at_most_the_bound(version, current, bound, stale):
    """Also version 0, and 11, which was undone: its age is 0 until it is reached again."""
    assert is_stale(sample(version), version=current, max_staleness=bound) is stale
    made = cut(group([scored(1, version=version)], credit=Returns()), version=current, bound=bound)
    assert (made.stale_groups == (7,)) is stale
    assert (len(made.rows) == 0) is stale


def test_f54_a_sample_is_as_old_as_its_oldest_token():
    assert is_stale(sample([7, 10]), version=10, max_staleness=2)
    assert not is_stale(sample([8, 10]), version=10, max_staleness=2)


def test_f57_age_is_measured_at_use_not_at_arrival():
    """Version 5 arrives at 6 (age 1), is served at 8 (age 3), replayed at 50: bound 2."""
    aging = [scored(1, version=5), scored(0, version=5)]
    assert len(cut(group(aging), version=6, bound=2).rows) == 2
    assert len(cut(group(aging), version=7, bound=2).rows) == 2
    made = cut(group(aging), version=8, bound=2)
    assert (made.rows, made.stale_groups) == ((), (7,))
    assert made.masked == {"7/0/solver/0": "stale", "7/1/solver/0": "stale"}
    assert cut(group(aging, use=1), version=50, bound=2).stale_groups == (7,)


def test_a_stale_member_stays_in_the_baseline():
    plays = [scored(1, version=5), scored(0, version=1)]
    made = cut(group(plays, credit=GroupMean(std=False)), version=6, bound=2)
    assert ids(made) == ["7/0/solver/0"]
    assert made.rows[0].advantages[0].value == 0.5, "compared with the stale member's reward"
    assert (made.masked, made.stale_groups) == ({"7/1/solver/0": "stale"}, ())


def test_a_group_is_stale_when_nothing_else_of_it_may_be_trained():
    plays = [scored(1, version=1), scored(None, version=6), scored(0, version=1)]
    made = cut(group(plays), group([scored(1, version=6), scored(0, version=6)], number=8), version=6, bound=2)
    assert made.stale_groups == (7,)
    assert ids(made) == ["8/0/solver/0", "8/1/solver/0"]
    assert made.masked["7/1/solver/0"] == "unscored"


def test_a_group_without_a_row_for_other_reasons_is_not_stale():
    made = cut(group([scored(None), scored(None)]), version=6)
    assert (made.rows, made.stale_groups) == ((), ())
    assert made.masked == {"7/0/solver/0": "unscored", "7/1/solver/0": "unscored"}


def test_f102_staleness_is_per_policy():
    """Actor's turn by m0 version 3, verifier's by m1 version 4; both now at 4, bound 0."""

    def play(actor, verifier):
        return episode(
            trajectory(actor, version=3, role="actor", policy="m0"),
            trajectory(verifier, version=4, role="verifier", policy="m1"),
            trajectory(None, version=0, role="tool", policy="frozen"),
        )

    plays = [play(1, 1), play(0, 0)]
    old = cut(group(plays, policy="m0"), policy="m0", version=4, bound=0)
    assert (old.rows, old.stale_groups) == ((), (7,))
    new = cut(group(plays, policy="m1"), policy="m1", version=4, bound=0)
    assert ids(new) == ["7/0/verifier/0", "7/1/verifier/0"]
    assert not set(old.masked) & set(new.masked), "frozen tokens and another policy's are nobody's rows"


def test_supervised_samples_are_never_stale_and_have_advantage_one_on_their_targets():
    taught = Trajectory(agent="assistant", role="assistant", policy="m0", samples=(supervised(targets=4),))
    made = cut(group([episode(taught)]), version=1000, bound=0)
    row = made.rows[0]
    assert (row.kind, row.spans, made.tokens) == (SampleKind.SUPERVISED, (), 4)
    assert row.advantages == (AdvantageRun(start=2, stop=6, value=1.0),)
    assert row.mask.tolist() == [False] * 2 + [True] * 4
    assert not row.logprobs.any()


# ── credit over the batch ──


def test_f37_whitening_sees_the_whole_batch_once():
    groups = [group([scored(r) for r in rewards], number=n) for n, rewards in enumerate(([1, 1, 0, 0], [1, 0, 0, 0]))]
    values = [row.advantages[0].value for row in cut(*groups).rows]
    np.testing.assert_allclose(values, [0.866] * 2 + [-0.866] * 2 + [1.5] + [-0.5] * 3, atol=1e-3)
    made = cut(*groups, credit=Whitened(credit=GroupMean()))
    values = [row.advantages[0].value for row in made.rows]
    np.testing.assert_allclose(values, [0.9354] * 2 + [-0.9354] * 2 + [1.6202] + [-0.5401] * 3, atol=1e-4)
    assert {number: len(each) for number, each in made.advantages.items()} == {0: 4, 1: 4}


def test_f63_replayed_groups_keep_their_first_advantages_and_statistics():
    first = cut(group([scored(1), scored(0)], credit=Returns()), credit=Whitened(credit=Returns()))
    replayed = CutGroup(group=7, episodes=[scored(1), scored(0)], advantages=first.advantages[7], use=1)
    fresh = group([scored(5), scored(1)], number=8, credit=Returns())
    made = cut(replayed, fresh, credit=Whitened(credit=Returns()))
    assert [(row.use, row.advantages) for row in made.rows[:2]] == [(1, row.advantages) for row in first.rows]
    assert [row.logprobs.tobytes() for row in made.rows[:2]] == [row.logprobs.tobytes() for row in first.rows]
    np.testing.assert_allclose([row.advantages[0].value for row in made.rows[2:]], [0.7071, -0.7071], atol=1e-5)


class Raising(Returns):
    def batch(self, units, advantages):
        raise ValueError("x")


class Short(Returns):
    def batch(self, units, advantages):
        return []


class Wide(Returns):
    def batch(self, units, advantages):
        return [np.zeros(9, np.float32) for _ in units]


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        (Raising(), r"Raising.batch on policy m0, groups \[7\] raised ValueError\('x'\)"),
        (Short(), "Short.batch on policy m0 must answer 1 arrays, found 0"),
        (Wide(), r"Wide.batch on policy m0, group 7 must answer float32 \[2\]"),
    ],
)
def test_a_broken_credit_stops_the_run(credit, message):
    with pytest.raises(RunFailed, match=message):
        cut(group([scored(1), scored(0)]), credit=credit)


# ── nothing to learn from ──


def test_f64_groups_without_signal_free_their_room_and_are_never_a_short_batch():
    """8 prompts, all solved: each is dropped with its reason, Pace goes on asking, no batch is cut from 3 of 4."""
    verdicts = [settled([scored(1)] * 4, group=n, keep=(DropZeroVariance(),))["m0"] for n in range(8)]
    assert [verdict.reason for verdict in verdicts] == ["zero_variance"] * 8
    useful = [settled([scored(1), scored(0)], group=n, keep=(DropZeroVariance(),))["m0"] for n in range(3)]
    assert [verdict.reason for verdict in useful] == [None] * 3
    ready = [ReadyGroup(group=n, min_version=0, arrival=n) for n in range(3)]
    assert EarliestDeadline().pick(ready, need=4, oldest_open=None) == []
    room = PolicyRoom(
        version=0, max_staleness=0, groups_per_batch=4, open_groups=0, kept_groups=3, batched_groups=0, steps_left=9
    )
    assert BoundedStaleness().may_admit({"m0": room})


def test_nothing_selected_is_an_empty_cut():
    made = cut()
    assert (made.rows, made.tokens, made.sequences, made.masked, made.stale_groups) == ((), 0, 0, {}, ())


# ── what holds for any groups ──

MEMBER = st.none() | st.tuples(
    st.none() | st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(list(Outcome)), st.integers(0, 6), st.integers(0, 6)
)


def _play(member):
    if member is None:
        return None
    reward, outcome, first, second = member
    return episode(trajectory(reward, reward, version=[first, second]), outcome=outcome)


@given(
    groups=st.lists(st.lists(MEMBER, min_size=1, max_size=4), max_size=4),
    version=st.integers(0, 6),
    bound=st.integers(0, 3),
)
def test_guarantee_staleness_bound(groups, version, bound):
    made = cut(*[group([_play(m) for m in g], number=n) for n, g in enumerate(groups)], version=version, bound=bound)
    for row in made.rows:
        assert version - min(span.version for span in row.spans) <= bound
        _row_is_consistent(row)
    assert made.tokens == sum(int(row.mask.sum()) for row in made.rows)
    assert made.sequences == len(made.rows)
    everything = {
        f"{n}/{index}/solver/0" for n, g in enumerate(groups) for index, member in enumerate(g) if member is not None
    }
    assert set(ids(made)) | set(made.masked) == everything, "every sample is trained or masked with a reason"
    assert len(ids(made)) + len(made.masked) == len(everything), "and never both"
    assert not {sample_id.split("/")[0] for sample_id in ids(made)} & {str(n) for n in made.stale_groups}


def _row_is_consistent(row: Row) -> None:
    covered = np.zeros(len(row.tokens), np.bool_)
    for run in row.advantages:
        assert not covered[run.start : run.stop].any(), "advantages overlap"
        covered[run.start : run.stop] = True
    np.testing.assert_array_equal(covered, row.mask)
    assert row.mask.any()


@given(groups=st.lists(st.lists(MEMBER, min_size=1, max_size=4), min_size=1, max_size=4))
def test_guarantee_the_same_input_gives_the_same_rows(groups):
    made = [cut(*[group([_play(m) for m in g], number=n) for n, g in enumerate(groups)], version=3) for _ in range(2)]
    assert [_bytes(row) for row in made[0].rows] == [_bytes(row) for row in made[1].rows]
    assert made[0].masked == made[1].masked


def _bytes(row: Row):
    return (row.sample_id, row.tokens.tobytes(), row.mask.tobytes(), row.logprobs.tobytes(), row.spans, row.advantages)
