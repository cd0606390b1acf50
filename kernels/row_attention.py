"""Attention of one query per sequence as plain sums, for a compiler to fuse with its surroundings.

A new token's attention is a few thousand multiplications. In a compiled step a call of a library
costs more than they do and cuts the step in pieces; written as sums, the whole step becomes one
piece of machine code.
"""

import torch
from torch import Tensor

from kernels.eager import adjusted_logits
from kernels.fusion import in_memory
from kernels.spec import AttentionSpec, softmax_dtype
from kernels.visibility import make_layout


def fits(q: Tensor, spec: AttentionSpec) -> bool:
    """Whether `attention` is the way to go: one query on a CPU, compiled, without gradients."""
    return (
        torch.compiler.is_compiling()
        and q.device.type == "cpu"
        and q.shape[2] == 1
        and spec.documents is None
        and not torch.is_grad_enabled()
    )


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of the query at the last key: q (B, H, 1, D), k and v as ever -> (B, H, 1, Dv)."""
    dtype = softmax_dtype(q.dtype)
    batch, heads, _, size = q.shape
    scaled = in_memory(spec.scale_for(size) * q.to(dtype))
    queries = scaled.view(batch, k.shape[1], -1, 1, size).unbind(2)  # (B, Hkv, 1, D) each
    # A sum for every query of a group, all in one walk through the keys that they share.
    raw = torch.stack([(query * k.to(dtype)).sum(-1) for query in queries], dim=2)
    layout = make_layout(spec, 1, k.shape[2], None, q.device)
    logits, _ = adjusted_logits(raw.view(batch, heads, 1, -1), spec, layout)

    largest = logits.amax(-1, keepdim=True)
    if spec.sink_logit is not None:
        null = spec.sink_logit.to(dtype)[:, None, None]
        largest = torch.maximum(largest, null)
    weights = (logits - largest).exp()  # (B, H, 1, S), to be divided by their sum
    total = weights.sum(-1, keepdim=True)
    if spec.sink_logit is not None:
        total = total + (null - largest).exp()
    shares = weights.view(*raw.shape, 1).unbind(2)  # (B, Hkv, S, 1) each
    summed = torch.stack([(share * v.to(dtype)).sum(-2) for share in shares], dim=2)
    return (summed.view(batch, heads, 1, -1) / total).to(q.dtype)
