"""``astraflow ledger RUN --verify``: what the algorithms know is made again from the decisions; each lie is named."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.dataflow.ledger import StoredState
from astraflow.dataflow.tally import state_digest
from astraflow.errors import ConfigError
from astraflow.run.config import resolve
from astraflow.run.layout import RunFolder, write_json
from astraflow.run.ledger import verification
from astraflow.run.replay.rederive import Rederived, rederived, require_repeatable
from astraflow.run.spec import run_spec
from astraflow.run.verbs import ledger
from astraflow.wire.codec import decode, encode
from tests.unit.dataflow.rig import Rig
from tests.unit.run.test_replay import Player, record_of, spec_of, stored_state

State = dict[str, Any]
NAME = "dots"


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(spec_of(NAME, max_staleness=2)) as played:
        Player(played, 1).play(120)
        yield played


def again(rig: Rig, stored: bytes) -> Rederived:
    return rederived(spec_of(NAME, max_staleness=2), record_of(rig), stored)


def lied(stored: bytes, tell: Callable[[State], None]) -> bytes:
    state = decode(stored, StoredState)
    tell(state.state["curate"]["learned"])
    return encode(state)


def test_what_is_stored_is_what_the_decisions_make_of_it(rig: Rig) -> None:
    found = again(rig, stored_state(rig))
    assert found.differences == () == found.not_compared
    assert found.decisions > rig.db.number("SELECT COUNT(*) FROM groups"), "each was chosen, most were judged too"


def another_value(learned: State) -> None:
    values = learned["measured"]["value"].copy()
    values[0] = np.nextafter(values[0], 1.0)
    learned["measured"]["value"] = values


@pytest.mark.parametrize(
    ("tell", "words"),
    [
        (lambda s: s.update(since=s["since"] + 1), "since is 2, the decisions make it 1"),
        (lambda s: s.update(since=float(s["since"])), "since is 1.0, the decisions make it 1"),
        (another_value, r"measured\.value is float64\[10\] \[0\.6.*, the decisions make it float64\[10\] \[0\.6.*"),
        (lambda s: s["rewards"]["seen"].pop(), r"rewards\.seen\.1 is absent, the decisions make it 1\.0"),
        (lambda s: s.update(never=[]), r"never is \[\], the decisions make it absent"),
    ],
)
def test_what_no_decision_made_is_named_with_its_place(rig: Rig, tell: Callable[[State], None], words: str) -> None:
    (line,) = again(rig, lied(stored_state(rig), tell)).differences
    assert re.fullmatch(rf"state of the algorithms: curate\.learned\.{words}", line)


def test_other_decisions_than_the_algorithms_make_are_named(rig: Rig) -> None:
    """By the same algorithms with another setting."""
    found = rederived(spec_of("prioritised, fifo", max_staleness=2), record_of(rig), stored_state(rig))
    assert any(line.startswith("group 1") for line in found.differences)


def test_where_bytes_are_pruned_nothing_is_said_that_is_not_known(rig: Rig) -> None:
    """Scores are not all that an algorithm may go by; what agrees all the same is said to."""
    record = record_of(rig)
    record.rebuilt.add(1)
    wrong = lied(stored_state(rig), lambda s: s.update(since=9))
    found = rederived(spec_of(NAME, max_staleness=2), record, wrong)
    assert found.differences == ()
    assert "the bytes of 1 groups are pruned" in found.not_compared[0] and "since is 9" in found.not_compared[0]
    assert rederived(spec_of(NAME, max_staleness=2), record, stored_state(rig)).not_compared == ()


@pytest.mark.parametrize("kind", ["cast", "frozen", "unfrozen", "tasks_changed"])
def test_a_past_that_the_recipe_does_not_tell_is_not_asked_again(kind: str) -> None:
    with Rig(spec_of(NAME)) as rig:
        rig.play_groups(1, size=3)
        require_repeatable(record_of(rig))
        with rig.db.transaction():
            rig.db.event(1.0, kind, policy="p")
        with pytest.raises(ConfigError, match="cannot be asked again"):
            require_repeatable(record_of(rig))


# ── of a run folder, by the command ──

RECIPE = """
from astraflow.rollout.workflow import Reward
from astraflow.run.recipe import Policy, Recipe
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.generated import GeneratedTasks
from astraflow.types import Sampling, Task


async def play(task, agents):
    return Reward(1.0)


def recipe():
    model = TinyModel(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, context=32, characters="01")
    tasks = GeneratedTasks("digits", lambda index: Task(key=str(index)))
    main = Policy(model=model, groups_per_batch=2)
    told = Sampling(max_tokens=2)
    policies = {"main": main}
    return Recipe(name="made", policies=policies, workflow=play, tasks=tasks, group_size=2, steps=9, sampling=told)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    source = tmp_path / "made_for_verify.py"
    source.write_text(RECIPE)
    resolved = resolve(str(source))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with Rig(run_spec(resolved, "run"), folder=folder.path) as rig:
        epoch = rig.resume("main")
        for _ in range(3):
            rig.step(epoch, "main")
    write_json(folder.config, resolved.as_file())
    return folder


def test_verify_lets_the_algorithms_decide_again(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.main(ledger.Args(run=run.path, verify=True)) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("verified: ") and line.endswith(" rows, 15 decisions made again tell the same")


def test_verify_names_a_lie_that_tables_and_events_agree_about(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row and the digest in its event are both rewritten: only the decisions know better."""
    db = sqlite3.connect(run.database)
    (stored,) = db.execute("SELECT state FROM algorithms").fetchone()
    state = decode(stored, StoredState)
    state.state["curate"]["position"] += 1
    wrong = encode(state)
    db.execute("UPDATE algorithms SET state = ?", (wrong,))
    last = "SELECT MAX(id) FROM events WHERE kind = 'algorithms'"
    told = json.dumps({"digest": state_digest(wrong)})
    db.execute(f"UPDATE events SET data = ? WHERE id = ({last})", (told,))
    db.commit()
    db.close()
    assert ledger.main(ledger.Args(run=run.path, verify=True)) == 1
    first, verdict = capsys.readouterr().out.splitlines()
    assert first == "state of the algorithms: curate.position is 7, the decisions make it 6"
    assert verdict.startswith("NOT verified: ")


def test_with_other_sources_it_is_not_compared_and_no_fault(run: RunFolder) -> None:
    source = run.path.parent / "made_for_verify.py"
    source.write_text(RECIPE.replace("Reward(1.0)", "Reward(0.5)"))
    found = verification(run)
    assert found["verified"] and found["decisions"] == 0
    assert "was started with other sources of the recipe or workflow" in found["not_compared"][0]


def test_of_tables_that_are_not_what_events_tell_no_past_is_told(run: RunFolder) -> None:
    db = sqlite3.connect(run.database)
    db.execute("DELETE FROM groups WHERE id = 2")
    db.commit()
    db.close()
    found = verification(run)
    assert not found["verified"] and found["decisions"] == 0
    assert found["not_compared"][-1].startswith("state of the algorithms, made again from the decisions: where tables")
