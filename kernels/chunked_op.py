"""Chunked attention as one operation of PyTorch, with its own backward.

As an operation it is a single node to `torch.compile`, whatever Python it runs inside. Its
backward is an operation too, without a backward of its own, so double backward raises.

The arguments of an operation are tensors and plain values, so a spec travels in parts: first its
tensors, then its numbers. Results are always tensors: an empty one stands for each absent one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import chunked
from kernels.spec import AttentionOutput, AttentionSpec, Stats, softmax_dtype


def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    kv_lengths: Tensor | None,
    stats: Stats,
    received: Tensor | None = None,
) -> AttentionOutput:
    """Attention and its statistics; see `kernels.attention`."""
    results: Sequence[Tensor | None]
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # The first call of an operation in Python loads the compiler, which takes seconds.
        with torch.autocast(q.device.type, enabled=False):
            results = chunked.forward(q, k, v, spec, kv_lengths, stats)
        return _chosen(results, stats)
    results = _forward(
        q,
        k,
        v,
        kv_lengths,
        spec.documents,
        spec.alibi_slopes,
        spec.sink_logit,
        spec.causal,
        spec.window,
        spec.sinks,
        spec.prefix,
        spec.softcap,
        spec.scale,
        received,
        " ".join(stats.row_names),
        list(stats.sink_mass),
    )
    return _chosen(results, stats)


def _chosen(results: Sequence[Tensor | None], stats: Stats) -> AttentionOutput:
    """Keep the output and the statistics that were asked for."""
    wanted = ["out", *stats.row_names, *(["sink_mass"] if stats.sink_mass else [])]
    named = zip(AttentionOutput._fields, results, strict=True)
    chosen: dict[str, Any] = {name: result for name, result in named if name in wanted}
    return AttentionOutput(**chosen)


@torch.library.custom_op("glassgpt::chunked_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lengths: Tensor | None,
    documents: Tensor | None,
    alibi_slopes: Tensor | None,
    sink_logit: Tensor | None,
    causal: bool,
    window: int | None,
    sinks: int,
    prefix: int,
    softcap: float | None,
    scale: float | None,
    received: Tensor | None,
    names: str,
    sink_mass: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    numbers = (causal, window, sinks, prefix, softcap, scale)
    spec = _spec(documents, alibi_slopes, sink_logit, numbers)
    stats = Stats.of(names.split(), tuple(sink_mass))
    with torch.autocast(q.device.type, enabled=False):
        output = chunked.forward(q, k, v, spec, kv_lengths, stats)
    return tuple(_or_empty(x, q) for x in output)  # type: ignore[return-value]


@torch.library.custom_op("glassgpt::chunked_attention_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lengths: Tensor | None,
    documents: Tensor | None,
    alibi_slopes: Tensor | None,
    sink_logit: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    d_entropy: Tensor | None,
    slope_gradient: bool,
    received: bool,
    causal: bool,
    window: int | None,
    sinks: int,
    prefix: int,
    softcap: float | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    numbers = (causal, window, sinks, prefix, softcap, scale)
    spec = _spec(documents, alibi_slopes, sink_logit, numbers)
    upstream = chunked.Upstream(d_out, d_lse, d_entropy)
    with torch.autocast(q.device.type, enabled=False):
        gradients = chunked.backward(
            q,
            k,
            v,
            spec,
            kv_lengths,
            lse,
            entropy,
            upstream,
            slope_gradient=slope_gradient,
            received=received,
        )
    return tuple(_or_empty(x, q) for x in gradients)  # type: ignore[return-value]


Numbers = tuple[bool, int | None, int, int, float | None, float | None]


def _spec(
    documents: Tensor | None,
    alibi_slopes: Tensor | None,
    sink_logit: Tensor | None,
    numbers: Numbers,
) -> AttentionSpec:
    causal, window, sinks, prefix, softcap, scale = numbers
    return AttentionSpec(
        causal=causal,
        window=window,
        sinks=sinks,
        prefix=prefix,
        documents=documents,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        scale=scale,
        sink_logit=sink_logit,
    )


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


@_forward.register_fake
def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Shapes, types and strides of the results, for the compiler."""
    names, sink_mass = others[-2:]
    batch, heads, n_rows, _ = q.shape
    row = q.new_empty(batch, heads, n_rows, dtype=softmax_dtype(q.dtype))
    shapes = {name: torch.empty_like(row) for name in ("lse", *names.split())}
    shapes["out"] = q.new_empty(batch, n_rows, heads, v.shape[3]).transpose(1, 2)
    if sink_mass:
        shapes["sink_mass"] = row.new_empty(batch, heads, n_rows, len(sink_mass))
    return tuple(_or_empty(shapes.get(name), q) for name in AttentionOutput._fields)


@_backward.register_fake
def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    _, _, alibi_slopes, sink_logit, *_ = others
    slope_gradient, received = others[9:11]
    batch, heads, n_rows, head_size = q.shape
    mass = q.new_empty(batch, heads, k.shape[2], dtype=softmax_dtype(q.dtype))
    return (
        q.new_empty(batch, n_rows, heads, head_size).transpose(1, 2),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        torch.empty_like(alibi_slopes) if slope_gradient else q.new_empty(0),
        q.new_empty(0) if sink_logit is None else torch.empty_like(sink_logit),
        mass if received else q.new_empty(0),
    )


# Places in the arguments of `_forward`.
ALIBI_SLOPES, SINK_LOGIT, N_TENSORS, RECEIVED, N_ARGUMENTS = 5, 6, 7, 13, 16


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, lse, entropy, *others = output
    if not entropy.numel():
        others.append(entropy)
    ctx.mark_non_differentiable(*others)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:N_TENSORS], lse, entropy)
    ctx.numbers = inputs[N_TENSORS:RECEIVED]


def _gradients(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    slope_gradient = ctx.needs_input_grad[ALIBI_SLOPES]
    received = ctx.needs_input_grad[RECEIVED]
    d_q, d_k, d_v, d_slopes, d_sink_logit, mass = _backward(
        *ctx.saved_tensors, *upstream[:3], slope_gradient, received, *ctx.numbers
    )
    gradients: list[Tensor | None] = [None] * N_ARGUMENTS
    gradients[:3] = d_q, d_k, d_v
    if slope_gradient:
        gradients[ALIBI_SLOPES] = d_slopes
    if ctx.needs_input_grad[SINK_LOGIT]:
        gradients[SINK_LOGIT] = d_sink_logit
    if received:
        gradients[RECEIVED] = mass
    return tuple(gradients)


_forward.register_autograd(_gradients, setup_context=_save_for_backward)
