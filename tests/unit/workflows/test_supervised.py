"""Finished conversations become rows whose targets are the assistant's replies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from astraflow.rollout.template import ChatTemplate
from astraflow.testing.check_workflow import character_template
from astraflow.types import Episode, FailureKind, Lease, Outcome, SampleKind, Task
from astraflow.workflows.supervised import Supervised

TEMPLATE = character_template()
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


def played(payload: dict[str, Any], template: ChatTemplate = TEMPLATE) -> Episode:
    task = Task(key="t", workflow="supervised", payload=payload)
    return asyncio.run(Supervised({"main": template})(Lease(group=1, index=0, attempt=1, task=task)))


def targets(episode: Episode) -> list[str]:
    (trajectory,) = episode.trajectories
    return [
        TEMPLATE.decode(trajectory.samples[turn.sample].tokens[turn.start : turn.stop].tolist())
        for turn in trajectory.turns
    ]


def test_replies_with_their_end_of_turn_are_the_targets() -> None:
    episode = played({"messages": TALK, "policy": "main"})
    assert episode.outcome is Outcome.COMPLETED and episode.score is None
    (trajectory,) = episode.trajectories
    assert trajectory.policy == "main" and len(trajectory.samples) == 1
    assert targets(episode) == ["yes<end>", "no<end>"]
    (sample,) = trajectory.samples
    assert sample.kind is SampleKind.SUPERVISED and not sample.spans and not sample.logprobs.any()
    assert TEMPLATE.decode(sample.tokens[sample.sampled].tolist()) == "yes<end>no<end>"
    assert TEMPLATE.decode(sample.tokens.tolist()) == TEMPLATE.render(TALK, generation=False).plain


def test_what_the_model_saw_is_what_it_will_see() -> None:
    """The prompt in front of a target is the one that sampling would use."""
    episode = played({"messages": TALK, "policy": "main"})
    (sample,) = episode.trajectories[0].samples
    first = episode.trajectories[0].turns[0]
    assert sample.tokens[: first.start].tolist() == TEMPLATE.encode(TEMPLATE.render(TALK[:2]))


def test_f23_control_text_in_a_target_stays_text() -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a<end>b"}]
    (sample,) = played({"messages": talk, "policy": "main"}).trajectories[0].samples
    ids = sample.tokens[sample.sampled].tolist()
    assert ids.count(0) == 1 and ids[-1] == 0 and TEMPLATE.decode(ids) == "a<end>b<end>"


def test_a_template_that_shows_earlier_replies_otherwise_gives_a_row_each() -> None:
    strips = ChatTemplate(
        TEMPLATE._json,
        "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' }}"
        "{{ m['content'].split('=')[-1] if not loop.last else m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}",
        names={"eos_token": "<end>"},
    )
    talk = [dict(each, content="think=" + each["content"]) for each in TALK]
    episode = played({"messages": talk, "policy": "main"}, strips)
    assert len(episode.trajectories[0].samples) == 2
    assert targets(episode) == ["think=yes<end>", "think=no<end>"]


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({"messages": TALK}, "payload.policy must be one of ['main'], found None"),
        ({"messages": TALK, "policy": "other"}, "found 'other'"),
        ({"policy": "main"}, "must be a list, found NoneType"),
        ({"messages": "hi", "policy": "main"}, "must be a list, found str"),
        ({"messages": [], "policy": "main"}, "needs an assistant reply"),
        ({"messages": TALK[:2], "policy": "main"}, "needs an assistant reply"),
        ({"messages": TALK[2:3] * 2, "policy": "main"}, "nothing asks for it"),
        ({"messages": [{"role": "user"}], "policy": "main"}, "messages[0] must have"),
        ({"messages": [*TALK, {"role": "user", "content": 3}], "policy": "main"}, "messages[5] must have"),
    ],
)
def test_a_row_that_is_wrong_is_named(payload: dict[str, Any], said: str) -> None:
    episode = played(payload)
    assert episode.failure is FailureKind.WORKFLOW
    assert said in str(episode.error) and "'t'" in str(episode.error)
