"""Our online DPO has the value and gradient of TRL's. ``make_trl_online_dpo.py`` made the numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from astraflow.losses import LossInputs
from astraflow.losses.online_dpo import online_dpo

GOLDEN = json.loads(Path(__file__).with_name("trl_online_dpo.json").read_text())


def inputs() -> LossInputs:
    given = GOLDEN["inputs"]
    ids = torch.repeat_interleave(torch.arange(len(given["lengths"])), torch.tensor(given["lengths"]))
    names = ("logprobs", "behaviour_logprobs", "reference_logprobs")
    columns = {name: torch.tensor(given[name], dtype=torch.float64) for name in names}
    made = LossInputs(
        advantages=torch.tensor(given["advantages"], dtype=torch.float64)[ids],
        mask=torch.ones(len(ids), dtype=torch.bool),
        sequence_ids=ids,
        pairs=torch.tensor(given["pairs"])[ids],
        **columns,  # type: ignore[arg-type]
    )
    return replace(made, logprobs=made.logprobs.requires_grad_())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"beta-{case['beta']}")
def test_value_and_gradient_are_trls(case: dict[str, Any]) -> None:
    own = inputs()
    loss = online_dpo(own, beta=case["beta"]).loss
    torch.autograd.backward(loss)
    assert own.logprobs.grad is not None
    assert float(loss.detach()) == pytest.approx(case["loss"], abs=1e-12)
    assert own.logprobs.grad.tolist() == pytest.approx(case["gradient"], abs=1e-12)
    assert max(map(abs, case["gradient"])) > 0.01
