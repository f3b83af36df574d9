"""Reward rules of the workflows with several agents, by table. Right is ``2``, everything else is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import astraflow.workflows
from astraflow.errors import ConfigError
from astraflow.rewards.exact import Exact
from astraflow.rollout.settings import TreeLimits
from astraflow.testing.check_workflow import check_workflow
from astraflow.types import Outcome, Task
from astraflow.workflows.debate import Debate
from astraflow.workflows.plan_and_solve import PlanAndSolve
from astraflow.workflows.small_large_router import SmallLargeRouter
from astraflow.workflows.solve_and_select import SolveAndSelect
from astraflow.workflows.solve_and_verify import SolveAndVerify
from astraflow.workflows.solve_verify_retry import SolveVerifyRetry
from astraflow.workflows.spawn import Spawn
from tests.unit.dataflow_pure.build import settled
from tests.unit.workflows.scripted import TASK, played

SEVEN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "solve_and_verify": (SolveAndVerify(Exact(), rounds=3), ("solver", "verifier")),
    "solve_verify_retry": (SolveVerifyRetry(Exact()), ("solver", "verifier")),
    "solve_and_select": (SolveAndSelect(Exact()), ("solver", "selector")),
    "plan_and_solve": (PlanAndSolve(Exact()), ("planner", "solver")),
    "debate": (Debate(Exact(), debaters=3, rounds=2), ("debater",)),
    "small_large_router": (SmallLargeRouter(Exact()), ("router", "small", "large")),
    "spawn": (Spawn(Exact()), ("root", "worker")),
}


@pytest.mark.parametrize("name", SEVEN)
def test_it_keeps_the_promises_of_a_workflow(name: str) -> None:
    """On the fake engine: recorded as sampled, no reward for a broken engine, a cut reply ends it, seeds decide."""
    workflow, roles = SEVEN[name]
    check_workflow(workflow, TASK, roles=roles)


@pytest.mark.parametrize("name", SEVEN)
def test_it_can_be_read_in_one_sitting(name: str) -> None:
    path = Path(next(iter(astraflow.workflows.__path__))) / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 100


# ── solve_and_verify ──


@pytest.mark.parametrize(
    ("answer", "verdict", "solver", "verifier"),
    [
        ("2", "correct", 1.0, 1.0),
        ("2", "wrong", 1.0, 0.0),
        ("3", "correct", 0.0, 0.0),
        ("3", "wrong", 0.0, 1.0),
        ("2", "no idea", 1.0, 0.0),
        ("3", "no idea", 0.0, 0.0),
        ("2", "correct, or rather wrong", 1.0, 0.0),
        ("3", "correct, or rather wrong", 0.0, 1.0),
        ("2", "It is CORRECT.", 1.0, 1.0),
        ("3", "incorrect", 0.0, 0.0),
        ("2", "incorrect", 1.0, 0.0),
    ],
)
def test_f101_the_verifier_is_paid_for_the_truth_and_the_solver_never_for_the_verdict(
    answer: str, verdict: str, solver: float, verifier: float
) -> None:
    found = played(SolveAndVerify(Exact()), {"solver": [answer], "verifier": [verdict]})
    assert (found.rewards("solver"), found.rewards("verifier")) == ([solver], [verifier])
    assert found.episode.score == solver


@pytest.mark.parametrize(
    ("answers", "verdicts", "solver", "verifier"),
    [
        (["3", "2"], ["wrong", "correct"], [0.0, 1.0], [1.0, 1.0]),
        (["2", "3", "3"], ["wrong", "wrong", "wrong"], [1.0, 0.0, 0.0], [0.0, 1.0, 1.0]),
        (["3"], ["correct"], [0.0], [0.0]),
        (["3", "4", "2"], ["hm", "wrong", "wrong"], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]),
    ],
)
def test_each_round_is_judged_by_its_own_answer_and_the_last_one_counts(
    answers: list[str], verdicts: list[str], solver: list[float], verifier: list[float]
) -> None:
    found = played(SolveAndVerify(Exact(), rounds=3), {"solver": answers, "verifier": verdicts})
    assert (found.rewards("solver"), found.rewards("verifier")) == (solver, verifier)
    assert found.episode.score == solver[-1]
    assert found.keys("solver") == ["solver/0", "solver/1", "solver/2"][: len(answers)]
    judged = ["right" if answer == "2" else "wrong" for answer in answers]
    assert found.keys("verifier") == [f"verifier/{number}/{each}" for number, each in enumerate(judged)]


def test_a_verifier_that_always_says_the_same_learns_nothing_from_how_good_answers_are() -> None:
    """Compared over all answers, saying "wrong" would pay the more the worse the solver is."""
    answers = ["2", "3", "3", "3"]
    played_ = [played(SolveAndVerify(Exact()), {"solver": [answer], "verifier": ["wrong"]}) for answer in answers]
    verdicts = settled([each.episode for each in played_], policies={"verifier": True, "solver": True})
    assert not verdicts["verifier"].advantages.any()
    assert verdicts["solver"].advantages.any()


def test_a_further_round_sees_the_critique_and_continues_the_solver_s_sample() -> None:
    found = played(SolveAndVerify(Exact(), rounds=2), {"solver": ["3", "2"], "verifier": ["wrong: odd", "correct"]})
    assert "wrong: odd" in found.prompts["solver"][1]
    assert found.prompts["solver"][1].startswith(found.prompts["solver"][0] + "3")
    assert [len(each.samples) for each in found.episode.trajectories] == [1, 2]
    assert "\n3\n" in found.prompts["verifier"][0] and "wrong: odd" not in found.prompts["verifier"][1]


# ── solve_verify_retry ──


@pytest.mark.parametrize(
    ("answers", "verdict", "solver", "verifier", "score"),
    [
        (["2"], "correct", [1.0], 1.0, 1.0),
        (["3"], "correct", [0.0], 0.0, 0.0),
        (["3", "2"], "wrong", [0.0, 1.0], 1.0, 1.0),
        (["3", "4"], "wrong", [0.0, 0.0], 1.0, 0.0),
        (["2", "3"], "wrong", [1.0, 0.0], 0.0, 0.0),
        (["2", "2"], "hm", [1.0, 1.0], 0.0, 1.0),
    ],
)
def test_the_critique_goes_into_one_retry(
    answers: list[str], verdict: str, solver: list[float], verifier: float, score: float
) -> None:
    found = played(SolveVerifyRetry(Exact()), {"solver": answers, "verifier": [verdict]})
    assert (found.rewards("solver"), found.rewards("verifier")) == (solver, [verifier])
    assert found.episode.score == score
    assert found.keys("solver") == ["", "solver/retry"][: len(answers)]
    assert found.keys("verifier") == ["verifier/right" if answers[0] == "2" else "verifier/wrong"]
    if len(answers) > 1:
        assert f"\n{verdict}\n" in found.prompts["solver"][1]


# ── solve_and_select ──


@pytest.mark.parametrize(
    ("attempts", "pick", "solver", "selector", "score"),
    [
        (["2", "3"], "1", [1.0, 0.0], 1.0, 1.0),
        (["2", "3"], "2", [1.0, 0.0], 0.0, 0.0),
        (["3", "2"], "2", [0.0, 1.0], 1.0, 1.0),
        (["3", "2"], "1", [0.0, 1.0], 0.0, 0.0),
        (["2", "2"], "1", [1.0, 1.0], 0.5, 1.0),
        (["2", "2"], "2", [1.0, 1.0], 0.5, 1.0),
        (["3", "4"], "2", [0.0, 0.0], 0.5, 0.0),
        (["2", "3"], "not 2 but 1", [1.0, 0.0], 1.0, 1.0),
        (["2", "3"], "12", [1.0, 0.0], 0.0, 0.0),
        (["2", "2"], "either", [1.0, 1.0], 0.0, 0.0),
    ],
)
def test_the_selector_is_paid_for_the_right_one_where_there_is_a_choice(
    attempts: list[str], pick: str, solver: list[float], selector: float, score: float
) -> None:
    found = played(SolveAndSelect(Exact()), {"solver": attempts, "selector": [pick]})
    assert (found.rewards("solver"), found.rewards("selector")) == (solver, [selector])
    assert found.episode.score == score


def test_attempts_are_two_samples_of_one_prompt() -> None:
    found = played(SolveAndSelect(Exact()), {"solver": ["2", "3"], "selector": ["1"]})
    assert found.prompts["solver"][0] == found.prompts["solver"][1]
    assert len(found.episode.trajectories[0].samples) == 2


# ── plan_and_solve ──


@pytest.mark.parametrize(("answer", "reward"), [("2", 1.0), ("3", 0.0)])
def test_planner_and_solver_share_the_answer_s_grade(answer: str, reward: float) -> None:
    found = played(PlanAndSolve(Exact()), {"planner": ["add them"], "solver": [answer]})
    assert (found.rewards("planner"), found.rewards("solver"), found.episode.score) == ([reward], [reward], reward)
    assert "add them" in found.prompts["solver"][0]


# ── debate ──


@pytest.mark.parametrize(
    ("first", "second", "score"),
    [
        (["2", "3", "3"], ["2", "2", "3"], 1.0),
        (["2", "2", "2"], ["3", "2", "3"], 0.0),
        (["2", "3", "4"], ["2", "3", "4"], 1.0),
        (["3", "2", "4"], ["3", "2", "4"], 0.0),
    ],
)
def test_each_answer_of_a_debate_has_its_own_grade_and_the_majority_is_the_answer(
    first: list[str], second: list[str], score: float
) -> None:
    found = played(Debate(Exact(), debaters=3), {"debater": [*first, *second]})
    assert found.rewards("debater") == [float(text == "2") for text in (*first, *second)]
    assert found.keys("debater") == ["debater/0"] * 3 + ["debater/1"] * 3
    assert found.episode.score == score
    assert [each.turns[0].parent for each in found.episode.trajectories] == [None] * 3


def test_debaters_read_the_others_and_not_themselves() -> None:
    found = played(Debate(Exact()), {"debater": ["2", "3", "2", "2"]})
    assert "Others answered:\n3\n" in found.prompts["debater"][2]
    assert "Others answered:\n2\n" in found.prompts["debater"][3]


# ── small_large_router ──


@pytest.mark.parametrize(
    ("route", "small", "large", "router", "score"),
    [
        ("small", "2", "2", 1.0, 1.0),
        ("large", "2", "2", 0.0, 1.0),
        ("small", "3", "2", 0.0, 0.0),
        ("large", "3", "2", 1.0, 1.0),
        ("small", "2", "3", 1.0, 1.0),
        ("large", "2", "3", 0.0, 0.0),
        ("small", "3", "3", 0.5, 0.0),
        ("large", "3", "3", 0.5, 0.0),
        ("Large!", "3", "2", 1.0, 1.0),
        ("the largest", "3", "2", 0.0, 0.0),
        ("the largest", "3", "3", 0.0, 0.0),
    ],
)
def test_the_router_is_paid_for_the_cheapest_that_is_right(
    route: str, small: str, large: str, router: float, score: float
) -> None:
    found = played(SmallLargeRouter(Exact()), {"router": [route], "small": [small], "large": [large]})
    assert (found.rewards("router"), found.episode.score) == ([router], score)
    assert (found.rewards("small"), found.rewards("large")) == ([float(small == "2")], [float(large == "2")])


def test_a_router_of_three_has_an_order() -> None:
    workflow = SmallLargeRouter(Exact(), solvers=("a", "b", "c"), words=("x", "y", "z"))
    for said, reward in (("x", 0.0), ("y", 1.0), ("z", 0.0)):
        found = played(workflow, {"router": [said], "a": ["3"], "b": ["2"], "c": ["2"]})
        assert found.rewards("router") == [reward]


# ── spawn ──


def test_a_root_that_answers_needs_nobody() -> None:
    found = played(Spawn(Exact()), {"root": ["2"], "worker": []})
    assert (found.rewards("root"), found.keys("root"), found.episode.score) == ([1.0], [""], 1.0)


def test_work_is_split_in_a_tree_and_everybody_shares_the_root_s_grade() -> None:
    says = {"root": ["ask: one\nask: two", "2"], "worker": ["ask: half", "1", "1/2", "1"]}
    found = played(Spawn(Exact()), says)
    assert found.rewards("root") == [1.0, 1.0]
    assert found.rewards("worker") == [1.0] * 4
    assert found.keys("worker") == ["worker/1", "worker/1", "worker/2", "worker/1"]
    assert "came back:\n1\n1\n" in found.prompts["root"][1]
    by_agent = {each.agent: each.turns[0].parent for each in found.episode.trajectories}
    assert by_agent == {"root": None, "worker": 0, "worker#2": 0, "worker#3": 1}


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (TreeLimits(depth=0), {"root": ["ask: x\nask: y", "2"], "worker": []}),
        (TreeLimits(agents=1), {"root": ["ask: x\nask: y", "2"], "worker": []}),
        (TreeLimits(children=1), {"root": ["ask: x\nask: y", "2"], "worker": ["1"]}),
        (TreeLimits(depth=1), {"root": ["ask: x", "2"], "worker": ["ask: x", "1"]}),
        (TreeLimits(agents=2), {"root": ["ask: x\nask: y", "2"], "worker": ["ask: z", "1"]}),
    ],
)
def test_who_may_spawn_no_more_answers_alone(tree: TreeLimits, says: dict[str, list[str]]) -> None:
    found = played(Spawn(Exact()), says, tree=tree)
    assert (found.episode.outcome, found.episode.score) == (Outcome.COMPLETED, 1.0)
    refused = [prompt for prompts in found.prompts.values() for prompt in prompts if "Nobody else can help" in prompt]
    assert bool(refused) == (tree != TreeLimits(children=1))


# ── all of them ──


def no_opinion(text: str, task: Task) -> float | None:
    return None


@pytest.mark.parametrize(
    ("workflow", "says"),
    [
        (SolveAndVerify(no_opinion), {"solver": ["2"], "verifier": ["correct"]}),
        (SolveVerifyRetry(no_opinion), {"solver": ["2"], "verifier": ["correct"]}),
        (SolveAndSelect(no_opinion), {"solver": ["2", "2"], "selector": ["1"]}),
        (PlanAndSolve(no_opinion), {"planner": ["p"], "solver": ["2"]}),
        (Debate(no_opinion, rounds=1), {"debater": ["2", "3"]}),
        (SmallLargeRouter(no_opinion), {"router": ["small"], "small": ["2"], "large": ["3"]}),
        (Spawn(no_opinion), {"root": ["2"], "worker": []}),
    ],
)
def test_f12_what_nobody_can_grade_is_nobody_s_zero(workflow: Any, says: dict[str, list[str]]) -> None:
    found = played(workflow, says)
    assert {turn.reward for each in found.episode.trajectories for turn in each.turns} == {None}
    assert found.episode.score is None


def test_f13_a_grader_that_raises_fails_the_episode_and_pays_nobody() -> None:
    def down(text: str, task: Task) -> float:
        raise ConnectionError("503")

    with pytest.raises(AssertionError, match="ConnectionError: 503") as found:
        played(SolveAndVerify(down), {"solver": ["2"], "verifier": ["correct"]})
    assert "down raised" in str(found.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SolveAndVerify(Exact(), rounds=0), "SolveAndVerify.rounds must be at least 1, found 0"),
        (lambda: SolveAndVerify(Exact(), words=("y", "Y")), "SolveAndVerify.words must be two different words"),
        (lambda: SolveAndSelect(Exact(), words=("", "2")), "SolveAndSelect.words must be two different words"),
        (lambda: Debate(Exact(), debaters=1), "Debate.debaters must be at least 2, found 1"),
        (lambda: Debate(Exact(), rounds=0), "Debate.rounds must be at least 1, found 0"),
        (lambda: SmallLargeRouter(Exact(), solvers=("one",)), "takes two solvers or more"),
        (lambda: SmallLargeRouter(Exact(), words=("a", "A")), "each with a word"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
