"""``sys.exit`` or a KeyboardInterrupt in a task that a workflow made: it ends its episode, not the process.

A task hands these two on to the event loop, which ends, and with it the worker and all its other episodes. Tasks that
are made while a workflow plays are therefore looked at while they run: the exit is kept for the player, which ends the
episode with it, and the task ends as a cancelled one does. The signal of a real Ctrl-C has a handler of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any

EXITS = (SystemExit, KeyboardInterrupt)
"""What a task hands on to the event loop."""
Left = asyncio.Future[BaseException]
LEFT: ContextVar[Left | None] = ContextVar("astraflow_left", default=None)
"""Of the episode that plays: done once a task of its workflow raises one of them. Tasks that it makes inherit it."""


def guard_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """From now on in this loop; again is fine."""
    before = loop.get_task_factory()
    if not isinstance(before, _GuardedTasks):
        loop.set_task_factory(_GuardedTasks(before or _plain))


def _plain(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
    return asyncio.Task(coroutine, loop=loop, **options)


class _GuardedTasks:
    """A task factory in front of the loop's own."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        left = LEFT.get()
        coroutine = coroutine if left is None else _Guarded(coroutine, left)
        return self._make(loop, coroutine, **options)


class _Guarded(Coroutine[Any, Any, Any]):
    """The coroutine but for ``EXITS``. No ``async def`` around it: one that never begins would not be awaited."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], left: Left) -> None:
        self._coroutine, self._left = coroutine, left

    def send(self, value: Any) -> Any:
        try:
            return self._coroutine.send(value)
        except EXITS as error:
            raise self._leave(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._coroutine.throw(*error)
        except EXITS as left:
            raise self._leave(left) from left

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # its frame and name, for those who print tasks

    def _leave(self, error: BaseException) -> asyncio.CancelledError:
        if not self._left.done():
            self._left.set_result(error)
        return asyncio.CancelledError("a task of the workflow ended the process")
