"""A process that can be killed at any await and that somebody starts again, as the launcher does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from astraflow.errors import AstraFlowError
from astraflow.testing.simulator.history import History


class Killed(BaseException):
    """Raised out of everything that a dead process still tries to do; no ``except Exception`` can hold it back."""


@dataclass(kw_only=True)
class Life:
    """One start of a process: what dies with it asks here whether it still may."""

    number: int
    dead: bool = False
    comes_back: bool = False
    """It was told to stop and will be started again: that it returns does not mean that its work is done."""
    stop: Callable[[], object] | None = None
    """What its handler of SIGTERM does; None: it has none yet."""

    def check(self) -> None:
        if self.dead:
            raise Killed


class Process:
    """``start(life)`` runs one life; it ends by returning (the work is done), by a crash, or by an error of its own."""

    def __init__(
        self,
        name: str,
        start: Callable[[Life], Awaitable[None]],
        *,
        history: History,
        restart_s: Callable[[], float],
        on_death: Callable[[Life], None] | None = None,
    ) -> None:
        self.name = name
        self.finished = False
        self.stays_down = False
        """Set before a crash: a machine that is gone for good."""
        self._start = start
        self._history = history
        self._restart_s = restart_s
        self._on_death = on_death
        self._life = Life(number=0)
        self._task: asyncio.Future[None] | None = None
        self._down_s: float | None = None

    async def run(self) -> None:
        """Lives one after the other until one of them returns."""
        while True:
            self._life = Life(number=self._life.number + 1)
            if await self._live(self._life):
                self.finished = True
                return
            if self.stays_down:
                return
            await asyncio.sleep(self._down_s if self._down_s is not None else self._restart_s())
            self._down_s = None

    async def _live(self, life: Life) -> bool:
        """Whether it returned by itself. Cancelling this ends the life and goes on, whatever else happens to it."""
        self._task = asyncio.ensure_future(self._start(life))
        self._task_name()
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._read(life)
            raise
        return self._read(life)

    def _read(self, life: Life) -> bool:
        killed, life.dead = life.dead, True
        assert self._task is not None
        if self._task.cancelled():
            return False
        error = self._task.exception()
        if error is None:
            return not killed and not life.comes_back
        if isinstance(error, Killed):
            return False
        if not isinstance(error, AstraFlowError | MemoryError):  # a process may die of these; anything else is a bug
            raise error
        if not killed:
            kind = type(error).__name__
            self._history.note(f"{self.name} died of {kind}: {error}")
            self._history.faults[f"died/{self.name.rstrip('0123456789')}/{kind}"] += 1
        return False

    def _task_name(self) -> None:
        if isinstance(self._task, asyncio.Task):
            self._task.set_name(f"{self.name}#{self._life.number}")

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done() and not self._life.dead

    def crash(self, down_s: float | None = None) -> bool:
        """Kill it where it stands; False if it is not running. ``down_s``: how long until it is started again."""
        if not self.alive or self._task is None:
            return False
        self._life.dead = True
        self._down_s = down_s
        if self._on_death is not None:
            self._on_death(self._life)
        self._task.cancel()
        return True

    def tell(self, down_s: float) -> bool:
        """Tell it to stop, as SIGTERM does; once it has ended it is started again after ``down_s``. False if it is not
        there to hear it."""
        if not self.alive or self._life.stop is None:
            return False
        self._life.comes_back = True
        self._down_s = down_s
        self._life.stop()
        return True
