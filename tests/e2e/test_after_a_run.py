"""What a finished run tells: journey, ledger, samples, curve, export, metrics. One real run for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.errors import ConfigError, NotFound
from astraflow.observe.doctor import diagnose
from astraflow.observe.findings import State
from astraflow.observe.metrics import Registry
from astraflow.observe.metrics_file import read_points, series
from astraflow.run.cli import main
from astraflow.run.config import Resolved, load_config
from astraflow.run.export import export_version
from astraflow.run.finish import ending_lines, finish_run
from astraflow.run.journey import journey_of, text_lines
from astraflow.run.layout import RunFolder
from astraflow.run.ledger import ledger_lines, ledger_report
from astraflow.run.recorder import Recorder, last_event
from astraflow.run.registry import fill_registry
from astraflow.run.run_db import open_run_db
from astraflow.run.symptoms import symptoms_of
from astraflow.weights.manifest import manifest_of_folder
from astraflow.wire.messages import ComponentReport, ComponentStatus, PolicyStatus, StatusReply
from tests.e2e.conftest import GOOD, RECIPE


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    folder = tmp_path_factory.mktemp("after")
    recipe = folder / "after_a_run.py"
    recipe.write_text(RECIPE.format(body=GOOD))
    before = os.environ.get("ASTRAFLOW_CACHE")
    os.environ["ASTRAFLOW_CACHE"] = str(folder / "models")
    try:
        words = [
            "run",
            str(recipe),
            "--run-dir",
            str(folder / "run"),
            "--in-process",
            "--set",
            "steps=4",
            "eval.every=2",
        ]
        assert main(words) == 0
        yield RunFolder(folder / "run")
    finally:
        os.environ.pop("ASTRAFLOW_CACHE")
        if before is not None:
            os.environ["ASTRAFLOW_CACHE"] = before


@pytest.fixture
def resolved(run: RunFolder) -> Resolved:
    return load_config(run.path)


def trained_group(run: RunFolder) -> int:
    with open_run_db(run.database) as db:
        row = db.connection.execute("SELECT MIN(group_id) FROM group_policy WHERE state = 'trained'").fetchone()
    return int(row[0])


def test_a_journey_goes_from_admission_to_commit(run: RunFolder, resolved: Resolved) -> None:
    group = trained_group(run)
    journey = journey_of(run, group, 1)
    kinds = [event["kind"] for event in journey.events]
    assert kinds[:3] == ["admitted", "leased", "done"]
    assert {"ready", "kept", "cut", "issued", "committed"} <= set(kinds)
    times = [event["at_s"] for event in journey.events]
    assert times == sorted(times)
    assert {event.get("index", 1) for event in journey.events} == {1}
    assert journey.about["policies"][0]["state"] == "trained"
    assert json.loads(json.dumps(journey.as_json()))["group"] == group
    lines = [*journey.lines(), *text_lines(journey, resolved.recipe, colour=False)]
    assert lines[0].startswith(f"episode {group}/1: train, task ")
    if journey.episode is not None:
        assert any("⟧[v" in line for line in lines)
        assert any("\x1b[32m" in line for line in text_lines(journey, resolved.recipe, colour=True))


def test_a_journey_that_never_began(run: RunFolder) -> None:
    with pytest.raises(NotFound, match="there is no group 99999"):
        journey_of(run, 99999, 0)
    with pytest.raises(NotFound, match="episodes 0 to 3"):
        journey_of(run, trained_group(run), 4)


def test_the_ledger_balances_and_says_why_groups_were_dropped(run: RunFolder) -> None:
    report = ledger_report(run)
    assert report["difference"] == 0
    dropped = sum(report["dropped"].get("main", {}).values())
    assert dropped == report["policies"]["main"]["dropped"]
    assert ledger_lines(report)[-1] == "the ledger balances"
    assert ledger_lines({**report, "difference": 3})[-1] == "the ledger does NOT balance: difference 3"


def test_a_ledger_that_lost_something_fails_the_command(run: RunFolder, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes(run.config.read_bytes())
    with sqlite3.connect(run.database) as source, sqlite3.connect(broken / "run.db") as target:
        source.backup(target)
        target.execute("DELETE FROM episodes WHERE idx = 0")
    source.close()
    target.close()
    assert main(["ledger", str(broken), "--json"]) == 1


def test_summary_and_last_screen(run: RunFolder, resolved: Resolved) -> None:
    ending = finish_run(run, resolved, wall_s=12.3456)
    summary = json.loads(run.summary.read_text())
    assert summary == ending.summary
    assert (summary["steps"], summary["wall_s"], summary["ledger_difference"]) == (4, 12.346, 0)
    assert 0 < summary["rl_wall_s"] < 60
    assert 0 <= summary["accuracy_before"] <= 1
    assert len(ending.pairs) == 3
    assert ending.pairs[0].question.isdigit()
    text = "\n".join(ending_lines(run, ending, resolved.recipe.trainable))
    for words in ("before:", "after:", "held-out accuracy", f"astraflow models export {run.path}", "balances"):
        assert words in text


def test_metrics_have_one_axis_a_kind(run: RunFolder) -> None:
    points = read_points(run.metrics)
    assert [x for x, _ in series(points, "step", "step/trained_tokens")] == [1, 2, 3, 4]
    assert [x for x, _ in series(points, "eval", "score")] == [0, 2, 4]


def test_a_recorder_that_starts_again_writes_nothing_twice(run: RunFolder) -> None:
    before = (run.metrics.read_bytes(), run.trace.read_bytes())
    recorder = Recorder(run)
    recorder.look()
    recorder.look()
    recorder.close()
    assert (run.metrics.read_bytes(), run.trace.read_bytes()) == before


def fill(folder: Path, *, leave: int) -> Path:
    """A file that leaves at most so many bytes of the disk, whoever writes to it at the same time."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 16, 1 << 12, 512):
            with contextlib.suppress(OSError):
                while shutil.disk_usage(folder).free > leave:
                    file.write(bytes(min(size, max(512, shutil.disk_usage(folder).free - leave))))
    return path


def test_a_recorder_on_a_full_disk_writes_what_is_missing_once_there_is_room(run: RunFolder, small_disk: Path) -> None:
    """No line is lost, torn or written twice, wherever the disk was full."""
    room = 0
    for step in range(12):
        folder = small_disk / f"run{step}"
        folder.mkdir()
        copy = RunFolder(folder)
        with sqlite3.connect(run.database) as source, sqlite3.connect(copy.database) as target:
            source.backup(target)
        target.close()
        source.close()
        dataflow = sqlite3.connect(copy.database)  # which has the file open all the time
        dataflow.execute("SELECT COUNT(*) FROM events").fetchone()
        recorder = Recorder(copy)
        filler = fill(small_disk, leave=4096 * step)
        room += recorder.look_if_room()
        filler.unlink()
        assert recorder.look_if_room()
        recorder.close()
        dataflow.close()
        assert copy.trace.read_bytes() == run.trace.read_bytes()
        assert sorted(map(repr, read_points(copy.metrics))) == sorted(map(repr, read_points(run.metrics)))
        shutil.rmtree(folder)
    assert room < 12, "the disk was never full"


def test_tensorboard_shows_what_the_metrics_file_says(run: RunFolder, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    copy = RunFolder(tmp_path)
    shutil.copy(run.database, copy.database)
    recorder = Recorder(copy, tensorboard=True)
    recorder.look()
    recorder.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    points = read_points(copy.metrics)
    wanted = {
        (f"{point.policy}/eval/{name}" if point.kind == "eval" else f"{point.policy}/{name}", point.x): value
        for point in points
        for name, value in point.metrics.items()
        if value is not None
    }
    found = {(tag, each.step): each.value for tag in board.Tags()["scalars"] for each in board.Scalars(tag)}
    assert len(wanted) > 40 and ("main/eval/score", 0) in wanted
    assert "main/reward/train" in {tag for tag, _ in wanted}
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key


def test_f108_an_undone_step_is_superseded(run: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path)
    for name in ("metrics", "trace"):
        getattr(copy, name).write_bytes(getattr(run, name).read_bytes())
    with sqlite3.connect(run.database) as source, sqlite3.connect(copy.database) as target:
        source.backup(target)
        batch = target.execute("SELECT id FROM batches WHERE state = 'committed' AND version = 2").fetchone()[0]
        target.execute("INSERT INTO events (at, kind, policy, batch) VALUES (99, 'undone', 'main', ?)", (batch,))
        target.execute("DELETE FROM batches WHERE version >= 2")
    source.close()
    target.close()
    recorder = Recorder(copy)
    recorder.look()
    recorder.close()
    assert [x for x, _ in series(read_points(copy.metrics), "step", "step/trained_tokens")] == [1, 2]
    assert len(read_points(copy.metrics)) == len(read_points(run.metrics))


def test_a_torn_trace_is_cut_at_its_last_whole_line(run: RunFolder, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(run.trace.read_bytes() + b'{"id": 99999, "ki')
    assert last_event(trace) == last_event(run.trace)
    assert trace.read_bytes() == run.trace.read_bytes()
    assert last_event(tmp_path / "none.jsonl") == 0


def test_export_is_the_published_version(run: RunFolder, resolved: Resolved, tmp_path: Path) -> None:
    manifest = export_version(run, resolved.recipe, policy="main", version=None, target=tmp_path / "new")
    assert manifest.version == 4
    assert manifest_of_folder(tmp_path / "new").digest == manifest.digest
    first = export_version(run, resolved.recipe, policy="main", version=0, target=tmp_path / "first")
    assert manifest_of_folder(tmp_path / "first").digest == first.digest != manifest.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "new"]
    with pytest.raises(NotFound, match="no version 77"):
        export_version(run, resolved.recipe, policy="main", version=77, target=tmp_path / "none")
    with pytest.raises(ConfigError, match="not empty"):
        export_version(run, resolved.recipe, policy="main", version=0, target=tmp_path / "new")


def test_prometheus_shows_dataflow_s_counts() -> None:
    status = StatusReply(
        run="r",
        state="running",
        error=None,
        now_s=1.0,
        policies=(
            PolicyStatus(
                policy="main", trainable=True, version=3, steps=9, groups={"trained": 6, "dropped/zero_variance": 2}
            ),
        ),
        components=(
            ComponentStatus(
                component="rollout",
                name="a",
                state="alive",
                heard_s=0.1,
                report=ComponentReport(metrics={"token/sampled": 70.0, "wait_s/lease": 1.5}),
            ),
        ),
        episodes={"done": 30, "pending": 2},
        counters={"fenced": 4.0, "failed/infra": 1.0, "loop_lag_s": 0.01},
    )
    registry = Registry()
    fill_registry(registry, status)
    fill_registry(registry, status)
    shown = registry.snapshot()
    assert shown["episode/admitted"] == 32
    assert shown["group/dropped/zero_variance"] == shown["group/dropped"] == 2
    assert shown["step/committed"] == 3
    assert shown["token/sampled"] == 70.0
    assert shown["wait_s/lease"] == 1.5
    assert shown["refused/fenced"] == 4.0
    assert "astraflow_group_dropped_zero_variance_total 2" in registry.prometheus()


def test_the_doctor_reads_what_a_run_wrote(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards are a hash: nothing is learnt, and nothing is broken. Engine and trainer agree in fp32."""
    (symptoms,) = symptoms_of(run)
    assert (symptoms.policy, symptoms.steps, symptoms.batches) == ("main", 4, 4)
    assert symptoms.groups >= 8 and symptoms.trained_tokens > 0
    diagnosis = diagnose(symptoms)
    states = {finding.name: finding.state for finding in diagnosis.findings}
    assert states["log-probs"] is State.NORMAL and max(symptoms.series["logprob/gap"]) < 1e-4
    assert {states[name] for name in ("episodes", "steps", "mask", "clip", "entropy", "update")} == {State.NORMAL}
    assert main(["doctor", str(run.path), "--json"]) == (1 if diagnosis.state is State.BROKEN else 0)
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "finished" and found["policies"][0]["verdict"] == diagnosis.verdict
