"""A limit on bytes a second: what is booked never exceeds it, whoever asks, and nobody waits longer than needed."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import ConfigError
from astraflow.testing.virtual_clock import ManualClock
from astraflow.wire.rate import BURST_S, ByteRate, rate_of_mbit

PIECES = st.lists(st.tuples(st.integers(0, 1 << 20), st.floats(0, 2.0)), min_size=1, max_size=50)


@given(PIECES, st.floats(1e4, 1e9))
def test_never_more_than_the_rate_and_a_burst(pieces: list[tuple[int, float]], rate: float) -> None:
    limit = ByteRate(rate)
    now, sent = 0.0, []
    for size, pause in pieces:
        now += pause
        sent.append((now + limit.reserve(size, now), size))
    for i, (begin, _) in enumerate(sent):
        total = 0
        for at, size in sent[i + 1 :]:
            total += size
            assert total <= (at - begin + BURST_S) * rate * (1 + 1e-9) + 1e-3


@given(PIECES, st.floats(1e4, 1e9))
def test_nobody_waits_when_the_line_is_free(pieces: list[tuple[int, float]], rate: float) -> None:
    """The line is never idle while somebody waits for it: the last piece is through when all of them can be."""
    limit = ByteRate(rate)
    total = sum(size for size, _ in pieces)
    last = max(limit.reserve(size, 0.0) for size, _ in pieces)
    assert last == pytest.approx(max(0.0, total / rate - BURST_S), abs=1e-6)


def test_takes_share_the_line_in_order() -> None:
    async def scenario() -> list[int]:
        limit = ByteRate(1e6)
        done: list[int] = []

        async def take(number: int) -> None:
            await limit.take(50_000)
            done.append(number)

        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(take(number) for number in range(6)))
        assert asyncio.get_running_loop().time() - began >= 0.14
        return done

    assert asyncio.run(scenario()) == list(range(6))


def test_pieces_are_small_on_slow_lines() -> None:
    assert ByteRate(1e9).piece_bytes(1 << 20) == 1 << 20
    assert ByteRate(40_000).piece_bytes(1 << 20) == 10_000
    assert ByteRate(2_000).piece_bytes(1 << 20) == 1 << 12
    clock = ManualClock()
    limit = ByteRate(2000, clock=clock)
    assert limit.reserve(100, clock.monotonic()) == 0.0
    assert limit.reserve(4096, clock.monotonic()) == pytest.approx(4196 / 2000 - BURST_S)


@pytest.mark.parametrize("wrong", [0.0, -1.0, 1.0, float("inf"), float("nan")])
def test_rates_out_of_range_are_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="rate of weights must be in"):
        ByteRate(wrong)


def test_of_mbit() -> None:
    assert rate_of_mbit(None, "--x") is None
    limit = rate_of_mbit(8.0, "--x")
    assert limit is not None and limit.bytes_per_s == 1e6
    for wrong in (0.0, -5.0, 2e6, float("nan")):
        with pytest.raises(ConfigError, match=r"--x must be in \[0.01, 1000000\] Mbit/s"):
            rate_of_mbit(wrong, "--x")
