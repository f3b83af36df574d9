"""The journey of an episode whose bytes are there, were pruned, or never were."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from astraflow.run.journey import journey_of, text_lines
from astraflow.run.layout import RunFolder, write_json
from astraflow.run.ledger import ledger_report
from astraflow.run.recipe import Recipe
from astraflow.run.verbs import ledger
from tests.unit.dataflow.rig import Rig, make_spec


def pruned_run(folder: Path) -> RunFolder:
    """Groups 1 and 2 are pruned, 3 and 4 are there, 5 is open."""
    with Rig(make_spec(steps=5, max_staleness=0), folder=folder) as rig:
        epoch = rig.resume()
        rig.step(epoch)
        rig.step(epoch, oldest=1)
        rig.advance(1.0)
        rig.leases(1)
    return RunFolder(folder)


def test_a_pruned_episode_says_so_and_what_is_still_known(tmp_path: Path, recipe_with: Callable[..., Recipe]) -> None:
    journey = journey_of(pruned_run(tmp_path), 1, 1)
    assert journey.episode is None
    assert journey.pruned is not None and journey.pruned["episodes"] == 2
    assert [event["kind"] for event in journey.events][-1] == "pruned"
    lines = list(text_lines(journey, recipe_with(), colour=False))
    assert lines[0].startswith("pruned at 1.000 s with its group (2 episodes, ")
    assert lines[1] == "outcome completed, score 1, attempt 1 on w"
    assert lines[2] == "agent role_p (policy p), sample 0: 2 tokens sampled, oldest version 0, trained at age 0"
    told = json.loads(json.dumps(journey.as_json()))
    assert (told["episode"], told["pruned"]["episodes"], told["known"]["samples"][0]["state"]) == (None, 2, "trained")


def test_one_that_is_stored_and_one_that_never_was(tmp_path: Path, recipe_with: Callable[..., Recipe]) -> None:
    run = pruned_run(tmp_path)
    stored = journey_of(run, 3, 0)
    assert stored.episode is not None and stored.pruned is None
    lines = list(text_lines(journey_of(run, 5, 0), recipe_with(), colour=False))
    assert lines == ["nothing of it is stored: it is leased"]


def test_pruning_is_no_imbalance_of_the_ledger(tmp_path: Path) -> None:
    run = pruned_run(tmp_path)
    assert ledger_report(run)["difference"] == 0
    db = sqlite3.connect(run.database)
    db.execute("DELETE FROM payloads WHERE group_id = 3 AND idx = 0")
    db.commit()
    db.close()
    assert ledger_report(run)["difference"] == 1


def test_a_run_of_a_program_that_did_not_prune_can_be_read(tmp_path: Path) -> None:
    run = pruned_run(tmp_path)
    db = sqlite3.connect(run.database)
    db.execute("DROP TABLE pruned_groups")
    db.commit()
    db.close()
    assert journey_of(run, 3, 0).pruned is None
    assert ledger_report(run)["difference"] == 4


def test_ledger_verify_prints_each_difference_and_answers_by_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = pruned_run(tmp_path)
    write_json(run.config, {})
    assert ledger.main(ledger.Args(run=tmp_path, verify=True)) == 0
    first, verdict = capsys.readouterr().out.splitlines()
    assert verdict.startswith("verified: ") and verdict.endswith(" rows tell the same")
    assert first.startswith("not compared: state of the algorithms, made again from the decisions: ")
    assert first.endswith("config.json does not hold a run's config: recipe is missing; restore it from a copy")
    db = sqlite3.connect(run.database)
    db.execute("UPDATE episodes SET score = 0.5 WHERE group_id = 3 AND idx = 1")
    db.execute("UPDATE policies SET version = 7")
    db.commit()
    db.close()
    assert ledger.main(ledger.Args(run=tmp_path, verify=True)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "policy p: version is 7, the events tell 2",
        "episode 3/1: score is 0.5, the events tell 1.0",
    ]
    assert lines[2].endswith(": where tables are not what the events tell, no past can be repeated")
    assert lines[3].startswith("NOT verified: ") and lines[3].endswith(" rows, 2 differ")
    assert "0 decisions" not in " ".join(lines), "none was made, which is not none that differs"
    assert ledger.main(ledger.Args(run=tmp_path, verify=True, json=True)) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["verified"] is False
    assert told["differences"] == lines[:2]


def test_a_stored_episode_shows_its_tree_of_agents(
    tmp_path: Path, recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(make_spec(), folder=tmp_path) as rig:
        (lease,) = rig.leases(1)
        (root,) = rig.episode(lease).trajectories
        (turn,) = root.turns
        child = msgspec.structs.replace(
            root, agent="role_p#2", turns=(msgspec.structs.replace(turn, index=1, parent=0, reward=None),)
        )
        rig.submit(lease, episode=msgspec.structs.replace(rig.episode(lease), trajectories=(root, child)))
    journey = journey_of(RunFolder(tmp_path), lease.group, lease.index)
    decoder = SimpleNamespace(decode=lambda ids, **_: "\x1b[2Jword\n")
    monkeypatch.setattr("astraflow.run.journey.tokenizer_of", lambda recipe, policy: decoder)
    text = "\n".join(text_lines(journey, recipe_with(), colour=False))
    assert "⟦\\x1b[2Jword\n⟧" in text and "\x1b" not in text, "what a model says does nothing to a terminal"
    monkeypatch.setattr("astraflow.run.journey.tokenizer_of", lambda recipe, policy: None)
    lines = list(text_lines(journey, recipe_with(), colour=False))
    shown = [line for line in lines if line.startswith("agent")]
    assert shown == [
        "agent role_p (policy p, turn 0), sample 0, rewards by turn: 1",
        "agent role_p#2 (policy p, turn 1 below turn 0), sample 0, rewards by turn: not scored",
    ]
