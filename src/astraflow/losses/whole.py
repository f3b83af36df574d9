"""From the parts of a batch to the whole that a loss's ``prepare`` decides over, and back.

    parts without a gradient ── joined ──► whole ── prepare ──► whole ── parted ──► parts, each to be differentiated

Parts may come from several processes: whoever has gathered them joins them in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from astraflow.errors import InvalidRecord
from astraflow.losses.base import LossInputs

_COLUMNS = tuple(each.name for each in fields(LossInputs) if "Tensor" in str(each.type))


def joined(parts: Sequence[LossInputs]) -> LossInputs:
    """At least one part, all of the same columns; a sequence is in one part only. The denominators are its own."""
    whole: dict[str, Any] = {}
    for name in _COLUMNS:
        columns = [getattr(part, name) for part in parts]
        present = [column for column in columns if column is not None]
        if len(present) not in (0, len(columns)):
            raise InvalidRecord(f"LossInputs.{name}: {len(present)} of {len(columns)} parts have it, all or none must")
        whole[name] = torch.cat(present) if present else None
    return LossInputs(**whole)


def parted(whole: LossInputs, like: Sequence[LossInputs]) -> list[LossInputs]:
    """``whole`` cut into as many tokens as each part of ``like`` has, with its denominators."""
    found, start = [], 0
    for part in like:
        stop = start + len(part.logprobs)
        cut: dict[str, Any] = {
            name: None if getattr(whole, name) is None else getattr(whole, name)[start:stop] for name in _COLUMNS
        }
        found.append(replace(whole, batch_tokens=part.batch_tokens, batch_sequences=part.batch_sequences, **cut))
        start = stop
    return found
