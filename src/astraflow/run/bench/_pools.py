"""Three pools of workers at 100, 60 and 30 % speed, two of them behind far lines, one of which is cut for a while.

trainer_waits     share of its time that the trainer waited until the store had its weights; for a batch beside it
worker_waits      the same of each worker, for a first version of weights; for a lease beside it
trained_by        samples that were trained, by the worker that sent them
wrong_spans       spans that no publication of their version and digest explains
not_by_version    of checked samples, those whose log-probs the weights of their version do not give
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.dataflow.components import ROLLOUT, TRAINER
from astraflow.errors import ConfigError
from astraflow.run.bench import _pools_recipe
from astraflow.run.bench._pools_recipe import SPEED
from astraflow.run.export import export_version
from astraflow.run.layout import RunFolder
from astraflow.run.run_db import RunDb, open_run_db
from astraflow.testing.hosts import HOME, Hosts, missing
from astraflow.testing.regions import Regions
from astraflow.testing.userspace_link import Line
from astraflow.types import Sample
from astraflow.wire.codec import decode
from astraflow.wire.messages import ComponentReport

SPEEDS = {HOME: 1.0, "eu": 0.6, "us": 0.3}
LINES = {"eu": Line(rtt_s=0.3, rate_mbit=4000.0), "us": Line(rtt_s=0.3, rate_mbit=50.0, loss=0.01)}
CUT, CUT_S = "us", 20.0
LIMIT_S = 600.0
CHECKED = 60
"""Samples whose log-probs are computed again."""
NEAR = 1e-3
"""Log-probs of the engine and of a plain forward pass, both float32."""


def pools(*, steps: int = 40, seed: int = 0, cut_s: float = CUT_S, versions: int = 12) -> dict[str, Any]:
    """``versions``: of how many are samples computed again. Raises ConfigError where there can be no hosts."""
    if reason := missing():
        raise ConfigError(f"pools need hosts of their own on this machine: {reason}")
    recipe = Path(_pools_recipe.__file__)
    with tempfile.TemporaryDirectory(prefix="pools-") as folder, Hosts() as hosts:
        given = ("--set", f"steps={steps}", "--seed", str(seed))
        with Regions(hosts, recipe, Path(folder), given=given) as run:
            run.begin()
            for name, line in LINES.items():
                run.worker(name, hosts.add(name, line), environment={SPEED: str(SPEEDS[name])})
            run.meet(*LINES)  # else the fast one may have played most of a short run before they are there
            run.worker(HOME, hosts.home, environment={SPEED: str(SPEEDS[HOME])})
            shown = _play(run, hosts, steps, cut_s)
            run.wait(LIMIT_S)
        found = figures(RunFolder(run.run_dir), seed=seed, versions=versions)
        return {"lines": hosts.kind, "cut_s": cut_s, **found, "pool": shown}


def _play(run: Regions, hosts: Hosts, steps: int, cut_s: float) -> list[str]:
    """A third of the steps, a cut, and what the pool looks like when most are done."""
    run.reach(steps // 3, LIMIT_S)
    if cut_s:
        hosts.shape(CUT, Line(cut=True))
        time.sleep(cut_s)
        hosts.shape(CUT, LINES[CUT])
    run.reach(steps * 3 // 4, LIMIT_S)
    return run.ask("pool").splitlines()


def figures(folder: RunFolder, *, seed: int, versions: int) -> dict[str, Any]:
    """Of a run that has ended."""
    with open_run_db(folder.database) as db:
        wall_s = db.span().rl_wall_s or float("nan")
        trained = db.connection.execute(
            "SELECT e.worker, COUNT(*), AVG(s.age) FROM samples s JOIN episodes e "
            "ON e.group_id = s.group_id AND e.idx = s.idx WHERE s.state = 'trained' GROUP BY e.worker"
        ).fetchall()
        (groups, lost), *_ = db.connection.execute("SELECT COUNT(*), SUM(state = 'stale') FROM group_policy")
        (trainer,) = _waits(db, TRAINER, wall_s, "publish", "batch").values()
        return {
            "wall_s": round(wall_s, 1),
            "trainer_waits": trainer,
            "worker_waits": _waits(db, ROLLOUT, wall_s, "weights", "lease"),
            "trained_by": {worker: count for worker, count, _ in trained},
            "mean_age_by": {worker: round(age, 2) for worker, _, age in trained},
            "stale_groups": lost,
            "groups": groups,
            **spans(folder, db, seed=seed, versions=versions),
        }


def _waits(db: RunDb, component: str, wall_s: float, *waits: str) -> dict[str, dict[str, float]]:
    """By name of each that there was: the share of the run for each wait."""
    rows = db.connection.execute("SELECT name, report FROM components WHERE component = ?", (component,)).fetchall()
    told = {name: decode(report, ComponentReport).metrics for name, report in rows}
    return {name: {wait: each.get(f"wait_s/{wait}", 0.0) / wall_s for wait in waits} for name, each in told.items()}


def spans(folder: RunFolder, db: RunDb, *, seed: int, versions: int) -> dict[str, Any]:
    """Every span against what was published, and some samples against the weights of their version themselves."""
    published = set(db.connection.execute("SELECT policy, version, digest FROM publications"))
    count, wrong = 0, 0
    by_version: dict[int, list[Sample]] = {}
    for group, idx in db.connection.execute("SELECT group_id, idx FROM episodes WHERE state = 'done'").fetchall():
        episode = db.episode(group, idx, folder.payloads)
        for trajectory in episode.trajectories if episode is not None else ():
            for sample in trajectory.samples:
                count += len(sample.spans)
                wrong += sum((trajectory.policy, each.version, each.digest) not in published for each in sample.spans)
                if len(said := {each.version for each in sample.spans}) == 1:
                    by_version.setdefault(said.pop(), []).append(sample)
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(sorted(by_version))[:versions]
    checked, strangers, others = 0, 0, []
    for version in map(int, chosen):
        picked = by_version[version][: max(1, CHECKED // len(chosen))]
        with model_of(folder, version) as model, model_of(folder, version - 1 if version else 1) as other:
            own = [difference(model, sample) for sample in picked]
            others += [difference(other, sample) for sample in picked]
        checked += len(own)
        strangers += sum(each > NEAR for each in own)
    return {
        "spans": count,
        "wrong_spans": wrong,
        "checked_samples": checked,
        "not_by_version": strangers,
        "neighbour_differs": float(np.mean([each > NEAR for each in others])) if others else None,
    }


@contextmanager
def model_of(folder: RunFolder, version: int) -> Iterator[Any]:
    """The weights of a version, in a plain model."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(prefix="pools-model-") as place:
        target = Path(place) / "model"
        export_version(folder, _pools_recipe.recipe(), policy="main", version=version, target=target)
        yield AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def difference(model: Any, sample: Sample) -> float:
    """The largest, between the log-probs that were recorded and those that this model gives."""
    import torch

    with torch.no_grad():
        logits = model(torch.from_numpy(sample.tokens.astype(np.int64))[None], use_cache=False).logits[0]
    at = np.flatnonzero(sample.sampled)
    given = torch.log_softmax(logits[at - 1], dim=-1).numpy()[np.arange(len(at)), sample.tokens[at]]
    return float(np.abs(given - sample.logprobs[at]).max())
