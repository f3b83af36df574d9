"""``astraflow resume``: other tasks are refused with their rows unless told; a finished run stays as it is."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from astraflow.algorithms.curate import Mixture, Shuffled, Stage, Stages
from astraflow.dataflow.ledger import Ledger, StoredState
from astraflow.dataflow.store import Store, connect, lock_run
from astraflow.errors import ConfigError, Conflict
from astraflow.run.changed_tasks import accept_changed_tasks
from astraflow.run.cli import main
from astraflow.run.config import Resolved, load_config, resolve
from astraflow.run.layout import RunFolder, write_json
from astraflow.run.over import is_finished, say_finished, stored_name
from astraflow.run.prepare import create_run
from astraflow.run.recipe import Policy, Recipe
from astraflow.run.spec import run_spec
from astraflow.run.task_record import changed_digests, describe_changed_tasks, record_tasks, without_tasks
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.lists import ListTasks
from astraflow.types import Task
from astraflow.wire.codec import decode, encode
from astraflow.wire.tokens import Tokens

RECIPE = """
from pathlib import Path
from astraflow.rollout.workflow import Reward
from astraflow.run.recipe import Policy, Recipe
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.jsonl import JsonlTasks


async def echo(task, agents):
    return Reward(1.0)


def recipe() -> Recipe:
    tasks = JsonlTasks(Path(__file__).parent / "rows.jsonl", key="key")
    return Recipe(name="r", policies={"main": Policy(model=TinyModel())}, workflow=echo, tasks=tasks, steps=STEPS)
"""
ROWS = {"a": "1+1", "b": "1+2", "c": "2+2"}


def write_rows(folder: Path, rows: dict[str, str]) -> None:
    lines = [json.dumps({"key": key, "prompt": prompt}) for key, prompt in rows.items()]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that took two tasks of the first epoch and was then stopped."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_rows(tmp_path, ROWS)
    recipe = tmp_path / f"resume_{tmp_path.name.replace('-', '_')}.py"
    recipe.write_text(RECIPE.replace("STEPS", "5"))
    resolved = resolve(str(recipe))
    run = RunFolder(tmp_path / "run").create()
    write_json(run.tasks, record_tasks(resolved.recipe))
    write_json(run.config, resolved.as_file())
    ledger = open_ledger(run, resolved)
    pipeline = ledger.spec.pipeline
    with ledger.store.transaction():
        assert pipeline.curate.next() and pipeline.curate.next()
        ledger.save_algorithms(0.0)
    ledger.store.connection.close()
    return run


def open_ledger(run: RunFolder, resolved: Resolved) -> Ledger:
    ledger = Ledger(connect(run.database), run_spec(resolved, run.name))
    ledger.open()
    return ledger


def test_the_same_tasks_go_on(started: RunFolder) -> None:
    resolved = load_config(started.path)
    ledger = open_ledger(started, resolved)
    assert ledger.spec.pipeline.curate.state_dict()["position"] == 2
    ledger.store.connection.close()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({**ROWS, "d": "3+3"}, r"tasks 'rows' \(3 → 4\): 1 new \(d\)"),
        ({"a": "1+1", "c": "2+2"}, r"tasks 'rows' \(3 → 2\): 1 gone \(b\)"),
        ({**ROWS, "b": "1+3"}, r"tasks 'rows' \(3 → 3\): 1 changed \(b\)"),
        ({"c": "2+2", "b": "1+2", "a": "1+1"}, "the same tasks, in another order or form"),
        (dict.fromkeys("vwxyz", "9"), r"3 gone \(a, b, c\), 5 new \(v, w, x, …\)"),
    ],
)
def test_a_changed_dataset_is_refused_with_the_difference(started: RunFolder, rows: dict[str, str], words: str) -> None:
    before = {path.name: path.read_bytes() for path in started.path.glob("*.json")}
    write_rows(started.path.parent, rows)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(started.path)
    assert "--allow-changed-tasks" in str(caught.value)
    assert {path.name: path.read_bytes() for path in started.path.glob("*.json")} == before


def test_a_changed_dataset_goes_on_when_told_from_its_first_epoch(started: RunFolder) -> None:
    old = load_config(started.path).digest
    write_rows(started.path.parent, {**ROWS, "d": "3+3"})
    changed = load_config(started.path, allow_changed_tasks=True)
    with pytest.raises(ConfigError, match="its tasks changed"):
        open_ledger(started, changed)
    accept_changed_tasks(started, changed)
    again = load_config(started.path)
    assert again.digest == changed.digest != old
    ledger = open_ledger(started, again)
    assert ledger.spec.pipeline.curate.state_dict()["position"] == 0
    (told,) = ledger.store.all("SELECT data FROM events WHERE kind = 'tasks_changed'")
    assert list(json.loads(told[0])["digests"].values()) == [again.recipe.tasks.digest()]
    ledger.store.connection.close()
    assert json.loads(started.config.read_text())["before"] == [old]
    accept_changed_tasks(started, again)
    assert load_config(started.path).digest == again.digest


def test_nothing_is_changed_while_a_dataflow_serves_the_run(started: RunFolder) -> None:
    write_rows(started.path.parent, {"a": "1+1"})
    changed = load_config(started.path, allow_changed_tasks=True)
    with lock_run(started.path), pytest.raises(Conflict, match="another dataflow serves"):
        accept_changed_tasks(started, changed)


def test_the_leave_is_for_tasks_only(started: RunFolder) -> None:
    stored = json.loads(started.config.read_text())
    stored["config"]["steps"] = 9
    stored["digest"] = "0" * 64
    write_json(started.config, stored)
    write_rows(started.path.parent, {"a": "1+1"})
    with pytest.raises(ConfigError, match=r"another config: .*steps: 9 → 5"):
        load_config(started.path, allow_changed_tasks=True)


def test_positions_are_found_wherever_they_are() -> None:
    """A mixture in stages has a position for each part: only that of the changed source begins anew."""
    kept, gone = ListTasks("kept", [Task(key="k")]), ListTasks("gone", [Task(key="g")])
    parts = [Shuffled(source, group_size=2) for source in (kept, gone)]
    curate = Stages([Stage(curate=Mixture(parts, weights=[1, 1]))])
    for _ in range(5):
        curate.next()
    state = curate.state_dict()
    from astraflow.run.changed_tasks import _from_the_first_epoch

    stored = decode(encode(StoredState(state={"curate": state})), StoredState).state
    moved = _from_the_first_epoch(stored, {gone.digest(): "new"})["curate"]["parts"][0]["parts"]
    before = state["parts"][0]["parts"]
    assert moved[0] == before[0]
    assert moved[1] == {**before[1], "tasks": "new", "position": 0}


def test_a_large_or_unbounded_source_is_known_by_its_digest_alone() -> None:
    def source(salt: str) -> GeneratedTasks:
        return GeneratedTasks("numbers", lambda index: Task(key=f"{index}", payload={"salt": salt}))

    def record(salt: str) -> dict[str, object]:
        found = source(salt)
        return {"name": found.name, "size": found.size, "digest": found.digest()}

    words = describe_changed_tasks({"tasks": record("a")}, {"tasks": record("b")})
    assert words.startswith("tasks 'numbers' (unbounded → unbounded): digest ")
    assert describe_changed_tasks({"tasks": record("a")}, {"tasks": record("a")}) == ""


def test_configs_without_their_tasks() -> None:
    def config(digest: str, steps: int) -> dict[str, object]:
        source = {"type": "t", "name": "rows", "size": 3, "digest": digest}
        return {"tasks": source, "pipeline": {"keep": [], "parts": [{"tasks": source}]}, "steps": steps}

    assert without_tasks(config("a", 1)) == without_tasks(config("b", 1)) != without_tasks(config("b", 2))
    assert changed_digests(config("a", 1), config("b", 1)) == {"a": "b"}
    assert changed_digests(config("a", 1), config("a", 1)) == {}


# ── a finished run ──


def finish(run: RunFolder) -> None:
    store = Store(connect(run.database))
    store.set("state", "finished")
    store.connection.close()


def test_a_finished_run_says_so_and_nothing_changes(
    started: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from astraflow.run.verbs.resume import Args, main

    assert not is_finished(started)
    finish(started)
    write_json(started.summary, {"steps": 5, "wall_s": 1.5})
    before = contents(started)

    def launched(*_: object, **__: object) -> int:
        raise AssertionError("a finished run must not be launched")

    monkeypatch.setattr("astraflow.run.launch.launch", launched)
    assert main(Args(run=started.path)) == 0
    assert "has finished its 5 steps: there is nothing to go on with" in capsys.readouterr().out
    assert main(Args(run=started.path, json=True)) == 0
    assert json.loads(capsys.readouterr().out) == {"steps": 5, "wall_s": 1.5}
    assert contents(started) == before


def contents(run: RunFolder) -> dict[str, bytes]:
    files = [path for path in run.path.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
    return {str(path.relative_to(run.path)): path.read_bytes() for path in files}


def test_a_summary_that_a_killed_launcher_never_wrote_is_made_up_for(
    started: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(started)

    def finished(run: RunFolder, resolved: Resolved, *, wall_s: float | None) -> None:
        assert wall_s is None, "nobody measured it"
        write_json(run.summary, {"steps": 5})

    monkeypatch.setattr("astraflow.run.over.finish_run", finished)
    assert say_finished(started, load_config(started.path), as_json=False) == 0
    assert json.loads(started.summary.read_text()) == {"steps": 5}


def test_a_run_without_a_database_is_not_finished(tmp_path: Path) -> None:
    assert not is_finished(RunFolder(tmp_path))


# ── a failed run ──


@pytest.mark.parametrize("in_process", [True, False])
def test_a_failed_run_goes_on_from_resume_and_from_nowhere_else(
    started: RunFolder, in_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from astraflow.run.verbs.resume import Args, main

    seen: list[bool] = []

    def launched(run: RunFolder, resolved: Resolved, *, listen: object, options: object) -> int:
        seen.append(options.although_failed)  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr("astraflow.run.launch.launch", launched)
    assert main(Args(run=started.path, in_process=in_process)) == 0
    from astraflow.run.launch import LaunchOptions

    assert (seen, LaunchOptions().although_failed) == ([True], False)


@pytest.mark.parametrize(
    ("state", "words", "code"),
    [
        ("running", "is stopped: no dataflow answers; 'astraflow resume", 1),
        ("failed", "failed: no luck; mend the cause first, then 'astraflow resume", 1),
        ("finished", "has finished; 'astraflow ledger", 0),
    ],
)
def test_status_of_a_run_that_is_over_says_how_it_ended(
    started: RunFolder, state: str, words: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(connect(started.database))
    store.set("state", state)
    if state == "failed":
        store.set("error", "no luck")
    store.connection.close()
    if state == "running":
        Tokens.make(("main",)).write(started.path)
        write_json(started.endpoint, {"url": "http://127.0.0.1:1", "pid": 1})
    assert main(["status", str(started.path)]) == code
    assert words in capsys.readouterr().out
    assert main(["status", str(started.path), "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["error"]) == (state, "no luck" if state == "failed" else None)


@pytest.mark.parametrize("verb", ["status", "freeze"])
def test_a_dataflow_that_lives_and_does_not_answer_is_not_called_stopped(
    started: RunFolder, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGSTOP: it holds the run, and takes connections that nobody looks at."""
    monkeypatch.setattr("astraflow.run.operate.BUSY_S", 0.3)
    Tokens.make(("main",)).write(started.path)
    with socket.create_server(("127.0.0.1", 0)) as port, lock_run(started.path):
        url = f"http://127.0.0.1:{port.getsockname()[1]}"
        write_json(started.endpoint, {"url": url, "pid": 1})
        policy = ["main"] if verb == "freeze" else []
        assert main([verb, str(started.path), *policy]) != 0
        said = "".join(capsys.readouterr())
        assert f"the dataflow of {started.path} lives and does not answer" in said
        assert "resume" not in said
        assert ("; nothing was changed" in said) == (verb == "freeze"), "not even its status is told"
        assert main([verb, url, *policy]) != 0
        assert f"no dataflow answers at {url}: it has ended, " in "".join(capsys.readouterr())


def test_a_run_that_could_not_be_made_leaves_no_folder(
    tmp_path: Path, recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_RUNS", str(tmp_path / "runs"))
    missing = recipe_with(policies={"main": Policy(model=str(tmp_path / "nowhere"))})
    resolved = Resolved(recipe=missing, reference="r", overrides=(), seed=None, config={}, digest="d", code_digest="c")
    with pytest.raises(ConfigError, match="nowhere"):
        create_run(resolved, None)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
    kept = tmp_path / "mine"
    kept.mkdir()
    (kept / "notes.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="nowhere"):
        create_run(resolved, kept)
    assert (kept / "notes.txt").exists()


def test_a_port_that_another_program_has_now_does_not_speak_for_a_run_that_is_over(
    started: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(started)
    Tokens.make(("main",)).write(started.path)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        write_json(started.endpoint, {"url": f"http://127.0.0.1:{other.server_port}", "pid": 1})
        assert main(["status", str(started.path)]) == 0
        assert main(["pool", str(started.path)]) == 0
        other.shutdown()
    assert capsys.readouterr().out.count("has finished; 'astraflow ledger") == 2


def test_a_run_that_answers_nobody_may_be_in_process(started: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(started.path)]) == 1
    assert "runs with --in-process, where nobody can ask it, or is stopped" in capsys.readouterr().out


def test_a_folder_that_was_moved_is_the_same_run(started: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = RunFolder(started.path.rename(started.path.with_name("elsewhere")))
    resolved = load_config(moved.path)
    assert (moved.name, stored_name(moved)) == ("elsewhere", "run")
    Ledger(connect(moved.database), run_spec(resolved, stored_name(moved))).open()
    monkeypatch.chdir(moved.path)
    assert RunFolder(Path()).name == "elsewhere"
    moved.database.write_bytes(b"")
    assert stored_name(moved) == "elsewhere"  # killed before it wrote anything


def test_a_folder_that_cannot_be_made_is_a_sentence_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"cannot be written: .*; name another folder by --run-dir"):
            RunFolder(path).create()


def test_a_dataflow_that_cannot_listen_leaves_no_folder(
    tmp_path: Path, started: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = next(str(each) for each in tmp_path.glob("resume_*.py"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["dataflow", recipe, "--run-dir", str(tmp_path / "new"), "--port", str(taken.getsockname()[1])]
        assert main(words) == 2
    assert "is in use" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
