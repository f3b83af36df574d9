"""One policy that plays both roles against two policies, at equal generated tokens: does it pay to have two?

The task, model and settings of ``examples/two_policies.py``, but one learning rate for all. Each arm and seed is
warmed up by supervised steps (the one policy on the rows of both), then reinforced by a run of its own until so many
tokens are generated, dropped groups and all; then everything is frozen and the held-out tasks are played, greedily.
The two policies have twice the parameters together, each takes a step from the same groups; the one takes its steps
from the rows of both roles. One line of JSON a run, in the end a table.

    python -m benchmarks.one_or_two --seeds 5
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples import two_policies

from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.pipeline import Pipeline
from astraflow.backends.torch_single import TorchBackend
from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.settings import Limits
from astraflow.errors import RunFailed
from astraflow.rollout.template import ChatTemplate
from astraflow.run.config import Resolved, resolve
from astraflow.run.export import copy_all_but_weights
from astraflow.run.ledger import ledger_report
from astraflow.run.prepare import create_run
from astraflow.run.recipe import Eval, Recipe
from astraflow.run.run_db import RunDb, open_run_db
from astraflow.run.serve_dataflow import open_service
from astraflow.run.serve_rollout import build_rollout
from astraflow.run.serve_trainer import build_trainer
from astraflow.types import AdvantageRun, Batch, Row, Sample, SampleKind
from astraflow.weights.store import DirStore
from astraflow.wire.messages import OperatorRequest
from astraflow.workflows.supervised import tokenised

ARMS: Mapping[str, Mapping[str, str]] = {
    "one": {"solver": "main", "verifier": "main"},
    "two": {"solver": "solver", "verifier": "verifier"},
}
"""Role → policy."""
ENDLESS = 1_000_000
WARM_UP_STEPS, ROWS = two_policies.WARM_UP_STEPS, two_policies.GROUPS
"""Of each role's rows; the one policy has as many steps again, for there are twice as many."""
HELD_OUT = 60
LR = 2e-4
"""Of all three: the example's solver is slow on purpose."""


def recipe() -> Recipe:
    """Two policies; ``one`` makes a single one of them."""
    base = two_policies.recipe()
    policies = {
        name: dataclasses.replace(policy, trainer=dataclasses.replace(policy.trainer, lr=LR))
        for name, policy in base.policies.items()
    }
    limits = Limits(retain="all", no_signal_limit=ENDLESS, barren_groups=ENDLESS)
    assert base.eval is not None
    return dataclasses.replace(
        base,
        name="one-or-two",
        policies=policies,
        pipeline=reinforced,
        eval=Eval(tasks=base.eval.tasks, count=HELD_OUT),
        steps=ENDLESS,
        limits=limits,
    )


def one() -> Recipe:
    base = recipe()
    return dataclasses.replace(base, policies={"main": base.policies["solver"]}, roles=dict(ARMS["one"]))


def reinforced(recipe: Recipe) -> Pipeline:
    tasks = Shuffled(recipe.tasks, group_size=recipe.group_size, seed=recipe.seed)
    return dataclasses.replace(two_policies.stages(recipe), curate=tasks)


# ── warm-up ──


def warm_up(recipe: Recipe, arm: str, seed: int, folder: Path, steps: int) -> dict[str, Path]:
    """Policy → a model folder."""
    made: dict[str, Path] = {}
    for policy in recipe.policies:
        roles = [role for role, name in ARMS[arm].items() if name == policy]
        chosen = recipe.policies[policy]
        source, target = chosen.folder(), folder / policy
        template = ChatTemplate.from_folder(source)
        backend = TorchBackend(source, chosen.trainer, steps=steps * len(roles))
        rows = _rows(template, roles, seed)
        for step in range(steps * len(roles)):
            backend.step(_batch(policy, step, [next(rows) for _ in range(ROWS)]))
        target.mkdir(parents=True)
        copy_all_but_weights(source, target)
        backend.export(target)
        made[policy] = target
    return made


def _rows(template: ChatTemplate, roles: Sequence[str], seed: int):  # type: ignore[no-untyped-def]
    """Endless: what ``two_policies.shown`` shows to these roles."""
    index = seed * 1_000_000
    while True:
        payload = two_policies.shown(index).payload
        index += 1
        if payload["policy"] in roles:
            yield tokenised(template, payload["messages"])[0]


def _batch(policy: str, step: int, samples: Sequence[Sample]) -> Batch:
    rows = tuple(
        Row(
            sample_id=f"{step}/{n}/shown/0",
            tokens=sample.tokens,
            mask=sample.sampled,
            logprobs=sample.logprobs,
            advantages=(AdvantageRun(start=0, stop=len(sample.tokens), value=1.0),),
            kind=SampleKind.SUPERVISED,
        )
        for n, sample in enumerate(samples)
    )
    tokens = sum(int(row.mask.sum()) for row in rows)
    return Batch(id=step, policy=policy, version=step, trainer_epoch=1, tokens=tokens, sequences=len(rows), rows=rows)


# ── a run ──


async def play(resolved: Resolved, folder: Path, budget: int) -> dict[str, Any]:
    run = await asyncio.to_thread(create_run, resolved, folder)
    recipe, store = resolved.recipe, DirStore(run.weights)
    with tempfile.TemporaryDirectory(prefix="cache-", dir=folder) as cache:
        async with open_service(run, resolved, store) as service:
            flow = LocalDataflow(service)
            rollout = build_rollout(resolved, flow, name="rollout-0", store=store, cache=Path(cache))
            trainers = [
                build_trainer(resolved, flow, policy=name, store=store, checkpoints=run.checkpoints / name)
                for name in recipe.trainable
            ]
            async with asyncio.TaskGroup() as tasks:
                for part in (rollout, *trainers):
                    tasks.create_task(part.run())
                with open_run_db(run.database) as db:
                    while _generated(db) < budget:
                        if (status := await flow.status()).state == "failed":
                            raise RunFailed(status.error or "without a cause")
                        await asyncio.sleep(0.2)
                for name in recipe.trainable:
                    await flow.operate(OperatorRequest(action="freeze", policy=name))
    with open_run_db(run.database) as db:
        scores = {when: _scores(db, run.payloads, number) for when, number in (("before", 0), ("after", -1))}
        steps: dict[str, int] = {}
        for step in db.steps():
            steps[step.policy] = max(step.step, steps.get(step.policy, 0))
        return {"tokens": _generated(db), "steps": steps, **scores, "ledger": ledger_report(run)["difference"]}


def _generated(db: RunDb) -> int:
    """Sampled tokens of every training episode that was stored."""
    return int(db.connection.execute("SELECT COALESCE(SUM(tokens), 0) FROM samples").fetchone()[0])


def _scores(db: RunDb, payloads: Path, number: int) -> dict[str, float | None]:
    """Of the first or the last evaluation: how often solver and verifier are right, and it by what it judged."""
    evaluations = [row[0] for row in db.connection.execute("SELECT id FROM evals WHERE state = 'done' ORDER BY id")]
    solved: list[float] = []
    judged: dict[bool, list[float]] = {True: [], False: []}
    for group, index in db.connection.execute(
        "SELECT e.group_id, e.idx FROM episodes e JOIN groups g ON g.id = e.group_id "
        "WHERE g.eval_id = ? AND e.state = 'done'",
        (evaluations[number],),
    ).fetchall():
        episode = db.episode(group, index, payloads)
        assert episode is not None, "everything is retained"
        rewards = {each.role: each.turns[0].reward for each in episode.trajectories}
        solver, verifier = rewards.get("solver"), rewards.get("verifier")
        if solver is not None and verifier is not None:
            solved.append(solver)
            judged[solver >= 1].append(verifier)
    every = judged[True] + judged[False]
    return {
        "solver": _mean(solved, of=HELD_OUT),
        "verifier": _mean(every, of=HELD_OUT),
        "verifier_on_right": _mean(judged[True]),
        "verifier_on_wrong": _mean(judged[False]),
    }


def _mean(values: Sequence[float], *, of: int = 0) -> float | None:
    """What could not be graded counts as wrong, where ``of`` says how many there are."""
    count = of or len(values)
    return round(sum(values) / count, 3) if count else None


def measure(arm: str, seed: int, *, budget: int, warm_up_steps: int = WARM_UP_STEPS) -> dict[str, Any]:
    began, cpu = time.monotonic(), time.process_time()
    reference = f"benchmarks.one_or_two:{'one' if arm == 'one' else 'recipe'}"
    with tempfile.TemporaryDirectory(prefix="one-or-two-") as folder:
        warm = warm_up(resolve(reference, (), seed).recipe, arm, seed, Path(folder), warm_up_steps)
        changes = [f"policies.{name}.model={path}" for name, path in warm.items()]
        resolved = resolve(reference, changes, seed)
        found = asyncio.run(play(resolved, Path(folder) / "run", budget))
    took = {"wall_s": round(time.monotonic() - began, 1), "cpu_s": round(time.process_time() - cpu, 1)}
    return {"arm": arm, "seed": seed, **found, **took}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Mean and deviation (n - 1) over the seeds, before and after."""
    lines = [
        "| arm | seeds | "
        + " | ".join(f"{role} {when}" for role in ("solver", "verifier") for when in ("before", "after"))
        + " |"
    ]
    lines.append("|---|--:" + "|--:" * 4 + "|")
    for arm in ARMS:
        runs = [each for each in found if each["arm"] == arm]
        cells = [
            _spread([each[when][role] for each in runs])
            for role in ("solver", "verifier")
            for when in ("before", "after")
        ]
        lines.append(f"| {arm} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return " ".join(f"{value:.3f}" for value in values) or "–"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=12_000)
    arguments = parser.parse_args()
    found = []
    for seed in range(arguments.seeds):
        for arm in ARMS:
            found.append(measure(arm, seed, budget=arguments.tokens))
            print(json.dumps(found[-1]), flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
