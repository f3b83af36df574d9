"""Bad input: one sentence that says what, where and what to do; no traceback; nothing half-written."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.run.cli import main
from tests.e2e.conftest import GOOD, Cli

Write = Callable[..., Path]


@pytest.fixture
def refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> Callable[..., str]:
    """The one sentence of a command that is refused before anything starts."""
    monkeypatch.setenv("ASTRAFLOW_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path, code: int = 2) -> str:
        before = {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
        assert main([str(argument) for argument in arguments]) == code
        error = capsys.readouterr().err
        assert error.startswith("astraflow: ")
        assert error.count("\n") == 1, error
        assert "Traceback" not in error
        assert {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts} == before
        return error

    return call


def test_unknown_recipe_key(refused: Callable[..., str], write_recipe: Write) -> None:
    words = refused("run", write_recipe(), "--set", "policies.main.max_stalenes=3")
    assert "did you mean policies.main.max_staleness?" in words
    words = refused("run", write_recipe(change=("group_size=4", "group_sise=4"), name="typo.py"))
    assert "group_sise" in words


def test_missing_recipe_and_verb(refused: Callable[..., str], write_recipe: Write, tmp_path: Path) -> None:
    assert "there is no recipe file nowhere.py" in refused("run", "nowhere.py")
    assert "neither a file nor an importable" in refused("run", "no.such.module:recipe")
    empty = tmp_path / "empty.py"
    empty.write_text("")
    assert "must define a function recipe()" in refused("plan", empty)
    broken = tmp_path / "broken.py"
    broken.write_text("def recipe(:\n")
    assert "cannot be imported: SyntaxError" in refused("plan", broken)
    assert "must return a Recipe" in refused("plan", _write(tmp_path, "def recipe(): return 3\n"))
    assert "raised ZeroDivisionError" in refused("plan", _write(tmp_path, "def recipe(): return 1 / 0\n"))
    assert "did you mean 'plan'?" in refused("plam", "x.py")


def _write(folder: Path, text: str) -> Path:
    path = folder / f"recipe_{abs(hash(text))}.py"
    path.write_text(text)
    return path


def test_missing_model_folder(refused: Callable[..., str], write_recipe: Write) -> None:
    words = refused("run", write_recipe(change=("model=MODEL", "model='/no/such/model'")))
    assert "/no/such/model" in words
    assert "models get smollm2" in words
    assert "model 'gpt9' is unknown; known: smollm2" in refused("models", "get", "gpt9")
    assert "there is no folder" in refused("eval", write_recipe(), "--model", "/no/such/model")


def test_a_dataset_line_that_is_not_json(refused: Callable[..., str], write_recipe: Write, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"key": "1"}\n{"key": \n')
    recipe = write_recipe(change=('GeneratedTasks("digits", make)', f"JsonlTasks({str(data)!r})"))
    recipe.write_text("from astraflow.tasks.jsonl import JsonlTasks\n" + recipe.read_text())
    words = refused("run", recipe)
    assert "rows.jsonl" in words
    assert "2" in words


def test_settings_that_contradict(refused: Callable[..., str], write_recipe: Write) -> None:
    assert "sampling.max_tokens is 32" in refused("run", write_recipe(), "--set", "sampling.max_tokens=32")
    assert "group_size is 1" in refused("run", write_recipe(), "--set", "group_size=1")
    assert "found -1" in refused("run", write_recipe(), "--set", "steps=-1")


def test_a_run_that_is_not_there(refused: Callable[..., str], tmp_path: Path) -> None:
    for verb in ("status", "ledger", "resume"):
        assert "is no run folder" in refused(verb, tmp_path / "nothing")
    assert "is no run folder" in refused("trace", tmp_path / "nothing", "1/0")
    assert "GROUP/INDEX" in refused("trace", tmp_path / "nothing", "one")
    assert "is no run folder" in refused("models", "export", tmp_path / "nothing", tmp_path / "out")


def test_wrong_certificates(refused: Callable[..., str], write_recipe: Write, tmp_path: Path) -> None:
    assert "belong together" in refused("run", write_recipe(), "--tls-cert", tmp_path / "c.pem")
    words = refused("run", write_recipe(), "--tls-cert", tmp_path / "c.pem", "--tls-key", tmp_path / "k.pem")
    assert "cannot be used" in words


def test_debug_shows_the_traceback(write_recipe: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from astraflow.errors import ConfigError

    with pytest.raises(ConfigError):
        main(["--debug", "plan", str(write_recipe()), "--set", "stepz=1"])


# ── found while it runs ──


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return Reward(float('nan'))", "must be finite"),
        ("return Reward('high')", "'high'"),
        ("return None", "None"),
        ("raise RuntimeError('no luck')", "no luck"),
    ],
)
def test_a_workflow_that_is_wrong_ends_the_run_with_its_first_error(
    cli: Cli, write_recipe: Write, tmp_path: Path, body: str, words: str
) -> None:
    done = cli("run", write_recipe(body), "--run-dir", tmp_path / "run", "--in-process")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("astraflow: ")
    assert "all failed in user code" in last
    assert words in last
    assert re.search(r" \(\w+\.py:\d+ in \w+\); mend that first: ", last), "where, and what to do"
    assert "mend the cause first, then 'astraflow resume" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_prompt_longer_than_the_context_names_the_task_and_both_numbers(
    cli: Cli, write_recipe: Write, tmp_path: Path
) -> None:
    recipe = write_recipe(GOOD, change=('"content": task.key', '"content": "7" * 60'))
    done = cli("run", recipe, "--run-dir", tmp_path / "run", "--in-process")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("astraflow: ")
    found = re.search(r"(\d+) tokens leave no room in a context of 32: task '(\d+)' of '[\w-]+' is too long", last)
    assert found is not None and int(found[1]) >= 60, last
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_workflow_that_never_returns(cli: Cli, write_recipe: Write, tmp_path: Path) -> None:
    recipe = write_recipe("import asyncio; await asyncio.sleep(3600)")
    limits = (
        "limits.time_limit_s=0.3",
        "limits.max_attempts=1",
        "steps=1",
        "eval=null",
        "limits.no_signal_limit=1",
        "limits.barren_groups=1",
    )
    done = cli("run", recipe, "--run-dir", tmp_path / "run", "--in-process", "--set", *limits)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "main" in last
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_port_in_use(cli: Cli, write_recipe: Write, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = cli("run", write_recipe(GOOD), "--run-dir", tmp_path / "run", "--port", str(port))
    assert done.returncode != 0
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert not (tmp_path / "run").exists(), "nothing half-written"
    assert "Traceback" not in done.stderr
