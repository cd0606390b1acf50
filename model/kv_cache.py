"""Keys and values of the tokens a model has already read, so that it never reads them twice.

The decoder only knows the protocol: `extend` once per forward pass, `append` once per layer. It
never asks which cache it holds, so another one (a moving window, quantised, in pages) is another
class in a file of its own and no change elsewhere. Keys are stored as attention uses them, RoPE
applied. A cache that lives on what attention did is an `Observer` besides.

`FullCache` and `StreamingCache` also show their memory, so that a compiled step can write into it:
`keys` and `values`, one (B, Hkv, slots, D) per layer, of which attention reads begin .. end - 1
after `extend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from model.config import ModelConfig


class KVCache(Protocol):
    """What the decoder needs of a cache for B sequences that it reads together."""

    @property
    def length(self) -> int:
        """Tokens stored and reserved so far, the same for every sequence or their maximum."""

    @property
    def capacity(self) -> int:
        """The most tokens it can hold per sequence."""

    @property
    def lengths(self) -> Tensor | None:
        """Tokens of each sequence, (B,) int32 on the device; None when all hold `length`."""

    @property
    def nbytes(self) -> int:
        """Memory of the stored keys and values, in bytes."""

    def extend(self, n: int) -> Tensor:
        """Reserve the next n places of every sequence; return their positions, (B, n) int64.

        Raises ValueError beyond the capacity, before anything is changed.
        """

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, Hkv, n, D) of one layer in the places reserved last.

        Returns all keys and values to attend to, (B, Hkv, S, D).
        """

    def reset(self) -> None:
        """Forget everything; the memory is kept."""


class Observer(ABC):
    """A cache that wants to know, after each layer's attention, what weight every key received.

    To measure it costs a second pass over queries and keys; other caches cost nothing.
    """

    @abstractmethod
    def observe(self, layer: int, received: Tensor) -> None:
        """Take the weight on each key that `append` returned last, (B, H, S), summed over rows."""


class Counted:
    """What caches share that count the same tokens for every sequence, up to a capacity.

    All sequences have the same length, so `lengths` is None and attention needs no lengths.
    """

    lengths: Tensor | None = None

    def __init__(
        self, config: ModelConfig, batch: int, capacity: int | None, device: torch.device | str
    ):
        self.batch = batch
        self.capacity = config.context_length if capacity is None else capacity
        self.length = 0
        self._start = 0  # first of the places reserved last
        self._positions = torch.arange(self.capacity, device=device).expand(batch, -1)

    def extend(self, n: int) -> Tensor:
        """Reserve the next n places; return their positions, (B, n).

        Raises ValueError beyond the capacity, before anything is changed.
        """
        self.reserve(n)
        return self._positions[:, self._start : self.length]

    def reserve(self, n: int) -> None:
        """Reserve the next n places, as `extend` does."""
        if self.length + n > self.capacity:
            raise ValueError(
                f"the cache holds {self.length} of at most {self.capacity} tokens; "
                f"{n} more do not fit"
            )
        self._start = self.length
        self.length += n


class FullCache(Counted):
    """Every key and value, in memory allocated once; attention reads views of it."""

    begin = 0  # first slot that attention reads

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int = 1,
        capacity: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """Allocate room for `batch` sequences of `capacity` tokens (None: the context length)."""
        super().__init__(config, batch, capacity, device)
        shape = (config.n_layer, 2, batch, config.kv_heads, self.capacity, config.head_size)
        # Read as a whole, places not yet used weigh nothing, but must be finite.
        self._memory = torch.zeros(shape, device=device, dtype=dtype)
        # One tensor per layer, taken apart here and not once per token.
        self.keys = [layer[0] for layer in self._memory]  # (B, Hkv, capacity, D) each
        self.values = [layer[1] for layer in self._memory]

    @property
    def end(self) -> int:
        """One past the last slot that attention reads."""
        return self.length

    @property
    def nbytes(self) -> int:
        """n_layer · 2 · batch · n_kv_head · capacity · head_dim · bytes of the type."""
        return self._memory.nbytes

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, Hkv, n, D); return all so far, (B, Hkv, S, D), as views."""
        assert k.shape[0] == self.batch
        assert k.shape[2] == self.length - self._start
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, self._start : self.length] = k
        values[:, :, self._start : self.length] = v
        return keys[:, :, : self.length], values[:, :, : self.length]

    def reset(self) -> None:
        """Forget everything; the memory is kept."""
        self.length = self._start = 0

    def copy_from(self, other: FullCache) -> None:
        """Let every sequence here begin with what the single sequence in `other` holds."""
        assert other.batch == 1
        assert other.length <= self.capacity
        self.length = self._start = other.length
        self._memory[..., : self.length, :] = other._memory[..., : self.length, :]

    def reorder(self, rows: Tensor) -> None:
        """Let sequence b go on from what sequence `rows[b]` holds; `rows` is (B,) int64."""
        assert rows.shape == (self.batch,)
        for layer in self._memory:  # one at a time, since what is gathered is a copy
            layer[:, :, :, : self.length] = layer[:, rows, :, : self.length]

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of every sequence."""
        assert 0 <= length <= self.length
        self.length = self._start = length
