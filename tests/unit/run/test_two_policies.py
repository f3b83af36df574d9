"""What the example of two policies shows before it rewards: neither role could learn from the truth alone."""

from __future__ import annotations

from examples.two_policies import CHECK, SPLIT, question, recipe, shown

from astraflow.algorithms.pipeline import Pipeline

COUNT = 1200


def test_a_question_has_one_largest_digit() -> None:
    for index in range(100):
        task = question(index)
        digits = [int(each) for each in task.key.split()]
        assert len(set(digits)) == 3 and task.payload == {"prompt": task.key, "answer": max(digits)}


def test_half_of_the_answers_are_right_and_one_verdict_in_seven_is_false() -> None:
    largest = right = said_yes = false = 0
    held_out = {SPLIT.held_out.task(index).key for index in range(60)}
    for index in range(COUNT):
        payload = shown(index).payload
        asked, said = (message["content"] for message in payload["messages"])
        question_of, _, judged = asked.rpartition(" ")
        assert not {asked, question_of} & held_out
        if payload["policy"] == "solver":
            largest += said == max(asked.split())
            assert said in asked.split()
            continue
        truth = judged == f"{max(question_of.split())}?"
        assert asked == CHECK.format(question=question_of, answer=judged[:-1]) and judged[:-1] in question_of
        right, said_yes, false = right + truth, said_yes + (said == "y"), false + ((said == "y") != truth)
    half = COUNT / 2
    assert abs(largest / half - 1 / 2) < 0.06
    assert abs(right / half - 1 / 2) < 0.06 and abs(said_yes / half - 1 / 2) < 0.06, "neither verdict is a better bet"
    assert abs(false / half - 0.15) < 0.03


def test_both_policies_are_warmed_up_with_as_many_rows() -> None:
    made = recipe().with_pipeline()
    assert isinstance(made.pipeline, Pipeline)
    shown_to = [shown(index).payload["policy"] for index in range(10)]
    assert shown_to == ["solver", "verifier"] * 5
    assert {policy.groups_per_batch for policy in made.policies.values()} == {8}
    assert made.eval is not None and made.eval.policy == "verifier"
