"""An elastic pool of real processes: workers join and leave during the run, also none for a while; relays; a bucket."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import GOOD, Cli
from tests.e2e.test_hangs import status_of
from tests.e2e.test_kill import wait_for
from tests.e2e.test_run import check_ended
from tests.e2e.test_services_alone import Dataflow

pytestmark = pytest.mark.slow
Write = Callable[..., Path]
SLOW = f"import asyncio; await asyncio.sleep(0.5)\n    {GOOD}"
"""Long enough episodes that who is started together is there together."""
PATIENT = ("slots=16", "slots=16, drain_grace_s=1.0")


@contextmanager
def running(*arguments: str | Path, environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "astraflow.run.cli", *map(str, arguments)],
            env=environment,
            cwd=log.parent,
            stdout=out,
            stderr=out,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def version(run: Path) -> int:
    return int(status_of(run).get("policies", [{}])[0].get("version", 0))


def pool_of(run: Path) -> dict[str, Any]:
    """By HTTP, as anything that is no Python may ask."""
    url = json.loads((run / "endpoint.json").read_text())["url"]
    token = json.loads((run / "tokens.json").read_text())["operator"]
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    asked = [urllib.request.Request(f"{url}/v1/{what}", headers=headers) for what in ("pool", "pool/target")]
    pool, target = (json.load(urllib.request.urlopen(each, timeout=10)) for each in asked)
    assert set(target) == set(pool["target"])
    return dict(pool)


def with_token(dataflow: Dataflow, environment: dict[str, str], role: str) -> dict[str, str]:
    return {**environment, "ASTRAFLOW_TOKEN": dataflow.token(role)}


def test_workers_join_and_leave_and_for_a_while_there_is_none(
    environment: dict[str, str], cli: Cli, write_recipe: Write, tmp_path: Path
) -> None:
    """One is killed, one drains, none is there; a relay and one that pulls through it end the run."""
    recipe, run = write_recipe(SLOW), tmp_path / "run"
    given = ("--set", "steps=30")
    serve = ("dataflow", recipe, "--run-dir", run, *given)
    with running(*serve, environment=environment, log=tmp_path / "dataflow.txt") as d:
        dataflow = Dataflow(d, run, recipe)
        worker = {"environment": with_token(dataflow, environment, "worker")}
        trainer = {"environment": with_token(dataflow, environment, "trainer")}
        rollout = ("rollout", recipe, "--dataflow", dataflow.url, *given)
        with running("trainer", recipe, "--dataflow", dataflow.url, *given, **trainer, log=tmp_path / "t.txt") as t:
            with running(*rollout, "--name", "first", **worker, log=tmp_path / "w0.txt") as first:
                wait_for("a version", lambda: version(run) >= 1)
                first.send_signal(signal.SIGKILL)
                first.wait()
            with running(*rollout, "--name", "second", **worker, log=tmp_path / "w1.txt") as second:
                at = version(run)
                wait_for(
                    "the second to be there", lambda: "second" in {each["name"] for each in pool_of(run)["workers"]}
                )
                wait_for("further versions", lambda: version(run) >= at + 2)
                second.send_signal(signal.SIGTERM)
                assert second.wait(timeout=60) == 0
            wait_for("nobody to be there", lambda: all(each["state"] != "alive" for each in pool_of(run)["workers"]))
            done = cli("pool", run, "--json")
            assert done.returncode == 0, done.stderr
            shown = json.loads(done.stdout)
            assert "does not serve: dead" in cli("pool", run).stdout
            reasons = {each["name"]: each["reason"] for each in shown["workers"]}
            assert reasons["first"] == "dead" and reasons["second"]
            assert [shown["target"][what] for what in ("workers", "action", "target")] == [0, "grow", 1]
            assert shown["state"] == "running" and t.poll() is None
            near = ("--region", "eu", "--relay-port", "0")
            with (
                running(*rollout, "--name", "relay", *near, **worker, log=tmp_path / "w2.txt") as relay,
                running(*rollout, "--name", "far", "--region", "eu", **worker, log=tmp_path / "w3.txt") as far,
            ):
                seen: dict[str, Any] = {}

                def both() -> bool:
                    seen.update({each["name"]: each for each in pool_of(run)["workers"]})
                    return all(seen.get(name, {}).get("versions") for name in ("relay", "far"))

                wait_for("both to serve", both)
                assert re.fullmatch(r"http://127\.0\.0\.1:\d+", seen["relay"]["relay"])
                assert seen["far"]["region"] == "eu" and not seen["far"]["relay"]
                assert [each.wait(timeout=120) for each in (relay, far, t)] == [0, 0, 0]
        assert d.wait(timeout=90) == 0
    assert json.loads(cli("ledger", run, "--json").stdout)["difference"] == 0
    assert cli("resume", run, "--in-process").returncode == 0
    check_ended(run, steps=30)


LAW = "Scaling(least=1, most=3, cool_down_s=3.0, window_s=6.0)"


def test_the_autoscaler_starts_workers_for_a_starving_trainer_and_ends_with_the_run(
    environment: dict[str, str], cli: Cli, write_recipe: Write, tmp_path: Path
) -> None:
    """Each worker plays one episode of half a second at a time: the trainer waits. None is there at first."""
    recipe = write_recipe(SLOW, change=("slots=16", "slots=1"))
    text = recipe.read_text().replace(
        "        steps=6,", f"        steps=6,\n        scaling={LAW},\n        services=0,"
    )
    recipe.write_text("from astraflow.dataflow.autoscale import Scaling\n" + text)
    run = tmp_path / "run"
    with running(
        "run", recipe, "--run-dir", run, "--set", "steps=5", environment=environment, log=tmp_path / "run.txt"
    ) as launcher:
        wait_for("dataflow", lambda: bool(status_of(run).get("policies")))
        with running("autoscale", run, "--poll-s", "1", environment=environment, log=tmp_path / "auto.txt") as auto:
            assert launcher.wait(timeout=200) == 0, (tmp_path / "run.txt").read_text()[-2000:]
            assert auto.wait(timeout=90) == 0
    said = (tmp_path / "auto.txt").read_text()
    assert "grow from 0 to 1" in said and "grow from 1 to 2" in said, said
    logs = sorted(path.name for path in (run / "logs").glob("auto-*.log"))
    assert len(logs) >= 2
    assert json.loads(cli("ledger", run, "--json").stdout)["difference"] == 0
    check_ended(run, steps=5)
    assert not _alive(f"--run-dir {run} --dataflow")


def test_the_autoscaler_runs_commands(
    environment: dict[str, str], cli: Cli, write_recipe: Write, tmp_path: Path
) -> None:
    """The template starts a worker as a batch system would: elsewhere, by the recipe and the URL."""
    recipe, run = write_recipe(change=PATIENT), tmp_path / "run"
    script = tmp_path / "start.py"
    script.write_text(
        "import subprocess, sys\n"
        "name, url = sys.argv[1:]\n"
        f"command = [sys.executable, '-m', 'astraflow.run.cli', 'rollout', {str(recipe)!r}, '--dataflow', url]\n"
        "subprocess.Popen([*command, '--name', name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,\n"
        "                 start_new_session=True)\n"
    )
    with running("dataflow", recipe, "--run-dir", run, environment=environment, log=tmp_path / "d.txt") as d:
        dataflow = Dataflow(d, run, recipe)
        trainer = with_token(dataflow, environment, "trainer")
        template = f"{sys.executable} {script} {{name}} {{url}}"
        with (
            running("trainer", recipe, "--dataflow", dataflow.url, environment=trainer, log=tmp_path / "t.txt") as t,
            running(
                "autoscale", run, "--start", template, "--stop", "true {name}", "--prefix", "batch", "--poll-s", "1",
                environment=environment, log=tmp_path / "a.txt",
            ) as auto,
        ):  # fmt: skip
            assert t.wait(timeout=120) == 0
            assert auto.wait(timeout=60) == 0, (tmp_path / "a.txt").read_text()
        assert d.wait(timeout=90) == 0
    assert json.loads(cli("ledger", run, "--json").stdout)["difference"] == 0


def test_a_run_keeps_its_weights_in_a_bucket(
    environment: dict[str, str], cli: Cli, write_recipe: Write, tmp_path: Path
) -> None:
    recipe, run, bucket = write_recipe(), tmp_path / "run", tmp_path / "bucket"
    given = ("--set", f"store=file://{bucket}")
    done = cli("run", recipe, "--run-dir", run, *given, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    check_ended(run, steps=6)
    in_bucket = {path.name for path in (bucket / "weights").glob("*.safetensors")}
    in_folder = {path.name for path in (run / "weights").glob("*.safetensors")}
    assert in_folder < in_bucket  # version 0 is in both, what was trained in the bucket
    assert cli("models", "export", run, "exported").returncode == 0
    other = cli("run", recipe, "--run-dir", tmp_path / "other", *given)
    assert other.returncode == 2 and "belongs to the run" in other.stderr


def _alive(words: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if words in line:
                found.append(line)
    return found
