"""From a closed group to a verdict per policy."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.algorithms.credit import GroupMean, Returns
from astraflow.algorithms.keep import DropTruncated, DropZeroVariance
from astraflow.dataflow.settle import settle, smallest_group, unit_table
from astraflow.errors import RunFailed
from astraflow.types import Outcome, Task, Trajectory, Turn
from tests.unit.dataflow_pure.build import (
    TASK,
    episode,
    pipeline,
    sample,
    scored,
    settled,
    supervised,
    trajectory,
)

FAILED, TRUNCATED = Outcome.FAILED, Outcome.TRUNCATED


def one(episodes, **more):
    return settled(episodes, **more)["m0"]


def masks(verdict) -> dict[str, str | None]:
    return {each.sample_id: each.masked for each in verdict.samples}


def test_default_of_the_smallest_group():
    assert [smallest_group(size) for size in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 2, 2, 3, 4, 5]


def test_a_group_of_four():
    verdict = one([scored(1), scored(1), scored(0), scored(0)])
    assert verdict.reason is None
    np.testing.assert_allclose(verdict.advantages, [0.866, 0.866, -0.866, -0.866], atol=1e-4)
    assert verdict.advantages.dtype == np.float32
    assert masks(verdict) == {f"7/{n}/solver/0": None for n in range(4)}
    summary = verdict.summary
    assert (summary.group, summary.policy, summary.size, summary.arrival, summary.min_version) == (7, "m0", 4, 1, 0)
    assert summary.task == msgspec.structs.replace(TASK, payload={}), "algorithms never see a payload"
    assert summary.units.tokens.tolist() == [3] * 4
    assert summary.units.baseline_key == ("solver",) * 4


@pytest.mark.parametrize("rewards", [[0.1] * 4, [1e8] * 4])
def test_f34_equal_rewards_are_dropped_with_exactly_zero(rewards):
    verdict = one([scored(reward) for reward in rewards], keep=(DropZeroVariance(),))
    assert verdict.reason == "zero_variance"
    assert verdict.advantages.tolist() == [0.0] * 4


def test_f35_three_of_four_lost_is_too_few():
    verdict = one([scored(1), None, None, None])
    assert (verdict.reason, verdict.advantages.tolist()) == ("too_few", [0.0])
    alone = one([scored(1)], min_group=1, keep=(DropZeroVariance(),))
    assert (alone.reason, alone.advantages.tolist()) == ("no_baseline", [0.0])
    assert one([scored(1)], min_group=1, credit=Returns()).advantages.tolist() == [1.0]


@pytest.mark.parametrize("dead", [None, scored(9, outcome=FAILED), episode(outcome=FAILED)])
def test_f36_a_dead_member_is_not_in_the_baseline(dead):
    verdict = one([scored(1), scored(1), dead, scored(0)])
    table = verdict.summary.units
    np.testing.assert_allclose(verdict.advantages[table.counts], [0.5773, 0.5773, -1.1547], atol=1e-4)
    assert not verdict.advantages[~table.counts].any()
    assert verdict.reason is None
    assert verdict.summary.outcomes == (Outcome.COMPLETED, Outcome.COMPLETED, FAILED, Outcome.COMPLETED)
    assert masks(verdict).get("7/2/solver/0") in (None, "failed")
    assert ("7/2/solver/0" in masks(verdict)) == bool(dead is not None and dead.trajectories)


def test_f36_groups_do_not_shift_into_each_other():
    first = one([scored(1), scored(1), scored(0), None], group=0)
    second = one([scored(0), scored(0), scored(0), scored(1)], group=1)
    np.testing.assert_allclose(first.advantages, [0.577, 0.577, -1.155], atol=1e-3)
    np.testing.assert_allclose(second.advantages, [-0.5, -0.5, -0.5, 1.5], atol=1e-3)


def test_f11_every_reward_belongs_to_its_own_sample():
    """A unit's reward comes from its own turn; there is no list of rewards that could be broadcast."""
    units = unit_table(7, [scored(1.0), scored(None), scored(3.0), scored(4.0)], "m0")
    np.testing.assert_array_equal(units.reward, [1, np.nan, 3, 4])
    with pytest.raises(RunFailed, match="group 7 has 4 members, found 1 episodes"):
        settle(
            pipeline(), group=7, task=TASK, size=4, episodes=[scored(1)], arrival=1, policies={"m0": True}, min_group=2
        )


def test_f12_not_scored_is_no_reward_of_zero():
    verdict = one([scored(None), scored(1.0), scored(0.0), scored(-1.0)])
    np.testing.assert_allclose(verdict.advantages, [0, 1, 0, -1], atol=2e-6)
    assert masks(verdict)["7/0/solver/0"] == "unscored"
    assert masks(verdict)["7/2/solver/0"] is None, "a scored member with advantage 0 is trained"
    silent = one([scored(None), scored(-1.0), scored(-1.0), scored(None)], keep=(DropZeroVariance(),))
    assert silent.advantages.tolist() == [0, 0, 0, 0]
    assert silent.reason == "zero_variance"


def test_f12_nobody_was_scored():
    verdict = one([scored(None)] * 4)
    assert verdict.reason == "too_few"
    assert one([scored(None), scored(None), scored(None), scored(1)]).reason == "too_few"


def test_f12_a_turn_without_a_score_in_a_scored_sample():
    verdict = one([episode(trajectory(1.0, None)), episode(trajectory(0.0, None))])
    assert verdict.summary.units.counts.tolist() == [True, False, True, False]
    assert masks(verdict) == {"7/0/solver/0": None, "7/1/solver/0": None}


def test_f39_every_field_of_a_unit_stays_with_it():
    """Members are filtered by a mask over one table: no side list can fall out of step."""
    episodes = [scored(float(n), outcome=FAILED if n in (2, 3) else Outcome.COMPLETED) for n in range(6)]
    units = one(episodes).summary.units
    assert units.reward[units.counts].tolist() == [0, 1, 4, 5]
    assert units.episode[units.counts].tolist() == [0, 1, 4, 5]
    assert [units.sample_id[i] for i in np.flatnonzero(units.counts)] == [f"7/{n}/solver/0" for n in (0, 1, 4, 5)]


def test_f39_one_prompt_in_two_groups_is_two_groups():
    ids = [masks(one([scored(1), scored(0)], group=group)).keys() for group in (1, 2)]
    assert not ids[0] & ids[1]


def test_f102_policies_are_judged_apart_and_frozen_ones_not_at_all():
    """Actor m0 by version 3, verifier m1 by 4, a frozen helper: three policies, one episode."""

    def play(actor: float, verifier: float):
        return episode(
            trajectory(actor, version=3, role="actor", policy="m0"),
            trajectory(verifier, version=4, role="verifier", policy="m1"),
            trajectory(None, version=0, role="tool", policy="frozen"),
        )

    verdicts = settled([play(1, 0), play(0, 0)], policies={"m0": True, "m1": True, "frozen": False, "idle": True})
    assert verdicts.keys() == {"m0", "m1", "idle"}
    assert verdicts["m0"].summary.min_version == 3
    assert verdicts["m1"].summary.min_version == 4
    assert masks(verdicts["m0"]) == {"7/0/actor/0": None, "7/1/actor/0": None}
    assert masks(verdicts["m1"]) == {"7/0/verifier/0": None, "7/1/verifier/0": None}
    assert (verdicts["idle"].reason, verdicts["idle"].samples) == ("not_played", ())


def test_a_role_that_spoke_in_one_episode_is_not_short_of_members():
    """Members without the role did nothing wrong: it merely has nobody to be compared with."""
    called = episode(trajectory(1.0), trajectory(1.0, role="helper", policy="m1"))
    verdicts = settled([called, scored(0), scored(0), scored(1)], policies={"m0": True, "m1": True})
    assert verdicts["m1"].reason is None
    assert verdicts["m1"].advantages.tolist() == [0.0]


def test_lost_members_make_it_too_few_rather_than_not_played():
    assert one([None, None]).reason == "too_few"
    assert one([episode(), episode()]).reason == "not_played"


def test_statistics_of_two_roles_that_share_a_policy():
    plays = [
        episode(trajectory(1.0), trajectory(30.0, role="verifier")),
        episode(trajectory(0.0), trajectory(10.0, role="verifier")),
    ]
    verdict = one(plays, credit=GroupMean(std=False))
    assert verdict.summary.units.role == ("solver", "verifier") * 2
    assert verdict.advantages.tolist() == [0.5, 10.0, -0.5, -10.0]
    keyed = [episode(trajectory(1.0, 5.0, keys=["", "second"])), episode(trajectory(0.0, 7.0, keys=["", "second"]))]
    verdict = one(keyed, credit=GroupMean(std=False))
    assert verdict.summary.units.baseline_key == ("solver", "second") * 2
    assert verdict.advantages.tolist() == [0.5, -1.0, -0.5, 1.0]


def test_order_of_trajectories_and_turns_is_by_agent_and_index():
    both = [trajectory(1.0, 2.0, agent="solver#2"), trajectory(3.0)]
    units = unit_table(7, [episode(*both)], "m0")
    assert units.sample_id == ("7/0/solver/0", "7/0/solver#2/0", "7/0/solver#2/0")
    assert units.reward.tolist() == [3, 1, 2]
    assert unit_table(7, [episode(*reversed(both))], "m0").sample_id == units.sample_id


def test_a_unit_knows_its_own_oldest_version_and_tokens():
    units = unit_table(7, [episode(trajectory(1.0, 1.0, version=[3, 5], reply=4))], "m0")
    assert units.min_version.tolist() == [3, 5]
    assert units.tokens.tolist() == [4, 4]


def test_supervised_samples_are_seen_by_neither_keep_nor_credit():
    class Blind:
        def group(self, units):
            raise AssertionError("asked about a supervised sample")

        batch = verdict = group

    taught = Trajectory(agent="assistant", role="assistant", policy="m0", samples=(supervised(),))
    verdict = one([episode(taught)], min_group=1, credit=Blind(), keep=(Blind(),))
    assert (verdict.reason, len(verdict.advantages), verdict.newest) == (None, 0, None)
    assert masks(verdict) == {"7/0/assistant/0": None}
    assert one([episode(taught, outcome=FAILED)], min_group=1).reason == "too_few"


def test_supervised_samples_beside_rl_ones_that_are_dropped_are_still_trained():
    taught = Trajectory(agent="teacher", role="teacher", policy="m0", samples=(supervised(),))
    verdict = one([episode(trajectory(1.0), taught), scored(1.0)], keep=(DropZeroVariance(),))
    assert verdict.reason is None
    assert masks(verdict) == {
        "7/0/solver/0": "zero_variance", "7/0/teacher/0": None, "7/1/solver/0": "zero_variance",
    }  # fmt: skip


def test_supervised_samples_do_not_hide_why_the_others_are_masked():
    taught = Trajectory(agent="teacher", role="teacher", policy="m0", samples=(supervised(),))
    verdict = one(
        [episode(trajectory(1.0), taught), scored(1.0), scored(1.0, outcome=FAILED)], keep=(DropZeroVariance(),)
    )
    assert [each.masked for each in verdict.samples] == ["zero_variance", None, "zero_variance", "failed"]


def test_the_first_keep_to_mask_a_sample_names_the_reason():
    class Other(MaskTruncated):
        def mask(self, summary):
            return dict.fromkeys(summary.units.sample_id[1:], "other")

    verdict = one([scored(1), scored(0, outcome=TRUNCATED), scored(0)], keep=(DropTruncated(), Other()))
    assert [each.masked for each in verdict.samples] == [None, "truncated", "other"]


def test_a_unit_that_does_not_count_has_no_advantage_whatever_credit_says():
    class Leaky(Returns):
        def group(self, units):
            return np.where(units.counts, 1, np.nan).astype(np.float32)

    assert one([scored(1), scored(None), scored(0)], credit=Leaky()).advantages.tolist() == [1, 0, 1]


def test_truncated_members_stay_in_the_baseline_and_take_no_gradient_if_asked():
    cut = scored(0, outcome=TRUNCATED)
    verdict = one([scored(1), scored(1), cut, cut], keep=(DropTruncated(),))
    assert verdict.reason is None
    np.testing.assert_allclose(verdict.advantages, [0.866, 0.866, -0.866, -0.866], atol=1e-4)
    assert [each.masked for each in verdict.samples] == [None, None, "truncated", "truncated"]
    assert one([cut, scored(1, outcome=TRUNCATED)], keep=(DropTruncated(),)).reason == "truncated"
    assert [each.masked for each in one([scored(1), cut]).samples] == [None, None], "only if asked"


def test_a_group_of_which_only_masked_samples_are_left_is_dropped():
    """The only completed member was not scored."""
    verdict = one([scored(None), scored(1, outcome=TRUNCATED), scored(0, outcome=TRUNCATED)], keep=(MaskTruncated(),))
    assert verdict.reason == "truncated"


class MaskTruncated:
    def verdict(self, summary, advantages):
        return None

    mask = DropTruncated.mask


def test_empty_replies_have_nothing_to_train():
    def empty(reward):
        return episode(
            Trajectory(
                agent="solver",
                role="solver",
                policy="m0",
                samples=(sample(reply=0),),
                turns=(Turn(index=0, sample=0, start=2, stop=2, reward=reward),),
            )
        )

    verdict = one([empty(1), empty(0)])
    assert verdict.reason == "no_tokens"
    mixed = one([empty(0), scored(1)])
    assert mixed.reason is None
    np.testing.assert_allclose(mixed.advantages, [-0.7071, 0.7071], atol=1e-4)
    assert [each.masked for each in mixed.samples] == ["no_tokens", None]


def test_newest_is_the_version_that_the_group_lives_by():
    assert one([scored(1, version=3), scored(0, version=5)]).newest == 5
    assert one([scored(1, version=3), scored(0, version=4), scored(None, version=5)]).newest == 4


def test_first_reason_counts():
    class Never:
        def verdict(self, summary, advantages):
            return "never"

    assert one([scored(1), scored(1)], keep=(DropZeroVariance(), Never())).reason == "zero_variance"
    assert one([scored(1), scored(0)], keep=(DropZeroVariance(), Never())).reason == "never"


def test_features_of_task_and_episodes():
    task = Task(key="t", features={"level": np.array([2.0])})
    plays = [
        episode(trajectory(1.0), features={"format": np.array([1]), "odd": np.zeros(2)}),
        episode(trajectory(0.0), features={"odd": np.zeros(3)}),
        None,
    ]
    features = one(plays, task=task).summary.features
    assert features["level"].tolist() == [2.0]
    np.testing.assert_array_equal(features["episode.format"], [[1], [np.nan], [np.nan]])
    assert "episode.odd" not in features


class Raising(Returns):
    def group(self, units):
        raise ZeroDivisionError("x")


class WrongShape(Returns):
    def group(self, units):
        return np.zeros(1, np.float32)


class NotFinite(Returns):
    def group(self, units):
        return np.full(len(units), np.nan, np.float32)


class NoArray(Returns):
    def group(self, units):
        return [0.0]


class Angry:
    def verdict(self, summary, advantages):
        raise KeyError("k")


class AngryMask(MaskTruncated):
    def mask(self, summary):
        raise KeyError("k")


@dataclass
class Says(MaskTruncated):
    """A Keep that answers what it is told to."""

    reason: Any = None
    masked: Any = field(default_factory=dict)

    def verdict(self, summary, advantages):
        return self.reason

    def mask(self, summary):
        return self.masked


@pytest.mark.parametrize("reason", [False, True, "", 0, "Too Long", "1st", "a\n", ["long"]])
def test_a_reason_that_is_no_word_stops_the_run(reason):
    said = "must answer None or a reason ([a-z][a-z0-9_]*, such as zero_variance)"
    with pytest.raises(RunFailed, match=re.escape(f"Says.verdict on group 7, policy m0 {said}, found {reason!r}")):
        one([scored(1), scored(0)], keep=(Says(reason=reason),))


@pytest.mark.parametrize(
    ("masked", "message"),
    [
        (None, "must answer a dict of sample_id to reason, found NoneType"),
        (["a"], "must answer a dict of sample_id to reason, found list"),
        ({"ghost/1/2": "why"}, "masks 'ghost/1/2', which is no sample of the group"),
        ({3: "why"}, "masks 3, which is no sample of the group"),
    ],
)
def test_a_mask_of_anything_but_samples_of_the_group_stops_the_run(masked, message):
    with pytest.raises(RunFailed, match=re.escape(f"Says.mask on group 7, policy m0 {message}")):
        one([scored(1), scored(0)], keep=(Says(masked=masked),))


@pytest.mark.parametrize("reason", [None, False, "", "Too Long"])
def test_a_mask_without_a_reason_stops_the_run(reason):
    name = one([scored(1), scored(0)]).samples[0].sample_id
    with pytest.raises(RunFailed, match=rf"Says.mask .* must give sample '{name}' a reason .*, found {reason!r}"):
        one([scored(1), scored(0)], keep=(Says(masked={name: reason}),))
    kept = one([scored(1), scored(0)], keep=(Says(masked={name: "too_long2"}),))
    assert [each.masked for each in kept.samples] == ["too_long2", None]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"credit": Raising()}, r"Raising.group on group 7, policy m0 raised ZeroDivisionError\('x'\)"),
        ({"credit": WrongShape()}, r"WrongShape.group on group 7, policy m0 must answer float32 \[2\]"),
        ({"credit": NoArray()}, "found list"),
        ({"credit": NotFinite()}, "not finite"),
        ({"keep": (Angry(),)}, r"Angry.verdict on group 7, policy m0 raised KeyError\('k'\)"),
        ({"keep": (AngryMask(),)}, "AngryMask.mask on group 7, policy m0 raised"),
    ],
)
def test_a_broken_algorithm_stops_the_run_and_names_the_group(parts, message):
    with pytest.raises(RunFailed, match=message):
        one([scored(1), scored(0)], **parts)


@given(
    members=st.lists(
        st.none() | st.tuples(st.none() | st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from(list(Outcome))),
        min_size=1,
        max_size=8,
    ),
    data=st.data(),
)
def test_order_of_members_changes_no_verdict(members, data):
    """Permuting the members permutes the advantages, bit for bit, and changes no reason."""
    order = data.draw(st.permutations(range(len(members))))
    plays = [None if each is None else scored(each[0], outcome=each[1]) for each in members]
    straight = one(plays, keep=(DropZeroVariance(),))
    mixed = one([plays[i] for i in order], keep=(DropZeroVariance(),))
    assert mixed.reason == straight.reason
    at = dict(zip(straight.summary.units.episode.tolist(), straight.advantages.tolist(), strict=True))
    moved = dict(zip(mixed.summary.units.episode.tolist(), mixed.advantages.tolist(), strict=True))
    assert {order[place]: value for place, value in moved.items()} == at


@given(
    members=st.lists(
        st.none() | st.tuples(st.none() | st.sampled_from([0.0, 1.0]), st.sampled_from(list(Outcome))), min_size=1
    ),
    min_group=st.integers(1, 4),
)
def test_guarantee_failed_never_in_baseline(members, min_group):
    """Whatever failed or was not scored, the rest gets what it would get in a group of its own."""
    plays = [None if each is None else scored(each[0], outcome=each[1]) for each in members]
    verdict = one(plays, min_group=min_group)
    counting = [play for play, each in zip(plays, members, strict=True) if each and each[1] is not FAILED]
    counting = [play for play in counting if play and play.trajectories[0].turns[0].reward is not None]
    assert (verdict.reason is None) == (len(counting) >= min_group)
    if verdict.reason is None:
        alone = one(counting, min_group=1)
        assert verdict.advantages[verdict.summary.units.counts].tolist() == alone.advantages.tolist()
    trainable = {each.sample_id for each in verdict.samples if each.masked is None}
    units = verdict.summary.units
    assert trainable == {units.sample_id[i] for i in np.flatnonzero(units.counts)}
