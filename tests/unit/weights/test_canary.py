"""Log-probs of fixed prompts: right computations pass in every dtype, wrong weights do not, and are named."""

from __future__ import annotations

import numpy as np
import pytest

from astraflow.errors import InvalidRecord
from astraflow.types import Array, Canary, CanaryPrompt
from astraflow.weights.canary import TOLERANCES, check_canary, check_template, tolerance_of

RNG = np.random.default_rng(0)
N = 16
WARM, COLD = 3, 3
V1, V2, V3 = ([-2 - RNG.random(N) for _ in range(WARM)] for _ in range(3))
COLD_NOW = [-3 - RNG.random(N) for _ in range(COLD)]


def canary(warm: list[Array], cold: list[Array] = COLD_NOW, dtype: str = "float32") -> Canary:
    prompts = [
        CanaryPrompt(text=f"t{n}", tokens=(1, 2, n), reply=(5,) * N, logprobs=tuple(each.tolist()))
        for n, each in enumerate(warm)
    ]
    prompts += [
        CanaryPrompt(tokens=(9, n), reply=(5,) * N, logprobs=tuple(each.tolist()), cold=True)
        for n, each in enumerate(cold)
    ]
    return Canary(dtype=dtype, prompts=tuple(prompts))


NOW = canary(V3)
EARLIER = {1: canary(V1), 2: canary(V2)}


def said(warm: list[Array], cold: list[Array] = COLD_NOW, *, dtype: str = "float32") -> str:
    finding = check_canary(NOW, [*warm, *cold], dtype=dtype, earlier=EARLIER)
    return "" if finding is None else str(finding)


def shaken(arrays: list[Array], by: float) -> list[Array]:
    return [each + RNG.uniform(-by, by, N) for each in arrays]


@pytest.mark.parametrize("dtype", sorted(TOLERANCES))
def test_drift_within_the_tolerance_passes_and_beyond_it_does_not(dtype: str) -> None:
    mean, most = TOLERANCES[dtype]
    assert said(shaken(V3, mean), shaken(COLD_NOW, mean), dtype=dtype) == ""
    assert said(shaken(V3, 6 * mean), shaken(COLD_NOW, 6 * mean), dtype=dtype) != ""
    one_off = [V3[0] + np.eye(N)[3] * 1.5 * most, *V3[1:]]
    assert said(one_off, [each + 1.5 * most for each in COLD_NOW], dtype=dtype).startswith("numerics: ")


def test_the_coarser_of_two_computations_decides() -> None:
    assert tolerance_of("float32", "bfloat16") == tolerance_of("bfloat16") == TOLERANCES["bfloat16"]
    assert tolerance_of("float32", "float16") == TOLERANCES["float16"]
    assert tolerance_of("fp8") == max(TOLERANCES.values())


@pytest.mark.parametrize(("version", "answers"), [(2, V2), (1, V1)])
def test_one_that_answers_as_an_earlier_version_was_never_applied(version: int, answers: list[Array]) -> None:
    found = said(answers, [each - 0.5 for each in COLD_NOW])
    assert found.startswith("never applied: ") and found.endswith(f"it answers as v{version} did")


def test_right_for_prompts_that_no_cache_can_know_is_a_stale_cache() -> None:
    assert said(V2).startswith("stale cache: ")
    assert said([V3[0], V3[1], V3[2] + 0.1]).startswith("stale cache: ")


def test_an_answer_without_numbers_is_numerics_and_never_passes() -> None:
    for wrong in (np.full(N, np.nan), np.zeros(0), np.full(N, -np.inf)):
        assert said([V3[0], wrong, V3[2]], [wrong] * COLD).startswith("numerics: ")


def test_an_update_on_the_version_before_the_last_is_wrong_base() -> None:
    """To the first order: what that base says, and what the update adds."""
    step = 0.05
    base1 = [each + step * RNG.standard_normal(N) for each in V2]
    new = [each + step * RNG.standard_normal(N) for each in V2]
    now = canary(new)
    on_base1 = [b + n - o for b, n, o in zip(base1, new, V2, strict=True)]
    off_cold = [each + 0.1 for each in COLD_NOW]
    finding = check_canary(now, [*on_base1, *off_cold], dtype="float32", earlier={1: canary(base1), 2: canary(V2)})
    assert str(finding).startswith("wrong base: ") and str(finding).endswith("the update had been put on v1")


def test_part_of_the_way_from_the_version_before_is_partial() -> None:
    between = [0.4 * old + 0.6 * new + RNG.normal(0, 0.05, N) for old, new in zip(V2, V3, strict=True)]
    assert said(between, [each - 0.4 for each in COLD_NOW]).startswith("partial: ")


def test_something_else_or_nothing_to_compare_with_is_numerics() -> None:
    other = [-9 - RNG.random(N) for _ in range(WARM)]
    assert said(other, [each - 1 for each in COLD_NOW]).startswith("numerics: ")
    alone = check_canary(NOW, [*V2, *[each - 1 for each in COLD_NOW]], dtype="float32")
    assert alone is not None and str(alone).startswith("numerics: ")


def test_canaries_of_other_prompts_are_not_compared_with() -> None:
    others = {2: Canary(dtype="float32", prompts=tuple(p for p in canary(V2).prompts if p.cold))}
    finding = check_canary(NOW, [*V2, *[each - 1 for each in COLD_NOW]], dtype="float32", earlier=others)
    assert str(finding).startswith("numerics: ")


def test_another_template_is_named_with_the_place_where_it_differs() -> None:
    same = [each.tokens if each.text else None for each in NOW.prompts]
    assert check_template(NOW, same) is None
    assert check_template(NOW, [None] * len(same)) is None
    found = check_template(NOW, [same[0], (1, 2, 7, 8), *same[2:]])
    assert str(found) == "wrong template: 't1' becomes 4 tokens instead of 3, the first different one at 2"
    assert str(check_template(NOW, [(1, 2), *same[1:]])).endswith("at 2")


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": ()},
        {"reply": (), "logprobs": ()},
        {"logprobs": (-1.0,)},
        {"logprobs": (-1.0, float("nan"))},
        {"logprobs": (-1.0, 0.5)},
        {"logprobs": (-1.0, float("-inf"))},
    ],
)
def test_f93_a_prompt_without_a_log_prob_for_each_token_is_no_record(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRecord):
        CanaryPrompt(**({"tokens": (1,), "reply": (2, 3), "logprobs": (-1.0, -2.0)} | fields))  # type: ignore[arg-type]
