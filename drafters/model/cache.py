"""Keys and values of a batch of equally long sequences, in buffers allocated once."""

from __future__ import annotations

from typing import Protocol

import torch


class Store(Protocol):
    """A store in which a pass leaves its keys and values, and finds those of earlier passes."""

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one layer's new entries; returns all that the pass may attend to, new ones last."""
        ...

    def advance(self, count: int) -> None:
        """End a pass of `count` entries: it has been through all layers."""
        ...


class KeyValueCache:
    """One pair of buffers `[batch, key heads, capacity, head size]` per layer.

    A pass calls `append` once per layer and then `advance`. `truncate` forgets the last entries:
    masked positions and rejected tokens, after every step.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        key_heads: int,
        capacity: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        shape = (batch, key_heads, capacity, head_size)
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.capacity = capacity
        self.length = 0

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new entries behind the old ones; returns all of both."""
        end = self.length + key.shape[2]
        if end > self.capacity:
            raise ValueError(f"{end} entries do not fit a cache of {self.capacity}")
        self._keys[layer][:, :, self.length : end] = key
        self._values[layer][:, :, self.length : end] = value
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    def advance(self, count: int) -> None:
        """Count `count` more entries as filled."""
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget all entries from `length` on. Raises ValueError if there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} of {self.length} entries")
        self.length = length
