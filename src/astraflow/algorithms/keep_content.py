"""What is too long, said twice, ill-formed, or of no use by its outcome: masked or dropped, each with its reason.

Lengths come from the units; content and form from features that the worker computes or the workflow says
(``rollout.features``). A member without the feature is left alone: nobody said that anything is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from astraflow.algorithms.base import GroupSummary, UnitTable
from astraflow.algorithms.checks import check_at_least, check_share, is_number
from astraflow.algorithms.moments import mean
from astraflow.errors import ConfigError
from astraflow.types import Array, Outcome

OVERLONG = "overlong"
DUPLICATE = "duplicate"
ILL_FORMED = "ill_formed"
FEW_COMPLETED = "few_completed"
TOO_HARD = "too_hard"
TOO_EASY = "too_easy"


@dataclass(frozen=True, kw_only=True, slots=True)
class MinCompleted:
    """Drops a group (``few_completed``) of which less than ``share`` of the members completed: what is left of a group
    that was mostly cut off or lost tells more of the limits than of the task."""

    share: float = 0.5

    def __post_init__(self) -> None:
        check_share("MinCompleted.share", self.share)

    def verdict(self, summary: GroupSummary, advantages: Array) -> str | None:
        completed = sum(outcome is Outcome.COMPLETED for outcome in summary.outcomes)
        needed = Fraction(str(self.share)) * summary.size  # in exact decimals: 0.28 of 25 is 7 (F63)
        return FEW_COMPLETED if completed < needed else None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanReward:
    """Drops a group whose mean reward (of the policy's units, by episode) is below ``low`` (``too_hard``) or above
    ``high`` (``too_easy``): online difficulty filtering (Bae et al. 2025, arXiv 2504.03380). The bounds are kept."""

    low: float = -np.inf
    high: float = np.inf

    def __post_init__(self) -> None:
        if not (is_number(self.low) and is_number(self.high) and self.low <= self.high):
            raise ConfigError(f"MeanReward: low <= high, found low {self.low}, high {self.high}")

    def verdict(self, summary: GroupSummary, advantages: Array) -> str | None:
        units = summary.units
        by_episode = [
            mean(units.reward[units.counts & (units.episode == episode)])
            for episode in sorted(set(units.episode[units.counts].tolist()))
        ]
        if not by_episode:
            return None
        average = mean(np.array(by_episode))
        if average < self.low:
            return TOO_HARD
        return TOO_EASY if average > self.high else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DropOverlong:
    """Samples with more than ``tokens`` sampled tokens take no gradient (``overlong``; overlong filtering of DAPO, Yu
    et al. 2025, arXiv 2503.14476, at a length of one's own). Their rewards stay in the baseline; none left drops the
    group. What the engine itself cut off is ``DropTruncated``'s."""

    tokens: int

    def __post_init__(self) -> None:
        check_at_least("DropOverlong.tokens", self.tokens, 1)

    def verdict(self, summary: GroupSummary, advantages: Array) -> str | None:
        return _all_masked(summary.units, self.mask(summary), OVERLONG)

    def mask(self, summary: GroupSummary) -> dict[str, str]:
        length: dict[str, int] = {}
        for sample, tokens in zip(summary.units.sample_id, summary.units.tokens.tolist(), strict=True):
            length[sample] = length.get(sample, 0) + tokens
        return {sample: OVERLONG for sample, tokens in length.items() if tokens > self.tokens}


@dataclass(frozen=True, kw_only=True, slots=True)
class DropDuplicates:
    """Of members in which the policy sampled exactly the same, the first ``copies`` take gradient; the others are
    masked (``duplicate``), their rewards stay in the baseline. A group of copies alone is dropped (``duplicate``).

    Members that did not count are no first copy.
    """

    copies: int = 1

    def __post_init__(self) -> None:
        check_at_least("DropDuplicates.copies", self.copies, 1)

    def verdict(self, summary: GroupSummary, advantages: Array) -> str | None:
        seen = self._contents(summary)
        known = len(seen) > 1 and None not in seen.values()
        return DUPLICATE if known and len(set(seen.values())) == 1 else None

    def mask(self, summary: GroupSummary) -> dict[str, str]:
        count: dict[bytes, int] = {}
        extra: set[int] = set()
        for episode, content in self._contents(summary).items():
            if content is not None:
                count[content] = count.get(content, 0) + 1
                if count[content] > self.copies:
                    extra.add(episode)
        return _of_episodes(summary.units, extra, DUPLICATE)

    def _contents(self, summary: GroupSummary) -> dict[int, bytes | None]:
        """Of each episode with a counted unit, in order; None where no hash came."""
        hashes = summary.features.get(f"episode.content_hash/{summary.policy}")
        contents: dict[int, bytes | None] = {}
        for episode in sorted(set(summary.units.episode[summary.units.counts].tolist())):
            known = hashes is not None and bool(np.isfinite(hashes[episode]).all())
            contents[episode] = hashes[episode].tobytes() if hashes is not None and known else None
        return contents


@dataclass(frozen=True, kw_only=True, slots=True)
class DropIllFormed:
    """Members whose feature ``name`` is 0 take no gradient (``ill_formed``), their rewards stay in the baseline; none
    left drops the group. The workflow says it: ``Reward(features={"format": 0.0})``, or ``SingleTurn(form=...)``."""

    name: str = "format"

    def verdict(self, summary: GroupSummary, advantages: Array) -> str | None:
        return _all_masked(summary.units, self.mask(summary), ILL_FORMED)

    def mask(self, summary: GroupSummary) -> dict[str, str]:
        flags = summary.features.get(f"episode.{self.name}")
        if flags is None:
            return {}
        wrong = {n for n in range(len(flags)) if bool(np.any(flags[n] == 0))}
        return _of_episodes(summary.units, wrong, ILL_FORMED)


def _of_episodes(units: UnitTable, episodes: set[int], reason: str) -> dict[str, str]:
    return {units.sample_id[n]: reason for n in range(len(units)) if int(units.episode[n]) in episodes}


def _all_masked(units: UnitTable, masked: dict[str, str], reason: str) -> str | None:
    """The reason, if none of the samples that count is left."""
    counted = {units.sample_id[n] for n in np.flatnonzero(units.counts)}
    return reason if counted and counted <= masked.keys() else None
