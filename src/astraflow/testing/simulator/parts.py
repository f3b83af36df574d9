"""The world that the simulated agents live in: a character tokenizer, tasks, a workflow that sometimes breaks."""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections.abc import Callable
from dataclasses import replace

from astraflow.algorithms.base import Curate, Select
from astraflow.algorithms.credit import GroupMean
from astraflow.algorithms.curate import Shuffled, Stage, Stages, WithOlderVersions
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.pace import AllHaveRoom, BoundedStaleness
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select import EarliestDeadline
from astraflow.algorithms.select_replay import WithReplay
from astraflow.dataflow.settings import EvalSpec, Limits, PolicySpec, RunSpec
from astraflow.rollout.template import ChatTemplate
from astraflow.rollout.workflow import Agents, Reward
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.lists import ListTasks
from astraflow.testing.simulator.plan import Plan
from astraflow.types import Task

SPECIAL = ("<end>", "<user>", "<bot>", "<unknown>")
CHARACTERS = string.ascii_lowercase + string.digits + " ?"
VOCABULARY = len(SPECIAL) + len(CHARACTERS)
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' }}{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
LIMITS = Limits(
    lease_ttl_s=10.0,
    heartbeat_s=2.0,
    dead_after_s=10.0,
    time_limit_s=20.0,
    grace_s=5.0,
    no_signal_limit=10_000,
    first_failures=10_000,
    starved_after_s=600.0,
)


def tokenizer_json() -> str:
    """A tokenizer of one token per character."""
    words = [*SPECIAL, *CHARACTERS]
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {
                    "id": n,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for n, text in enumerate(SPECIAL)
            ],
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "."},
                "behavior": "Isolated",
                "invert": False,
            },
            "decoder": {"type": "Fuse"},
            "model": {
                "type": "WordLevel",
                "vocab": {word: n for n, word in enumerate(words)},
                "unk_token": "<unknown>",
            },
        }
    )


def template() -> ChatTemplate:
    return ChatTemplate(tokenizer_json(), TEMPLATE, names={"eos_token": "<end>"})


def _question(index: int) -> Task:
    return Task(key=f"q{index}", payload={"question": f"is {index} odd?", "critic": index % 2 == 0})


def run_spec(plan: Plan) -> RunSpec:
    tasks = GeneratedTasks("questions", _question)
    curate: Curate = Shuffled(tasks, group_size=plan.group_size, seed=plan.seed)
    if plan.version_choice:
        curate = WithOlderVersions(curate, chance=plan.version_choice)
    if plan.supervised_groups:
        first = Shuffled(_supervised(plan), group_size=1, seed=plan.seed)
        curate = Stages([Stage(curate=first, groups=plan.supervised_groups), Stage(curate=curate)])
    select: Select = EarliestDeadline(window=plan.window)
    if plan.replay:
        select = WithReplay(select, ratio=0.5, order=plan.replay, seed=plan.seed)
    names = [policy.name for policy in plan.policies]
    return RunSpec(
        run=f"sim-{plan.seed}",
        seed=plan.seed,
        steps=plan.steps,
        policies={
            policy.name: PolicySpec(max_staleness=policy.max_staleness, groups_per_batch=policy.groups_per_batch)
            for policy in plan.policies
        },
        roles={"solver": names[0], "critic": names[-1]},
        pipeline=Pipeline(
            curate=curate,
            pace=AllHaveRoom() if plan.wait_for_all else BoundedStaleness(),
            credit=GroupMean(std=True),
            keep=(DropZeroVariance(),),
            select=select,
        ),
        eval=EvalSpec(tasks=_held_out(), count=3, every=2) if plan.evaluate else None,
        limits=LIMITS if _keeps_checkpoints(plan) else replace(LIMITS, retain="all"),
    )


def _keeps_checkpoints(plan: Plan) -> bool:
    """Whoever loses checkpoints that it has told of may go back further than what is pruned; that is refused."""
    return not any(act.what in ("trainer_old_checkpoint", "rollback") for act in plan.acts)


def _held_out() -> ListTasks:
    return ListTasks("held-out", [_question(10_000 + n) for n in range(5)])


def _supervised(plan: Plan) -> ListTasks:
    policy = plan.policies[0].name
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    rows = [
        Task(key=f"s{n}", workflow="supervised", payload={"messages": talk, "policy": policy})
        for n in range(plan.supervised_groups + 2)
    ]
    return ListTasks("talks", rows)


class Duel:
    """A solver answers; on some tasks a critic does too. Rewards depend on the tokens alone, faults on the dice."""

    def __init__(self, *, rng: random.Random, faults: float, pause_s: Callable[[], float]) -> None:
        self.faults = faults
        self._pause_s = pause_s
        self._random = rng

    async def __call__(self, task: Task, agents: Agents) -> Reward:
        await asyncio.sleep(self._pause_s())
        question = {"role": "user", "content": task.payload["question"]}
        answer = await agents["solver"].chat([question])
        fault = self._random.choice(("raise", "hang", "nan", "nothing")) if self._happens() else None
        if fault == "raise":
            raise ValueError("the user's own bug")
        if fault == "hang":
            await asyncio.sleep(1e6)
        if fault == "nan":
            return Reward(float("nan"))
        if fault == "nothing":
            return Reward()
        solved = float(sum(answer.tokens) % 7)
        if not task.payload["critic"] or answer.truncated:
            return Reward(solver=solved)
        verdict = await agents["critic"].chat([question])
        return Reward(solver=solved, critic=float(sum(verdict.tokens) % 5))

    def _happens(self) -> bool:
        return self.faults > 0 and self._random.random() < self.faults
