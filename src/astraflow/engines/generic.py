"""Any causal LM of transformers, one sequence at a time: the way for architectures that ``lean`` does not know."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from astraflow.engines.rows import Rows
from astraflow.errors import WeightsRefused


class GenericModel:
    """Implements ``rows.Model`` on the model's own forward pass and cache. A weight set is a module of its own, made
    by transformers, which knows how a checkpoint's names map to the module's."""

    def __init__(self, config: Any, *, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            empty: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self._class = type(empty)
        self._ties: dict[str, str] = dict(getattr(empty, "all_tied_weights_keys", None) or {})
        accepted = inspect.signature(empty.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._config = config
        self._dtype = dtype
        self._device = device
        self._past: dict[int, Any] = {}

    @property
    def vocabulary(self) -> int:
        return int(self._config.vocab_size)

    @property
    def context(self) -> int:
        """2048 where the config names no limit (models with a state instead of a past)."""
        return int(getattr(self._config, "max_position_embeddings", None) or 2048)

    @property
    def copies(self) -> None:
        """A cache of transformers is not ours to cut: every prompt is computed."""
        return None

    def forget(self, slot: int) -> None:
        self._past.pop(slot, None)

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        for name, other in self._ties.items():
            if name in tensors and other in tensors and not torch.equal(tensors[name], tensors[other]):
                raise WeightsRefused(f"{name} differs from {other}, which this model ties")
        try:
            module, report = self._class.from_pretrained(
                None, config=self._config, state_dict=dict(tensors), dtype=self._dtype, output_loading_info=True
            )
        except (RuntimeError, ValueError, KeyError) as error:
            raise WeightsRefused(f"checkpoint does not fit {self._class.__name__}: {error}") from error
        wrong = {kind: sorted(map(str, names))[:5] for kind, names in report.items() if names}
        if wrong:
            raise WeightsRefused(f"checkpoint does not fit {self._class.__name__}: {wrong}")
        return module.to(self._device).eval(), frozenset(tensors) - self._ties.keys()

    def tensors(self, weights: Any) -> Iterable[tuple[str, torch.Tensor]] | None:
        """None where the module has other names than its checkpoint: transformers has put tensors together."""
        module, names = weights
        own: dict[str, torch.Tensor] = module.state_dict()
        return None if names - own.keys() else ((name, own[name]) for name in sorted(names))

    def forward(self, weights: Any, rows: Rows) -> torch.Tensor:
        module, _ = weights
        at = 0
        logits = []
        for segment, wanted in zip(rows.segments, rows.wanted, strict=True):
            tokens = torch.from_numpy(rows.tokens[at : at + segment.count]).to(self._device)[None]
            at += segment.count
            past = {self._cache_argument: self._past.get(segment.slot)}
            out = module(input_ids=tokens, use_cache=True, logits_to_keep=1, **past)
            self._past[segment.slot] = out.past_key_values
            if wanted:
                logits.append(out.logits[0, -1])
        if not logits:
            return torch.empty((0, self.vocabulary), device=self._device)
        return torch.stack(logits)
