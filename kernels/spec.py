"""What a call to attention means: the mask and the logits, the statistics, and what comes back.

Nothing here says how attention is computed. Every backend reads these three classes and the
checks below; `kernels/attention.py` holds the two functions that take them.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

MAX_HEAD_SIZE = 256
MAX_SINK_MASS = 16
PRECISIONS = ("tf32x3", "ieee")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionSpec:
    """Who may see whom, and how a logit is made from a query and a key.

    Query row t sits at position i = n - T + t, where n is the number of keys of its sequence
    (the last query is always at the last key). With x = scale * q_i . k_j, the logit is
    s = cap(x) - slope * |i - j|, where cap(x) = softcap * tanh(x / softcap).

    Key j is visible from i when both are in the same document and, unless attention is
    bidirectional, j <= i with j inside the window or among the first `sinks` tokens of the
    document, or both are among the first `prefix` tokens of the document.

    Args:
        causal: a token sees itself and what came before; False lets it see everything.
        window: only the last `window` keys are visible, the query's own included.
        sinks: this many first tokens stay visible beside a window.
        prefix: the first tokens of a document see each other in both directions.
        documents: (B, S) integer ids, equal ids contiguous; attention stays inside a document.
            A row before the first key (T > S) counts as part of the first document.
        alibi_slopes: (H,) float32, subtracted once per token of distance.
        softcap: logits are squashed smoothly into (-softcap, softcap).
        scale: what q . k is multiplied with; None means 1 / sqrt(D).
        sink_logit: (H,) float32, one more softmax entry of value zero: "attend to nothing".

    Raises:
        ValueError: a number is out of range, or an option needs causal attention.
    """

    causal: bool = True
    window: int | None = None
    sinks: int = 0
    prefix: int = 0
    documents: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softcap: float | None = None
    scale: float | None = None
    sink_logit: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1, or None for none")
        if self.sinks < 0:
            raise ValueError(f"sinks is {self.sinks}; it must be at least 0")
        if self.prefix < 0:
            raise ValueError(f"prefix is {self.prefix}; it must be at least 0")
        if not self.causal and self.window is not None:
            raise ValueError(f"window is {self.window} with causal=False; a window needs causal")
        if not self.causal and self.prefix:
            raise ValueError(f"prefix is {self.prefix} with causal=False; a prefix needs causal")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}; it must be above 0, or None for none")
        if self.scale is not None and not self.scale > 0:
            raise ValueError(f"scale is {self.scale}; it must be above 0, or None for 1/sqrt(D)")

    @property
    def plain_logits(self) -> bool:
        """Whether the softmax is over scaled dot products alone: no bias, cap or null entry."""
        return self.softcap is None and self.alibi_slopes is None and self.sink_logit is None

    def scale_for(self, head_size: int) -> float:
        """What q . k is multiplied with for this head size."""
        return head_size**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Which statistics of the attention weights to return; each is one number per query row.

    With p_j the weight on key j and p_0 the weight on "attend to nothing" (0 without a sink
    logit), all over the full softmax unless said otherwise:

        lse             log of the softmax denominator, in nats; differentiable
        entropy         -sum p log p with p_0 included, in nats; differentiable
        entropy_tokens  entropy of p / (1 - p_0), over real keys only, in nats
        max_logit       the largest visible logit, before soft-cap and bias
        max_prob        the largest weight on a real key
        null_mass       p_0
        mean_distance   mean of i - j under p / (1 - p_0), in tokens
        sink_mass       for each k (1 to 16): the weight on the first k keys of the document
    """

    lse: bool = False
    entropy: bool = False
    entropy_tokens: bool = False
    max_logit: bool = False
    max_prob: bool = False
    null_mass: bool = False
    mean_distance: bool = False
    sink_mass: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for k in self.sink_mass:
            if not 1 <= k <= MAX_SINK_MASS:
                raise ValueError(f"sink_mass over {k} keys; each k must be 1 to {MAX_SINK_MASS}")

    @classmethod
    def of(cls, names: Iterable[str], sink_mass: tuple[int, ...] = ()) -> "Stats":
        """Make the request from names, as a config file lists them.

        Raises:
            ValueError: a name is not a statistic.
        """
        chosen = list(names)
        for name in chosen:
            if name not in ROW_STATISTICS:
                near = difflib.get_close_matches(name, ROW_STATISTICS, n=1)
                choices = ", ".join(ROW_STATISTICS)
                hint = f"did you mean {near[0]!r}?" if near else f"choose from {choices}"
                raise ValueError(f"unknown statistic {name!r}; {hint}")
        return cls(**dict.fromkeys(chosen, True), sink_mass=sink_mass)

    @property
    def row_names(self) -> list[str]:
        """Names of the statistics that were asked for, apart from `sink_mass`."""
        return [name for name in ROW_STATISTICS if getattr(self, name)]


ROW_STATISTICS = tuple(field.name for field in fields(Stats) if field.name != "sink_mass")


class AttentionOutput(NamedTuple):
    """The attention output and the statistics that were asked for (None where they were not).

    `out` is (B, H, T, Dv) in the type of q. Statistics are (B, H, T), `sink_mass`
    (B, H, T, len(k)), in float32, or float64 for float64 inputs. Only `out`, `lse` and
    `entropy` carry gradients. A row that sees no key has out 0 and statistics 0 except lse
    (-inf, or the sink logit), max_logit (-inf) and null_mass (1 with a sink logit).
    """

    out: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    entropy_tokens: Tensor | None = None
    max_logit: Tensor | None = None
    max_prob: Tensor | None = None
    null_mass: Tensor | None = None
    mean_distance: Tensor | None = None
    sink_mass: Tensor | None = None


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type attention is computed in, and statistics are returned in: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_query_and_key(q: Tensor, k: Tensor) -> None:
    """Raise ValueError, in one line, if q (B, H, T, D) and k (B, Hkv, S, D) do not fit."""
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q and k must be (B, heads, length, D); got {_shape(q)} and {_shape(k)}")
    batch, heads, rows, head_size = q.shape
    kv_batch, kv_heads, keys, kv_head_size = k.shape
    if batch != kv_batch or head_size != kv_head_size:
        raise ValueError(f"q {_shape(q)} and k {_shape(k)} differ in batch or head size")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key/value heads evenly")
    if not rows or not keys:
        raise ValueError(f"attention needs at least one query and one key; got {rows} and {keys}")
    if head_size > MAX_HEAD_SIZE:
        raise ValueError(f"head size {head_size} is above the limit of {MAX_HEAD_SIZE}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}; attention takes bfloat16, float16, float32 or float64")
    _check_like(q, k, "k")
    _check_unit_stride(q, "q")
    _check_unit_stride(k, "k")


def check_value(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError, in one line, if v (B, Hkv, S, Dv) does not fit k."""
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v {_shape(v)} must have batch, heads and length of k {_shape(k)}")
    if v.shape[3] > MAX_HEAD_SIZE:
        raise ValueError(f"value head size {v.shape[3]} is above the limit of {MAX_HEAD_SIZE}")
    _check_like(q, v, "v")
    _check_unit_stride(v, "v")


def check_spec(q: Tensor, k: Tensor, spec: AttentionSpec, kv_lengths: Tensor | None) -> None:
    """Raise ValueError, in one line, if a tensor of the spec or kv_lengths does not fit q, k."""
    batch, heads = q.shape[:2]
    keys = k.shape[2]
    if spec.documents is not None:
        _check_side_tensor(spec.documents, "documents", (batch, keys), INTEGERS, q)
    if spec.alibi_slopes is not None:
        _check_side_tensor(spec.alibi_slopes, "alibi_slopes", (heads,), DTYPES, q)
    if spec.sink_logit is not None:
        _check_side_tensor(spec.sink_logit, "sink_logit", (heads,), DTYPES, q)
    if kv_lengths is not None:
        _check_side_tensor(kv_lengths, "kv_lengths", (batch,), INTEGERS, q)


def check_received(q: Tensor, k: Tensor, received: Tensor) -> None:
    """Raise ValueError, in one line, if `received` (B, H, S) does not fit or wants no gradient."""
    shape = (q.shape[0], q.shape[1], k.shape[2])
    _check_side_tensor(received, "received", shape, (softmax_dtype(q.dtype),), q)
    if not received.requires_grad:
        raise ValueError(
            "received does not require grad; make it with requires_grad=True, or pass None"
        )


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))


def _check_like(q: Tensor, x: Tensor, name: str) -> None:
    if x.dtype != q.dtype:
        raise ValueError(f"q is {q.dtype} and {name} is {x.dtype}; they must be equal")
    if x.device != q.device:
        raise ValueError(f"q is on {q.device} and {name} on {x.device}; they must be equal")


def _check_unit_stride(x: Tensor, name: str) -> None:
    if x.stride(3) != 1 and x.shape[3] != 1:
        raise ValueError(f"{name} has stride {x.stride(3)} in its last dimension; it must be 1")


def _check_side_tensor(
    x: Tensor, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], q: Tensor
) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {_shape(x)}; it must be {shape}")
    if x.dtype not in dtypes:
        choices = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {x.dtype}; it must be one of {choices}")
    if x.device != q.device:
        raise ValueError(f"q is on {q.device} and {name} on {x.device}; they must be equal")
