"""Tidying the weight stores of a run: what is on its way stays, and nothing that goes wrong there ends dataflow."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from astraflow.errors import Forbidden
from astraflow.run import serve_dataflow
from astraflow.run.serve_dataflow import publishing_s
from astraflow.wire.messages import ComponentReport, ComponentStatus, StatusReply


def status(*trainers: tuple[str, str, float, float]) -> StatusReply:
    """``trainers``: state, doing, since_s, heard_s."""
    components = tuple(
        ComponentStatus(
            component="trainer",
            name=f"t{number}",
            state=state,
            heard_s=heard_s,
            report=ComponentReport(doing=doing, since_s=since_s),
        )
        for number, (state, doing, since_s, heard_s) in enumerate(trainers)
    )
    return StatusReply(run="r", state="running", error=None, now_s=0.0, policies=(), components=components, episodes={})


def test_how_long_a_version_has_been_on_its_way() -> None:
    assert publishing_s(status()) == 0.0
    assert publishing_s(status(("alive", "batch", 500.0, 1.0), ("dead", "publish", 900.0, 40.0))) == 0.0
    assert publishing_s(status(("alive", "publish", 60.0, 2.0), ("alive", "commit", 3.0, 1.0))) == 62.0


def test_a_store_that_cannot_be_tidied_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_dataflow, "COLLECT_S", 0.0)
    asked: list[float] = []
    errors = [Forbidden("the bucket refuses these credentials"), PermissionError("read-only file system")]

    class Store:
        async def collect(self, keep: Collection[str], *, spare_s: float = 0.0) -> int:
            asked.append(spare_s)
            if errors:
                raise errors.pop()
            raise asyncio.CancelledError

    class Service:
        async def status(self) -> StatusReply:
            return status(("alive", "publish", 60.0, 2.0))

        async def live_manifests(self) -> tuple[Any, ...]:
            return ()

    async def scenario() -> None:
        with pytest.raises(asyncio.CancelledError):
            await serve_dataflow._collect(Service(), (Store(),), ())  # type: ignore[arg-type]

    asyncio.run(scenario())
    assert asked == [62.0, 62.0, 62.0]
