"""Group commit: transitions that arrive together share one transaction, each in a savepoint of its own.

Nobody is answered before what it changed is on disk. A refused transition changes nothing and harms no other one.

    call ─► queue ─► BEGIN, transitions ─► COMMIT (fsync) ─► answers, readers, ``after`` ─► the queue again
                                           `in a thread of its own, so that calls are read and decoded meanwhile:
                                            only one transaction is ever under way, and nothing is read in between
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from astraflow.clock import Clock
from astraflow.dataflow.ledger import Ledger
from astraflow.errors import AstraFlowError, Closed, Fenced, RunFailed, StorageFull, TimedOut, Unavailable
from astraflow.observe.points import reach
from astraflow.observe.waits import Wait

log = logging.getLogger("astraflow.dataflow")

LAST_WRITE_S = 30.0
"""How long the end of the service waits for a disk that is writing."""

T = TypeVar("T")
Transition = Callable[[float], T]

COUNTED = (Fenced, Closed)
"""Refusals that are no mistake of the caller: how many there were tells how often work was lost."""


@dataclass(slots=True)
class Work:
    transition: Transition[Any]
    future: asyncio.Future[Any] | None
    """None: nobody waits."""


Answer = tuple[Work, Any, "Exception | None"]


class Commits:
    """The only writer. ``last`` may add to every transaction what follows from it, in a savepoint of its own;
    ``after`` is called once what was written is on disk, ``undone`` when nothing of it was.

    ``in_thread``: the loop goes on while the disk is awaited; without, nothing happens meanwhile (virtual time).
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        *,
        last: Callable[[], Transition[None] | None],
        after: Callable[[], None],
        undone: Callable[[], None],
        in_thread: bool = False,
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._last = last
        self._after = after
        self._undone = undone
        self._queue: list[Work] = []
        self._scheduled = False
        self._closed = False
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="commit") if in_thread else None
        self._under_way: asyncio.Future[None] | None = None
        """Done when the transaction that is being written is on disk, or is undone, and everybody was answered."""
        self._readers: list[Callable[[], None]] = []
        self._base = ledger.open()
        self._started = clock.monotonic()
        self.full_at: float | None = None
        """Since when every transaction has found the disk full."""

    @property
    def now(self) -> float:
        """Seconds of the run: they go on where the last process stopped, and never back."""
        return self._base + (self._clock.monotonic() - self._started)

    async def write(self, transition: Transition[T]) -> T:
        """What the transition returns, once it is on disk; raises what it raises."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._put(Work(transition, future))
        return await future

    def post(self, transition: Transition[None]) -> None:
        """The same with nobody waiting: it joins the next transaction."""
        self._put(Work(transition, None))

    async def read(self, question: Callable[[], T]) -> T:
        """Its answer, of what is on disk: at once, or as soon as the transaction under way is."""
        if self._under_way is None:
            return question()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def ask() -> None:
            if future.done():
                return
            try:
                future.set_result(question())
            except Exception as error:  # noqa: BLE001 - whatever the question raised, it is its caller's
                future.set_exception(error)

        self._readers.append(ask)
        return await future

    async def drained(self) -> None:
        """What is being written is on disk and answered, and the thread that writes has ended. Raises TimedOut."""
        if self._under_way is not None:
            await asyncio.wait([self._under_way], timeout=LAST_WRITE_S)
        if self._under_way is not None:
            raise TimedOut(f"{Wait.STORAGE}: the disk did not take the last transaction within {LAST_WRITE_S:g} s")
        if self._disk is not None:
            self._disk.shutdown()

    def close(self) -> None:
        """What waits is refused; a second call does nothing."""
        self._closed = True
        for work in self._queue:
            if work.future is not None and not work.future.done():
                work.future.set_exception(Unavailable("dataflow is closing"))
        self._queue.clear()

    def _put(self, work: Work) -> None:
        if self._closed:
            raise Unavailable("dataflow is closed")
        self._queue.append(work)
        self._schedule()

    def _schedule(self) -> None:
        if self._queue and not self._scheduled and self._under_way is None:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._under_way is not None:  # scheduled by a transition of that very transaction: it comes after it
            return
        queue = [work for work in self._queue if work.future is None or not work.future.done()]
        self._queue = []
        if not queue or self._closed:
            return
        store = self._ledger.store
        answers: list[Answer] = []
        try:
            with store.undone_if_raises():
                store.run("BEGIN IMMEDIATE")
                now = self.now
                answers.extend((work, *self._attempt(work, now)) for work in queue)
                if (last := self._last()) is not None:
                    self._attempt(Work(last, None), now)
                store.set("now", now)
                store.write_logs()
                reach("dataflow.in_transaction")
                if self._disk is None:
                    store.run("COMMIT")
        # Whatever it was, a dying process included, those who wait must hear of it and not hang.
        except BaseException as error:  # noqa: BLE001
            self._rolled_back(queue, error)
            return
        if self._disk is None:
            self._written(answers)
        else:
            self._write_in_thread(self._disk, answers)

    def _write_in_thread(self, disk: ThreadPoolExecutor, answers: list[Answer]) -> None:
        loop = asyncio.get_running_loop()
        under_way = self._under_way = loop.create_future()
        writing = loop.run_in_executor(disk, self._ledger.store.run, "COMMIT")

        def written(_: asyncio.Future[Any]) -> None:
            self._under_way = None
            try:
                with self._ledger.store.undone_if_raises():
                    writing.result()
            except BaseException as error:  # noqa: BLE001 - as above: those who wait must hear of it
                self._rolled_back([work for work, _, _ in answers], error)
            else:
                self._written(answers)
            readers, self._readers = self._readers, []
            for ask in readers:
                ask()
            under_way.set_result(None)
            self._schedule()

        writing.add_done_callback(written)

    def _written(self, answers: list[Answer]) -> None:
        if self.full_at is not None:
            log.info("storage_has_room: the run goes on")
        self.full_at = None
        reach("dataflow.after_transaction")
        for work, answer, refusal in answers:
            if work.future is None or work.future.done():
                continue
            if refusal is None:
                work.future.set_result(answer)
            else:
                work.future.set_exception(refusal)
        self._after()

    def _attempt(self, work: Work, now: float) -> tuple[Any, Exception | None]:
        ledger = self._ledger
        changes = ledger.policies.changes
        try:
            with ledger.store.savepoint():
                return work.transition(now), None
        except StorageFull:
            raise
        except AstraFlowError as refusal:
            if isinstance(refusal, RunFailed):
                ledger.forget()
                ledger.stop(now, refusal.kind, str(refusal))
            elif ledger.policies.changes != changes:
                ledger.policies.reload()
            if isinstance(refusal, COUNTED):
                ledger.store.count(refusal.kind.lower())
            return None, refusal
        except (sqlite3.Error, OSError):  # of the file, not of this one: nothing of the transaction can stand
            raise
        # A bug that one call meets is that caller's ServerError: the others of its transaction know nothing of it.
        except Exception as bug:
            log.error("transition_failed", exc_info=bug)
            ledger.forget()
            if work.future is None:  # nobody would hear of it, and it would come again for ever
                ledger.stop(now, RunFailed.__name__, f"inside dataflow: {type(bug).__name__}: {bug}")
            return None, bug

    def _rolled_back(self, queue: list[Work], error: BaseException) -> None:
        if isinstance(error, StorageFull):
            if self.full_at is None:  # once, and not with every call that is refused
                log.error("storage_full: %s", error)
                self.full_at = self.now
        elif isinstance(error, Exception):
            log.error("transaction_failed error=%r", error)
        for work in queue:
            if work.future is not None and not work.future.done():
                work.future.set_exception(error)
        if isinstance(error, Exception):
            self._ledger.forget()
            self._undone()
