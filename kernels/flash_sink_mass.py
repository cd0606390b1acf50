"""Weights on the first keys of a document, which the forward sums once its rows are done."""

import triton
import triton.language as tl

from kernels.flash_common import HIDDEN, load_rows, logits, product, visible

SINK_TILE = tl.constexpr(16)  # keys whose weights `sink_mass` can ask for


@triton.jit
def sum_first_keys(
    masses,
    q,
    K,
    stride_kt,
    lo,
    hi,
    n,
    i,
    start,
    end,
    peak,
    scale,
    softcap,
    slope,
    window,
    sinks,
    prefix,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COUNTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the weights on the first keys of the document, in narrow tiles from lo to hi.

    Column c of `masses` is for the first COUNTS[c] keys.
    """
    columns = tl.arange(0, SINK_TILE)
    which = tl.arange(0, masses.shape[1])
    for begin in range(lo, hi, SINK_TILE):
        at = tl.cast(begin, tl.int64)
        k = load_rows(K + at * stride_kt, columns, stride_kt, n - begin, D, BLOCK_D, True)
        x = product(q, tl.trans(k), PRECISION)  # (BM, SINK_TILE)
        j = begin + columns
        s, _ = logits(
            x,
            (i - begin).to(tl.float32)[:, None],
            columns.to(tl.float32)[None, :],
            scale,
            softcap,
            slope,
        )
        seen = visible(
            i[:, None],
            j[None, :],
            start[:, None],
            end[:, None],
            window,
            sinks,
            prefix,
            CAUSAL,
            DOCUMENTS,
        )
        w = tl.exp2(tl.where(seen, s, HIDDEN) - peak[:, None])
        age = j[None, :] - start[:, None]
        for c in tl.static_range(len(COUNTS)):
            mass = tl.sum(tl.where(age < COUNTS[c], w, 0.0), 1)
            masses += tl.where(which[None, :] == c, mass[:, None], 0.0)
    return masses
