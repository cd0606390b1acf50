"""What kind of head is this? Measures of one layer from a `LayerView`, each with its definition.

    output, views = inside(model, tokens)
    layout = row_layout(model.config, 2, targets, documents=None)
    weight_on(views[2], previous_token(layout)).value()  # of every head of layer 2, (H,)

Measures come as a `Mean`: a sum and a count, so that parts of a batch can be added up before
dividing. Values are of query heads (H,), key/value heads (Hkv,) or the layer (); everything is
computed in at least float32, summed in float64, and in O(T·D) memory.

The first token of a document takes the role of position 0, and `age` is the position inside the
document. Rows that are padding (`layout.keep` is False) are left out everywhere. Weights have the
full denominator: what goes to a sink logit is missing from them.

B sequences, T tokens, H query heads, Hkv key/value heads, D channels per head, C = n_embd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.inside import LayerView
from analysis.row_stats import RowLayout
from analysis.weights import pair_visible, pair_weights, row_logits
from kernels.spec import softmax_dtype
from model.attention import Attention
from model.blocks import Block

SINK = 0.3  # Gu et al. 2024: a head with a larger alpha_0 has a sink
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0  # Sun et al. 2024, section 2


@dataclass(frozen=True, eq=False)
class Mean:
    """A mean under way: what was summed, and by what the sum will be divided.

    total: (...) float64. count: () float64.
    """

    total: Tensor
    count: Tensor

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> Tensor | None:
        """The mean, or None where nothing was counted."""
        return self.total / self.count if self.count else None


# --- Where a head looks ---------------------------------------------------------------------------


class Look(NamedTuple):
    """Where a kind of head looks: `targets` (B, T) key positions, `rows` (B, T) that count."""

    targets: Tensor
    rows: Tensor


def first_token(layout: RowLayout, length: int) -> Look:
    """The document's first token, from its first `length` tokens (itself included): alpha_0.

    Gu et al. 2024 (arXiv:2410.10781), section 3.2.
    """
    return Look(_positions(layout) - layout.age, layout.keep & (layout.age < length))


def previous_token(layout: RowLayout) -> Look:
    """The token before."""
    return Look(_positions(layout) - 1, layout.keep & (layout.age >= 1))


def duplicate_token(layout: RowLayout, period: int) -> Look:
    """In [BOS] r r, with r of `period` tokens: the same token in the first copy."""
    return Look(_positions(layout) - period, layout.keep & (layout.age > period))


def induction(layout: RowLayout, period: int) -> Look:
    """In [BOS] r r: the token that followed the same token in the first copy.

    This is Olsson et al. 2022's (arXiv:2209.11895) prefix matching score for one repetition.
    """
    return Look(_positions(layout) - period + 1, layout.keep & (layout.age > period))


def weight_on(view: LayerView, look: Look) -> Mean:
    """The weight that rows give to where they are said to look: (H,)."""
    return _mean_over_rows(pair_weights(view, look.targets), look.rows)


def uniform_weight_on(view: LayerView, layout: RowLayout, look: Look) -> Mean:
    """The same of a head whose logits are all equal (there, nothing goes to a sink logit): ()."""
    counted = pair_visible(view, look.targets) & look.rows
    return Mean((_double(counted) / _double(layout.visible)).sum(), _double(look.rows).sum())


# --- Sinks ----------------------------------------------------------------------------------------


def sink_rate(view: LayerView, layout: RowLayout, length: int) -> Mean:
    """How many sequences have alpha_0, their mean weight on the first token, above 0.3: (H,).

    A sequence is a document whose first `length` tokens are all there: the measure falls as the
    length grows, so shorter ones would not compare (Gu et al. 2024, section 3.2).
    """
    look = first_token(layout, length)
    weights = pair_weights(view, look.targets).masked_fill(~look.rows.unsqueeze(1), 0)
    alpha = _sum_by_document(weights, look.targets) / length  # (B, H, T), on first tokens
    rows = _sum_by_document(look.rows.unsqueeze(1), look.targets).squeeze(1)
    return _mean_over_rows(alpha > SINK, rows == length)


def sink_vnorm(view: LayerView, layout: RowLayout) -> Mean:
    """‖v_0‖ / mean of ‖v_j‖ over j >= 1, of each document: (Hkv,). Below 1 with a sink.

    Gu et al. 2024, figure 2; Guo et al. 2024 (arXiv:2410.13835), "value-state drains".
    """
    return _first_over_rest(_wide(view.v).norm(dim=-1), layout)


def sink_knorm(view: LayerView, layout: RowLayout) -> Mean:
    """The same of keys: (Hkv,). RoPE keeps norms."""
    return _first_over_rest(_wide(view.k).norm(dim=-1), layout)


def sink_hnorm(view: LayerView, layout: RowLayout) -> Mean:
    """The same of what leaves the block: (). Far above 1 with a sink (Gu et al. 2024, figure 7)."""
    mean = _first_over_rest(_wide(view.stream_out).norm(dim=-1).unsqueeze(1), layout)
    return Mean(mean.total.squeeze(0), mean.count)


def sink_cos(view: LayerView, layout: RowLayout) -> Mean:
    """cos(q_i, k_0) minus the mean of cos(q_i, k_j) over 1 <= j <= i, for rows of age >= 1: (H,).

    Keys are all those of the document up to the row, seen or not. Gu et al. 2024, figure 2: the
    angle, not the norm, draws the weight to the sink.
    """
    keys = _double(F.normalize(_wide(view.k), dim=-1))  # (B, Hkv, T, D)
    age, first = layout.age.to(keys.device), (_positions(layout) - layout.age).to(keys.device)
    at_first = first[:, None, :, None].expand_as(keys)
    summed = (keys * (age >= 1)[:, None, :, None]).cumsum(2)
    others = summed - summed.gather(2, at_first)  # over the document's keys 1 .. i
    contrast = keys.gather(2, at_first) - others / age.clamp(min=1)[:, None, :, None]
    queries = F.normalize(_wide(view.q), dim=-1)
    group = queries.shape[1] // keys.shape[1]
    contrast = contrast.to(queries).repeat_interleave(group, dim=1)
    return _mean_over_rows((queries * contrast).sum(-1), layout.keep & (layout.age >= 1))


def sink_write(view: LayerView, attn: Attention, layout: RowLayout, rows: Tensor) -> Mean:
    """‖p_i0 v_0 W_O‖ / sum over j of p_ij ‖v_j W_O‖ on sampled rows (B, R) of age >= 1: (H,).

    Low although p_i0 is high where a sink is "attend to nothing" (Kobayashi et al. 2020,
    arXiv:2004.10102). An output gate is left out: it depends on the reading token.
    """
    age = layout.age.gather(1, rows)
    sizes = _written_norm(view.v, attn)  # (B, H, T)
    written = row_logits(view, rows).softmax(-1) * sizes.unsqueeze(2)  # (B, H, R, T)
    first = (rows - age)[:, None, :, None].expand(-1, written.shape[1], -1, 1)
    share = written.gather(3, first).squeeze(3) / written.sum(-1).clamp(min=1e-30)
    return _mean_over_rows(share, layout.keep.gather(1, rows) & (age >= 1))


# --- Sizes ----------------------------------------------------------------------------------------


def logit_std(view: LayerView, layout: RowLayout, rows: Tensor) -> Mean:
    """Standard deviation of a row's visible logits, after soft-cap and bias: (H,).

    Over sampled rows (B, R) of age >= 8; every visible key counts the same.
    """
    logits = row_logits(view, rows)
    visible = logits > -torch.inf
    n = visible.sum(-1).clamp(min=1)
    logits = logits.masked_fill(~visible, 0)
    centred = (logits - (logits.sum(-1) / n).unsqueeze(-1)).masked_fill(~visible, 0)
    std = (centred.square().sum(-1) / n).sqrt()
    return _mean_over_rows(std, layout.keep.gather(1, rows) & (layout.age.gather(1, rows) >= 8))


def write(view: LayerView, attn: Attention, layout: RowLayout) -> Mean:
    """What a head adds to the stream: mean of ‖o_h W_O^h‖ / mean of ‖stream entering‖: (H,).

    Both means are over the same rows; o_h is gated if there is a gate, and the output bias, which
    belongs to no head, is left out.
    """
    wrote = _mean_over_rows(_written_norm(view.heads, attn), layout.keep)
    stream = _mean_over_rows(_wide(view.stream_in).norm(dim=-1).unsqueeze(1), layout.keep)
    return Mean(wrote.total, stream.total.squeeze(0))


def massive(view: LayerView, layout: RowLayout) -> dict[str, Mean]:
    """Massive activations in what leaves the block, of each sequence, averaged: () each.

    massive_count: entries with |x| > 100 and |x| >= 1000 · median |x| of the sequence.
    massive_max: the largest |x|. massive_max_over_median: the same / median |x|.
    Sun et al. 2024 (arXiv:2402.17762), section 2.
    """
    found = []
    for stream, keep in zip(view.stream_out, layout.keep, strict=True):
        if keep.any():
            kept = stream if keep.all() else stream[keep]
            sizes = _wide(kept).abs().flatten()
            middle, top = _median(sizes), sizes.max()
            count = ((sizes > MASSIVE) & (sizes >= MASSIVE_RATIO * middle)).sum()
            found.append(torch.stack([count.to(top), top, top / middle]))
    totals = _double(torch.stack(found) if found else view.stream_out.new_zeros(1, 3)).sum(0)
    names = ("massive_count", "massive_max", "massive_max_over_median")
    count = torch.tensor(float(len(found)), dtype=totals.dtype, device=totals.device)
    return {name: Mean(total, count) for name, total in zip(names, totals, strict=True)}


def qk_norm(block: Block) -> Tensor:
    """c ‖W_Q W_K^T‖ (Frobenius) of each head, the preceding norm's gain folded in: (H,) float64.

    It is the size of the bilinear form behind a score (at offset 0 with RoPE): growth means a
    colder softmax. From factors of D × D: ‖W_Q W_K^T‖² = trace((W_Q^T W_Q)(W_K^T W_K)).

    With QK-norm the length of weights has no effect on scores, and what is left of the form is its
    gains: c ‖diag(g_q) diag(g_k)‖, which is 1 while they are, the same for all heads of a layer.
    """
    attn = block.attn
    config = attn.config
    scale = config.head_size**-0.5
    if attn.q_norm is not None and attn.k_norm is not None:
        gains = _double(attn.q_norm.weight) * _double(attn.k_norm.weight)
        return (scale * gains.norm()).expand(config.n_head)
    gain = _double(block.attn_norm.get_parameter("weight")).unsqueeze(1)
    norms = []
    for head in range(config.n_head):
        query = gain * _double(attn.query_weight(head))  # (C, D)
        key = gain * _double(attn.key_weight(head))
        norms.append(((query.T @ query) * (key.T @ key)).sum().clamp(min=0).sqrt())
    return scale * torch.stack(norms)


# --- What the losses say --------------------------------------------------------------------------


def mean_loss(losses: Tensor, counted: Tensor) -> Mean:
    """Mean of the losses (B, T) that count: ()."""
    return Mean(_double(losses.masked_fill(~counted, 0)).sum(), _double(counted).sum())


def loss_at(losses: Tensor, counted: Tensor, age: Tensor, token: int) -> Mean:
    """Mean loss of predicting token `token` (from 0) of a document: (). Arguments are (B, T).

    It is predicted by the row of age token - 1. The in-context learning score is the loss at token
    500 minus the loss at token 50 (Olsson et al. 2022; see `icl_tokens` for shorter contexts).
    """
    return mean_loss(losses, counted & (age == token - 1))


def icl_tokens(length: int) -> tuple[int, int]:
    """The late and the early token of the in-context learning score: 500 and 50.

    In sequences of fewer than 500 tokens they are at 0.98 and 0.1 of the length.
    """
    return (500, 50) if length >= 500 else (int(0.98 * length), int(0.1 * length))


def copy_losses(losses: Tensor, counted: Tensor, period: int) -> tuple[Mean, Mean]:
    """In [BOS] r r: mean loss of predicting the first and the second copy of r, () each.

    losses, counted: (B, 2 · period) or more; row t predicts token t + 1. The repeat gain is the
    first minus the second: 0 for a model that cannot look back.
    """
    return (
        mean_loss(losses[:, :period], counted[:, :period]),
        mean_loss(losses[:, period : 2 * period], counted[:, period : 2 * period]),
    )


# --- Sums -----------------------------------------------------------------------------------------


def _mean_over_rows(values: Tensor, rows: Tensor) -> Mean:
    """Mean of (B, N, R) over the rows (B, R) that count: (N,)."""
    kept = values.masked_fill(~rows.unsqueeze(1), 0)
    return Mean(_double(kept).sum((0, 2)), _double(rows).sum())


def _sum_by_document(x: Tensor, first: Tensor) -> Tensor:
    """Sums of (B, N, T) over each document, placed on its first token; 0 on all others."""
    wide = _double(x)
    index = first.to(wide.device).unsqueeze(1).expand_as(wide)
    return torch.zeros_like(wide).scatter_add_(2, index, wide)


def _first_over_rest(sizes: Tensor, layout: RowLayout) -> Mean:
    """Size of the first token / mean size of the others, (B, N, T), averaged over documents."""
    first = _positions(layout) - layout.age
    others = layout.keep & (layout.age >= 1)
    total = _sum_by_document(sizes.masked_fill(~others.unsqueeze(1), 0), first)
    count = _sum_by_document(others.unsqueeze(1), first)  # (B, 1, T)
    return _mean_over_rows(_double(sizes) * count / total.clamp(min=1e-30), count.squeeze(1) > 0)


def _written_norm(x: Tensor, attn: Attention) -> Tensor:
    """‖x W_O^h‖ for what heads have to write, (B, Hkv or H, T, D): (B, H, T).

    ‖x W‖² = x (W W^T) x^T needs D × D per head where x W would need C channels per token.
    """
    B, N, T, D = x.shape
    weight = _double(attn.o_proj.weight).T.unflatten(0, (-1, D))  # (H, D, C)
    gram = (weight @ weight.transpose(1, 2)).unflatten(0, (N, -1))  # (N, H / N, D, D)
    x = _wide(x).unsqueeze(2)  # (B, N, 1, T, D)
    squares = ((x @ gram.to(x)) * x).sum(-1)
    return squares.clamp(min=0).sqrt().view(B, -1, T)


def _median(x: Tensor) -> Tensor:
    """Median of (n,), the mean of the two middle ones where n is even."""
    n = len(x)
    lower = x.kthvalue((n + 1) // 2).values
    if n % 2 or (x <= lower).sum() > n // 2:
        return lower
    return (lower + x.masked_fill(x <= lower, torch.inf).min()) / 2


def _positions(layout: RowLayout) -> Tensor:
    return torch.arange(layout.age.shape[1], device=layout.age.device).expand_as(layout.age)


def _wide(x: Tensor) -> Tensor:
    return x.to(softmax_dtype(x.dtype))


def _double(x: Tensor) -> Tensor:
    """In float64, on the CPU where the device has none."""
    return (x.cpu() if x.device.type == "mps" else x).double()
