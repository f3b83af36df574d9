"""A real service in the middle of a run behind the real HTTP server, and hands that send it anything."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.settings import PolicySpec
from astraflow.errors import by_kind
from astraflow.types import Record
from astraflow.weights.store import DirStore
from astraflow.wire import messages as m
from astraflow.wire.calls import CALLS, RECORD_HEADER, Role, WireError
from astraflow.wire.codec import decode, encode
from astraflow.wire.server import Server
from astraflow.wire.tokens import Tokens
from tests.unit.dataflow import rig as rigs
from tests.unit.dataflow.rig import Rig, make_spec, tasks

REFUSALS_COUNTED = ("fenced", "closed", "duplicates")
"""Counters that tell how often a call was refused or came twice: the only thing that such a call may change."""


class Answer:
    """Status, record and body of one HTTP answer."""

    def __init__(self, status: int, record: str, body: bytes) -> None:
        self.status, self.record, self.body = status, record, body

    @property
    def error(self) -> WireError:
        return decode(self.body, WireError)


class HostileSite:
    """One open run: a group settled, one half played, a batch issued, one committed; two policies."""

    def __init__(self, folder: Path | None = None, *, run: str = "r") -> None:
        policies = {
            "p": PolicySpec(max_staleness=3, groups_per_batch=1),
            "mean": PolicySpec(trainable=False, average_of="p"),
        }
        spec = make_spec(steps=9, policies=policies, roles={"role_p": "p"}, source=tasks(name=run))
        self.rig = Rig(dataclasses.replace(spec, run=run, seed=len(run)))
        self.tokens = Tokens.make(["p"])
        store = DirStore(folder) if folder is not None else None
        self.server = Server(
            LocalDataflow(self.rig.service), store, tokens=self.tokens, close_s=1.0, file_limit_bytes=1 << 20
        )
        self.session: aiohttp.ClientSession | None = None
        self.rig.go(self._start())
        self.good = self._play()

    async def _start(self) -> None:
        await self.server.start()
        self.session = aiohttp.ClientSession(auto_decompress=False)

    def _play(self) -> dict[str, Record]:
        """Into the middle of a run; a right request of every call for what is going on there."""
        rig = self.rig
        rig.go(rig.flow.hello(m.HelloRequest(component="rollout", name="w", incarnation="w")))
        epoch = rig.resume()
        first = rig.step(epoch)
        rig.play_groups(1)
        batch = rig.take(epoch)
        held = rig.leases(3)
        rig.submit(held[0], 0.5)
        commit = m.CommitRequest(
            policy="p", batch=batch.id, trainer_epoch=epoch, manifest=rigs.manifest("p", batch.version + 1)
        )
        assert first.version == 0 and batch.version == 1
        return {
            "hello": m.HelloRequest(component="rollout", name="w", incarnation="w"),
            "lease": m.LeaseRequest(
                worker="w", incarnation="w", count=1, capabilities=m.Capabilities(policies=("p",)), wait_s=0.0
            ),
            "renew": m.RenewRequest(worker="w", incarnation="w", held=tuple(lease.id for lease in held[1:])),
            "submit": m.SubmitRequest(
                worker="w", group=held[1].group, index=held[1].index, attempt=1, episode=rig.episode(held[1], 1.0)
            ),
            "hand_back": m.HandBackRequest(worker="w", held=(held[2].id,)),
            "resume": m.ResumeRequest(
                policy="p", version=0, digest=rigs.manifest("p").digest, trainer="t-p", incarnation="t"
            ),
            "batch": m.BatchRequest(policy="p", trainer_epoch=epoch),
            "commit": commit,
            "fail": m.FailRequest(
                policy="p", batch=batch.id, failures=batch.failures, trainer_epoch=epoch, error="boom"
            ),
            "publish": m.PublishRequest(policy="mean", manifest=rigs.manifest("mean", 1), of_version=1),
            "manifest": m.ManifestRequest(policy="p", version=1),
            "report": m.ReportRequest(component="trainer", name="t-p", incarnation="t", report=m.ComponentReport()),
            "events": m.EventsRequest(after=0, limit=5),
            "operate": m.OperatorRequest(action="drain", worker="w"),
        }

    def close(self) -> None:
        async def end() -> None:
            if self.session is not None:
                await self.session.close()
            await self.server.close()

        self.rig.go(end())
        self.rig.close()

    # ── sending ──

    def token(self, name: str) -> str:
        return self.tokens.of(sorted(CALLS[name].roles)[0], "mean" if name == "publish" else "p")

    def post(
        self, name: str, body: bytes, token: str | None = "", *, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """``token``: "" is the right one, None is none."""
        return self.rig.go(self.post_async(name, body, token, headers=headers))

    async def post_async(
        self, name: str, body: bytes, token: str | None = "", *, headers: Mapping[str, str] | None = None
    ) -> Answer:
        bearer = self.token(name) if token == "" else token
        given = {**({"Authorization": f"Bearer {bearer}"} if bearer else {}), **(headers or {})}
        assert self.session is not None
        async with self.session.post(f"{self.server.url}/v1/{name}", data=io.BytesIO(body), headers=given) as response:
            found = Answer(response.status, response.headers.get(RECORD_HEADER, ""), await response.read())
        await asyncio.sleep(0)
        return found

    def call(self, name: str, request: Record | Any) -> Answer:
        return self.post(name, encode(request) if isinstance(request, msgspec.Struct) else pack(request))

    # ── what must hold ──

    def dump(self) -> dict[str, Any]:
        """Every row of every table; how often calls were refused left out."""
        return dump(self.rig.service.ledger.store.connection)

    def check(self, answer: Answer, before: Mapping[str, Any]) -> Answer:
        """Not 5xx; a refusal is one sentence of its class and has changed nothing."""
        assert answer.status < 500, (answer.status, answer.body)
        if answer.status >= 400:
            error = answer.error
            assert answer.record == "WireError", answer.record
            assert by_kind()[error.kind].status == answer.status, (error, answer.status)
            assert error.message and "\n" not in error.message and len(error.message) <= 300
            for role in Role:
                assert self.tokens.of(role, "p") not in error.message
            assert self.dump() == before, f"a refused call changed the ledger: {error}"
        return answer


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def dump(connection: sqlite3.Connection) -> dict[str, Any]:
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
    found = {name: sorted(map(repr, connection.execute(f"SELECT * FROM {name}"))) for (name,) in names}
    found["counters"] = [
        row for row in found["counters"] if not row.startswith(tuple(f"('{n}'" for n in REFUSALS_COUNTED))
    ]
    found.pop("sqlite_sequence", None)
    return found


@contextmanager
def undone(rig: Rig) -> Iterator[None]:
    """Whatever happens within is taken back: the database as it was, every memory of it renewed."""
    ledger = rig.service.ledger
    copy = sqlite3.connect(":memory:")
    ledger.store.connection.backup(copy)
    try:
        yield
    finally:
        copy.backup(ledger.store.connection)
        copy.close()
        ledger.forget()
