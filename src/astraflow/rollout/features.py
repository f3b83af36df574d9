"""Numbers of an episode for data algorithms, computed where the tokens and the text are: algorithms see neither.

``content_hash/POLICY``  uint32 [2], of everything that the policy sampled, in order: equal replies, equal hash
what the workflow says   ``Reward(features={"format": 1.0, "without/critic": 0.25})``, float64
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from astraflow.rollout.said import is_text, shown
from astraflow.rollout.score import UnknownName
from astraflow.types import Array, Trajectory
from astraflow.wire.codec import MAX_DIMENSIONS

CONTENT_HASH = "content_hash/"
MOST_NUMBERS = 4096
"""Of one feature."""


def features_of(said: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> dict[str, Array]:
    """Raises UnknownName for a feature of the workflow that is no number or array of numbers, or has our name."""
    features = {_name(name): _number(name, value) for name, value in said.items()}
    for policy in sorted({each.policy for each in trajectories}):
        features[CONTENT_HASH + policy] = _content_hash([each for each in trajectories if each.policy == policy])
    for array in features.values():
        array.flags.writeable = False
    return features


def _content_hash(trajectories: Sequence[Trajectory]) -> Array:
    seen = hashlib.blake2b(digest_size=8)
    for trajectory in sorted(trajectories, key=lambda each: each.agent):
        for sample in trajectory.samples:
            sampled = sample.tokens[sample.sampled].astype("<i4")
            seen.update(f"{trajectory.agent}/{len(sampled)}/".encode())
            seen.update(sampled.tobytes())
    return np.frombuffer(seen.digest(), "<u4").astype(np.uint32)


def _name(name: Any) -> str:
    if not is_text(name):
        raise UnknownName(f"Reward.features must be named by text, found {shown(name)}")
    if name.startswith(CONTENT_HASH):
        raise UnknownName(f"Reward.features names {shown(name)}: the worker computes that")
    return str.__str__(name)


def _number(name: str, value: Any) -> Array:
    try:
        array = np.array(value, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnknownName(f"Reward.features[{name!r}] must be numbers, found {shown(value)}") from error
    if array.size > MOST_NUMBERS:
        raise UnknownName(f"Reward.features[{name!r}] has {array.size} numbers, the limit is {MOST_NUMBERS}")
    if array.ndim > MAX_DIMENSIONS:
        raise UnknownName(f"Reward.features[{name!r}] has {array.ndim} dimensions, the limit is {MAX_DIMENSIONS}")
    return array
