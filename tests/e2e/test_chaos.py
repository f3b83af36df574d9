"""Faults on real processes: nothing lost, nothing trained twice; and the bench is not blind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.run.chaos.plan import BEFORE_COMMIT, Component, Fault, Kind
from astraflow.run.chaos.session import session
from tests.e2e.conftest import Cli

pytestmark = pytest.mark.slow
CLEAN = (
    "lost",
    "trained_twice",
    "only_in_history",
    "ledger_difference",
    "not_recovered",
    "not_refused",
    "unexpected_deaths",
)


@pytest.mark.timeout(900)
def test_six_faults_on_two_policies(cli: Cli, repo: Path, tmp_path: Path) -> None:
    """One line of JSON with everything that docs/benchmarks.md explains."""
    done = cli(
        "bench", "chaos", "--kills", "6", "--seed", "4", "--json", "--run-dir", tmp_path / "chaos", timeout=880.0
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {name: found[name] for name in CLEAN} == dict.fromkeys(CLEAN, 0), found["problems"]
    assert found["kills"] == 6 and found["failed"] is None
    assert set(found["by_component"]) == {"rollout", "trainer", "dataflow"}
    assert found["recovery_s"].keys() == {"rollout", "trainer", "dataflow"}
    assert found["steps"].keys() == {"solver", "verifier"} and min(found["steps"].values()) >= 10
    explained = (repo / "docs/benchmarks.md").read_text()
    assert not [name for name in found if f"`{name}`" not in explained]


def fault(number: int, kind: Kind, point: str = "") -> Fault:
    return Fault(
        number=number, component=Component.TRAINER, kind=kind, point=point, gap_s=2.0, overlaps=False, pick=0.0
    )


def without(
    what: str, plan: list[Fault], recipe: Path, folder: Path, cache: Path, *, checkpoint_every: int = 10
) -> dict[str, Any]:
    """The figures of a run whose every process has that guarantee switched off."""
    lines = f"\nfrom astraflow.testing.sabotage import switch_off\n\nswitch_off({what!r})\n"
    recipe.write_text(recipe.read_text() + (lines if what else ""))
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731 - shown where the test fails
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASTRAFLOW_CACHE", str(cache))
        overrides = [f"policies.main.trainer.checkpoint_every={checkpoint_every}"]
        return session(str(recipe), plan=plan, overrides=overrides, folder=folder, say=say)


UNDOES = [fault(0, Kind.POINT, "trainer.before_checkpoint"), fault(1, Kind.POINT, "trainer.before_checkpoint")]
TWO_TRAINERS = [fault(0, Kind.SECOND, BEFORE_COMMIT)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("what", "plan", "checkpoint_every"), [("uncommit", UNDOES, 10), ("fencing", TWO_TRAINERS, 2)])
def test_a_guarantee_that_is_off_is_found(
    what: str,
    plan: list[Fault],
    checkpoint_every: int,
    write_recipe: Callable[..., Path],
    tmp_path: Path,
    cache: Path,
) -> None:
    """Killed between a commit and its checkpoint, a trainer must give steps back; replaced while it held a step, it
    must be refused, or the step that its successor made instead is in no weights that survive."""
    found = without(what, plan, write_recipe(), tmp_path / what, cache, checkpoint_every=checkpoint_every)
    shown = {name: value for name, value in found.items() if isinstance(value, int)}
    assert found["lost"] + found["trained_twice"] > 0, shown
    assert found["missed_points"] == 0, shown


@pytest.mark.timeout(900)
def test_the_same_faults_with_every_guarantee_on(
    write_recipe: Callable[..., Path], tmp_path: Path, cache: Path
) -> None:
    """A second trainer takes over from a stopped one, which is refused; killed before a checkpoint, it undoes steps."""
    found = without("", [*TWO_TRAINERS, *UNDOES], write_recipe(), tmp_path / "on", cache)
    assert {name: found[name] for name in CLEAN} == dict.fromkeys(CLEAN, 0), found["problems"]
    assert found["undone_steps"] >= 10
    assert found["failed"] is None
