"""Writes ``trl_online_dpo.json``: the loss of TRL's online DPO trainer and its gradient, by its own code, in float64.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0 torch
    TRL_EXPERIMENTAL_SILENCE=1 /tmp/trl/bin/python tests/golden/make_trl_online_dpo.py

As ``make_trl_losses.py``, whose numbers it draws: nothing of TRL is copied, the middle of its ``training_step`` is run.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from make_trl_losses import ADVANTAGES, LENGTHS, drawn
from torch import Tensor
from torch.nn import functional
from trl.experimental.online_dpo.online_dpo_trainer import OnlineDPOTrainer

FILE = Path(__file__).with_name("trl_online_dpo.json")
BETAS = (0.1, 0.5, 2.0)


def middle_of_the_step() -> ast.Module:
    """From the split of the rewards to the mean of the losses."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(OnlineDPOTrainer.training_step))).body
    assert isinstance(function, ast.FunctionDef)
    lines = [ast.unparse(each) for each in function.body]
    first = next(n for n, line in enumerate(lines) if "rewards.split(batch_size)" in line)
    last = next(n for n, line in enumerate(lines) if line == "loss = losses.mean()")
    return ast.Module(body=function.body[first : last + 1], type_ignores=[])


def online_dpo(columns: dict[str, Tensor], logprobs: Tensor, beta: float) -> Tensor:
    """Sequences n and n + 2 answer the same prompt; the advantages are their rewards."""
    space: dict[str, Any] = {
        "self": SimpleNamespace(beta=beta, args=SimpleNamespace(loss_type="sigmoid")),
        "torch": torch,
        "F": functional,
        "rewards": columns["advantages"],
        "batch_size": len(LENGTHS) // 2,
        "device": "cpu",
        "logprobs": logprobs,
        "ref_logprobs": columns["reference_logprobs"],
        "completion_mask": columns["mask"],
    }
    exec(compile(middle_of_the_step(), "trl", "exec"), space)  # TRL's own lines
    loss: Tensor = space["loss"]
    return loss


def main() -> None:
    columns = drawn()
    kept = columns["mask"].bool()
    cases = []
    for beta in BETAS:
        logprobs = columns["logprobs"].clone().requires_grad_()
        loss = online_dpo(columns, logprobs, beta)
        torch.autograd.backward(loss)
        assert logprobs.grad is not None
        cases.append({"beta": beta, "loss": float(loss.detach()), "gradient": logprobs.grad[kept].tolist()})
    packed = {name: columns[name][kept].tolist() for name in ("logprobs", "behaviour_logprobs", "reference_logprobs")}
    inputs = {"lengths": LENGTHS, "advantages": ADVANTAGES, "pairs": [0, 1, 0, 1], **packed}
    FILE.write_text(json.dumps({"trl": trl.__version__, "inputs": inputs, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
