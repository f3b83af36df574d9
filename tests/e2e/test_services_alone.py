"""The services by themselves, as on several machines: a dataflow, workers that join by its URL, others refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.e2e.test_hangs import status_of
from tests.e2e.test_kill import wait_for
from tests.e2e.test_run import check_ended

pytestmark = pytest.mark.slow
Write = Callable[..., Path]


class Dataflow:
    """A dataflow process, its folder and its URL."""

    def __init__(self, process: subprocess.Popen[bytes], run: Path, recipe: Path) -> None:
        self.process, self.run, self.recipe = process, run, recipe
        deadline = time.monotonic() + 60
        while not (run / "endpoint.json").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.url: str = json.loads((run / "endpoint.json").read_text())["url"]

    def token(self, role: str) -> str:
        tokens = json.loads((self.run / "tokens.json").read_text())
        return str(tokens["trainers"]["main"] if role == "trainer" else tokens[role])


@pytest.fixture
def dataflow(environment: dict[str, str], write_recipe: Write, tmp_path: Path) -> Iterator[Dataflow]:
    recipe, run = write_recipe(), tmp_path / "run"
    command = [sys.executable, "-m", "astraflow.run.cli", "dataflow", str(recipe), "--run-dir", str(run)]
    with (tmp_path / "dataflow.txt").open("wb") as out:
        process = subprocess.Popen(
            [*command, "--set", "steps=4"], env=environment, cwd=tmp_path, stdout=out, stderr=out
        )
        try:
            yield Dataflow(process, run, recipe)
        finally:
            process.terminate()
            process.wait(timeout=30)


def start(verb: str, dataflow: Dataflow, environment: dict[str, str], role: str) -> subprocess.Popen[bytes]:
    """As on another machine: by the recipe, not by the run folder."""
    folder = dataflow.run.parent / f"elsewhere-{verb}"
    folder.mkdir()
    command = [sys.executable, "-m", "astraflow.run.cli", verb, str(dataflow.recipe), "--dataflow", dataflow.url]
    return subprocess.Popen(
        [*command, "--set", "steps=4"],
        env={**environment, "ASTRAFLOW_TOKEN": dataflow.token(role)},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_workers_join_from_elsewhere_and_everybody_leaves_at_the_end(
    dataflow: Dataflow, environment: dict[str, str], cli: Cli
) -> None:
    workers = [start("rollout", dataflow, environment, "worker"), start("trainer", dataflow, environment, "trainer")]
    try:
        assert [worker.wait(timeout=90) for worker in workers] == [0, 0]
        assert dataflow.process.wait(timeout=90) == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert json.loads(cli("ledger", dataflow.run, "--json").stdout)["difference"] == 0
    assert cli("resume", dataflow.run, "--in-process").returncode == 0
    check_ended(dataflow.run, steps=4)


SLOW = "import asyncio; await asyncio.sleep(300)\n    return Reward(1.0)"


def test_a_worker_that_is_told_to_stop_hands_back_what_it_cannot_end(
    environment: dict[str, str], cli: Cli, write_recipe: Write, tmp_path: Path
) -> None:
    """SIGTERM: no further lease, a grace for what is played, the rest pending again at once and no failure of it."""
    recipe = write_recipe(SLOW, change=("slots=16", "slots=16, drain_grace_s=1.0"))
    run = tmp_path / "run"
    command = [sys.executable, "-m", "astraflow.run.cli", "dataflow", str(recipe), "--run-dir", str(run)]
    serving = subprocess.Popen([*command, "--set", "steps=4"], env=environment, cwd=tmp_path)
    try:
        dataflow = Dataflow(serving, run, recipe)
        worker = start("rollout", dataflow, environment, "worker")
        try:
            wait_for("leases to be held", lambda: status_of(run).get("episodes", {}).get("leased", 0) > 0)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(timeout=60) == 0
            status = status_of(run)
            assert status["episodes"].get("leased", 0) == 0 and status["episodes"]["pending"] > 0
            assert status["counters"]["handed_back"] > 0
            (left,) = [each for each in status["components"] if each["component"] == "rollout"]
            assert (left["state"], left["report"]["why"]) == ("left", "it was told to stop")
            assert not [name for name in status["counters"] if name.startswith("failed/")]
        finally:
            worker.kill()
            worker.wait()
    finally:
        serving.terminate()
        serving.wait(timeout=30)
    assert json.loads(cli("ledger", run, "--json").stdout)["difference"] == 0


def test_a_trainer_that_is_told_to_stop_has_left_at_once(dataflow: Dataflow, environment: dict[str, str]) -> None:
    """It waits for a batch that nobody plays; what it says last is heard before the process has ended."""
    trainer = start("trainer", dataflow, environment, "trainer")

    def found() -> list[tuple[str, str]]:
        components = status_of(dataflow.run).get("components", [])
        return [(each["state"], each["report"]["why"]) for each in components if each["component"] == "trainer"]

    try:
        wait_for("the trainer to be there", lambda: [state for state, _ in found()] == ["alive"])
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(timeout=60) == 0
        assert found() == [("left", "it was told to stop")]
    finally:
        trainer.kill()
        trainer.wait()


def refused(cli: Cli, dataflow: Dataflow, *arguments: str | Path, token: str) -> str:
    done = cli("rollout", *arguments, "--dataflow", dataflow.url, token=token)
    assert done.returncode == 2, done.stderr[-2000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("astraflow: ")
    assert "Traceback" not in done.stderr
    return last


def test_who_is_refused_and_why(dataflow: Dataflow, cli: Cli, write_recipe: Write) -> None:
    worker = dataflow.token("worker")
    settings = ("--set", "steps=4")
    assert "token" in refused(cli, dataflow, dataflow.recipe, *settings, token="x" * 43)
    assert "token" in refused(cli, dataflow, dataflow.recipe, *settings, token="")
    words = refused(cli, dataflow, dataflow.recipe, "--set", "steps=5", "--set", "rollout.slots=3", token=worker)
    assert "has config" in words
    assert words.endswith("; what differs: rollout.slots is 16 in the run, 3 there; steps is 4 in the run, 5 there")
    other = write_recipe("return Reward(1.0)")
    words = refused(cli, dataflow, other, *settings, token=worker)
    assert "has code" in words
    assert "start it from the same code" in words
    assert cli("status", dataflow.url, token="y" * 43).returncode == 2
    status = cli("status", dataflow.url, "--json", token=worker)
    assert json.loads(status.stdout)["state"] == "running"
    write_recipe()
    second = cli("dataflow", "--run-dir", dataflow.run)
    assert second.returncode == 1
    assert "another" in second.stderr


def test_a_worker_whom_nobody_answers_says_so_and_gives_up(cli: Cli, write_recipe: Write) -> None:
    """Every few seconds, and in the end with the address and how long it tried."""
    done = cli("rollout", write_recipe(), "--dataflow", "http://127.0.0.1:9", "--set", "rollout.patience_s=10")
    assert done.returncode == 1, done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if "waits_for_dataflow" in line]
    assert said and all("http://127.0.0.1:9" in line and "patience_s=10" in line for line in said)
    last = done.stderr.splitlines()[-1]
    assert "dataflow was out of reach for 1" in last and "http://127.0.0.1:9" in last
