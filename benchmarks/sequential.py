"""The same learning in one process and one loop: generate, train, repeat. What AstraFlow is measured against.

Same recipe, model, engine, losses, packing, algorithms and batches as ``astraflow run``; nothing overlaps, no process
boundary, no ledger, no weights on disk, every core for the phase that runs. Prints one JSON object.

    python benchmarks/sequential.py examples/quickstart.py --set steps=30 --target 0.85 --threads 2
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from astraflow.backends.torch_single import TorchBackend
from astraflow.dataflow.cut import CutGroup, build_rows
from astraflow.dataflow.settle import settle, smallest_group
from astraflow.engines.torch_engine import TorchEngine
from astraflow.rollout.agents import Seat
from astraflow.rollout.play import WorkflowPlayer
from astraflow.rollout.template import ChatTemplate
from astraflow.run.config import resolve
from astraflow.run.recipe import Recipe
from astraflow.types import Batch, Episode, Lease, Manifest, Purpose, Task
from astraflow.weights.manifest import manifest_of_folder

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass(kw_only=True, slots=True)
class Loop:
    """One policy, one loop."""

    recipe: Recipe
    engine: TorchEngine
    backend: TorchBackend
    player: WorkflowPlayer
    groups: int = 0
    generate_s: float = 0.0
    train_s: float = 0.0
    evals: list[tuple[int, float, float]] = field(default_factory=list)

    async def play(self, task: Task, size: int, purpose: Purpose) -> list[Episode]:
        self.groups += 1
        name = f"{self.recipe.seed}/{self.groups}"
        leases = [
            Lease(group=self.groups, index=i, attempt=1, task=task, purpose=purpose, seed=_seed(f"{name}/{i}"))
            for i in range(size)
        ]
        return list(await asyncio.gather(*(self.player(lease) for lease in leases)))

    async def evaluate(self, began: float) -> float:
        plan = self.recipe.eval
        assert plan is not None
        tasks = [plan.tasks.task(i) for i in range(plan.count)]
        episodes = await asyncio.gather(*(self.play(task, 1, Purpose.EVAL) for task in tasks))
        score = sum(each[0].score or 0.0 for each in episodes) / len(episodes)
        self.evals.append((self.backend.version, score, time.monotonic() - began))
        _say(f"version {self.backend.version}: held-out {score:.3f} at {self.evals[-1][2]:.0f} s")
        return score

    async def collect(self, policy: str) -> Batch:
        """Generate rounds of groups until enough of them carry a signal: exactly the recipe's batch."""
        recipe, pipeline = self.recipe, self.recipe.with_pipeline().pipeline
        need = recipe.policies[policy].groups_per_batch
        kept: list[CutGroup] = []
        while len(kept) < need:
            admitted = [pipeline.curate.next() for _ in range(need)]  # type: ignore[union-attr]
            played = await asyncio.gather(
                *(self.play(each.task, each.episodes, Purpose.TRAIN) for each in admitted if each is not None)
            )
            for each, episodes in zip(admitted, played, strict=True):
                assert each is not None
                number = self.groups + len(kept)
                verdict = settle(
                    pipeline, group=number, task=each.task, size=len(episodes), episodes=episodes, arrival=number,
                    policies={policy: True}, min_group=smallest_group(len(episodes)),
                )[policy]  # fmt: skip
                masked = {s.sample_id: s.masked for s in verdict.samples if s.masked is not None}
                if verdict.reason is None and len(kept) < need:
                    kept.append(CutGroup(group=number, episodes=episodes, advantages=verdict.advantages, masked=masked))
        version = self.backend.version
        cut = build_rows(kept, pipeline=pipeline, policy=policy, version=version, max_staleness=0)  # type: ignore[arg-type]
        return Batch(
            id=version + 1, policy=policy, version=version, trainer_epoch=1,
            tokens=cut.tokens, sequences=cut.sequences, rows=cut.rows,
        )  # fmt: skip


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(arguments.threads)
    resolved = resolve(arguments.recipe, arguments.set, arguments.seed)
    recipe = resolved.recipe
    policy = recipe.trainable[0]
    chosen = recipe.policies[policy]
    folder = chosen.folder()
    engine = TorchEngine(folder, policy, chosen.engine)
    backend = TorchBackend(folder, chosen.trainer, steps=recipe.steps, temperature=recipe.sampling.temperature)
    torch.set_num_threads(arguments.threads)  # whatever the settings of either said
    settings = recipe.rollout_settings()
    seat = Seat(policy=policy, engine=engine, template=ChatTemplate.from_folder(folder), sampling=settings.sampling)
    evaluated = settings.eval_sampling
    player = WorkflowPlayer(
        workflow=recipe.workflow,
        seats=dict.fromkeys(recipe.casting, seat),
        eval_sampling={} if evaluated is None else dict.fromkeys(recipe.casting, evaluated),
    )
    loop = Loop(recipe=recipe, engine=engine, backend=backend, player=player)
    await engine.start()
    await _load(engine, manifest_of_folder(folder, policy), sorted(folder.glob("*.safetensors")))
    reached: float | None = None
    began = time.monotonic()
    every = recipe.eval.every if recipe.eval is not None else 0
    await loop.evaluate(began)
    for step in range(1, recipe.steps + 1):
        started = time.monotonic()
        batch = await loop.collect(policy)
        generated = time.monotonic()
        report = await asyncio.to_thread(backend.step, batch)
        await _sync(engine, backend, policy)
        loop.generate_s += generated - started
        loop.train_s += time.monotonic() - generated
        trained = time.monotonic() - generated
        _say(f"step {step} generate {generated - started:.1f} s, train {trained:.1f} s, {len(report.trained)} samples")
        if (every and step % every == 0) or step == recipe.steps:
            score = await loop.evaluate(began)
            if score >= arguments.target and reached is None:
                reached = time.monotonic() - began
    await engine.close()
    backend.close()
    return {
        "time_to_target_s": reached, "target": arguments.target, "rl_wall_s": time.monotonic() - began,
        "generate_s": loop.generate_s, "train_s": loop.train_s, "steps": recipe.steps, "seed": recipe.seed,
        "threads": arguments.threads, "evals": loop.evals,
    }  # fmt: skip


async def _sync(engine: TorchEngine, backend: TorchBackend, policy: str) -> None:
    """The engine takes the new weights; through memory-backed files, which costs a copy and no disk."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        files = await asyncio.to_thread(backend.export, Path(folder))
        manifest = Manifest(
            policy=policy, version=backend.version, digest=backend.digest(), files=(), serial=backend.version
        )
        await _load(engine, manifest, files)


async def _load(engine: TorchEngine, manifest: Manifest, files: list[Path]) -> None:
    await engine.load(manifest, files)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.85)
    parser.add_argument("--threads", type=int, default=2)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
