"""Each fault does what its name says, and is counted."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, cast

import pytest

from astraflow.errors import Fenced, Unavailable
from astraflow.testing.faulty import Faults, FaultyDataflow
from astraflow.testing.virtual_loop import run_virtual
from astraflow.wire import messages as m
from astraflow.wire.protocol import Dataflow


class Recorder:
    """Counts the renewals that arrive; raises what it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.arrived: list[str] = []
        self.error = error

    async def renew(self, request: m.RenewRequest) -> m.RenewReply:
        self.arrived.append(request.worker)
        if self.error:
            raise self.error
        return m.RenewReply()


def _faulty(inner: Recorder, faults: Faults, seed: int = 1) -> tuple[FaultyDataflow, Counter[str]]:
    counts: Counter[str] = Counter()
    return FaultyDataflow(cast(Dataflow, inner), rng=random.Random(seed), faults=faults, counts=counts), counts


def _renew(name: str = "w") -> m.RenewRequest:
    return m.RenewRequest(worker=name, incarnation="i")


def test_without_faults_it_is_a_wire() -> None:
    async def main() -> None:
        inner = Recorder()
        flow, counts = _faulty(inner, Faults.none())
        assert await flow.renew(_renew()) == m.RenewReply()
        assert inner.arrived == ["w"]
        assert sum(counts.values()) == 0

    run_virtual(main)


def test_a_lost_request_never_arrives() -> None:
    async def main() -> None:
        inner = Recorder()
        flow, counts = _faulty(inner, Faults(drop_request=1.0))
        with pytest.raises(Unavailable, match="request was lost"):
            await flow.renew(_renew())
        assert inner.arrived == []
        assert counts["drop_request"] == 1

    run_virtual(main)


def test_a_lost_reply_had_its_effect() -> None:
    async def main() -> None:
        inner = Recorder()
        flow, counts = _faulty(inner, Faults(drop_reply=1.0))
        with pytest.raises(Unavailable, match="reply was lost"):
            await flow.renew(_renew())
        assert inner.arrived == ["w"]
        assert counts["drop_reply"] == 1

    run_virtual(main)


def test_a_duplicate_arrives_later_and_its_refusal_is_nobodys_error() -> None:
    async def main() -> None:
        inner = Recorder()
        flow, counts = _faulty(inner, Faults(duplicate=1.0))
        await flow.renew(_renew())
        inner.error = Fenced("a newer attempt exists")
        await asyncio.sleep(60)
        assert inner.arrived == ["w", "w"]
        assert counts["duplicate"] == 1
        assert counts["duplicate_refused"] == 1

    run_virtual(main)


def test_delays_let_later_calls_overtake() -> None:
    async def main() -> None:
        inner = Recorder()
        flow, counts = _faulty(inner, Faults(delay_request=0.5), seed=4)
        names = [f"w{i}" for i in range(12)]

        async def send(name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            await flow.renew(_renew(name))

        await asyncio.gather(*(send(name, 0.05 * i) for i, name in enumerate(names)))
        assert sorted(inner.arrived) == sorted(names)
        assert inner.arrived != names
        assert counts["reorder"] > 0

    run_virtual(main, seed=1)


def test_a_cut_ends() -> None:
    async def main() -> None:
        inner = Recorder()
        flow, counts = _faulty(inner, Faults.none())
        flow.cut(30)
        with pytest.raises(Unavailable):
            await flow.renew(_renew())
        await asyncio.sleep(31)
        await flow.renew(_renew())
        assert inner.arrived == ["w"]
        assert counts["cut"] == 1

    run_virtual(main)


def test_what_a_dead_client_sent_still_arrives() -> None:
    async def main() -> None:
        inner = Recorder()
        flow, _ = _faulty(inner, Faults(delay_request=1.0))
        sender = asyncio.create_task(flow.renew(_renew()))
        await asyncio.sleep(0.001)
        flow.abandon()
        sender.cancel()
        await asyncio.sleep(60)
        assert sender.cancelled()
        assert inner.arrived == ["w"]
        with pytest.raises(Unavailable, match="dead"):
            await flow.renew(_renew())

    run_virtual(main)


def test_errors_of_the_other_side_pass_through() -> None:
    async def main() -> None:
        flow, _ = _faulty(Recorder(Fenced("older attempt")), Faults.none())
        with pytest.raises(Fenced, match="older attempt"):
            await flow.renew(_renew())
        await flow.aclose()

    run_virtual(main)


def test_a_patient_client_sends_again_until_it_is_answered() -> None:
    async def main() -> None:
        inner = Recorder()
        flow, counts = _faulty(inner, Faults(drop_reply=0.6, patience_s=1000.0), seed=3)
        for _ in range(5):
            await flow.renew(_renew())
        assert len(inner.arrived) == 5 + counts["sent_again"]
        assert counts["sent_again"] == counts["drop_reply"] > 0

    run_virtual(main)


def test_same_seed_same_faults() -> None:
    async def history(seed: int) -> tuple[list[str], dict[str, int]]:
        inner = Recorder()
        flow, counts = _faulty(inner, Faults.some(0.3), seed=seed)
        for i in range(40):
            try:
                await flow.renew(_renew(str(i)))
            except Unavailable:
                inner.arrived.append("lost")
        await flow.aclose()
        return inner.arrived, dict(counts)

    async def main() -> Any:
        return [await history(5), await history(5), await history(6)]

    one, same, other = run_virtual(main, seed=0)
    assert one == same
    assert one != other


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_a_chance_outside_0_1_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"drop_reply must be in \[0, 1\], found"):
        Faults(drop_reply=value)
