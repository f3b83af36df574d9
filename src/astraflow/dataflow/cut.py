"""Selected groups become the rows of one batch: staleness sweep, batch-wide credit, masks, denominators. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from astraflow.algorithms.base import UnitTable
from astraflow.algorithms.pipeline import Pipeline
from astraflow.dataflow.settle import NO_TOKENS, SampleRef, asked, check_advantages, samples_of, units_of
from astraflow.errors import RunFailed
from astraflow.types import AdvantageRun, Array, Episode, Row, Sample

STALE = "stale"


@dataclass(frozen=True, kw_only=True, slots=True)
class CutGroup:
    """A selected group with what was settled for it."""

    group: int
    episodes: Sequence[Episode | None]
    advantages: Array
    """float32 [U] of ``Verdict.advantages``; of a replayed group, the frozen ones of ``Cut.advantages``."""
    masked: Mapping[str, str] = field(default_factory=dict)
    """sample_id → reason, as settled."""
    use: int = 0
    """0 fresh, 1… replayed."""
    dataset: str = ""
    """Of its task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What a batch is made of; group order is the selection's, so that the same input gives the same bytes."""

    rows: tuple[Row, ...]
    tokens: int
    sequences: int
    masked: dict[str, str]
    """sample_id → reason, of every sample without a row."""
    stale_groups: tuple[int, ...]
    """Nothing of these may be trained any more: they are in no row; mark them stale and pick others."""
    advantages: dict[int, Array]
    """group → float32 [U] after ``Credit.batch``: what a replay of it uses."""


def is_stale(sample: Sample, *, version: int, max_staleness: int) -> bool:
    """GUARANTEE. Age at use of the oldest token; of a version not reached yet, 0; supervised samples have none."""
    oldest = sample.min_version
    return oldest is not None and max(0, version - oldest) > max_staleness


def build_rows(groups: Sequence[CutGroup], *, pipeline: Pipeline, policy: str, version: int, max_staleness: int) -> Cut:
    """Rows in the order of ``groups``, then episode index, agent, n. ``version`` is the one that the step starts from.

    Raises RunFailed when ``Credit.batch`` raises or answers with other shapes.
    """
    masked: dict[str, str] = {}
    fresh: list[CutGroup] = []
    stale: list[int] = []
    references = {each.group: list(samples_of(each.group, each.episodes, policy)) for each in groups}
    for group in groups:
        reasons = _sweep(group, references[group.group], version, max_staleness)
        masked.update(reasons)
        if _went_stale(references[group.group], reasons):
            stale.append(group.group)
        else:
            fresh.append(group)
    units = {each.group: units_of(references[each.group], dataset=each.dataset) for each in fresh}
    advantages = _credit_batch(pipeline, fresh, units, policy)
    rows: list[Row] = []
    for group in fresh:
        table, values = units[group.group], advantages[group.group]
        value_of = {(table.sample_id[u], int(table.turn[u])): float(values[u]) for u in np.flatnonzero(table.counts)}
        for ref in references[group.group]:
            if ref.sample_id in masked:
                continue
            row = _row(ref, value_of, group.use)
            if row is None:
                masked[ref.sample_id] = NO_TOKENS
            else:
                rows.append(row)
    return Cut(
        rows=tuple(rows),
        tokens=sum(int(np.count_nonzero(row.mask)) for row in rows),
        sequences=len(rows),
        masked=masked,
        stale_groups=tuple(stale),
        advantages=advantages,
    )


def _sweep(group: CutGroup, references: list[SampleRef], version: int, max_staleness: int) -> dict[str, str]:
    """GUARANTEE: nothing older than the bound gets a gradient. Admission and early cancel only save work."""
    reasons: dict[str, str] = {}
    for ref in references:
        settled = group.masked.get(ref.sample_id)
        if settled is not None:
            reasons[ref.sample_id] = settled
        elif is_stale(ref.sample, version=version, max_staleness=max_staleness):
            reasons[ref.sample_id] = STALE
    return reasons


def _went_stale(references: list[SampleRef], reasons: Mapping[str, str]) -> bool:
    alive = any(ref.sample_id not in reasons for ref in references)
    return not alive and STALE in reasons.values()


def _credit_batch(
    pipeline: Pipeline, groups: Sequence[CutGroup], units: Mapping[int, UnitTable], policy: str
) -> dict[int, Array]:
    """Replayed groups keep the advantages of their first use; supervised ones have no units."""
    advantages = {each.group: np.asarray(each.advantages, np.float32) for each in groups}
    credited = [each.group for each in groups if each.use == 0 and len(units[each.group])]
    if not credited:
        return advantages
    name = f"{type(pipeline.credit).__name__}.batch on policy {policy}"
    given = [advantages[number] for number in credited]
    answers = asked(
        f"{name}, groups {credited}", lambda: pipeline.credit.batch([units[number] for number in credited], given)
    )
    if len(answers) != len(credited):
        raise RunFailed(f"{name} must answer {len(credited)} arrays, found {len(answers)}")
    for group, answer in zip(credited, answers, strict=True):
        check_advantages(answer, units[group], f"{name}, group {group}")
        advantages[group] = answer
    return advantages


def _row(ref: SampleRef, value_of: Mapping[tuple[str, int], float], use: int) -> Row | None:
    sample = ref.sample
    runs: list[AdvantageRun] = []
    if ref.supervised:
        mask = sample.sampled.copy()
        runs = _runs(mask, 0, len(mask), 1.0)
    else:
        mask = np.zeros(len(sample.tokens), np.bool_)
        for turn in ref.turns:
            value = value_of.get((ref.sample_id, turn.index))
            if value is None:
                continue
            mask[turn.start : turn.stop] = sample.sampled[turn.start : turn.stop]
            runs += _runs(sample.sampled, turn.start, turn.stop, value)
    if not np.count_nonzero(mask):
        return None
    mask.flags.writeable = False  # as if it had been read: nobody changes a frozen row
    return Row(
        sample_id=ref.sample_id,
        use=use,
        tokens=sample.tokens,
        mask=mask,
        logprobs=sample.logprobs,
        spans=sample.spans,
        advantages=tuple(runs),
        kind=sample.kind,
    )


def _runs(sampled: Array, start: int, stop: int, value: float) -> list[AdvantageRun]:
    """The stretches of sampled tokens within ``[start, stop)``."""
    if np.count_nonzero(sampled[start:stop]) == stop - start > 0:  # a reply, as nearly all are
        return [AdvantageRun(start=start, stop=stop, value=value)]
    edges = np.diff(np.concatenate([[False], sampled[start:stop], [False]]).astype(np.int8))
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [
        AdvantageRun(start=start + int(a), stop=start + int(b), value=value) for a, b in zip(starts, stops, strict=True)
    ]
