"""Several submits in one request, each judged alone: how ``HttpDataflow`` sends those of one turn of the loop.

It is an envelope and no call of the protocol: inside are whole SubmitRequests, and each is answered as if it had come
by itself. A broken or refused one harms no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from astraflow.errors import AstraFlowError, BadRequest, NotFound, ProtocolError, ServerError, Unavailable, by_kind
from astraflow.wire import messages as m
from astraflow.wire.codec import decode, encode, sentence
from astraflow.wire.names import require_names, require_numbers

log = logging.getLogger("astraflow.wire")

MOST_BYTES = 512 << 10
"""Of the episodes in one request; one that is larger goes alone."""
MOST_REQUESTS = 4096
"""As many as there can be leases for one call."""

One = Callable[[bytes], Awaitable[m.SubmitReply]]
Many = Callable[[m.SubmitManyRequest], Awaitable[m.SubmitManyReply]]
Waiting = tuple[bytes, "asyncio.Future[m.SubmitReply]"]


# ── server ──


async def answer(
    request: m.SubmitManyRequest, submit: Callable[[m.SubmitRequest], Awaitable[m.SubmitReply]]
) -> m.SubmitManyReply:
    """Every answer in the order of the requests; they share a transaction, each in a savepoint of its own.

    Raises BadRequest for more than MOST_REQUESTS.
    """
    if len(request.requests) > MOST_REQUESTS:
        raise BadRequest(f"at most {MOST_REQUESTS} submits go together, found {len(request.requests)}: send them apart")

    async def one(body: bytes) -> m.SubmitAnswer:
        try:
            message = decode(body, m.SubmitRequest)
            require_names(message)
            require_numbers(message)
            return m.SubmitAnswer(reply=await submit(message))
        except AstraFlowError as error:
            return _refusal(error)
        except Exception as error:  # noqa: BLE001 - one episode's bug must not lose the others; ServerError for its caller
            return _bug(error)

    return m.SubmitManyReply(answers=tuple(await asyncio.gather(*(one(body) for body in request.requests))))


def _bug(error: Exception) -> m.SubmitAnswer:
    log.error("submit_failed", exc_info=error)
    return _refusal(ServerError("submit failed inside the service; its log has the cause"))


def _refusal(error: AstraFlowError) -> m.SubmitAnswer:
    return m.SubmitAnswer(kind=error.kind, message=sentence(error) or error.kind)


# ── client ──


class Submits:
    """What is submitted in one turn of the loop goes out together; whoever is alone goes by the plain call."""

    def __init__(self, one: One, many: Many) -> None:
        self._one = one
        self._many = many
        self._waiting: list[Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, request: m.SubmitRequest) -> m.SubmitReply:
        body = encode(request)
        if len(body) > MOST_BYTES:
            return await self._one(body)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[m.SubmitReply] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append((body, future))
        return await future

    async def close(self) -> None:
        """Whoever still waits is cancelled."""
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        part: list[Waiting] = []
        size = 0
        for body, future in waiting:
            if future.done():
                continue
            if part and size + len(body) > MOST_BYTES:
                self._start(part)
                part, size = [], 0
            part.append((body, future))
            size += len(body)
        if part:
            self._start(part)

    def _start(self, part: list[Waiting]) -> None:
        task = asyncio.create_task(self._send(part))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def left(_: asyncio.Future[m.SubmitReply]) -> None:
            if all(future.cancelled() for _, future in part):
                task.cancel()

        for _, future in part:
            future.add_done_callback(left)

    async def _send(self, part: list[Waiting]) -> None:
        try:
            if len(part) == 1:
                await self._alone(*part[0])
            else:
                await self._together(part)
        finally:
            for _, future in part:
                future.cancel()  # nothing for those that have their answer

    async def _alone(self, body: bytes, future: asyncio.Future[m.SubmitReply]) -> None:
        try:
            _settle(future, await self._one(body), None)
        except Exception as error:  # noqa: BLE001 - whatever the call raised, it is its caller's
            _settle(future, None, error)

    async def _together(self, part: list[Waiting]) -> None:
        try:
            reply = await self._many(m.SubmitManyRequest(requests=tuple(body for body, _ in part)))
            if len(reply.answers) != len(part):
                raise ProtocolError(f"{len(part)} submits were sent together and {len(reply.answers)} answered")
        except NotFound:  # an older dataflow
            await asyncio.gather(*(self._alone(*each) for each in part))
            return
        except Exception as error:  # noqa: BLE001 - whatever the call raised, it is everyone's
            for _, future in part:
                _settle(future, None, error)
            return
        again: list[Waiting] = []
        for each, answer in zip(part, reply.answers, strict=True):
            if answer.kind == Unavailable.__name__:
                again.append(each)
            elif answer.reply is None:
                _settle(each[1], None, by_kind().get(answer.kind, AstraFlowError)(answer.message))
            else:
                _settle(each[1], answer.reply, None)
        await asyncio.gather(*(self._alone(*each) for each in again))


def _settle(future: asyncio.Future[m.SubmitReply], reply: m.SubmitReply | None, error: Exception | None) -> None:
    if future.done():
        return
    if reply is not None:
        future.set_result(reply)
    elif error is not None:
        future.set_exception(error)
