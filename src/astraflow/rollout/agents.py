"""The agents of one episode: text in for the workflow, token ids in and out at the engine, everything recorded."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

from astraflow.engines.base import Engine, EngineInfo, GenerateReply, GenerateRequest
from astraflow.errors import BadRequest, EngineFailed, EpisodeOver, EpisodeTruncated, NotFound, SpawnRefused
from astraflow.observe.waits import Wait
from astraflow.rollout.conversation import Conversation, Prompt
from astraflow.rollout.loop_guard import PLAYING
from astraflow.rollout.settings import TreeLimits
from astraflow.rollout.template import ChatTemplate
from astraflow.rollout.workflow import Message, Reply
from astraflow.types import Lease, Sampling, StopReason, Trajectory

PROMPT_TOO_LONG = "prompt_too_long"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """What a role of the workflow is played by."""

    policy: str
    engine: Engine
    template: ChatTemplate
    sampling: Sampling


Hold = Callable[[str, int], Awaitable[None]]
"""Make the engine of a policy hold a version."""


async def holds_newest_only(policy: str, version: int) -> None:
    raise EngineFailed(f"{policy}: version {version} is wanted, but this worker cannot load past versions")


class EpisodeAgents:
    """``Agents`` of one episode. Closed at its end: whatever still asks then is refused, nothing runs on."""

    def __init__(
        self,
        lease: Lease,
        seats: Mapping[str, Seat],
        *,
        max_turns: int = 64,
        tree: TreeLimits | None = None,
        hold: Hold = holds_newest_only,
        waiting: Callable[[Wait], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._lease = lease
        self._seats = seats
        self._max_turns = max_turns
        self._tree = tree or TreeLimits()
        self._hold = hold
        self._waiting = waiting
        self._agents: list[RecordedAgent] = []
        self._first: dict[str, RecordedAgent] = {}
        self._asked = 0
        self._latest: int | None = None
        self._closed = False
        self._asking: set[asyncio.Task[GenerateReply]] = set()
        self.cut: str | None = None
        """Why no further turn may be asked for, once a turn was cut or a limit reached (F26)."""
        self.refused: str | None = None
        """Why an agent was refused, last: the episode's end only if the workflow lets it pass."""

    def __getitem__(self, role: str) -> RecordedAgent:
        if role not in self._first:
            self._first[role] = self._make(role, parent=None, place=role)
        return self._first[role]

    def spawn(self, role: str) -> RecordedAgent:
        return self._make(role, parent=self._latest, place=f"{role}#{len(self._agents)}")

    def spawn_below(self, above: RecordedAgent, role: str) -> RecordedAgent:
        """No slot is held while an agent waits for its children: any tree within the limits ends (F83)."""
        for what, found, most in (
            ("depth", above.depth, self._tree.depth),
            ("children", above.children, self._tree.children),
        ):
            if found >= most:
                raise SpawnRefused(self._refuse(f"{above.name} may not spawn {role!r}: the limit of {what} is {most}"))
        place = f"{above.place}/{role}#{above.children}"
        child = self._make(role, parent=above.latest, place=place, depth=above.depth + 1)
        above.children += 1
        return child

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._seats)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Of every agent that got a reply."""
        return tuple(agent.trajectory for agent in self._agents if agent.conversation.turns)

    async def close(self) -> None:
        """Cancel what is still asked of engines and refuse everything further; returns when nothing runs."""
        self._closed = True
        for task in self._asking:
            task.cancel()
        if self._asking:
            await asyncio.wait(set(self._asking), timeout=5.0)

    def _refuse(self, why: str) -> str:
        self.refused = why
        return why

    def _make(self, role: str, *, parent: int | None, place: str, depth: int = 0) -> RecordedAgent:
        if role not in self._seats:
            raise KeyError(f"no role {role!r}; the recipe's roles: {', '.join(sorted(self._seats))}")
        if len(self._agents) >= self._tree.agents:
            raise SpawnRefused(self._refuse(f"the limit of {self._tree.agents} agents an episode was reached"))
        number = sum(agent.role == role for agent in self._agents) + 1
        name = role if number == 1 else f"{role}#{number}"
        agent = RecordedAgent(
            self, name=name, role=role, seat=self._seats[role], parent=parent, place=place, depth=depth
        )
        self._agents.append(agent)
        return agent

    def _take_turn(self) -> int:
        if self._closed:
            raise EpisodeOver(f"episode {self._lease.id} is over: its agents answer no more")
        playing = PLAYING.get()
        if playing not in (None, self._lease.id):  # its words would be trained as this episode's
            raise BadRequest(
                f"an agent of episode {self._lease.id} was asked by the workflow of episode {playing}: "
                "a workflow may use only the agents that it was called with"
            )
        if self.cut is None and self._asked >= self._max_turns:
            self.cut = f"the limit of {self._max_turns} turns was reached"
        if self.cut is not None:
            raise EpisodeTruncated(self.cut)
        self._asked += 1
        return self._asked - 1

    async def _generate(self, seat: Seat, prompt: Prompt, sampling: Sampling) -> GenerateReply:
        version = self._lease.versions.get(seat.policy)
        if version is not None and version not in seat.engine.info().versions:
            await self._hold(seat.policy, version)
        chosen = None if version is not None else older_version(seat.engine.info(), sampling, self._lease)
        if chosen is not None:
            # It was there a moment ago; nobody needs this very version, should an update have taken its place.
            with suppress(NotFound):
                return await self._ask(seat, self._request(prompt, sampling, chosen))
        try:
            return await self._ask(seat, self._request(prompt, sampling, version))
        except NotFound as error:
            raise EngineFailed(f"{seat.policy}: NotFound: {error}") from error

    def _request(self, prompt: Prompt, sampling: Sampling, version: int | None) -> GenerateRequest:
        return GenerateRequest(
            tokens=prompt.tokens, sampling=sampling, version=version, prefix_group=str(self._lease.group)
        )

    async def _ask(self, seat: Seat, request: GenerateRequest) -> GenerateReply:
        """Raises NotFound where the engine does not hold the version."""
        task = asyncio.ensure_future(seat.engine.generate(request))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        try:
            with self._waiting(Wait.ENGINE):
                return await task
        except BadRequest as error:
            if str(error).startswith(PROMPT_TOO_LONG):
                raise
            raise EngineFailed(f"{seat.policy}: the engine refused the request: {error}") from error
        except NotFound:
            raise
        except Exception as error:
            raise EngineFailed(f"{seat.policy}: {type(error).__name__}: {error}") from error
        finally:
            if not task.done():
                task.cancel()


class RecordedAgent:
    """``Agent``: see ``rollout.workflow``."""

    def __init__(
        self,
        agents: EpisodeAgents,
        *,
        name: str,
        role: str,
        seat: Seat,
        parent: int | None,
        place: str,
        depth: int,
    ) -> None:
        self.name = name
        self.role = role
        self.place = place
        """In the tree: the same in a re-run, in whatever order concurrent agents are made and speak."""
        self.depth = depth
        self.children = 0
        self.conversation = Conversation(seat.template)
        self._agents = agents
        self._seat = seat
        self._parent = parent
        self._asked = 0

    @property
    def trajectory(self) -> Trajectory:
        return Trajectory(
            agent=self.name,
            role=self.role,
            policy=self._seat.policy,
            samples=self.conversation.samples,
            turns=tuple(self.conversation.turns),
        )

    @property
    def latest(self) -> int | None:
        """Its last turn; before the first one, the turn that it was made in."""
        turns = self.conversation.turns
        return turns[-1].index if turns else self._parent

    def spawn(self, role: str) -> RecordedAgent:
        return self._agents.spawn_below(self, role)

    async def chat(self, messages: Sequence[Message], *, max_tokens: int | None = None) -> Reply:
        """Raises EpisodeTruncated after a cut turn or at a limit, EpisodeOver after the episode's end, EngineFailed,
        and BadRequest (prompt_too_long, messages that the template refuses, or a workflow that it was not made for)."""
        agents = self._agents
        index = agents._take_turn()
        prompt = self.conversation.prompt(messages)
        sampling = self._sampling(prompt, max_tokens)
        self._asked += 1
        reply = await agents._generate(self._seat, prompt, sampling)
        if reply.stop_reason is StopReason.CANCELLED:
            raise EngineFailed(f"{self._seat.policy}: the engine cancelled turn {index}")
        text = self.conversation.record(prompt, reply, index=index, parent=self._parent)
        agents._latest = index
        if reply.stop_reason is StopReason.LENGTH:
            agents.cut = f"turn {index} of {self.name} was cut after {len(reply.tokens)} tokens"
        return Reply(text=text, turn=index, stop_reason=reply.stop_reason, tokens=tuple(reply.tokens.tolist()))

    def _sampling(self, prompt: Prompt, max_tokens: int | None) -> Sampling:
        """``max_tokens`` within the room that the context leaves (F28), and this call's own seed (F65)."""
        base = self._seat.sampling
        context = self._seat.engine.info().max_context
        room = context - len(prompt.tokens)
        if room < 1:
            if prompt.node is not None:
                self._agents.cut = f"the context of {context} tokens is full"
                raise EpisodeTruncated(self._agents.cut)
            raise BadRequest(f"{PROMPT_TOO_LONG}: {len(prompt.tokens)} tokens leave no room in a context of {context}")
        wanted = base.max_tokens if max_tokens is None else max_tokens
        return Sampling(
            max_tokens=min(wanted, room),
            temperature=base.temperature,
            top_p=base.top_p,
            top_k=base.top_k,
            stop=base.stop,
            stop_token_ids=base.stop_token_ids,
            seed=call_seed(self._agents._lease.seed, self.place, self._asked),
        )


def older_version(info: EngineInfo, sampling: Sampling, lease: Lease) -> int | None:
    """Which of the older versions that the engine holds samples this turn; None: the newest does (AgentRL, Zhang et al.
    2025, arXiv 2510.04206: turns of one episode by policies of different ages). Drawn from the turn's seed alone."""
    older = info.versions[:-1]
    if not older or lease.version_choice <= 0:
        return None
    raw = hashlib.blake2b(f"version/{sampling.seed}".encode(), digest_size=8).digest()
    draw = int.from_bytes(raw[:4], "big") / 2**32
    return older[int.from_bytes(raw[4:], "big") % len(older)] if draw < lease.version_choice else None


def call_seed(lease_seed: int, place: str, turn: int) -> int:
    """Of an agent's n-th reply: siblings have other lease seeds, agents other places in the tree, turns other numbers;
    a re-run has all of them again, however concurrent agents overtake each other. In [0, 2**63)."""
    raw = hashlib.blake2b(f"{lease_seed}/{place}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(raw, "big") >> 1
