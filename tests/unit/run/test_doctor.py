"""Each verdict of ``astraflow doctor`` on a run folder that was made for it, from the ledger to the exit code."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.algorithms.keep_subset import NOT_CHOSEN
from astraflow.errors import ConfigError
from astraflow.observe.doctor import Diagnosis, diagnose
from astraflow.observe.findings import Finding, State
from astraflow.run.cli import main
from astraflow.run.layout import RunFolder
from astraflow.run.symptoms import NO_SIGNAL, symptoms_of
from tests.unit.run.made_run import CRITIC, MadeRun


def looked_at(run: RunFolder) -> Diagnosis:
    (symptoms,) = symptoms_of(run)
    return diagnose(symptoms)


def finding(diagnosis: Diagnosis, name: str) -> Finding:
    return next(each for each in diagnosis.findings if each.name == name)


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "run")


def test_a_run_that_learns_is_normal_and_its_small_loss_is_explained(made: MadeRun) -> None:
    diagnosis = looked_at(made.healthy().close())
    assert diagnosis.state is State.NORMAL
    assert {each.state for each in diagnosis.findings} == {State.NORMAL}
    assert "a loss near 0 is what a group-relative loss is made to be" in diagnosis.verdict
    assert finding(diagnosis, "update").found == "loss 0.001, gradient 0.4, lr 1e-05"


def with_critic(made: MadeRun, count: int = 20, **metrics: float | None) -> MadeRun:
    return made.steps(count, **{**CRITIC, **metrics})


CRITICS = ("values", "errors", "critic")


def test_a_critic_that_learns_is_normal_and_one_that_is_not_there_is_no_finding(tmp_path: Path) -> None:
    diagnosis = looked_at(with_critic(MadeRun(tmp_path / "run")).groups(40).close())
    assert diagnosis.state is State.NORMAL
    assert {each.state for each in diagnosis.findings} == {State.NORMAL}
    assert [each.name for each in diagnosis.findings if each.name in CRITICS] == list(CRITICS)
    assert diagnosis.verdict == "main: nothing is broken", "a loss with a critic is not relative to a group"
    assert "what the critic misjudges" in finding(diagnosis, "update").normal
    assert finding(diagnosis, "errors").found == "squared error 0.4 of what saying 0 would make, value loss 0.1"
    without = looked_at(MadeRun(tmp_path / "without").healthy().close())
    assert not [each for each in without.findings if each.name in CRITICS]


NEW = {
    "critic__explained_variance": -3.0,
    "critic__value_deviation": 0.0,
    "critic__relative_error": 1.0,
}
"""As a critic begins: 0 everywhere, or noise."""


@pytest.mark.parametrize(("steps", "told"), [(1, False), (19, False), (20, True)])
def test_a_new_critic_is_given_time(made: MadeRun, steps: int, told: bool) -> None:
    diagnosis = looked_at(with_critic(made.groups(9), steps, **NEW).close())
    assert finding(diagnosis, "values").state is finding(diagnosis, "critic").state
    assert finding(diagnosis, "critic").state is (State.BROKEN if told else State.UNKNOWN)
    assert diagnosis.state is (State.BROKEN if told else State.NORMAL)


@pytest.mark.parametrize(
    ("count", "explained", "state"),
    [
        (20, 0.01, State.NORMAL),
        (20, 0.0, State.WATCH),
        (20, 3e-7, State.WATCH),
        (100, 3e-7, State.BROKEN),
        (99, -0.5, State.WATCH),
        (100, -0.5, State.BROKEN),
        (100, 0.0, State.BROKEN),
        (20, -1.0, State.BROKEN),
    ],
)
def test_a_critic_that_explains_nothing_for_long_is_broken(
    made: MadeRun, count: int, explained: float, state: State
) -> None:
    diagnosis = looked_at(with_critic(made.groups(9), count, critic__explained_variance=explained).close())
    assert finding(diagnosis, "critic").state is state


def test_a_critic_that_was_of_no_use_long_ago_and_is_now_is_normal(made: MadeRun) -> None:
    """As after pretraining that was too short: the mean of a hundred steps says nothing of now."""
    run = with_critic(with_critic(made.groups(9), 200, critic__explained_variance=-0.8), 20).close()
    assert finding(looked_at(run), "critic").state is State.NORMAL


def test_where_nearly_all_returns_are_alike_there_is_nothing_to_explain(made: MadeRun) -> None:
    """A policy that has learned its tasks: errors of a few hundredths, and as large as what is left to vary."""
    alike: dict[str, float] = {
        "critic__explained_variance": -4.0,
        "critic__value_deviation": 1e-5,
        "critic__return_deviation": 0.05,
        "critic__relative_error": 0.01,
    }
    diagnosis = looked_at(with_critic(made.groups(9), 120, **alike).close())
    assert [finding(diagnosis, name).state for name in CRITICS] == [State.NORMAL] * 3


def test_of_returns_that_are_all_0_nothing_can_be_said(made: MadeRun) -> None:
    nothing: dict[str, float | None] = {
        "critic__explained_variance": None,
        "critic__relative_error": None,
        "critic__return_deviation": 0.0,
    }
    diagnosis = looked_at(with_critic(made.groups(9), **nothing).close())
    assert [finding(diagnosis, name).state for name in CRITICS] == [State.UNKNOWN] * 3


def test_steps_of_the_critic_alone_are_steps(made: MadeRun) -> None:
    """Value pretraining: no learning rate of the policy is told, and nothing of its loss."""
    alone = with_critic(made.groups(9), step__lr=None, loss__total=None, step__grad_norm=None).close()
    assert looked_at(alone).state is State.NORMAL


FLAT: dict[str, Any] = {"state": "dropped", "reason": "zero_variance", "advantages": None}
CASES: list[tuple[str, Callable[[MadeRun], MadeRun], State, str, str]] = [
    (
        "all lowest",
        lambda m: m.steps(1).groups(1).groups(99, rewards=(0, 0), **FLAT),
        State.BROKEN,
        "groups",
        "(all at the lowest reward 99)",
    ),
    (
        "all highest",
        lambda m: m.steps(1).groups(1).groups(99, rewards=(1, 1), **FLAT),
        State.BROKEN,
        "groups",
        "(all at the highest reward 99)",
    ),
    (
        "one reward for everything",
        lambda m: m.steps(1).groups(100, rewards=(0.5, 0.5), **FLAT),
        State.BROKEN,
        "groups",
        "(all at the only reward that there ever was 100); the reward has one value for everything",
    ),
    (
        "Keep drops everything",
        lambda m: m.groups(40, state="dropped", reason="truncated"),
        State.BROKEN,
        "keep",
        "40 of the last 40 groups dropped for what they are (truncated 40); replies end at max_tokens",
    ),
    (
        "Keep drops most",
        lambda m: m.healthy().groups(60, state="dropped", reason="odd"),
        State.WATCH,
        "keep",
        "60 of the last 100 groups dropped for what they are (odd 60); look at the Keep of the recipe that says 'odd'",
    ),
    ("many flat", lambda m: m.healthy().groups(60, rewards=(1, 1), **FLAT), State.WATCH, "groups", "60%"),
    (
        "kept all the same",
        lambda m: m.steps(20).groups(1).groups(39, rewards=(0.5, 0.5), advantages=(0.0, 0.0)),
        State.BROKEN,
        "groups",
        "98% of the last 40 without variance (all at one reward in between 39)",
    ),
    (
        "groups of one",
        lambda m: m.steps(1).groups(40, state="dropped", reason="no_baseline", advantages=None),
        State.BROKEN,
        "groups",
        "with nobody to compare 40",
    ),
    ("a NaN", lambda m: m.healthy().dropped_batches(1, "non_finite"), State.BROKEN, "steps", "non_finite 1"),
    ("a batch of nothing", lambda m: m.healthy().dropped_batches(1, "no_signal"), State.WATCH, "steps", "no_signal 1"),
    ("only batches of nothing", lambda m: m.groups(9).dropped_batches(9, "no_signal"), State.BROKEN, "steps", "9 of"),
    ("engine differs", lambda m: m.groups(9).steps(20, logprob__gap=0.3), State.BROKEN, "log-probs", "0.3 nats"),
    ("engine differs a bit", lambda m: m.groups(9).steps(20, logprob__gap=0.1), State.WATCH, "log-probs", "0.1 nats"),
    (
        "ratios of something else",
        lambda m: m.groups(9).steps(20, loss__ratio_clamped=0.01),
        State.BROKEN,
        "log-probs",
        "1.0% of the tokens have a ratio beyond e^20",
    ),
    (
        "half masked",
        lambda m: m.steps(20).groups(40, masked="truncated"),
        State.BROKEN,
        "mask",
        "50% of 800 sampled tokens got a gradient (masked: truncated 400); replies end at max_tokens",
    ),
    ("some masked", lambda m: m.healthy().groups(40, masked="stale"), State.WATCH, "mask", "max_staleness"),
    (
        "most stale",
        lambda m: m.healthy().groups(50, state="stale", advantages=None),
        State.BROKEN,
        "staleness",
        "mean age 1.0 of at most 2; 56% of groups went stale",
    ),
    ("some stale", lambda m: m.healthy().groups(8, state="stale", advantages=None), State.WATCH, "staleness", "17%"),
    (
        "clipped",
        lambda m: m.groups(9).steps(20, loss__clip_fraction=0.4),
        State.BROKEN,
        "clip",
        "40.0% of trained tokens clipped",
    ),
    (
        "rejected",
        lambda m: m.groups(9).steps(20, loss__weight_rejected=0.5),
        State.BROKEN,
        "clip",
        "1.0% of trained tokens clipped, 50.0% rejected for their weight",
    ),
    ("clipped a bit", lambda m: m.groups(9).steps(20, loss__clip_fraction=0.2), State.WATCH, "clip", "20.0%"),
    (
        "collapsed",
        lambda m: m.groups(9).steps(1).steps(40, loss__entropy=0.005),
        State.BROKEN,
        "entropy",
        "0.005 nats a token, 1.2 in the first step",
    ),
    ("collapsing", lambda m: m.groups(9).steps(20, loss__entropy=0.05), State.WATCH, "entropy", "0.05 nats"),
    ("no learning rate", lambda m: m.groups(9).steps(20, step__lr=0.0), State.BROKEN, "update", "learning rate is 0"),
    ("no gradient", lambda m: m.groups(9).steps(20, step__grad_norm=1e-12), State.BROKEN, "update", "nothing arrives"),
    (
        "a critic that does not learn",
        lambda m: with_critic(m.groups(9), critic__lr=0.0, critic__value_deviation=0.0, critic__explained_variance=0.0),
        State.BROKEN,
        "values",
        "values vary by 0, returns by 0.5; critic.lr is 0: it never learns",
    ),
    (
        "a critic for returns that are too large",
        lambda m: with_critic(m.groups(9), critic__value_deviation=3e-4, critic__return_deviation=240.0),
        State.BROKEN,
        "values",
        "returns by 2.4e+02; the returns are too large for a critic that begins as 0: scale the rewards to about 1",
    ),
    (
        "a critic that hardly learns",
        lambda m: with_critic(m.groups(9), critic__value_deviation=0.004),
        State.WATCH,
        "values",
        "the critic says the same of every state",
    ),
    (
        "a critic that runs away",
        lambda m: with_critic(m.groups(9), critic__relative_error=50.0, loss__value=12.5),
        State.BROKEN,
        "errors",
        "squared error 50 of what saying 0 would make, value loss 12.5; the critic runs away: lower critic.lr",
    ),
    (
        "a critic that is rather wrong",
        lambda m: with_critic(m.groups(9), critic__relative_error=3.0),
        State.WATCH,
        "errors",
        "squared error 3",
    ),
    (
        "a critic that is worse than none",
        lambda m: with_critic(m.groups(9), critic__explained_variance=-2.0),
        State.BROKEN,
        "critic",
        "explains -2 of the returns' variance; advantages are noisier with it than without",
    ),
    ("grader fails", lambda m: m.healthy().given_up(80, "grader"), State.BROKEN, "episodes", "grader 80"),
    (
        "some fail",
        lambda m: m.healthy().given_up(8, "timeout"),
        State.WATCH,
        "episodes",
        "8 of 88 given up (timeout 8)",
    ),
]


@pytest.mark.parametrize(("make", "state", "cause", "words"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_each_illness_has_its_verdict(
    made: MadeRun, make: Callable[[MadeRun], MadeRun], state: State, cause: str, words: str
) -> None:
    diagnosis = looked_at(make(made).close())
    assert diagnosis.state is state
    assert diagnosis.verdict.startswith(f"main: {cause}: ")
    assert words in diagnosis.verdict
    assert finding(diagnosis, cause).state is state
    assert finding(diagnosis, cause).advice and finding(diagnosis, cause).normal


def test_what_pods_leaves_out_on_purpose_is_no_illness(made: MadeRun) -> None:
    """Half of 40 groups' tokens are not chosen; of the 1000 others, 100 are truncated."""
    made.steps(20).groups(40, masked=NOT_CHOSEN).groups(20).groups(10, masked="truncated")
    diagnosis = looked_at(made.close())
    mask = finding(diagnosis, "mask")
    assert (diagnosis.state, mask.state) == (State.NORMAL, State.NORMAL)
    assert mask.found == (
        "90% of 1000 sampled tokens got a gradient (masked: truncated 100); "
        "400 more were not chosen, as the recipe has it"
    )
    assert mask.advice.startswith("replies end at max_tokens")


def test_causes_come_before_effects(made: MadeRun) -> None:
    """All fail, so nothing has variance and no gradient arrives: the first is the verdict."""
    made.steps(20, step__grad_norm=0.0).groups(20, rewards=(0, 0), **FLAT).given_up(100, "infra")
    diagnosis = looked_at(made.close())
    assert [each.name for each in diagnosis.findings if each.state is State.BROKEN] == ["episodes", "groups", "update"]
    assert diagnosis.verdict.startswith("main: episodes: ")


def test_what_was_mended_long_ago_no_longer_shows(made: MadeRun) -> None:
    made.dropped_batches(9, "no_signal").groups(300, rewards=(0, 0), **FLAT)
    made.steps(5, loss__clip_fraction=0.9, step__lr=0.0, logprob__gap=3.0).steps(20).groups(200)
    diagnosis = looked_at(made.close())
    assert (diagnosis.state, {each.state for each in diagnosis.findings}) == (State.NORMAL, {State.NORMAL})


def test_drops_that_say_nothing_of_the_loss_are_not_counted(made: MadeRun) -> None:
    made.healthy().dropped_batches(3, "rolled_back")
    for reason in ("surplus", "too_few", "not_played", "rolled_back"):
        made.groups(50, state="dropped", reason=reason, rewards=(1, 1), advantages=None)
    made.groups(50, rewards=(1, 1), purpose="eval")
    made.given_up(50, "cancelled")
    diagnosis = looked_at(made.close())
    assert diagnosis.state is State.NORMAL
    assert finding(diagnosis, "groups").found == "0% of the last 40 without variance"


@pytest.mark.parametrize("reason", ["non_finite", "anything a trainer says"])
def test_groups_whose_batch_made_no_step_were_judged_all_the_same(made: MadeRun, reason: str) -> None:
    made.dropped_batches(20, reason)
    for batch in range(1, 21):
        made.groups(1, state="dropped", reason=reason, batch=batch, masked="truncated")
        made.groups(1, state="dropped", reason=reason, batch=batch, rewards=(1, 1), advantages=(0.0, 0.0))
    diagnosis = looked_at(made.close())
    assert finding(diagnosis, "groups").found.startswith("50% of the last 40 without variance")
    assert finding(diagnosis, "keep").found == "0 of the last 40 groups dropped for what they are"
    assert finding(diagnosis, "mask").found == "75% of 800 sampled tokens got a gradient (masked: truncated 200)"
    assert finding(diagnosis, "staleness").found.startswith("0% of groups went stale")


def test_what_was_rolled_back_is_not_counted_though_it_was_cut(made: MadeRun) -> None:
    made.healthy().dropped_batches(1, "rolled_back")
    made.groups(50, state="dropped", reason="rolled_back", batch=21, rewards=(1, 1), advantages=(0.0, 0.0))
    diagnosis = looked_at(made.close())
    assert finding(diagnosis, "groups").found == "0% of the last 40 without variance"
    assert finding(diagnosis, "mask").found == "100% of 800 sampled tokens got a gradient"


@pytest.mark.parametrize("reason", NO_SIGNAL)
def test_every_drop_for_want_of_signal_counts(made: MadeRun, reason: str) -> None:
    diagnosis = looked_at(made.healthy().groups(60, state="dropped", reason=reason, advantages=None).close())
    assert finding(diagnosis, "groups").found.startswith("60% of the last 100 without variance")


def test_before_the_first_step_there_is_nothing_to_explain(made: MadeRun) -> None:
    diagnosis = looked_at(made.close())
    assert diagnosis.state is State.UNKNOWN
    assert diagnosis.verdict == "main: no step was committed yet, there is no loss to explain"
    assert {each.state for each in diagnosis.findings} == {State.UNKNOWN}


def test_before_the_first_step_what_keeps_it_from_coming_is_named(made: MadeRun) -> None:
    diagnosis = looked_at(made.groups(20, rewards=(0, 0), **FLAT).close())
    assert (diagnosis.state, diagnosis.verdict[:14]) == (State.BROKEN, "main: groups: ")


def test_what_nobody_measured_is_unknown_and_no_illness(made: MadeRun) -> None:
    missing: dict[str, Any] = dict.fromkeys(("logprob__gap", "loss__clip_fraction", "loss__entropy", "staleness__mean"))
    diagnosis = looked_at(made.steps(20, **missing).groups(9).close())
    assert diagnosis.state is State.NORMAL
    unknown = {each.name for each in diagnosis.findings if each.state is State.UNKNOWN}
    assert unknown == {"log-probs", "clip", "entropy"}


def test_each_policy_has_its_own_diagnosis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = MadeRun(tmp_path / "run", policies=("judge", "solver"))
    made.steps(20, policy="solver").groups(20, policy="solver")
    made.steps(20, policy="judge", step__lr=0.0).groups(20, policy="judge")
    run = made.ended("finished").close()
    assert main(["doctor", str(run.path)]) == 1
    out = capsys.readouterr().out
    assert "BROKEN  judge: update: " in out and "NORMAL  solver: nothing is broken" in out


def test_the_verdict_is_the_first_line_and_every_finding_says_what_is_normal(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made.groups(9).steps(20, loss__clip_fraction=0.2).ended("finished", None).close()
    assert main(["doctor", str(run.path)]) == 0, "something to watch is no failure"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("WATCH  main: clip: 20.0% of trained tokens")
    assert sum("normal: " in line for line in lines) == 10
    assert sum("do: " in line for line in lines) == 1
    assert lines[-1] == f"run {run.path}: finished"


def test_json_has_all_of_it(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = made.healthy().dropped_batches(2, "non_finite").close()
    assert main(["doctor", str(run.path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["state"], found["error"]) == (str(run.path), "running", None)
    (policy,) = found["policies"]
    assert (policy["policy"], policy["state"]) == ("main", "broken")
    assert {each["name"] for each in policy["findings"]} >= {"groups", "clip", "log-probs", "mask", "entropy"}
    assert all(set(each) == {"name", "state", "found", "normal", "advice"} for each in policy["findings"])


def test_a_run_that_is_written_to_can_be_looked_at(made: MadeRun) -> None:
    """Beside the writer, in the middle of its transaction: what was there before is seen, nothing is locked."""
    made.healthy()
    made.store.run("BEGIN IMMEDIATE")
    made.dropped_batches(1, "non_finite")
    assert looked_at(made.run).state is State.NORMAL
    made.store.run("COMMIT")
    assert looked_at(made.run).state is State.BROKEN
    made.close()


def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert "is no run folder: it has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["doctor", str(tmp_path)]) == 2
    assert "does not hold a run's config" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"config": {"policies": {}}}')
    assert main(["doctor", str(tmp_path)]) == 2
    assert "is this a run folder that was started?" in capsys.readouterr().err
    (tmp_path / "run.db").write_text("not a database at all, but long enough to look like one")
    with pytest.raises(ConfigError, match="cannot be read"):
        symptoms_of(RunFolder(tmp_path))


def test_a_run_with_steps_to_go_is_not_said_to_run(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = made.healthy().close()
    main(["doctor", str(run.path)])
    assert f"has steps to go; 'astraflow status {run.path}' tells who is at it" in capsys.readouterr().out


def test_reading_changes_nothing(made: MadeRun) -> None:
    run = made.healthy().close()
    before = run.database.read_bytes()
    looked_at(run)
    assert run.database.read_bytes() == before
    assert sqlite3.connect(run.database).execute("SELECT COUNT(*) FROM batches").fetchone() == (20,)


# ── the run itself ──


def test_a_run_that_failed_is_not_normal(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = made.healthy().ended("failed", "rollout-0 died 3 times in a row: blocked the event loop").close()
    diagnosis = looked_at(run)
    assert diagnosis.state is State.BROKEN
    assert diagnosis.verdict == (
        "main: run: failed: rollout-0 died 3 times in a row: blocked the event loop; mend that first"
    )
    assert main(["doctor", str(run.path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("BROKEN  main: run: failed: rollout-0 died")
    assert lines[-1] == f"run {run.path}: failed (rollout-0 died 3 times in a row: blocked the event loop)"


def test_what_user_code_said_does_nothing_to_a_terminal(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = made.healthy().ended("failed", "ValueError: \x1b[31mred\nNORMAL  main").close()
    assert main(["doctor", str(run.path)]) == main(["status", str(run.path)]) == 1
    out = capsys.readouterr().out
    assert out.count("ValueError: \\x1b[31mred\n    | NORMAL  main") >= 3
    assert "\x1b" not in out and "\nNORMAL" not in out
    assert main(["doctor", str(run.path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "ValueError: \x1b[31mred\nNORMAL  main"


def component(made: MadeRun, kind: str, name: str, state: str) -> None:
    made.store.run(
        "INSERT INTO components (component, name, incarnation, state, heard_at) VALUES (?, ?, 'i', ?, 0)",
        (kind, name, state),
    )


@pytest.mark.parametrize(
    ("trainer", "workers", "absent"),
    [
        ("alive", ["alive"], None),
        ("dead", ["alive"], "its trainer t is dead"),
        ("alive", ["dead"], "no rollout service is alive"),
        ("alive", ["dead", "alive"], None),
        ("dead", ["dead", "left"], "its trainer t is dead; no rollout service is alive"),
    ],
)
def test_a_process_that_is_missing_while_the_run_goes_on(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, trainer: str, workers: list[str], absent: str | None
) -> None:
    made.healthy()
    made.store.run("INSERT INTO trainers VALUES ('main', 't', 'i', 0, 'd', 1, 0)")
    component(made, "trainer", "t", trainer)
    for number, state in enumerate(workers):
        component(made, "rollout", f"w{number}", state)
    run = made.close()
    assert looked_at(run).state is State.NORMAL, "whoever died in a run that is stopped is no fault"
    monkeypatch.setattr("astraflow.run.symptoms.is_alive", lambda _: True)
    diagnosis = looked_at(run)
    assert diagnosis.state is (State.NORMAL if absent is None else State.BROKEN)
    assert [each.found for each in diagnosis.findings if each.name == "processes"] == ([absent] if absent else [])
