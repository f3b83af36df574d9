"""Weights in parts, each a dict of figures: ``codec`` (bytes, time, memory of deltas), ``catch_up``, ``pause`` (of
decoding, while weights are taken), ``drift`` (of log-probs between right computations), ``faults`` (eight
ways to get them wrong, named), ``pools`` (three of them, two behind far lines).

A part is a function of ``Setup``; ``--parts NAME`` runs only some.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from astraflow.errors import ConfigError
from astraflow.run.bench._adam import Weights, bf16_weights, published, simulated, trained
from astraflow.run.bench._catch_up import catch_up
from astraflow.run.bench._codec import changed, sizes, speed
from astraflow.run.bench._pools import pools
from astraflow.run.bench.drift import drift
from astraflow.run.bench.faults import faults_named
from astraflow.run.bench.pause import pause
from astraflow.run.models import get
from astraflow.testing.hosts import missing
from astraflow.weights.delta import bits_of
from astraflow.weights.manifest import weight_files_in

LRS = (1e-6, 5e-6)
DENSITIES = (0.001, 0.01, 0.05, 0.2)


@dataclass
class Setup:
    """What the parts measure, and how long."""

    seed: int = 0
    model_dir: Path | None = None
    run_dir: Path | None = None
    """Of a run, whose last two versions are measured as ``published``."""
    repeats: int = 3
    steps: int = 3
    """Real ones of the torch backend at each learning rate, of which the last is measured."""
    layers: int = 8
    """Of the model, in what is simulated; beside them all that is in no layer."""
    few: int = 40
    """Tensors of the catch-up."""

    @cached_property
    def folder(self) -> Path:
        return self.model_dir or get("smollm2")

    @cached_property
    def weights(self) -> Weights:
        """Its bf16 tensors, in memory."""
        return bf16_weights(weight_files_in(self.folder))


def main(seed: int = 0, run_dir: Path | None = None, parts: Sequence[str] = ()) -> dict[str, Any]:
    return run(Setup(seed=seed, run_dir=run_dir), parts)


def run(setup: Setup, parts: Sequence[str] = ()) -> dict[str, Any]:
    """``parts``: by name; empty: all."""
    unknown = sorted(set(parts) - PARTS.keys())
    if unknown:
        raise ConfigError(f"bench weights has no part {unknown[0]!r}; known: {', '.join(PARTS)}")
    found: dict[str, Any] = {"model": setup.folder.name, "left": ""}
    for name in parts or PARTS:
        if name == "pools" and not parts and (reason := missing()):
            found["left"] = f"pools: {reason}"
            continue
        found |= PARTS[name](setup)
    return found


def codec(setup: Setup) -> dict[str, Any]:
    """Bytes against the entropy and the usual formats; time and memory against numpy."""
    weights, seed = setup.weights, setup.seed
    found: dict[str, Any] = {"elements": sum(len(bits_of(t)) for t in weights.values())}
    for lr in LRS:
        for name, first in (("adam", False), ("adam_first", True)):
            base, new = islice(simulated(first_layers(weights, setup.layers), lr, seed=seed, first=first), 2)
            found[f"{name}_{lr:g}"] = sizes(base, new)
    for lr in reversed(LRS):
        *_, base, new = trained(setup.folder, steps=setup.steps, lr=lr, seed=seed)
        found[f"trained_{lr:g}"] = sizes(base, new)
    if setup.run_dir is not None:
        base, new = published(setup.run_dir)
        found["published"] = sizes(base, new)
    found["worst_ratio"] = max(each["ratio"] for each in found.values() if isinstance(each, dict))
    found["worst_plain_ratio"] = min(each["plain_ratio"] for each in found.values() if isinstance(each, dict))
    found["density"] = {str(share): speed(*changed(weights, share, seed=seed), setup.repeats) for share in DENSITIES}
    for name in ("encode_vs_numpy", "apply_vs_numpy", "memory_ratio"):
        found[name] = found["density"]["0.01"][name]
    found["speed_trained"] = speed(base, new, setup.repeats)
    return found


def first_layers(weights: Weights, count: int) -> Weights:
    """So many, by the number in their names, and what is in none."""
    numbers = {name: re.search(r"\.layers\.(\d+)\.", name) for name in weights}
    return {name: each for name, each in weights.items() if (n := numbers[name]) is None or int(n[1]) < count}


def catching_up(setup: Setup) -> dict[str, Any]:
    """On a few tensors: what is asked is whether a merged delta is the cheapest, not how large the model is."""
    small = dict(sorted(setup.weights.items(), key=lambda item: len(item[1].data))[-1 - setup.few : -1])
    return catch_up(simulated(small, LRS[0], seed=setup.seed))


def pausing(setup: Setup) -> dict[str, Any]:
    return pause(setup.folder, seed=setup.seed)


def drifting(setup: Setup) -> dict[str, Any]:
    return {"canary_drift": drift(setup.folder)}


def faults(setup: Setup) -> dict[str, Any]:
    found = faults_named(seed=setup.seed)
    return {"faults_named": found["tensors"]["named"], "faults": found}


def far_pools(setup: Setup) -> dict[str, Any]:
    return {"pools": pools(seed=setup.seed)}


PARTS: dict[str, Callable[[Setup], dict[str, Any]]] = {
    "codec": codec,
    "catch_up": catching_up,
    "pause": pausing,
    "drift": drifting,
    "faults": faults,
    "pools": far_pools,
}
