"""The logits of one chunk of query rows, which forward, backward and column mass share."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.chunks import Chunk
from kernels.spec import AttentionSpec, softmax_dtype
from kernels.visibility import make_layout

# A finite stand-in for -inf: subtracting any row's peak or lse from it makes no NaN, and the
# exponential of what remains is exactly 0.
HIDDEN = -1e30


class Logits(NamedTuple):
    """Logits of one chunk, all (B, H, c, n), and what their derivatives and statistics need."""

    values: Tensor  # HIDDEN where invisible
    visible: Tensor  # (b, 1, c, m) of the last m keys; every row sees the n - m before them
    raw: Tensor | None  # before soft-cap and bias; None where there is neither
    squashed: Tensor | None  # tanh(raw / softcap)
    distance: Tensor | None  # |i - j|, (b, 1, c, n); with ALiBi only


class Call:
    """The queries and keys of one call, and the logits of any chunk of it.

    Query heads that share a key/value head are stacked as rows of one matrix, so keys are never
    repeated. "Stacked" means (B * Hkv, group * c, ...) in the type of the softmax.
    """

    def __init__(self, q: Tensor, k: Tensor, spec: AttentionSpec, kv_lengths: Tensor | None):
        self.q = q  # (B, H, T, D)
        self.spec = spec
        self.dtype = softmax_dtype(q.dtype)
        self.scale = spec.scale_for(q.shape[3])
        self.keys = self.per_kv_head(k)  # (B * Hkv, S, D)
        self.layout = make_layout(spec, q.shape[2], k.shape[2], kv_lengths, q.device)

    def per_kv_head(self, x: Tensor) -> Tensor:
        """Flatten batch and key/value heads: (B, Hkv, S, E) to (B * Hkv, S, E)."""
        return x.to(self.dtype).flatten(0, 1)

    def stack(self, x: Tensor) -> Tensor:
        """Stack the heads of a group: (B, H, c, E) to (B * Hkv, group * c, E)."""
        batch, heads, rows, size = x.shape
        stacks = self.keys.shape[0]
        return x.to(self.dtype).reshape(stacks, batch * heads // stacks * rows, size)

    def unstack(self, x: Tensor) -> Tensor:
        """Give every query head its own rows again: (B * Hkv, group * c, E) to (B, H, c, E)."""
        batch, heads = self.q.shape[:2]
        return x.view(batch, heads, x.shape[0] * x.shape[1] // (batch * heads), x.shape[2])

    def scaled_queries(self, rows: slice) -> Tensor:
        """Stacked rows of scale * q."""
        return self.stack(self.q[:, :, rows]) * self.scale

    def logits(self, chunk: Chunk, queries: Tensor, keys: Tensor) -> Logits:
        """Logits of a chunk from its scaled stacked queries and its keys (B * Hkv, n, D)."""
        spec = self.spec
        positions = chunk.key_positions(keys.device)
        values = self.unstack(torch.bmm(queries, keys.transpose(1, 2)))  # (B, H, c, n)
        raw = squashed = distance = None
        if spec.softcap is not None:
            raw = values
            squashed = torch.tanh(raw / spec.softcap)
            values = spec.softcap * squashed
        if spec.alibi_slopes is not None:
            raw = values if raw is None else raw
            distance = self.layout.distance(chunk.rows, positions).abs().unsqueeze(1)
            distance = distance.to(self.dtype)
            values = values - spec.alibi_slopes.to(self.dtype)[:, None, None] * distance
        last = positions[self._seen_by_all(chunk) :]
        visible = self.layout.visible(chunk.rows, last).unsqueeze(1)
        hide(values, visible, HIDDEN)
        return Logits(values, visible, raw, squashed, distance)

    def _seen_by_all(self, chunk: Chunk) -> int:
        """How many of a chunk's first keys need no mask, as far as that is known on the host."""
        spec, n_keys = self.spec, self.layout.n_keys
        is_plain = spec.window is None and spec.documents is None
        if not is_plain or self.layout.kv_lengths is not None:
            return 0
        if not spec.causal:
            return n_keys
        first_row = n_keys - self.q.shape[2] + chunk.rows.start  # its position
        return max(0, first_row + 1 - chunk.keys.start)


def hide(x: Tensor, visible: Tensor, value: float) -> None:
    """Put `value` where a key is invisible, in place: x (B, H, c, n), visible as in `Logits`."""
    x[..., x.shape[-1] - visible.shape[-1] :].masked_fill_(~visible, value)


def exp(x: Tensor) -> Tensor:
    """The exponential through base 2: on CPUs it takes half the time, and no longer for HIDDEN."""
    return (x * math.log2(math.e)).exp2_()
