"""From a target to workers: what is started and stopped, what is not, and by which means."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from astraflow.errors import ConfigError, RunFailed, Unavailable
from astraflow.run.actuators import Commands, LocalProcesses, names_from
from astraflow.run.autoscaler import Autoscaler, AutoscalerSettings, Fleet, Steps, steps
from astraflow.run.recipe import Recipe
from astraflow.run.serve_autoscale import AutoscaleOptions, serve_autoscale
from astraflow.testing.virtual_clock import ManualClock
from astraflow.wire.messages import PoolReply, PoolTarget, PoolWorker
from astraflow.wire.tokens import ENVIRONMENT, Tokens

SETTINGS = AutoscalerSettings(poll_s=0.01, start_s=100.0)


class Counting:
    """An actuator that only takes note."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.gone: list[str] = []
        self.broken: list[str] = []
        """Why the next starts fail."""
        self.said: dict[str, str] = {}
        self.closed = False

    async def start(self, name: str) -> None:
        self.started.append(name)
        if self.broken:
            raise RunFailed(self.broken.pop(0))

    async def stop(self, name: str) -> None:
        self.stopped.append(name)

    def ended(self) -> Sequence[str]:
        found, self.gone = self.gone, []
        return found

    def words(self, name: str) -> str:
        return self.said.get(name, "")

    async def close(self) -> None:
        self.closed = True


def pool(action: str, target: int, *names: str, state: str = "running", **reasons: str) -> PoolReply:
    """These workers are alive; those with a reason do not serve."""
    workers = tuple(PoolWorker(name=n, state="alive", reason=reasons.get(n.replace("-", "_"), "")) for n in names)
    serving = sum(not each.reason for each in workers)
    return PoolReply(
        run="r",
        state=state,
        workers=workers,
        target=PoolTarget(workers=serving, target=target, action=action, reason="because"),
    )


def scaler(actuator: Counting, clock: ManualClock | None = None, dataflow: Any = None) -> Autoscaler:
    return Autoscaler(dataflow, actuator, SETTINGS, clock=clock)


# ── steps ──


def test_grow_starts_what_is_missing_and_not_on_its_way() -> None:
    fleet = Fleet(starting={"auto-1": 0.0})
    assert steps(pool("grow", 4, "w"), fleet) == Steps(start=2)
    assert steps(pool("grow", 2, "w"), fleet) == Steps()


def test_shrink_stops_the_newest_of_its_own_only() -> None:
    fleet = Fleet(serving=["auto-0", "auto-1"])
    names = ("w", "v", "auto-0", "auto-1")
    assert steps(pool("shrink", 3, *names), fleet) == Steps(stop=("auto-1",))
    assert steps(pool("shrink", 1, *names), fleet) == Steps(stop=("auto-1", "auto-0"))


def test_shrink_waits_for_what_starts_and_counts_what_leaves() -> None:
    names = ("auto-0", "auto-1", "auto-2")
    assert steps(pool("shrink", 1, *names), Fleet(serving=list(names), starting={"auto-3": 0.0})) == Steps()
    leaving = Fleet(serving=["auto-0", "auto-1"], stopping={"auto-2"})
    assert steps(pool("shrink", 1, *names), leaving) == Steps(stop=("auto-1",))
    told = pool("shrink", 1, *names[:2], "auto-2", auto_2="it was told to leave")
    assert steps(told, leaving) == Steps(stop=("auto-1",))


def test_hold_does_nothing() -> None:
    assert steps(pool("hold", 1, "auto-0"), Fleet(serving=["auto-0"], starting={"auto-1": 0.0})) == Steps()


def test_names_are_taken_once() -> None:
    assert names_from("auto", []) == "auto-0"
    assert names_from("auto", ["auto-0", "auto-7", "auto-x", "other-9", "auto-3.2"]) == "auto-8"


# ── turns ──


def test_a_step_up_and_down() -> None:
    async def scenario() -> None:
        actuator = Counting()
        auto = scaler(actuator)
        await auto.turn(pool("grow", 2))
        await auto.turn(pool("grow", 2))
        assert actuator.started == ["auto-0", "auto-1"]
        await auto.turn(pool("grow", 2, "auto-0", "auto-1", auto_1="starting"))
        assert auto.fleet.serving == ["auto-0"] and list(auto.fleet.starting) == ["auto-1"]
        await auto.turn(pool("hold", 2, "auto-0", "auto-1"))
        await auto.turn(pool("shrink", 1, "auto-0", "auto-1"))
        await auto.turn(pool("shrink", 1, "auto-0", "auto-1"))
        assert actuator.stopped == ["auto-1"] and actuator.started == ["auto-0", "auto-1"]
        actuator.gone = ["auto-1"]
        await auto.turn(pool("hold", 1, "auto-0"))
        assert auto.fleet == Fleet(serving=["auto-0"])

    asyncio.run(scenario())


def test_a_worker_that_died_is_replaced_under_another_name() -> None:
    async def scenario() -> None:
        actuator = Counting()
        auto = scaler(actuator)
        await auto.turn(pool("grow", 1))
        await auto.turn(pool("hold", 1, "auto-0"))
        actuator.gone = ["auto-0"]
        await auto.turn(pool("grow", 1))
        assert actuator.started == ["auto-0", "auto-1"]

    asyncio.run(scenario())


def test_three_that_never_serve_end_it_with_a_reason() -> None:
    async def scenario() -> None:
        clock, actuator = ManualClock(), Counting()
        auto = scaler(actuator, clock)
        for _ in range(2):
            await auto.turn(pool("grow", 1))
            clock.advance(101)
        await auto.turn(pool("grow", 1))
        assert actuator.stopped == ["auto-0", "auto-1"]
        actuator.gone, actuator.said = ["auto-2"], {"auto-2": "no such model (log: /r/auto-2.log)"}
        with pytest.raises(RunFailed) as caught:
            await auto.turn(pool("grow", 1))
        why = "auto-2 ended before it served: no such model (log: /r/auto-2.log)"
        assert str(caught.value) == f"3 workers in a row could not be had: {why}"

    asyncio.run(scenario())


def test_a_start_that_fails_is_one_of_three_in_a_row_and_ends_nothing_alone() -> None:
    async def scenario() -> None:
        actuator = Counting()
        auto = scaler(actuator)
        actuator.broken = ["no quota", "no quota"]
        for _ in range(2):
            await auto.turn(pool("grow", 4))  # one a turn: what is over in a moment ends nothing
            assert auto.fleet == Fleet()
        await auto.turn(pool("grow", 1))
        await auto.turn(pool("hold", 1, "auto-2"))
        actuator.broken = ["no quota"] * 3
        for _ in range(2):
            await auto.turn(pool("grow", 2, "auto-2"))
        with pytest.raises(
            RunFailed, match="3 workers in a row could not be had: auto-5 could not be started: no quota"
        ):
            await auto.turn(pool("grow", 2, "auto-2"))

    asyncio.run(scenario())


def test_one_that_serves_forgives_the_failures_before() -> None:
    async def scenario() -> None:
        actuator = Counting()
        auto = scaler(actuator)
        for number in range(8):
            await auto.turn(pool("grow", 1))
            if number % 2:
                await auto.turn(pool("hold", 1, f"auto-{number}"))
            actuator.gone = [f"auto-{number}"]
        assert len(actuator.started) == 8

    asyncio.run(scenario())


def test_started_again_it_knows_its_workers_by_their_names() -> None:
    async def scenario() -> None:
        actuator = Counting()
        auto = scaler(actuator)
        await auto.turn(pool("shrink", 1, "rollout-0", "auto-4", "auto-5"))
        assert actuator.stopped == ["auto-5", "auto-4"]
        await auto.turn(pool("grow", 3, "rollout-0", "auto-4", "auto-5"))
        assert actuator.started == []

    asyncio.run(scenario())


class Script:
    """A dataflow that answers these, in turn."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def pool(self) -> PoolReply:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return msgspec.convert(answer, PoolReply)


def test_it_ends_with_the_run_and_outlives_a_restart_of_dataflow() -> None:
    actuator = Counting()
    script = Script(pool("grow", 1), Unavailable("down"), pool("hold", 1, "auto-0"), pool("hold", 1, state="finished"))
    asyncio.run(scaler(actuator, dataflow=script).run())
    assert actuator.started == ["auto-0"] and actuator.closed and not script.answers


def test_a_dataflow_that_is_away_is_waited_for_until_the_run_is_known_to_have_ended_or_patience_ends() -> None:
    actuator = Counting()
    away = Script(Unavailable("down"), Unavailable("down"))
    known = iter((False, True))
    asyncio.run(Autoscaler(away, actuator, SETTINGS, has_ended=lambda: next(known)).run())  # type: ignore[arg-type]
    assert actuator.closed and not away.answers

    impatient = AutoscalerSettings(poll_s=0.01, patience_s=0.02)
    gone = Script(*[Unavailable("connection refused")] * 50)
    with pytest.raises(RunFailed, match=r"no dataflow has answered for \d+ s: connection refused"):
        asyncio.run(Autoscaler(gone, Counting(), impatient).run())  # type: ignore[arg-type]
    assert gone.answers, "long before all was asked"


# ── commands ──

WRITE = (
    f"{sys.executable} -c \"import os,sys; open(sys.argv[1],'a').write(sys.argv[2]+' '+os.environ['{ENVIRONMENT}'])\""
)


def commands(start: str, stop: str = "true {name}") -> Commands:
    return Commands(start, stop, fields={"url": "http://x:1", "run": "/runs/a b"}, token="secret-token")


def test_commands_get_their_fields_as_one_word_and_the_token_by_environment(tmp_path: Path) -> None:
    out = tmp_path / "out"
    actuator = commands(f"{WRITE} {out} '{{name}} of {{run}} at {{url}}'")
    asyncio.run(actuator.start("auto-0; rm -rf x"))
    assert out.read_text() == "auto-0; rm -rf x of /runs/a b at http://x:1 secret-token"


def test_a_worker_that_a_command_stopped_is_leaving_until_dataflow_says_that_it_left() -> None:
    """It hands back what it holds, which may take a minute: nobody else is stopped in its place meanwhile."""

    async def scenario() -> None:
        actuator = commands("true {name}")
        auto = Autoscaler(None, actuator, SETTINGS)  # type: ignore[arg-type]
        four = ("auto-0", "auto-1", "auto-2", "auto-3")
        for _ in range(3):
            await auto.turn(pool("shrink", 3, *four))
        assert auto.fleet == Fleet(serving=list(four[:3]), stopping={"auto-3"})
        await auto.turn(pool("hold", 3, *four[:3]))
        assert auto.fleet == Fleet(serving=list(four[:3]))

    asyncio.run(scenario())


def test_a_stop_that_fails_is_tried_again_and_ends_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = tmp_path / "gate"
        auto = Autoscaler(None, commands("true {name}", f"cat {gate}"), SETTINGS)  # type: ignore[arg-type]
        await auto.turn(pool("shrink", 1, "auto-0", "auto-1"))
        assert auto.fleet == Fleet(serving=["auto-0", "auto-1"])
        gate.touch()
        await auto.turn(pool("shrink", 1, "auto-0", "auto-1"))
        assert auto.fleet == Fleet(serving=["auto-0"], stopping={"auto-1"})

    asyncio.run(scenario())


def test_a_worker_that_a_command_leaves_behind_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.run.actuators.COMMAND_S", 5.0)
    asyncio.run(commands("sh -c 'sleep 8 & exit 0' {name}").start("auto-0"))


def test_commands_that_fail_say_why(tmp_path: Path) -> None:
    script = tmp_path / "fail.sh"
    script.write_text("echo no quota left >&2; exit 3")
    with pytest.raises(RunFailed, match="ended with 3: no quota left"):
        asyncio.run(commands(f"sh {script} {{name}}").start("auto-0"))
    with pytest.raises(RunFailed, match="could not be run"):
        asyncio.run(commands("/no/such/program {name}").start("auto-0"))


def test_commands_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.run.actuators.COMMAND_S", 0.2)
    with pytest.raises(RunFailed, match=r"did not end within 0\.2 s"):
        asyncio.run(commands("sh -c 'exec sleep 60' {name}").start("auto-0"))


@pytest.mark.parametrize(
    ("start", "stop", "words"),
    [
        ("", "x", "--start must be a command"),
        ("run", "x", r"--start must hold \{name\}"),
        ("run {name} {token}", "x", r"--start may hold .* found \{token\}"),
        ("run '{name}", "x", "--start cannot be read"),
        ("run {name}", "x {0}", r"--stop may hold .* found \{0\}"),
        ("run {name.__class__}", "x", "--start"),
    ],
)
def test_templates_that_are_none_are_refused(start: str, stop: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        commands(start, stop)


# ── processes ──


def test_local_processes_start_end_and_say_so(tmp_path: Path) -> None:
    """The verb has no such command: it dies at once, which is told; stopping one that is gone does nothing."""

    async def scenario() -> None:
        actuator = LocalProcesses(["no-such-verb"], logs=tmp_path, token="t" * 20, busy=1)
        await actuator.start("auto-0")
        async with asyncio.timeout(60):
            while not (gone := actuator.ended()):  # noqa: ASYNC110 - a process that ended tells nobody
                await asyncio.sleep(0.05)
        assert list(gone) == ["auto-0"]
        said = actuator.words("auto-0")
        assert "no verb" in said and said.endswith(f"(log: {tmp_path / 'auto-0.log'})"), said
        assert actuator.words("auto-1") == ""
        await actuator.stop("auto-0")
        await actuator.close()
        assert "no verb" in (tmp_path / "auto-0.log").read_text()

    asyncio.run(scenario())


# ── options ──


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belong together"):
        AutoscaleOptions(start="x {name}")
    with pytest.raises(Exception, match="prefix"):
        AutoscaleOptions(prefix="a b")
    with pytest.raises(Exception, match="--region"):
        AutoscaleOptions(region="a b")
    with pytest.raises(ConfigError, match="poll_s"):
        AutoscalerSettings(poll_s=0)
    with pytest.raises(ConfigError, match="need the run folder"):
        asyncio.run(serve_autoscale("http://127.0.0.1:1", AutoscaleOptions(), say=print))
    with pytest.raises(ConfigError, match="no run folder"):
        asyncio.run(serve_autoscale(str(tmp_path), AutoscaleOptions(), say=print))


def test_a_region_that_the_recipe_does_not_name_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe_with: Callable[..., Recipe]
) -> None:
    resolved = SimpleNamespace(recipe=recipe_with(regions=("home", "eu")))
    monkeypatch.setattr("astraflow.run.serve_autoscale.load_config", lambda _: resolved)
    monkeypatch.setattr("astraflow.run.serve_autoscale.address", lambda _: ("http://127.0.0.1:1", "token"))
    monkeypatch.setattr(Tokens, "read", lambda _: SimpleNamespace(of=lambda _: "token"))
    with pytest.raises(ConfigError, match="region 'mars' is none of this recipe's: say --region with one of home, eu"):
        asyncio.run(serve_autoscale(str(tmp_path), AutoscaleOptions(region="mars"), say=print))
