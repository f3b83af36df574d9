"""One rollout service process: engines, templates, subscribers and players of a recipe, and the service over them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from astraflow.engines.attested import AttestedEngine
from astraflow.engines.base import Engine
from astraflow.engines.settings import EngineSettings
from astraflow.engines.torch_engine import TorchEngine
from astraflow.errors import ConfigError
from astraflow.rollout.cast import Cast
from astraflow.rollout.elsewhere import Elsewhere, RemoteEngine
from astraflow.rollout.endpoint import Hold, PolicyEndpoint, engine_token
from astraflow.rollout.loop_guard import LoopGuard
from astraflow.rollout.newcomers import Newcomers
from astraflow.rollout.play import Player, WorkflowPlayer
from astraflow.rollout.served import Load, Relay, ServedPolicy
from astraflow.rollout.service import RolloutService
from astraflow.rollout.standstill import SPEAK_S, StandstillWorker
from astraflow.rollout.template import ChatTemplate
from astraflow.run.canary import user_says
from astraflow.run.config import Resolved
from astraflow.run.layout import CACHE
from astraflow.run.logs import configure_logging, incarnation, process_name
from astraflow.run.recipe import Recipe
from astraflow.run.stores import Sharing, origin_store, sharing_store
from astraflow.run.tls import server_context
from astraflow.weights.store import WeightStore
from astraflow.weights.subscribe import Subscriber
from astraflow.wire.client import HttpDataflow, trusting
from astraflow.wire.messages import AddedPolicy, Capabilities
from astraflow.wire.protocol import Dataflow
from astraflow.wire.tokens import from_environment
from astraflow.workflows.supervised import Supervised

CALL_RETRY_S = 3.0
"""The service has the patience, and says what it waits for; a call that hid it all would be silent."""


MakeEngine = Callable[[Path, str, EngineSettings], Engine]
"""Of a model's folder, for a policy of that name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serves:
    """Which policies a worker has engines for, and whether others may ask them."""

    policies: tuple[str, ...] = ()
    """Empty: all."""
    host: str = "127.0.0.1"
    port: int | None = None
    """Of the endpoint for other workers; None: it has none. 0: any free one."""
    address: str = ""
    """Host name under which others reach it, if it is not ``host``."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    ca: Path | None = None
    """Certificate of other workers' endpoints that is trusted beside the system's."""

    def own(self, recipe: Recipe) -> tuple[str, ...]:
        """Raises ConfigError for a policy that the recipe does not have."""
        unknown = sorted(set(self.policies) - set(recipe.policies))
        if unknown:
            raise ConfigError(f"--policies names {unknown[0]!r}; Recipe.policies has {', '.join(recipe.policies)}")
        return self.policies or tuple(recipe.policies)

    def endpoint(self, policies: Mapping[str, ServedPolicy], hold: Hold) -> PolicyEndpoint | None:
        if self.port is None:
            return None
        return PolicyEndpoint(
            policies,
            hold,
            host=self.host,
            port=self.port,
            address=self.address,
            token=engine_token(from_environment()),
            ssl=server_context(self.tls_cert, self.tls_key),
        )

    def remote(self, policy: str) -> RemoteEngine:
        """Of a policy that other workers have engines for."""
        trust = None if self.ca is None else trusting(self.ca)
        return RemoteEngine(policy, token=engine_token(from_environment()), trust=trust)


async def serve_rollout(
    resolved: Resolved,
    *,
    url: str,
    name: str | None,
    run_dir: Path | None,
    ca: Path | None,
    sharing: Sharing | None = None,
    serves: Serves | None = None,
) -> int:
    """Until the run is finished, or SIGTERM (once: hand back what is held; twice: at once)."""
    configure_logging()
    name = name or process_name("rollout")
    sharing = sharing or Sharing()
    rate = sharing.rate()
    async with (
        HttpDataflow(url, from_environment(), ca=ca, retry_s=CALL_RETRY_S) as calls,
        HttpDataflow(url, from_environment(), ca=ca, rate=rate) as client,
    ):
        origin = origin_store(resolved.recipe, client, run_dir, rate)
        with tempfile.TemporaryDirectory(prefix=f"{CACHE}{name}-", dir=run_dir) as folder:
            cache = Path(folder)
            async with sharing_store(resolved, sharing, origin, cache=cache, ca=ca, rate=rate) as store:
                service = build_rollout(
                    resolved, calls, name=name, store=store, cache=cache, relay=store, serves=serves
                )
                loop = asyncio.get_running_loop()
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, service.stop)
                with _guarded(service, resolved, url, ca, cache=cache):
                    await service.run()
    return 0


def _guarded(
    service: RolloutService, resolved: Resolved, url: str, ca: Path | None, *, cache: Path
) -> AbstractContextManager[None]:
    """A thread that notices a blocked event loop, tells dataflow, and in the end ends this process."""
    limit_s = resolved.recipe.rollout_settings().block_limit_s

    def connect() -> HttpDataflow:
        return HttpDataflow(url, from_environment(), ca=ca, retry_s=SPEAK_S)

    def end(message: str) -> None:
        shutil.rmtree(cache, ignore_errors=True)
        sys.stderr.write(f"astraflow: {message}\n")
        sys.stderr.flush()
        os._exit(1)

    told = StandstillWorker(service, connect, end, block_limit_s=limit_s)
    return LoopGuard(told, blocked_after_s=min(service.heartbeat_s, limit_s)).watching()


def build_rollout(
    resolved: Resolved,
    dataflow: Dataflow,
    *,
    name: str,
    store: WeightStore,
    cache: Path,
    relay: Relay | None = None,
    serves: Serves | None = None,
    make_engine: MakeEngine = TorchEngine,
) -> RolloutService:
    """``cache``: an own folder for pulled weights. ``relay``: what of ``store`` other workers hear.

    ``serves``: which policies have an engine here; the others are asked for at the endpoints of other workers.
    """
    recipe = resolved.recipe
    settings, serves = recipe.rollout_settings(), serves or Serves()
    crew = Crew(recipe, serves, store, cache, make_engine)
    policies, cast = crew.policies, crew.cast
    seats, evaluated = cast.seats(recipe.casting), settings.eval_sampling
    player = WorkflowPlayer(
        workflow=recipe.workflow,
        seats=seats,
        recast=cast.seats,
        eval_sampling={} if evaluated is None else dict.fromkeys(seats, evaluated),
        max_turns=settings.max_turns,
        tree=settings.tree,
        cancel_grace_s=settings.cancel_grace_s,
    )
    players: dict[str, Player] = {"": player, "supervised": Supervised(cast.templates)}
    elsewhere = Elsewhere(crew.remote, serves.endpoint(policies, lambda policy, at: service.hold(policy, at)))
    capabilities = Capabilities(
        policies=tuple(policies),
        code_digest=resolved.code_digest,
        config_digest=resolved.digest,
        versions_held=min(policy.engine.versions_held for policy in recipe.policies.values()),
    )
    service = RolloutService(
        name=name,
        incarnation=incarnation(),
        dataflow=dataflow,
        players=players,
        policies=policies,
        capabilities=capabilities,
        settings=settings,
        elsewhere=elsewhere,
        relay=relay,
        config=resolved.settings(),
        newcomers=Newcomers(make=crew.make, policies=policies, cast=cast, elsewhere=elsewhere, dataflow=dataflow),
    )
    player.hold = service.hold
    player.waiting = service.activity.waiting
    return service


class Crew:
    """What plays on a worker: of the recipe from the start, and of what joins when it does."""

    def __init__(
        self, recipe: Recipe, serves: Serves, store: WeightStore, cache: Path, make_engine: MakeEngine
    ) -> None:
        """Policies that ``serves`` does not name, and what is like them, are asked for elsewhere."""
        settings = recipe.rollout_settings()
        self.policies: dict[str, ServedPolicy] = {}
        self.remote: list[RemoteEngine] = []
        self.cast = Cast(settings.sampling, settings.role_sampling)
        self._recipe, self._serves, self._own = recipe, serves, serves.own(recipe)
        self._store, self._cache, self._make_engine = store, cache, make_engine
        for name, policy in recipe.policies.items():
            made, template = self.make(AddedPolicy(name=name, like=name, trainable=policy.trainable))
            if isinstance(made, RemoteEngine):
                self.remote.append(made)
            else:
                self.policies[name] = made
            self.cast.join(name, made if isinstance(made, RemoteEngine) else made.engine, template)

    def make(self, added: AddedPolicy) -> tuple[ServedPolicy | RemoteEngine, ChatTemplate]:
        """Blocking: reads the model's tokenizer. Raises ConfigError."""
        name, policy = added.name, self._recipe.policies[added.like]
        folder = policy.folder()
        template = self.cast.templates.get(added.like) or ChatTemplate.from_folder(folder)
        if added.like not in self._own:
            return self._serves.remote(name), template
        bound = policy.max_staleness if added.trainable else None
        inner = self._make_engine(folder, name, policy.engine)
        engine = AttestedEngine(inner, render=lambda text: user_says(template, text))
        follow = _follower(name, self._store, self._cache / name, folder)
        return ServedPolicy(name, engine, follow, max_staleness=bound), template


def _follower(policy: str, store: WeightStore, cache: Path, folder: Path) -> Callable[[Load], Subscriber]:
    return lambda load: Subscriber(policy, store, cache, load, local=(folder,))
