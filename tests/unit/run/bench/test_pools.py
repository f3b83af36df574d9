"""The pools of the bench: small, on real hosts; and what its figures would say of a wrong label."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from astraflow.run.bench._pools import NEAR, SPEEDS, difference, pools
from astraflow.testing.hosts import missing
from astraflow.types import Sample, Span


class Even:
    """A model that gives every token of ten the same chance."""

    def __call__(self, tokens: object, **_: object) -> object:
        import torch

        class Out:
            logits = torch.zeros(1, len(tokens[0]), 10)  # type: ignore[index]

        return Out()


def test_a_sample_of_other_weights_is_told_from_one_of_these() -> None:
    sampled = np.array([False, True, True])
    logprobs = np.where(sampled, np.float32(-np.log(10)), np.float32(0)).astype(np.float32)
    sample = Sample(
        tokens=np.array([1, 2, 3], np.int32),
        sampled=sampled,
        logprobs=logprobs,
        spans=(Span(start=1, stop=3, version=0, digest="d"),),
    )
    assert difference(Even(), sample) < NEAR
    moved = logprobs.copy()
    moved[2] -= 0.01
    assert difference(Even(), msgspec.structs.replace(sample, logprobs=moved)) > NEAR


@pytest.mark.slow
def test_three_pools_behind_lines_all_contribute() -> None:
    if reason := missing():
        pytest.skip(reason)
    found = pools(steps=6, cut_s=0.0, versions=4)
    assert all(found["trained_by"].get(name, 0) > 0 for name in SPEEDS), found
    assert found["spans"] > 0 == found["wrong_spans"] == found["not_by_version"], found
    assert found["checked_samples"] > 0 and found["neighbour_differs"] > 0.5, found
