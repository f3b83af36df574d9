"""A process that lives and is not heard of is named, then ended; the launcher's own silence is told from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from astraflow.run.child import ChildSpec
from astraflow.run.post import Post, caches_of, is_heard, set_back
from astraflow.run.silence import ANSWER_S, FIRST_TOLD_S, GAP_S, NOTHING, Heard, Silence
from astraflow.run.useful import Useful
from astraflow.wire.calls import Role
from astraflow.wire.messages import ComponentReport, ComponentStatus, PolicyStatus, StatusReply

LOG = Path("d.log")


def silence(*, tell_after_s: float = 0.0) -> Silence:
    return Silence(
        name="trainer-p", log=LOG, started_at=100.0, tell_after_s=tell_after_s, first_word_s=600.0, hung_after_s=60.0
    )


def spoken(*, at: float = 101.0, tell_after_s: float = 0.0) -> Silence:
    made = silence(tell_after_s=tell_after_s)
    assert made.see(at, heard=True) == NOTHING
    return made


def seen(it: Silence, *, start: float, until: float, step: float = 5.0) -> list[tuple[float, Heard]]:
    """Looks in a row that hear nothing, and what came of them."""
    looks = [start + step * n for n in range(int((until - start) / step) + 1)]
    return [(at, verdict) for at in looks if (verdict := it.see(at, heard=False)) != NOTHING]


def test_a_silence_is_said_once_and_ended_once() -> None:
    (told_at, told), (ended_at, ended) = seen(spoken(), start=106.0, until=300.0)
    assert (told_at, ended_at) == (106.0, 161.0)
    assert told.words == (
        "trainer-p lives and is not heard of: it is stopped (SIGSTOP), hangs, or the machine is too busy; "
        "after 55 s more it is ended; look into d.log"
    )
    assert not told.end and ended.end
    assert ended.words == (
        "trainer-p is ended: is not heard of for 60 s; where its threads were is at the end of d.log, unless it was "
        "stopped"
    )


def test_who_speaks_again_is_left_alone_and_may_be_silent_again() -> None:
    it = spoken()
    assert len(seen(it, start=106.0, until=150.0)) == 1
    assert it.see(155.0, heard=True) == Heard(words="trainer-p is heard of again")
    assert it.see(156.0, heard=True) == NOTHING
    assert [at for at, _ in seen(it, start=160.0, until=230.0, step=2.0)] == [160.0, 216.0], "counted from 156"


def test_a_dataflow_may_take_a_while_to_answer() -> None:
    it = spoken(tell_after_s=ANSWER_S)
    assert [at for at, _ in seen(it, start=106.0, until=115.0)] == []
    assert [at for at, _ in seen(it, start=116.0, until=159.0)] == [116.0]


def test_before_its_first_word_it_has_longer() -> None:
    (told_at, told), (ended_at, ended) = seen(silence(), start=105.0, until=800.0)
    assert told_at - 100.0 == FIRST_TOLD_S and "has not said a word yet" in str(told.words)
    assert ended_at - 100.0 == 600.0 and ended.end


def test_who_did_not_look_knows_nothing_of_what_lies_between() -> None:
    it = spoken()
    seen(it, start=106.0, until=111.0)
    assert it.see(111.0 + GAP_S + 400.0, heard=False) == NOTHING, "the launcher was stopped for 400 s"
    assert [at for at, _ in seen(it, start=530.0, until=580.0)] == []
    (ended,) = seen(it, start=585.0, until=600.0)
    assert ended[0] == 590.0 and ended[1].end, "60 s of its own looking, from 526 on"


# ── who is heard of ──


def status(*components: tuple[str, str, str, float]) -> StatusReply:
    found = tuple(
        ComponentStatus(component=c, name=n, state=s, heard_s=h, report=ComponentReport()) for c, n, s, h in components
    )
    return StatusReply(run="r", state="running", error=None, now_s=1.0, policies=(), components=found, episodes={})


class Started:
    started_s = 100.0


def post(role: Role, name: str, policy: str | None = None) -> Post:
    spec = ChildSpec(name="any", arguments=(), environment={}, log=LOG)
    made = Post(spec=spec, role=role, policy=policy, child=cast("Any", Started()))
    made.useful = Useful(role=role, name=name, policy=policy)
    return made


TRAINER = post(Role.TRAINER, "trainer-p", "p")


@pytest.mark.parametrize(
    ("component", "heard"),
    [
        (("trainer", "p", "alive", 2.0), True),
        (("trainer", "p", "left", 2.0), True),
        (("trainer", "p", "dead", 12.0), False),
        (("trainer", "p", "alive", 21.0), False),  # the word of the process before it
        (("trainer", "q", "alive", 1.0), False),
        (("rollout", "p", "alive", 1.0), False),
    ],
)
def test_a_trainer_is_known_by_its_policy_and_not_by_the_process_before_it(
    component: tuple[str, str, str, float], heard: bool
) -> None:
    assert is_heard(TRAINER, status(component), 120.0) is heard


def test_nobody_can_tell_of_the_others_while_dataflow_is_silent() -> None:
    assert is_heard(TRAINER, None, 120.0) is None
    assert is_heard(post(Role.OPERATOR, "dataflow"), None, 120.0) is False
    assert is_heard(post(Role.OPERATOR, "dataflow"), status(), 120.0) is True


def test_a_service_is_known_by_the_name_of_its_newest_start() -> None:
    worker = post(Role.WORKER, "rollout-0.2")
    found = status(("rollout", "rollout-0", "dead", 50.0), ("rollout", "rollout-0.2", "alive", 1.0))
    assert is_heard(worker, found, 120.0) is True


# ── what a look tells beside ──


def at(**versions: int) -> StatusReply:
    policies = tuple(PolicyStatus(policy=name, trainable=True, version=v, steps=9) for name, v in versions.items())
    return StatusReply(run="r", state="running", error=None, now_s=1.0, policies=policies, components=(), episodes={})


def test_a_version_that_falls_is_explained() -> None:
    assert set_back(None, at(p=3)) == []
    assert set_back(at(p=3), at(p=3, q=0)) == []
    assert set_back(at(p=3, q=5), at(p=4, q=2)) == [
        "policy q is back at version 2, it was at 5: its trainer went on from its newest checkpoint, or somebody "
        "rolled it back; the same batches are trained again"
    ]


def test_what_a_killed_service_leaves_is_found_by_its_name_and_no_other(tmp_path: Path) -> None:
    own = ["cache-rollout-1-abc", "cache-rollout-1.2-xyz"]
    for name in [*own, "cache-rollout-10-abc", "cache-other", "checkpoints"]:
        (tmp_path / name).mkdir()
    assert sorted(path.name for path in caches_of(tmp_path, "rollout-1")) == own
