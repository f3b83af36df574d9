"""Who plays what on this worker: an engine and a template per policy, and the seats of any cast made of them."""

from __future__ import annotations

from collections.abc import Mapping

from astraflow.engines.base import Engine
from astraflow.errors import EngineFailed
from astraflow.rollout.agents import Seat
from astraflow.rollout.template import ChatTemplate
from astraflow.types import Sampling


class Cast:
    """Policies may join at any time; a cast that names one which is not here yet is refused."""

    def __init__(self, sampling: Sampling, by_role: Mapping[str, Sampling]) -> None:
        self.templates: dict[str, ChatTemplate] = {}
        """By policy."""
        self._engines: dict[str, Engine] = {}
        self._sampling, self._by_role = sampling, dict(by_role)

    def join(self, policy: str, engine: Engine, template: ChatTemplate) -> None:
        self._engines[policy] = engine
        self.templates[policy] = template

    def seats(self, roles: Mapping[str, str]) -> dict[str, Seat]:
        """``roles``: to policies. Raises EngineFailed."""
        missing = sorted(set(roles.values()) - set(self._engines))
        if missing:
            raise EngineFailed(f"policy {missing[0]!r} is not here; here are {sorted(self._engines)}")
        return {
            role: Seat(
                policy=policy,
                engine=self._engines[policy],
                template=self.templates[policy],
                sampling=self._by_role.get(role, self._sampling),
            )
            for role, policy in roles.items()
        }
