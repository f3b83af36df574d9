"""The launcher: starts dataflow, rollout services and trainers, restarts what dies, ends when the run has ended.

    launcher ── dataflow ◄── rollout-0 … rollout-n
                    ▲ └───── trainer-<policy> …            all talk to dataflow only

It decides nothing about training: killing it ends the processes, ``astraflow resume`` goes on from the run folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from astraflow.errors import AstraFlowError, RunFailed, Unavailable
from astraflow.run.child import Child, ChildSpec, shared_cores
from astraflow.run.config import Resolved
from astraflow.run.joined import need_trainers
from astraflow.run.layout import RunFolder, read_json
from astraflow.run.post import Post, caches_of, death_words, given_up_words, is_heard, set_back, was_told, why_left
from astraflow.run.silence import ANSWER_S, Silence
from astraflow.run.useful import Useful
from astraflow.wire.calls import Role
from astraflow.wire.client import HttpDataflow
from astraflow.wire.messages import OperatorRequest, StatusReply
from astraflow.wire.tokens import ENVIRONMENT, Tokens

log = logging.getLogger("astraflow.run")

QUICK_DEATHS = 3
"""A child that had done nothing useful died quickly; so many quick deaths of one post in a row stop the run."""
START_S = 300.0
"""For a dataflow that lives to listen: on a machine that is busy its imports alone take a minute."""
POLL_S = 0.5
LEAVE_S = 30.0
CONFIG_ERROR = 2
"""Exit code of a process that found its settings wrong: to start it again is useless."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listen:
    """Where dataflow listens."""

    host: str = "127.0.0.1"
    port: int = 0
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def flags(self) -> tuple[str, ...]:
        if self.tls_cert is None or self.tls_key is None:
            return ("--host", self.host, "--port", str(self.port))
        tls = ("--tls-cert", str(self.tls_cert), "--tls-key", str(self.tls_key))
        return ("--host", self.host, "--port", str(self.port), *tls)


class Watcher(Protocol):
    """Who wants to know of every process: a test of faults, for example."""

    def started(self, post: str, name: str, child: Child) -> None:
        """``name``: as dataflow knows it; another one with every start of a rollout service."""

    def died(self, post: str, name: str, child: Child) -> None: ...


class Supervisor:
    """``run`` once. ``watch`` is called with every status, for the display; ``watcher`` with every start and death.

    ``route`` may lead a process to dataflow by another way: (post, URL) → URL. ``although_failed``: a run that failed
    goes on, before any worker asks for work.
    """

    def __init__(
        self,
        run: RunFolder,
        resolved: Resolved,
        *,
        listen: Listen,
        watch: Callable[[StatusReply], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
        tensorboard: bool = False,
        although_failed: bool = False,
        watcher: Watcher | None = None,
        route: Callable[[str, str], str] = lambda _, url: url,
    ) -> None:
        self._watcher, self._route = watcher, route
        self._recording = ("--tensorboard",) if tensorboard else ()
        self._although_failed = although_failed
        self._run, self._resolved, self._listen = run, resolved, listen
        self._watch, self._say = watch, say
        self._tokens = Tokens.read(run.path)
        self._posts: dict[str, Post] = {}
        self._interrupts = 0
        self._stop = asyncio.Event()

    async def run(self) -> StatusReply:
        """The last status of a finished run. Raises RunFailed with the first cause, KeyboardInterrupt after Ctrl-C."""
        with self._signals():
            try:
                url = await self._start_dataflow()
                self._add_workers(url)
                if self._although_failed:
                    async with HttpDataflow(url, self._tokens.operator, ca=self._listen.tls_cert) as patient:
                        await patient.operate(OperatorRequest(action="resume"))
                async with self._client(url) as client:
                    return await self._follow(client)
            finally:
                await self._end_all()

    def stop(self) -> None:
        """As Ctrl-C does: ``run`` then raises KeyboardInterrupt, in the task that called it."""
        self._interrupted()

    def is_useful(self, post: str) -> bool:
        """Whether the process there now has done useful work."""
        useful = self._posts[post].useful
        return useful is not None and useful.done

    # ── starting ──

    async def _start_dataflow(self) -> str:
        self._run.endpoint.unlink(missing_ok=True)
        post = self._post("dataflow", ("dataflow", *self._listen.flags(), *self._recording), Role.OPERATOR, None)
        await self._start(post)
        deadline = asyncio.get_running_loop().time() + START_S
        while not self._run.endpoint.exists():
            assert post.child is not None, "it was started above"
            if post.child.code is not None:
                raise RunFailed(f"dataflow did not start: {post.child.last_words()}")
            if asyncio.get_running_loop().time() >= deadline:
                raise RunFailed(f"dataflow does not listen after {START_S:g} s: {post.child.last_words()}")
            await self._tick(0.05)
        url = str(read_json(self._run.endpoint)["url"])
        # A restarted dataflow must be found where the first one was.
        fixed = dataclasses.replace(self._listen, port=int(url.rpartition(":")[2]))
        again = self._post("dataflow", ("dataflow", *fixed.flags(), *self._recording), Role.OPERATOR, None)
        again.child, again.useful, again.starts = post.child, post.useful, post.starts
        again.silence = post.silence
        return url

    def _add_workers(self, url: str) -> None:
        recipe = self._resolved.recipe
        ca = () if self._listen.tls_cert is None else ("--ca", str(self._listen.tls_cert))
        for number in range(recipe.services):
            name = f"rollout-{number}"
            way = self._route(name, url)
            region = ("--region", recipe.regions[0]) if recipe.regions else ()
            serves = place_flags(recipe.places, number)
            self._post(name, ("rollout", "--dataflow", way, "--name", name, *serves, *region, *ca), Role.WORKER, None)
        for policy in (*recipe.trainable, *recipe.averages) if recipe.steps else ():
            self._add_trainer(url, policy)

    def _add_trainer(self, url: str, policy: str) -> None:
        name = f"trainer-{policy}"
        ca = () if self._listen.tls_cert is None else ("--ca", str(self._listen.tls_cert))
        arguments = ("trainer", "--dataflow", self._route(name, url), "--policy", policy, *ca)
        self._post(name, arguments, Role.TRAINER, policy)

    def _staff(self, url: str, status: StatusReply) -> None:
        """A trainer for who joined since, and again one for who is trained again."""
        for policy in need_trainers(self._resolved.recipe, status):
            if f"trainer-{policy}" not in self._posts:
                self._say(f"policy {policy} has joined")
                self._add_trainer(url, policy)
        unfinished = {each.policy for each in status.policies if each.trainable and each.version < each.steps}
        for post in self._posts.values():
            if post.left and post.policy in unfinished and not was_told(post, status):
                self._say(f"policy {post.policy} is trained again")
                post.left, post.told, post.child = False, False, None

    def _post(self, name: str, arguments: Sequence[str], role: Role, policy: str | None) -> Post:
        recipe = self._resolved.recipe
        busy = 1 if role is Role.OPERATOR else recipe.services + len(recipe.trainable)
        verb, *rest = arguments
        spec = ChildSpec(
            name=name,
            arguments=(verb, "--run-dir", str(self._run.path), *rest),
            environment={**shared_cores(busy, decodes=role is Role.WORKER), ENVIRONMENT: self._tokens.of(role, policy)},
            log=self._run.logs / f"{name}.log",
        )
        post = Post(spec=spec, role=role, policy=policy)
        self._posts[name] = post
        return post

    async def _start(self, post: Post) -> None:
        post.starts += 1
        spec = post.spec
        name = spec.name
        if post.starts > 1 and "--name" in spec.arguments:
            # Its old name is taken until dataflow knows that the old process is dead.
            name = f"{spec.name}.{post.starts}"
            again = tuple(name if word == spec.name else word for word in spec.arguments)
            spec = dataclasses.replace(spec, arguments=again)
        for left in caches_of(self._run.path, post.spec.name):
            shutil.rmtree(left, ignore_errors=True)
        post.child = await Child.start(spec)
        post.useful = Useful(role=post.role, name=name, policy=post.policy)
        limits, serves = self._resolved.recipe.limits, post.role is Role.OPERATOR
        post.silence = Silence(
            name=post.spec.name,
            log=spec.log,
            started_at=post.child.started_s,
            tell_after_s=ANSWER_S if serves else 0.0,
            first_word_s=START_S if serves else limits.starved_after_s,
            hung_after_s=limits.hung_after_s,
        )
        if self._watcher is not None:
            self._watcher.started(post.spec.name, name, post.child)
        if post.starts > 1:
            self._say(f"{post.spec.name} started again (start {post.starts})")

    # ── following ──

    async def _follow(self, client: HttpDataflow) -> StatusReply:
        last: StatusReply | None = None
        clock = asyncio.get_running_loop().time
        while True:
            try:
                await self._fill_posts()
            except RunFailed as error:
                await self._tell_failed(client, error)
                raise
            asked_at = clock()
            found = await self._status(client)
            await self._end_hung(asked_at, found)
            if found is not None:
                self._see(found)
                for words in set_back(last, found):
                    self._say(words)
                self._staff(client.url, found)
                self._say_who_left(found)
            last = found or last
            if last is not None:
                self._watch(last)
                if last.state == "failed":
                    raise RunFailed(last.error or "the run failed without a cause")
                if last.state == "finished":
                    await self._let_leave()
                    return last
            await self._tick(POLL_S)

    async def _status(self, client: HttpDataflow) -> StatusReply | None:
        """None while dataflow is being started again."""
        try:
            return await client.status()
        except Unavailable:
            return None

    async def _tell_failed(self, client: HttpDataflow, error: RunFailed) -> None:
        """So that the ledger has the cause too, unless dataflow is what died."""
        with contextlib.suppress(AstraFlowError):
            await client.operate(OperatorRequest(action="stop", error=str(error)))

    async def _end_hung(self, asked_at: float, status: StatusReply | None) -> None:
        """Who lives and is silent for too long dies, which is looked at next."""
        for post in self._posts.values():
            heard = is_heard(post, status, asked_at)
            if post.child is None or post.child.code is not None or post.silence is None or heard is None:
                continue
            verdict = post.silence.see(asked_at, heard=heard)
            if verdict.words is not None:
                self._say(verdict.words)
            if verdict.end:
                await post.child.end_hung()

    def _see(self, status: StatusReply) -> None:
        for post in self._posts.values():
            if post.useful is not None:
                post.useful.see(status)

    def _say_who_left(self, status: StatusReply) -> None:
        """Not at the end of the run, when everybody leaves."""
        for post in self._posts.values():
            if post.left and not post.told and status.state == "running":
                post.told = True
                self._say(f"{post.spec.name} has left{why_left(post, status)}; it is not started again")

    async def _fill_posts(self) -> None:
        now = asyncio.get_running_loop().time()
        for post in self._posts.values():
            child = post.child
            if post.left or (child is not None and child.code is None):
                continue
            if child is not None:
                self._look_at_death(post, child, now)
            if not post.left:
                await self._start(post)

    def _look_at_death(self, post: Post, child: Child, now: float) -> None:
        if self._watcher is not None and post.useful is not None:
            self._watcher.died(post.spec.name, post.useful.name, child)
        if child.code == 0 and post.spec.name != "dataflow":
            post.left = True
            return
        lived_s = now - child.started_s
        if child.code == CONFIG_ERROR:
            raise RunFailed(f"{post.spec.name}: {child.last_words()}")
        useful = post.useful is not None and post.useful.done
        post.quick_deaths = 0 if useful else post.quick_deaths + 1
        self._say(death_words(post.spec.name, child, lived_s))
        if post.quick_deaths == QUICK_DEATHS:
            raise RunFailed(given_up_words(post.spec.name, child, QUICK_DEATHS))

    async def _tick(self, seconds: float) -> None:
        """Wait, unless somebody interrupts."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        if self._stop.is_set():
            raise KeyboardInterrupt

    # ── ending ──

    async def _let_leave(self) -> None:
        """Workers hear that the run has finished and end by themselves; who does not is told to in the end."""
        waits = [post.child.wait() for name, post in self._posts.items() if post.child and name != "dataflow"]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_all(waits), LEAVE_S)

    async def _end_all(self) -> None:
        """Workers first, so that they can hand back what they hold; dataflow last."""
        workers = [post.child for name, post in self._posts.items() if post.child and name != "dataflow"]
        await _all([child.end(grace_s=self._grace()) for child in workers if child.code is None])
        rest = [post.child for post in self._posts.values() if post.child and post.child.code is None]
        await _all([child.end(grace_s=self._grace()) for child in rest])

    def _grace(self) -> float:
        return 0.0 if self._interrupts > 1 else 15.0

    @contextlib.contextmanager
    def _signals(self):  # type: ignore[no-untyped-def]
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._interrupted)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _interrupted(self) -> None:
        self._interrupts += 1
        self._stop.set()
        if self._interrupts == 1:
            self._say("stopping; once more to stop at once")
            return
        for post in self._posts.values():
            if post.child is not None:
                post.child.kill()

    def _client(self, url: str) -> HttpDataflow:
        # One attempt: whoever is asked and does not answer may be dead, which is looked at next.
        return HttpDataflow(
            url, self._tokens.operator, retry_s=5.0, attempts=1, timeout_s=5.0, ca=self._listen.tls_cert
        )


async def _all(waits: Sequence[Awaitable[object]]) -> None:
    if waits:
        await asyncio.gather(*waits)


def place_flags(places: Sequence[Sequence[str]], number: int) -> tuple[str, ...]:
    """What service ``number`` of the launcher serves, to others too."""
    if not places:
        return ()
    return ("--policies", ",".join(places[number % len(places)]), "--policy-port", "0")


__all__ = ["AstraFlowError", "Listen", "Supervisor"]
