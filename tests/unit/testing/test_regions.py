"""Who runs processes on several hosts says which of them failed and what did not come; here all hosts are this one."""

from __future__ import annotations

import importlib.util
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.components import ROLLOUT
from astraflow.errors import RunFailed, TimedOut
from astraflow.run import child
from astraflow.testing import hosts, regions
from astraflow.testing.regions import Regions
from astraflow.wire.codec import encode
from astraflow.wire.messages import ComponentReport


class Here:
    """Hosts without namespaces."""

    name = "home"
    home_address = "127.0.0.1"

    def __init__(self) -> None:
        self.home = self

    def command(self, words: Sequence[str]) -> list[str]:
        return list(words)


def made(tmp_path: Path) -> Regions:
    hosts: Any = Here()
    found = Regions(hosts, tmp_path / "recipe.py", tmp_path / "logs")
    found.run_dir.mkdir(parents=True)
    return found


def test_a_process_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    assert regions.LIFELINE == child.LIFELINE  # else they would outlive whoever started them
    with made(tmp_path) as run, pytest.raises(RunFailed, match=r"dataflow ended with \d+: .*recipe.py"):
        run.begin()


def test_what_does_not_come_in_time_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Regions, "_tokens", lambda _: {"worker": "t"})
    with made(tmp_path) as run:
        here: Any = Here()
        monkeypatch.setattr(here, "command", lambda _: ["sleep", "1000"])
        run.worker("w", here)
        monkeypatch.setattr(run, "version", lambda: 2)
        with pytest.raises(TimedOut, match=r"version 3 of recipe.py: not after 0 s; w go on, logs in .*logs"):
            run.reach(3, 0.0)
        run.reach(2, 0.0)
        (process,) = run._processes.values()
    assert process.returncode not in (None, 0)


def test_a_worker_is_met_when_it_serves_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "START_S", 0.0)
    with made(tmp_path) as run:
        with closing(sqlite3.connect(run.run_dir / "run.db")) as database, database:
            database.execute("CREATE TABLE components (component, name, report)")
            for name, versions in (("eu", {"main": 0}), ("us", {})):
                report = encode(ComponentReport(versions=versions))
                database.execute("INSERT INTO components VALUES (?, ?, ?)", (ROLLOUT, name, report))
            database.execute("INSERT INTO components VALUES (?, 'new', NULL)", (ROLLOUT,))
            database.execute("CREATE TABLE episodes (worker, state)")
            states = [("us", "done"), ("eu", "done"), ("us", "done"), ("us", "leased"), ("far", "given_up")]
            database.executemany("INSERT INTO episodes VALUES (?, ?)", states)
        assert run.played() == {"eu": 1, "us": 2}
        run.meet("eu")
        for missing in ("us", "new"):
            with pytest.raises(TimedOut, match=f"eu, {missing} serve: not after"):
                run.meet("eu", missing)
        monkeypatch.setattr(run, "_has_ended", lambda: True)
        run.meet("eu")
        with pytest.raises(RunFailed, match="us serve: the run ended before"):
            run.meet("us")


def the_example(repo: Path) -> Any:
    spec = importlib.util.spec_from_file_location("cross_region", repo / "examples" / "cross_region.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_the_example_of_regions_says_what_it_needs(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = the_example(repo)
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["cross_region.py"])
    with pytest.raises(SystemExit, match="cannot run here: it needs root, for network namespaces"):
        example.main()
    assert example.recipe().regions == ("home", "eu", "us")


@pytest.mark.parametrize(
    ("given", "ends", "words"),
    [
        (("--steps", "-3"), None, "--steps must be 1 or more, found -3"),
        (("--cut-s", "nan"), None, "--cut-s must be in [0, 900] s, found nan"),
        ((), RunFailed("trainer-main ended with 1"), "cross_region.py: trainer-main ended with 1"),
        ((), KeyboardInterrupt(), "cross_region.py: interrupted"),
    ],
)
def test_the_example_of_regions_ends_with_a_sentence(
    repo: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: Sequence[str],
    ends: BaseException | None,
    words: str,
) -> None:
    example = the_example(repo)

    def play(*_: object) -> None:
        assert ends is not None, "refused before anything starts"
        raise ends

    monkeypatch.setattr(example, "missing", lambda: "")
    monkeypatch.setattr(example, "play", play)
    monkeypatch.setattr(sys, "argv", ["cross_region.py", *given])
    with pytest.raises(SystemExit) as caught:
        example.main()
    assert words in f"{capsys.readouterr().err}{caught.value}" and caught.value.code != 0
