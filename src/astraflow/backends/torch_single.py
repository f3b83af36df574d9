"""One process, one device, any Hugging Face causal LM whose tokens see only their own past.

    batch ─ pack ─► packed rows ─ hidden states ─ log-probs at heads ─ loss ─► gradients (fp32, whole batch) ─ AdamW

A step without signal, or with a gradient that is not finite, touches nothing (F52). Under a loss that needs values a
critic learns beside the policy (``critic.py``), in its first steps alone: they make versions with the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from astraflow.backends.attention import TreeAttention
from astraflow.backends.backbone import Backbone
from astraflow.backends.columns import Columns, Score
from astraflow.backends.critic import Critic, ValueLoss
from astraflow.backends.head import HeadForward, head_backward, head_forward
from astraflow.backends.masters import Masters, is_finite
from astraflow.backends.models import as_bits, choose_device, choose_dtype, load_model, sliding_window, stored_dtypes
from astraflow.backends.scorer import Scorer, heads_of
from astraflow.backends.self_check import check_packing
from astraflow.errors import ConfigError
from astraflow.losses.base import LossInputs, LossOutput
from astraflow.losses.choose import choose_loss
from astraflow.losses.sft import sft
from astraflow.losses.vapo import value_pretraining
from astraflow.observe.metrics import merge_means
from astraflow.trainer.backend import StepReport
from astraflow.trainer.packing import PackedRow, pack
from astraflow.trainer.schedule import learning_rate
from astraflow.trainer.settings import TrainerSettings
from astraflow.types import Batch, Row
from astraflow.weights.digest import digest_tensors

STATE = "state.json"
Parts = dict[str, tuple[float, float]]


class TorchBackend:
    """Implements ``trainer.backend.Backend``. Same batches, same machine: same bits."""

    def __init__(
        self, model_dir: Path, settings: TrainerSettings, *, steps: int, temperature: float = 1.0, device: str = "auto"
    ) -> None:
        """``steps``: of the whole run, for the schedule. ``temperature``: that the recipe samples with; log-probs are
        those of softmax(logits / temperature), supervised rows take 1. Raises ConfigError.
        """
        settings.check_steps(steps)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.settings = settings
        self._steps = steps
        self._temperature = settings.temperature or temperature
        if not self._temperature > 0:
            raise ConfigError(f"training needs a sampling temperature > 0, found {self._temperature}")
        self._chosen = choose_loss(settings.loss.name)
        self._device = choose_device(device)
        self._stored = stored_dtypes(model_dir)
        self._model = load_model(model_dir, self._device)
        self._window = sliding_window(self._model)
        self._attention = TreeAttention(self._model)
        check_packing(self._model, self._attention)
        self.dtype = choose_dtype(settings.dtype, parameters=self._model.num_parameters(), device=self._device)
        self._current = Scorer(self._model, self._attention, temperature=self._temperature)
        self._reference = self._load_reference(model_dir)
        self._masters = Masters(self._model.named_parameters(), compute=self.dtype)
        self._backbone = Backbone(self._model, self._attention, self._masters)
        self._pretraining = settings.pretraining_of(steps)
        self._critic = self._load_critic(model_dir)
        self._head = self._model.get_output_embeddings().weight
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._head_name = names[id(self._head)]
        every = self._model.named_parameters(remove_duplicate=False)
        self._master_name = {name: names[id(parameter)] for name, parameter in every}
        """Tied weights have several names and one master."""
        missing = sorted(set(self._stored) - set(self._model.state_dict()))
        if missing:
            raise ConfigError(f"model folder {model_dir}: tensor {missing[0]} is not in the loaded model")

    @property
    def version(self) -> int:
        return self._masters.steps + self._pretrained

    @property
    def _pretrained(self) -> int:
        """Committed steps in which the critic learned alone."""
        return 0 if self._critic is None else self._critic.pretrained

    def _load_reference(self, model_dir: Path) -> Score | None:
        """The policy of version 0, if the loss compares with it: a second model in memory, never trained."""
        if "reference_logprobs" not in self.settings.loss.needs:
            return None
        model = load_model(model_dir, self._device).requires_grad_(False).to(self.dtype)
        return Scorer(model, TreeAttention(model), temperature=self._temperature)

    def _load_critic(self, model_dir: Path) -> Critic | None:
        if not self.settings.loss.needs_critic:
            return None
        return Critic(model_dir, self.settings, device=self._device, dtype=self.dtype, pretraining=self._pretraining)

    # ── a step ──

    def step(self, batch: Batch) -> StepReport:
        rows = batch.rows
        trained = tuple((row.sample_id, row.use) for row in rows if row.mask.any())
        always = self._reference is not None or self._critic is not None  # then equal rewards may be a signal too
        if not any(_has_signal(row) for row in rows) and not (always and trained):
            return StepReport(updated=False, reason="no_signal", metrics=_counts(batch))
        self._check_lengths(rows)
        packs = pack(rows, tokens_per_micro_batch=self.settings.tokens_per_micro_batch)
        columns = Columns.of(batch, self._device)
        prepared = columns.prepared(
            packs,
            self._chosen,
            dict(self.settings.loss.arguments),
            current=self._current,
            reference=self._reference,
            critic=self._critic,
        )
        if self._critic is not None and self._critic.is_pretraining:
            reason, metrics = self._teach(self._critic, packs, prepared)
        else:
            reason, metrics = self._train(packs, columns, prepared)
        metrics = {**_counts(batch), **_packing(packs), **metrics}
        if reason is not None:
            self._masters.drop_gradients()
            if self._critic is not None:
                self._critic.forget()
        return StepReport(
            updated=reason is None, reason=reason, metrics=metrics, trained=trained if reason is None else ()
        )

    def _train(
        self, packs: Sequence[PackedRow], columns: Columns, prepared: list[LossInputs] | None
    ) -> tuple[str | None, dict[str, float]]:
        """The policy, and after it its critic. Why there was no step, and metrics."""
        found = [
            self._accumulate(packed, columns, None if prepared is None else prepared[n])
            for n, packed in enumerate(packs)
        ]
        loss, norm, judged = sum(part for part, _ in found), self._masters.gradient_norm(), 0.0
        supervised = all(bool(packed.supervised.all()) for packed in packs)
        steps = self._steps - self._pretraining
        lr = learning_rate(self.settings, step=self._masters.steps + 1, steps=steps, supervised=supervised)
        metrics = {**merge_means(metrics for _, metrics in found), "step/lr": lr}
        if self._critic is not None:
            assert prepared is not None, "a critic looks at the whole batch"
            value_loss = self._value_loss(prepared)
            judged, _ = self._critic.differentiate(packs, value_loss)
        if not is_finite(loss, norm, judged) or norm == 0.0:
            return "no_signal" if norm == 0.0 else "non_finite", metrics
        self._masters.update(self.settings, lr=lr, norm=norm)
        metrics |= {"loss/total": loss, "step/grad_norm": norm}
        if self._critic is not None and prepared is not None:
            self._critic.learn(packs, value_loss, norm=judged)
            metrics |= self._critic.metrics(prepared, judged)
        return None, metrics

    def _teach(
        self, critic: Critic, packs: Sequence[PackedRow], prepared: list[LossInputs] | None
    ) -> tuple[str | None, dict[str, float]]:
        """The critic alone, as ``_train``."""
        assert prepared is not None, "a critic looks at the whole batch"
        value_loss = self._value_loss(prepared, alone=True)
        norm, parts = critic.differentiate(packs, value_loss)
        metrics = merge_means(parts)
        if not is_finite(norm) or norm == 0.0:
            return "no_signal" if norm == 0.0 else "non_finite", metrics
        critic.learn(packs, value_loss, norm=norm)
        critic.pretrained += 1
        return None, {**metrics, **critic.metrics(prepared, norm)}

    def _value_loss(self, prepared: Sequence[LossInputs], *, alone: bool = False) -> ValueLoss:
        """Of the critic: the policy's loss with log-probs that have no gradient, or ``value_pretraining``."""
        aggregation, constant = self.settings.loss.aggregation_and_constant

        def loss(n: int, values: Tensor) -> LossOutput:
            part = replace(prepared[n], values=values)
            if alone:
                return value_pretraining(part, aggregation=aggregation, constant=constant)
            return self._chosen.loss(part, **self.settings.loss.arguments)

        return loss

    def _check_lengths(self, rows: tuple[Row, ...]) -> None:
        longest = max(len(row.tokens) for row in rows)
        if self._window is not None and longest > self._window:
            raise ConfigError(f"a row of {longest} tokens is longer than the model's attention window {self._window}")

    def _accumulate(self, packed: PackedRow, columns: Columns, prepared: LossInputs | None) -> tuple[float, Parts]:
        """Forward and backward of one packed row; its share of the loss and metrics as (sum, count)."""
        hidden, inputs = self._backbone.hidden(packed)
        heads = heads_of(packed, self._temperature, self._device)
        picked = hidden.detach()[self._to(packed.head)]
        forward = head_forward(picked, self._head.detach(), heads)
        loss, gradient, metrics = self._losses(forward, packed, columns, prepared)
        d_picked, d_weight = head_backward(forward, gradient, picked, self._head.detach(), heads)
        self._masters.collect(self._head_name, d_weight)
        self._backbone.backward(packed, hidden, inputs, d_picked)
        count = float(len(packed.targets))
        metrics["loss/entropy"] = (float(forward.entropy[heads.target_head].sum()), count)
        return loss, metrics

    def _losses(
        self, forward: HeadForward, packed: PackedRow, columns: Columns, prepared: LossInputs | None
    ) -> tuple[float, Tensor, Parts]:
        """The loss by kind of row, and the gradient [N] of the log-probs. ``prepared``: of the rl rows."""
        logprobs = forward.logprobs.requires_grad_()
        total = 0.0
        metrics: Parts = {}
        for kind in (False, True):
            inputs = columns.inputs(packed, logprobs, supervised=kind)
            if not len(inputs.logprobs):
                continue
            if kind:
                output = self._sft(inputs)
            else:
                known = inputs if prepared is None else replace(prepared, logprobs=inputs.logprobs)
                output = self._chosen.loss(known, **self.settings.loss.arguments)
                metrics["logprob/gap"] = columns.gap(packed, logprobs)
            torch.autograd.backward(output.loss)
            total += float(output.loss.detach())
            metrics |= output.metrics
        gradient = logprobs.grad
        assert gradient is not None, "at least one target has a loss"
        forward.logprobs.detach_()
        return total, gradient, metrics

    def _sft(self, inputs: LossInputs) -> LossOutput:
        aggregation, constant = self.settings.loss.aggregation_and_constant
        return sft(inputs, aggregation=aggregation, constant=constant)

    def _to(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    # ── what leaves ──

    def tensors(self) -> dict[str, Tensor]:
        """Names, dtypes and shapes of the model folder; a view where the model computes in that dtype."""
        live, masters = self._model.state_dict(), self._masters.tensors
        found: dict[str, Tensor] = {}
        for name, dtype in self._stored.items():
            own = live[name]
            source = own if own.dtype is dtype else masters.get(self._master_name.get(name, ""), own)
            found[name] = source.detach().to(dtype)
        return found

    def export(self, folder: Path) -> list[Path]:
        path = folder / "model.safetensors"
        save_file(self.tensors(), path, {"format": "pt"})
        return [path]

    def digest(self) -> str:
        return digest_tensors(as_bits(self.tensors()))

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        self._masters.save(folder)
        if self._critic is not None:
            self._critic.save(folder)
        own = {"version": self.version, "dtype": str(self.dtype)}
        (folder / STATE).write_text(json.dumps({"own": own, "extra": extra}), encoding="utf-8")

    def load(self, folder: Path) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if self._critic is not None:
            self._critic.load(folder)
        self._masters.load(folder, steps=int(state["own"]["version"]) - self._pretrained)
        extra: dict[str, Any] = state["extra"]
        return extra

    def close(self) -> None:
        """Nothing is held that must be given back."""


def _has_signal(row: Row) -> bool:
    """Whether the row can move a weight: a trained token whose advantage is not 0."""
    return bool(row.mask.any()) and any(
        run.value != 0 and bool(row.mask[run.start : run.stop].any()) for run in row.advantages
    )


def _counts(batch: Batch) -> dict[str, float]:
    """Numbers that the rows alone decide. Staleness is that at use, over trained rl rows (F58)."""
    rows = [row for row in batch.rows if row.mask.any()]
    ages = [max(0, batch.version - min(s.version for s in row.spans)) for row in rows if row.spans]
    found = {"step/trained_tokens": float(sum(int(row.mask.sum()) for row in rows)), "step/rows": float(len(rows))}
    if ages:
        found |= {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))}
    return found


def _packing(packs: Sequence[PackedRow]) -> dict[str, float]:
    tokens = sum(len(packed.tokens) for packed in packs)
    return {"step/packed_tokens": float(tokens), "step/micro_batches": float(len(packs))}
