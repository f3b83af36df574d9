"""Token in, token out: what was sampled is recorded once and never tokenised again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.errors import EngineFailed
from astraflow.rollout.conversation import Conversation
from astraflow.rollout.template import ChatTemplate
from astraflow.types import Span, StopReason
from tests.unit.rollout.doubles import END, reply

HI = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("sampled", "encoded"),
    [
        ([255, 31394], [28120]),
        ([254, 352], [2284]),
        ([198, 198], [1116]),
        ([1969, 80], [3725]),
        ([107, 18], [39428]),
        ([18, 109], [23597]),
        ([950, 30], [2026]),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_f22_a_second_turn_begins_with_the_sampled_ids(
    smollm2: ChatTemplate, sampled: list[int], encoded: list[int], ended: bool
) -> None:
    assert smollm2.encode_reply(smollm2.decode(sampled)) == encoded  # tokenising again would give others
    talk = Conversation(smollm2)
    first = talk.prompt([HI])
    ids = [*sampled, END] if ended else sampled
    text = talk.record(first, reply(ids), index=0)
    assert text == smollm2.decode(sampled)
    second = talk.prompt([HI, said(text), MORE])
    known = [*first.tokens.tolist(), *ids]
    assert second.tokens[: len(known)].tolist() == known
    assert smollm2.decode(second.tokens.tolist()) == smollm2.render([HI, said(text), MORE]).plain
    talk.record(second, reply([5, END]), index=1)
    (sample,) = talk.samples
    assert sample.sampled.sum() == len(ids) + 2
    assert sample.tokens[sample.sampled].tolist() == [*ids, 5, END]
    assert [(turn.sample, turn.stop - turn.start) for turn in talk.turns] == [(0, len(ids)), (0, 2)]


@settings(max_examples=100, deadline=None)
@given(replies=st.lists(st.lists(st.integers(17, 49151), min_size=1, max_size=12), min_size=2, max_size=4))
def test_f22_every_prompt_extends_the_last_prompt_and_completion(
    smollm2: ChatTemplate, replies: list[list[int]]
) -> None:
    talk = Conversation(smollm2)
    history = [HI]
    known: list[int] = []
    for index, ids in enumerate(replies):
        prompt = talk.prompt(history)
        assert prompt.tokens[: len(known)].tolist() == known
        text = talk.record(prompt, reply([*ids, END]), index=index)
        known = [*prompt.tokens.tolist(), *ids, END]
        history = [*history, said(text), MORE]
    (sample,) = talk.samples
    assert sample.tokens.tolist() == known


def test_f23_a_sampled_control_token_inside_a_reply_is_kept_as_it_was(smollm2: ChatTemplate) -> None:
    talk = Conversation(smollm2)
    first = talk.prompt([HI])
    text = talk.record(first, reply([9690, 1, 198, END]), index=0)
    second = talk.prompt([HI, said(text), MORE])
    assert second.tokens[len(first.tokens) :][:4].tolist() == [9690, 1, 198, END]


def test_an_edited_history_begins_a_new_sample(smollm2: ChatTemplate) -> None:
    talk = Conversation(smollm2)
    talk.record(talk.prompt([HI]), reply([5, END]), index=0)
    talk.record(talk.prompt([HI, said("shortened"), MORE]), reply([6, END]), index=1)
    assert len(talk.samples) == 2
    assert [turn.sample for turn in talk.turns] == [0, 1]
    assert talk.samples[1].sampled.sum() == 2


def test_an_edited_earlier_message_begins_a_new_sample(smollm2: ChatTemplate) -> None:
    talk = Conversation(smollm2)
    text = talk.record(talk.prompt([HI]), reply([5, END]), index=0)
    prompt = talk.prompt([{"role": "user", "content": "hello"}, said(text), MORE])
    assert prompt.node is None


def test_the_caller_may_reuse_his_list(smollm2: ChatTemplate) -> None:
    talk = Conversation(smollm2)
    history = [dict(HI)]
    text = talk.record(talk.prompt(history), reply([5, END]), index=0)
    history[0]["content"] = "changed"
    assert talk.prompt([HI, said(text), MORE]).node is not None
    assert talk.prompt([*history, said(text), MORE]).node is None


def test_two_ways_on_from_one_reply_train_it_once(smollm2: ChatTemplate) -> None:
    """The second way copies the exact ids as context."""
    talk = Conversation(smollm2)
    first = talk.prompt([HI])
    text = talk.record(first, reply([255, 31394, END]), index=0)
    talk.record(talk.prompt([HI, said(text), MORE]), reply([5, END]), index=1)
    other = talk.prompt([HI, said(text), {"role": "user", "content": "else"}])
    assert other.tokens[len(first.tokens) :][:3].tolist() == [255, 31394, END]
    talk.record(other, reply([6, END]), index=2)
    one, two = talk.samples
    assert one.tokens[one.sampled].tolist() == [255, 31394, END, 5, END]
    assert two.tokens[two.sampled].tolist() == [6, END]
    assert two.spans == (Span(start=len(other.tokens), stop=len(two.tokens), version=3, digest="d3"),)


def test_the_same_question_twice_gives_two_samples(smollm2: ChatTemplate) -> None:
    talk = Conversation(smollm2)
    prompts = [talk.prompt([HI]), talk.prompt([HI])]
    for index, prompt in enumerate(prompts):
        talk.record(prompt, reply([5 + index, END]), index=index)
    assert [sample.tokens[sample.sampled].tolist() for sample in talk.samples] == [[5, END], [6, END]]


def test_a_template_that_trims_replies_keeps_their_ids(smollm2: ChatTemplate) -> None:
    trims = ChatTemplate(
        smollm2._json,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    talk = Conversation(trims)
    first = talk.prompt([HI])
    text = talk.record(first, reply([5, 198, END]), index=0)
    assert text.endswith("\n")
    second = talk.prompt([HI, said(text), MORE])
    assert second.tokens[len(first.tokens) :][:3].tolist() == [5, 198, END]


def test_a_template_that_strips_thinking_begins_a_new_sample(smollm2: ChatTemplate) -> None:
    strips = ChatTemplate(
        smollm2._json,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    talk = Conversation(strips)
    ids = smollm2.encode_reply("so</think>4")
    text = talk.record(talk.prompt([HI]), reply([*ids, END]), index=0)
    assert talk.prompt([HI, said(text), MORE]).node is None


@pytest.mark.parametrize("ids", [[5, 6, END], [5, 6, 7, 8, 9, 10], [5, END, 6, END]])
def test_f25_lengths_are_what_the_engine_said(smollm2: ChatTemplate, ids: list[int]) -> None:
    """pad is eos is 2: nothing is ever found by searching for it."""
    talk = Conversation(smollm2)
    prompt = talk.prompt([HI])
    stop = StopReason.STOP if ids[-1] == END else StopReason.LENGTH
    talk.record(prompt, reply(ids, stop=stop), index=0)
    (sample,) = talk.samples
    assert sample.sampled.tolist() == [False] * len(prompt.tokens) + [True] * len(ids)
    assert sample.tokens[sample.sampled].tolist() == ids


def test_f26_nothing_is_appended_to_a_cut_reply(smollm2: ChatTemplate) -> None:
    for ids, stop in (([5, 6, 7, 8], StopReason.LENGTH), ([5, 6, 7, END], StopReason.STOP)):
        talk = Conversation(smollm2)
        talk.record(talk.prompt([HI]), reply(ids, stop=stop), index=0)
        assert talk.samples[0].tokens[talk.samples[0].sampled].tolist() == ids
        assert talk.turns[0].stop_reason is stop


@pytest.mark.parametrize("logprobs", [[float("nan"), -0.1, -0.2, -0.3], [-0.1, -0.2], [-0.1, float("inf"), -0.2]])
def test_f27_lists_that_do_not_fit_are_refused(smollm2: ChatTemplate, logprobs: list[float]) -> None:
    talk = Conversation(smollm2)
    with pytest.raises(EngineFailed, match=r"3 tokens, but|not finite"):
        talk.record(talk.prompt([HI]), reply([11, 12, 13], logprobs=logprobs), index=0)
    assert not talk.samples and not talk.turns


def test_f27_log_probs_stand_at_their_tokens(smollm2: ChatTemplate) -> None:
    talk = Conversation(smollm2)
    talk.record(talk.prompt([HI]), reply([11, 12, 13], logprobs=[-0.1, -0.2, -0.3]), index=0)
    (sample,) = talk.samples
    at = dict(zip(sample.tokens[sample.sampled].tolist(), sample.logprobs[sample.sampled].tolist(), strict=True))
    assert at == pytest.approx({11: -0.1, 12: -0.2, 13: -0.3})
    assert not sample.logprobs[~sample.sampled].any()


@pytest.mark.parametrize(
    "spans",
    [
        (Span(start=0, stop=2, version=3, digest="a"),),
        (Span(start=1, stop=3, version=3, digest="a"),),
        (Span(start=0, stop=2, version=3, digest="a"), Span(start=1, stop=3, version=4, digest="b")),
        (),
    ],
)
def test_f31_spans_must_cover_the_reply(smollm2: ChatTemplate, spans: tuple[Span, ...]) -> None:
    talk = Conversation(smollm2)
    with pytest.raises(EngineFailed, match="spans"):
        talk.record(talk.prompt([HI]), reply([7, 8, 9], spans=spans), index=0)
    assert not talk.samples


def test_f31_a_reply_over_two_versions_keeps_both(smollm2: ChatTemplate) -> None:
    talk = Conversation(smollm2)
    prompt = talk.prompt([HI])
    spans = (Span(start=0, stop=2, version=3, digest="a"), Span(start=2, stop=3, version=4, digest="b"))
    talk.record(prompt, reply([7, 8, 9], spans=spans, logprobs=[-0.1, -0.2, -0.3]), index=0)
    (sample,) = talk.samples
    at = len(prompt.tokens)
    assert [(s.start - at, s.stop - at, s.version) for s in sample.spans] == [(0, 2, 3), (2, 3, 4)]
    assert sample.min_version == 3
    assert sample.tokens.dtype == np.int32 and sample.logprobs.dtype == np.float32
