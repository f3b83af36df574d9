"""A component that says goodbye has left at once; one that does not is dead after a while."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from astraflow.errors import Fenced, NameTaken
from astraflow.observe.status import component_line
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig

LAST = m.ReportRequest(
    component="rollout",
    name="w",
    incarnation="w",
    report=m.ComponentReport(doing="left", why="it was told to stop"),
    leaving=True,
)


def state(rig: Rig, name: str = "w") -> m.ComponentStatus:
    (found,) = [each for each in rig.go(rig.flow.status()).components if each.name == name]
    return found


def beat(rig: Rig, incarnation: str = "w") -> Any:
    return rig.go(rig.flow.renew(m.RenewRequest(worker="w", incarnation=incarnation)))


def kinds(rig: Rig) -> list[str]:
    events = rig.go(rig.flow.events(m.EventsRequest())).events
    return [each.kind for each in events if each.data.get("name") == "w"]


def test_a_worker_that_says_goodbye_has_left_at_once_and_never_dies() -> None:
    with Rig() as rig:
        beat(rig)
        rig.go(rig.flow.report(LAST))
        assert state(rig).state == "left"
        assert component_line(state(rig)) == "rollout w     left, last heard of 0.0 s ago: it was told to stop"
        for _ in range(6):
            rig.advance(5)
        assert state(rig).state == "left" and kinds(rig) == ["joined", "left"]
        assert not rig.db.counter("dead/rollout")


def test_one_that_says_nothing_is_dead_after_ten_seconds() -> None:
    with Rig() as rig:
        beat(rig)
        rig.go(rig.flow.report(msgspec.structs.replace(LAST, leaving=False)))
        rig.advance(5)
        assert state(rig).state == "alive"
        rig.advance(6)
        assert state(rig).state == "dead"


def test_last_words_that_are_sent_again_and_beats_that_come_late_change_nothing() -> None:
    with Rig() as rig:
        beat(rig)
        rig.go(rig.flow.report(LAST))
        rig.go(rig.flow.report(LAST))
        beat(rig)
        assert state(rig).state == "left" and kinds(rig) == ["joined", "left"]


def test_what_it_did_not_hand_back_is_pending_again_at_once() -> None:
    with Rig() as rig:
        held = rig.leases(2, worker="w")
        assert state(rig).held == 2
        rig.go(rig.flow.report(LAST))
        assert state(rig).held == 0
        again = rig.leases(2, worker="v")
        assert [(each.group, each.index, each.attempt) for each in again] == [
            (each.group, each.index, 2) for each in held
        ]


def test_its_name_is_free_at_once() -> None:
    with Rig() as rig:
        beat(rig)
        with pytest.raises(NameTaken):
            beat(rig, "w#2")
        rig.go(rig.flow.report(LAST))
        beat(rig, "w#2")
        assert state(rig).state == "alive" and kinds(rig) == ["joined", "left", "joined"]


def test_a_trainer_that_says_goodbye_has_left_at_once_and_its_batch_comes_again() -> None:
    with Rig() as rig:
        rig.play_groups(2)
        epoch = rig.resume()
        batch = rig.take(epoch)
        rig.go(rig.flow.report(msgspec.structs.replace(LAST, component="trainer", name="t-p", incarnation="t")))
        assert state(rig, "t-p").state == "left"
        for _ in range(6):
            rig.advance(5)
        assert state(rig, "t-p").state == "left" and not rig.db.counter("dead/trainer")
        again = rig.take(rig.resume(incarnation="t2"))
        assert state(rig, "t-p").state == "alive"
        assert (again.id, [row.sample_id for row in again.rows]) == (batch.id, [row.sample_id for row in batch.rows])


def test_the_last_words_of_a_trainer_that_was_replaced_are_not_its_successors() -> None:
    with Rig() as rig:
        rig.resume(incarnation="older")
        rig.resume(incarnation="newer")
        late = msgspec.structs.replace(LAST, component="trainer", name="t-p", incarnation="older")
        with pytest.raises(NameTaken, match="was replaced"):
            rig.go(rig.flow.report(late))
        assert state(rig, "t-p").state == "alive"


def test_a_trainer_that_was_replaced_before_it_resumed_undoes_nothing() -> None:
    """Its first call was under way until its successor had all its steps and had left; a new process may resume."""
    with Rig() as rig:
        for incarnation in ("older", "newer"):
            hello = m.HelloRequest(
                component="trainer", name="t-p", incarnation=incarnation, config_digest="", policy="p"
            )
            rig.go(rig.flow.hello(hello))
        epoch = rig.resume(incarnation="newer")
        rig.step(epoch)
        with pytest.raises(Fenced, match="was replaced before it resumed"):
            rig.resume_at("p", 0, rig.digest_at(0), incarnation="older")
        assert rig.service.ledger.policies.versions["p"] == 1
        rig.go(rig.flow.report(msgspec.structs.replace(LAST, component="trainer", name="t-p", incarnation="newer")))
        again = m.HelloRequest(component="trainer", name="t-p", incarnation="older", config_digest="", policy="p")
        rig.go(rig.flow.hello(again))  # a copy of its hello that comes late as well gives it nothing back
        with pytest.raises(Fenced, match="was replaced before it resumed"):
            rig.resume_at("p", 0, rig.digest_at(0), incarnation="older")
        assert rig.resume_at("p", 0, rig.digest_at(0), incarnation="newest").undone == (1,)


def test_the_successor_of_a_trainer_that_still_lives_may_resume() -> None:
    """While it loads its model the older one goes on to speak, and takes the place in the list with every word."""
    with Rig() as rig:
        epoch = rig.resume(incarnation="older")
        for _ in range(3):
            for incarnation in ("newer", "older"):
                word = {"component": "trainer", "name": "t-p", "incarnation": incarnation, "leaving": False}
                rig.go(rig.flow.report(msgspec.structs.replace(LAST, **word)))
        assert rig.db.number("SELECT COUNT(*) FROM events WHERE kind = 'joined'") > 3
        newer = rig.resume_at("p", 0, rig.digest_at(0), incarnation="newer")
        assert newer.trainer_epoch == epoch + 1
        with pytest.raises(Fenced, match="replaced"):
            rig.resume_at("p", 0, rig.digest_at(0), incarnation="older")


def test_a_trainer_that_was_taken_for_dead_is_alive_when_it_commits() -> None:
    with Rig() as rig:
        rig.play_groups(2)
        epoch = rig.resume()
        batch = rig.take(epoch)
        rig.advance(5)
        rig.advance(6)
        assert state(rig, "t-p").state == "dead"
        rig.commit(batch)
        assert state(rig, "t-p").state == "alive"
