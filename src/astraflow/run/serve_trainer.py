"""One trainer process: the backend of one policy of a recipe, and the loop over it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from pathlib import Path

from astraflow.backends.torch_single import TorchBackend
from astraflow.errors import ConfigError
from astraflow.run.canary import canary_of
from astraflow.run.choose_policy import choose_policy
from astraflow.run.config import Resolved
from astraflow.run.layout import RunFolder
from astraflow.run.logs import configure_logging
from astraflow.run.stores import origin_store
from astraflow.trainer.checkpoints import EXPORT, Checkpoints
from astraflow.trainer.loop import TrainerIdentity, TrainLoop
from astraflow.weights.chain import Chain
from astraflow.weights.manifest import weight_files_in
from astraflow.weights.publish import Publisher
from astraflow.weights.store import WeightStore
from astraflow.wire.client import HttpDataflow
from astraflow.wire.goodbye import TOLD
from astraflow.wire.protocol import Dataflow
from astraflow.wire.tokens import from_environment

log = logging.getLogger("astraflow.trainer")


async def serve_trainer(
    resolved: Resolved, *, url: str, policy: str | None, run_dir: Path | None, ca: Path | None
) -> int:
    """Until the run is finished, or SIGTERM: whatever is not committed comes again."""
    configure_logging()
    chosen = choose_policy(resolved.recipe, policy)
    if chosen not in resolved.recipe.trainable:
        raise ConfigError(f"policy {chosen!r} has trainable=False: there is nothing to do for a trainer")
    folder = RunFolder(run_dir).checkpoints if run_dir is not None else Path("checkpoints")
    async with HttpDataflow(url, from_environment(), ca=ca) as client:
        store = origin_store(resolved.recipe, client, run_dir)
        loop = await asyncio.to_thread(
            build_trainer, resolved, client, policy=chosen, store=store, checkpoints=folder / chosen
        )
        work = asyncio.ensure_future(loop.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        try:
            await work
        except asyncio.CancelledError:
            log.info("stopped policy=%s", chosen)
            await loop.say_goodbye(TOLD)
    return 0


def _publisher(resolved: Resolved, store: WeightStore, policy: str, checkpoints: Path) -> Publisher:
    settings = resolved.recipe.weights
    folder = resolved.recipe.policies[policy].folder()
    canary = canary_of(folder) if settings.canary else None
    if not settings.delta:
        return Publisher(store, policy, canary=canary)
    chain = Chain(checkpoints / f"{EXPORT}chain-{secrets.token_hex(8)}", settings)
    return Publisher(store, policy, chain=chain, initial=weight_files_in(folder), canary=canary)


def build_trainer(
    resolved: Resolved, dataflow: Dataflow, *, policy: str, store: WeightStore, checkpoints: Path
) -> TrainLoop:
    """Blocking: loads the model."""
    recipe = resolved.recipe
    chosen = recipe.policies[policy]
    backend = TorchBackend(
        chosen.folder(), chosen.trainer, steps=recipe.steps_of(policy), temperature=recipe.sampling.temperature
    )
    return TrainLoop(
        identity=TrainerIdentity(
            policy=policy,
            name=policy,
            config_digest=resolved.digest,
            code_digest=resolved.code_digest,
            config=resolved.settings(),
        ),
        dataflow=dataflow,
        backend=backend,
        publisher=_publisher(resolved, store, policy, checkpoints),
        checkpoints=Checkpoints(checkpoints, kept=chosen.trainer.checkpoints_kept),
        checkpoint_every=chosen.trainer.checkpoint_every,
        say=lambda line: log.info("%s", line),
    )
