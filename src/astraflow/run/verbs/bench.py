"""One measurement against a fair rival; prints one JSON object with --json."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    name: Positional[str]
    """engine, trainer and so on: the modules of astraflow.run.bench"""
    json: bool = False
    """One JSON object on standard output and nothing else there."""
    kills: int | None = None
    """chaos: how many faults."""
    seed: int | None = None
    recipe: str | None = None
    """chaos: file, or package.module:function; left out, examples/two_policies.py."""
    set: list[str] = field(default_factory=list)
    """path=value, any number, of the recipe."""
    run_dir: Path | None = None
    """chaos: where the run is and stays. weights: a run, whose last two versions are measured too."""
    trajectories: int | None = None
    """dataflow: how many; left out, 200,000."""
    without: str | None = None
    """chaos: uncommit or fencing; switched off to see that the figures show it."""
    parts: list[str] = field(default_factory=list)
    """weights: only these; left out, all."""
    seeds: int | None = None
    """algorithms, order, lag: how many; left out, 3."""
    steps: int | None = None
    """algorithms, order, lag: optimiser steps of a run."""
    lr: float | None = None
    """algorithms, order, lag: learning rate."""
    lags: list[int] = field(default_factory=list)
    """lag: versions that data is old; left out, 0 4 16 64 256."""
    losses: list[str] = field(default_factory=list)
    """lag: by name; left out, grpo decoupled_ppo m2po."""
    quick: bool = False
    """lag: short lags and one loss, for a look."""
    processes: int | None = None
    """algorithms, order, lag: runs at a time, each with one torch thread; left out, 2."""
    out: Path | None = None
    """algorithms, order, lag: folder for the table, the plot and the cells that are done; cells that are there are not
    played again."""


def main(args: Args) -> int:
    from astraflow.errors import ConfigError
    from astraflow.run import bench

    known = sorted(module.name for module in pkgutil.iter_modules(bench.__path__) if not module.name.startswith("_"))
    if args.name not in known:
        raise ConfigError(f"there is no bench {args.name!r}; known: {', '.join(known)}")
    module = importlib.import_module(f"astraflow.run.bench.{args.name}")
    run = module.main
    result = run(**_options(args, tuple(inspect.signature(run).parameters)))
    if args.json:
        print(json.dumps(result))
    elif hasattr(module, "text"):
        print(module.text(result))
    else:
        for key, value in result.items():
            print(f"{key:<32} {value:,.2f}" if isinstance(value, float) else f"{key:<32} {value}")
    return int(any(result[name] for name in getattr(module, "WRONG", ())))


def _options(args: Args, takes: tuple[str, ...]) -> dict[str, Any]:
    """What was given, to a bench that takes it."""
    from astraflow.errors import ConfigError

    given = {each.name: getattr(args, each.name) for each in fields(args) if each.name not in ("name", "json")}
    given = {name: value for name, value in given.items() if value is not None and value is not False and value != []}
    for name in given:
        if name not in takes:
            raise ConfigError(f"bench {args.name} takes no --{name.replace('_', '-')}")
    return given
