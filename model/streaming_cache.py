"""A text without end in constant memory: the first tokens, and a window of the last ones.

Efficient Streaming Language Models with Attention Sinks (Xiao et al. 2023, arXiv:2309.17453),
section 3.2. Heads rest their weight on the first tokens, so a plain window fails once these have
left it; with the first few kept, the model goes on as if its text were the sinks and the window,
at positions 0 .. capacity - 1: positions within the cache, not in the text.

Scores depend on distances alone, so no key has to be turned for that. Memory has twice as many
slots as the cache has tokens. A new key goes to the next slot, rotated by the number of the slot,
and the sinks, kept apart as they were stored first, are turned on to stand right before the
window, where evicted tokens lie. So attention reads one contiguous piece:

    slots    . . . . . . . . s s s s w w w w w w w w . . . .
                            begin                   end

When the last slot is used up, the window moves to the front. That costs one copy per `capacity`
tokens, and a key is turned back once in its life at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.config import ModelConfig
from model.positions import Rotation, rotate, shift_table

POSITIONS = ("rope", "alibi", "none")  # schemes that know distances only


class StreamingCache:
    """The first `sinks` tokens and the last capacity - sinks, the newest included.

    Up to `capacity` tokens it equals a full cache. Beyond that it takes one token at a time: each
    of several would see another window.

    Attributes:
        keys, values: the memory of each layer, (B, Hkv, slots, D), with 2 · capacity slots.
        begin, end: attention reads the slots begin .. end - 1.
        sinks, window: how many tokens of either kind a full cache holds.
    """

    lengths: Tensor | None = None

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int = 1,
        capacity: int | None = None,
        sinks: int = 4,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """Allocate memory for `batch` sequences; capacity None means the context length.

        Raises ValueError as `check_streaming` does.
        """
        check_streaming(config, sinks, capacity)
        self.batch = batch
        self.capacity = config.context_length if capacity is None else capacity
        self.sinks = sinks
        self.window = self.capacity - sinks
        self.begin = self.end = 0
        self._start = 0  # first of the slots reserved last
        slots = 2 * self.capacity
        shape = (config.n_layer, 2, batch, config.kv_heads, slots, config.head_size)
        self._memory = torch.empty(shape, device=device, dtype=dtype)
        self.keys = [layer[0] for layer in self._memory]
        self.values = [layer[1] for layer in self._memory]
        # As stored first, at positions 0 .. sinks - 1; filled when the first token is evicted.
        self._sinks: Tensor = self._memory.new_empty((*shape[:4], sinks, config.head_size))
        self._shifts: Tensor | None = None  # (capacity + 1, 2, D)
        if config.position == "rope":
            self._shifts = shift_table(config, self.capacity + 1).to(device)
        self._positions = torch.arange(slots, device=device).expand(batch, -1)

    @property
    def length(self) -> int:
        """Tokens that attention sees, at most `capacity`."""
        return self.end - self.begin

    @property
    def nbytes(self) -> int:
        """n_layer · 2 · batch · n_kv_head · (2 · capacity + sinks) · head_dim · bytes."""
        return self._memory.nbytes + self._sinks.nbytes

    def extend(self, n: int) -> Tensor:
        """Make room for n tokens; return their slots, which are their positions, (B, n) int64.

        Raises ValueError for several tokens at once where one has to be evicted.
        """
        self.reserve(n)
        return self._positions[:, self._start : self.end]

    def reserve(self, n: int) -> None:
        """Make room for n tokens, as `extend` does."""
        if self.length + n <= self.capacity:
            self._start, self.end = self.end, self.end + n
        elif n == 1:
            self._evict_one()
        else:
            raise ValueError(
                f"the streaming cache holds {self.length} of {self.capacity} tokens; {n} more do "
                f"not fit at once, and beyond its capacity it takes one at a time"
            )

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, Hkv, n, D); return sinks and window, (B, Hkv, S, D), as views."""
        assert k.shape[0] == self.batch
        assert k.shape[2] == self.end - self._start
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, self._start : self.end] = k
        values[:, :, self._start : self.end] = v
        return keys[:, :, self.begin : self.end], values[:, :, self.begin : self.end]

    def reset(self) -> None:
        """Forget everything; the memory is kept."""
        self.begin = self.end = self._start = 0

    def copy_from(self, other: StreamingCache) -> None:
        """Let every sequence here begin with what the single sequence in `other` holds."""
        assert other.batch == 1
        assert (other.capacity, other.sinks) == (self.capacity, self.sinks)
        self.begin, self.end, self._start = other.begin, other.end, other._start
        self._memory[..., : self.end, :] = other._memory[..., : self.end, :]
        self._sinks.copy_(other._sinks)

    def _evict_one(self) -> None:
        """Let the window go on by one slot, and the sinks with it."""
        if self.begin == 0:  # nothing has been evicted yet: the sinks are in their first slots
            self._sinks.copy_(self._memory[..., : self.sinks, :])
        if self.end == 2 * self.capacity:
            self._move_to_front()
        self._start, self.begin, self.end = self.end, self.begin + 1, self.end + 1
        self._place_sinks()

    def _move_to_front(self) -> None:
        """Turn the window back to the slots right after where the sinks were at first."""
        shift = self.begin
        for layer in self._memory:  # one at a time: the copies stay small
            window = layer[..., self.end - self.window : self.end, :]
            layer[0, :, :, self.sinks : self.capacity] = self._turned(window[0], -shift)
            layer[1, :, :, self.sinks : self.capacity] = window[1]
        self.begin, self.end = 0, self.capacity

    def _place_sinks(self) -> None:
        places = slice(self.begin, self.begin + self.sinks)
        self._memory[:, 0, :, :, places] = self._turned(self._sinks[:, 0], self.begin)
        self._memory[:, 1, :, :, places] = self._sinks[:, 1]

    def _turned(self, keys: Tensor, shift: int) -> Tensor:
        """Keys (..., D) as if rotated `shift` positions further on."""
        if self._shifts is None:
            return keys
        cos, sin = self._shifts[abs(shift)]
        return rotate(keys, Rotation(cos, sin if shift > 0 else -sin))


def check_streaming(config: ModelConfig, sinks: int, capacity: int | None = None) -> None:
    """Raise ValueError, in one line, where a model cannot go on from sinks and a window.

    That is with positions that are looked up in a table of vectors (the model knows no distance
    and has seen no later one), with first tokens of a special role that would be evicted, and for
    numbers out of range.
    """
    context = config.context_length
    capacity = context if capacity is None else capacity
    if config.position not in POSITIONS:
        raise ValueError(
            f"model.position={config.position} cannot stream: a token would have to change its "
            f"position vector as the window moves (at_limit=slide reads it again)"
        )
    if not 0 <= sinks < capacity:
        raise ValueError(
            f"sinks={sinks} must be at least 0 and below the {capacity} tokens of the cache"
        )
    if config.position == "rope" and capacity > context:
        raise ValueError(
            f"capacity={capacity} is above model.context_length={context} (model.position=rope)"
        )
    for name, count in (("prefix", config.prefix), ("window_sinks", config.window_sinks)):
        if count > sinks:
            raise ValueError(
                f"the first model.{name}={count} tokens must stay: sinks={sinks} is too few"
            )
