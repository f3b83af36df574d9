"""What every engine must keep, whatever computes its tokens: run ``check_engine`` on yours.

asyncio.run(check_engine(make=lambda: MyEngine(...), versions=[(manifest0, files0), (manifest1, files1)]))
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from astraflow.engines.base import Engine, GenerateReply, GenerateRequest
from astraflow.errors import BadRequest, NotFound
from astraflow.types import Manifest, Sampling, StopReason

Version = tuple[Manifest, list[Path]]
_DEADLINE_S = 60.0


async def check_engine(*, make: Callable[[], Engine], versions: Sequence[Version]) -> None:
    """``make`` gives a fresh engine that holds one version at a time; ``versions`` two loadable ones, serials rising.
    Raises AssertionError."""
    checks = (_check_reply, _check_seed, _check_too_long, _check_versions, _check_cancel)
    for check in checks:
        engine = make()
        async with asyncio.timeout(_DEADLINE_S):
            await engine.start()
            try:
                await check(engine, versions)
            finally:
                await engine.close()


def ask(seed: int, *, prompt: int = 5, max_tokens: int = 6, version: int | None = None) -> GenerateRequest:
    """A request whose prompt depends on the seed."""
    tokens = (np.arange(prompt, dtype=np.int32) * 7 + seed) % 11 + 1
    return GenerateRequest(
        tokens=tokens.astype(np.int32), sampling=Sampling(seed=seed, max_tokens=max_tokens), version=version
    )


def require_whole(reply: GenerateReply, most: int) -> None:
    """Lengths agree, log-probs are log-probs, and the spans cover every token once, in order."""
    count = len(reply.tokens)
    assert 0 < count <= most, f"{count} tokens of at most {most}"
    assert reply.tokens.dtype == np.int32 and reply.logprobs.dtype == np.float32
    assert len(reply.logprobs) == count and np.isfinite(reply.logprobs).all() and (reply.logprobs <= 0).all()
    at = 0
    for span in reply.spans:
        assert span.start == at and span.stop > at, f"spans {reply.spans} leave a hole"
        at = span.stop
    assert at == count, f"spans {reply.spans} cover {at} of {count} tokens"
    if reply.stop_reason is StopReason.LENGTH:
        assert count == most, f"ended by length after {count} of {most} tokens"


async def _check_reply(engine: Engine, versions: Sequence[Version]) -> None:
    try:
        await engine.generate(ask(1))
    except NotFound:
        pass
    else:
        raise AssertionError("an engine without weights must refuse with NotFound")
    await engine.load(*versions[0])
    assert engine.info().versions == (versions[0][0].version,)
    assert engine.info().digests == {versions[0][0].version: versions[0][0].digest}
    for reply in await asyncio.gather(*(engine.generate(ask(seed)) for seed in range(40))):
        require_whole(reply, 6)
        assert {(span.version, span.digest) for span in reply.spans} == {
            (versions[0][0].version, versions[0][0].digest)
        }


async def _check_seed(engine: Engine, versions: Sequence[Version]) -> None:
    await engine.load(*versions[0])
    alone = [await engine.generate(ask(seed)) for seed in range(3)]
    among = await asyncio.gather(*(engine.generate(ask(seed)) for seed in range(20)))
    for one, other in zip(alone, among, strict=False):
        assert one.tokens.tolist() == other.tokens.tolist(), "the load beside a request changed its tokens"
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-4)


async def _check_too_long(engine: Engine, versions: Sequence[Version]) -> None:
    await engine.load(*versions[0])
    context = engine.info().max_context
    reply = await engine.generate(ask(1, prompt=context - 2, max_tokens=50))
    require_whole(reply, 2)
    try:
        await engine.generate(ask(1, prompt=context))
    except BadRequest as error:
        assert "prompt_too_long" in str(error)
    else:
        raise AssertionError("a prompt that fills the context must be refused")


async def _check_versions(engine: Engine, versions: Sequence[Version]) -> None:
    first, second = versions[0][0], versions[1][0]
    await engine.load(*versions[0])
    await engine.load(*versions[1])
    reply = await engine.generate(ask(1))
    assert [(span.version, span.digest) for span in reply.spans] == [(second.version, second.digest)]
    await engine.load(*versions[0])
    assert engine.info().versions == (second.version,), "an older serial must not replace a newer one (F84)"
    try:
        await engine.generate(ask(1, version=first.version))
    except NotFound:
        pass
    else:
        raise AssertionError("a version that is not held must be refused with NotFound")


async def _check_cancel(engine: Engine, versions: Sequence[Version]) -> None:
    """Twice as many requests leave as there are slots; those that come after them must be served."""
    await engine.load(*versions[0])
    context = engine.info().max_context
    count = 2 * engine.info().slots
    leaving = [asyncio.create_task(engine.generate(ask(seed, max_tokens=context))) for seed in range(count)]
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
        task.cancel()
    gone = await asyncio.gather(*leaving, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in gone), "a request that left got a reply"
    require_whole(await engine.generate(ask(99)), 6)
