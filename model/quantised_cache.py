"""Keys and values in 8 or 4 bits: a quarter or a sixth of the memory of float32, a small error.

KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache (Liu et al. 2024, arXiv:2402.02750),
section 3: a few channels of the keys are large for every token, so each channel has a scale of its
own, over a group of tokens; values have no such channels and get a scale per token. Down to 4 bits
the steps are fine enough to be symmetric around zero, x = scale · integer with the integer in
-127 .. 127 or -7 .. 7, so an element is off by half a scale at most.

In full precision stay the first tokens, whose keys and values are unlike all others and which
every later token looks at (Xiao et al. 2023, arXiv:2309.17453), and the newest tokens until they
fill a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ModelConfig
from model.kv_cache import Counted

LEVELS = {8: 127, 4: 7}  # by number of bits, the largest integer


class Quantised(NamedTuple):
    """Integers (..., int8), not packed, and what to multiply them with (float32, broadcasts)."""

    integers: Tensor
    scale: Tensor


def quantise(x: Tensor, dim: int, bits: int) -> Quantised:
    """Round x to multiples of a scale, which all elements along `dim` share."""
    levels = LEVELS[bits]
    wide = x.float()
    scale = wide.abs().amax(dim, keepdim=True) / levels
    steps = wide / scale.clamp(min=torch.finfo(torch.float32).tiny)
    return Quantised(steps.round_().clamp_(-levels, levels).to(torch.int8), scale)


def pack(integers: Tensor) -> Tensor:
    """Put integers of 4 bits, (..., D) int8 with D even, into (..., D / 2) bytes, int8.

    A byte holds channel d in its lower half, counted from -8, and channel d + D / 2 in its upper.
    """
    low, high = integers.chunk(2, dim=-1)
    return (low + 8) | (high << 4)


def unpack(packed: Tensor) -> Tensor:
    """Undo `pack`: (..., D / 2) to (..., D), int8."""
    return torch.cat([(packed & 15) - 8, packed >> 4], dim=-1)


class QuantisedCache(Counted):
    """Every token, most of them in 8 or 4 bits; attention reads a dequantised copy of one layer.

    Tokens are read as they were stored, only those of the newest chunk as they came: so a prompt
    read in one chunk is read exactly.

    Attributes:
        bits: 8, or 4, two of which share a byte.
        sinks: how many first tokens stay in full precision.
        group: how many tokens share the scales of their keys.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        bits: int = 8,
        batch: int = 1,
        capacity: int | None = None,
        sinks: int = 4,
        group: int = 32,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """Allocate room for `batch` sequences of `capacity` tokens (None: the context length).

        Raises ValueError as `check_quantised` does.
        """
        check_quantised(config, bits, sinks, group)
        super().__init__(config, batch, capacity, device)
        self.bits = bits
        self.sinks = sinks
        self.group = group
        self.dtype = dtype

        groups = max(self.capacity - sinks, 0) // group
        heads = (config.n_layer, batch, config.kv_heads)
        D = config.head_size

        def full_precision(places: int) -> Tensor:
            return torch.empty((2, *heads, places, D), device=device, dtype=dtype)

        def scales(*shape: int) -> Tensor:
            return torch.empty((*heads, *shape), device=device, dtype=torch.float32)

        self._first = full_precision(min(sinks, self.capacity))  # keys, values
        self._newest = full_precision(min(group, max(self.capacity - sinks, 0)))
        stored = (2, *heads, groups, group, D * bits // 8)
        self._integers = torch.empty(stored, device=device, dtype=torch.int8)
        self._key_scales = scales(groups, 1, D)
        self._value_scales = scales(groups, group, 1)

    @property
    def nbytes(self) -> int:
        """Memory of integers, scales and what is in full precision, in bytes, used or not.

        Per layer, sequence and key/value head, with n groups of `group` tokens: 2 · n · group · D
        of integers (4 bits: half of that), 4 · n · (D + group) of scales, and 2 · (sinks + group)
        · D numbers in the full type.
        """
        parts = self._first, self._newest, self._integers, self._key_scales, self._value_scales
        return sum(part.nbytes for part in parts)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, Hkv, n, D); return all so far, (B, Hkv, S, D), k and v as they are."""
        assert k.shape[0] == self.batch
        assert k.shape[2] == self.length - self._start
        keys, values = self._stored(layer)
        # Copied before anything is stored: the newest tokens among them are views of their places.
        read = torch.cat([*keys, k], dim=2), torch.cat([*values, v], dim=2)
        self._store(layer, k, v)
        return read

    def reset(self) -> None:
        """Forget everything; the memory is kept."""
        self.length = self._start = 0

    def copy_from(self, other: QuantisedCache) -> None:
        """Let every sequence here begin with what the single sequence in `other` holds."""
        assert other.batch == 1
        assert other.length <= self.capacity
        assert (other.bits, other.sinks, other.group) == (self.bits, self.sinks, self.group)
        self.length = self._start = other.length
        first, groups, newest = self._split(other.length)
        self._first[..., :first, :] = other._first[..., :first, :]
        self._newest[..., :newest, :] = other._newest[..., :newest, :]
        self._integers[:, :, :, :, :groups] = other._integers[:, :, :, :, :groups]
        self._key_scales[:, :, :, :groups] = other._key_scales[:, :, :, :groups]
        self._value_scales[:, :, :, :groups] = other._value_scales[:, :, :, :groups]

    def _split(self, length: int) -> tuple[int, int, int]:
        """How `length` tokens are stored: first ones, whole groups, newest ones."""
        first = min(length, self.sinks)
        groups, newest = divmod(length - first, self.group)
        return first, groups, newest

    def _stored(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Pieces of the keys and of the values that were there before the newest chunk."""
        first, groups, newest = self._split(self._start)
        sides = []
        for side, scales in enumerate((self._key_scales, self._value_scales)):
            integers = self._integers[side, layer, :, :, :groups]
            if self.bits == 4:
                integers = unpack(integers)  # (B, Hkv, groups, group, D)
            middle = (integers * scales[layer, :, :, :groups]).to(self.dtype).flatten(2, 3)
            begin, end = self._first[side, layer], self._newest[side, layer]
            sides.append([begin[:, :, :first], middle, end[:, :, :newest]])
        return sides[0], sides[1]

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        first, groups, newest = self._split(self._start)
        first_after, groups_after, newest_after = self._split(self.length)
        for side, new in enumerate((k, v)):
            self._first[side, layer, :, :, first:first_after] = new[:, :, : first_after - first]
            waiting = self._newest[side, layer, :, :, :newest]
            waiting = torch.cat([waiting, new[:, :, first_after - first :]], dim=2)
            whole = waiting.shape[2] - newest_after
            if whole:
                in_groups = waiting[:, :, :whole].unflatten(2, (-1, self.group))
                self._quantise(side, layer, slice(groups, groups_after), in_groups)
            self._newest[side, layer, :, :, :newest_after] = waiting[:, :, whole:]

    def _quantise(self, side: int, layer: int, groups: slice, x: Tensor) -> None:
        """Store whole groups of keys (side 0) or values (side 1), (B, Hkv, groups, group, D)."""
        scales, dim = (self._value_scales, -1) if side else (self._key_scales, -2)
        integers, scale = quantise(x, dim, self.bits)
        self._integers[side, layer, :, :, groups] = pack(integers) if self.bits == 4 else integers
        scales[layer, :, :, groups] = scale


def check_quantised(config: ModelConfig, bits: int, sinks: int, group: int) -> None:
    """Raise ValueError, in one line, for numbers out of range and heads that cannot be packed."""
    if bits not in LEVELS:
        raise ValueError(f"bits={bits} is not one of {', '.join(map(str, LEVELS))}")
    if sinks < 0:
        raise ValueError(f"sinks={sinks} must be at least 0")
    if group < 1:
        raise ValueError(f"group={group} must be at least 1 token")
    if bits == 4 and config.head_size % 2:
        raise ValueError(
            f"the head size {config.head_size} must be even for cache=int4, which packs two "
            "channels into a byte (choose cache=full or int8)"
        )
