"""Notices, from a thread of its own, that the event loop stands still, and says where. Knows no episode, no network.

    loop    ── a beat every tick ──►  guard
    guard   ── so many ticks without a beat ──►  ``told(Standstill)``, in the guard's thread, every tick while it lasts

Ticks are counted, not read from a clock: a process that was stopped or starved as a whole has not blocked its loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType

log = logging.getLogger("astraflow.rollout")

PLAYING: ContextVar[str | None] = ContextVar("astraflow_playing", default=None)
"""Id of the lease whose workflow runs: tasks that it makes inherit it."""
TICK_S = 0.5
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True, kw_only=True, slots=True)
class Standstill:
    """The loop has not come round for ``seconds``."""

    seconds: float
    place: str
    """``file:line in function`` of the innermost frame that is no library's."""
    lease: str | None
    """Of the workflow that blocks; None if it is something else."""


class LoopGuard:
    """``with guard.watching(): …`` in the loop that is to be watched."""

    def __init__(self, told: Callable[[Standstill], None], *, blocked_after_s: float, tick_s: float = TICK_S) -> None:
        self._told = told
        self._after_s = blocked_after_s
        self._tick_s = tick_s
        self._missed = 0
        self._ended = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Call it in the thread of the running loop."""
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._watch, args=(threading.get_ident(),), name="loop-guard", daemon=True)
        self._beat(loop)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()

    @property
    def blocked(self) -> bool:
        """Still, at this moment."""
        return self._missed * self._tick_s >= self._after_s

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._missed = 0
        if not self._ended.is_set():
            loop.call_later(self._tick_s, self._beat, loop)

    def _watch(self, thread: int) -> None:
        while not self._ended.wait(self._tick_s):
            self._missed += 1
            frame = sys._current_frames().get(thread) if self.blocked else None
            if frame is None:
                continue
            still = Standstill(seconds=self._missed * self._tick_s, place=place_of(frame), lease=lease_of(frame))
            try:
                self._told(still)
            except Exception as error:  # noqa: BLE001 - dataflow may be out of reach: the guard tries again, it must live
                log.warning("standstill_not_told error=%r", error)


def is_library(file: str) -> bool:
    """Whether nobody who writes a workflow wrote it: it is installed, or was made by the interpreter."""
    return file.startswith((*_LIBRARIES, "<"))


def place_of(frame: FrameType) -> str:
    """Where people should look: below it there are only libraries."""
    found = frame
    while found.f_back is not None and is_library(found.f_code.co_filename):
        found = found.f_back
    code = found.f_code
    return f"{code.co_filename.rsplit('/', 1)[-1]}:{found.f_lineno} in {code.co_name}"


def lease_of(frame: FrameType) -> str | None:
    """The lease in whose context the loop's current callback runs, also in tasks that the workflow made."""
    at: FrameType | None = frame
    while at is not None:
        handle = at.f_locals.get("self") if at.f_code.co_name == "_run" else None
        if isinstance(handle, asyncio.Handle):
            context = getattr(handle, "_context", None)
            return context.get(PLAYING) if context is not None else None
        at = at.f_back
    return None
