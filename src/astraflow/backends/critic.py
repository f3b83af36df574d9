"""The critic: what a state is worth, by a second model of the policy's architecture with a scalar head in fp32.

    batch ─ values, no gradient ─► gae over trajectories ─► advantages, returns ─► the policy's loss
                                                                       └─► the critic's own steps, towards the returns

It begins with the policy's weights of version 0 and a head of zeros, and is never published. The value that belongs to
a token is that of the state before it: it stands where the token is predicted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from astraflow.backends.attention import TreeAttention
from astraflow.backends.backbone import Backbone
from astraflow.backends.masters import Masters, is_finite
from astraflow.backends.models import load_model
from astraflow.errors import WeightsRefused
from astraflow.losses.base import LossInputs, LossOutput
from astraflow.losses.gae import gae, judged, length_adaptive_lambda, returns_of
from astraflow.trainer.packing import PackedRow
from astraflow.trainer.settings import CriticSettings, TrainerSettings
from astraflow.trainer.trajectories import Trajectories

PREFIX = "critic."
STATE = "critic.json"
WEIGHT, BIAS = "value.weight", "value.bias"
Parts = dict[str, tuple[float, float]]
ValueLoss = Callable[[int, Tensor], LossOutput]
"""(index of the packed row, values [N] of its rl tokens with a gradient) → their loss."""


class Critic:
    """Same batches, same machine: same bits."""

    def __init__(
        self, folder: Path, settings: TrainerSettings, *, device: torch.device, dtype: torch.dtype, pretraining: int
    ) -> None:
        """``pretraining``: steps in which it learns alone."""
        self.settings: CriticSettings = settings.critic
        self._trainer = settings
        self._lam = settings.critic.lam_for(settings.loss.name)
        self._pretraining = pretraining
        self.pretrained = 0
        """Steps so far in which it learned alone."""
        body = load_model(folder, device).base_model
        size = body.get_input_embeddings().weight.shape[1]
        self._weight = nn.Parameter(torch.zeros(1, size, device=device))
        self._bias = nn.Parameter(torch.zeros(1, device=device))
        head = [(WEIGHT, self._weight), (BIAS, self._bias)]
        self._masters = Masters([*body.named_parameters(), *head], compute=dtype, exact=(WEIGHT, BIAS))
        self._backbone = Backbone(body, TreeAttention(body), self._masters)
        self._device = device

    @property
    def is_pretraining(self) -> bool:
        """Whether the coming step is the critic's alone."""
        return self.pretrained < self._pretraining

    @torch.no_grad()
    def values(self, packed: PackedRow) -> Tensor:
        """float32 [N] as it judges now."""
        hidden, _ = self._backbone.hidden(packed)
        picked = hidden[self._to(packed.head)].float()
        return self._at_heads(picked)[self._to(packed.target_head)]

    @torch.no_grad()
    def estimated(self, whole: LossInputs, rewards: Tensor, trajectories: Trajectories) -> LossInputs:
        """``whole``, whose ``old_values`` are known, with ``advantages`` and ``returns`` over whole trajectories."""
        assert whole.old_values is not None
        rank = self._to(trajectories.rank)[whole.sequence_ids]
        order = torch.argsort(rank, stable=True)
        ids = self._to(trajectories.number)[whole.sequence_ids][order]
        old, earned, mask = whole.old_values[order], rewards[order], whole.mask[order]
        own = self.settings
        lam: Tensor | float
        lam = length_adaptive_lambda(mask, ids, alpha=own.alpha) if self._lam is None else self._lam
        advantages = gae(earned, old, mask, ids, lam=lam, gamma=own.gamma)
        if own.lam_returns == 1:  # without any value: exactly what was earned
            returns = returns_of(earned, mask, ids, gamma=own.gamma)
        else:
            returns = gae(earned, old, mask, ids, lam=own.lam_returns, gamma=own.gamma) + old
        back = torch.argsort(order)
        return replace(whole, advantages=advantages[back], returns=returns[back])

    def differentiate(self, packs: Sequence[PackedRow], loss: ValueLoss) -> tuple[float, list[Parts]]:
        """The batch's gradient into the masters: its norm, and the loss's metrics of each packed row."""
        found: list[Parts] = []
        for n, packed in enumerate(packs):
            own = self._to(packed.target_head[~packed.supervised])
            if not len(own):
                continue
            hidden, inputs = self._backbone.hidden(packed)
            picked = hidden.detach()[self._to(packed.head)].float()
            values = self._at_heads(picked)[own].requires_grad_()
            output = loss(n, values)
            torch.autograd.backward(output.loss)
            assert values.grad is not None, "the loss is of the values"
            at_heads = torch.zeros(len(picked), device=self._device).index_add_(0, own, values.grad)
            self._masters.collect(WEIGHT, at_heads[None] @ picked)
            self._masters.collect(BIAS, at_heads.sum()[None])
            d_heads = at_heads[:, None] * self._weight.detach()
            self._backbone.backward(packed, hidden, inputs, d_heads.to(hidden.dtype))
            found.append(output.metrics)
        return self._masters.gradient_norm(), found

    def update(self, norm: float) -> None:
        """One AdamW step with what was collected; none where it is nothing, or not finite."""
        if is_finite(norm) and norm > 0:
            self._masters.update(self._trainer, lr=self.settings.lr, norm=norm)
        else:
            self._masters.drop_gradients()

    def learn(self, packs: Sequence[PackedRow], loss: ValueLoss, *, norm: float) -> None:
        """All ``updates`` of one batch; the first is of what ``differentiate`` has collected, of norm ``norm``."""
        self.update(norm)
        for _ in range(self.settings.updates - 1):
            self.update(self.differentiate(packs, loss)[0])

    def forget(self) -> None:
        """What was collected is of a step that is none."""
        self._masters.drop_gradients()

    def metrics(self, inputs: Sequence[LossInputs], norm: float) -> dict[str, float]:
        """How it judged the batch before it learned from it."""
        columns = [(each.old_values, each.returns, each.mask) for each in inputs]
        old, returns, mask = (torch.cat([c for c in column if c is not None]) for column in zip(*columns, strict=True))
        found = {"grad_norm": norm, "lr": self.settings.lr, **judged(old, returns, mask)}
        return {f"critic/{name}": value for name, value in found.items()}

    def save(self, folder: Path) -> None:
        self._masters.save(folder, prefix=PREFIX)
        state = {"updates": self._masters.steps, "pretrained": self.pretrained}
        (folder / STATE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Raises WeightsRefused where the checkpoint has no critic, or another one."""
        path = folder / STATE
        if not path.exists():
            raise WeightsRefused(f"{folder} holds no critic: it was written under a loss that needs none")
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        self._masters.load(folder, steps=int(state["updates"]), prefix=PREFIX)
        self.pretrained = int(state["pretrained"])

    def _at_heads(self, picked: Tensor) -> Tensor:
        """[M, H] → [M], without a gradient."""
        return (picked @ self._weight.detach().T)[:, 0] + self._bias.detach()

    def _to(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device)
