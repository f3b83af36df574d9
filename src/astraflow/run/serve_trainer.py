"""One trainer process: the backend of one policy of a recipe, and the loop over it."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial
from pathlib import Path

from astraflow.backends.torch_single import TorchBackend
from astraflow.run.canary import canary_of
from astraflow.run.choose_policy import choose_policy
from astraflow.run.config import Resolved
from astraflow.run.joined import initial_folder, place_of
from astraflow.run.layout import RunFolder
from astraflow.run.logs import configure_logging
from astraflow.run.serve_average import serve_average
from astraflow.run.stores import origin_store
from astraflow.trainer.checkpoints import Checkpoints
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
    recipe = resolved.recipe
    chosen = policy if policy is not None else choose_policy(recipe, policy)
    folder = (RunFolder(run_dir).checkpoints if run_dir is not None else Path("checkpoints")) / chosen
    async with HttpDataflow(url, from_environment(), ca=ca) as client:
        place = await place_of(recipe, client, chosen)
        store = origin_store(recipe, client, run_dir)
        if place.average_of:
            await serve_average(resolved, client, place, store=store, folder=folder)
            return 0
        model = await initial_folder(recipe, client, store, place, folder)
        build = partial(build_trainer, resolved, client, policy=chosen, like=place.like, model=model)
        loop = await asyncio.to_thread(build, store=store, checkpoints=folder)
        work = asyncio.ensure_future(loop.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        try:
            await work
        except asyncio.CancelledError:
            log.info("stopped policy=%s", chosen)
            await loop.say_goodbye(TOLD)
    return 0


def _publisher(
    resolved: Resolved, store: WeightStore, policy: str, checkpoints: Checkpoints, folder: Path
) -> Publisher:
    settings = resolved.recipe.weights
    canary = canary_of(folder) if settings.canary else None
    if not settings.delta:
        return Publisher(store, policy, canary=canary)
    chain = Chain(checkpoints.scratch(), settings)
    return Publisher(store, policy, chain=chain, initial=weight_files_in(folder), canary=canary)


def build_trainer(
    resolved: Resolved,
    dataflow: Dataflow,
    *,
    policy: str,
    store: WeightStore,
    checkpoints: Path,
    like: str = "",
    model: Path | None = None,
) -> TrainLoop:
    """Blocking: loads the model. One that joined has the settings of the recipe's policy ``like``."""
    recipe = resolved.recipe
    chosen = recipe.policies[like or policy]
    folder = model or chosen.folder()
    kept = Checkpoints(checkpoints, kept=chosen.trainer.checkpoints_kept)
    backend = TorchBackend(
        folder, chosen.trainer, steps=recipe.steps_of(like or policy), temperature=recipe.sampling.temperature
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
        publisher=_publisher(resolved, store, policy, kept, folder),
        checkpoints=kept,
        checkpoint_every=chosen.trainer.checkpoint_every,
        say=lambda line: log.info("%s", line),
    )
