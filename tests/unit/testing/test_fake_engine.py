"""The fake engine keeps the promises that components rely on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from astraflow.engines.base import GenerateRequest
from astraflow.errors import BadRequest, DigestMismatch, NotFound
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.virtual_loop import run_virtual
from astraflow.types import Manifest, Sampling, StopReason


def manifest(version: int, serial: int | None = None) -> Manifest:
    number = version if serial is None else serial
    return Manifest(policy="policy", version=version, digest=f"d{version}", files=(), serial=number)


def request(seed: int, *, prompt: int = 4, max_tokens: int = 8, version: int | None = None) -> GenerateRequest:
    return GenerateRequest(
        tokens=np.arange(prompt, dtype=np.int32), sampling=Sampling(seed=seed, max_tokens=max_tokens), version=version
    )


def test_reply_depends_on_seed_position_and_version_alone() -> None:
    async def main() -> None:
        engine = FakeEngine(end_chance=0.0)
        await engine.load(manifest(3), [])
        alone = await engine.generate(request(5))
        replies = await asyncio.gather(*(engine.generate(request(seed)) for seed in range(40)))
        assert alone.tokens.tolist() == replies[5].tokens.tolist()
        assert alone.tokens.tolist() == [engine.token(5, n, 3)[0] for n in range(8)]
        assert alone.stop_reason is StopReason.LENGTH
        assert [(span.start, span.stop, span.version) for span in alone.spans] == [(0, 8, 3)]
        assert len({tuple(reply.tokens.tolist()) for reply in replies}) == 40

    run_virtual(main)


def test_f56_spans_name_the_weights_as_loaded() -> None:
    def refuse(new: Manifest) -> None:
        if new.version == 7:
            raise DigestMismatch("v7")

    async def main() -> None:
        engine = FakeEngine(end_chance=0.0, tick_s=1.0, before_load=refuse)
        await engine.load(manifest(5), [])
        task = asyncio.create_task(engine.generate(request(1)))
        await asyncio.sleep(3.5)
        await engine.load(manifest(6), [])
        with pytest.raises(DigestMismatch):
            await engine.load(manifest(7), [])
        reply = await task
        assert [(span.start, span.stop, span.version) for span in reply.spans] == [(0, 3, 5), (3, 8, 6)]
        assert engine.info().versions == (6,)

    run_virtual(main)


def test_f84_two_loads_at_once_end_on_the_newest() -> None:
    async def main() -> None:
        engine = FakeEngine(load_s=1.0)
        await asyncio.gather(engine.load(manifest(7), []), engine.load(manifest(6), []))
        assert engine.info().versions == (7,)

    run_virtual(main)


def test_f88_a_cancelled_request_frees_its_slot() -> None:
    async def main() -> None:
        engine = FakeEngine(slots=1, end_chance=0.0, tick_s=1.0)
        await engine.load(manifest(0), [])
        leaver = asyncio.create_task(engine.generate(request(1, max_tokens=100)))
        waiter = asyncio.create_task(engine.generate(request(2, max_tokens=3)))
        await asyncio.sleep(3.5)
        assert (engine.busy, engine.waiting) == (1, 1)
        leaver.cancel()
        assert len((await waiter).tokens) == 3
        assert engine.steps <= 3 + 3
        assert engine.busy == 0

    run_virtual(main)


def test_f28_prompt_that_fills_the_context_is_refused_once_and_for_all() -> None:
    async def main() -> None:
        engine = FakeEngine(max_context=16, end_chance=0.0)
        await engine.load(manifest(0), [])
        assert len((await engine.generate(request(1, prompt=10))).tokens) == 6
        with pytest.raises(BadRequest, match="prompt_too_long"):
            await engine.generate(request(1, prompt=16))

    run_virtual(main)


def test_version_that_is_not_held_is_not_found() -> None:
    async def main() -> None:
        engine = FakeEngine(versions_held=2, end_chance=0.0)
        for version in range(3):
            await engine.load(manifest(version), [])
        assert engine.info().versions == (1, 2)
        assert (await engine.generate(request(1, version=1))).spans[0].version == 1
        with pytest.raises(NotFound, match="version 0"):
            await engine.generate(request(1, version=0))

    run_virtual(main)
