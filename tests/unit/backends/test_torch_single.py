"""The backend on tiny models: exact against separate rows, invariant to packing, bit for bit on resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from astraflow.backends.attention import TreeAttention
from astraflow.backends.scorer import Scorer
from astraflow.backends.torch_single import TorchBackend
from astraflow.errors import ConfigError, WeightsRefused
from astraflow.testing.check_backend import check_backend, with_advantage
from astraflow.trainer.checkpoints import Checkpoints
from astraflow.trainer.packing import pack
from astraflow.trainer.settings import LossSettings, TrainerSettings
from astraflow.types import Batch, Row
from astraflow.weights.digest import digest_files
from tests.unit.backends.rows import make_batch, make_row, of_rows

FP32 = TrainerSettings(dtype="float32", lr=1e-3)


def make(folder: Path, settings: TrainerSettings = FP32, **more: Any) -> TorchBackend:
    more.setdefault("steps", 6)
    return TorchBackend(folder, settings, **more)


def logprobs_of(backend: TorchBackend, rows: list[Row], budget: int) -> dict[tuple[int, int], float]:
    """(row, place in the row) → log-prob, by way of packed rows."""
    found: dict[tuple[int, int], float] = {}
    for packed in pack(rows, tokens_per_micro_batch=budget):
        logprobs = Scorer(backend._model, backend._attention, temperature=backend._temperature)(packed)
        places = packed.positions[packed.head[packed.target_head]] + 1
        for n, value in enumerate(logprobs.tolist()):
            found[int(packed.sequence[n]), int(places[n])] = value
    return found


def logprobs_alone(folder: Path, rows: list[Row], temperature: float = 1.0) -> dict[tuple[int, int], float]:
    """The same by the model's own forward on each row for itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: dict[tuple[int, int], float] = {}
    with torch.no_grad():
        for n, row in enumerate(rows):
            logits = model(torch.from_numpy(row.tokens).long()[None]).logits[0]
            logprobs = torch.log_softmax(logits / temperature, -1)
            for at in np.flatnonzero(row.mask):
                found[n, int(at)] = float(logprobs[at - 1, int(row.tokens[at])])
    return found


@pytest.mark.parametrize("budget", [30, 10_000])
@pytest.mark.parametrize("dense", [False, True])
def test_f33_packed_rows_equal_separate_rows(tiny: Path, dense: bool, budget: int) -> None:
    rows = list(make_batch(5).rows)
    backend = make(tiny, temperature=0.7)
    if dense:
        backend._model.set_attn_implementation("sdpa")
        backend._attention = TreeAttention(backend._model, dense=True)
    ours, alone = logprobs_of(backend, rows, budget), logprobs_alone(tiny, rows, 0.7)
    assert ours.keys() == alone.keys()
    assert max(abs(ours[key] - alone[key]) for key in alone) < 1e-5


def test_f33_the_case_of_the_reports(llama: Path) -> None:
    rows = [make_row([1, 2, 3], [False, True, True]), make_row([4, 5], [False, True])]
    ours, alone = logprobs_of(make(llama), rows, 100), logprobs_alone(llama, rows)
    assert ours.keys() == alone.keys()
    assert max(abs(ours[key] - alone[key]) for key in alone) < 1e-5


def test_f29_trained_targets_and_where_they_are_predicted(llama: Path) -> None:
    rows = [make_row([10, 11, 12, 13], [False, False, True, True])]
    assert set(logprobs_of(make(llama), rows, 100)) == {(0, 2), (0, 3)}


def gradients(folder: Path, batch: Batch, settings: TrainerSettings) -> dict[str, torch.Tensor]:
    backend = make(folder, replace(settings, clip_norm=0.0))
    assert backend.step(batch).updated
    return {name: each.clone() for name, each in backend._masters.gradients.items()}


@pytest.mark.parametrize(
    "loss",
    [
        LossSettings(),
        LossSettings(aggregation="sequence_mean"),
        LossSettings(aggregation="sequence_sum_over_constant", constant=12.0),
    ],
)
def test_f45_gradients_do_not_depend_on_micro_batches(tiny: Path, loss: LossSettings) -> None:
    batch = make_batch(2, supervised=2)
    whole, small = (
        gradients(tiny, batch, TrainerSettings(dtype="float32", loss=loss, tokens_per_micro_batch=n))
        for n in (10_000, 25)
    )
    scale = max(float(each.abs().max()) for each in whole.values())
    for name in whole:
        torch.testing.assert_close(small[name], whole[name], atol=1e-6 * scale + 1e-7, rtol=1e-4)


def test_f106_metrics_do_not_depend_on_micro_batches(llama: Path) -> None:
    reports = [
        make(llama, TrainerSettings(dtype="float32", tokens_per_micro_batch=n)).step(make_batch(2, supervised=2))
        for n in (10_000, 25)
    ]
    one, many = (dict(report.metrics) for report in reports)
    assert one.pop("step/micro_batches") == 1 < many.pop("step/micro_batches")
    assert one.pop("step/packed_tokens") <= many.pop("step/packed_tokens")
    assert many == pytest.approx(one, rel=1e-4, abs=1e-7)
    assert {"loss/total", "loss/clip_fraction", "loss/entropy", "loss/behaviour_kl", "step/grad_norm"} <= one.keys()


def test_order_of_rows_changes_nothing_but_rounding(llama: Path) -> None:
    batch = make_batch(3)
    turned = of_rows(batch.rows[::-1])
    a, b = (gradients(llama, each, FP32) for each in (batch, turned))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=1e-4)


def test_f52_one_gradient_that_is_not_finite_touches_nothing(llama: Path) -> None:
    backend, twin = make(llama), make(llama)
    for each in (backend, twin):
        each.step(make_batch(0))
    state = snapshot(backend)
    hook = dict(backend._model.named_parameters())["model.layers.0.mlp.up_proj.weight"].register_hook(
        lambda gradient: gradient * float("nan")
    )
    report = backend.step(make_batch(1, version=1))
    hook.remove()
    assert (report.updated, report.reason, backend.version) == (False, "non_finite", 1)
    assert all(torch.equal(a, b) for a, b in zip(state, snapshot(backend), strict=True))
    backend.step(make_batch(2, version=1))
    twin.step(make_batch(2, version=1))
    assert backend.digest() == twin.digest()


def snapshot(backend: TorchBackend) -> list[torch.Tensor]:
    own = backend._masters
    return [each.clone() for part in (own.tensors, own._moment1, own._moment2) for each in part.values()]


@pytest.mark.parametrize("batch", [with_advantage(make_batch(1), 0.0), of_rows([])], ids=["zero", "empty"])
def test_f52_no_signal_moves_neither_momentum_nor_decay(llama: Path, batch: Batch) -> None:
    backend = make(llama, TrainerSettings(dtype="float32", lr=0.1, weight_decay=0.5))
    backend.step(make_batch(0))
    state = snapshot(backend)
    report = backend.step(batch)
    assert (report.updated, report.reason, report.trained) == (False, "no_signal", ())
    assert all(torch.equal(a, b) for a, b in zip(state, snapshot(backend), strict=True))
    assert backend.version == 1


def test_f68_resume_after_two_of_six_steps_is_bit_equal(llama: Path, tmp_path: Path) -> None:
    """Warm-up 4, two micro-batches a step: rates, Adam's count and the weights go on as if nothing had happened."""
    settings = TrainerSettings(dtype="float32", lr=1e-3, warmup_steps=4, tokens_per_micro_batch=60)
    batches = [make_batch(n, version=n) for n in range(6)]
    straight = make(llama, settings)
    reports = [straight.step(batch) for batch in batches]
    assert [r.metrics["step/lr"] * 1e3 for r in reports] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert all(r.metrics["step/micro_batches"] >= 2 for r in reports)
    assert straight.version == 6
    stopped = make(llama, settings)
    for batch in batches[:2]:
        stopped.step(batch)
    stopped.save(tmp_path, {})
    resumed = make(llama, settings)
    resumed.load(tmp_path)
    assert resumed.version == 2
    again = [resumed.step(batch) for batch in batches[2:]]
    assert again[0].metrics["step/lr"] == pytest.approx(0.75e-3)
    assert again == reports[2:]
    assert resumed.digest() == straight.digest()


def test_f58_staleness_is_the_age_at_use(llama: Path) -> None:
    backend = make(llama)
    for n in range(3):
        backend.step(make_batch(n, version=n))
    rows = [
        make_row([10, 11, 12], [False, False, True], name="0/0/a/0", version=0, advantage=1.0),
        make_row([10, 11, 13], [False, False, True], name="0/1/a/0", version=3, advantage=-1.0),
        make_row([10, 11, 14], [False, False, True], name="0/2/a/0", version=5),  # of a version not reached yet
        make_row([10, 11, 15], [False, False, True], name="0/3/a/0", supervised=True),
    ]
    metrics = backend.step(of_rows(rows, version=3)).metrics
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 3.0)
    assert metrics["step/trained_tokens"] == 4


def test_supervised_rows_learn_their_targets(llama: Path) -> None:
    backend = make(llama, TrainerSettings(dtype="float32", lr=1e-4, lr_supervised=3e-3), steps=40)
    batch = of_rows([make_row([10, 11, 12, 13, 14], [False, False, True, True, True], supervised=True)])
    reports = [backend.step(batch) for _ in range(40)]
    assert reports[0].metrics["step/lr"] == pytest.approx(3e-3)
    assert reports[-1].metrics["loss/total"] < 0.1 * reports[0].metrics["loss/total"]
    assert reports[0].metrics["loss/total"] == pytest.approx(-reports[0].metrics["loss/target_logprob"])


def test_f52_supervised_rows_are_signal_without_any_advantage_of_rl(llama: Path) -> None:
    rows = [make_row([10, 11, 12], [False, False, True], advantage=0.0, name="0/0/a/0")]
    rows.append(make_row([10, 11, 13], [False, False, True], supervised=True, name="1/0/a/0"))
    report = make(llama).step(of_rows(rows))
    assert report.updated and len(report.trained) == 2


def test_temperature_is_of_reinforced_tokens_only(llama: Path) -> None:
    rows = [make_row([10, 11, 12], [False, True, True]), make_row([10, 11, 13], [False, True, True], supervised=True)]
    ours = logprobs_of(make(llama, temperature=0.5), rows, 100)
    hot, plain = logprobs_alone(llama, rows, 0.5), logprobs_alone(llama, rows)
    assert all(ours[key] == pytest.approx((plain if key[0] else hot)[key], abs=1e-5) for key in ours)


def test_exports_have_the_folders_names_dtypes_and_shapes(tiny: Path, tmp_path: Path) -> None:
    backend = make(tiny)
    stored = sorted(tiny.glob("*.safetensors"))
    assert backend.digest() == digest_files(stored), "version 0 is what the launcher publishes"
    backend.step(make_batch(0))
    (path,) = backend.export(tmp_path)
    before, after = load_file(stored[0]), load_file(path)
    assert {n: (t.dtype, t.shape) for n, t in after.items()} == {n: (t.dtype, t.shape) for n, t in before.items()}
    assert backend.digest() == digest_files([path]) != digest_files(stored)
    assert "lm_head.weight" not in after, "tied weights are written once"


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_bf16_folders_stay_bf16_whatever_computes(llama_bf16: Path, tmp_path: Path, compute: str) -> None:
    backend = make(llama_bf16, TrainerSettings(dtype=compute, lr=1e-3))
    assert backend.digest() == digest_files(sorted(llama_bf16.glob("*.safetensors")))
    backend.step(make_batch(0))
    (path,) = backend.export(tmp_path)
    assert {each.dtype for each in load_file(path).values()} == {torch.bfloat16}
    assert backend.digest() == digest_files([path])


def test_bf16_computation_keeps_fp32_masters_of_an_fp32_folder(llama: Path, tmp_path: Path) -> None:
    """Updates far smaller than a bf16 step must add up."""
    backend = make(llama, TrainerSettings(dtype="bfloat16", lr=1e-6))
    assert backend.digest() == digest_files(sorted(llama.glob("*.safetensors")))
    backend.step(make_batch(0))
    (path,) = backend.export(tmp_path)
    moved = (
        load_file(path)["model.embed_tokens.weight"]
        - load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    )
    assert moved.dtype is torch.float32
    assert 0 < float(moved.abs().max()) < 2e-6


def test_bf16_and_fp32_agree_on_the_gradient(llama: Path) -> None:
    batch = make_batch(4)
    exact = gradients(llama, batch, FP32)
    rough = gradients(llama, batch, TrainerSettings(dtype="bfloat16"))
    a = torch.cat([each.flatten() for each in exact.values()])
    b = torch.cat([each.flatten() for each in rough.values()])
    assert float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > 0.999


def test_conformance(tiny: Path, tmp_path: Path) -> None:
    check_backend(lambda: make(tiny), [make_batch(n) for n in range(3)], tmp_path)


def test_conformance_in_bf16(llama_bf16: Path, tmp_path: Path) -> None:
    settings = TrainerSettings(dtype="bfloat16", lr=1e-3, tokens_per_micro_batch=60)
    check_backend(lambda: make(llama_bf16, settings), [make_batch(n) for n in range(3)], tmp_path)


@pytest.mark.parametrize("name", ["master.safetensors", "moment1.safetensors", "moment2.safetensors", "state.json"])
def test_a_checkpoint_torn_at_any_file_is_not_used(llama: Path, tmp_path: Path, name: str) -> None:
    backend, checkpoints = make(llama), Checkpoints(tmp_path, kept=2)
    for n in range(2):
        backend.step(make_batch(n, version=n))
        checkpoints.write(n + 1, lambda folder: backend.save(folder, {}), [])
    path = tmp_path / "step-00000002" / name
    path.write_bytes(path.read_bytes()[:-7])
    found = checkpoints.newest()
    assert found is not None and found[0] == 1
    resumed = make(llama)
    resumed.load(found[1])
    assert resumed.version == 1


def test_a_checkpoint_of_another_model_changes_nothing(llama: Path, llama_bf16: Path, tmp_path: Path) -> None:
    from astraflow.run.tiny_model import TinyModel

    other = TinyModel(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32).build(tmp_path / "other")
    make(other).save(tmp_path, {})
    backend = make(llama)
    before = backend.digest()
    with pytest.raises(WeightsRefused, match="another model"):
        backend.load(tmp_path)
    assert backend.digest() == before


def test_settings_that_cannot_work_are_refused_before_a_step(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        make(tmp_path)
    with pytest.raises(ConfigError, match="temperature > 0, found 0"):
        make(llama, temperature=0.0)
    with pytest.raises(ConfigError, match="warmup_steps 9"):
        make(llama, TrainerSettings(schedule="linear", warmup_steps=9))


def test_a_loss_of_ones_own_by_name(llama: Path) -> None:
    settings = TrainerSettings(dtype="float32", loss=LossSettings(name="astraflow.losses.sft:sft"))
    report = make(llama, settings).step(make_batch(0))
    assert report.updated and "loss/target_logprob" in report.metrics
