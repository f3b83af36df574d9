"""The critic beside a policy: whose state a value is of, what is made of it, and that nothing of it shows elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from astraflow.backends.critic import WEIGHT, Critic
from astraflow.backends.torch_single import TorchBackend
from astraflow.errors import WeightsRefused
from astraflow.testing.check_backend import _check_resume, _check_steps, with_advantage
from astraflow.trainer.packing import pack
from astraflow.trainer.settings import CriticSettings, LossSettings, TrainerSettings
from astraflow.types import Batch, Row
from tests.unit.backends.rows import make_batch, make_row, of_rows

PPO = LossSettings(name="ppo", options={"value_coefficient": 0.5})
VAPO = LossSettings(name="vapo")


def backend(folder: Path, loss: LossSettings = PPO, *, tokens: int = 10_000, steps: int = 10, **critic: Any) -> Any:
    settings = TrainerSettings(
        dtype="float32", tokens_per_micro_batch=tokens, loss=loss, critic=CriticSettings(**critic), clip_norm=0.0
    )
    return TorchBackend(folder, settings, steps=steps, temperature=1.0, device="cpu")


def drawn_head(made: TorchBackend) -> Critic:
    """Its critic, with a head that is not zero."""
    critic = made._critic
    assert critic is not None
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        critic._weight.copy_(0.3 * torch.randn(critic._weight.shape, generator=generator))
        critic._bias.fill_(0.1)
    return critic


def values_alone(folder: Path, rows: tuple[Row, ...], critic: Critic) -> list[list[float]]:
    """By the plain model on each row for itself: V of the tokens before a trained one, in the order of the row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for row in rows:
            hidden = model.base_model(torch.from_numpy(row.tokens).long()[None]).last_hidden_state[0]
            judged = hidden @ critic._weight[0] + critic._bias
            found.append([float(judged[at - 1]) for at in np.flatnonzero(row.mask)])
    return found


def prepared(made: TorchBackend, batch: Batch) -> Any:
    """What the policy's loss gets, joined over the packed rows."""
    from astraflow.backends.columns import Columns
    from astraflow.losses.whole import joined

    packs = pack(batch.rows, tokens_per_micro_batch=made.settings.tokens_per_micro_batch)
    parts = Columns.of(batch, torch.device("cpu")).prepared(
        packs, made._chosen, {}, current=made._current, reference=None, critic=made._critic
    )
    assert parts is not None
    return joined(parts)


def by_row(whole: Any, column: str, rows: int) -> list[list[float]]:
    return [getattr(whole, column)[whole.sequence_ids == n].tolist() for n in range(rows)]


# ── values ──


def test_a_value_is_of_the_state_before_its_token(tiny: Path) -> None:
    """Rows that share their prompt, and so the state before their first token, which the tree holds once."""
    made = backend(tiny, tokens=30)
    batch = make_batch(3)
    critic = drawn_head(made)
    found = by_row(prepared(made, batch), "old_values", len(batch.rows))
    expected = values_alone(tiny, batch.rows, critic)
    for mine, alone in zip(found, expected, strict=True):
        assert mine == pytest.approx(alone, abs=1e-5)


def test_a_new_critic_is_worth_nothing_and_advantages_are_the_rewards(llama: Path) -> None:
    batch = of_rows([make_row([1, 2, 3, 4], [False, True, True, True], advantage=2.0)])
    whole = prepared(backend(llama, lam=1.0), batch)
    assert whole.old_values.tolist() == [0.0] * 3
    assert whole.advantages.tolist() == whole.returns.tolist() == [2.0] * 3


# ── what is made of them ──


@pytest.mark.parametrize(("lam", "gamma"), [(0.95, 1.0), (0.5, 0.9), (1.0, 1.0), (0.0, 1.0)])
def test_advantages_are_the_textbooks(llama: Path, lam: float, gamma: float) -> None:
    """A_t = sum of (gamma lam)^k delta_t+k, the reward at the last trained token; returns are what was earned."""
    made = backend(llama, tokens=25, lam=lam, gamma=gamma)
    batch = make_batch(4)
    drawn_head(made)
    whole = prepared(made, batch)
    values, rows = by_row(whole, "old_values", len(batch.rows)), len(batch.rows)
    for row, v, mine, goal in zip(
        batch.rows, values, by_row(whole, "advantages", rows), by_row(whole, "returns", rows), strict=True
    ):
        earned = np.zeros(len(v))
        places = np.flatnonzero(row.mask).tolist()
        for run in row.advantages:
            earned[places.index(run.stop - 1)] = run.value
        delta = [earned[t] + (gamma * v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(v))]
        expected = [sum((gamma * lam) ** k * delta[t + k] for k in range(len(v) - t)) for t in range(len(v))]
        assert mine == pytest.approx(expected, abs=1e-5)
        assert goal == pytest.approx([sum(gamma**k * earned[t + k] for k in range(len(v) - t)) for t in range(len(v))])


def test_a_turn_earns_its_reward_once(llama: Path) -> None:
    """Two turns of three tokens that earned 1 and 2, a tool's answer between them: returns 3 3 3 2 2 2."""
    row = make_row(np.arange(1, 11), [False, False] + [True] * 3 + [False] * 2 + [True] * 3)
    runs = tuple(msgspec.structs.replace(run, value=float(n + 1)) for n, run in enumerate(row.advantages))
    whole = prepared(backend(llama), of_rows([msgspec.structs.replace(row, advantages=runs)]))
    assert whole.returns.tolist() == [3.0] * 3 + [2.0] * 3


def test_a_return_runs_through_the_samples_of_its_trajectory(llama: Path) -> None:
    """An edited history began a new sample: what it earned is the first one's return too, and nobody else's."""
    ids = ("0/0/a/1", "0/0/a/0", "0/1/a/0", "0/0/b/0")
    rows = [
        make_row([1, 2, 3 + n], [False, True, True], name=name, advantage=float(n + 1)) for n, name in enumerate(ids)
    ]
    rows.append(msgspec.structs.replace(rows[0], use=1))
    found = by_row(prepared(backend(llama, tokens=3), of_rows(rows)), "returns", len(rows))
    assert found == [[1.0, 1.0], [3.0, 3.0], [3.0, 3.0], [4.0, 4.0], [1.0, 1.0]]


def test_lambda_by_length_is_that_of_the_trajectory(llama: Path) -> None:
    """alpha .5 and 4 tokens in two samples: 1 - 1 / 2."""
    rows = [make_row([1, 2, 3], [False, True, True], name=f"0/0/a/{n}", advantage=float(n)) for n in range(2)]
    whole = prepared(backend(llama, VAPO, alpha=0.5), of_rows(rows))
    assert by_row(whole, "advantages", 2) == [[0.125, 0.25], [0.5, 1.0]]


def test_the_critics_lambda_is_apart_from_the_policys(llama: Path) -> None:
    made = backend(llama, lam=0.5, lam_returns=0.0)
    batch = make_batch(5)
    drawn_head(made)
    whole = prepared(made, batch)
    old, goal = by_row(whole, "old_values", len(batch.rows)), by_row(whole, "returns", len(batch.rows))
    assert all(mine[:-1] == pytest.approx(v[1:], abs=1e-5) for mine, v in zip(goal, old, strict=True) if len(v) == 2)
    plain = prepared(backend(llama, lam=0.5), batch)
    assert by_row(plain, "returns", len(batch.rows)) != goal


# ── the gradient ──


def test_the_critics_gradient_is_that_of_the_plain_model(llama: Path) -> None:
    """Autograd through transformers' own forward on separate rows: (V - R)² / 2 over the tokens of the batch."""
    made, batch = backend(llama, lam=1.0), make_batch(6)
    critic = drawn_head(made)
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    weight, bias = critic._weight.detach().clone().requires_grad_(), critic._bias.detach().clone().requires_grad_()
    made.step(batch)
    loss: Tensor | float = 0.0
    for row in batch.rows:
        hidden = model.base_model(torch.from_numpy(row.tokens).long()[None]).last_hidden_state[0]
        at = torch.from_numpy(np.flatnonzero(row.mask)) - 1
        earned = sum(run.value for run in row.advantages)
        later = np.cumsum([run.value for run in row.advantages])  # of runs before: what a later token no longer earns
        goal = torch.zeros(len(at))
        for n, place in enumerate(np.flatnonzero(row.mask).tolist()):
            run = next(k for k, r in enumerate(row.advantages) if r.start <= place < r.stop)
            goal[n] = float(earned - (later[run - 1] if run else 0.0))
        loss = loss + 0.5 * ((hidden[at] @ weight[0] + bias - goal) ** 2).sum() / 2 / batch.tokens
    torch.autograd.backward(loss)  # type: ignore[arg-type]
    assert weight.grad is not None
    plain = {f"{name}": each.grad for name, each in model.base_model.named_parameters()} | {WEIGHT: weight.grad}
    for name, wanted in plain.items():
        assert wanted is not None
        torch.testing.assert_close(critic._masters.gradients[name], wanted, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("loss", [replace(PPO, aggregation="sequence_mean"), VAPO])
def test_f45_micro_batches_change_neither_gradient(llama: Path, loss: LossSettings) -> None:
    batch = make_batch(7, supervised=2)
    reports, gradients = [], []
    for tokens in (10_000, 25):
        made = backend(llama, loss, tokens=tokens)
        critic = drawn_head(made)
        reports.append(made.step(batch))
        both = {**made._masters.gradients, **{f"critic.{n}": g for n, g in critic._masters.gradients.items()}}
        gradients.append({name: each.clone() for name, each in both.items()})
    one, many = (dict(report.metrics) for report in reports)
    assert one.pop("step/micro_batches") == 1 < many.pop("step/micro_batches")
    many.pop("step/packed_tokens")
    assert {name: one[name] for name in many} == pytest.approx(many, rel=1e-4, abs=1e-6)
    for name, whole in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], whole, atol=2e-6, rtol=1e-4)


def test_f37_order_of_rows_changes_nothing(llama: Path) -> None:
    batch = make_batch(8)
    turned = msgspec.structs.replace(batch, rows=batch.rows[::-1])
    norms = []
    for each in (batch, turned):
        made = backend(llama, VAPO, alpha=0.5)
        drawn_head(made)
        norms.append(made.step(each).metrics)
    assert norms[1]["critic/grad_norm"] == pytest.approx(norms[0]["critic/grad_norm"], rel=1e-5)
    assert norms[1]["step/grad_norm"] == pytest.approx(norms[0]["step/grad_norm"], rel=1e-5)


def test_a_step_tells_how_the_critic_judged_before_it_learned(llama: Path) -> None:
    """A new one is 0 everywhere; with a learning rate of 0 it stays so, with one that is not the next step tells."""
    batch = make_batch(9)
    for lr in (0.0, 1e-2):
        made = backend(llama, lr=lr)
        first, second = (made.step(batch).metrics for _ in range(2))
        assert (first["critic/value_deviation"], first["critic/relative_error"]) == (0.0, pytest.approx(1.0))
        assert first["critic/explained_variance"] == pytest.approx(0.0) and first["critic/return_deviation"] > 0
        assert (second["critic/value_deviation"] > 0) == (lr > 0)


def test_updates_are_of_the_critic_alone_and_towards_the_same_returns(llama: Path) -> None:
    batch = make_batch(9)
    errors, digests = [], []
    for updates in (1, 10):
        made = backend(llama, updates=updates, lr=1e-3)
        made.step(batch)
        digests.append(made.digest())
        after = prepared(made, batch)
        errors.append(float((after.old_values - after.returns).square().mean()))
    assert digests[0] == digests[1], "the policy's step is of the values before any of them"
    assert errors[1] < 0.8 * errors[0]


def test_a_value_clip_holds_values_to_those_before_the_batch(llama: Path) -> None:
    """Once a value is further than .01 from the old one, its error is that at the bound, and flat."""
    loss = replace(PPO, options={"value_coefficient": 0.5, "value_clip": 0.01})
    moved = []
    for each in (PPO, loss):
        made = backend(llama, each, updates=10, lr=1e-3)
        batch = with_advantage(make_batch(10), 5.0)
        before = prepared(made, batch).old_values
        made.step(batch)
        moved.append(float((prepared(made, batch).old_values - before).abs().mean()))
    assert moved[1] < 0.5 * moved[0]


# ── signal ──


def test_equal_rewards_are_a_signal_until_the_critic_knows_them(llama: Path) -> None:
    batch = with_advantage(make_batch(11), 1.0)
    made = backend(llama, lr=1e-3, updates=5)
    norms = [made.step(batch).metrics["step/grad_norm"] for _ in range(5)]
    assert norms[-1] < 0.7 * norms[0]
    nothing = backend(llama).step(with_advantage(batch, 0.0))
    assert (nothing.updated, nothing.reason) == (False, "no_signal"), "worth 0, judged 0: nothing moves"


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_f52_rewards_beyond_reason_leave_both_models_alone(llama: Path, value: float) -> None:
    """(V - 1e30)² is not finite in float32."""
    made = backend(llama, updates=3)
    assert made._critic is not None
    weights = {name: each.clone() for name, each in made._critic._masters.tensors.items()}
    before, batch = made.digest(), make_batch(12)
    row = msgspec.structs.replace(
        batch.rows[0], advantages=tuple(msgspec.structs.replace(r, value=value) for r in batch.rows[0].advantages)
    )
    report = made.step(msgspec.structs.replace(batch, rows=(row, *batch.rows[1:])))
    assert (report.updated, report.reason, report.trained) == (False, "non_finite", ())
    assert made.digest() == before and made.version == 0
    assert all(torch.equal(weights[name], each) for name, each in made._critic._masters.tensors.items())
    assert made.step(batch).updated


def test_a_batch_of_supervised_rows_alone_teaches_the_critic_nothing(llama: Path) -> None:
    made = backend(llama)
    assert made._critic is not None
    assert made.step(make_batch(groups=1, supervised=4)).updated
    assert made._critic._masters.steps == 0


# ── pretraining ──


@pytest.mark.parametrize("loss", [PPO, VAPO])
def test_pretraining_makes_versions_of_the_same_weights(llama: Path, loss: LossSettings) -> None:
    made = backend(llama, loss, pretraining=3, lr=1e-3)
    first, losses = made.digest(), []
    for n in range(3):
        report = made.step(make_batch(13))
        assert report.updated and report.trained and made.version == n + 1
        assert made.digest() == first and "step/lr" not in report.metrics
        losses.append(report.metrics["loss/value"])
    assert losses[2] < losses[0]
    report = made.step(make_batch(13))
    assert report.updated and made.version == 4 and made.digest() != first


def test_the_schedule_begins_after_pretraining(llama: Path) -> None:
    settings = TrainerSettings(
        dtype="float32", loss=PPO, critic=CriticSettings(pretraining=2), lr=1e-3, warmup_steps=2, schedule="linear"
    )
    made = TorchBackend(llama, settings, steps=6, temperature=1.0, device="cpu")
    found = [made.step(make_batch(n)).metrics.get("step/lr") for n in range(6)]
    assert found == [None, None, pytest.approx(5e-4), pytest.approx(1e-3), pytest.approx(1e-3), pytest.approx(5e-4)]


def test_value_pretraining_never_moves_the_policy(llama: Path) -> None:
    made = backend(llama, LossSettings(name="value_pretraining"), steps=5, lr=1e-3)
    first = made.digest()
    errors = [made.step(make_batch(14)).metrics["loss/value"] for _ in range(5)]
    assert made.digest() == first and made.version == 5 and errors[-1] < errors[0]


# ── checkpoints ──


@pytest.mark.parametrize("critic", [{"updates": 2}, {"pretraining": 1}, {"pretraining": 2}])
def test_resume_is_exact(llama: Path, tmp_path: Path, critic: dict[str, int]) -> None:
    batches = [msgspec.structs.replace(make_batch(n), version=n) for n in range(3)]
    _check_resume(lambda: backend(llama, VAPO, **critic), batches, tmp_path)
    if not critic.get("pretraining"):
        _check_steps(lambda: backend(llama, VAPO, **critic), batches, tmp_path)


@pytest.mark.parametrize("pretraining", [0, 2])
def test_a_critic_goes_on_bit_for_bit(llama: Path, tmp_path: Path, pretraining: int) -> None:
    """Its moments too: a step after loading is the step without."""
    made, resumed = (backend(llama, pretraining=pretraining) for _ in range(2))
    made.step(make_batch(0))
    made.save(tmp_path, {})
    resumed.load(tmp_path)
    for each in (made, resumed):
        each.step(make_batch(1))
    mine, theirs = made._critic._masters, resumed._critic._masters
    assert mine.steps == theirs.steps == 2 and made._critic.pretrained == resumed._critic.pretrained
    for ours, other in ((mine.tensors, theirs.tensors), (mine._moment2, theirs._moment2)):
        assert all(torch.equal(other[name], each) for name, each in ours.items())


def test_nothing_of_the_critic_is_published(llama: Path, tmp_path: Path) -> None:
    made, plain = backend(llama), TorchBackend(llama, TrainerSettings(dtype="float32"), steps=1)
    made.step(make_batch(0))
    assert made.tensors().keys() == plain.tensors().keys()
    assert (
        [path.name for path in made.export(tmp_path)] == ["model.safetensors"] == [p.name for p in tmp_path.iterdir()]
    )


def test_a_checkpoint_without_a_critic_is_refused(llama: Path, tmp_path: Path) -> None:
    plain = TorchBackend(llama, TrainerSettings(dtype="float32"), steps=1)
    plain.save(tmp_path, {})
    with pytest.raises(WeightsRefused, match="holds no critic"):
        backend(llama).load(tmp_path)


def test_in_bf16_the_head_stays_exact(llama_bf16: Path) -> None:
    settings = TrainerSettings(dtype="bfloat16", loss=PPO)
    made = TorchBackend(llama_bf16, settings, steps=3, device="cpu")
    assert made._critic is not None and made._critic._weight.dtype is torch.float32
    assert made.step(make_batch(0)).updated and made.step(make_batch(0)).updated
    assert made._critic._weight.dtype is torch.float32 and bool(made._critic._weight.any())
