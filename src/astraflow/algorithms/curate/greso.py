"""Tasks that gave no signal of late are submitted seldom: before their episodes are played, not after."""

from __future__ import annotations

from astraflow.algorithms.base import Admission, GroupSummary, State
from astraflow.algorithms.checks import check_share
from astraflow.algorithms.curate.pool import Pool, sparse, unsparse
from astraflow.algorithms.curate.rewards import Kind, Rewards, has_signal
from astraflow.errors import ConfigError
from astraflow.tasks.base import TaskSource


class Greso:
    """GRESO (Zheng et al. 2025, arXiv 2506.02177). A task whose last z rounds had no variance is submitted with
    probability max(p^z, floor); p and floor are those of its kind: easy (all rewards at the top), hard (the others).

    After each version p moves by ``step`` towards its target: down where the share of groups without variance of that
    kind was at least the target, else up; it stays in [floor, 1], beyond which it would change nothing.
    A deferred task comes back in the next epoch with another draw; meanwhile its turn is the next task's, so that
    ``next`` always gives one and a batch is never short. ``OverSampled`` opens as many groups as that batch will take.

    Groups all at one value between the ends (``Kind.OTHER``) are not solved: they have hard's chance and count in
    neither share. A group in which nothing counts says nothing.
    """

    def __init__(
        self,
        tasks: TaskSource,
        *,
        group_size: int,
        seed: int = 0,
        reward_range: tuple[float, float] | None = None,
        policy: str = "",
        p_easy: float = 0.5,
        p_hard: float = 0.5,
        floor_easy: float = 0.10,
        floor_hard: float = 0.40,
        target_easy: float = 0.083,
        target_hard: float = 0.167,
        step: float = 0.01,
    ) -> None:
        """``reward_range`` None: the lowest and highest reward seen so far. ``policy`` empty: the first observed."""
        shares = {
            "p_easy": p_easy, "p_hard": p_hard, "floor_easy": floor_easy, "floor_hard": floor_hard,
            "target_easy": target_easy, "target_hard": target_hard, "step": step,
        }  # fmt: skip
        for name, value in shares.items():
            check_share(f"Greso.{name}", value)
        for kind, p, floor in (("easy", p_easy, floor_easy), ("hard", p_hard, floor_hard)):
            if p < floor:
                raise ConfigError(f"Greso.p_{kind} must be at least floor_{kind} {floor}, found {p}")
        self._pool = Pool("Greso", tasks, group_size=group_size, seed=seed)
        self._rewards = Rewards("Greso", reward_range, policy)
        self._p = {Kind.EASY: p_easy, Kind.HARD: p_hard}
        self._first = dict(self._p)
        self._floor = {Kind.EASY: floor_easy, Kind.HARD: floor_hard}
        self._target = {Kind.EASY: target_easy, Kind.HARD: target_hard}
        self._step = step
        self._position = 0
        self._streak: dict[int, int] = {}
        """Place → z, where it is not 0."""
        self._kind: dict[int, int] = {}
        self._window = Window()

    @property
    def groups(self) -> None:
        """For ever."""
        return None

    @property
    def size(self) -> int:
        return self._pool.size

    @property
    def p_easy(self) -> float:
        return self._p[Kind.EASY]

    @property
    def p_hard(self) -> float:
        return self._p[Kind.HARD]

    @property
    def signal_share(self) -> float:
        """Of the groups of the last version that was closed; 1 before the first."""
        return self._window.signal_share

    def probability(self, place: int) -> float:
        """That the task at this place is submitted when its turn comes."""
        streak = self._streak.get(place, 0)
        kind = Kind.EASY if self._kind.get(place) == Kind.EASY else Kind.HARD
        return max(self._p[kind] ** streak, self._floor[kind])

    def next(self) -> Admission:
        last = self._position + 2 * self._pool.size
        while True:
            place = self._pool.walk(self._position)
            self._position += 1
            # With a floor of 0 nothing might ever be submitted: after two epochs of deferring the next one is.
            if self._position > last or self._pool.chance(self._position, 0) < self.probability(place):
                return self._pool.admit(place)

    def observe(self, summary: GroupSummary) -> None:
        place = self._pool.place(summary.task)
        rewards = None if place is None else self._rewards.look(summary)
        if place is None or rewards is None:
            return
        if self._window.closes(summary.version):
            for kind in self._p:
                self._move(kind, self._window.share(kind))
            self._window.begin(summary.version)
        if has_signal(summary):
            self._window.add(None)
            self._streak.pop(place, None)
            self._kind.pop(place, None)
            return
        kind = self._rewards.kind(rewards)
        self._window.add(kind)
        self._streak[place] = self._streak.get(place, 0) + 1
        self._kind[place] = int(kind)

    def _move(self, kind: Kind, share: float) -> None:
        moved = self._p[kind] + (-self._step if share >= self._target[kind] else self._step)
        # Rounded: a hundred moves up and a hundred down are where they began.
        self._p[kind] = min(1.0, max(self._floor[kind], round(moved, 9)))

    def state_dict(self) -> State:
        learned = {
            "rewards": self._rewards.state_dict(),
            "p": [self.p_easy, self.p_hard],
            "streak": sparse(self._streak, "int64"),
            "kind": sparse(self._kind, "int64"),
            "window": self._window.state_dict(),
        }
        return self._pool.state(self._position, learned)

    def load_state_dict(self, state: State) -> None:
        learned = self._pool.learned(state)
        self._position = int(state["position"])
        self._streak, self._kind, self._p, self._window = {}, {}, dict(self._first), Window()
        if learned:
            self._rewards.load_state_dict(learned["rewards"])
            self._p = {Kind.EASY: float(learned["p"][0]), Kind.HARD: float(learned["p"][1])}
            self._streak, self._kind = unsparse(learned["streak"]), unsparse(learned["kind"])
            self._window.load_state_dict(learned["window"])


class Window:
    """The groups that were settled while one version was current."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._groups = 0
        self._flat = dict.fromkeys(Kind, 0)
        self.signal_share = 1.0
        """Of the window before."""

    def closes(self, version: int) -> bool:
        """Another version, after a resume further back a lower one, and there is something to judge by."""
        if self._version is None:
            self._version = version
        return version != self._version and self._groups > 0

    def begin(self, version: int) -> None:
        self.signal_share = 1 - sum(self._flat.values()) / self._groups
        self._version, self._groups, self._flat = version, 0, dict.fromkeys(Kind, 0)

    def share(self, kind: Kind) -> float:
        return self._flat[kind] / self._groups

    def add(self, flat: Kind | None) -> None:
        """``flat`` None: it had a signal."""
        self._groups += 1
        if flat is not None:
            self._flat[flat] += 1

    def state_dict(self) -> State:
        flat = [self._flat[kind] for kind in Kind]
        return {"version": self._version, "groups": self._groups, "flat": flat, "signal_share": self.signal_share}

    def load_state_dict(self, state: State) -> None:
        self._version, self._groups = state["version"], int(state["groups"])
        self._flat = {kind: int(count) for kind, count in zip(Kind, state["flat"], strict=True)}
        self.signal_share = float(state["signal_share"])
