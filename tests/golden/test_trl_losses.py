"""Where TRL has the same loss, ours has its value and gradient. ``make_trl_losses.py`` made the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from astraflow.losses import LOSSES, LossInputs

GOLDEN = json.loads(Path(__file__).with_name("trl_losses.json").read_text())


def inputs() -> LossInputs:
    given = GOLDEN["inputs"]
    ids = torch.repeat_interleave(torch.arange(len(given["lengths"])), torch.tensor(given["lengths"]))
    columns = {
        name: torch.tensor(given[name], dtype=torch.float64)
        for name in ("behaviour_logprobs", "proximal_logprobs", "reference_logprobs")
    }
    return LossInputs(
        logprobs=torch.tensor(given["logprobs"], dtype=torch.float64, requires_grad=True),
        advantages=torch.tensor(given["advantages"], dtype=torch.float64)[ids],
        mask=torch.ones(len(ids), dtype=torch.bool),
        sequence_ids=ids,
        **columns,
    )


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=[f"{n}-{each['loss']}" for n, each in enumerate(GOLDEN["cases"])])
def test_value_and_gradient_are_trls(case: dict[str, Any]) -> None:
    own = inputs()
    loss = LOSSES[case["loss"]].loss(own, **case["options"]).loss
    torch.autograd.backward(loss)
    assert own.logprobs.grad is not None
    assert float(loss.detach()) == pytest.approx(case["expected"]["loss"], abs=1e-12)
    assert own.logprobs.grad.tolist() == pytest.approx(case["expected"]["gradient"], abs=1e-12)


def test_the_numbers_would_show_a_difference() -> None:
    """Every option that a case names changes its loss or gradient: nothing agrees because it never acted."""
    for case in GOLDEN["cases"]:
        for option in set(case["options"]) - {"aggregation", "level", "variant"}:
            changed = {**case["options"], option: _other(case["options"][option])}
            own = inputs()
            loss = LOSSES[case["loss"]].loss(own, **changed).loss
            torch.autograd.backward(loss)
            assert own.logprobs.grad is not None
            there = torch.tensor([case["expected"]["loss"], *case["expected"]["gradient"]], dtype=torch.float64)
            here = torch.cat([loss.detach()[None], own.logprobs.grad])
            assert float((here - there).abs().max()) > 1e-4, (case["loss"], option)


def _other(value: Any) -> Any:
    if isinstance(value, str):
        return {"k3_weighted": "k3_in_loss", "sequence": "none"}[value]
    if value < 1:
        return value * 1.02 + 0.05 if value else 0.9
    return value * 1.3
