"""A closed group becomes one verdict per trainable policy: unit table, advantages, keep or a reason. Pure.

Statistics never depend on position: every unit knows its episode and key, members that are missing are simply absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from astraflow.algorithms.base import REASON, GroupSummary, Mask, UnitTable
from astraflow.algorithms.pipeline import Pipeline
from astraflow.errors import RunFailed
from astraflow.types import Array, Episode, Outcome, Sample, SampleKind, Task, Trajectory, Turn

Answer = TypeVar("Answer")

TOO_FEW = "too_few"
NOT_PLAYED = "not_played"
FAILED = "failed"
UNSCORED = "unscored"
NO_TOKENS = "no_tokens"
WITHOUT = "without/"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleVerdict:
    """May this sample be trained?"""

    sample_id: str
    masked: str | None
    """None: yes. Else why not: ``failed``, ``unscored``… (staleness is found at the cut)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is known of a group for one policy once it is settled; written in one transaction."""

    summary: GroupSummary
    advantages: Array
    """float32 [U]: one per unit of ``summary.units``; exactly 0 where the unit does not count."""
    reason: str | None
    """None: kept. Else dropped for this reason."""
    samples: tuple[SampleVerdict, ...]
    """Every sample that the policy has in the group, supervised ones included, in row order."""
    newest: int | None = None
    """Version of the sample that may be trained the longest: once it is stale, the group is. None: it never is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRef:
    """One sample and where it comes from."""

    sample_id: str
    episode: int
    outcome: Outcome
    trajectory: Trajectory
    sample: Sample
    turns: tuple[Turn, ...]
    """Those of the trajectory that this sample holds, in order."""
    score: float | None = None
    """Of the episode."""
    without: Mapping[str, float] = field(default_factory=dict)
    """Role → the episode's score had that role done nothing; what the workflow says (``without/ROLE``)."""

    @property
    def supervised(self) -> bool:
        return self.sample.kind is SampleKind.SUPERVISED


def smallest_group(size: int) -> int:
    """Default of ``min_group``: half the group, at least 2; 1 only where the size is 1."""
    return 1 if size == 1 else max(2, (size + 1) // 2)


def samples_of(group: int, episodes: Sequence[Episode | None], policy: str) -> Iterator[SampleRef]:
    """Every sample of ``policy``, ordered by episode index, agent, n; lost episodes have none."""
    for index, episode in enumerate(episodes):
        if episode is None:
            continue
        without = {
            name.removeprefix(WITHOUT): float(value.reshape(-1)[0])
            for name, value in episode.features.items()
            if name.startswith(WITHOUT) and value.size == 1
        }
        for trajectory in sorted(episode.trajectories, key=lambda each: each.agent):
            if trajectory.policy != policy:
                continue
            for n, sample in enumerate(trajectory.samples):
                yield SampleRef(
                    sample_id=f"{group}/{index}/{trajectory.agent}/{n}",
                    episode=index,
                    outcome=episode.outcome,
                    trajectory=trajectory,
                    sample=sample,
                    turns=tuple(sorted((t for t in trajectory.turns if t.sample == n), key=lambda t: t.index)),
                    score=episode.score,
                    without=without,
                )


def unit_table(group: int, episodes: Sequence[Episode | None], policy: str) -> UnitTable:
    """One row per turn that a version of ``policy`` sampled, in the order of ``samples_of``, then turn."""
    return units_of(samples_of(group, episodes, policy))


def units_of(references: Iterable[SampleRef], *, dataset: str = "") -> UnitTable:
    """The same, of samples that were already collected."""
    units = [(ref, turn) for ref in references if not ref.supervised for turn in ref.turns]
    rewards = np.array([np.nan if turn.reward is None else turn.reward for _, turn in units], np.float64)
    alive = np.array([ref.outcome is not Outcome.FAILED for ref, _ in units], np.bool_)
    return UnitTable(
        episode=np.array([ref.episode for ref, _ in units], np.int64),
        role=tuple(ref.trajectory.role for ref, _ in units),
        turn=np.array([turn.index for _, turn in units], np.int64),
        sample_id=tuple(ref.sample_id for ref, _ in units),
        reward=rewards,
        counts=alive & ~np.isnan(rewards),
        tokens=np.array([np.count_nonzero(ref.sample.sampled[t.start : t.stop]) for ref, t in units], np.int64),
        min_version=np.array([_min_version(ref.sample, turn) for ref, turn in units], np.int64),
        outcome=tuple(ref.outcome for ref, _ in units),
        baseline_key=tuple(turn.baseline_key or ref.trajectory.role for ref, turn in units),
        dataset=dataset,
        score=np.array([_number(ref.score) for ref, _ in units], np.float64),
        without=np.array([_number(ref.without.get(ref.trajectory.role)) for ref, _ in units], np.float64),
    )


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def settle(
    pipeline: Pipeline,
    *,
    group: int,
    task: Task,
    size: int,
    episodes: Sequence[Episode | None],
    arrival: int,
    policies: Mapping[str, bool],
    min_group: int,
    versions: Mapping[str, int] | None = None,
) -> dict[str, Verdict]:
    """One verdict per trainable policy of ``policies`` (name → trainable); frozen ones have none.

    ``versions``: of each policy now. ``episodes[i]`` is None when member i was lost or given up. Raises RunFailed when
    an algorithm raises or answers with the wrong shape: the group and the policy are named, nothing was changed.
    """
    if len(episodes) != size:
        raise RunFailed(f"group {group} has {size} members, found {len(episodes)} episodes to settle")
    outcomes = tuple(Outcome.FAILED if each is None else each.outcome for each in episodes)
    features = _features(task, episodes)
    verdicts: dict[str, Verdict] = {}
    for policy in sorted(name for name, trainable in policies.items() if trainable):
        references = list(samples_of(group, episodes, policy))
        units = units_of(references, dataset=task.dataset)
        sampled_by = [ref.sample.min_version for ref in references if ref.sample.min_version is not None]
        summary = GroupSummary(
            group=group,
            policy=policy,
            task=msgspec.structs.replace(task, payload={}),
            size=size,
            outcomes=outcomes,
            units=units,
            min_version=min(sampled_by, default=None),
            arrival=arrival,
            features=features,
            version=(versions or {}).get(policy, 0),
        )
        verdicts[policy] = _judge(pipeline, summary, references, min_group)
    return verdicts


def _features(task: Task, episodes: Sequence[Episode | None]) -> dict[str, Array]:
    """The task's own, and ``episode.NAME`` float64 [G, …] of the episodes', NaN where a member has none.

    A name whose arrays differ in shape from member to member is left out: it cannot be compared.
    """
    features = dict(task.features)
    for name in sorted({name for each in episodes if each is not None for name in each.features}):
        found = [None if each is None else each.features.get(name) for each in episodes]
        shapes = {array.shape for array in found if array is not None}
        if len(shapes) == 1:
            absent = np.full(shapes.pop(), np.nan)
            features[f"episode.{name}"] = np.stack([absent if a is None else a.astype(np.float64) for a in found])
    return features


def _judge(pipeline: Pipeline, summary: GroupSummary, references: list[SampleRef], min_group: int) -> Verdict:
    masked = {ref.sample_id: _data_mask(ref) for ref in references}
    rl = [ref.sample_id for ref in references if not ref.supervised]
    advantages = np.zeros(len(summary.units), np.float32)
    reason = _too_little(summary, references, min_group)
    if reason is None and rl:
        where = f"group {summary.group}, policy {summary.policy}"
        advantages = _credit(pipeline, summary, where)
        reason = _keep(pipeline, summary, advantages, where)
        if reason is None:
            chosen = _mask(pipeline, summary, where, masked.keys())
            masked.update({name: chosen.get(name) for name in rl if masked[name] is None})
            reason = _all_masked([masked[name] for name in rl])
    if reason is not None and any(ref.supervised and masked[ref.sample_id] is None for ref in references):
        # Keep and Credit judge rl samples only: the supervised ones beside them are trained all the same.
        masked.update({name: masked[name] or reason for name in rl})
        reason = None
    samples = tuple(SampleVerdict(sample_id=name, masked=why) for name, why in masked.items())
    return Verdict(
        summary=summary,
        advantages=advantages,
        reason=reason,
        samples=samples,
        newest=_newest([ref for ref in references if masked[ref.sample_id] is None]),
    )


def _data_mask(ref: SampleRef) -> str | None:
    if ref.outcome is Outcome.FAILED:
        return FAILED
    if ref.supervised:
        return None if ref.sample.sampled.any() else NO_TOKENS
    scored = [turn for turn in ref.turns if turn.reward is not None]
    if not scored:
        return UNSCORED
    return None if any(np.count_nonzero(ref.sample.sampled[t.start : t.stop]) for t in scored) else NO_TOKENS


def _all_masked(reasons: list[str | None]) -> str | None:
    """Why the group is dropped if no sample may be trained: the first reason that is not already a member's own."""
    found = [reason for reason in reasons if reason is not None]
    if len(found) < len(reasons):
        return None
    return next((reason for reason in found if reason not in (FAILED, UNSCORED)), UNSCORED)


def _newest(trainable: list[SampleRef]) -> int | None:
    versions = [ref.sample.min_version for ref in trainable]
    return None if None in versions else max((v for v in versions if v is not None), default=None)


def _too_little(summary: GroupSummary, references: list[SampleRef], min_group: int) -> str | None:
    """A member counts unless it failed, or the policy spoke in it and nothing of that was scored."""
    failed = {index for index, outcome in enumerate(summary.outcomes) if outcome is Outcome.FAILED}
    spoke = {int(index) for index in summary.units.episode} - failed
    scored = {int(index) for index in summary.units.episode[summary.units.counts]}
    trainable = bool(scored) or any(ref.supervised and ref.episode not in failed for ref in references)
    if summary.size - len(failed) - len(spoke - scored) < min_group:
        return TOO_FEW
    if not trainable:
        return NOT_PLAYED
    return None


def _credit(pipeline: Pipeline, summary: GroupSummary, where: str) -> Array:
    what = f"{type(pipeline.credit).__name__}.group on {where}"
    advantages = asked(what, lambda: pipeline.credit.group(summary.units))
    check_advantages(advantages, summary.units, what)
    return np.where(summary.units.counts, advantages, np.float32(0))


def _keep(pipeline: Pipeline, summary: GroupSummary, advantages: Array, where: str) -> str | None:
    for keep in pipeline.keep:
        what = f"{type(keep).__name__}.verdict on {where}"
        reason = asked(what, partial(keep.verdict, summary, advantages))
        if reason is not None:
            check_reason(reason, f"{what} must answer None or a reason")
            return reason
    return None


def _mask(pipeline: Pipeline, summary: GroupSummary, where: str, samples: Collection[str]) -> dict[str, str]:
    masked: dict[str, str] = {}
    for keep in pipeline.keep:
        if isinstance(keep, Mask):
            what = f"{type(keep).__name__}.mask on {where}"
            answer = asked(what, partial(keep.mask, summary))
            check_mask(answer, samples, what)
            masked = {**answer, **masked}
    return masked


def check_reason(reason: Any, what: str) -> None:
    """Raises RunFailed unless ``reason`` may stand in a metric's name. ``what``: all up to what a reason looks like."""
    if not isinstance(reason, str) or not REASON.fullmatch(reason):
        raise RunFailed(f"{what} ({REASON.pattern}, such as zero_variance), found {reason!r}")


def check_mask(answer: Any, samples: Collection[str], what: str) -> None:
    """Raises RunFailed unless ``answer`` gives reasons to ``samples`` of the group and to nothing else."""
    if not isinstance(answer, Mapping):
        raise RunFailed(f"{what} must answer a dict of sample_id to reason, found {type(answer).__name__}")
    for name, reason in answer.items():
        if name not in samples:
            raise RunFailed(f"{what} masks {name!r}, which is no sample of the group; take ids of units.sample_id")
        check_reason(reason, f"{what} must give sample {name!r} a reason")


def asked(what: str, question: Callable[[], Answer]) -> Answer:
    """An algorithm's answer. Raises RunFailed, with what was asked, whatever it raises."""
    try:
        return question()
    except Exception as error:  # user code may raise anything: it stops the run and is named, nothing is swallowed
        raise RunFailed(f"{what} raised {error!r}") from error


def check_advantages(advantages: Any, units: UnitTable, what: str) -> None:
    """Raises RunFailed unless ``advantages`` is finite float32 [U] where units count."""
    if not isinstance(advantages, np.ndarray) or advantages.dtype != np.float32 or advantages.shape != (len(units),):
        found = (
            (advantages.dtype, advantages.shape) if isinstance(advantages, np.ndarray) else type(advantages).__name__
        )
        raise RunFailed(f"{what} must answer float32 [{len(units)}], one advantage per unit, found {found}")
    if not np.isfinite(advantages[units.counts]).all():
        raise RunFailed(f"{what} answered an advantage that is not finite")


def _min_version(sample: Sample, turn: Turn) -> int:
    versions = [s.version for s in sample.spans if s.start < turn.stop and turn.start < s.stop]
    oldest = min(versions, default=None)
    if oldest is None:
        oldest = sample.min_version
    return 0 if oldest is None else oldest
