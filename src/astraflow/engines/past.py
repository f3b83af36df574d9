"""Keys and values of every slot, layer by layer, in place: a step reads them without copying.

Keys lie transposed, [slots, kv_heads, head_dim, room], values as they are used, [slots, kv_heads, room, head_dim]: both
products of attention over a range of slots are then one batched multiplication each.
"""

from __future__ import annotations

import torch

_ROOM = 64
"""The room of a slot grows in steps of so many tokens."""


class Past:
    def __init__(
        self, *, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.room = 0
        self._layers = layers
        self._size = (slots, kv_heads, head_dim)
        self._dtype = dtype
        self._device = device

    def grow(self, length: int) -> None:
        """Make room for ``length`` tokens in every slot; at least doubled, so that growing stays rare."""
        if length <= self.room:
            return
        room = -(-max(length, self.room * 3 // 2) // _ROOM) * _ROOM
        slots, kv_heads, head_dim = self._size
        for layer in range(self._layers):
            # Zeros, not garbage: what is masked out is multiplied by 0, and 0 x NaN is NaN.
            keys = torch.zeros((slots, kv_heads, head_dim, room), dtype=self._dtype, device=self._device)
            values = torch.zeros((slots, kv_heads, room, head_dim), dtype=self._dtype, device=self._device)
            if self.room:
                keys[..., : self.room].copy_(self.keys[layer])
                values[:, :, : self.room].copy_(self.values[layer])
                self.keys[layer], self.values[layer] = keys, values
            else:
                self.keys.append(keys)
                self.values.append(values)
        self.room = room

    def write(
        self, layer: int, slots: torch.Tensor, at: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Row n of ``keys`` and ``values`` [N, kv_heads, head_dim] goes to position ``at[n]`` of ``slots[n]``."""
        self.keys[layer][slots, :, :, at] = keys.to(self._dtype)
        self.values[layer][slots, :, at] = values.to(self._dtype)

    def copy(self, source: int, target: int, length: int) -> None:
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target, :, :, :length].copy_(keys[source, :, :, :length])
            values[target, :, :length].copy_(values[source, :, :length])

    def save(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.stack([keys[slot, :, :, :length] for keys in self.keys]),
            torch.stack([values[slot, :, :length] for values in self.values]),
        )

    def restore(self, saved: tuple[torch.Tensor, torch.Tensor], slot: int, length: int) -> None:
        self.grow(length)
        for layer, (keys, values) in enumerate(zip(*saved, strict=True)):
            self.keys[layer][slot, :, :, :length].copy_(keys[..., :length])
            self.values[layer][slot, :, :length].copy_(values[:, :length])
