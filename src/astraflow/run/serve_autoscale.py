"""The autoscaler process: its actuator, its connection to dataflow, its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import ConfigError
from astraflow.run.actuators import Actuator, Commands, LocalProcesses
from astraflow.run.ask import address
from astraflow.run.autoscaler import Autoscaler, AutoscalerSettings
from astraflow.run.config import load_config
from astraflow.run.layout import RunFolder
from astraflow.run.logs import configure_logging
from astraflow.run.over import stored_state
from astraflow.run.stores import require_region
from astraflow.wire.calls import Role
from astraflow.wire.client import HttpDataflow
from astraflow.wire.names import require_name
from astraflow.wire.tokens import Tokens, from_environment


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscaleOptions:
    start: str | None = None
    stop: str | None = None
    prefix: str = "auto"
    region: str = ""
    poll_s: float = 5.0
    ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.start is None) is not (self.stop is None):
            raise ConfigError("--start and --stop belong together: give both or neither")
        require_name(self.prefix, "--prefix")
        if self.region:
            require_name(self.region, "--region")


async def serve_autoscale(run: str, options: AutoscaleOptions, *, say: Callable[[str], None]) -> int:
    """Until the run has ended (0), or SIGTERM: workers of this machine then end too."""
    configure_logging()
    url, token = address(run)
    actuator = _actuator(run, url, options)
    settings = AutoscalerSettings(prefix=options.prefix, poll_s=options.poll_s)
    async with HttpDataflow(url, token, retry_s=10.0, ca=options.ca) as client:
        scaler = Autoscaler(client, actuator, settings, say=say, has_ended=lambda: _has_ended(run))
        work = asyncio.ensure_future(scaler.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        try:
            await work
        except asyncio.CancelledError:
            say("stopped")
    return 0


def _has_ended(run: str) -> bool:
    """What the ledger says that lies on this machine; a run that is known by its URL may come back."""
    return "://" not in run and stored_state(RunFolder(Path(run)))[0] in {"finished", "failed"}


def _actuator(run: str, url: str, options: AutoscaleOptions) -> Actuator:
    is_url = "://" in run
    token = from_environment() if is_url else Tokens.read(Path(run)).of(Role.WORKER)
    if options.start is not None and options.stop is not None:
        fields = {"url": url, "run": run if is_url else str(Path(run).resolve())}
        return Commands(options.start, options.stop, fields=fields, token=token)
    if is_url:
        raise ConfigError("workers on this machine need the run folder: name it, or give --start and --stop")
    folder = RunFolder(Path(run).resolve())
    recipe = load_config(folder.path).recipe
    region = options.region or (recipe.regions[0] if recipe.regions else "")
    require_region(recipe, region)
    arguments = ["rollout", "--run-dir", str(folder.path), "--dataflow", url]
    arguments += ["--region", region] if region else []
    arguments += ["--ca", str(options.ca.resolve())] if options.ca is not None else []
    busy = 1 + recipe.services + len(recipe.trainable)
    return LocalProcesses(arguments, logs=folder.logs, token=token, busy=busy)
