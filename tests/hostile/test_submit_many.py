"""The envelope of several submits over the real server: inside, each is judged as strictly as alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from astraflow.wire import messages as m
from astraflow.wire.calls import Role
from astraflow.wire.codec import decode, encode
from astraflow.wire.many import MOST_REQUESTS
from tests.conformance.test_dataflow import real_manifest
from tests.hostile.site import HostileSite, pack, undone
from tests.hostile.test_endpoints import NUMBERS, OTHERS, TEXTS, places, replaced
from tests.unit.dataflow import rig as rigs


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileSite]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rigs, "manifest", real_manifest)
        found = HostileSite(tmp_path_factory.mktemp("weights"))
        yield found
        found.close()


def send(site: HostileSite, *bodies: bytes) -> tuple[m.SubmitAnswer, ...]:
    """What was answered to each; refused ones changed nothing, and no fault of one is ours. Taken back afterwards."""
    with undone(site.rig):
        before = site.dump()
        token = site.tokens.of(Role.WORKER, None)
        answer = site.check(site.post("submit_many", encode(m.SubmitManyRequest(requests=bodies)), token), before)
        assert answer.status == 200
        answers = decode(answer.body, m.SubmitManyReply).answers
        assert len(answers) == len(bodies)
        assert all(each.kind != "ServerError" for each in answers), answers
        if all(each.reply is None for each in answers):
            assert site.dump() == before
        site.rig.balanced()
        assert site.rig.service.ledger.state == "running"
        return answers


def wrong(site: HostileSite) -> Iterator[bytes]:
    wire: Any = msgspec.msgpack.decode(encode(site.good["submit"]))
    for path, value in places(wire):
        if isinstance(value, int) and not isinstance(value, bool):
            yield from (pack(replaced(wire, path, number)) for number in NUMBERS)
        if isinstance(value, str):
            yield from (pack(replaced(wire, path, text)) for text in TEXTS)
        yield from (pack(replaced(wire, path, other)) for other in OTHERS if type(other) is not type(value))


def test_whatever_is_inside_is_judged_as_alone(site: HostileSite) -> None:
    for body in wrong(site):
        (answer,) = send(site, body)
        with undone(site.rig):
            alone = site.post("submit", body)
        assert (answer.reply is not None) == (alone.status == 200), (answer, alone)


def test_a_wrong_one_harms_no_other(site: HostileSite) -> None:
    good = encode(site.good["submit"])
    for body in list(wrong(site))[::7]:
        answers = send(site, body, good)
        assert answers[1].reply is not None


def test_too_many_are_refused(site: HostileSite) -> None:
    before = site.dump()
    body = encode(m.SubmitManyRequest(requests=(b"",) * (MOST_REQUESTS + 1)))
    answer = site.check(site.post("submit_many", body, site.tokens.of(Role.WORKER, None)), before)
    assert (answer.status, answer.error.kind) == (400, "BadRequest")
