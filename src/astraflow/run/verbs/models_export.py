"""A version of a run as a folder that from_pretrained loads: its weights, the recipe's config and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Positional[Path]
    """Run folder."""
    dir: Positional[Path]
    """Where to; must not exist yet, or be empty."""
    version: int | None = None
    """Committed steps; the newest if left out. The store keeps version 0 and the newest ones."""
    policy: str | None = None
    """May be left out where the run trains one."""


def main(args: Args) -> int:
    from astraflow.run.choose_policy import choose_policy
    from astraflow.run.config import load_config
    from astraflow.run.export import export_version
    from astraflow.run.layout import RunFolder
    from astraflow.run.run_db import open_run_db

    run = RunFolder(args.run).require()
    recipe = load_config(run.path).recipe
    with open_run_db(run.database) as db:
        joined = db.joined()
    policy = args.policy if args.policy in joined else choose_policy(recipe, args.policy)
    manifest = export_version(run, recipe, policy=policy, version=args.version, target=args.dir)
    print(f"{args.dir}: version {manifest.version} of policy {policy}, digest {manifest.digest[:16]}")
    return 0
