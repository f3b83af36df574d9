"""Graders with a deadline. Works in any thread and event loop (F9): no signals, and hanging is never a zero (F13)."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, cast

from astraflow.errors import GraderFailed
from astraflow.observe.waits import WAITING, Wait

T = TypeVar("T")


class TimeLimit:
    """Runs graders for at most ``limit_s`` each, and at most ``most_running`` at once.

    A thread cannot be killed: a grader that hangs keeps its place for ever, and once all places are taken every
    further call fails by name instead of piling up. What may hang for ever belongs in a sandbox.
    """

    def __init__(self, limit_s: float, *, most_running: int = 64) -> None:
        self.limit_s = limit_s
        self._threads = _DaemonThreads(most_running)

    async def run(self, grade: Callable[..., T] | Callable[..., Awaitable[T]], *args: Any) -> T:
        """``grade(*args)`` in a thread, or awaited if it is a coroutine function.

        Raises GraderFailed when it raises or takes longer: the caller cannot mistake that for a wrong answer.
        """
        name = getattr(grade, "__qualname__", type(grade).__name__)
        try:
            with WAITING.get()(Wait.GRADER):
                async with asyncio.timeout(self.limit_s):
                    if _is_async(grade):
                        return await cast("Awaitable[T]", grade(*args))
                    loop = asyncio.get_running_loop()
                    blocking = cast("Callable[..., T]", grade)
                    return await loop.run_in_executor(cast("Executor", self._threads), blocking, *args)
        except TimeoutError as error:
            raise GraderFailed(f"grader {name} took longer than {self.limit_s:g} s") from error
        except (GraderFailed, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # the user's grader may raise anything: it is the grader's failure, told as such
            raise GraderFailed(f"grader {name} raised {type(error).__name__}: {error}") from error


class _DaemonThreads:
    """An Executor by shape: one daemon thread a call, so that a grader that hangs does not keep the process alive."""

    def __init__(self, most_running: int) -> None:
        self._most = most_running
        self._places = threading.BoundedSemaphore(most_running)

    def submit(self, call: Callable[..., T], /, *args: Any) -> Future[T]:
        future: Future[T] = Future()
        if not self._places.acquire(blocking=False):
            future.set_exception(GraderFailed(f"{self._most} graders are still running: do they hang?"))
            return future
        threading.Thread(target=self._run, args=(future, call, args), name="grader", daemon=True).start()
        return future

    def _run(self, future: Future[T], call: Callable[..., T], args: tuple[Any, ...]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(call(*args))
        except BaseException as error:  # noqa: BLE001 - whatever a grader raises goes to whoever awaits it
            future.set_exception(error)
        finally:
            self._places.release()


def _is_async(grade: Callable[..., Any]) -> bool:
    method = type(grade).__dict__.get("__call__")
    return inspect.iscoroutinefunction(grade) or inspect.iscoroutinefunction(method)
