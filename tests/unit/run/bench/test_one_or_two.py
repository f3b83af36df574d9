"""One policy against two: they differ in who plays the roles and in nothing else."""

from __future__ import annotations

import dataclasses

import pytest
from benchmarks.one_or_two import ARMS, LR, one, recipe, table


def test_the_arms_differ_in_their_policies_alone() -> None:
    alone, both = one(), recipe()
    assert alone.casting == ARMS["one"] and both.casting == ARMS["two"]
    assert set(alone.policies) == {"main"} and set(both.policies) == {"solver", "verifier"}
    settings = [policy for made in (alone, both) for policy in made.policies.values()]
    assert all(each == settings[0] for each in settings) and settings[0].trainer.lr == LR
    same = {field.name for field in dataclasses.fields(alone)} - {"policies", "roles", "workflow", "tasks", "eval"}
    assert all(getattr(alone, name) == getattr(both, name) for name in same)


def test_the_table_has_mean_and_deviation_of_each_arm() -> None:
    def run(arm: str, after: float) -> dict[str, object]:
        return {"arm": arm, "before": {"solver": 0.5, "verifier": 0.5}, "after": {"solver": after, "verifier": 1.0}}

    lines = table([run("one", 0.25), run("one", 0.75), run("two", 0.5)]).splitlines()
    assert lines[2] == "| one | 2 | 0.500 ± 0.000 | 0.500 ± 0.354 | 0.500 ± 0.000 | 1.000 ± 0.000 |"
    assert lines[3] == "| two | 1 | 0.500 | 0.500 | 0.500 | 1.000 |"


@pytest.mark.parametrize("arm", list(ARMS))
def test_every_role_has_a_policy(arm: str) -> None:
    assert set(ARMS[arm]) == {"solver", "verifier"}
