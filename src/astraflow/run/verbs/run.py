"""Train: start dataflow, rollout services and trainers on this machine, show what they do, end when the run ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    recipe: Positional[str]
    """File, or package.module:function."""
    set: list[str] = field(default_factory=list)
    """path=value, any number; 'astraflow plan RECIPE' lists the paths."""
    seed: int | None = None
    """Of the recipe, if given."""
    run_dir: Path | None = None
    """A new folder; without it runs/NAME-001 and so on."""
    in_process: bool = False
    """Everything in this process, for a debugger."""
    host: str = "127.0.0.1"
    """Where dataflow listens; workers of other machines need another than loopback, and --tls-cert."""
    port: int = 0
    """0: any free one."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tensorboard: bool = False
    """Also write TensorBoard files."""
    json: bool = False
    """Print summary.json at the end, and nothing else to standard output."""


def main(args: Args) -> int:
    from astraflow.run.config import resolve
    from astraflow.run.launch import LaunchOptions, launch
    from astraflow.run.plan import supply_of
    from astraflow.run.prepare import create_run
    from astraflow.run.supervisor import Listen
    from astraflow.run.tls import server_context
    from astraflow.wire.listener import require_port

    server_context(args.tls_cert, args.tls_key)
    require_port(args.host, args.port)  # before a folder is made for a run that could not begin
    resolved = resolve(args.recipe, args.set, args.seed)
    supply = supply_of(resolved.recipe)  # a Curate that raises does so before there is a folder
    run = create_run(resolved, args.run_dir, say=lambda line: None if args.json else print(line, flush=True))
    listen = Listen(host=args.host, port=args.port, tls_cert=args.tls_cert, tls_key=args.tls_key)
    options = LaunchOptions(in_process=args.in_process, tensorboard=args.tensorboard, json=args.json)
    return launch(run, resolved, listen=listen, options=options, supply=supply)
