"""An asyncio event loop in virtual time: an hour of waiting costs nothing and one seed gives one history.

``time()`` is a number that jumps to the next timer as soon as nothing else can run; work given to threads runs on the
loop itself after a virtual delay. What is ready at the same moment runs in an order drawn from the seed. When nothing
is ready and no timer is set, nothing can ever happen again: that is a ``Deadlock`` and it names who hangs where.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import random
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

LIVELOCK_ROUNDS = 100_000
"""Rounds of the loop without a step of time before it is called a livelock."""


class Deadlock(Exception):
    """Nothing is ready and no timer is set, or time no longer moves; the message names the pending tasks."""


class OutOfTime(Exception):
    """The simulation did not end within its virtual time; the message names the pending tasks."""


class _VirtualSelector:
    """Polls real sockets (asyncio's own wake-up pipe) and spends virtual time where a real selector would sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.limit_s = float("inf")
        self._real = selectors.DefaultSelector()
        self._still = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:  # callbacks are ready: a socket can wait until nothing else can run
            self._still += 1
            if self._still > LIVELOCK_ROUNDS:
                self._still = 0
                raise Deadlock(f"{LIVELOCK_ROUNDS} rounds without a step of time")
            return []
        events = self._real.select(0)
        if events:
            return events
        if timeout is None:
            raise Deadlock("nothing is ready and no timer is set")
        if self.now + timeout > self.limit_s:
            raise OutOfTime(f"not finished after {self.limit_s:g} virtual seconds")
        self.now += timeout
        self._still = 0
        return events

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.get_key(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class _NumberedTask(asyncio.Task[T]):
    """Hashes by its order of creation, so that a set of tasks is walked in the same order in every run."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. ``seed`` None keeps asyncio's own order (first in, first out)."""

    def __init__(
        self,
        seed: int | None = None,
        *,
        thread_s: tuple[float, float] = (0.0, 0.0),
        executor_s: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Shortest and longest virtual duration of a call that is given to a thread: ``thread_s``, of any; of an
        executor of somebody's own (a disk, for example): ``executor_s``."""
        self._virtual = _VirtualSelector()
        self._random = random.Random(seed) if seed is not None else None
        self._thread_s, self._executor_s = thread_s, executor_s
        self.unhandled: list[BaseException] = []
        super().__init__(self._virtual)  # type: ignore[arg-type]  # a BaseSelector by shape, not by inheritance
        self.set_exception_handler(self._keep)
        self._numbers = itertools.count(1)
        self.set_task_factory(self._number)

    def _number(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        return _NumberedTask(coroutine, number=next(self._numbers), loop=loop, **options)

    def time(self) -> float:
        return self._virtual.now

    @property
    def limit_s(self) -> float:
        """Virtual time at which the run is given up."""
        return self._virtual.limit_s

    @limit_s.setter
    def limit_s(self, value: float) -> None:
        self._virtual.limit_s = value

    def run_in_executor(  # type: ignore[override]
        self, executor: concurrent.futures.Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """No thread: the call happens on the loop, at once as far as others can see, after its virtual duration."""
        future: asyncio.Future[T] = self.create_future()
        low, high = self._thread_s if executor is None else self._executor_s
        delay = self._random.uniform(low, high) if self._random else low
        self.call_later(delay, self._call, future, func, args)
        return future

    def _call(self, future: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
        if future.done():  # cancelled before it began, as a process that died before its thread ran
            return
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - whatever the call raises belongs to whoever awaits it
            future.set_exception(error)
        else:
            future.set_result(result)

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]  # the only place where asyncio keeps its order
        if self._random is not None and len(ready) > 1:
            order = list(ready)
            self._random.shuffle(order)
            ready.clear()
            ready.extend(order)
        super()._run_once()  # type: ignore[misc]

    def _keep(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody awaited is the simulation's own failure, not a line in a log."""
        if "exception" not in context:  # a remark on what was collected: its moment is no part of a history
            return
        self.unhandled.append(context["exception"])


def run_virtual(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    seed: int | None = None,
    limit_s: float = 3600.0,
    thread_s: tuple[float, float] = (0.0, 0.0),
    executor_s: tuple[float, float] = (0.0, 0.0),
    ignore: tuple[type[BaseException], ...] = (),
) -> T:
    """Run ``main()`` to its end in virtual time. Raises Deadlock or, after ``limit_s`` virtual seconds, OutOfTime, both
    saying who still waits, and whatever a task raised that nobody awaited, but for what is to be ignored there."""
    loop = VirtualLoop(seed, thread_s=thread_s, executor_s=executor_s)
    loop.limit_s = limit_s
    try:
        asyncio.set_event_loop(loop)
        try:
            result = loop.run_until_complete(main())
        except (Deadlock, OutOfTime) as error:
            raise type(error)(f"{error}; pending: {describe_pending(loop)}") from None
        unhandled = [error for error in loop.unhandled if not isinstance(error, ignore)]
        if unhandled:
            raise unhandled[0]
        return result
    finally:
        loop.limit_s = float("inf")
        _cancel_all(loop)
        asyncio.set_event_loop(None)
        loop.close()


def describe_pending(loop: asyncio.AbstractEventLoop) -> str:
    """``name at file:line`` of every task that is not done: where each of them waits."""
    lines = []
    for task in asyncio.all_tasks(loop):
        where = _innermost(task.get_coro())
        lines.append(f"{task.get_name()} at {where}")
    return "; ".join(sorted(lines)) or "none"


def _innermost(coroutine: Any) -> str:
    """Follow ``await`` to the innermost frame that is ours."""
    where = "?"
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            break
        where = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return where


def _cancel_all(loop: VirtualLoop) -> None:
    """Let every task see its cancellation, so that no coroutine is left un-awaited."""
    for _ in range(100):
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            break
        for task in tasks:
            task.cancel()
        try:
            loop.run_until_complete(asyncio.wait(tasks, timeout=60.0))
        except Deadlock:
            continue
    loop.run_until_complete(loop.shutdown_asyncgens())
