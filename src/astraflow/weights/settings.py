"""What a recipe may choose about how versions travel."""

from __future__ import annotations

from dataclasses import dataclass

from astraflow.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSettings:
    """Of every policy of the run. Workers need no settings: a manifest says how its version can be had."""

    delta: bool = True
    """Publish what changed instead of everything, where that is smaller. Lossless either way."""
    keep: int = 24
    """A worker that has missed up to so many versions catches up by deltas."""
    anchor_every: int = 16
    """Versions between two that are published in full: where newcomers begin."""
    compact: bool = False
    """Half the bytes of a delta, for about three times the processor time of publishing it and some to apply it: for
    lines that are slower than that."""
    canary: bool = False
    """With every version travels what it says to a few fixed prompts; a worker asks its engine for the same before the
    version is served. Finds stale caches, another chat template, and wrong weights where an engine hides its tensors.
    Costs a trainer a forward pass of these prompts, a worker some decode steps, per version."""

    def __post_init__(self) -> None:
        for name, most in (("keep", 256), ("anchor_every", 10_000)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"WeightSettings.{name} must be in [1, {most}], found {getattr(self, name)}")
