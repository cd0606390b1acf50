"""Attention written down as it is defined: the whole matrix, one line per formula.

This is the meaning every other backend is tested against. It needs O(T*S) memory, works in any
float type up to float64 and leaves all gradients to autograd.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.spec import AttentionOutput, AttentionSpec, Stats, softmax_dtype
from kernels.visibility import Layout, make_layout

ALL_ROWS = slice(None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    kv_lengths: Tensor | None,
    stats: Stats | None,
    received: Tensor | None,
) -> AttentionOutput:
    """Compute attention and its statistics from the full matrix; see `kernels.attention`."""
    stats = stats or Stats()
    layout = make_layout(spec, q.shape[2], k.shape[2], kv_lengths, q.device)
    raw, logits, visible = _logits(q, k, spec, layout)  # (B, H, T, S)
    if received is not None:
        logits = _Receive.apply(logits, spec.sink_logit, received)
    log_real = _log_softmax(logits)  # over the keys alone
    with_null = _append_null(logits, spec.sink_logit)  # (B, H, T, S or S + 1)
    log_all = _log_softmax(with_null)
    weights = log_all[..., : k.shape[2]].exp()
    out = (weights @ _per_query_head(v, q).to(weights.dtype)).to(q.dtype)

    chosen: dict[str, Tensor] = {}
    if stats.lse:
        chosen["lse"] = _log_sum_exp(with_null)
    if stats.entropy:
        chosen["entropy"] = _entropy(log_all)
    if stats.entropy_tokens:
        chosen["entropy_tokens"] = _entropy(log_real).detach()
    if stats.max_logit:
        chosen["max_logit"] = raw.masked_fill(~visible, -torch.inf).amax(-1).detach()
    if stats.max_prob:
        chosen["max_prob"] = weights.amax(-1).detach()
    if stats.null_mass:
        chosen["null_mass"] = log_all[..., k.shape[2] :].exp().sum(-1).detach()
    if stats.mean_distance:
        distance = layout.distance(ALL_ROWS, _keys(k)).unsqueeze(1)  # (b, 1, T, S)
        chosen["mean_distance"] = (log_real.exp() * distance).sum(-1).detach()
    if stats.sink_mass:
        age = (_keys(k) - layout.starts[:, None, :, None]).expand_as(weights)  # j - start
        masses = [(weights * (age < n)).sum(-1) for n in stats.sink_mass]
        chosen["sink_mass"] = torch.stack(masses, dim=-1).detach()
    return AttentionOutput(out=out, **chosen)


class _Receive(torch.autograd.Function):
    """The logits unchanged; when a gradient comes back, their column mass goes to `received`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, sink_logit: Tensor | None, received: Tensor) -> Tensor:
        weights = _log_softmax(_append_null(logits, sink_logit))[..., : logits.shape[-1]].exp()
        ctx.save_for_backward(weights.sum(dim=2))
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor, None, Tensor]:
        return d_logits, None, *ctx.saved_tensors


def column_mass(
    q: Tensor, k: Tensor, lse: Tensor, spec: AttentionSpec, kv_lengths: Tensor | None
) -> Tensor:
    """Sum the weights of each key over all queries: (B, H, S); see `kernels.attention`."""
    layout = make_layout(spec, q.shape[2], k.shape[2], kv_lengths, q.device)
    _, logits, _ = _logits(q, k, spec, layout)
    lse = lse.to(logits.dtype).masked_fill(lse == -torch.inf, torch.inf)  # no key: no weight
    return (logits - lse.unsqueeze(-1)).exp().sum(dim=2)


def _logits(
    q: Tensor, k: Tensor, spec: AttentionSpec, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Raw logits, final logits (-inf where invisible) and mask: (B, H, T, S), mask (b, 1, T, S)."""
    dtype = softmax_dtype(q.dtype)
    keys = _per_query_head(k, q).to(dtype)
    raw = spec.scale_for(q.shape[3]) * (q.to(dtype) @ keys.transpose(-1, -2))  # (B, H, T, S)
    return raw, *adjusted_logits(raw, spec, layout)


def adjusted_logits(raw: Tensor, spec: AttentionSpec, layout: Layout) -> tuple[Tensor, Tensor]:
    """Final logits, -inf where invisible, (B, H, T, S), from raw ones; and mask (b, 1, T, S)."""
    logits = raw
    keys = torch.arange(raw.shape[3], device=raw.device)
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    if spec.alibi_slopes is not None:
        distance = layout.distance(ALL_ROWS, keys).unsqueeze(1).abs()  # (b, 1, T, S)
        logits = logits - spec.alibi_slopes.to(raw.dtype)[:, None, None] * distance
    visible = layout.visible(ALL_ROWS, keys).unsqueeze(1)  # (b, 1, T, S)
    return logits.masked_fill(~visible, -torch.inf), visible


def _keys(k: Tensor) -> Tensor:
    """Positions of all keys: (S,)."""
    return torch.arange(k.shape[2], device=k.device)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat key/value heads so that query head h finds its own: (B, Hkv, S, D) -> (B, H, S, D)."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _append_null(logits: Tensor, sink_logit: Tensor | None) -> Tensor:
    """Add the "attend to nothing" entry as a last column, if there is one."""
    if sink_logit is None:
        return logits
    null = sink_logit.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
    return torch.cat([logits, null], dim=-1)


def _without_empty_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros in place of rows of -inf, whose softmax would be NaN; and which rows those are."""
    empty = (logits == -torch.inf).all(dim=-1, keepdim=True)
    return logits.masked_fill(empty, 0.0), empty


def _log_softmax(logits: Tensor) -> Tensor:
    """Log of the weights along the last axis; a row of -inf stays a row of -inf."""
    filled, empty = _without_empty_rows(logits)
    return torch.log_softmax(filled, dim=-1).masked_fill(empty, -torch.inf)


def _log_sum_exp(logits: Tensor) -> Tensor:
    """Log of the softmax denominator along the last axis; -inf for a row of -inf."""
    filled, empty = _without_empty_rows(logits)
    return torch.logsumexp(filled, dim=-1).masked_fill(empty.squeeze(-1), -torch.inf)


def _entropy(log_weights: Tensor) -> Tensor:
    """-sum p log p in nats, with 0 log 0 = 0 also in the gradient."""
    weights = log_weights.exp()
    return -(weights * log_weights.masked_fill(weights == 0, 0.0)).sum(dim=-1)
