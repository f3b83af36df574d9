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
from typing import Any

import pytest

from astraflow.errors import BadRequest, InvalidRecord, NotFound, RunFailed, Unavailable
from astraflow.run import cli
from astraflow.run.cli import VERBS, _one_value_per_set, main
from astraflow.run.operate import Around
from astraflow.wire.messages import OperatorRequest, PolicyStatus, StatusReply

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


def policies(*trained: str, frozen: tuple[str, ...] = (), ended: tuple[str, ...] = ()) -> tuple[PolicyStatus, ...]:
    going = [PolicyStatus(policy=name, trainable=True, version=3, steps=9) for name in trained]
    over = [PolicyStatus(policy=name, trainable=True, version=9, steps=9) for name in ended]
    return (*going, *over, *(PolicyStatus(policy=n, trainable=True, version=3, steps=3, frozen=True) for n in frozen))


Sent = list[tuple[str, OperatorRequest, Path | None]]
OVER = "no policy of runs/one is trained any more: the run ends after its last evaluation"


def sends(monkeypatch: pytest.MonkeyPatch, around: Around | None) -> Sent:
    sent: Sent = []

    async def operate(run: str, request: OperatorRequest, *, ca: Path | None = None) -> Around | None:
        sent.append((run, request, ca))
        return around

    monkeypatch.setattr("astraflow.run.operate.operate", operate)
    monkeypatch.setattr("astraflow.run.adding.operate", operate)
    return sent


@pytest.mark.parametrize(
    ("verb", "before", "after", "lines"),
    [
        ("freeze", policies("s", "v"), policies("v", frozen=("s",)), ["s is frozen: its trainer ends"]),
        ("freeze", policies("s"), policies(frozen=("s",)), ["s is frozen: its trainer ends", OVER]),
        ("freeze", None, None, ["s is frozen: its trainer ends"]),
        ("unfreeze", policies(frozen=("s",)), policies("s"), ["s is trained again; the launcher starts"]),
        ("unfreeze", policies("s"), policies("s"), ["s is trained already: it was not frozen"]),
        (
            "unfreeze",
            policies("v", ended=("s",)),
            policies("v", ended=("s",)),
            ["s was not frozen: it has all its steps"],
        ),
        ("unfreeze", None, None, ["s is trained again; the launcher starts"]),
    ],
)
def test_freeze_and_unfreeze_send_what_they_are_called(
    verb: str,
    before: Any,
    after: Any,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent = sends(monkeypatch, None if before is None else Around(before=before, after=after))
    assert main([verb, "runs/one", "s", "--ca", "cert.pem"]) == 0
    assert sent == [("runs/one", OperatorRequest(action=verb, policy="s"), Path("cert.pem"))]
    said = capsys.readouterr().out.splitlines()
    assert [line.startswith(words) for line, words in zip(said, lines, strict=True)] == [True] * len(lines)


@pytest.mark.parametrize(
    ("policy", "before", "after", "lines"),
    [
        ("j", policies("s", "v"), policies("v", frozen=("s",)), ["s plays nothing more and is frozen"]),
        ("j", policies("s"), policies(frozen=("s",)), ["s plays nothing more and is frozen", OVER]),
        ("j", policies("s", "v"), policies("s", "v"), []),
        ("j", policies("v", frozen=("s",)), policies("v", frozen=("s",)), []),
        (
            "s",
            policies("v", frozen=("s",)),
            policies("v", frozen=("s",)),
            ["s is frozen: 'astraflow unfreeze runs/one s' trains it"],
        ),
        ("j", None, None, []),
    ],
)
@pytest.mark.parametrize("verb", ["cast", "add-policy"])
def test_who_is_frozen_because_another_plays_is_said(
    verb: str,
    policy: str,
    before: Any,
    after: Any,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sends(monkeypatch, None if before is None else Around(before=before, after=after))
    words = ["role", policy] if verb == "cast" else [policy, "--source", "s", "--role", "role"]
    assert main([verb, "runs/one", *words]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == lines


class Refuses:
    """A dataflow that answers one thing to every call."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, *_: object, **__: object) -> Refuses:
        return self

    async def __aenter__(self) -> Refuses:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def status(self) -> StatusReply:
        return StatusReply(run="r", state="running", error=None, now_s=0.0, policies=(), components=(), episodes={})

    async def operate(self, request: OperatorRequest) -> None:
        raise self._error


SWAP = ("swap", "http://host:1", "j", "--source", "s", "--version", "99999")


@pytest.mark.parametrize(
    "error",
    [NotFound("version 99999 of s was never published"), InvalidRecord("must be finite"), BadRequest("no role")],
)
def test_a_call_that_is_refused_is_a_wrong_argument(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("astraflow.run.operate.HttpDataflow", Refuses(error))
    assert main(SWAP) == 2
    assert capsys.readouterr().err == f"astraflow: {error}\n"


def test_a_call_of_which_nothing_is_heard_may_have_been_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("astraflow.run.operate.HttpDataflow", Refuses(Unavailable("silence")))
    assert main(SWAP) == 2
    assert "whether it did what was asked is not known" in capsys.readouterr().err


@pytest.mark.parametrize("decay", ["nan", "0", "1", "inf", "-0.5"])
def test_a_decay_that_is_none_is_a_wrong_argument(decay: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["add-policy", "runs/one", "m", "--source", "s", "--role", "r", "--decay", decay]) == 2
    assert f"--decay must be in (0, 1), found {float(decay)}" in capsys.readouterr().err
