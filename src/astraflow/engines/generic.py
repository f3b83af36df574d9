"""Any causal LM of transformers, one sequence at a time: the way for architectures that ``lean`` does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.func import functional_call

from astraflow.engines.rows import Rows
from astraflow.errors import WeightsRefused


class GenericModel:
    """Implements ``rows.Model`` on the model's own forward pass and cache."""

    def __init__(self, model: torch.nn.Module, config: Any, *, dtype: torch.dtype, device: torch.device) -> None:
        self._module = model.eval()
        self._config = config
        self._dtype = dtype
        self._device = device
        self._past: dict[int, Any] = {}
        self._expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        self._aliases: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._buffers = {
            name: value.to(device, copy=True) for name, value in model.named_buffers() if name not in self._expected
        }

    @property
    def vocabulary(self) -> int:
        return int(self._config.vocab_size)

    @property
    def context(self) -> int:
        return int(
            getattr(self._config, "max_position_embeddings", 0) or getattr(self._config, "n_positions", 0) or 2048
        )

    @property
    def shares_prefixes(self) -> bool:
        return False

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        raise NotImplementedError

    def save_prefix(self, slot: int, length: int) -> Any:
        raise NotImplementedError

    def restore_prefix(self, saved: Any, slot: int, length: int) -> None:
        raise NotImplementedError

    def forget(self, slot: int) -> None:
        self._past.pop(slot, None)

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given = dict(tensors)
        for alias, source in self._aliases.items():
            if alias in given and source in given and not torch.equal(given[alias], given[source]):
                raise WeightsRefused(f"{alias} differs from {source}, which this model ties")
            known = given.get(source, given.get(alias))
            if known is not None:
                given[alias] = given[source] = known
        missing = sorted(set(self._expected) - set(given))
        unknown = sorted(set(given) - set(self._expected))
        reshaped = [name for name, size in self._expected.items() if name in given and tuple(given[name].shape) != size]
        if missing or unknown or reshaped:
            raise WeightsRefused(
                f"checkpoint does not fit the model: missing {missing[:5]}, unknown {unknown[:5]}, "
                f"other shape {reshaped[:5]}"
            )
        moved = {name: value.to(device=self._device, dtype=self._dtype, copy=True) for name, value in given.items()}
        for alias, source in self._aliases.items():
            moved[alias] = moved[source]
        return moved | self._buffers

    @torch.inference_mode()
    def forward(self, weights: dict[str, torch.Tensor], rows: Rows) -> torch.Tensor:
        at = 0
        logits = []
        for segment, wanted in zip(rows.segments, rows.wanted, strict=True):
            tokens = torch.from_numpy(rows.tokens[at : at + segment.count]).to(self._device)[None]
            at += segment.count
            out = functional_call(
                self._module,
                weights,
                args=(),
                kwargs={
                    "input_ids": tokens,
                    "past_key_values": self._past.get(segment.slot),
                    "use_cache": True,
                    "logits_to_keep": 1,
                },
            )
            self._past[segment.slot] = out.past_key_values
            if wanted:
                logits.append(out.logits[0, -1])
        if not logits:
            return torch.empty((0, self.vocabulary))
        return torch.stack(logits)
