"""Resolve a recipe and do its arithmetic; runs nothing, loads no model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    recipe: Positional[str]
    """File, or package.module:function."""
    set: list[str] = field(default_factory=list)
    """path=value, any number."""
    seed: int | None = None
    json: bool = False
    """One JSON object."""


def main(args: Args) -> int:
    from astraflow.run.config import resolve
    from astraflow.run.overrides import settable_paths
    from astraflow.run.plan import plan_lines, plan_of

    resolved = resolve(args.recipe, args.set, args.seed)
    plan = plan_of(resolved)
    if args.json:
        print(json.dumps({"plan": plan, "config": resolved.config, "digest": resolved.digest}, indent=2))
        return 0
    print("\n".join(plan_lines(plan)))
    print("\nsettings (--set path=value):")
    for path, value in settable_paths(resolved.recipe):
        shown = value if isinstance(value, str | int | float | bool | tuple | None) else type(value).__name__
        print(f"  {path} = {shown!r}" if not isinstance(shown, str) or shown == value else f"  {path}: {shown}")
    return 0
