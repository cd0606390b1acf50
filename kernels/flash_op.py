"""Flash attention as operations of PyTorch: forward, backward and column mass.

An operation is a single node to `torch.compile`, with shapes the compiler can ask for, and counts
its floating-point operations. The backward is an operation without a backward of its own, so
double backward raises.

The arguments of an operation are tensors and plain values, so a rule travels in parts: first its
tensors, then its numbers. Results are always tensors: an empty one stands for each absent one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels import flash_decode_launch, flash_launch
from kernels.flash_launch import Rule
from kernels.spec import AttentionOutput


@torch.library.custom_op("glassgpt::flash_attention", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lengths: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    alibi_slopes: Tensor | None,
    sink_logit: Tensor | None,
    causal: bool,
    window: int | None,
    sinks: int,
    prefix: int,
    softcap: float | None,
    scale: float,
    precision: str,
    received: Tensor | None,
    names: str,
    sink_mass: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attention, lse and the named statistics, in the order of `AttentionOutput`."""
    rule = _rule(
        (kv_lengths, starts, ends, alibi_slopes, sink_logit),
        (causal, window, sinks, prefix, softcap, scale, precision),
    )
    few_rows = flash_decode_launch.can_decode(q, k, rule)
    compute = flash_decode_launch.decode if few_rows else flash_launch.forward
    output = compute(q, k, v, rule, names.split(), sink_mass)
    return tuple(_or_empty(x, q) for x in output)  # type: ignore[return-value]


@torch.library.custom_op("glassgpt::flash_attention_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lengths: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    alibi_slopes: Tensor | None,
    sink_logit: Tensor | None,
    out: Tensor,
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
    scale: float,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, alibi_slopes, sink_logit, and the column mass as that of `received`.

    Those of the slopes and of `received` are made on request.
    """
    rule = _rule(
        (kv_lengths, starts, ends, alibi_slopes, sink_logit),
        (causal, window, sinks, prefix, softcap, scale, precision),
    )
    results = AttentionOutput(out=out, lse=lse, entropy=entropy)
    gradients = flash_launch.backward(
        q,
        k,
        v,
        rule,
        results,
        d_out,
        d_lse,
        d_entropy,
        slope_gradient=slope_gradient,
        received=received,
    )
    return tuple(_or_empty(x, q) for x in gradients)  # type: ignore[return-value]


@torch.library.custom_op("glassgpt::flash_column_mass", mutates_args=())
def column_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    kv_lengths: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    alibi_slopes: Tensor | None,
    causal: bool,
    window: int | None,
    sinks: int,
    prefix: int,
    softcap: float | None,
    scale: float,
    precision: str,
) -> Tensor:
    """Weight that each key receives: (B, H, S) float32."""
    rule = _rule(
        (kv_lengths, starts, ends, alibi_slopes, None),
        (causal, window, sinks, prefix, softcap, scale, precision),
    )
    return flash_launch.column_mass(q, k, lse, rule)


Tensors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Numbers = tuple[bool, int | None, int, int, float | None, float, str]


def _rule(tensors: Tensors, numbers: Numbers) -> Rule:
    kv_lengths, starts, ends, alibi_slopes, sink_logit = tensors
    causal, window, sinks, prefix, softcap, scale, precision = numbers
    return Rule(
        kv_lengths=kv_lengths,
        starts=starts,
        ends=ends,
        alibi_slopes=alibi_slopes,
        sink_logit=sink_logit,
        causal=causal,
        window=window,
        sinks=sinks,
        prefix=prefix,
        softcap=softcap,
        scale=scale,
        precision=precision,
    )


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


@forward.register_fake
def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Shapes, types and strides of the results, for the compiler."""
    names, sink_mass = others[-2:]
    batch, heads, n_rows, _ = q.shape
    row = q.new_empty(batch, heads, n_rows, dtype=torch.float32)
    shapes = {name: torch.empty_like(row) for name in ("lse", *names.split())}
    shapes["out"] = q.new_empty(batch, n_rows, heads, v.shape[3]).transpose(1, 2)
    if sink_mass:
        shapes["sink_mass"] = row.new_empty(batch, heads, n_rows, len(sink_mass))
    return tuple(_or_empty(shapes.get(name), q) for name in AttentionOutput._fields)


@backward.register_fake
def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    _, _, _, alibi_slopes, sink_logit, *_ = others
    slope_gradient, received = others[11:13]
    batch, heads, n_rows, head_size = q.shape
    return (
        q.new_empty(batch, n_rows, heads, head_size).transpose(1, 2),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        torch.empty_like(alibi_slopes) if slope_gradient else q.new_empty(0),
        q.new_empty(0) if sink_logit is None else torch.empty_like(sink_logit),
        _column_mass_shape(q, k) if received else q.new_empty(0),
    )


@column_mass.register_fake
def _column_mass_shape(q: Tensor, k: Tensor, *others: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], k.shape[2], dtype=torch.float32)


# Places in the arguments of `forward`.
ALIBI_SLOPES, SINK_LOGIT, N_TENSORS, RECEIVED, N_ARGUMENTS = 6, 7, 8, 15, 18


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, lse, entropy, *others = output
    if not entropy.numel():
        others.append(entropy)
    ctx.mark_non_differentiable(*others)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:N_TENSORS], out, lse, entropy)
    ctx.numbers = inputs[N_TENSORS:RECEIVED]


def _gradients(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    slope_gradient = ctx.needs_input_grad[ALIBI_SLOPES]
    received = ctx.needs_input_grad[RECEIVED]
    d_q, d_k, d_v, d_slopes, d_sink_logit, mass = backward(
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


forward.register_autograd(_gradients, setup_context=_save_for_backward)


Shape = tuple[int, ...]


def visible_pairs(
    n_rows: int, n_keys: int, causal: bool, window: int | None, sinks: int, prefix: int
) -> int:
    """How many logits a head has: pairs of a row and a key that it sees by position alone."""
    total = 0
    for i in range(n_keys - n_rows, n_keys):
        if not causal or i < prefix:
            total += n_keys if not causal else max(min(prefix, n_keys), i + 1)
        elif window is None or i < window:
            total += max(i + 1, 0)
        else:
            total += window + min(sinks, i + 1 - window)
    return total


@register_flop_formula(torch.ops.glassgpt.flash_attention)
def forward_flops(q: Shape, k: Shape, v: Shape, *others: Any, **_: Any) -> int:
    """Multiply-adds count twice, over visible pairs; documents and lengths are not known here."""
    causal, window, sinks, prefix = others[5:9]
    pairs = visible_pairs(q[2], k[2], causal, window, sinks, prefix)
    return 2 * q[0] * q[1] * pairs * (q[3] + v[3])


@register_flop_formula(torch.ops.glassgpt.flash_attention_backward)
def backward_flops(q: Shape, k: Shape, v: Shape, *others: Any, **_: Any) -> int:
    """By convention five products: the logits again, and four for the gradients."""
    causal, window, sinks, prefix = others[13:17]
    pairs = visible_pairs(q[2], k[2], causal, window, sinks, prefix)
    return 2 * q[0] * q[1] * pairs * (3 * q[3] + 2 * v[3])
