"""The journey of one episode: every transition with its time and versions, then its text, coloured by who wrote it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Positional[Path]
    """Run folder."""
    episode: Positional[str]
    """GROUP/INDEX, for example 12/0."""
    json: bool = False
    """One JSON object."""


def main(args: Args) -> int:
    from astraflow.errors import ConfigError
    from astraflow.observe.terminal import harmless
    from astraflow.run.config import load_config
    from astraflow.run.journey import journey_of, text_lines
    from astraflow.run.layout import RunFolder

    group, slash, index = args.episode.partition("/")
    if not (slash and group.isdigit() and index.isdigit()):
        raise ConfigError(f"name an episode as GROUP/INDEX, for example 12/0, found {args.episode!r}")
    run = RunFolder(args.run).require()
    journey = journey_of(run, int(group), int(index))
    if args.json:
        print(json.dumps(journey.as_json()))
        return 0
    for line in journey.lines():
        print(harmless(line))
    for line in text_lines(journey, load_config(run.path).recipe, colour=sys.stdout.isatty()):
        print(line)
    return 0
