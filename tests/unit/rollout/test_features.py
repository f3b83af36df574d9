"""What the worker tells data algorithms of an episode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from astraflow.rollout.features import features_of
from astraflow.rollout.score import UnknownName
from astraflow.rollout.workflow import Agents, Reward
from astraflow.testing.check_workflow import character_template
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Episode, FailureKind, Sample, Task, Trajectory
from astraflow.wire.codec import decode, encode
from tests.unit.dataflow_pure.build import sample, trajectory
from tests.unit.rollout.doubles import ScriptedEngine, play, reply

HI = {"role": "user", "content": "hi"}


def changed(trajectory: Trajectory, tokens: dict[int, int]) -> Trajectory:
    (first,) = trajectory.samples
    new = first.tokens.copy()
    for place, token in tokens.items():
        new[place] = token
    other = Sample(tokens=new, sampled=first.sampled, logprobs=first.logprobs, spans=first.spans)
    return Trajectory(agent=trajectory.agent, role=trajectory.role, policy=trajectory.policy, samples=(other,))


def content(*trajectories: Trajectory, policy: str = "m0") -> list[int]:
    hashed: list[int] = features_of({}, trajectories)[f"content_hash/{policy}"].tolist()
    return hashed


def test_what_was_sampled_alone_decides_the_hash() -> None:
    one = trajectory(1.0)
    assert content(one) == content(trajectory(0.0)), "not the reward"
    assert content(one) == content(changed(one, {0: 99})), "not the prompt"
    assert content(one) != content(changed(one, {3: 99}))
    assert content(one) != content(one, trajectory(1.0, agent="solver#2"))


def test_where_a_reply_ends_matters() -> None:
    """The same tokens, cut at another place into two samples."""
    whole = Trajectory(agent="a", role="a", policy="m0", samples=(sample(0, prompt=1, reply=4), sample(0, prompt=1)))
    cut = Trajectory(agent="a", role="a", policy="m0", samples=(sample(0, prompt=1), sample(0, prompt=1, reply=4)))
    assert content(whole) != content(cut)


def test_each_policy_has_its_own_and_order_of_agents_does_not_matter() -> None:
    a, b = trajectory(1.0), trajectory(1.0, 0.0, agent="critic", role="critic", policy="m1")
    found = features_of({}, [a, b])
    assert found.keys() == {"content_hash/m0", "content_hash/m1"}
    assert found["content_hash/m0"].tolist() == content(a)
    second = trajectory(1.0, 1.0, agent="solver#2")
    assert content(a, second) == content(second, a)


def test_hashes_are_exact_as_the_float64_that_algorithms_see() -> None:
    array = features_of({}, [trajectory(1.0)])["content_hash/m0"]
    assert (array.dtype, array.shape) == (np.dtype(np.uint32), (2,))
    assert array.astype(np.float64).astype(np.uint32).tolist() == array.tolist()


def test_features_travel() -> None:
    features = features_of({"format": 1, "without/critic": 0.25, "vector": [1, 2]}, [trajectory(1.0)])
    assert all(not array.flags.writeable for array in features.values())
    episode = Episode(task_key="t", outcome="completed", features=features)  # type: ignore[arg-type]
    back = decode(encode(episode), Episode)
    assert back.features["vector"].tolist() == [1.0, 2.0]
    assert back.features["content_hash/m0"].tolist() == features["content_hash/m0"].tolist()


def test_a_workflow_says_its_own() -> None:
    async def workflow(task: Task, agents: Agents) -> Reward:
        await agents["main"].chat([HI])
        return Reward(1.0, features={"format": 0.0})

    episode = run_virtual(lambda: play(workflow, ScriptedEngine(reply([5, 6])), character_template()))
    assert episode.features["format"].tolist() == 0.0
    assert episode.features["content_hash/main"].shape == (2,)


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ({"format": "yes"}, r"Reward.features\['format'\] must be numbers, found 'yes'"),
        ({"format": {"a": 1}}, "must be numbers"),
        ({"content_hash/main": 1}, "the worker computes that"),
        ({"big": range(5000)}, "has 5000 numbers, the limit is 4096"),
        ({"huge": 10**400}, r"Reward.features\['huge'\] must be numbers, found 1000"),
        ({"huge": 10**5000}, r"Reward.features\['huge'\] must be numbers, found something of type int"),
        ({"deep": np.zeros((1,) * 9)}, "has 9 dimensions, the limit is 8"),
        ({5: 1.0}, "must be named by text, found 5"),
        ({"half \ud800": 1.0}, "must be named by text, found 'half"),
    ],
)
def test_what_is_no_number_is_the_workflows_mistake(features: dict[Any, Any], words: str) -> None:
    with pytest.raises(UnknownName, match=words):
        features_of(features, [trajectory(1.0)])

    async def workflow(task: Task, agents: Agents) -> Reward:
        await agents["main"].chat([HI])
        return Reward(1.0, features=features)

    episode = run_virtual(lambda: play(workflow, ScriptedEngine(reply([5, 6])), character_template()))
    assert episode.failure is FailureKind.WORKFLOW
