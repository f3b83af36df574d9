"""Conformance kit of workflows: ``check_workflow(Duel(), task, roles=("solver", "verifier"))`` in a test of yours.

Plays it on a fake engine with a character tokenizer: what is recorded must be what was sampled, a failing engine must
be nobody's reward, and a cut reply must end the episode.
"""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from astraflow.engines.base import EngineInfo, GenerateReply, GenerateRequest
from astraflow.errors import Unavailable
from astraflow.rollout.agents import Seat
from astraflow.rollout.play import WorkflowPlayer
from astraflow.rollout.template import ChatTemplate
from astraflow.rollout.workflow import Workflow
from astraflow.testing.fake_engine import FakeEngine
from astraflow.types import Episode, FailureKind, Lease, Manifest, Outcome, Sampling, StopReason, Task

_SPECIAL = ("<end>", "<user>", "<bot>", "<other>", "<unknown>")
_CHARACTERS = string.printable
_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<user>' if m['role'] == 'user' else '<bot>' if m['role'] == 'assistant' else '<other>' }}"
    "{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def character_template() -> ChatTemplate:
    """A chat template over a tokenizer of one token per printable character."""
    added = [
        {"id": n, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for n, text in enumerate(_SPECIAL)
    ]  # fmt: skip
    vocabulary = {word: n for n, word in enumerate([*_SPECIAL, *_CHARACTERS])}
    split = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"}
    described = {"version": "1.0", "added_tokens": added, "pre_tokenizer": split, "decoder": {"type": "Fuse"}}
    return ChatTemplate(json.dumps({**described, "model": model}), _TEMPLATE, names={"eos_token": "<end>"})


def check_workflow(workflow: Workflow, task: Task, *, roles: Sequence[str] = ("main",), limit_s: float = 10.0) -> None:
    """Raises AssertionError saying what is broken. ``task`` is one that the workflow can play."""
    asyncio.run(_check(workflow, task, roles, limit_s))


async def _check(workflow: Workflow, task: Task, roles: Sequence[str], limit_s: float) -> None:
    async def play(after: Callable[[GenerateReply], GenerateReply]) -> Episode:
        return await _play(workflow, task, roles, limit_s, after)

    first = await play(_as_it_is)
    assert first.outcome is not Outcome.FAILED, f"a plain episode failed: {first.failure}: {first.error}"
    assert first.trajectories, "no agent was asked anything: there is nothing to train"
    _check_record(first)
    assert _same(first, await play(_as_it_is)), "two episodes of one seed differ: it draws from a state of its own"
    broken = await play(_broken)
    assert broken.outcome is Outcome.FAILED, "an engine that fails gave an episode with a reward"
    assert broken.failure is FailureKind.INFRA, f"an engine's failure was reported as {broken.failure}: {broken.error}"
    cut = await play(_cut)
    assert cut.outcome is Outcome.TRUNCATED, f"a cut reply ends the episode as truncated, found {cut.outcome}"


async def _play(
    workflow: Workflow,
    task: Task,
    roles: Sequence[str],
    limit_s: float,
    after: Callable[[GenerateReply], GenerateReply],
) -> Episode:
    words = len(_SPECIAL) + len(_CHARACTERS)
    fake = FakeEngine(vocabulary=words, tick_s=0.0, end_chance=0.3, max_context=65536)
    await fake.load(Manifest(policy="policy", version=0, digest="d", files=(), serial=1), [])
    seat = Seat(
        policy="policy",
        engine=_Engine(fake, after),
        template=character_template(),
        sampling=Sampling(max_tokens=64),
    )
    player = WorkflowPlayer(workflow=workflow, seats=dict.fromkeys(roles, seat))
    return await player(Lease(group=0, index=0, attempt=1, task=task, seed=11, time_limit_s=limit_s))


def _as_it_is(reply: GenerateReply) -> GenerateReply:
    return reply


def _broken(reply: GenerateReply) -> GenerateReply:
    raise Unavailable("the engine is gone")


def _cut(reply: GenerateReply) -> GenerateReply:
    return msgspec.structs.replace(reply, stop_reason=StopReason.LENGTH)


def _check_record(episode: Episode) -> None:
    for each in episode.trajectories:
        sampled = sum(int(sample.sampled.sum()) for sample in each.samples)
        assert sampled == sum(turn.stop - turn.start for turn in each.turns), f"{each.agent}: tokens outside of turns"
        for turn in each.turns:
            assert each.samples[turn.sample].sampled[turn.start : turn.stop].all(), f"{each.agent}: turn {turn.index}"
    indices = sorted(turn.index for each in episode.trajectories for turn in each.turns)
    assert indices == list(range(len(indices))), f"turns must be numbered from 0, found {indices}"


def _same(one: Episode, two: Episode) -> bool:
    def tokens(episode: Episode) -> list[list[int]]:
        return [sample.tokens.tolist() for each in episode.trajectories for sample in each.samples]

    return tokens(one) == tokens(two) and one.score == two.score


class _Engine:
    """The fake engine, with something done to each of its replies."""

    def __init__(self, fake: FakeEngine, after: Callable[[GenerateReply], GenerateReply]) -> None:
        self._fake = fake
        self._after = after

    def info(self) -> EngineInfo:
        return self._fake.info()

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        return self._after(await self._fake.generate(request))

    async def load(self, manifest: Manifest, files: list[Path]) -> None:
        await self._fake.load(manifest, files)

    async def close(self) -> None: ...
