"""The embedded engine with one thing wrong in how it takes weights: what attestation must find and name.

``FAULTS`` are the ways; each is done to the real engine, which says all the while that it holds what it was given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from astraflow.engines.checkpoint import read_checkpoint
from astraflow.engines.decoder import Decoder
from astraflow.engines.sequence import Held
from astraflow.engines.settings import EngineSettings
from astraflow.engines.torch_engine import TorchEngine
from astraflow.types import Manifest
from astraflow.weights.attest import Diagnosis

Tensors = dict[str, torch.Tensor]
Tamper = Callable[[Tensors, Tensors, Tensors], Tensors]
"""(new, the version before, the one before that) → what the engine takes instead of ``new``."""


def _dropped(new: Tensors, old: Tensors, older: Tensors) -> Tensors:
    """One tensor did not arrive: the old one stays."""
    name = _matrices(new)[len(new) // 3]
    return {**new, name: old[name]}


def _wrong_base(new: Tensors, old: Tensors, older: Tensors) -> Tensors:
    """The update from the version before was put on the one before that."""
    return {name: (older[name] + (tensor - old[name])).to(tensor.dtype) for name, tensor in new.items()}


def _swapped(new: Tensors, old: Tensors, older: Tensors) -> Tensors:
    """Two tensors of one shape were written into each other's place."""
    names = _matrices(new)
    one = names[len(names) // 2]
    other = next(name for name in names if name != one and new[name].shape == new[one].shape)
    return {**new, one: new[other], other: new[one]}


def _acknowledged(new: Tensors, old: Tensors, older: Tensors) -> Tensors:
    return old


def _half(new: Tensors, old: Tensors, older: Tensors) -> Tensors:
    names = sorted(new)
    return {name: new[name] if n < len(names) // 2 else old[name] for n, name in enumerate(names)}


def _flipped(new: Tensors, old: Tensors, older: Tensors) -> Tensors:
    """One bit of an exponent."""
    name = _matrices(new)[0]
    bit, kind = {4: (29, torch.int32), 2: (13, torch.int16)}[new[name].element_size()]
    bits = new[name].clone().view(kind)
    bits.view(-1)[7] ^= 1 << bit
    return {**new, name: bits.view(new[name].dtype)}


def _matrices(tensors: Tensors) -> list[str]:
    """Of the layers, in order."""
    return [name for name in sorted(tensors) if ".layers." in name and tensors[name].ndim == 2]


def _as_published(new: Tensors, old: Tensors, older: Tensors) -> Tensors:
    return new


FAULTS: dict[str, tuple[Tamper, Diagnosis]] = {
    "dropped tensor": (_dropped, Diagnosis.PARTIAL),
    "wrong base": (_wrong_base, Diagnosis.WRONG_BASE),
    "swapped tensors": (_swapped, Diagnosis.PARTIAL),
    "stale prefix cache": (_as_published, Diagnosis.STALE_CACHE),
    "acknowledged but not applied": (_acknowledged, Diagnosis.NEVER_APPLIED),
    "half-applied": (_half, Diagnosis.PARTIAL),
    "one flipped bit": (_flipped, Diagnosis.NUMERICS),
    "other chat template": (_as_published, Diagnosis.WRONG_TEMPLATE),
}
"""By name: what is done to the tensors, and the diagnosis that is right. The cache and the template are not tensors:
the first is ``_Fault``'s doing, the second that of who renders."""
STALE = "stale prefix cache"


def faulty_engine(
    model_dir: Path,
    policy: str,
    settings: EngineSettings | None = None,
    *,
    fault: str,
    at: int,
    times: int = 1 << 30,
    hidden: bool = False,
) -> TorchEngine:
    """With ``fault`` from version ``at`` on, for the first ``times`` loads. ``hidden``: it shows no tensors."""
    engine = TorchEngine(model_dir, policy, settings)
    _Fault(engine, fault, at, times).done_to()
    if hidden:
        engine.tensors = lambda version: None  # type: ignore[method-assign]
    return engine


class _Fault:
    """Of one engine."""

    def __init__(self, engine: TorchEngine, fault: str, at: int, times: int) -> None:
        self._engine = engine
        self._fault, self._at, self._times = fault, at, times
        self._prepared = engine.prepare
        self._published: dict[int, Tensors] = {}

    def done_to(self) -> None:
        self._engine.prepare = self._prepare  # type: ignore[method-assign]

    def _prepare(self, manifest: Manifest, files: list[Path]) -> Held:
        self._published[manifest.version] = new = read_checkpoint(manifest, files)
        wrong = manifest.version >= self._at and self._times > 0
        if wrong:
            self._times -= 1
            before = sorted((version for version in self._published if version < manifest.version), reverse=True)
            old, older = (self._published[version] for version in before[:2])
            new = FAULTS[self._fault][0](new, old, older)
        if self._fault == STALE:
            self._decoder.swap = self._swap_stale if wrong else partial(Decoder.swap, self._decoder)  # type: ignore[method-assign]
        held = self._prepared(manifest, files)
        held.weights = self._engine._open().model.prepare(new)
        return held

    def _swap_stale(self, new: Held) -> bool:
        """What was computed by the old weights is taken for computed by the new ones."""
        prefixes: Any = self._decoder._prefixes
        prefixes.drop = lambda held: None
        done = Decoder.swap(self._decoder, new)
        del prefixes.drop
        prefixes._owner = [None if owner is None else new for owner in prefixes._owner]
        prefixes._saved = OrderedDict((key, replace(saved, held=new)) for key, saved in prefixes._saved.items())
        return done

    @property
    def _decoder(self) -> Decoder:
        decoder = self._engine._decoder
        assert decoder is not None, "an engine that has started has one"
        return decoder
