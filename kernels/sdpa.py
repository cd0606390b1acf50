"""The `sdpa` backend: PyTorch's own fused attention where it fits, exact chunks for the rest.

The stock operation takes plain causal and bidirectional calls; windows, documents, prefixes,
biases, sink logits, unequal lengths and received weight go to the chunks. Statistics of a plain
call are measured in chunks beside the stock operation, so that asking for them changes no bit of
the output or of its gradients. A single query in a compiled step on a CPU is neither: there the
compiler is given the sums themselves (`kernels/row_attention.py`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import chunked, row_attention
from kernels.chunked_op import chunked_attention
from kernels.spec import AttentionOutput, AttentionSpec, Stats

HALF = (torch.bfloat16, torch.float16)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    kv_lengths: Tensor | None,
    stats: Stats | None,
    received: Tensor | None,
) -> AttentionOutput:
    """Compute attention and its statistics in linear memory; see `kernels.attention`."""
    alone = kv_lengths is None and stats is None and received is None
    if alone and row_attention.fits(q, spec):
        return AttentionOutput(row_attention.attention(q, k, v, spec))
    plain = _is_plain(spec, q.shape[2], k.shape[2]) and kv_lengths is None and received is None
    if not plain or q.shape[3] != v.shape[3]:  # of unequal sizes the stock one makes the matrix
        return chunked_attention(q, k, v, spec, kv_lengths, stats or Stats(), received)
    near_k, near_v = k, v
    if spec.window is not None:  # a single query: cut off what lies before its window
        near_k, near_v = k[:, :, -spec.window :], v[:, :, -spec.window :]
    out = _stock(q, near_k, near_v, spec)
    if stats is None:
        return AttentionOutput(out)
    no_values = v[..., :0]
    return chunked_attention(q, k, no_values, spec, kv_lengths, stats, None)._replace(out=out)


def column_mass(
    q: Tensor, k: Tensor, lse: Tensor, spec: AttentionSpec, kv_lengths: Tensor | None
) -> Tensor:
    """Sum the weights of each key over all queries: (B, H, S); see `kernels.attention`."""
    return chunked.column_mass(q, k, lse, spec, kv_lengths)


def _is_plain(spec: AttentionSpec, n_rows: int, n_keys: int) -> bool:
    """Whether the mask is the stock causal one, or none once keys before a window are cut off."""
    if not spec.plain_logits or spec.documents is not None:
        return False
    if not spec.causal:
        return True
    if n_rows == 1:
        return spec.window is None or not (spec.sinks or spec.prefix)
    return n_rows == n_keys and not spec.prefix and (spec.window is None or spec.window >= n_keys)


def _stock(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    causal = spec.causal
    if q.shape[2] == 1:  # the query is at the last key; the stock rule would put it at the first
        causal = False
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.is_cuda and q.dtype not in HALF:
        # CUDA's fused kernels for wider types know no groups; asked to, they make the matrix.
        k, v, group = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1), 1
    if group > 1:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=spec.scale, enable_gqa=True
        )
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=spec.scale)
