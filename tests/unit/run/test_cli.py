"""The command line: quick, frozen, helpful."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from astraflow.errors import RunFailed
from astraflow.run import cli
from astraflow.run.cli import VERBS, _one_value_per_set, main
from astraflow.wire.messages import OperatorRequest

RECIPE = ("recipe", "set", "seed")
FLAGS = {
    "run": (*RECIPE, "run_dir", "in_process", "host", "port", "tls_cert", "tls_key", "tensorboard", "json"),
    "plan": (*RECIPE, "json"),
    "status": ("run", "json", "ca"),
    "pool": ("run", "ca", "json"),
    "autoscale": ("run", "start", "stop", "prefix", "region", "poll_s", "ca"),
    "ledger": ("run", "verify", "json"),
    "trace": ("run", "episode", "json"),
    "replay": ("run", "curate", "keep", "select", "json"),
    "doctor": ("run", "json"),
    "resume": (
        "run",
        "allow_changed_tasks",
        "in_process",
        "host",
        "port",
        "tls_cert",
        "tls_key",
        "tensorboard",
        "json",
    ),
    "freeze": ("run", "policy", "ca"),
    "unfreeze": ("run", "policy", "ca"),
    "cast": ("run", "role", "policy", "ca"),
    "add-policy": ("run", "policy", "source", "role", "model", "frozen", "decay", "ca"),
    "swap": ("run", "policy", "source", "version", "ca"),
    "eval": ("recipe", "model", "policy", "set", "seed", "json"),
    "tasks features": ("source", "out", "field", "model"),
    "models get": ("name", "dir"),
    "models export": ("run", "dir", "version", "policy"),
    "bench": (
        "name",
        "json",
        "kills",
        "seed",
        "recipe",
        "set",
        "run_dir",
        "trajectories",
        "without",
        "parts",
        "seeds",
        "steps",
        "lr",
        "lags",
        "losses",
        "quick",
        "processes",
        "out",
    ),
    "dataflow": (
        "recipe",
        "run_dir",
        "set",
        "seed",
        "host",
        "port",
        "tls_cert",
        "tls_key",
        "tensorboard",
        "weights_mbit",
    ),
    "rollout": (
        "policies",
        "policy_port",
        "policy_host",
        "policy_address",
        "dataflow",
        "recipe",
        "run_dir",
        "set",
        "seed",
        "name",
        "ca",
        "region",
        "relay_port",
        "relay_host",
        "relay_address",
        "relay_gib",
        "tls_cert",
        "tls_key",
        "weights_mbit",
    ),
    "trainer": ("dataflow", "recipe", "policy", "run_dir", "set", "seed", "ca"),
}


def test_flags_are_frozen() -> None:
    """A new one needs a reason: deep settings are the recipe's."""
    found = {}
    for verb in VERBS:
        module = importlib.import_module(f"astraflow.run.verbs.{verb.replace(' ', '_').replace('-', '_')}")
        found[verb] = tuple(field.name for field in dataclasses.fields(module.Args))
    assert {verb: sorted(names) for verb, names in found.items()} == {v: sorted(f) for v, f in FLAGS.items()}


def test_no_flag_takes_a_token() -> None:
    """Command lines are readable by everyone on the machine."""
    assert not [name for names in FLAGS.values() for name in names if "token" in name or "secret" in name]


def test_help_is_quick_and_brings_no_torch() -> None:
    began = time.perf_counter()
    code = "import sys\nfrom astraflow.run.cli import main\nassert main(['--help']) == 0\n"
    code += "heavy = {'torch', 'transformers', 'tyro', 'aiohttp'} & set(sys.modules)\nassert not heavy, heavy"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in VERBS)
    assert time.perf_counter() - began < 5.0


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*verb.split(), "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: astraflow {verb}" in shown


def test_verbs_without_torch() -> None:
    """What only reads or plans starts nothing heavy."""
    code = (
        "import sys, importlib\n"
        "for name in ('status', 'ledger', 'trace', 'models_get', 'plan', 'run', 'resume', 'dataflow'):\n"
        "    importlib.import_module('astraflow.run.verbs.' + name)\n"
        "import astraflow.run.launch, astraflow.run.serve_dataflow, astraflow.run.config, astraflow.run.journey\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["r.py", "--set", "a=1", "b=2", "--seed", "3"], ["r.py", "--set", "a=1", "--set", "b=2", "--seed", "3"]),
        (["--set", "a=1", "--set", "b=2"], ["--set", "a=1", "--set", "b=2"]),
        (["--set", "a=1", "r.py"], ["--set", "a=1", "r.py"]),
        (["--set", "a"], ["--set", "a"]),
        (["r.py"], ["r.py"]),
    ],
)
def test_set_takes_several_values(words: list[str], want: list[str]) -> None:
    assert _one_value_per_set(words) == want


def test_nothing_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("astraflow 0.")


def test_an_error_that_quotes_user_code_does_nothing_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str]) -> int:
        raise RunFailed("ValueError: \x1b[31mred\nastraflow: all is well")

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert main(["status", "r"]) == 1
    assert capsys.readouterr().err == "astraflow: ValueError: \\x1b[31mred\n    | astraflow: all is well\n"


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["nonsense"]])
def test_a_reader_that_leaves_early_is_no_error(words: list[str]) -> None:
    """``astraflow … | head -0``: no traceback, no complaint of the interpreter at its end."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "astraflow.run.cli", *words], stdout=write, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write)
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr
    assert done.returncode in (1, 2)


@pytest.mark.parametrize(("lost", "code"), [(0, 0), (1, 1)])
def test_a_bench_that_finds_something_wrong_says_so_by_its_exit_code(
    lost: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from astraflow.run.bench import chaos

    found = {**dict.fromkeys(chaos.WRONG, 0), "lost": lost, "failed": None}
    monkeypatch.setattr(chaos, "main", lambda: found)
    assert main(["bench", "chaos", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.parametrize(
    ("called", "on_path", "shown"),
    [
        (".venv/bin/astraflow", None, ".venv/bin/astraflow"),
        (".venv/bin/astraflow", "/usr/bin/astraflow", "astraflow"),
        ("/x/cli.py", None, "astraflow"),
    ],
)
def test_what_comes_next_can_be_typed_as_it_is_shown(
    called: str, on_path: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from astraflow.run import finish

    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.setattr(finish.shutil, "which", lambda _: on_path)
    assert finish.how_to_call() == shown


@pytest.mark.parametrize(
    ("verb", "words"),
    [("freeze", "solver is frozen: its trainer ends"), ("unfreeze", "solver is trained again; the launcher starts")],
)
@pytest.mark.parametrize("left", [("verifier",), (), None])
def test_freeze_and_unfreeze_send_what_they_are_called(
    verb: str,
    words: str,
    left: tuple[str, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent: list[tuple[str, OperatorRequest, Path | None]] = []

    async def operate(run: str, request: OperatorRequest, *, ca: Path | None = None) -> tuple[str, ...] | None:
        sent.append((run, request, ca))
        return left

    monkeypatch.setattr("astraflow.run.operate.operate", operate)
    assert main([verb, "runs/one", "solver", "--ca", "cert.pem"]) == 0
    assert sent == [("runs/one", OperatorRequest(action=verb, policy="solver"), Path("cert.pem"))]
    said = capsys.readouterr().out
    assert said.startswith(words)
    assert ("no policy of runs/one is trained any more" in said) is (left == ())
