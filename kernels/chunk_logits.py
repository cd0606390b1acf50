"""The logits of one chunk of query rows, which forward, backward and column mass share."""

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
    visible: Tensor  # (b, 1, c, n)
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
        visible = self.layout.visible(chunk.rows, positions).unsqueeze(1)
        values.masked_fill_(~visible, HIDDEN)
        return Logits(values, visible, raw, squashed, distance)
