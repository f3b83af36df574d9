"""Go on with a run that was stopped or has failed: same recipe, same settings, from its newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Positional[Path]
    """Run folder."""
    allow_changed_tasks: bool = False
    """Go on although the dataset is not the one that the run was started with: it is begun from its first epoch."""
    in_process: bool = False
    """Everything in this process, for a debugger."""
    host: str = "127.0.0.1"
    port: int = 0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tensorboard: bool = False
    json: bool = False
    """Print summary.json at the end, and nothing else to standard output."""


def main(args: Args) -> int:
    from astraflow.dataflow.store import lock_run
    from astraflow.run.changed_tasks import accept_changed_tasks
    from astraflow.run.config import load_config, read_config
    from astraflow.run.launch import LaunchOptions, launch
    from astraflow.run.layout import RunFolder
    from astraflow.run.over import is_finished, say_finished
    from astraflow.run.run_db import require_sound
    from astraflow.run.supervisor import Listen
    from astraflow.wire.listener import require_port

    run = RunFolder(args.run).require()
    resolved = load_config(run.path, allow_changed_tasks=args.allow_changed_tasks)
    if is_finished(run):
        return say_finished(run, resolved, as_json=args.json)
    require_port(args.host, args.port)
    require_sound(run.database)
    lock_run(run.path).close()  # a run that somebody serves is refused before anything is said or changed
    if resolved.digest != read_config(run.path)["digest"]:
        accept_changed_tasks(run, resolved)
    listen = Listen(host=args.host, port=args.port, tls_cert=args.tls_cert, tls_key=args.tls_key)
    options = LaunchOptions(
        in_process=args.in_process, tensorboard=args.tensorboard, json=args.json, although_failed=True
    )
    return launch(run, resolved, listen=listen, options=options)
