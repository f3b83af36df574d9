"""One run over three regions of this machine, each a host of its own (needs root): python examples/cross_region.py

home has dataflow, the trainer and a worker. eu, 300 ms and 4 Gbit/s away, has two workers, one of which is the relay
of the other: weights cross the line once. us, at 50 Mbit/s with 1 % of its packets lost, is cut off for a while: its
leases run out, others play them, and it comes back by itself. The model learns to answer with an even digit.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from astraflow.errors import AstraFlowError
from astraflow.rollout.settings import RolloutSettings
from astraflow.rollout.workflow import Agents, Reward
from astraflow.run.recipe import Policy, Recipe
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.generated import GeneratedTasks
from astraflow.testing.hosts import Hosts, missing
from astraflow.testing.regions import Regions
from astraflow.testing.userspace_link import Line
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Sampling, Task

MODEL = TinyModel(hidden=128, layers=2, intermediate=384, context=64, characters="0123456789 ")
EU = Line(rtt_s=0.3, rate_mbit=4000)
US = Line(rtt_s=0.2, rate_mbit=50, loss=0.01)
LIMIT_S = 900.0


async def even(task: Task, agents: Agents) -> Reward:
    reply = await agents["main"].chat([{"role": "user", "content": task.key}])
    await asyncio.sleep(0.5)  # a tool, say
    return Reward(float(reply.text in ("0", "2", "4", "6", "8")))


def recipe() -> Recipe:
    trainer = TrainerSettings(lr=4e-4, dtype="float32")
    return Recipe(
        name="cross-region",
        policies={"main": Policy(model=MODEL, groups_per_batch=4, max_staleness=4, trainer=trainer)},
        workflow=even,
        tasks=GeneratedTasks("numbers", lambda index: Task(key=str(index))),
        sampling=Sampling(max_tokens=1),
        rollout=RolloutSettings(slots=8),
        steps=100,
        regions=("home", "eu", "us"),
    )


def play(steps: int, cut_s: float) -> None:
    given = ("--set", f"steps={steps}")
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts() as hosts,
        Regions(hosts, Path(__file__), Path(folder), given=given) as run,
    ):
        print(f"lines: {hosts.kind}", flush=True)
        run.begin()
        eu, us = hosts.add("eu", EU), hosts.add("us", US)
        run.worker("eu-0", eu, "--relay-port", "0", "--relay-host", eu.address)
        run.worker("eu-1", eu)
        run.worker("us-0", us)
        run.meet("eu-0", "eu-1", "us-0")
        run.worker("home-0", hosts.home)
        run.reach(steps // 3, LIMIT_S)
        hosts.shape("us", Line(cut=True))
        time.sleep(cut_s / 2)
        print(run.ask("pool"), flush=True)
        time.sleep(cut_s / 2)
        hosts.shape("us", US)
        run.wait(LIMIT_S)
        print("episodes that were accepted:", ", ".join(f"{name} {n}" for name, n in run.played().items()), flush=True)
        print(run.ask("ledger"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--cut-s", type=float, default=20.0)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be 1 or more, found {args.steps}")
    if not 0 <= args.cut_s <= LIMIT_S:
        parser.error(f"--cut-s must be in [0, {LIMIT_S:g}] s, found {args.cut_s}")
    try:
        if reason := missing():
            sys.exit(f"cross_region.py cannot run here: it needs {reason.removeprefix('needs hardware: ')}")
        play(args.steps, args.cut_s)
    except AstraFlowError as error:
        sys.exit(f"cross_region.py: {error}")
    except KeyboardInterrupt:
        print("cross_region.py: interrupted; its processes and hosts are gone", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
