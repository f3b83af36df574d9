"""Every task alike: once an epoch, or by independent draws. A position is one integer, so a resume is exact (F67)."""

from __future__ import annotations

from astraflow.algorithms.base import Admission, GroupSummary, State
from astraflow.algorithms.checks import check_at_least, check_episodes, check_part
from astraflow.algorithms.curate.pool import SUPERVISED, Pool, admission, require_same
from astraflow.errors import ConfigError
from astraflow.tasks.base import TaskSource
from astraflow.tasks.order import permutation

__all__ = ["SUPERVISED", "Shuffled", "Uniform"]


class Shuffled:
    """Every task once per epoch, in an order that depends on (seed, epoch) alone; an unbounded source in its own order.

    ``epochs`` None: for ever. Tasks of the workflow ``supervised`` get one episode.
    """

    def __init__(self, tasks: TaskSource, *, group_size: int, seed: int = 0, epochs: int | None = None) -> None:
        check_part("Shuffled.tasks", tasks, TaskSource)
        check_episodes("Shuffled.group_size", group_size)
        check_at_least("Shuffled.seed", seed, 0)
        check_at_least("Shuffled.epochs", epochs, 1, orelse=" or None (for ever)")
        if epochs is not None and tasks.size is None:
            raise ConfigError(f"Shuffled.epochs is {epochs}, but {tasks.name!r} is unbounded: it has no epochs")
        if tasks.size == 0:
            raise ConfigError(f"task source {tasks.name!r} has no tasks")
        self._tasks = tasks
        self._group_size = group_size
        self._seed = seed
        self._epochs = epochs
        self._position = 0
        self._order: tuple[int, list[int]] | None = None

    @property
    def groups(self) -> int | None:
        """All epochs; None: for ever."""
        return None if self._epochs is None or self._tasks.size is None else self._epochs * self._tasks.size

    @property
    def size(self) -> int | None:
        return self._tasks.size

    def next(self) -> Admission | None:
        index = self._index(self._position)
        if index is None:
            return None
        self._position += 1
        return admission(self._tasks.task(index), self._group_size)

    def observe(self, summary: GroupSummary) -> None:
        pass

    def state_dict(self) -> State:
        return {"position": self._position, "seed": self._seed, "tasks": self._tasks.digest()}

    def load_state_dict(self, state: State) -> None:
        """Raises ConfigError when the tasks or the seed are not those of the state."""
        require_same(self._tasks.name, {"tasks": self._tasks.digest(), "seed": self._seed}, state)
        self._position = int(state["position"])

    def _index(self, position: int) -> int | None:
        size = self._tasks.size
        if size is None:
            return position
        epoch, place = divmod(position, size)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(size, seed=(self._seed, epoch)).tolist())
        return self._order[1][place]


class Uniform:
    """Independent draws, every task alike each time, so that one may come twice before another has come at all."""

    def __init__(self, tasks: TaskSource, *, group_size: int, seed: int = 0) -> None:
        self._pool = Pool("Uniform", tasks, group_size=group_size, seed=seed)
        self._position = 0

    @property
    def groups(self) -> None:
        """For ever."""
        return None

    @property
    def size(self) -> int:
        return self._pool.size

    def next(self) -> Admission:
        place = int(self._pool.chance(self._position) * self._pool.size)
        self._position += 1
        return self._pool.admit(place)

    def observe(self, summary: GroupSummary) -> None:
        pass

    def state_dict(self) -> State:
        return self._pool.state(self._position, {})

    def load_state_dict(self, state: State) -> None:
        self._pool.learned(state)
        self._position = int(state["position"])
