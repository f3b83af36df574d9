"""Writes ``trl_losses.json``: losses and gradients as TRL computes them, by its own code, in float64.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0 torch
    /tmp/trl/bin/python tests/golden/make_trl_losses.py

TRL is not a dependency: this runs in an environment of its own, and the tests read the file. Nothing of TRL is copied:
its methods are called with a stand-in for the trainer, whose model answers log-probs that were drawn here.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

FILE = Path(__file__).with_name("trl_losses.json")
LENGTHS = (4, 1, 3, 5)
LONGEST = 5
ADVANTAGES = (1.1, -0.7, 0.4, -0.8)


def drawn() -> dict[str, Tensor]:
    """float64 [sequences, LONGEST]; log-ratios up to about ± 1, so that every clip acts somewhere."""
    generator = torch.Generator().manual_seed(28)

    def normal() -> Tensor:
        return torch.randn(len(LENGTHS), LONGEST, generator=generator, dtype=torch.float64)

    behaviour = -1.5 + 0.4 * normal()
    return {
        "behaviour_logprobs": behaviour,
        "proximal_logprobs": behaviour + 0.3 * normal(),
        "logprobs": behaviour + 0.5 * normal(),
        "reference_logprobs": behaviour + 0.4 * normal(),
        "mask": (torch.arange(LONGEST)[None] < torch.tensor(LENGTHS)[:, None]).long(),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
    }


class Accelerator:
    """One process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value


def stand_in(logprobs: Tensor, **settings: Any) -> Any:
    """What ``_compute_loss`` of either trainer reads of its trainer."""

    def answer(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return logprobs, torch.zeros_like(logprobs), None

    args = SimpleNamespace(
        delta=settings.pop("delta", None),
        use_bias_correction_kl=settings.pop("use_bias_correction_kl", False),
        sapo_temperature_pos=settings.pop("sapo_temperature_pos", 1.0),
        sapo_temperature_neg=settings.pop("sapo_temperature_neg", 1.05),
        steps_per_generation=1,
    )
    defaults = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "max_completion_length": 8,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": None,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
    }
    return SimpleNamespace(
        **{**defaults, **settings},
        args=args,
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=answer,
    )


def correction(trainer: Any, columns: dict[str, Tensor]) -> Tensor:
    """TRL's engine-to-trainer ratio: a block in the middle of a long method, run by itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions)))
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and "torch.exp(logps_diff)" in ast.unparse(node)
    ]
    assert len(blocks) == 1, "another version of TRL"
    space = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "tool_mask": None,
        "completion_mask": columns["mask"],
        "old_per_token_logps": columns["proximal_logprobs"],
        "sampling_per_token_logps": columns["behaviour_logprobs"],
    }
    exec(compile(ast.Module(body=[blocks[0]], type_ignores=[]), "trl", "exec"), space)  # TRL's own lines
    ratio: Any = space["vllm_importance_sampling_ratio"]
    return torch.as_tensor(ratio)


def of_grpo(columns: dict[str, Tensor], logprobs: Tensor, settings: dict[str, Any]) -> Tensor:
    trainer = stand_in(logprobs, **settings)
    none = torch.zeros(len(LENGTHS), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": none,
        "prompt_mask": none,
        "completion_ids": torch.zeros(len(LENGTHS), LONGEST, dtype=torch.long),
        "completion_mask": columns["mask"],
        "advantages": columns["advantages"],
        "old_per_token_logps": columns["proximal_logprobs" if trainer.use_vllm else "behaviour_logprobs"],
        "ref_per_token_logps": columns["reference_logprobs"],
        "num_items_in_batch": columns["mask"].sum(),
    }
    if trainer.use_vllm:
        inputs["importance_sampling_ratio"] = correction(trainer, columns)
    loss: Tensor = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    return loss


def of_rloo(columns: dict[str, Tensor], logprobs: Tensor, settings: dict[str, Any]) -> Tensor:
    trainer = stand_in(logprobs, **settings)
    none = torch.zeros(len(LENGTHS), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": none,
        "prompt_mask": none,
        "completion_ids": torch.zeros(len(LENGTHS), LONGEST, dtype=torch.long),
        "completion_mask": columns["mask"],
        "advantages": columns["advantages"],
        "old_logps": (columns["behaviour_logprobs"] * columns["mask"]).sum(1),
    }
    loss: Tensor = RLOOTrainer._compute_loss(trainer, trainer.model, inputs)
    return loss


def vllm(mode: str, low: float | None, high: float) -> dict[str, Any]:
    return {
        "use_vllm": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
    }


SUM = "sequence_sum_over_constant"
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("grpo", {"aggregation": "sequence_mean"}, {}),
    ("grpo", {"aggregation": "token_mean"}, {"loss_type": "bnpo"}),
    (
        "grpo",
        {"aggregation": "sequence_mean", "clip_low": 0.1, "clip_high": 0.3, "kl_coefficient": 0.2},
        {"epsilon_low": 0.1, "epsilon_high": 0.3, "beta": 0.2},
    ),
    (
        "grpo",
        {"aggregation": "sequence_mean", "kl": "k3_weighted", "kl_coefficient": 0.2},
        {"beta": 0.2, "use_bias_correction_kl": True},
    ),
    ("ppo", {"aggregation": "sequence_mean", "dual_clip": 1.3}, {"delta": 1.3}),
    ("dr_grpo", {"constant": 8.0}, {"loss_type": "dr_grpo"}),
    ("dapo", {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    ("gspo", {}, {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    (
        "gspo",
        {"clip_low": 0.15, "clip_high": 0.15, "kl_coefficient": 0.2},
        {"importance_sampling_level": "sequence", "epsilon_low": 0.15, "epsilon_high": 0.15, "beta": 0.2},
    ),
    ("cispo", {"clip_high": 0.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    (
        "sapo",
        {"temperature_positive": 1.0, "temperature_negative": 1.25},  # TRL holds them in float32
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.25},
    ),
    ("rloo", {"ratio": "sequence"}, {}),
    ("tis", {"cap": 1.2, "aggregation": "sequence_mean"}, vllm("token_truncate", None, 1.2)),
    (
        "tis",
        {"level": "sequence", "cap": 1.2, "aggregation": "sequence_mean"},
        vllm("sequence_truncate", None, 1.2),
    ),
    ("mis", {"low": 0.8, "high": 1.25, "aggregation": "sequence_mean"}, vllm("token_mask", 0.8, 1.25)),
    (
        "mis",
        {"level": "sequence", "low": 0.0, "high": 1.5, "aggregation": "token_mean"},
        {**vllm("sequence_mask", None, 1.5), "loss_type": "dapo"},
    ),
]
"""(our loss, our options, TRL's settings)"""


def main() -> None:
    columns = drawn()
    kept = columns["mask"].bool()
    found = []
    for loss, options, settings in CASES:
        logprobs = columns["logprobs"].clone().requires_grad_()
        value = (of_rloo if loss == "rloo" else of_grpo)(columns, logprobs, dict(settings))
        torch.autograd.backward(value)
        assert logprobs.grad is not None
        gradient = logprobs.grad[kept].tolist()
        answer = {"loss": float(value.detach()), "gradient": gradient}
        found.append({"loss": loss, "options": options, "trl": settings, "expected": answer})
    packed = {
        name: column[kept].tolist()
        for name, column in columns.items()
        if column.is_floating_point() and column.ndim == 2
    }
    inputs = {"lengths": LENGTHS, "advantages": ADVANTAGES, **packed}
    FILE.write_text(json.dumps({"trl": trl.__version__, "inputs": inputs, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
