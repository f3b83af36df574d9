"""A run that suffers a plan of faults, is stopped, resumed to a last step without faults, and judged.

start ── faults ── a few more steps ── stop ── resume with an end a few steps on ── finished ── verdict
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from astraflow.errors import AstraFlowError, RunFailed
from astraflow.observe.points import ENVIRONMENT
from astraflow.run.chaos.act import MORE_STEPS, Actor
from astraflow.run.chaos.evidence import count_undone, read_claims, read_histories, read_versions
from astraflow.run.chaos.judge import figures, judge
from astraflow.run.chaos.plan import Fault, Kind
from astraflow.run.config import Resolved, resolve
from astraflow.run.first_cause import first_cause_only
from astraflow.run.layout import RunFolder, write_json
from astraflow.run.prepare import create_run
from astraflow.run.supervisor import Listen, Supervisor

ENDLESS = 1_000_000
"""Steps of the run while faults happen."""
SERVICES = 3
CHECKPOINT_EVERY = 5
LEARNING_RATE = 1e-6
"""Nothing is learned to its end, so that there always is signal."""

Say = Callable[[str], None]


def session(
    reference: str, *, plan: Sequence[Fault], overrides: Sequence[str], folder: Path, say: Say = lambda _: None
) -> dict[str, Any]:
    """The figures of docs/benchmarks.md, of a run below ``folder``; also of one that did not get to its end."""
    began = time.monotonic()
    settings = [*_settings(reference), *overrides]
    resolved = resolve(reference, [*settings, f"steps={ENDLESS}"])
    orders = (folder / "orders").resolve()
    orders.mkdir(parents=True)
    run = create_run(resolved, (folder / "run").resolve(), say=say)
    actor = Actor(run, orders, say=say)
    failed: str | None = None
    undone = 0
    try:
        with first_cause_only(), _orders_in(orders):
            asyncio.run(_suffer(run, resolved, plan, actor, say))
        undone = count_undone(run)
        ends = {policy: version + MORE_STEPS for policy, version in read_versions(run).items()}
        last = resolve(reference, [*settings, *(f"policies.{policy}.steps={end}" for policy, end in ends.items())])
        write_json(run.config, last.as_file())
        say(f"all faults are done; the run goes on to its last steps, {_listed(ends)}")
        with first_cause_only():
            asyncio.run(Supervisor(run, last, listen=Listen(), say=say).run())
    except AstraFlowError as error:
        if not actor.injuries:  # nothing was done to it: there is nothing to judge
            raise
        failed = f"{error.kind}: {error}"
        say(failed)
    return _report(run, resolved, actor) | {
        "undone_steps": undone,
        "failed": failed,
        "steps": read_versions(run),
        "wall_s": round(time.monotonic() - began, 1),
    }


def _settings(reference: str) -> list[str]:
    """Many services, work without end, checkpoints so often that their points are passed, one thread a process."""
    recipe = resolve(reference).recipe
    out = [f"services={max(SERVICES, recipe.services)}", f"limits.no_signal_limit={ENDLESS}"]
    out.append(f"limits.barren_groups={ENDLESS}")
    for policy in recipe.trainable:
        out += [
            f"policies.{policy}.trainer.checkpoint_every={CHECKPOINT_EVERY}",
            f"policies.{policy}.trainer.threads=1",
            f"policies.{policy}.trainer.lr={LEARNING_RATE}",
        ]
    return out


@contextmanager
def _orders_in(folder: Path) -> Iterator[None]:
    """Processes that are started meanwhile obey the orders in ``folder``."""
    os.environ[ENVIRONMENT] = str(folder)
    try:
        yield
    finally:
        del os.environ[ENVIRONMENT]


async def _suffer(run: RunFolder, resolved: Resolved, plan: Sequence[Fault], actor: Actor, say: Say) -> None:
    """The run until all faults are done and a few more steps are committed, then stopped."""
    recipe = resolved.recipe
    names = [f"rollout-{number}" for number in range(recipe.services)]
    await actor.open_ways([*names, *(f"trainer-{policy}" for policy in recipe.trainable)])
    supervisor = Supervisor(run, resolved, listen=Listen(), say=say, watcher=actor, route=actor.route)

    async def act() -> None:
        try:
            await actor.play(plan, supervisor)
        finally:
            supervisor.stop()

    acting = asyncio.ensure_future(act())
    try:
        await supervisor.run()
    except KeyboardInterrupt:
        if not acting.done():  # a person's
            raise
    finally:
        acting.cancel()
        await asyncio.wait([acting])
        await actor.close()
    if acting.cancelled():
        raise RunFailed("the run ended before all faults were done")
    acting.result()


def _listed(steps: Mapping[str, int]) -> str:
    return ", ".join(f"{policy} {step}" for policy, step in sorted(steps.items()))


def _called(fault: Fault) -> str:
    return fault.point if fault.kind is Kind.POINT else fault.kind.value


def _report(run: RunFolder, resolved: Resolved, actor: Actor) -> dict[str, Any]:
    verdict = judge(read_histories(run, resolved.recipe.trainable), read_claims(run))
    done = actor.injuries
    return {
        "kills": len(done),
        **{name: value for name, value in asdict(verdict).items() if name != "problems"},
        **figures(done),
        "by_component": dict(Counter(each.fault.component.value for each in done)),
        "by_post": dict(sorted(Counter(each.post for each in done).items())),
        "by_fault": dict(Counter(_called(each.fault) for each in done)),
        "missed_points": actor.missed_points,
        "not_refused": actor.not_refused,
        "unexpected_deaths": len(actor.unexpected),
        "problems": [*verdict.problems, *actor.unexpected],
    }
