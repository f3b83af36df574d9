"""What a loss is given by a real trainer: ages, pairs, the reference, and a look at the whole batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from astraflow.backends.columns import Columns
from astraflow.backends.scorer import Scorer
from astraflow.backends.torch_single import TorchBackend
from astraflow.losses.choose import Chosen, choose_loss
from astraflow.trainer.packing import PackedRow, pack
from astraflow.trainer.settings import LossSettings, TrainerSettings
from astraflow.types import Batch, Row, Span
from tests.unit.backends.rows import make_batch, make_row, of_rows

CPU = torch.device("cpu")


def zero(packed: PackedRow) -> torch.Tensor:
    return torch.zeros(len(packed.targets))


def backend(folder: Path, name: str, *, tokens: int = 10_000, **options: Any) -> TorchBackend:
    settings = TrainerSettings(
        dtype="float32", tokens_per_micro_batch=tokens, loss=LossSettings(name=name, options=options)
    )
    return TorchBackend(folder, settings, steps=10, temperature=1.0, device="cpu")


def near(folder: Path, batch: Batch, *, spread: float = 0.3) -> Batch:
    """With behaviour log-probs around those of the model: drawn once, by row."""
    made = backend(folder, "grpo")
    rows = list(batch.rows)
    random = np.random.default_rng(0)
    for packed in pack(batch.rows, tokens_per_micro_batch=10_000):
        scored = Scorer(made._model, made._attention, temperature=1.0)(packed).numpy()
        for n, row in enumerate(rows):
            trained = np.flatnonzero(row.mask)
            logprobs = np.zeros(len(row.tokens), np.float32)
            places = packed.positions[packed.head[packed.target_head]] + 1
            mine = packed.sequence == n
            logprobs[places[mine]] = scored[mine] + spread * random.normal(size=len(trained))
            rows[n] = msgspec.structs.replace(row, logprobs=np.minimum(logprobs, 0))
    return msgspec.structs.replace(batch, rows=tuple(rows))


# ── the columns ──


def test_ages_are_by_token_and_never_below_zero() -> None:
    """Weights changed within the reply; a version above the current one was undone: its age is 0."""
    row = make_row([1, 2, 3, 4, 5], [False, True, True, True, True])
    spans = tuple(Span(start=n, stop=n + 1, version=v, digest="d") for n, v in ((1, 2), (2, 4), (3, 5), (4, 9)))
    batch = of_rows([msgspec.structs.replace(row, spans=spans)], version=5)
    (packed,) = pack(batch.rows, tokens_per_micro_batch=100)
    assert packed.versions.tolist() == [2, 4, 5, 9]
    inputs = Columns.of(batch, CPU).inputs(packed, zero(packed))
    assert inputs.ages is not None and inputs.ages.tolist() == [3, 1, 0, 0]


def test_the_kinds_of_rows_are_told_apart() -> None:
    rows: list[Row] = [
        make_row([1, 2, 3], [False, True, True], name="0/0/a/0"),
        make_row([1, 4], [False, True], name="0/1/a/0", supervised=True),
        make_row([1, 5], [False, True], name="0/2/a/0", advantage=-1.0),
    ]
    batch = of_rows(rows)
    (packed,) = pack(rows, tokens_per_micro_batch=100)
    columns = Columns.of(batch, CPU)
    rl, supervised = (columns.inputs(packed, zero(packed), supervised=kind) for kind in (False, True))
    assert rl.sequence_ids.tolist() == [2, 0, 0] and supervised.sequence_ids.tolist() == [1]
    assert rl.pairs is not None and rl.pairs.tolist() == [0, 0, 0]
    assert {rl.batch_tokens, supervised.batch_tokens} == {4} and rl.batch_sequences == 3


def test_the_gap_is_over_tokens_of_the_very_weights_that_the_step_starts_from() -> None:
    rows = [
        make_row([1, 2, 3], [False, True, True], name="0/0/a/0", logprob=-2.0, version=3),
        make_row([1, 4], [False, True], name="0/1/a/0", logprob=-9.0, version=2),
        make_row([1, 5], [False, True], name="0/2/a/0", supervised=True),
    ]
    (packed,) = pack(rows, tokens_per_micro_batch=100)
    columns = Columns.of(of_rows(rows, version=3), CPU)
    assert columns.gap(packed, torch.full((4,), -2.25)) == (pytest.approx(0.5), 2.0)
    later = Columns.of(of_rows(rows, version=4), CPU)
    assert later.gap(packed, zero(packed)) == (0.0, 0.0)


# ── what the loss decides first ──


def test_a_loss_without_a_prepare_costs_no_pass() -> None:
    def never(_: PackedRow) -> torch.Tensor:
        raise AssertionError("a pass that nobody asked for")

    packs = pack(make_batch().rows, tokens_per_micro_batch=50)
    assert Columns.of(make_batch(), CPU).prepared(packs, choose_loss("grpo"), {}, current=never, reference=None) is None


def test_prepare_sees_every_rl_token_once_and_each_pack_gets_its_own_back() -> None:
    seen = []

    def prepare(inputs: Any, **options: Any) -> Any:
        seen.append((inputs, options))
        return replace(inputs, kept=inputs.sequence_ids % 2 == 0, prepared=True)

    batch = make_batch(1, supervised=2)
    packs = pack(batch.rows, tokens_per_micro_batch=25)
    columns = Columns.of(batch, CPU)
    chosen = Chosen(choose_loss("m2po").loss, prepare)
    found = columns.prepared(packs, chosen, {"budget": 0.5}, current=zero, reference=None)
    assert found is not None and len(found) == len(packs) > 1
    ((whole, options),) = seen
    assert options == {"budget": 0.5}
    assert len(whole.logprobs) == sum(int((~p.supervised).sum()) for p in packs)
    assert (whole.batch_tokens, whole.batch_sequences) == (None, None)
    for packed, part in zip(packs, found, strict=True):
        assert part.sequence_ids.tolist() == packed.sequence[~packed.supervised].tolist()
        assert part.kept is not None and part.kept.tolist() == (part.sequence_ids % 2 == 0).tolist()
        assert part.batch_tokens == batch.tokens


@pytest.mark.parametrize("name", ["m2po", "online_dpo"])
def test_a_batch_of_supervised_rows_alone_has_nothing_to_decide(llama: Path, name: str) -> None:
    report = backend(llama, name).step(make_batch(groups=1, supervised=4))
    assert report.updated and "loss/target_logprob" in report.metrics


# ── a whole step ──


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("m2po", {"budget": 0.03}),
        ("online_dpo", {"beta": 0.5}),
        ("decoupled_ppo", {}),
        ("topr", {}),
        ("kimi", {}),
        ("ppo", {"kl_coefficient": 0.1}),
        ("grpo", {"kl_coefficient": 0.1, "kl": "k3_weighted"}),
        ("gspo", {}),
        ("cispo", {}),
        ("rloo", {}),
        ("reinforce_plus_plus", {"kl_coefficient": 0.1}),
        ("tis", {"cap": 1.1}),
        ("mis", {"low": 0.8, "high": 1.2}),
    ],
)
def test_f45_f49_micro_batches_change_neither_loss_nor_gradient(
    llama: Path, name: str, options: dict[str, Any]
) -> None:
    batch = near(llama, make_batch(5, version=3, supervised=1))
    reports, gradients = [], []
    for tokens in (10_000, 25):
        made = backend(llama, name, tokens=tokens, **options)
        reports.append(made.step(batch))
        gradients.append({each: tensor.clone() for each, tensor in made._masters.gradients.items()})
    one, many = (dict(report.metrics) for report in reports)
    assert one.pop("step/micro_batches") == 1 < many.pop("step/micro_batches")
    assert one.pop("step/packed_tokens") <= many.pop("step/packed_tokens")
    assert many == pytest.approx(one, rel=2e-4, abs=1e-6)
    scale = max(float(each.abs().max()) for each in gradients[0].values())
    for each, tensor in gradients[0].items():
        torch.testing.assert_close(gradients[1][each], tensor, atol=2e-6 * scale + 1e-7, rtol=1e-4)
    assert one["step/grad_norm"] > 0


def test_m2po_masks_by_the_moment_of_the_batch_as_the_trainer_computes_it(llama: Path) -> None:
    batch = near(llama, make_batch(5, version=3), spread=0.5)
    metrics = backend(llama, "m2po", budget=0.05).step(batch).metrics
    assert 0 < metrics["loss/clip_fraction"] < 0.5
    assert 0 < metrics["loss/second_moment"] <= 0.05
    free = backend(llama, "m2po", budget=100.0).step(batch).metrics
    assert free["loss/clip_fraction"] == 0 and free["loss/second_moment"] > 0.05


def inputs_of(llama: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """What decoupled_ppo got in a real step, and what it answered."""
    made = backend(llama, "decoupled_ppo", **options)
    seen: list[Any] = []

    def spy(inputs: Any, **given: Any) -> Any:
        seen.append((inputs, choose_loss("decoupled_ppo").loss(inputs, **given)))
        return seen[-1][1]

    monkeypatch.setattr(made, "_chosen", Chosen(spy))
    assert made.step(batch).updated
    ((inputs, output),) = seen
    return inputs, output


def test_the_recomputed_proximal_policy_is_that_of_a_pass_before_the_step(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch is one step: the log-probs of a pass of its own are those of the step's, and so is the gradient."""
    batch = near(llama, make_batch(8, version=3))
    (packed,) = pack(batch.rows, tokens_per_micro_batch=10_000)
    before = backend(llama, "decoupled_ppo")._current(packed)
    inputs, output = inputs_of(llama, batch, monkeypatch, recompute=True)
    torch.testing.assert_close(inputs.logprobs.detach(), before, atol=1e-6, rtol=0)
    explicit = replace(inputs, logprobs=before.clone().requires_grad_(), proximal_logprobs=before)
    again = choose_loss("decoupled_ppo").loss(explicit, recompute=True)
    torch.autograd.backward(again.loss)
    weight = (before - inputs.behaviour_logprobs).exp()
    kept = torch.where(weight > 5.0, 0.0, weight)
    assert explicit.logprobs.grad is not None
    torch.testing.assert_close(explicit.logprobs.grad, -kept * inputs.advantages / batch.tokens, atol=1e-6, rtol=1e-5)
    assert float(again.loss.detach()) == pytest.approx(float(output.loss.detach()), abs=1e-6)


def test_the_interpolated_proximal_policy_goes_by_the_age_of_each_token(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-3PO by hand: prox = behaviour / age + (1 - 1 / age) current; at age 0 the current policy."""
    inputs, output = inputs_of(llama, near(llama, make_batch(8, version=3)), monkeypatch)
    now, then, ages = inputs.logprobs.detach().double(), inputs.behaviour_logprobs.double(), inputs.ages
    assert set(ages.tolist()) >= {0, 1, 2}
    prox = torch.stack(
        [n if a == 0 else b / a + (1 - 1 / a) * n for n, b, a in zip(now, then, ages.tolist(), strict=True)]
    )
    weight, ratio, gain = (prox - then).exp(), (now - prox).exp(), inputs.advantages.double()
    terms = torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)) * torch.where(weight > 5.0, 0.0, weight)
    assert float(output.loss.detach()) == pytest.approx(float(terms.sum() / inputs.batch_tokens), abs=1e-5)


def test_the_reference_is_version_zero_and_stays_it(llama: Path) -> None:
    """Before the first step every margin is 0: the loss is log 2. Then the policy leaves, the reference does not."""
    made = backend(llama, "online_dpo", beta=2.0)
    batch = make_batch(6)
    first = made.step(batch)
    assert first.metrics["loss/total"] == pytest.approx(np.log(2), abs=1e-4)
    assert first.metrics["loss/pair_margin"] == pytest.approx(0.0, abs=1e-4)
    for _ in range(3):
        last = made.step(batch)
    assert last.metrics["loss/total"] < first.metrics["loss/total"] - 1e-4
    assert last.metrics["loss/pair_margin"] > 0 and last.metrics["loss/pair_right"] > 0.5


def test_the_gap_of_equal_log_probs_is_rounding(llama: Path) -> None:
    batch = near(llama, make_batch(7), spread=0.0)
    assert backend(llama, "grpo").step(batch).metrics["logprob/gap"] < 1e-5
    apart = near(llama, make_batch(7), spread=0.5)
    assert 0.2 < backend(llama, "grpo").step(apart).metrics["logprob/gap"] < 0.6
