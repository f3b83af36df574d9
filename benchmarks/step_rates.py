"""Two policies whose steps go 1 : 5, and neither waits for the other: who waited, who sampled what, what was learned.

The solver and the verifier of ``examples/two_policies.py`` after their warm-up; the solver takes ten groups a step, the
verifier two. Dataflow, the rollout service and both trainers are real and share this process, so that the engines'
forward passes can be counted where they happen: each by the digest of the tensors that it computed with, taken from
their bytes when they came, whatever anybody says of their version. Prints one JSON object.

    python -m benchmarks.step_rates --seconds 300
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from examples import two_policies

from astraflow.algorithms.pipeline import Pipeline
from astraflow.backends.models import as_bits
from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.settings import Limits
from astraflow.engines.base import GenerateReply, GenerateRequest
from astraflow.engines.rows import Rows
from astraflow.engines.settings import EngineSettings
from astraflow.engines.torch_engine import TorchEngine
from astraflow.observe.waits import Wait
from astraflow.rollout.settings import RolloutSettings
from astraflow.run.config import Resolved, resolve
from astraflow.run.ledger import ledger_report
from astraflow.run.prepare import create_run
from astraflow.run.recipe import Recipe
from astraflow.run.run_db import RunDb, open_run_db
from astraflow.run.serve_dataflow import open_service
from astraflow.run.serve_rollout import build_rollout
from astraflow.run.serve_trainer import build_trainer
from astraflow.weights.digest import digest_tensors
from astraflow.weights.store import DirStore
from astraflow.wire.messages import OperatorRequest, StatusReply

GROUPS = {"solver": 10, "verifier": 2}
"""Per step: every group is played by both."""
SLOTS = 8
"""A group at a time: what is played sets the pace, not what a trainer can take, or the faster one lets groups go."""
STALENESS = {"solver": 2, "verifier": 10}
"""Versions: the same time for both, or half of what the faster one plays comes too late for it."""
LR = {"solver": 4e-5, "verifier": 3e-5}
"""Slower than the example's: with all groups right there is no signal, and a batch without one is no step."""
ENDLESS = 1_000_000
LOOK_S = 0.1
EDGE = 0.15
"""Share of the steps at either end over which a reward is averaged."""
Turn = tuple[str, tuple[int, ...], tuple[tuple[int, int, int, str], ...]]
"""Policy, sampled tokens, (start, stop, version, digest) of each span."""


def recipe() -> Recipe:
    """Without an end of its own. Groups without signal are trained too, lest the rates depend on what is learned."""
    base = two_policies.recipe()
    policies = {
        name: dataclasses.replace(
            policy,
            groups_per_batch=GROUPS[name],
            max_staleness=STALENESS[name],
            trainer=dataclasses.replace(policy.trainer, lr=LR[name]),
        )
        for name, policy in base.policies.items()
    }
    limits = Limits(retain="all", no_signal_limit=ENDLESS, barren_groups=ENDLESS)
    return dataclasses.replace(
        base,
        name="step-rates",
        policies=policies,
        pipeline=all_kept,
        eval=None,
        steps=ENDLESS,
        limits=limits,
        rollout=RolloutSettings(slots=SLOTS),
    )


def all_kept(recipe: Recipe) -> Pipeline:
    return dataclasses.replace(two_policies.stages(recipe), keep=())


class LoggedEngine(TorchEngine):
    """An engine that writes down what it did, beside what it says."""

    def __init__(self, model_dir: Path, policy: str, settings: EngineSettings | None = None) -> None:
        super().__init__(model_dir, policy, settings)
        self.policy = policy
        self.sampled: Counter[str] = Counter()
        """Digest of the tensors → tokens whose logits they gave."""
        self.replied: Counter[Turn] = Counter()
        self._digests: dict[int, str] = {}

    async def start(self) -> None:
        await super().start()
        model: Any = self._open().model
        prepare, forward = model.prepare, model.forward

        def prepared(tensors: Mapping[str, torch.Tensor]) -> Any:
            digest = digest_tensors(as_bits(dict(tensors)))
            weights = prepare(tensors)
            self._digests[id(weights)] = digest  # who has that id later comes by here too
            return weights

        def forwarded(weights: Any, rows: Rows) -> torch.Tensor:
            self.sampled[self._digests[id(weights)]] += sum(rows.wanted)
            return forward(weights, rows)

        model.prepare, model.forward = prepared, forwarded

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        reply = await super().generate(request)
        self.replied[_turn(self.policy, reply.tokens.tolist(), reply.spans)] += 1
        return reply


def _turn(policy: str, tokens: list[int], spans: Any, base: int = 0) -> Turn:
    return policy, tuple(tokens), tuple((s.start - base, s.stop - base, s.version, s.digest) for s in spans)


@dataclasses.dataclass(kw_only=True, slots=True)
class Waits:
    """What each trainer was seen to do, ``LOOK_S`` apart."""

    seen: Counter[str] = dataclasses.field(default_factory=Counter)
    waited: Counter[str] = dataclasses.field(default_factory=Counter)
    by_other: Counter[str] = dataclasses.field(default_factory=Counter)
    """Held back by Pace, or without enough groups alive for a batch while the workers were refused further ones: only
    another policy's full queue can be the cause of that."""

    def see(self, status: StatusReply, groups: Mapping[str, int]) -> None:
        idle = any(
            each.component == "rollout" and each.report.doing == Wait.LEASE and each.report.why == "no_room"
            for each in status.components
        )
        alive = {
            each.policy: sum(each.groups.get(state, 0) for state in ("open", "ready", "kept"))
            for each in status.policies
        }
        for each in status.components:
            if each.component != "trainer" or each.state != "alive":
                continue
            policy = each.name
            self.seen[policy] += 1
            if each.report.doing == Wait.BATCH:
                self.waited[policy] += 1
                held = "holds it back" in each.report.why
                self.by_other[policy] += held or (idle and alive[policy] < groups[policy])


async def play(resolved: Resolved, folder: Path, seconds: float) -> dict[str, Any]:
    """The run until every policy has had ``seconds`` since its warm-up, and what is found in it."""
    run = await asyncio.to_thread(create_run, resolved, folder)
    recipe, store, engines, waits = resolved.recipe, DirStore(run.weights), list[LoggedEngine](), Waits()

    def logged(model: Path, policy: str, settings: EngineSettings) -> LoggedEngine:
        engines.append(LoggedEngine(model, policy, settings))
        return engines[-1]

    with tempfile.TemporaryDirectory(prefix="cache-", dir=folder) as cache:
        async with open_service(run, resolved, store) as service:
            flow = LocalDataflow(service)
            rollout = build_rollout(
                resolved, flow, name="rollout-0", store=store, cache=Path(cache), make_engine=logged
            )
            trainers = [
                build_trainer(resolved, flow, policy=name, store=store, checkpoints=run.checkpoints / name)
                for name in recipe.trainable
            ]
            async with asyncio.TaskGroup() as tasks:
                for part in (rollout, *trainers):
                    tasks.create_task(part.run())
                took_s = await _watch(flow, waits, seconds)
                for name in recipe.trainable:
                    await flow.operate(OperatorRequest(action="freeze", policy=name))
    found = {"seconds": round(took_s, 1), **_waits(waits)}
    with open_run_db(run.database) as db:
        return {
            **found,
            **_labels(db, engines, run.payloads),
            **_learned(db),
            "ledger": ledger_report(run)["difference"],
        }


async def _watch(flow: LocalDataflow, waits: Waits, seconds: float) -> float:
    """Look until the time is over. It begins when both have left their warm-up."""
    began: float | None = None
    while began is None or time.monotonic() - began < seconds:
        status = await flow.status()
        if status.state == "failed":
            raise SystemExit(status.error)
        if began is None and all(each.staleness for each in status.policies):  # only what was sampled has an age
            began = time.monotonic()
        if began is not None:
            waits.see(status, GROUPS)
        await asyncio.sleep(LOOK_S)
    return time.monotonic() - began


def _waits(waits: Waits) -> dict[str, Any]:
    def share(part: Counter[str]) -> dict[str, float]:
        return {name: round(part[name] / count, 4) for name, count in sorted(waits.seen.items())}

    return {
        "wait_share": share(waits.waited),
        "wait_share_by_other": share(waits.by_other),
        "looks": max(waits.seen.values()),
    }


def _labels(db: RunDb, engines: list[LoggedEngine], payloads: Path) -> dict[str, Any]:
    """The ledger's spans against the engines' own log."""
    published = set(db.connection.execute("SELECT policy, version, digest FROM publications").fetchall())
    replied = sum((engine.replied for engine in engines), Counter[Turn]())
    sampled = {(engine.policy, digest): count for engine in engines for digest, count in engine.sampled.items()}
    stored: Counter[Turn] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    for group, index in db.connection.execute(
        "SELECT group_id, idx FROM episodes WHERE state = 'done' AND supervised = 0"
    ):
        episode = db.episode(group, index, payloads)
        assert episode is not None, "everything is retained"
        for each in episode.trajectories:
            for turn in each.turns:
                sample = each.samples[turn.sample]
                spans = [span for span in sample.spans if turn.start <= span.start < turn.stop]
                stored[_turn(each.policy, sample.tokens[turn.start : turn.stop].tolist(), spans, turn.start)] += 1
                for span in spans:
                    tokens[each.policy, span.digest] += span.stop - span.start
    spans = [(policy, *span[2:]) for policy, _, all_spans in stored.elements() for span in all_spans]
    return {
        "turns": stored.total(),
        "spans": len(spans),
        "versions_sampled": len(tokens),
        "turns_unlike_the_engine_s": (stored - replied).total(),
        "spans_of_nothing_published": sum(span not in published for span in spans),
        "tokens": sum(tokens.values()),
        "tokens_beyond_the_engine_s": sum(max(0, count - sampled.get(key, 0)) for key, count in tokens.items()),
        "tokens_sampled_and_not_stored": sum(sampled.values()) - sum(tokens.values()),
    }


def _learned(db: RunDb) -> dict[str, Any]:
    """Steps of reinforcement, batches that made none, and the mean reward of the first and the last steps."""
    steps, rewards = Counter[str](), dict[str, list[float]]()
    for step in db.steps():
        if step.metrics.get("staleness/mean") is None:
            continue  # a supervised one
        steps[step.policy] += 1
        if step.reward is not None:  # None: no episode ended since the step before
            rewards.setdefault(step.policy, []).append(step.reward)
    dull = dict(db.connection.execute("SELECT policy, COUNT(*) FROM batches WHERE state = 'dropped' GROUP BY policy"))
    found = {}
    for policy, seen in sorted(rewards.items()):
        edge = max(1, round(EDGE * len(seen)))
        first, last = sum(seen[:edge]) / edge, sum(seen[-edge:]) / edge
        found[policy] = {
            "steps": steps[policy],
            "batches_without_signal": dull.get(policy, 0),
            "reward_first": round(first, 3),
            "reward_last": round(last, 3),
        }
    return {"policies": found}


def measure(seconds: float, *, seed: int = 0, changes: tuple[str, ...] = ()) -> dict[str, Any]:
    resolved = resolve("benchmarks.step_rates:recipe", changes, seed)
    with tempfile.TemporaryDirectory(prefix="step-rates-") as folder:
        return asyncio.run(play(resolved, Path(folder) / "run", seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.seconds, seed=arguments.seed, changes=tuple(arguments.set)), indent=2))


if __name__ == "__main__":
    main()
