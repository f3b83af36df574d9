"""Files of a run folder that are broken: every command says which, what is wrong with it, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from astraflow.errors import ConfigError
from astraflow.run.cli import main
from astraflow.run.initial import read_initial
from astraflow.run.layout import RunFolder, write_json
from astraflow.run.over import say_finished, stored_name
from astraflow.run.run_db import require_sound
from tests.unit.run.made_run import MadeRun

VERBS = {
    "ledger": ("ledger", "RUN"),
    "ledger --verify": ("ledger", "RUN", "--verify"),
    "status": ("status", "RUN"),
    "pool": ("pool", "RUN"),
    "doctor": ("doctor", "RUN"),
    "trace": ("trace", "RUN", "1/0"),
    "replay": ("replay", "RUN"),
    "resume": ("resume", "RUN"),
    "models export": ("models", "export", "RUN", "OUT"),
    "autoscale": ("autoscale", "RUN"),
    "freeze": ("freeze", "RUN", "main"),
    "cast": ("cast", "RUN", "role", "main"),
    "dataflow": ("dataflow", "--run-dir", "RUN"),
    "trainer": ("trainer", "--dataflow", "http://127.0.0.1:9", "--run-dir", "RUN"),
}
"""Every one that is given a run folder."""
NEED_TABLES = ("ledger", "ledger --verify", "status", "pool", "doctor", "trace", "freeze", "cast")
"""Those that read run.db without resolving the recipe first, which this made run does not have."""


def run_of(tmp_path: Path) -> RunFolder:
    made = MadeRun(tmp_path / "run").healthy()
    made.store.set("state", "finished")
    return made.close()


def said(words: tuple[str, ...], run: RunFolder, capsys: pytest.CaptureFixture[str]) -> str:
    places = {"RUN": str(run.path), "OUT": str(run.path.parent / "out")}
    assert main([places.get(word, word) for word in words]) == 2, words
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith("astraflow: "), (words, out, err)
    return err


CONFIGS = {
    "cut off": (b'{"recipe": "examples/tiny.py", "se', "is not JSON: Unterminated string"),
    "empty": (b"", "is not JSON: Expecting value"),
    "no text": (b'{"recipe": "\xff\xfe"}', "is not JSON: 'utf-8' codec can't decode"),
    "deep": (b"[" * 200_000, "is not JSON: "),
    "a list": (b"[1, 2]", "must hold a JSON object, found list"),
    "of another type": (b'{"recipe": 3}', "Expected `str`, got `int` - at `$.recipe`"),
    "of another type within": (b'{"set": ["a=1", 2]}', "Expected `str`, got `int` - at `$.set[1]`"),
    "no settings": (b'{"config": []}', "Expected `object`, got `array` - at `$.config`"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_broken_config_is_named_by_every_command(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    content, words = CONFIGS[kind]
    run.config.write_bytes(content)
    for verb in VERBS.values():
        err = said(verb, run, capsys)
        assert f"{run.config} " in err and words in err and "; restore it from a copy" in err, err


def cut_off(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 + 100])


@pytest.mark.parametrize(
    ("state", "words", "code"),
    [
        ("running", "runs with --in-process, where nobody can ask it, or is stopped; 'astraflow resume", 1),
        ("failed", "failed: no luck; mend the cause first, then 'astraflow resume", 1),
        ("finished", "has finished; 'astraflow ledger", 0),
    ],
)
def test_pool_and_status_tell_the_same_of_a_run_that_nobody_serves(
    state: str, words: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that was run with --in-process, whose dataflow never listened."""
    run = MadeRun(tmp_path / "run").healthy().ended(state, "no luck" if state == "failed" else None).close()
    for flags in ((), ("--json",)):
        said = []
        for verb in ("status", "pool"):
            assert main([verb, str(run.path), *flags]) == code
            said.append(capsys.readouterr().out)
        assert said[0] == said[1] and (words in said[0] or json.loads(said[0])["state"] == state)
    if state == "finished":
        assert main(["autoscale", str(run.path)]) == 2
        assert "has finished" in capsys.readouterr().err, "not that a resume starts one"


DATABASES = {
    "cut off": (cut_off, "database disk image is malformed; it is damaged: restore the run folder from a copy"),
    "garbage": (lambda path: path.write_bytes(b"\x07" * 8192), "file is not a database; it is damaged: restore"),
    "empty": (lambda path: path.write_bytes(b""), "no such table: events; it is not of a run, of none that has begun"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "disk I/O error; it is damaged: restore"),
}


@pytest.mark.parametrize("kind", DATABASES)
def test_a_broken_ledger_is_named_by_every_command_that_opens_one(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    harm, words = DATABASES[kind]
    harm(run.database)  # type: ignore[no-untyped-call]
    for verb in NEED_TABLES:
        err = said(VERBS[verb], run, capsys)
        assert f"{run.database} cannot be read: " in err and words in err, err


def test_a_dataflow_does_not_begin_anew_on_a_ledger_that_is_damaged(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert stored_name(run) == "run"
    run.database.write_bytes(b"")
    assert stored_name(run) == "run", "its process ended before there were tables: it begins now"
    run.database.write_bytes(b"\x07" * 8192)
    with pytest.raises(ConfigError, match="it is damaged"):
        stored_name(run)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ('{"main": {}}', "does not hold the manifests of version 0: .* at `"),
        ("[]", "must hold a JSON object"),
    ],
)
def test_broken_manifests_of_version_0(content: str, words: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path).create()
    run.initial.write_text(content)
    with pytest.raises(ConfigError, match=f"initial.json {words}.*restore it from a copy"):
        read_initial(run)


@pytest.mark.parametrize(("content", "words"), [("{", "is not JSON"), ('{"url": 3}', "holds no URL of a dataflow")])
def test_a_broken_endpoint_is_written_anew_by_a_resume(content: str, words: str, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.endpoint.write_text(content)
    with pytest.raises(ConfigError, match=f"endpoint.json {words}.*'astraflow resume {run.path}' writes it anew"):
        run.url()


def test_a_broken_summary_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    monkeypatch.setattr(
        "astraflow.run.over.finish_run", lambda run, resolved, wall_s: write_json(run.summary, {"steps": 7})
    )
    for content in ("{", "[]", "{}", '{"steps": "x"}'):
        run.summary.write_text(content)
        assert say_finished(run, None, as_json=True) == 0  # type: ignore[arg-type]
        assert json.loads(capsys.readouterr().out) == {"steps": 7}
    run.summary.write_text('{"steps": 5}')
    assert say_finished(run, None, as_json=True) == 0  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out) == {"steps": 5}


def test_resume_does_not_write_on_in_a_damaged_database(tmp_path: Path) -> None:
    """Eight KiB in the middle: most of what a run asks still answers, and it would go on as if nothing were."""
    made = MadeRun(tmp_path / "run").groups(400).steps(200)
    run = made.close()
    require_sound(run.database)
    data = bytearray(run.database.read_bytes())
    middle = len(data) // 8192 * 4096
    data[middle : middle + 8192] = b"\xa5" * 8192
    run.database.write_bytes(data)
    with pytest.raises(
        ConfigError, match=r"run\.db is damaged: .*restore the run folder from a copy, or start a new run"
    ):
        require_sound(run.database)
    require_sound(tmp_path / "absent.db")


def test_a_check_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run").groups(400).close()
    require_sound(run.database, limit_s=0.0)
