"""Conformance kit of data algorithms: ``check_algorithm(lambda: MyCredit(...))`` in a test of yours.

Holds for every one: it leaves its arguments alone, equal objects give equal answers, its state is msgpack types and
arrays, and an object that loads the state of another goes on exactly as that one would have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from astraflow.algorithms.base import (
    REASON,
    Admission,
    Credit,
    Curate,
    GroupSummary,
    Keep,
    Mask,
    Pace,
    PolicyRoom,
    ReadyGroup,
    Replay,
    Select,
    StoredGroup,
    UnitTable,
)
from astraflow.tasks.base import TaskSource
from astraflow.tasks.digest import task_digest
from astraflow.types import Outcome, Task

ROUNDS = 12

Probe = Callable[[Any, int], Any]
"""Asks an algorithm its question about the input of round i; asserts what one answer alone can break."""


def check_algorithm(make: Callable[[], Any], *, seed: int = 0, tasks: TaskSource | None = None) -> None:
    """Raises AssertionError saying what is broken. ``make`` gives a new object in its first state at every call.

    ``tasks``: of a sized source; a Curate must then answer tasks of it, and leave them as they are.
    """
    found = [(protocol, probe) for protocol, probe in _PROBES if isinstance(make(), protocol)]
    if tasks is not None:
        _check_tasks_exist(make(), tasks, range(seed, seed + ROUNDS))
    name = type(make()).__name__
    assert found, f"{name} answers none of the five questions: Curate, Pace, Credit, Keep, Select"
    for protocol, probe in found:
        what = f"{name} as {protocol.__name__}"
        whole = _play(make(), probe, range(seed, seed + ROUNDS))
        assert _equal(whole, _play(make(), probe, range(seed, seed + ROUNDS))), f"{what}: two equal objects differ"
        _check_resume(make, probe, seed, whole, what)


def unit_table(seed: int, *, size: int = 8) -> UnitTable:
    """A random group: two roles, one to three turns each, members that failed, were truncated or not scored."""
    random = np.random.default_rng(seed)
    outcomes = random.choice(np.array(list(Outcome), dtype=object), size, p=[0.7, 0.2, 0.1])
    rows = [
        (episode, role, turn)
        for episode in range(size)
        for role in ("solver", "verifier")
        for turn in range(int(random.integers(0 if role == "verifier" else 1, 4)))
    ]
    rewards = random.choice([0.0, 0.1, 1.0, np.nan], len(rows), p=[0.4, 0.1, 0.4, 0.1])
    outcome = tuple(Outcome(outcomes[episode]) for episode, _, _ in rows)
    alive = np.array([each is not Outcome.FAILED for each in outcome], np.bool_)
    return UnitTable(
        episode=np.array([episode for episode, _, _ in rows], np.int64),
        role=tuple(role for _, role, _ in rows),
        turn=np.arange(len(rows), dtype=np.int64),
        sample_id=tuple(f"{seed}/{episode}/{role}/0" for episode, role, _ in rows),
        reward=rewards,
        counts=alive & ~np.isnan(rewards),
        tokens=random.integers(1, 50, len(rows)),
        min_version=random.integers(0, 5, len(rows)),
        outcome=outcome,
        baseline_key=tuple(role for _, role, _ in rows),
    )


def group_summary(seed: int, *, task: Task | None = None, version: int = 0) -> GroupSummary:
    units = unit_table(seed)
    by_episode = dict(zip(units.episode.tolist(), units.outcome, strict=True))
    return GroupSummary(
        group=seed,
        policy="policy",
        task=task or Task(key=f"task {seed}"),
        size=8,
        outcomes=tuple(by_episode[episode] for episode in sorted(by_episode)),
        units=units,
        min_version=int(units.min_version.min()),
        arrival=seed,
        version=version,
    )


def flat(summary: GroupSummary, reward: float) -> GroupSummary:
    """The same group, had every unit that counts got this reward: no variance."""
    units = summary.units
    return replace(summary, units=replace(units, reward=np.where(units.counts, reward, units.reward)))


def _check_resume(make: Callable[[], Any], probe: Probe, seed: int, whole: list[Any], what: str) -> None:
    if not callable(getattr(make(), "state_dict", None)):
        return
    for stop in range(1, ROUNDS):
        first = make()
        _play(first, probe, range(seed, seed + stop))
        state = copy.deepcopy(first.state_dict())
        _check_plain(state, f"{what}: state_dict")
        second = make()
        second.load_state_dict(state)
        assert _equal(second.state_dict(), state), f"{what}: load_state_dict then state_dict gives another state"
        rest = _play(second, probe, range(seed + stop, seed + ROUNDS))
        assert _equal(rest, whole[stop:]), f"{what}: after a resume at round {stop} the choices differ"


def _play(algorithm: Any, probe: Probe, rounds: range) -> list[Any]:
    return [probe(algorithm, index) for index in rounds]


def _curate(curate: Curate, index: int) -> Any:
    """Some rounds have no variance at all, and groups of other Curates come by: both may ``observe`` them."""
    admission = curate.next()
    if admission is None:
        return None
    assert isinstance(admission, Admission), f"next() must give an Admission or None, found {admission!r}"
    assert isinstance(admission.task, Task), f"next() must admit a Task, found {admission.task!r}"
    assert admission.task.key, "next() admitted a task without a key: there is no such task"
    assert admission.episodes >= 1, f"next() must ask for at least 1 episode, found {admission.episodes}"
    summary = group_summary(index, task=admission.task, version=index // 3)
    before = copy.deepcopy(_columns([summary.units]))
    curate.observe(flat(summary, float(index % 2)) if index % 3 else summary)
    curate.observe(group_summary(index, task=Task(key="of another Curate", dataset="elsewhere"), version=index // 3))
    assert _equal(before, _columns([summary.units])), "observe() changed the summary"
    return (admission.task.dataset, admission.task.key, admission.episodes)


def _check_tasks_exist(curate: Any, tasks: TaskSource, rounds: range) -> None:
    assert tasks.size is not None, f"tasks must be of a known size, {tasks.name!r} is unbounded"
    known = {(task.dataset, task.key): task_digest(task) for task in map(tasks.task, range(tasks.size))}
    for index in rounds:
        admission = curate.next()
        if admission is None:
            return
        name = (admission.task.dataset, admission.task.key)
        assert name in known, (
            f"next() admitted task {name[1]!r} of {name[0]!r}: there is no such task in {tasks.name!r}"
        )
        assert task_digest(admission.task) == known[name], f"next() changed task {name[1]!r} of {name[0]!r}"
        curate.observe(group_summary(index, task=admission.task))


def _pace(pace: Pace, index: int) -> Any:
    random = np.random.default_rng(index)
    start = {name: _room(0, 0, 0) for name in ("solver", "verifier")}
    assert pace.may_admit(start) is True, "may_admit() must let the first group of a run in, or nothing ever starts"
    rooms = {name: _room(*map(int, random.integers(0, 6, 3))) for name in start}
    answer = pace.may_admit(dict(rooms))
    assert isinstance(answer, bool), f"may_admit() must give a bool, found {answer!r}"
    return answer


def _room(open_groups: int, kept: int, batched: int) -> PolicyRoom:
    return PolicyRoom(
        version=3,
        max_staleness=1,
        groups_per_batch=4,
        open_groups=open_groups,
        kept_groups=kept,
        batched_groups=batched,
        steps_left=10,
    )


def _credit(credit: Credit, index: int) -> Any:
    tables = [unit_table(index * 10 + n) for n in range(3)]
    before = copy.deepcopy(tables)
    advantages = [credit.group(units) for units in tables]
    batch = credit.batch(tables, [each.copy() for each in advantages])
    assert len(batch) == len(tables), f"batch() must give one array per group, found {len(batch)} for {len(tables)}"
    for units, answers in zip(tables, zip(advantages, batch, strict=True), strict=True):
        for answer in answers:
            shape = f"{answer.dtype} {list(answer.shape)}"
            assert answer.dtype == np.float32 and answer.shape == (len(units),), f"must be float32 [U], found {shape}"
            assert np.isfinite(answer).all(), "an advantage is not finite"
            assert not answer[~units.counts].any(), "a unit that does not count got an advantage"
    assert _equal(_columns(before), _columns(tables)), "the unit table was changed"
    return [advantages, batch]


def _keep(keep: Keep, index: int) -> Any:
    summary = group_summary(index)
    advantages = np.where(summary.units.counts, summary.units.reward, 0).astype(np.float32)
    before = copy.deepcopy((_columns([summary.units]), advantages))
    reason = keep.verdict(summary, advantages)
    masked = keep.mask(summary) if isinstance(keep, Mask) else {}
    for word in (*([] if reason is None else [reason]), *masked.values()):
        assert isinstance(word, str) and REASON.fullmatch(word), (
            f"a reason is a metric's name like zero_variance, found {word!r}"
        )
    unknown = masked.keys() - set(summary.units.sample_id)
    assert not unknown, f"mask() names samples that are not of the group: {sorted(unknown)}"
    assert _equal(before, (_columns([summary.units]), advantages)), "the summary or the advantages were changed"
    return [reason, masked]


def _select(select: Select, index: int) -> Any:
    random = np.random.default_rng(index)
    ready = [ReadyGroup(group=g, min_version=int(random.integers(0, 4)), arrival=a) for a, g in enumerate(range(3, 13))]
    answers = []
    for need in (1, 4, 10, 11):
        for oldest_open in (None, 5):
            picked = select.pick(list(ready), need=need, oldest_open=oldest_open)
            assert len(picked) in (0, need), f"pick() must give exactly need={need} groups or none, found {picked}"
            assert len(set(picked)) == len(picked), f"pick() gave a group twice: {picked}"
            assert set(picked) <= {group.group for group in ready}, f"pick() gave a group that is not ready: {picked}"
            answers.append(picked)
    return answers


def _replay(select: Replay, index: int) -> Any:
    random = np.random.default_rng(index)
    ready = [ReadyGroup(group=g, min_version=int(random.integers(0, 4)), arrival=a) for a, g in enumerate(range(3, 13))]
    stored = [
        StoredGroup(group=g, age=int(random.integers(0, 4)), arrival=a, uses=1, advantage=float(random.random()))
        for a, g in enumerate(range(20, 26))
    ]
    answers = []
    for need in (1, 4, 10, 40):
        for again in ([], stored[:1], stored):
            share = select.share(list(again), policy="p", need=need)
            assert 0 <= share < need, f"share() must leave a fresh group: of need={need} it gave {share}"
            fresh, replayed = select.pick_with(list(ready), list(again), policy="p", need=need, oldest_open=None)
            both = [*fresh, *replayed]
            assert len(both) in (0, need), f"pick_with() must give exactly need={need} groups or none, found {both}"
            assert len(set(both)) == len(both), f"pick_with() gave a group twice: {both}"
            assert set(fresh) <= {group.group for group in ready}, (
                f"pick_with() gave a group that is not ready: {fresh}"
            )
            known = {group.group for group in again}
            assert set(replayed) <= known, f"pick_with() gave a group that is not stored: {replayed}"
            assert not both or len(replayed) == share, f"share() gave {share}, pick_with() replayed {len(replayed)}"
            answers.append((fresh, replayed))
    return answers


_PROBES: tuple[tuple[Any, Probe], ...] = (
    (Curate, _curate),
    (Pace, _pace),
    (Credit, _credit),
    (Keep, _keep),
    (Select, _select),
    (Replay, _replay),
)


def _columns(tables: list[UnitTable]) -> list[Any]:
    return [[getattr(units, name) for name in units.__dataclass_fields__] for units in tables]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        left, right = np.asarray(left), np.asarray(right)
        return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return bool(left == right)


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            assert isinstance(key, str), f"{where} has the key {key!r}; keys must be strings"
            _check_plain(each, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _check_plain(each, f"{where}[{index}]")
    else:
        plain = value is None or type(value) in (bool, int, float, str, bytes, np.ndarray)
        assert plain, f"{where} is {type(value).__name__}; only msgpack types and arrays can be written"
        assert type(value) is not int or -(2**63) <= value < 2**64, f"{where} is an integer beyond 64 bits"
