"""Only the keys that attention looks at, within a budget.

H2O: Heavy-Hitter Oracle (Zhang et al. 2023, arXiv:2306.14048), section 4: a few keys receive
most of the weight, and those that received much so far go on doing so. So each key/value head of
each layer adds up what every key has received from the queries that read it, and when it holds
more than its budget, drops the keys with the least. The most recent ones have had no time to
receive anything and stay; so do the first ones, on which heads rest (Xiao et al. 2023,
arXiv:2309.17453).

Keys keep the positions they have in the text, so the context length remains the limit. What is
lost is only what attention would have read of the dropped ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.config import ModelConfig
from model.kv_cache import Counted, Observer

STAYS = float("inf")


class EvictingCache(Counted, Observer):
    """At most `budget` tokens for each layer and key/value head, in the order of the text.

    A chunk sees what was kept before it, and all of itself; then tokens are dropped. Heads keep
    different tokens, but all the same number.

    Attributes:
        budget: how many tokens a head keeps.
        sinks: how many first tokens are never dropped.
        recent: how many of the newest are never dropped.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        budget: int,
        sinks: int = 4,
        recent: int | None = None,
        batch: int = 1,
        capacity: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """Allocate memory for `batch` sequences of at most `capacity` tokens read.

        capacity None means the context length; recent None half of what the sinks leave.
        Raises ValueError as `check_evicting` does.
        """
        check_evicting(config, budget, sinks, recent)
        super().__init__(config, batch, capacity, device)
        self.budget = budget
        self.sinks = sinks
        self.recent = _half_of_the_rest(budget, sinks) if recent is None else recent
        places = min(budget, self.capacity)
        heads = (config.n_layer, batch, config.kv_heads)
        self._memory = torch.empty(
            (2, *heads, places, config.head_size), device=device, dtype=dtype
        )
        self._received = torch.zeros((*heads, places), device=device)
        self._kept = torch.zeros((*heads, places), device=device, dtype=torch.int64)
        self._chunk: tuple[Tensor, Tensor] | None = None  # keys, values of a layer under way

    @property
    def nbytes(self) -> int:
        """Memory of keys and values: n_layer · 2 · batch · n_kv_head · budget · head_dim · bytes.

        Each of these places also has 12 bytes per head: the weight received, and its position.
        """
        return self._memory.nbytes

    def kept(self, layer: int) -> Tensor:
        """Positions in the text of the tokens that each head holds, (B, Hkv, S), ascending."""
        return self._kept[layer, :, :, : self._held(self.length)]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kept keys and values and behind them k and v, (B, Hkv, S, D)."""
        assert k.shape[0] == self.batch
        assert k.shape[2] == self.length - self._start
        held = self._held(self._start)
        keys, values = self._memory[:, layer, :, :, :held]
        self._chunk = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        return self._chunk

    def observe(self, layer: int, received: Tensor) -> None:
        """Add what each key received, (B, H, S), and drop what exceeds the budget."""
        assert self._chunk is not None
        keys, values = self._chunk
        self._chunk = None
        total = received.unflatten(1, (keys.shape[1], -1)).sum(dim=2).to(self._received.dtype)
        held = self._held(self._start)
        total[:, :, :held] += self._received[layer, :, :, :held]
        new = self._positions[:, None, self._start : self.length].expand(-1, keys.shape[1], -1)
        positions = torch.cat([self._kept[layer, :, :, :held], new], dim=2)  # (B, Hkv, S)

        chosen = self._choose(total, positions)
        count = chosen.shape[2]
        self._received[layer, :, :, :count] = total.gather(2, chosen)
        self._kept[layer, :, :, :count] = positions.gather(2, chosen)
        channels = chosen[..., None].expand(-1, -1, -1, keys.shape[3])
        self._memory[0, layer, :, :, :count] = keys.gather(2, channels)
        self._memory[1, layer, :, :, :count] = values.gather(2, channels)

    def reset(self) -> None:
        """Forget everything; the memory is kept."""
        self.length = self._start = 0

    def copy_from(self, other: EvictingCache) -> None:
        """Let every sequence here begin with what the single sequence in `other` holds."""
        assert other.batch == 1
        assert other.length <= self.capacity
        assert (other.budget, other.sinks, other.recent) == (self.budget, self.sinks, self.recent)
        self.length, self._start = other.length, other._start
        held = self._held(self.length)
        self._memory[..., :held, :] = other._memory[..., :held, :]
        self._received[..., :held] = other._received[..., :held]
        self._kept[..., :held] = other._kept[..., :held]

    def _held(self, read: int) -> int:
        """How many tokens a head holds after `read` of them."""
        return min(read, self.budget)

    def _choose(self, total: Tensor, positions: Tensor) -> Tensor:
        """Which keys (B, Hkv, S) stay: their places, ascending, (B, Hkv, at most budget).

        Of equal ones the later are dropped.
        """
        stays = (positions < self.sinks) | (positions >= self.length - self.recent)
        order = total.masked_fill(stays, STAYS).sort(dim=2, descending=True, stable=True).indices
        return order[:, :, : self.budget].sort(dim=2).values


def check_evicting(config: ModelConfig, budget: int, sinks: int, recent: int | None) -> None:
    """Raise ValueError, in one line, where keys cannot be dropped from within the text.

    ALiBi and windows count distances by the place of a key among those it is given, and so would
    a prefix that does not fit the budget. Numbers out of range are refused, too.
    """
    if config.position == "alibi":
        raise ValueError(
            "model.position=alibi cannot evict: it counts keys to tell distances, and some would "
            "be missing (choose cache=full or int8)"
        )
    if any(config.windows):
        raise ValueError(
            f"model.windows={list(config.windows)} cannot evict: a window counts keys, and some "
            f"would be missing (choose cache=full or int8)"
        )
    if sinks < 0:
        raise ValueError(f"sinks={sinks} must be at least 0")
    if recent is not None and recent < 1:
        raise ValueError(f"recent={recent} must be at least 1: a token looks at itself")
    least = sinks + (1 if recent is None else recent)
    if budget < least:
        raise ValueError(
            f"budget={budget} must be at least {least}: sinks={sinks} and the "
            f"{least - sinks} most recent tokens are never dropped"
        )
    if budget < config.prefix:
        raise ValueError(f"budget={budget} must hold the whole model.prefix={config.prefix}")


def _half_of_the_rest(budget: int, sinks: int) -> int:
    return max(1, (budget - sinks) // 2)
