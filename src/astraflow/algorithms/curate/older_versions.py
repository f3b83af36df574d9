"""Cross-policy sampling: turns of one episode by policies of different ages, so that the group explores more."""

from __future__ import annotations

from dataclasses import replace

from astraflow.algorithms.base import Admission, Curate, GroupSummary, State
from astraflow.algorithms.checks import check_part, check_share
from astraflow.algorithms.curate.compose import most_groups, tasks_of


class WithOlderVersions:
    """Another Curate's groups, in which each turn is sampled with probability ``chance`` by an older version that the
    engine holds (AgentRL, Zhang et al. 2025, arXiv 2510.04206). Needs ``EngineSettings(versions_held=2)`` or more, and
    a ``max_staleness`` of at least 1: older tokens count as what they are."""

    def __init__(self, curate: Curate, *, chance: float) -> None:
        check_part("WithOlderVersions.curate", curate, Curate)
        check_share("WithOlderVersions.chance", chance)
        self._curate = curate
        self._chance = chance

    @property
    def groups(self) -> int | None:
        return most_groups(self._curate)

    @property
    def size(self) -> int | None:
        return tasks_of(self._curate)

    def next(self) -> Admission | None:
        admission = self._curate.next()
        return None if admission is None else replace(admission, version_choice=self._chance)

    def observe(self, summary: GroupSummary) -> None:
        self._curate.observe(summary)

    def state_dict(self) -> State:
        return self._curate.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._curate.load_state_dict(state)
