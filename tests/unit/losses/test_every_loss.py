"""The laboratory: what holds for every loss, whatever it is made of. By ``LOSSES``; formulas by ``plain.py``."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from astraflow.errors import ConfigError, InvalidRecord
from astraflow.loss_options import LOSSES as OPTIONS
from astraflow.loss_options import Number, check_options
from astraflow.losses import LOSSES, LossInputs
from tests.unit.losses.lab import COLUMNS, Found, batch, evaluate, of_sequences, take
from tests.unit.losses.plain import EVERY, WAYS

TIGHT = 1e-12
PAIR_PARTS = [[0, 1], [2, 3]]


def every_case(*, formula: bool = False) -> list[Any]:
    """``formula``: only losses whose plain formula stands in ``plain.py``; the others' are in tests of their own."""
    return [
        pytest.param(name, options, id=f"{name}-{n}")
        for name, case in EVERY.items()
        for n, options in enumerate(case.options)
        if case.formula is not None or not formula
    ]


def same(a: Found, b: Found, order: Tensor | None = None, tolerance: float = TIGHT) -> None:
    """``order``: b's token i is a's token order[i]."""
    assert b.loss == pytest.approx(a.loss, abs=tolerance, rel=tolerance)
    for mine, theirs in ((a.gradient, b.gradient), (a.values_gradient, b.values_gradient)):
        expected = mine if order is None else mine[order]
        torch.testing.assert_close(theirs, expected, atol=tolerance, rtol=tolerance)
    assert b.metrics == pytest.approx(a.metrics, abs=1e-9, nan_ok=True)


def finite(found: Found) -> bool:
    gradients = (found.gradient, found.values_gradient)
    return math.isfinite(found.loss) and all(bool(each.isfinite().all()) for each in gradients)


# ── the registry ──


def test_every_loss_is_in_the_laboratory_and_in_the_table_of_options() -> None:
    assert set(LOSSES) == set(EVERY) == set(OPTIONS)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_table_of_options_is_the_signature(name: str) -> None:
    import astraflow.losses

    function = LOSSES[name].loss
    parameters = dict(inspect.signature(function).parameters)
    assert function.__name__ == name and next(iter(parameters)) == "inputs"
    assert not isinstance(function, type) and getattr(astraflow.losses, name) is function
    del parameters["inputs"]
    assert {n: p.default for n, p in parameters.items()} == {n: o.default for n, o in OPTIONS[name].options.items()}
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    for needed, option in OPTIONS[name].needs.items():
        assert needed in COLUMNS and option in ("", *parameters)
    assert ("kl" in parameters) == (OPTIONS[name].switches.get("kl") == "kl_coefficient")
    assert {*OPTIONS[name].switches, *OPTIONS[name].switches.values()} <= set(parameters)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_f97_unknown_options_and_f43_values_out_of_range_are_refused(name: str) -> None:
    loss, options = LOSSES[name].loss, OPTIONS[name].options
    given = EVERY[name].options[0]
    for option in options:
        with pytest.raises(ConfigError, match=f"has no option '{option}x'; did you mean '{option}'"):
            loss(batch(), **{**given, f"{option}x": 1.0})
        with pytest.raises(ConfigError, match=f"{option} must be .*found nan"):
            loss(batch(), **{**given, option: math.nan})
        spec = options[option]
        if isinstance(spec, Number) and spec.low > -math.inf:
            with pytest.raises(ConfigError, match=f"{option} must be .*found {spec.low - 1}"):
                loss(batch(), **{**given, option: spec.low - 1})
    check_options(name, given)


# ── the formula ──


@pytest.mark.parametrize(("name", "options"), every_case(formula=True))
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_are_those_of_the_plain_formula(name: str, options: dict[str, Any], seed: int) -> None:
    formula = EVERY[name].formula
    assert formula is not None
    inputs = batch(seed)
    leaves = [each.clone().requires_grad_() for each in (inputs.logprobs, inputs.values) if each is not None]
    expected = formula(replace(inputs, logprobs=leaves[0], values=leaves[1]), **options)
    torch.autograd.backward(expected)
    found = evaluate(name, inputs, options)
    assert found.loss == pytest.approx(float(expected.detach()), abs=TIGHT)
    for leaf, gradient in zip(leaves, found[1:3], strict=True):
        wanted = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        torch.testing.assert_close(gradient, wanted, atol=TIGHT, rtol=TIGHT)


# ── what must not matter ──


@pytest.mark.parametrize(("name", "options"), every_case())
def test_padding_does_not_matter(name: str, options: dict[str, Any]) -> None:
    """Masked tokens with NaN in every column but the log-probs, in their own sequence and at the end of others."""
    inputs = batch(1)
    rows = [torch.cat([of_sequences(inputs, [each]), torch.tensor([0, 0])]) for each in range(4)]
    order = torch.cat([*rows, torch.tensor([0, 0, 0])])
    padding = torch.cat([torch.tensor([False] * (len(row) - 2) + [True] * 2) for row in rows])
    padding = torch.cat([padding, torch.tensor([True] * 3)])
    ids = torch.cat([torch.full((len(row),), n) for n, row in enumerate(rows)] + [torch.full((3,), 9)])
    wide = take(inputs, order, sequence_ids=ids)
    noise = {
        column: torch.where(padding, torch.full_like(getattr(wide, column), math.nan), getattr(wide, column))
        for column in COLUMNS
        if getattr(wide, column) is not None and getattr(wide, column).is_floating_point() and column != "values"
    }
    wide = replace(wide, **noise, mask=wide.mask & ~padding)
    plain, found = evaluate(name, inputs, options), evaluate(name, wide, options)
    assert found.gradient[padding].tolist() == [0.0] * int(padding.sum())
    same(plain, found._replace(gradient=found.gradient[~padding], values_gradient=found.values_gradient[~padding]))


@pytest.mark.parametrize(("name", "options"), every_case())
def test_packing_order_does_not_matter(name: str, options: dict[str, Any]) -> None:
    inputs = batch(2)
    whole = evaluate(name, inputs, options)
    for sequences in ([3, 0, 2, 1], [1, 3, 0, 2]):
        order = of_sequences(inputs, sequences)
        same(whole, evaluate(name, take(inputs, order), options), order)
    place = torch.cat([torch.arange(each) for each in (3, 1, 4, 2)])
    interleaved = torch.argsort(place * 10 + inputs.sequence_ids)
    same(whole, evaluate(name, take(inputs, interleaved), options), interleaved)


@pytest.mark.parametrize(("name", "options"), every_case())
def test_f45_micro_batches_do_not_matter(name: str, options: dict[str, Any]) -> None:
    inputs = batch(3)
    whole = evaluate(name, inputs, options)
    for split in ([[0, 1, 2, 3]], PAIR_PARTS, [[0], [1], [2], [3]], [[2], [3, 0, 1]], [[1, 2], [0, 3]]):
        parts = [of_sequences(inputs, each) for each in split]
        same(whole, evaluate(name, inputs, options, parts))


@pytest.mark.parametrize(("name", "options"), every_case())
def test_accumulated_gradients_are_those_of_the_batch(name: str, options: dict[str, Any]) -> None:
    """Of weights that every token shares: log-probs = X w, a backward a part into the same w."""
    inputs = batch(4)
    features = torch.randn(len(inputs.logprobs), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = torch.zeros(3, dtype=torch.float64)
    found = []
    for split in ([[0, 1, 2, 3]], [[3], [0, 2], [1]]):
        weights = start.clone().requires_grad_()
        whole = evaluate(name, inputs, options, [of_sequences(inputs, each) for each in split])
        logprobs = inputs.logprobs + features @ weights
        torch.autograd.backward(logprobs, whole.gradient)
        assert weights.grad is not None
        found.append(weights.grad)
    torch.testing.assert_close(found[0], found[1], atol=1e-10, rtol=0)


# ── the edges ──


@pytest.mark.parametrize(("name", "options"), every_case())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [80.0, -80.0])
def test_f41_finite_at_log_ratios_of_80(name: str, options: dict[str, Any], dtype: torch.dtype, gap: float) -> None:
    inputs = batch(5, dtype=dtype)
    far = {"logprobs", "behaviour_logprobs", "proximal_logprobs", "reference_logprobs"}
    for column in far:
        assert finite(evaluate(name, replace(inputs, **{column: getattr(inputs, column) + gap}), options))


@pytest.mark.parametrize(("name", "options"), every_case())
def test_f50_a_masked_token_without_a_log_prob_is_ignored(name: str, options: dict[str, Any]) -> None:
    """Behaviour [-.1, NaN, -.3] under the mask [1, 0, 1]: as if the token were not there."""
    inputs = replace(batch(5, lengths=(3,), masked=(1,)))
    behaviour = torch.tensor([-0.1, math.nan, -0.3], dtype=torch.float64)
    found = evaluate(name, replace(inputs, behaviour_logprobs=behaviour), options)
    short = take(replace(inputs, behaviour_logprobs=behaviour), torch.tensor([0, 2]))
    without = evaluate(name, short, options)
    assert finite(found) and found.loss == pytest.approx(without.loss, abs=TIGHT)
    assert found.gradient[1] == 0 and found.gradient[[0, 2]].tolist() == pytest.approx(without.gradient.tolist())


@pytest.mark.parametrize(("name", "options"), every_case())
def test_nothing_to_train_is_exactly_zero(name: str, options: dict[str, Any]) -> None:
    inputs = batch(6)
    nothing = evaluate(name, replace(inputs, mask=torch.zeros_like(inputs.mask)), options)
    assert nothing.loss == 0 and finite(nothing) and not nothing.gradient.any() and not nothing.values_gradient.any()
    none = evaluate(name, take(inputs, torch.zeros(0, dtype=torch.int64)), options)
    assert none.loss == 0 and len(none.gradient) == 0


@pytest.mark.parametrize(("name", "options"), every_case())
def test_a_single_token_is_finite(name: str, options: dict[str, Any]) -> None:
    for seed in range(3):
        assert finite(evaluate(name, batch(seed, lengths=(1,), masked=()), options))


@pytest.mark.parametrize("name", [name for name in sorted(EVERY) if EVERY[name].rewards_alone is not None])
def test_f52_equal_rewards_move_nothing(name: str) -> None:
    """All losses but those that learn from targets."""
    options = EVERY[name].rewards_alone
    assert options is not None
    found = evaluate(name, batch(7, reward=0.0), options)
    assert found.gradient.tolist() == [0.0] * len(found.gradient)
    assert finite(found)


@pytest.mark.parametrize("name", [name for name in sorted(EVERY) if "kl" in OPTIONS[name].options])
def test_equal_rewards_with_kl_move_towards_the_reference(name: str) -> None:
    """Descent shrinks the log-ratio to the reference: the gradient has its sign (k2: it is that very ratio)."""
    options = {**(EVERY[name].rewards_alone or {}), "kl": "k2_in_loss", "kl_coefficient": 0.5}
    inputs = batch(7, reward=0.0)
    found = evaluate(name, inputs, options)
    assert inputs.reference_logprobs is not None
    apart = (inputs.logprobs - inputs.reference_logprobs)[inputs.mask]
    assert bool((found.gradient[inputs.mask].sign() == apart.sign()).all())


@pytest.mark.parametrize("name", [name for name in sorted(EVERY) if name != "value_pretraining"])
def test_nan_advantages_are_never_hidden(name: str) -> None:
    """Not refused and not zeroed: loss or gradient is not finite, and a backend then leaves the weights alone (F52)."""
    inputs = batch(8)
    inputs.advantages[0] = math.nan
    assert not finite(evaluate(name, inputs, EVERY[name].options[0]))


@pytest.mark.parametrize(("name", "options"), every_case())
@pytest.mark.parametrize("reward", [1e30, -1e30])
def test_rewards_of_1e30_are_finite_in_float32(name: str, options: dict[str, Any], reward: float) -> None:
    inputs = batch(9, dtype=torch.float32)
    mixed = torch.where(inputs.sequence_ids % 2 == 0, reward, -reward)
    assert finite(evaluate(name, replace(inputs, advantages=mixed), options))


def test_f49_a_part_that_nothing_prepared_is_refused() -> None:
    with_prepare = [name for name, chosen in LOSSES.items() if chosen.prepare is not None]
    assert "reinforce_plus_plus" in with_prepare
    for name in with_prepare:
        with pytest.raises(InvalidRecord, match="before the loss's prepare had seen the whole batch"):
            LOSSES[name].loss(replace(batch(), batch_tokens=20, batch_sequences=5), **EVERY[name].options[0])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_column_that_is_needed_and_missing_is_named(name: str) -> None:
    for options in EVERY[name].options:
        for column in OPTIONS[name].columns(options):
            changed: LossInputs = replace(batch(), **{column: None})
            with pytest.raises(InvalidRecord, match=column):
                LOSSES[name].loss(changed, **options)


def test_every_aggregation_is_tried() -> None:
    assert {way["aggregation"] for way in WAYS} == set(OPTIONS["grpo"].options["aggregation"].among)  # type: ignore[union-attr]
