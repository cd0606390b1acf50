"""Exact attention in chunks of query rows: forward, backward and column mass in O(T*D) memory.

The logits of a chunk are made, used and dropped. The forward keeps, per row, only the peak and a
few sums of exp(logit - peak); the backward makes the weights of a chunk again from the saved
lse. With weights p, and upstream gradients dO of the output, gL of lse and gH of the entropy H,

    ds_ij = p_ij (dp_ij - delta_i - gH_i log p_ij),    dp_ij = dO_i . v_j
    delta_i = sum_j p_ij dp_ij - gL_i + gH_i H_i

is the gradient of a logit; the gradients of all inputs follow from it by the chain rule. (The
sum equals dO_i . o_i, but o_i may have been rounded to half precision.)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.chunk_logits import Call, Logits, exp, hide
from kernels.chunks import Chunk, chunks
from kernels.spec import AttentionOutput, AttentionSpec, Stats

# The peak of a row that sees nothing: far above the logit of a hidden key, so that every weight
# of such a row is exp(very negative) = 0, as a hidden key's weight is in any other row.
FLOOR = -1e29


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kv_lengths: Tensor | None, stats: Stats
) -> AttentionOutput:
    """Attention and its statistics, lse always among them; see `kernels.attention`."""
    call = Call(q, k, spec, kv_lengths)
    values = call.per_kv_head(v)
    rows = _empty_rows(call, v.shape[3], stats)
    for chunk in chunks(spec, q, k, kv_lengths):
        logits = call.logits(chunk, call.scaled_queries(chunk.rows), chunk.take(call.keys))
        _sum_chunk(rows, call, chunk, logits, chunk.take(values), stats)
    return _finish(rows, q.dtype, spec.sink_logit, stats)


class Gradients(NamedTuple):
    """Gradients of the inputs; None for a vector that has or needs none."""

    q: Tensor
    k: Tensor
    v: Tensor
    alibi_slopes: Tensor | None
    sink_logit: Tensor | None
    received: Tensor | None  # the column mass, (B, H, S), in the place of a gradient


class Upstream(NamedTuple):
    """Gradients of what `forward` returned; None where nothing flows back."""

    out: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    kv_lengths: Tensor | None,
    lse: Tensor,
    entropy: Tensor | None,
    upstream: Upstream,
    *,
    slope_gradient: bool,
    received: bool,
) -> Gradients:
    """Gradients of the inputs from those of out, lse and entropy, and the last two's values.

    Slopes are usually fixed, and their gradient costs one more pass: it is made on request. So
    is the column mass, which costs a sum of the weights.
    """
    call = Call(q, k, spec, kv_lengths)
    values = call.per_kv_head(v)
    lse, d_out, delta, d_entropy = _row_terms(lse, entropy, upstream, v.shape[3])
    d_q = _rows_first(call, q.shape[3])
    d_keys, d_values = torch.zeros_like(call.keys), torch.zeros_like(values)
    slopes = spec.alibi_slopes if slope_gradient else None
    d_slopes = None if slopes is None else torch.zeros_like(slopes, dtype=call.dtype)
    mass = _no_mass(call) if received else None

    for chunk in chunks(spec, q, k, kv_lengths):
        at = chunk.rows
        queries, keys = call.scaled_queries(at), chunk.take(call.keys)
        logits = call.logits(chunk, queries, keys)
        log_weights = logits.values.sub_(lse[:, :, at, None])
        weights = exp(log_weights)  # (B, H, c, n)
        if mass is not None:
            chunk.add_to(mass, weights.sum(dim=2).flatten(0, 1))
        d_out_rows = call.stack(d_out[:, :, at])
        chunk.add_to(d_values, torch.bmm(call.stack(weights).transpose(1, 2), d_out_rows))

        d_weights = call.unstack(torch.bmm(d_out_rows, chunk.take(values).transpose(1, 2)))
        d_logits = d_weights.mul_(weights)
        delta[:, :, at] += d_logits.sum(dim=-1)
        d_logits.addcmul_(weights, delta[:, :, at, None], value=-1)
        if d_entropy is not None:
            d_logits.sub_(log_weights.mul_(weights).mul_(d_entropy[:, :, at, None]))
        if d_slopes is not None and logits.distance is not None:
            d_slopes -= (d_logits * logits.distance).sum(dim=(0, 2, 3))
        if logits.squashed is not None:
            d_logits.mul_(1 - logits.squashed.square())

        d_raw = call.stack(d_logits)
        d_q[:, :, at] = call.unstack(torch.bmm(d_raw, keys))
        chunk.add_to(d_keys, torch.bmm(d_raw.transpose(1, 2), queries))

    return Gradients(
        q=d_q.mul_(call.scale).to(q.dtype),
        k=d_keys.view(k.shape).to(k.dtype),
        v=d_values.view(v.shape).to(v.dtype),
        alibi_slopes=None if d_slopes is None or slopes is None else d_slopes.to(slopes.dtype),
        sink_logit=_sink_logit_gradient(spec.sink_logit, lse, delta, d_entropy),
        received=None if mass is None else mass.view(*q.shape[:2], -1),
    )


def column_mass(
    q: Tensor, k: Tensor, lse: Tensor, spec: AttentionSpec, kv_lengths: Tensor | None
) -> Tensor:
    """Sum the weights of each key over all queries: (B, H, S); see `kernels.attention`."""
    call = Call(q, k, spec, kv_lengths)
    lse = _finite(lse.to(call.dtype))
    mass = _no_mass(call)
    for chunk in chunks(spec, q, k, kv_lengths):
        logits = call.logits(chunk, call.scaled_queries(chunk.rows), chunk.take(call.keys))
        weights = exp(logits.values.sub_(lse[:, :, chunk.rows, None]))
        chunk.add_to(mass, weights.sum(dim=2).flatten(0, 1))
    return mass.view(*q.shape[:2], -1)


def _no_mass(call: Call) -> Tensor:
    """Column mass before the first chunk: (B * H, S) zeros."""
    return call.keys.new_zeros(call.q.shape[0] * call.q.shape[1], call.keys.shape[1])


@dataclass(eq=False)
class _Rows:
    """What the forward gathers for each query row; sums are of w = exp(logit - peak)."""

    out: Tensor  # (B, H, T, Dv), sum of w v
    peak: Tensor  # (B, H, T) here and below
    total: Tensor  # sum of w
    spread: Tensor | None  # sum of w (logit - peak)
    max_logit: Tensor | None
    mean_distance: Tensor | None
    sink_mass: Tensor | None  # (B, H, T, len(k)), sum of w over the first k keys


def _empty_rows(call: Call, value_size: int, stats: Stats) -> _Rows:
    def rows(*sizes: int) -> Tensor:
        return call.q.new_empty(*call.q.shape[:3], *sizes, dtype=call.dtype)

    return _Rows(
        out=_rows_first(call, value_size),
        peak=rows(),
        total=rows(),
        spread=rows() if stats.entropy or stats.entropy_tokens else None,
        max_logit=rows() if stats.max_logit else None,
        mean_distance=rows() if stats.mean_distance else None,
        sink_mass=rows(len(stats.sink_mass)) if stats.sink_mass else None,
    )


def _rows_first(call: Call, size: int) -> Tensor:
    """An empty (B, H, T, size) that lies in memory as (B, T, H, size), as projections want it."""
    batch, heads, n_rows, _ = call.q.shape
    return call.q.new_empty(batch, n_rows, heads, size, dtype=call.dtype).transpose(1, 2)


def _sum_chunk(
    rows: _Rows, call: Call, chunk: Chunk, logits: Logits, values: Tensor, stats: Stats
) -> None:
    """Gather the sums of one chunk of rows; its logits are used up."""
    at = chunk.rows
    shifted = logits.values
    peak = shifted.amax(dim=-1).clamp_(min=FLOOR)  # (B, H, c)
    weights = exp(shifted.sub_(peak.unsqueeze(-1)))  # (B, H, c, n), not yet divided by total
    total = weights.sum(dim=-1)
    rows.peak[:, :, at] = peak
    rows.total[:, :, at] = total
    if values.shape[2]:
        rows.out[:, :, at] = call.unstack(torch.bmm(call.stack(weights), values))
    if rows.max_logit is not None:
        if logits.raw is not None:
            hide(logits.raw, logits.visible, -torch.inf)
            peak = logits.raw.amax(dim=-1)
        rows.max_logit[:, :, at] = peak.masked_fill(total == 0, -torch.inf)
    if rows.mean_distance is not None:
        rows.mean_distance[:, :, at] = _mean_distance(call, chunk, weights, total)
    if rows.sink_mass is not None:
        rows.sink_mass[:, :, at] = _first_keys_mass(call, chunk, weights, stats.sink_mass)
    if rows.spread is not None:
        rows.spread[:, :, at] = shifted.mul_(weights).sum(dim=-1)


def _mean_distance(call: Call, chunk: Chunk, weights: Tensor, total: Tensor) -> Tensor:
    """Mean of i - j under the weights, (B, H, c), counted from the chunk to keep numbers small."""
    origin = chunk.keys.stop
    from_origin = (chunk.key_positions(weights.device) - origin).to(weights.dtype)
    row = (call.layout.positions[:, None, chunk.rows] - origin).to(weights.dtype)
    distance = row - (weights @ from_origin) / total
    return distance.masked_fill(total == 0, 0.0)


def _first_keys_mass(call: Call, chunk: Chunk, weights: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Sum of the weights on the first keys of the row's document: (B, H, c, len(counts))."""
    if call.spec.documents is None and chunk.keys.start == 0:
        first = weights  # whose first columns they are
    else:
        age = torch.arange(max(counts), device=weights.device)
        first_keys = call.layout.starts[:, chunk.rows, None] + age  # (b, c, k)
        columns, visited = chunk.columns(first_keys)
        columns = columns.unsqueeze(1).expand(*weights.shape[:3], -1)
        first = weights.gather(-1, columns) * visited.unsqueeze(1)
    return torch.stack([first[..., :n].sum(dim=-1) for n in counts], dim=-1)


def _finish(
    rows: _Rows, dtype: torch.dtype, sink_logit: Tensor | None, stats: Stats
) -> AttentionOutput:
    """Let "attend to nothing" join the softmax, and turn sums into outputs and statistics."""
    total, peak, spread = rows.total, rows.peak, rows.spread
    sees_nothing = total == 0
    chosen: dict[str, Tensor] = {}
    if stats.entropy_tokens:
        assert spread is not None
        chosen["entropy_tokens"] = _entropy(total, spread).masked_fill(sees_nothing, 0.0)

    real = torch.ones_like(total)  # exp(old peak - new peak): what the join scales real sums by
    null = torch.zeros_like(total)  # exp(sink logit - new peak)
    if sink_logit is not None:
        z = sink_logit.to(total.dtype)[:, None]  # (H, 1)
        joint = torch.maximum(peak, z)
        real, null = (peak - joint).exp(), (z - joint).exp()
        if spread is not None:
            moved = real * (spread + total * (peak - joint))
            spread = moved + torch.where(null > 0, null * (z - joint), 0.0)
        total, peak = real * total + null, joint

    empty = total == 0
    share = (real / total).masked_fill(sees_nothing, 0.0)  # the weight of the largest real key
    chosen["lse"] = peak + total.log()
    if stats.entropy:
        assert spread is not None
        chosen["entropy"] = _entropy(total, spread).masked_fill(empty, 0.0)
    if stats.max_prob:
        chosen["max_prob"] = share
    if stats.null_mass:
        chosen["null_mass"] = (null / total).masked_fill(empty, 0.0)
    if rows.max_logit is not None:
        chosen["max_logit"] = rows.max_logit
    if rows.mean_distance is not None:
        chosen["mean_distance"] = rows.mean_distance
    if rows.sink_mass is not None:
        chosen["sink_mass"] = rows.sink_mass * share.unsqueeze(-1)
    out = rows.out.mul_(share.unsqueeze(-1)).to(dtype)
    return AttentionOutput(out=out, **chosen)


def _entropy(total: Tensor, spread: Tensor) -> Tensor:
    """Entropy in nats from the two sums: both terms are at least 0, so nothing cancels."""
    return total.log() - spread / total


def _finite(lse: Tensor) -> Tensor:
    """0 in place of the -inf of a row that sees nothing: exp(HIDDEN - 0) is 0 all the same."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _row_terms(
    lse: Tensor, entropy: Tensor | None, upstream: Upstream, value_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Finite lse, gradient of out, delta but for its sum over keys, and gradient of entropy.

    The last two are 0 on rows that see nothing, where what flows back may be infinite.
    """
    nothing = lse == -torch.inf
    d_out = upstream.out
    if d_out is None:
        d_out = lse.new_zeros(*lse.shape, value_size)
    delta = torch.zeros_like(lse)
    if upstream.lse is not None:
        delta -= upstream.lse
    d_entropy = upstream.entropy
    if d_entropy is not None:
        assert entropy is not None
        delta += d_entropy * entropy
        d_entropy = d_entropy.masked_fill(nothing, 0.0)
    return _finite(lse), d_out, delta.masked_fill(nothing, 0.0), d_entropy


def _sink_logit_gradient(
    sink_logit: Tensor | None, lse: Tensor, delta: Tensor, d_entropy: Tensor | None
) -> Tensor | None:
    """The gradient of a logit, for an entry whose value is zero; summed over batch and rows."""
    if sink_logit is None:
        return None
    log_null = sink_logit.to(lse.dtype)[:, None] - lse  # (B, H, T)
    d_logit = -delta
    if d_entropy is not None:
        d_logit = d_logit - d_entropy * log_null
    return (log_null.exp() * d_logit).sum(dim=(0, 2)).to(sink_logit.dtype)
