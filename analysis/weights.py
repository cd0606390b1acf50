"""Attention weights made again from a layer's queries, keys and lse: only those asked for.

    s_ij = cap(scale · q_i·k_j) − slope · |i − j|,    p_ij = exp(s_ij − lse_i)

No (T, T) matrix is made: one key per row costs O(T·D), and R rows cost O(R·T). All of it is
computed in at least float32 from queries and keys as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.spec import AttentionSpec, softmax_dtype
from kernels.visibility import Layout, make_layout

if TYPE_CHECKING:
    from analysis.inside import LayerView

ALL_ROWS = slice(None)


def pair_weights(view: LayerView, targets: Tensor) -> Tensor:
    """The weight that every row gives to one key of its own: (B, H, T).

    targets: (B, T) int64 key positions. A key outside the sequence, or one that the row cannot
    see, has weight 0. With a sink logit the weights are those of the full softmax.
    """
    q, k = view.q, view.k
    B, H, T, D = q.shape
    dtype = softmax_dtype(q.dtype)
    at = targets.clamp(0, T - 1)
    index = at[:, None, :, None].expand(-1, k.shape[1], -1, D)
    keys = k.gather(2, index).to(dtype).unsqueeze(2)  # (B, Hkv, 1, T, D)
    queries = q.to(dtype).view(B, k.shape[1], -1, T, D)
    products = (queries * keys).sum(-1).view(B, H, T)
    layout = layout_of(view)
    distance = layout.distance(ALL_ROWS, at.unsqueeze(2)).squeeze(2)
    logits = _logits(view.spec, products * view.spec.scale_for(D), distance)
    logits = logits.masked_fill(~pair_visible(view, targets).unsqueeze(1), -torch.inf)
    return (logits - _lse(view)).exp()


def pair_visible(view: LayerView, targets: Tensor) -> Tensor:
    """Whether every row sees the key of its own in `targets` (B, T): (B, T) bool."""
    T = view.q.shape[2]
    exists = (targets >= 0) & (targets < T)
    keys = targets.clamp(0, T - 1).unsqueeze(2)
    return exists & layout_of(view).visible(ALL_ROWS, keys).squeeze(2)


def row_logits(view: LayerView, rows: Tensor) -> Tensor:
    """Final logits of chosen rows over all keys: (B, H, R, T), -inf where invisible.

    rows: (B, R) int64 row numbers of each sequence.
    """
    q, k = view.q, view.k
    B, H, T, D = q.shape
    dtype = softmax_dtype(q.dtype)
    queries = q.gather(2, rows[:, None, :, None].expand(-1, H, -1, D)).to(dtype)
    stacked = queries.reshape(B, k.shape[1], -1, D)  # the heads of a group share their keys
    products = (stacked @ k.to(dtype).transpose(2, 3)).view(B, H, -1, T)
    layout, keys = layout_of(view), torch.arange(T, device=q.device)
    logits = _logits(view.spec, products * view.spec.scale_for(D), layout.distance(rows, keys))
    return logits.masked_fill(~layout.visible(rows, keys).unsqueeze(1), -torch.inf)


def row_weights(view: LayerView, rows: Tensor) -> Tensor:
    """Weights of chosen rows (B, R) over all keys: (B, H, R, T), those of the full softmax."""
    lse = _lse(view).gather(2, rows.unsqueeze(1).expand(-1, view.q.shape[1], -1))
    return (row_logits(view, rows) - lse.unsqueeze(3)).exp()


def layout_of(view: LayerView) -> Layout:
    """Positions of a view's rows and who sees whom."""
    T = view.q.shape[2]
    return make_layout(view.spec, T, T, None, view.q.device)


def _lse(view: LayerView) -> Tensor:
    if view.result.lse is None:
        raise ValueError("these statistics have no lse, which weights are made from")
    return view.result.lse


def _logits(spec: AttentionSpec, raw: Tensor, distance: Tensor) -> Tensor:
    """Final logits (B, H, ...) from scaled products and i - j, (b, ...)."""
    if spec.softcap is not None:
        raw = spec.softcap * torch.tanh(raw / spec.softcap)
    if spec.alibi_slopes is not None:
        slopes = spec.alibi_slopes.to(raw.dtype).view(-1, *[1] * (raw.ndim - 2))
        raw = raw - slopes * distance.abs().unsqueeze(1)
    return raw
