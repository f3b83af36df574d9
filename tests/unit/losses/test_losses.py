"""Losses by numbers: clip cases, overflow, masks, the three aggregations with denominators of the whole batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from astraflow.errors import ConfigError, InvalidRecord
from astraflow.losses.aggregate import aggregate
from astraflow.losses.base import LossInputs, LossOutput
from astraflow.losses.choose import choose_loss
from astraflow.losses.grpo import grpo
from astraflow.losses.sft import sft
from astraflow.observe.metrics import merge_means

MODES = (("token_mean", None), ("sequence_mean", None), ("sequence_sum_over_constant", 4.0))


def make(
    logprobs: Any,
    *,
    behaviour: Any = None,
    advantages: Any = None,
    mask: Any = None,
    sequences: Any = None,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> LossInputs:
    values = torch.as_tensor(logprobs, dtype=dtype) if not isinstance(logprobs, Tensor) else logprobs
    n = len(values)
    return LossInputs(
        logprobs=values if values.requires_grad else values.clone().requires_grad_(),
        behaviour_logprobs=torch.zeros(n, dtype=dtype)
        if behaviour is None
        else torch.as_tensor(behaviour, dtype=dtype),
        advantages=torch.ones(n, dtype=dtype) if advantages is None else torch.as_tensor(advantages, dtype=dtype),
        mask=torch.ones(n, dtype=torch.bool) if mask is None else torch.as_tensor(mask, dtype=torch.bool),
        sequence_ids=torch.zeros(n, dtype=torch.int64) if sequences is None else torch.as_tensor(sequences),
        **more,
    )


def per_ratio(ratio: float, advantage: float, **options: Any) -> tuple[float, float, LossOutput]:
    """(loss, gradient of the log-prob, output) of one token."""
    inputs = make([math.log(ratio)], advantages=[advantage])
    out = grpo(inputs, **options)
    out.loss.backward()
    assert inputs.logprobs.grad is not None
    return float(out.loss.detach()), float(inputs.logprobs.grad[0]), out


def test_f41_masked_overflow_has_no_gradient_and_no_nan() -> None:
    inputs = make([0.0, 89.0], mask=[True, False], dtype=torch.float32)
    out = grpo(inputs)
    out.loss.backward()
    assert float(out.loss.detach()) == -1.0
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == [-1.0, 0.0]


@pytest.mark.parametrize(("log_ratio", "advantage"), [(200.0, 0.0), (88.7, -1.0), (-200.0, 1.0), (1e30, 1.0)])
def test_f41_extreme_ratios_stay_finite_and_are_counted(log_ratio: float, advantage: float) -> None:
    inputs = make([log_ratio], advantages=[advantage], dtype=torch.float32)
    out = grpo(inputs)
    out.loss.backward()
    assert inputs.logprobs.grad is not None
    assert math.isfinite(float(out.loss.detach())) and bool(inputs.logprobs.grad.isfinite().all())
    assert out.metrics["loss/ratio_clamped"] == (1.0, 1.0)
    if advantage == 0:
        assert float(out.loss.detach()) == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "flat"),
    [
        (1.5, 1, -1.2, True),
        (0.5, 1, -0.5, False),
        (1.5, -1, 1.5, False),
        (0.5, -1, 0.8, True),
        (1.0, 1, -1.0, False),
        (1.0, -1, 1.0, False),
        (1.2, 1, -1.2, False),
        (0.8, -1, 0.8, False),
    ],
)
def test_f42_clip_by_sign_of_the_advantage(ratio: float, advantage: float, expected: float, flat: bool) -> None:
    loss, gradient, _ = per_ratio(ratio, advantage, clip_low=0.2)
    assert loss == pytest.approx(expected, abs=1e-12)
    if ratio not in (1.2, 0.8):  # at the very edge either side's gradient is right
        assert (gradient == 0) == flat


def test_f42_clip_fraction_counts_the_side_that_clips() -> None:
    out = grpo(make([math.log(r) for r in (1.5, 0.5, 1.5, 0.5)], advantages=[1, 1, -1, -1]))
    assert out.metrics["loss/clip_fraction"] == (2.0, 4.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.2, 1, -1.2),
        (1.25, 1, -1.25),
        (1.28, 1, -1.28),
        (1.3, 1, -1.28),
        (0.79, -1, 0.8),
        (0.8, -1, 0.8),
        (0.72, -1, 0.8),
    ],
)
def test_f43_clip_higher_is_the_upper_side_only(ratio: float, advantage: float, expected: float) -> None:
    assert per_ratio(ratio, advantage, clip_low=0.2, clip_high=0.28)[0] == pytest.approx(expected, abs=1e-12)


def test_f43_one_bound_alone_is_both() -> None:
    assert per_ratio(1.5, 1, clip_low=0.3)[0] == pytest.approx(-1.3)
    assert per_ratio(0.5, -1, clip_low=0.3)[0] == pytest.approx(0.7)


def test_f45_token_mean_is_that_of_the_batch_for_every_split() -> None:
    """Lengths 1 and 3, A = +1 and -1, p = sigmoid(theta) at 0: loss .5, gradient .25 however it is cut."""
    for split in ([[0, 1, 2, 3]], [[0], [1, 2, 3]], [[1, 2, 3], [0]]):
        theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
        total = torch.zeros((), dtype=torch.float64)
        for part in split:
            logprob = torch.nn.functional.logsigmoid(theta).expand(len(part))
            advantages = [1.0 if i == 0 else -1.0 for i in part]
            inputs = LossInputs(
                logprobs=logprob,
                behaviour_logprobs=logprob.detach(),
                advantages=torch.tensor(advantages, dtype=torch.float64),
                mask=torch.ones(len(part), dtype=torch.bool),
                sequence_ids=torch.tensor([0 if i == 0 else 1 for i in part]),
                batch_tokens=4,
                batch_sequences=2,
            )
            total = total + grpo(inputs).loss
        total.backward()
        assert float(total.detach()) == pytest.approx(0.5)
        assert theta.grad is not None
        assert float(theta.grad) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("mode", "constant", "expected"),
    [
        ("token_mean", None, 0.5),
        ("sequence_mean", None, 0.0),
        ("sequence_sum_over_constant", 1.0, 1.0),
        ("sequence_sum_over_constant", 4.0, 0.25),
    ],
)
def test_f45_table_of_aggregations(mode: str, constant: float | None, expected: float) -> None:
    inputs = make([0.0] * 4, sequences=[0, 1, 1, 1])
    per_token = torch.tensor([-1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert float(aggregate(per_token, inputs, aggregation=mode, constant=constant)) == pytest.approx(expected)


def test_f47_tokens_that_the_loss_rejects_stay_in_the_denominator() -> None:
    ratios = torch.tensor([1.11, 0.22, 2.23, 0.00005, 1.35], dtype=torch.float64)
    kept = torch.where((ratios >= 0.5) & (ratios <= 2), ratios, 0.0)
    assert float(aggregate(kept, make([0.0] * 5), aggregation="token_mean")) == pytest.approx(0.492)
    by_data = make([0.0] * 5, mask=[True, False, False, False, True])
    assert float(aggregate(ratios, by_data, aggregation="token_mean")) == pytest.approx(1.23)
    nothing = aggregate(torch.zeros(5), make([0.0] * 5), aggregation="token_mean")
    assert float(nothing) == 0.0


def test_f32_denominator_leaves_out_what_data_removed() -> None:
    mask = [True] * 25 + [False] * 5
    inputs = make([0.0] * 30, mask=mask, sequences=[0] * 10 + [1] * 15 + [2] * 5)
    assert float(aggregate(torch.ones(30), inputs, aggregation="token_mean")) == 1.0


def test_f53_masked_sequence_is_not_in_the_number_of_sequences() -> None:
    per_token = torch.tensor([1.0, 3.0, 5.0, 5.0])
    inputs = make([0.0] * 4, mask=[True, True, False, False], sequences=[0, 0, 1, 1])
    assert float(aggregate(per_token, inputs, aggregation="sequence_mean")) == 2.0


def test_f106_metrics_add_up_as_sum_and_count() -> None:
    parts = [{"entropy": (1.0, 1.0)}, {"entropy": (200.0, 100.0)}, {"entropy": (0.0, 0.0)}]
    assert merge_means(parts)["entropy"] == pytest.approx(201 / 101)
    assert merge_means([{"entropy": (0.0, 0.0)}]) == {}
    out = grpo(make([0.1, 0.2], mask=[False, False]))
    assert all(count == 0 for _, count in out.metrics.values())
    assert float(out.loss.detach()) == 0.0


@pytest.mark.parametrize(("mode", "constant"), MODES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_split_gives_the_same_loss_gradient_and_metrics(mode: str, constant: float | None, data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    n = len(ids)
    draw = lambda: torch.randn(n, generator=generator, dtype=torch.float64)  # noqa: E731
    now, then, advantages = draw(), draw(), draw()
    mask = torch.rand(n, generator=generator) < 0.8
    cut = data.draw(st.integers(0, len(lengths)))
    present = len(set(ids[mask].tolist()))

    def run(parts: list[Tensor]) -> tuple[float, Tensor, dict[str, float]]:
        leaf = now.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        found = []
        for index in parts:
            inputs = LossInputs(
                logprobs=leaf[index],
                behaviour_logprobs=then[index],
                advantages=advantages[index],
                mask=mask[index],
                sequence_ids=ids[index],
                batch_tokens=int(mask.sum()),
                batch_sequences=present,
            )
            out = grpo(inputs, aggregation=mode, constant=constant)
            total = total + out.loss
            found.append(out.metrics)
        total.backward()
        assert leaf.grad is not None
        return float(total.detach()), leaf.grad, merge_means(found)

    whole = run([torch.arange(n)])
    split = run([(ids < cut).nonzero()[:, 0], (ids >= cut).nonzero()[:, 0]])
    assert split[0] == pytest.approx(whole[0], abs=1e-12)
    torch.testing.assert_close(split[1], whole[1], atol=1e-12, rtol=0)
    assert split[2] == pytest.approx(whole[2])


@pytest.mark.parametrize(("mode", "constant"), MODES)
@pytest.mark.parametrize("loss", [grpo, sft])
def test_gradient_in_float64(loss: Any, mode: str, constant: float | None) -> None:
    torch.manual_seed(0)
    behaviour = -torch.rand(6, dtype=torch.float64)
    logprobs = (behaviour + 0.1 * torch.randn(6, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(6, dtype=torch.float64)

    def value(leaf: Tensor) -> Tensor:
        inputs = LossInputs(
            logprobs=leaf,
            behaviour_logprobs=behaviour,
            advantages=advantages,
            mask=torch.tensor([True, True, False, True, True, True]),
            sequence_ids=torch.tensor([0, 0, 0, 1, 1, 2]),
        )
        found: Tensor = loss(inputs, aggregation=mode, constant=constant).loss
        return found

    assert torch.autograd.gradcheck(value, (logprobs,), eps=1e-7, atol=1e-6)


def test_sft_is_negative_log_likelihood() -> None:
    out = sft(make([-1.0, -2.0, -30.0], mask=[True, True, False]))
    assert float(out.loss.detach()) == 1.5
    assert out.metrics["loss/target_logprob"] == (-3.0, 2.0)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("advantages", torch.tensor([1, -1]), "advantages must be a tensor of floats, found int64"),
        ("logprobs", torch.tensor([-1, -2]), "logprobs must be a tensor of floats, found int64"),
        ("advantages", [1.0, -1.0], "advantages must be a tensor of floats, found list"),
        ("mask", torch.tensor([1, 0]), "mask must be a bool tensor, found int64"),
        ("mask", torch.tensor([1.0, 0.0]), "mask must be a bool tensor, found float32"),
        ("kept", torch.tensor([1, 0]), "kept must be a bool tensor, found int64"),
        ("sequence_ids", torch.tensor([0.0, 1.0]), "sequence_ids must be a tensor of whole numbers, found float32"),
        ("pairs", torch.tensor([True, False]), "pairs must be a tensor of whole numbers, found bool"),
    ],
)
def test_columns_of_another_type_are_refused(column: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRecord, match=f"LossInputs.{message}"):
        replace(make([-1.0, -2.0], sequences=[0, 1]), **{column: value})


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidRecord, match=r"\[N\]"):
        make([0.0, 0.0], behaviour=[0.0])


def test_unknown_aggregation_and_missing_constant_are_refused() -> None:
    inputs = make([0.0])
    with pytest.raises(ConfigError, match="mean_of_means"):
        aggregate(torch.zeros(1), inputs, aggregation="mean_of_means")
    with pytest.raises(ConfigError, match="constant"):
        aggregate(torch.zeros(1), inputs, aggregation="sequence_sum_over_constant")


def test_losses_by_name() -> None:
    assert choose_loss("grpo").loss is grpo
    assert choose_loss("astraflow.losses.sft:sft").loss is sft
    for wrong in ("no_such.module:f", "astraflow.losses.sft:missing", "astraflow.losses.grpo:MAX_LOG_RATIO"):
        with pytest.raises(ConfigError, match=r"LossSettings\.name"):
            choose_loss(wrong)
