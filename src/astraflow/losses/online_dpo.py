"""Direct preference optimisation on pairs of the policy's own answers, told apart by their rewards.

Sources: Rafailov et al. 2023, "Direct Preference Optimization", arXiv 2305.18290; Guo et al. 2024, "Direct Language
Model Alignment from Online AI Feedback", arXiv 2402.04792.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from astraflow.errors import InvalidRecord
from astraflow.losses.base import LossInputs, LossOutput, checked, whole_batch
from astraflow.losses.ratios import outside_mask_zero, ratio_metrics, sequence_lengths, sequence_sums


@checked
def online_dpo(inputs: LossInputs, *, beta: float = 0.1) -> LossOutput:
    """Mean over pairs of ``-log sigmoid(beta (D+ - D-))``, D the log-ratio of a sequence to the reference policy.

    + is the sequence of the pair with the higher advantage; a pair of equals, or of which data has masked one, has no
    preference and no gradient. The two may be in different parts of a batch: each is differentiated against the
    other's value, which ``prepare`` has found, and carries half of the pair's loss.
    """
    inputs = whole_batch(inputs, prepare)
    assert inputs.partner is not None and inputs.batch_chosen is not None, "prepare fills them"
    preference = outside_mask_zero(inputs.advantages, inputs.mask)
    own = _log_ratios(inputs)
    share = 1 / sequence_lengths(inputs)  # a sequence's loss, spread over its tokens: their sum is what counts
    margin = preference * (own - inputs.partner)
    paired = preference != 0
    loss_of = outside_mask_zero(-logsigmoid(beta * margin), paired)
    per_token = (loss_of - loss_of.detach() / 2) * share
    loss = per_token.sum() / max(1, inputs.batch_chosen)
    with torch.no_grad():
        winners = share * (preference > 0)
        pairs = float(winners.sum())
        metrics = ratio_metrics(inputs)
        metrics["loss/pair_margin"] = (float((winners * margin).sum()), pairs)
        metrics["loss/pair_right"] = (float((winners * (margin > 0)).sum()), pairs)
    return LossOutput(loss=loss, metrics=metrics)


@torch.no_grad()
def prepare(inputs: LossInputs, **_: object) -> LossInputs:
    """``advantages``: 1 where a sequence is preferred, -1 where its partner is, else 0. ``partner``: the other's
    log-ratio to the reference. ``batch_chosen``: pairs with a preference."""
    if inputs.pairs is None:
        raise InvalidRecord("LossInputs.pairs: online_dpo needs them, found None")
    alive = inputs.mask & (inputs.pairs >= 0)
    own = _log_ratios(inputs)
    worth = sequence_sums(outside_mask_zero(inputs.advantages, inputs.mask).double(), inputs.sequence_ids)
    worth = worth / sequence_lengths(inputs).double()
    preference, partner = torch.zeros_like(own), torch.zeros_like(own)
    chosen = 0
    for pair in torch.unique(inputs.pairs[alive]).tolist():
        members = torch.unique(inputs.sequence_ids[alive & (inputs.pairs == pair)])
        if len(members) > 2:
            raise InvalidRecord(f"LossInputs.pairs: pair {pair} has {len(members)} sequences, a pair has two")
        if len(members) < 2:
            continue
        first, second = (inputs.sequence_ids == member for member in members)
        apart = worth[first][0] - worth[second][0]
        sign = float(torch.where(apart.isnan(), apart, apart.sign()))  # the sign of NaN would be 0: no preference
        chosen += sign != 0
        preference[first], preference[second] = sign, -sign
        partner[first], partner[second] = own[second][0], own[first][0]
    return replace(inputs, advantages=preference, partner=partner, batch_chosen=chosen, prepared=True)


def _log_ratios(inputs: LossInputs) -> Tensor:
    """[N]: at every token, the log-ratio of its sequence to the reference policy."""
    if inputs.reference_logprobs is None:
        raise InvalidRecord("LossInputs.reference_logprobs: online_dpo needs them, found None")
    change = outside_mask_zero(inputs.logprobs - inputs.reference_logprobs, inputs.mask)
    return sequence_sums(change, inputs.sequence_ids)
