"""The formulas of the losses, as plainly as they can be written: token by token, float64, no masks, no packing.

Each gets one sequence a list and nothing that data masked, and answers the loss of the batch as autograd sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from astraflow.losses import LossInputs


class Sequence_(NamedTuple):
    """Unmasked tokens of one sequence, each a float64 [T]."""

    now: Tensor
    then: Tensor
    advantage: Tensor
    near: Tensor
    """proximal"""
    far: Tensor
    """reference"""
    value: Tensor
    old_value: Tensor
    goal: Tensor
    """return"""


def sequences_of(inputs: LossInputs) -> list[Sequence_]:
    found = []
    for each in torch.unique(inputs.sequence_ids):
        mine = (inputs.sequence_ids == each) & inputs.mask
        if bool(mine.any()):
            columns = (
                inputs.logprobs,
                inputs.behaviour_logprobs,
                inputs.advantages,
                inputs.proximal_logprobs,
                inputs.reference_logprobs,
                inputs.values,
                inputs.old_values,
                inputs.returns,
            )
            found.append(Sequence_(*(column[mine] for column in columns if column is not None)))
    return found


# ── the parts ──


def mean_of(terms: Sequence[Tensor], how: str, constant: float | None = None) -> Tensor:
    """``terms``: one [T] a sequence."""
    if how == "token_mean":
        return torch.cat(list(terms)).mean()
    if how == "sequence_mean":
        return torch.stack([each.mean() for each in terms]).mean()
    assert constant is not None
    return torch.stack([each.sum() / constant for each in terms]).mean()


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    found = []
    for r, a in zip(ratio, advantage, strict=True):
        inside = torch.clip(r, low, high)
        gain = torch.minimum(r * a, inside * a)
        if dual is not None and a < 0:
            gain = torch.maximum(gain, dual * a)
        found.append(-gain)
    return torch.stack(found)


def kl_of(difference: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    return torch.exp(-difference) - 1 + difference


def with_kl(s: Sequence_, kl: str, coefficient: float) -> tuple[Tensor, Tensor]:
    """(advantage, what is added to the loss), each [T]"""
    if coefficient == 0:
        return s.advantage, torch.zeros_like(s.now)
    estimator, _, place = kl.partition("_")
    if place == "in_reward":
        cost = kl_of(s.then - s.far, estimator).detach()
        return s.advantage - coefficient * torch.stack([cost[t:].sum() for t in range(len(cost))]), s.now * 0
    added = kl_of(s.now - s.far, estimator)
    if place == "weighted":
        added = torch.exp(s.now - s.then) * added
    return s.advantage, coefficient * added


# ── the losses ──


def by_token(
    inputs: LossInputs, *, low: float, high: float, kl: str, beta: float, how: str, constant: float | None, dual: Any
) -> Tensor:
    terms = []
    for s in sequences_of(inputs):
        advantage, added = with_kl(s, kl, beta)
        terms.append(clipped(torch.exp(s.now - s.then), advantage, low, high, dual) + added)
    return mean_of(terms, how, constant)


def ppo(inputs: LossInputs, **o: Any) -> Tensor:
    loss = by_token(
        inputs,
        low=1 - o.get("clip_low", 0.2),
        high=1 + o.get("clip_high", o.get("clip_low", 0.2)),
        kl=o.get("kl", "k1_in_reward"),
        beta=o.get("kl_coefficient", 0.0),
        how=o.get("aggregation", "token_mean"),
        constant=o.get("constant"),
        dual=o.get("dual_clip"),
    )
    weight, clip = o.get("value_coefficient", 0.0), o.get("value_clip")
    if weight == 0:
        return loss
    terms = []
    for s in sequences_of(inputs):
        errors = (s.value - s.goal) ** 2
        if clip is not None:
            near = s.old_value + torch.clip(s.value - s.old_value, -clip, clip)
            errors = torch.maximum(errors, (near - s.goal) ** 2)
        terms.append(errors / 2)
    return loss + weight * mean_of(terms, o.get("aggregation", "token_mean"), o.get("constant"))


def grpo(inputs: LossInputs, **o: Any) -> Tensor:
    return ppo(inputs, **{"kl": "k3_in_loss", **o})


def dr_grpo(inputs: LossInputs, **o: Any) -> Tensor:
    return grpo(inputs, **{"aggregation": "sequence_sum_over_constant", **o})


def dapo(inputs: LossInputs, **o: Any) -> Tensor:
    return grpo(inputs, **{"clip_high": 0.28, **o})


def gspo(inputs: LossInputs, **o: Any) -> Tensor:
    low, high = 1 - o.get("clip_low", 3e-4), 1 + o.get("clip_high", 4e-4)
    terms = []
    for s in sequences_of(inputs):
        advantage, added = with_kl(s, o.get("kl", "k3_in_loss"), o.get("kl_coefficient", 0.0))
        ratio = torch.exp((s.now - s.then).sum() / len(s.now)).expand(len(s.now))
        if o.get("variant") == "token":
            ratio = ratio.detach() * torch.exp(s.now) / torch.exp(s.now).detach()
        terms.append(clipped(ratio, advantage, low, high) + added)
    return mean_of(terms, o.get("aggregation", "sequence_mean"), o.get("constant"))


def cispo(inputs: LossInputs, **o: Any) -> Tensor:
    low = 1 - o["clip_low"] if "clip_low" in o else 0.0
    terms = []
    for s in sequences_of(inputs):
        advantage, added = with_kl(s, o.get("kl", "k3_in_loss"), o.get("kl_coefficient", 0.0))
        weight = torch.clip(torch.exp(s.now - s.then), low, 1 + o.get("clip_high", 4.0)).detach()
        terms.append(-weight * advantage * s.now + added)
    return mean_of(terms, o.get("aggregation", "token_mean"), o.get("constant"))


def rloo(inputs: LossInputs, **o: Any) -> Tensor:
    """One advantage a sequence."""
    low, high = 1 - o.get("clip_low", 0.2), 1 + o.get("clip_high", o.get("clip_low", 0.2))
    found = []
    for s in sequences_of(inputs):
        advantage, added = with_kl(s, o.get("kl", "k1_in_reward"), o.get("kl_coefficient", 0.0))
        if o.get("ratio", "none") == "none":
            found.append((-advantage * s.now + added).sum())
        else:
            whole = torch.exp((s.now - s.then).sum())
            found.append(clipped(whole[None], advantage.mean()[None], low, high)[0] + added.sum())
    return torch.stack(found).mean()


def reinforce_plus_plus(inputs: LossInputs, **o: Any) -> Tensor:
    """No deviation is drawn of fewer than two tokens, or of tokens that are all equal."""
    kl, beta = o.get("kl", "k1_in_reward"), o.get("kl_coefficient", 0.0)
    sequences = sequences_of(inputs)
    rewarded = [with_kl(s, kl, beta) for s in sequences]
    every = torch.cat([advantage for advantage, _ in rewarded])
    mean, deviation = every.mean(), torch.sqrt(((every - every.mean()) ** 2).sum() / (len(every) - 1))
    low, high = 1 - o.get("clip_low", 0.2), 1 + o.get("clip_high", o.get("clip_low", 0.2))
    terms = []
    for s, (advantage, added) in zip(sequences, rewarded, strict=True):
        normalised = (advantage - mean) / (deviation + 1e-6)
        terms.append(clipped(torch.exp(s.now - s.then), normalised, low, high) + added)
    return mean_of(terms, o.get("aggregation", "token_mean"), o.get("constant"))


def weights_of(s: Sequence_, level: str) -> Tensor:
    gap = (s.near - s.then).detach()
    if level == "token":
        return torch.exp(gap)
    total = gap.sum() if level == "sequence" else gap.mean()
    return torch.exp(total).expand(len(gap))


def mismatch(inputs: LossInputs, weigh: Callable[[Tensor], Tensor], **o: Any) -> Tensor:
    low, high = 1 - o.get("clip_low", 0.2), 1 + o.get("clip_high", o.get("clip_low", 0.2))
    terms = []
    for s in sequences_of(inputs):
        advantage, added = with_kl(s, o.get("kl", "k3_in_loss"), o.get("kl_coefficient", 0.0))
        weight = weigh(weights_of(s, o.get("level", "token")))
        terms.append(weight * clipped(torch.exp(s.now - s.near.detach()), advantage, low, high) + added)
    return mean_of(terms, o.get("aggregation", "token_mean"), o.get("constant"))


def tis(inputs: LossInputs, **o: Any) -> Tensor:
    return mismatch(inputs, lambda w: torch.clip(w, max=o.get("cap", 2.0)), **o)


def mis(inputs: LossInputs, **o: Any) -> Tensor:
    low, high = o.get("low", 0.5), o.get("high", 5.0)
    return mismatch(inputs, lambda w: torch.stack([x if low <= x <= high else x * 0 for x in w]), **o)


def sft(inputs: LossInputs, **o: Any) -> Tensor:
    terms = [-s.advantage * s.now for s in sequences_of(inputs)]
    return mean_of(terms, o.get("aggregation", "token_mean"), o.get("constant"))


class Case(NamedTuple):
    """A loss in the laboratory."""

    options: tuple[dict[str, Any], ...]
    """Sets of options worth a run."""
    formula: Callable[..., Tensor] | None
    """None: its own test file has it."""
    rewards_alone: dict[str, Any] | None = {}
    """Options under which nothing but rewards moves a weight; None: there are none."""


KL = tuple(
    {"kl": kl, "kl_coefficient": 0.3}
    for kl in ("k1_in_loss", "k2_in_loss", "k3_in_loss", "k3_weighted", "k1_in_reward", "k2_in_reward", "k3_in_reward")
)
WAYS: tuple[dict[str, Any], ...] = (
    {"aggregation": "token_mean"},
    {"aggregation": "sequence_mean"},
    {"aggregation": "sequence_sum_over_constant", "constant": 4.0},
)
CASES: dict[str, Case] = {
    "ppo": Case(
        (
            *WAYS,
            *KL,
            {"dual_clip": 1.2, "clip_high": 0.25},
            {"value_coefficient": 0.5},
            {"value_coefficient": 0.5, "value_clip": 0.1, "aggregation": "sequence_mean"},
        ),
        ppo,
    ),
    "grpo": Case((*WAYS, *KL, {"clip_low": 0.1, "clip_high": 0.3}), grpo),
    "dr_grpo": Case(({"constant": 4.0}, {"constant": 7.0, **KL[1]}), dr_grpo, {"constant": 4.0}),
    "dapo": Case(({}, WAYS[1], KL[2]), dapo),
    "gspo": Case(
        (
            {},
            {"clip_low": 0.1, "clip_high": 0.2},
            {"variant": "token"},
            {"variant": "token", "clip_low": 0.1, "clip_high": 0.2, "aggregation": "token_mean"},
            KL[2],
            KL[4],
        ),
        gspo,
    ),
    "cispo": Case(({}, {"clip_high": 0.1}, {"clip_low": 0.1, "clip_high": 0.1}, WAYS[1], KL[3]), cispo),
    "rloo": Case(({}, {"ratio": "sequence"}, KL[4], {"ratio": "sequence", **KL[2]}), rloo),
    "reinforce_plus_plus": Case(({}, WAYS[1], *KL), reinforce_plus_plus),
    "tis": Case(
        ({}, {"cap": 1.1}, {"level": "sequence", "cap": 1.1}, {"level": "geometric", "cap": 1.0}, KL[2], KL[4]), tis
    ),
    "mis": Case(
        (
            {},
            {"low": 0.8, "high": 1.2},
            {"level": "sequence", "low": 0.8, "high": 1.5},
            {"level": "geometric", "low": 0.9, "high": 1.1, "aggregation": "sequence_mean"},
            KL[3],
        ),
        mis,
    ),
    "sft": Case(WAYS, sft, None),
}
"""Name → how it is tested. ``OTHERS`` have files of their own for the formula."""
OTHERS: dict[str, Case] = {
    "decoupled_ppo": Case(({}, {"recompute": True}), None),
    "m2po": Case(({}, {"budget": 0.01}), None),
    "topr": Case(({},), None),
    "sapo": Case(({},), None),
    "online_dpo": Case(({},), None),
    "vapo": Case(({}, {"value_clip": 0.1}), None, {"nll_weight": 0.0, "value_weight": 0.0}),
    "value_pretraining": Case(({},), None, None),
    "kimi": Case(({}, {"tau": 0.0}), None, {"tau": 0.0}),
}
EVERY = {**CASES, **OTHERS}
