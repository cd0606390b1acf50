"""Which cache a text is generated with: the choice as a value, and what an inexact one costs."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from model.config import ModelConfig
from model.decoder import Decoder
from model.evicting_cache import EvictingCache, check_evicting
from model.kv_cache import FullCache, KVCache
from model.quantised_cache import QuantisedCache, check_quantised
from model.size import kv_cache_bytes
from model.streaming_cache import StreamingCache, check_streaming

BITS = {"int8": 8, "int4": 4}
KINDS = ("full", *BITS, "evicting")


class SampleCache(KVCache, Protocol):
    """A cache that several samples of one prompt can begin with."""

    def copy_from(self, other: Any) -> None:
        """Let every sequence here begin with what the single sequence in `other` holds.

        `other` is of the same kind and was made with the same options.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How keys and values are kept; raises ValueError in one line for values out of range.

    "full" keeps all as they are. "int8" and "int4" keep them in 8 and 4 bits
    (`model/quantised_cache.py`), "evicting" the `budget` most attended
    (`model/evicting_cache.py`): these save memory and change the logits a little.
    """

    kind: str = "full"
    sinks: int = 4  # first tokens treated with care: in full precision, never dropped
    budget: int | None = None  # evicting: tokens kept for each key/value head
    recent: int | None = None  # evicting: newest tokens never dropped; None: half of the rest
    group: int = 32  # int8, int4: tokens that share the scales of their keys

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            near = difflib.get_close_matches(str(self.kind), KINDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"cache={self.kind!r} is not one of {', '.join(KINDS)}{hint}")
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks} must be at least 0")
        if self.group < 1:
            raise ValueError(f"group={self.group} must be at least 1 token")
        if self.kind == "evicting" and self.budget is None:
            raise ValueError("cache=evicting needs a budget, the tokens it keeps per head")
        if self.kind != "evicting" and self.budget is not None:
            raise ValueError(f"budget={self.budget} has no effect with cache={self.kind}")

    @property
    def is_exact(self) -> bool:
        """Whether logits are those of a model without a cache, up to rounding."""
        return self.kind == "full"

    @property
    def bits(self) -> int | None:
        """Bits of a quantised key or value; None for a cache that quantises none."""
        return BITS.get(self.kind)


def check_cache(config: ModelConfig, options: CacheOptions, *, stream: bool = False) -> None:
    """Raise ValueError, in one line, if a model cannot work with this cache."""
    if stream:
        if options.kind != "full":
            raise ValueError(f"at_limit=stream keeps tokens as they are: not cache={options.kind}")
        check_streaming(config, options.sinks)
    if options.bits is not None:
        check_quantised(config, options.bits, options.sinks, options.group)
    if options.kind == "evicting":
        assert options.budget is not None
        check_evicting(config, options.budget, options.sinks, options.recent)


def make_cache(
    config: ModelConfig,
    options: CacheOptions,
    *,
    batch: int = 1,
    capacity: int | None = None,
    stream: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> SampleCache:
    """Allocate a cache for `batch` sequences of `capacity` tokens (None: the context length).

    With `stream` it goes on beyond that: the first `sinks` tokens and a window of the last ones
    in `capacity` places. Raises ValueError as `check_cache` does.
    """
    check_cache(config, options, stream=stream)
    room: dict[str, Any] = {"batch": batch, "capacity": capacity, "device": device, "dtype": dtype}
    if stream:
        return StreamingCache(config, sinks=options.sinks, **room)
    if options.bits is not None:
        return QuantisedCache(
            config, bits=options.bits, sinks=options.sinks, group=options.group, **room
        )
    if options.kind == "evicting":
        assert options.budget is not None
        return EvictingCache(
            config, budget=options.budget, sinks=options.sinks, recent=options.recent, **room
        )
    return FullCache(config, **room)


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the type that keys and values come in: the weights', or autocast's."""
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def check_memory(
    config: ModelConfig, tokens: int, device: torch.device, bytes_per_value: float, asked: str
) -> None:
    """Raise ValueError, in one line, if keys and values of `tokens` tokens are too many to hold.

    `asked` says what would need them. The limit is the memory that the machine, or the device,
    has in all; less may be free.
    """
    values = kv_cache_bytes(config, batch_size=1, length=tokens, bytes_per_value=1)
    n_bytes = values * bytes_per_value
    if device.type == "cuda":
        limit = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu" and "SC_PHYS_PAGES" in os.sysconf_names:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    if n_bytes > limit:
        raise ValueError(
            f"{asked} needs {n_bytes / 2**30:,.1f} GiB for keys and values, {device} has "
            f"{limit / 2**30:,.1f} GiB"
        )


class LogitError(NamedTuple):
    """How far the logits of a cache are from those of a full one, over `tokens` next tokens."""

    max_abs: float
    mean_kl: float  # Kullback-Leibler divergence from the full cache's distribution, in nats
    tokens: int

    def __str__(self) -> str:
        return (
            f"logits off by at most {self.max_abs:.2g}, mean KL divergence {self.mean_kl:.2g} "
            f"nats, over {self.tokens} tokens"
        )


@torch.inference_mode()
def logit_error(model: Decoder, cache: KVCache, tokens: Tensor, *, singly: int = 64) -> LogitError:
    """Measure an empty cache against a `FullCache` of its type on tokens (B, T).

    Both read all but the last `singly` tokens at once and the rest one at a time; the logits
    after each of the latter are compared. Raises ValueError if there are fewer than two tokens:
    the first one read always sees itself alone, as it is.
    """
    batch, length = tokens.shape
    if length < 2:
        raise ValueError(f"an error needs at least two tokens to show; got {length}")
    first = max(length - singly, model.config.prefix, 1)
    chunks = [first] + [1] * (length - first)
    weight = model.embed.weight
    full = FullCache(
        model.config,
        batch=batch,
        capacity=length,
        device=weight.device,
        dtype=compute_dtype(weight),
    )
    max_abs, kl = 0.0, 0.0
    for number, chunk in enumerate(tokens.split(chunks, dim=1)):
        exact, actual = (
            model.forward(chunk, cache=each, only_last=True).logits.double()
            for each in (full, cache)
        )
        if number:
            max_abs = max(max_abs, (exact - actual).abs().max().item())
            log_p, log_q = exact.log_softmax(-1), actual.log_softmax(-1)
            kl += (log_p.exp() * (log_p - log_q)).sum().item()
    compared = batch * (length - first)
    return LogitError(max_abs, kl / compared, compared)
