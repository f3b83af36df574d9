"""One measurement against a fair rival; prints one JSON object with --json."""

from __future__ import annotations

import importlib
import json
import pkgutil
from dataclasses import dataclass

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    name: Positional[str]
    """engine, trainer and so on: the modules of astraflow.run.bench"""
    json: bool = False
    """One JSON object on standard output and nothing else there."""


def main(args: Args) -> int:
    from astraflow.errors import ConfigError
    from astraflow.run import bench

    known = sorted(module.name for module in pkgutil.iter_modules(bench.__path__) if not module.name.startswith("_"))
    if args.name not in known:
        raise ConfigError(f"there is no bench {args.name!r}; known: {', '.join(known)}")
    result = importlib.import_module(f"astraflow.run.bench.{args.name}").main()
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:<32} {value:,.2f}" if isinstance(value, float) else f"{key:<32} {value}")
    return 0
