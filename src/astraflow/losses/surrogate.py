"""The clipped surrogate of a policy gradient, and what of it is flat: the part that many losses share.

Sources: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv 1707.06347; the dual clip: Ye et al.
2019, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", arXiv 1912.09729.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Clip(NamedTuple):
    """The range of a ratio in which it is followed."""

    low: float
    """1 - clip_low"""
    high: float
    """1 + clip_high"""
    dual: float | None = None
    """Where A < 0 the loss is at most ``dual`` |A|: one token whose ratio runs away cannot rule the step."""

    @classmethod
    def of(cls, clip_low: float, clip_high: float | None, dual: float | None = None) -> Clip:
        """``clip_high`` None: as ``clip_low``."""
        return cls(1 - clip_low, 1 + (clip_low if clip_high is None else clip_high), dual)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """``max(-A r, -A clip(r))``, for A < 0 at most ``-A dual``. Any shape."""
    found = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(clip.low, clip.high))
    if clip.dual is None:
        return found
    return torch.where(advantages < 0, torch.minimum(found, -advantages * clip.dual), found)


@torch.no_grad()
def is_flat(ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """bool: where the clip takes the gradient away. Only the side counts on which it does (F42)."""
    found = ((advantages > 0) & (ratio > clip.high)) | ((advantages < 0) & (ratio < clip.low))
    return found if clip.dual is None else found | ((advantages < 0) & (ratio > clip.dual))
