"""The kernel of column mass: the weight that each key receives, summed over the rows.

Queries, keys and the lse of every row are enough: a weight is 2^(logit - lse).
"""

import triton
import triton.language as tl

from kernels.flash_common import (
    HIDDEN,
    LOG2E,
    NO_KEY,
    document_of,
    length_of,
    load_rows,
    logits,
    product,
    row_ranges,
    visible,
)


@triton.jit
def _gather(
    mass,
    k,
    Q,
    Lse,
    DocStarts,
    DocEnds,
    stride_qt,
    lo,
    hi,
    begin,
    n,
    b,
    T,
    S,
    scale,
    softcap,
    slope,
    window,
    sinks,
    prefix,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the weights of the tiles of rows from lo to hi."""
    rows = tl.arange(0, BM)
    columns = tl.arange(0, BN)
    for first in range(lo, hi, BM):
        at = tl.cast(first, tl.int64)
        left = T - first
        q = load_rows(Q + at * stride_qt, rows, stride_qt, left, D, BLOCK_D, MASKED)
        x = product(k, tl.trans(q), PRECISION)  # (BN, BM)
        i = n - left + rows
        j = begin + columns
        s, _ = logits(
            x,
            (i - begin).to(tl.float32)[None, :],
            columns.to(tl.float32)[:, None],
            scale,
            softcap,
            slope,
        )
        if MASKED:
            start, end = document_of(DocStarts, DocEnds, i, n, b, S)
            seen = visible(
                i[None, :],
                j[:, None],
                start[None, :],
                end[None, :],
                window,
                sinks,
                prefix,
                CAUSAL,
                DocStarts is not None,
            )
            s = tl.where(seen, s, HIDDEN)
        lse = tl.load(Lse + at + rows, mask=rows < left, other=-float("inf"))
        lse = tl.where(lse > -float("inf"), lse * LOG2E, NO_KEY)
        mass += tl.sum(tl.exp2(s - lse[None, :]), 1)
    return mass


@triton.jit(do_not_specialize=["T", "S", "window", "sinks", "prefix"])
def column_mass_kernel(
    Q,  # (B, H, T, D)
    K,  # (B, Hkv, S, D)
    Lse,  # (B, H, T) contiguous
    Mass,  # (B, H, S) contiguous
    KvLengths,
    DocStarts,
    DocEnds,
    Slopes,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    H,
    T,
    S,
    scale,
    softcap,
    window,
    sinks,
    prefix,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Column mass of keys begin..begin + BN for one query head; grid (tiles of keys, B * H)."""
    begin = tl.program_id(0) * BN
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    n = length_of(KvLengths, b, S)
    wide_b, wide_h, wide_begin = b.to(tl.int64), h.to(tl.int64), begin.to(tl.int64)
    columns = tl.arange(0, BN)
    Q += wide_b * stride_qb + wide_h * stride_qh
    K += wide_b * stride_kb + wide_h // GROUP * stride_kh + wide_begin * stride_kt
    Lse += (wide_b * H + wide_h) * T
    if Slopes is not None:
        slope = tl.load(Slopes + h) * LOG2E
    else:
        slope = None
    k = load_rows(K, columns, stride_kt, n - begin, D, BLOCK_D, True)
    mass = tl.zeros([BN], tl.float32)
    first, full, tail, stop = row_ranges(
        begin, n, b, T, S, DocStarts, DocEnds, window, sinks, prefix, CAUSAL, BM, BN
    )
    for part in tl.static_range(3):
        if part == 0:
            lo, hi = first, tl.minimum(full, stop)
        elif part == 1:
            lo, hi = full, tail
        else:
            lo, hi = tail, stop
        mass = _gather(
            mass,
            k,
            Q,
            Lse,
            DocStarts,
            DocEnds,
            stride_qt,
            lo,
            hi,
            begin,
            n,
            b,
            T,
            S,
            scale,
            softcap,
            slope,
            window,
            sinks,
            prefix,
            CAUSAL,
            part != 1,
            D,
            BLOCK_D,
            BM,
            BN,
            PRECISION,
        )
    key = (wide_b * H + wide_h) * S + wide_begin + columns
    tl.store(Mass + key, mass, mask=columns < S - begin)
