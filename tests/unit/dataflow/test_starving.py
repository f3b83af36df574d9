"""A policy that cannot get a batch: the diagnosis in one sentence, and each action that a recipe may choose."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from astraflow.algorithms.base import ReadyGroup
from astraflow.algorithms.curate import Shuffled
from astraflow.algorithms.keep import DropZeroVariance
from astraflow.algorithms.pace_rounds import Sync
from astraflow.algorithms.select import EarliestDeadline
from astraflow.algorithms.select_replay import WithReplay
from astraflow.dataflow.settings import EvalSpec, Limits, PolicySpec
from astraflow.dataflow.starving import NO_TRAINER
from astraflow.errors import ConfigError, Starved
from astraflow.observe.status import status_lines
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig, make_spec, tasks


def starved_rig(action: str, *, groups_per_batch: int = 4, **more: object) -> Rig:
    limits = Limits(starved_after_s=60, when_starved=action)  # type: ignore[arg-type]
    return Rig(make_spec(limits=limits, groups_per_batch=groups_per_batch, **more))  # type: ignore[arg-type]


def alone(rig: Rig, seconds: int = 70) -> None:
    """Nobody is heard of for so long."""
    for _ in range(seconds // 5):
        rig.advance(5)


def starve_words(rig: Rig) -> list[str]:
    return [e.data["why"] for e in rig.go(rig.flow.events(m.EventsRequest())).events if e.kind == "starved"]


def error(rig: Rig) -> str:
    found = rig.service.ledger.error
    assert found is not None and found[0] == "Starved", found
    return found[1]


# ── the diagnosis ──


def test_the_diagnosis_names_since_when_and_what_is_wrong_with_whom() -> None:
    with starved_rig("stop") as rig:
        epoch = rig.resume()
        rig.play_groups(1)
        quarantined = m.ComponentReport(doing="quarantined", why="digest mismatch at v14")
        for _ in range(14):
            rig.advance(5)
            rig.go(rig.flow.renew(m.RenewRequest(worker="b2", incarnation="b2", report=quarantined)))
        with pytest.raises(Starved) as caught:
            rig.batch(epoch)
        assert re.fullmatch(
            r"no batch for policy p since \d\d:\d\d:\d\d: no worker served it for 60 s \(limit 60 s\); "
            r"1/4 groups kept, 0 open; 0 workers serve it; b2 quarantined: digest mismatch at v14; "
            r"w dead, last heard of \d\d s ago",
            str(caught.value),
        )


def test_since_is_when_the_last_batch_ended_by_the_clock_on_the_wall() -> None:
    import time

    with starved_rig("stop", groups_per_batch=1) as rig:
        epoch = rig.resume()
        rig.advance(30)
        rig.step(epoch)
        ended = rig.clock.wall()
        alone(rig, 90)
        assert f"since {time.strftime('%H:%M:%S', time.localtime(ended))}: " in error(rig)


def test_a_worker_that_died_of_something_says_of_what() -> None:
    with starved_rig("stop") as rig:
        rig.go(
            rig.flow.renew(m.RenewRequest(worker="b", incarnation="b", report=m.ComponentReport(error="out of memory")))
        )
        alone(rig)
        assert re.search(r"0 workers serve it; b dead, last heard of 6\d s ago: out of memory$", error(rig))


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([(0, 1), *[(1, 1)] * 4], "all rewards at the highest seen (1): the policy has learned these tasks"),
        ([(0, 1), *[(0, 0)] * 4], "all rewards at the lowest seen (0): the policy gets none of these tasks right"),
        ([(1, 1)] * 4, "every reward so far was 1: nothing tells good from bad"),
        ([(1, 1), (0, 0)] * 2, "2 groups all at the highest reward seen (1), 2 all at the lowest (0)"),
    ],
)
def test_a_task_that_is_learned_is_told_from_one_that_is_never_got_right(
    rewards: Sequence[tuple[float, float]], words: str
) -> None:
    limits = Limits(no_signal_limit=4, barren_groups=1)
    spec = make_spec(groups_per_batch=1, max_staleness=9, keep=[DropZeroVariance()], limits=limits, source=tasks(500))
    with Rig(spec) as rig:
        for group in rewards:
            for lease in rig.leases(2):
                rig.submit(lease, float(group[lease.index]))
        assert words in error(rig)


# ── stop, wait, a smaller batch ──


def test_stop_is_the_default_and_fails_the_run() -> None:
    assert Limits().when_starved == "stop"
    with pytest.raises(ConfigError, match="'wait', 'smaller_batch' or 'stop', found 'cut'"):
        Limits(when_starved="cut")  # type: ignore[arg-type]


def test_wait_says_so_in_status_and_goes_on_when_a_worker_comes() -> None:
    with starved_rig("wait", groups_per_batch=1) as rig:
        epoch = rig.resume()
        alone(rig, 200)
        assert rig.service.ledger.state == "running"
        (sentence,) = starve_words(rig)
        assert "no worker served it for 60 s" in sentence
        assert rig.batch(epoch).why == sentence
        assert any(sentence in line for line in status_lines(rig.go(rig.flow.status())))
        rig.step(epoch)
        assert "no worker served" not in rig.batch(epoch).why
        alone(rig)
        assert len(starve_words(rig)) == 2, "a second spell is told anew"


def test_a_worker_that_comes_ends_the_wait_for_one() -> None:
    with starved_rig("wait") as rig:
        epoch = rig.resume()
        alone(rig)
        assert "no worker served it" in rig.batch(epoch).why
        rig.lease(1, worker="new")
        rig.advance(1)
        assert rig.batch(epoch).why == "0/4 groups kept, 1 open; oldest episode 1/0 1 s on new (attempt 1)"


def test_groups_that_fail_again_and_again_name_their_first_cause() -> None:
    from astraflow.types import Episode, FailureKind, Outcome

    limits = Limits(max_attempts=1, no_signal_limit=2, barren_groups=1)
    with Rig(make_spec(groups_per_batch=1, limits=limits)) as rig:
        for lease in (*rig.leases(2), *rig.leases(2)):
            why = f"the engine of group {lease.group} is gone"
            fault = Episode(task_key=lease.task.key, outcome=Outcome.FAILED, failure=FailureKind.INFRA, error=why)
            rig.submit(lease, episode=fault)
        assert "(too_few 2) at version 0; first failure, episode 1/0: infra: the engine of group 1 is gone" in error(
            rig
        )


def test_wait_goes_on_after_groups_without_signal() -> None:
    limits = Limits(no_signal_limit=2, barren_groups=1, when_starved="wait")
    with Rig(make_spec(keep=[DropZeroVariance()], limits=limits, groups_per_batch=1, source=tasks(500))) as rig:
        epoch = rig.resume()
        for _ in range(5):
            for lease in rig.leases(2):
                rig.submit(lease, 1.0)
        assert (rig.service.ledger.state, len(starve_words(rig))) == ("running", 1)
        rig.step(epoch)


def test_wait_does_not_wait_for_tasks_that_cannot_come() -> None:
    limits = Limits(when_starved="wait")
    with Rig(make_spec(curate=Shuffled(tasks(1), group_size=2, epochs=1), limits=limits)) as rig:
        rig.play_groups(1)
        assert not rig.lease().leases
        rig.advance(1)
        assert "the tasks are used up: 1 kept groups of the 2" in error(rig)


def test_a_smaller_batch_is_what_is_kept_with_its_own_denominators() -> None:
    with starved_rig("smaller_batch", select=EarliestDeadline(window=1)) as rig:
        epoch = rig.resume()
        rig.leases(2, worker="gone")  # the oldest group stays open: by the window it would hold back all others
        played = rig.play_groups(3)
        assert rig.batch(epoch).batch is None
        alone(rig)
        batch = rig.take(epoch)
        assert sorted({int(row.sample_id.split("/")[0]) for row in batch.rows}) == played
        assert batch.tokens == sum(int(row.mask.sum()) for row in batch.rows) == 3 * 2 * 2
        assert batch.sequences == len(batch.rows) == 6
        assert rig.take(epoch).rows[0].sample_id == batch.rows[0].sample_id, "issued again, not cut again"
        rig.commit(batch)
        rig.balanced()
        assert rig.service.ledger.policies.versions["p"] == 1
        rig.play_groups(1)
        assert rig.batch(epoch).batch is None, "the leave was for one batch"


def test_a_smaller_batch_wakes_the_trainer_that_waits() -> None:
    import asyncio

    with starved_rig("smaller_batch") as rig:
        epoch = rig.resume()
        rig.play_groups(1)

        async def race() -> m.BatchReply:
            poll = asyncio.ensure_future(rig.service.batch(m.BatchRequest(policy="p", trainer_epoch=epoch, wait_s=5)))
            await asyncio.sleep(0)
            for _ in range(14):
                rig.clock.advance(5)
                await rig.service.tick()
            return await poll

        reply = rig.go(race())
        assert reply.batch is not None and len(reply.batch.rows) == 2


def test_a_smaller_batch_survives_a_restart_of_dataflow() -> None:
    with starved_rig("smaller_batch") as rig:
        epoch = rig.resume()
        rig.play_groups(1)
        alone(rig)
        rig.restart()
        assert len(rig.take(epoch).rows) == 2


def test_the_last_tasks_make_a_smaller_batch_and_then_the_run_is_starved() -> None:
    limits = Limits(when_starved="smaller_batch")
    with Rig(make_spec(curate=Shuffled(tasks(3), group_size=2, epochs=1), limits=limits)) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.play_groups(1)
        assert not rig.lease().leases
        rig.advance(1)
        batch = rig.take(epoch)
        assert len(batch.rows) == 2
        rig.commit(batch)
        rig.advance(1)
        assert "0 kept groups of the 2 that a batch needs, and 1 steps to go" in error(rig)
        rig.balanced()


def test_a_smaller_batch_of_nothing_stops() -> None:
    with starved_rig("smaller_batch") as rig:
        alone(rig)
        assert "0/4 groups kept" in error(rig)


def test_one_policy_that_can_be_fed_keeps_the_run_going() -> None:
    policies = {"a": PolicySpec(groups_per_batch=1), "b": PolicySpec(groups_per_batch=4)}
    with Rig(make_spec(policies=policies, limits=Limits(starved_after_s=60, when_starved="smaller_batch"))) as rig:
        epochs = {name: rig.resume(name) for name in policies}
        rig.play_groups(1)
        rig.commit(rig.take(epochs["a"], "a"))
        alone(rig)
        assert rig.service.ledger.state == "running"
        assert len(rig.take(epochs["b"], "b").rows) == 2
        assert rig.batch(epochs["a"], "a").batch is None


def test_an_evaluation_that_nobody_plays_is_told_too() -> None:
    evals = EvalSpec(tasks=tasks(1, name="held"), count=1, every=0)
    with Rig(make_spec(steps=0, evals=evals, limits=Limits(starved_after_s=60))) as rig:
        alone(rig)
        assert "the evaluation of policy p is not played: no worker served it for 60 s" in error(rig)
        assert error(rig).endswith("0 workers serve it")


# ── what else the watchdog says ──


def test_failures_before_the_operator_mended_the_cause_are_forgiven() -> None:
    from astraflow.types import FailureKind

    with Rig(make_spec(limits=Limits(first_failures=4, max_attempts=9))) as rig:

        def fail(times: int) -> None:
            for _ in range(times):
                rig.submit_failed(rig.leases(1)[0], FailureKind.WORKFLOW)

        fail(4)
        assert rig.service.ledger.state == "failed"
        rig.go(rig.flow.operate(m.OperatorRequest(action="resume")))
        fail(3)
        assert rig.service.ledger.state == "running"
        fail(1)
        assert rig.service.ledger.state == "failed"


def test_status_has_a_line_for_dataflow_and_its_loop_lag() -> None:
    with Rig() as rig:
        rig.service._lags_s.extend([0.25, 0.003])
        rig.advance(30)
        status = rig.go(rig.flow.status())
        (line,) = [line for line in status_lines(status) if line.startswith("dataflow r")]
        assert line == "dataflow r    serves for 30 s: event loop 3 ms late, at most 250 ms"
        assert (status.counters["loop_lag_s"], status.counters["loop_lag_max_s"]) == (0.003, 0.25)
        rig.service._commits.full_at = rig.service._commits.now
        assert any("waits for space on the disk" in line for line in status_lines(rig.go(rig.flow.status())))
        rig.go(rig.flow.operate(m.OperatorRequest(action="stop", error="enough")))
        rig.advance(7)
        rig.service._commits.full_at = None
        assert any("has failed for 7.0 s" in line for line in status_lines(rig.go(rig.flow.status())))


# ── nobody trains ──


def idle(rig: Rig, seconds: int = 70) -> None:
    """A worker lives, its trainer says nothing."""
    for _ in range(seconds // 5):
        rig.advance(5)
        rig.renew()


def test_a_batch_that_no_trainer_takes_is_a_diagnosis_and_not_a_wait() -> None:
    with starved_rig("stop", groups_per_batch=1) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.play_groups(1)
        rig.take(epoch)
        idle(rig, 60)
        assert rig.service.ledger.state == "running", "not yet dead for a minute"
        idle(rig, 15)
        assert re.fullmatch(
            r"no step of policy p since \d\d:\d\d:\d\d: no trainer of it was heard of for 6\d s \(limit 60 s\), and "
            r"a batch waits for one; its trainer t-p is dead, last heard of \d\d s ago; start 'astraflow trainer "
            r"--policy p' and look into the log of the one before",
            error(rig),
        )


def test_a_policy_that_never_had_a_trainer() -> None:
    with starved_rig("smaller_batch", groups_per_batch=1) as rig:
        rig.play_groups(1)
        idle(rig)
        assert "no trainer of it was heard of for 60 s" in error(rig)
        assert "no trainer of it has registered yet" in error(rig), "a smaller batch helps nobody"


def test_a_trainer_that_says_nothing_but_that_it_lives_is_no_starvation() -> None:
    with starved_rig("stop", groups_per_batch=1) as rig:
        epoch = rig.resume()
        rig.play_groups(1)
        rig.take(epoch)
        for _ in range(60):
            rig.advance(5)
            rig.renew()
            rig.batch(epoch)
        assert rig.service.ledger.state == "running"


def test_nobody_is_missed_where_there_is_nothing_to_train() -> None:
    with starved_rig("stop", groups_per_batch=2) as rig:
        rig.play_groups(1)
        idle(rig, 300)
        assert rig.service.ledger.state == "running", "half a batch"


def test_wait_for_a_trainer_is_said_until_one_comes() -> None:
    with starved_rig("wait", groups_per_batch=1) as rig:
        rig.resume()
        rig.play_groups(1)
        idle(rig, 200)
        assert rig.service.ledger.state == "running"
        (sentence,) = starve_words(rig)
        assert "no trainer of it was heard of" in sentence
        (policy,) = rig.go(rig.flow.status()).policies
        assert (
            policy.waits.startswith("its trainer t-p is dead, last heard of 200 s ago; ") and sentence in policy.waits
        )
        rig.resume(incarnation="another")
        idle(rig, 5)
        (policy,) = rig.go(rig.flow.status()).policies
        assert NO_TRAINER not in policy.waits


def test_a_pause_of_dataflow_is_not_the_trainers_absence() -> None:
    with starved_rig("stop", groups_per_batch=1) as rig:
        rig.resume()
        rig.play_groups(1)
        rig.pause(500)
        rig.renew()
        assert rig.service.ledger.state == "running"


# ── nobody chooses ──


class BadSelect:
    """Never has a batch."""

    def pick(self, ready: Sequence[ReadyGroup], *, need: int, oldest_open: int | None) -> list[int]:
        return []


def asks(rig: Rig, epoch: int, seconds: int, policy: str = "p") -> None:
    """A worker and a trainer live, and the trainer asks again and again."""
    for _ in range(seconds // 5):
        rig.advance(5)
        rig.renew()
        if rig.service.ledger.state == "running":
            rig.batch(epoch, policy)


@pytest.mark.parametrize("action", ["stop", "smaller_batch"])
def test_a_select_that_never_chooses_is_named_at_once_and_is_a_diagnosis_later(action: str) -> None:
    with starved_rig(action, groups_per_batch=1, select=BadSelect()) as rig:
        epoch = rig.resume()
        rig.play_groups(2)
        assert (
            rig.batch(epoch).why
            == waits(rig)
            == "BadSelect.pick chose none of the 2 kept groups; 2/1 groups kept, 0 open"
        )
        asks(rig, epoch, 55)
        assert rig.service.ledger.state == "running"
        asks(rig, epoch, 15)
        assert re.fullmatch(
            r"no batch for policy p since \d\d:\d\d:\d\d: BadSelect.pick chose none of the 2 kept groups for 6\d s "
            r"\(limit 60 s\); 2/1 groups kept, 0 open",
            error(rig),
        )


def test_wait_for_a_select_is_said_until_it_chooses() -> None:
    with starved_rig("wait", groups_per_batch=1, select=BadSelect()) as rig:
        epoch = rig.resume()
        rig.play_groups(2)
        asks(rig, epoch, 200)
        (sentence,) = starve_words(rig)
        assert waits(rig) == sentence and sentence.count("BadSelect.pick chose none of") == 1
        rig.restart(make_spec(groups_per_batch=1))
        rig.take(rig.resume(incarnation="another"))
        assert "chose none" not in waits(rig)


def test_a_select_that_replays_is_named_by_what_it_was_asked() -> None:
    select = WithReplay(BadSelect(), ratio=0.5)
    with starved_rig("stop", groups_per_batch=2, select=select) as rig:
        epoch = rig.resume()
        rig.play_groups(2)
        assert "WithReplay.pick_with chose none of the 2 kept groups; 2/2" in rig.batch(epoch).why


def test_too_few_to_choose_from_is_nothing_of_selects() -> None:
    with starved_rig("stop", groups_per_batch=2, select=BadSelect()) as rig:
        epoch = rig.resume()
        rig.play_groups(1)
        assert rig.batch(epoch).why == "1/2 groups kept, 0 open"
        asks(rig, epoch, 200)
        assert rig.service.ledger.state == "running"


def test_a_window_holds_back_for_an_open_group_as_long_as_that_takes() -> None:
    with starved_rig("stop", groups_per_batch=1, select=EarliestDeadline(window=1)) as rig:
        epoch = rig.resume()
        held = rig.leases(2, worker="slow")
        rig.play_groups(1)
        for _ in range(40):
            rig.advance(5)
            rig.renew(held, worker="slow")
            assert (
                "EarliestDeadline.pick chose none of the 1 kept groups; 1/1 groups kept, 1 open" in rig.batch(epoch).why
            )
        assert rig.service.ledger.state == "running"
        for lease in held:
            rig.submit(lease, float(lease.index))
        rig.take(epoch)


def test_the_wait_for_the_others_of_a_round_is_paces_and_no_starvation() -> None:
    policies = {"a": PolicySpec(groups_per_batch=1), "b": PolicySpec(groups_per_batch=2)}
    limits = Limits(starved_after_s=60)
    with Rig(make_spec(policies=policies, limits=limits, pace=Sync(), select=BadSelect())) as rig:
        epochs = {name: rig.resume(name) for name in policies}
        rig.play_groups(1)
        asks(rig, epochs["a"], 200, "a")
        reply = rig.batch(epochs["a"], "a")
        assert rig.service.ledger.state == "running" and "chose none" not in reply.why
        assert reply.why.startswith("Sync holds it back for the other policies; 1/1 groups kept")


# ── who is named ──


def test_who_died_long_ago_is_no_cause_while_others_serve() -> None:
    with Rig(make_spec(groups_per_batch=4)) as rig:
        rig.resume()
        rig.renew(worker="gone")
        for _ in range(4):
            rig.advance(5)
            rig.lease(0)
        assert "gone dead, last heard of 20 s ago" in waits(rig), "it may be why nothing comes"
        for _ in range(10):
            rig.advance(5)
            rig.lease(0)
        assert "gone" not in waits(rig)


def test_where_nobody_serves_those_that_went_last_are_named_and_who_left_says_why() -> None:
    with starved_rig("stop") as rig:
        for number in range(6):
            rig.advance(1)
            rig.lease(0, worker=f"w{number}")
        report = m.ComponentReport(doing="left", why="it was told to stop")
        leaving = m.ReportRequest(component="rollout", name="w5", incarnation="w5", report=report, leaving=True)
        rig.go(rig.flow.report(leaving))
        alone(rig, 90)
        words = error(rig)
        assert re.search(r"0 workers serve it; w5 left, last heard of \d\d s ago: it was told to stop; w4 dead", words)
        assert words.endswith("2 others went before them")


def test_what_is_waited_out_is_shown_as_it_is_now() -> None:
    with starved_rig("wait", groups_per_batch=2) as rig:
        rig.resume()
        alone(rig, 100)
        assert "0/2 groups kept" in waits(rig) and "no worker served it for 60 s" in waits(rig)
        rig.play_groups(1)
        assert "1/2 groups kept" in waits(rig)


def waits(rig: Rig) -> str:
    (policy,) = rig.go(rig.flow.status()).policies
    return str(policy.waits)


def test_since_when_the_disk_is_full() -> None:
    with Rig() as rig:
        rig.advance(100)
        rig.service._commits.full_at = rig.service._commits.now - 7
        (line,) = [each for each in status_lines(rig.go(rig.flow.status())) if each.startswith("dataflow")]
        assert "waits for space on the disk for 7.0 s" in line
