"""The backward kernels that go by rows: what is known of every row, then the gradient of queries.

    delta_i = dO_i . o_i - gL_i + gH_i H_i,    dq_i = scale sum_j dx_ij k_j

with gL and gH the gradients of lse and of the entropy H. Per-head vectors get partial sums, one
per tile of rows, which the caller adds in a fixed order.
"""

import triton
import triton.language as tl

from kernels.flash_common import (
    LN2,
    LOG2E,
    NO_KEY,
    add_product,
    d_logits,
    document_of,
    key_ranges,
    length_of,
    load_row_terms,
    load_rows,
    narrow,
    product,
    store_rows,
    visible,
)


@triton.jit(do_not_specialize=["T"])
def delta_kernel(
    Out,  # (B, H, T, DV)
    DOut,  # (B, H, T, DV)
    Lse,  # (B, H, T) contiguous, as the next six
    Entropy,
    DLse,  # None where nothing flows back through the lse
    DEntropy,  # None where nothing flows back through the entropy
    Delta,
    BaseLse,  # lse in base 2, NO_KEY for a row that sees no key
    BaseDEntropy,  # gradient of the entropy in base 2, 0 for such a row; None as DEntropy
    SinkLogit,  # (H,) float32 or None
    DSinkLogit,  # (B, H, tiles of rows) or None
    stride_ob,
    stride_oh,
    stride_ot,
    stride_dob,
    stride_doh,
    stride_dot,
    H,
    T,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BM: tl.constexpr,
):
    """Delta and base-2 terms of rows first..first + BM, and their part of d_sink_logit."""
    first = tl.program_id(0) * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    wide_b, wide_h, wide_first = b.to(tl.int64), h.to(tl.int64), first.to(tl.int64)
    offsets = tl.arange(0, BM)
    n_rows = T - first
    inside = offsets < n_rows
    row = (wide_b * H + wide_h) * T + wide_first + offsets
    Out += wide_b * stride_ob + wide_h * stride_oh + wide_first * stride_ot
    DOut += wide_b * stride_dob + wide_h * stride_doh + wide_first * stride_dot
    out = load_rows(Out, offsets, stride_ot, n_rows, DV, BLOCK_DV, True).to(tl.float32)
    d_out = load_rows(DOut, offsets, stride_dot, n_rows, DV, BLOCK_DV, True).to(tl.float32)
    delta = tl.sum(out * d_out, 1)
    lse = tl.load(Lse + row, mask=inside, other=-float("inf"))
    sees = lse > -float("inf")  # what flows back to a row that sees nothing may be infinite
    if DLse is not None:
        delta -= tl.load(DLse + row, mask=sees, other=0.0)
    if DEntropy is not None:
        d_entropy = tl.load(DEntropy + row, mask=sees, other=0.0)
        delta += d_entropy * tl.load(Entropy + row, mask=sees, other=0.0)
        tl.store(BaseDEntropy + row, d_entropy * LN2, mask=inside)
    delta = tl.where(sees, delta, 0.0)
    tl.store(Delta + row, delta, mask=inside)
    tl.store(BaseLse + row, tl.where(sees, lse * LOG2E, NO_KEY), mask=inside)
    if DSinkLogit is not None:
        log_null = tl.load(SinkLogit + h) - tl.where(sees, lse, 0.0)
        d_null = -delta
        if DEntropy is not None:
            d_null -= d_entropy * log_null
        d_null *= tl.exp2(log_null * LOG2E)
        place = (wide_b * H + wide_h) * tl.num_programs(0) + tl.program_id(0)
        tl.store(DSinkLogit + place, tl.sum(tl.where(sees, d_null, 0.0), 0))


@triton.jit
def _gather(
    d_q,
    d_slope,
    q,
    d_out,
    K,
    V,
    stride_kt,
    stride_vt,
    near,
    full,
    tail,
    stop,
    sink,
    sink_stop,
    n,
    i,
    start,
    end,
    lse,
    delta,
    d_entropy,
    scale,
    softcap,
    slope,
    window,
    sinks,
    prefix,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    MASKED: tl.constexpr,
    ENTROPY: tl.constexpr,
    D_SLOPE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the keys that `key_ranges` names send back to a tile of rows.

    The keys are those from `full` to `tail`; if masked, all others, in one loop that jumps.
    """
    columns = tl.arange(0, BN)
    column = columns.to(tl.float32)[None, :]
    if MASKED:
        lo = near - tl.cdiv(sink_stop - sink, BN) * BN
        hi = stop - (tail - full)
    else:
        lo, hi = full, tail
    for place in range(lo, hi, BN):
        begin = place
        if MASKED:
            begin += tl.where(place >= full, tail - full, 0)
            if sinks is not None:
                begin += tl.where(place < near, sink - lo, 0)
        at = tl.cast(begin, tl.int64)
        k = load_rows(K + at * stride_kt, columns, stride_kt, n - begin, D, BLOCK_D, MASKED)
        x = product(q, tl.trans(k), PRECISION)  # (BM, BN)
        v = load_rows(V + at * stride_vt, columns, stride_vt, n - begin, DV, BLOCK_DV, MASKED)
        d_weights = product(d_out, tl.trans(v), PRECISION)
        if MASKED:
            seen = visible(
                i[:, None],
                (begin + columns)[None, :],
                start[:, None],
                end[:, None],
                window,
                sinks,
                prefix,
                CAUSAL,
                DOCUMENTS,
            )
        else:
            seen = None
        row = (i - begin).to(tl.float32)[:, None]
        _, d_s, d_x = d_logits(
            x, d_weights, row, column, seen, lse, delta, d_entropy, scale, softcap, slope, ENTROPY
        )
        if D_SLOPE:
            d_slope -= tl.sum(d_s * tl.abs(row - column), 1)
        d_q = add_product(d_q, narrow(d_x, k.dtype), k, PRECISION)
    return d_q, d_slope


@triton.jit(do_not_specialize=["T", "S", "window", "sinks", "prefix"])
def backward_queries_kernel(
    Q,  # (B, H, T, D)
    K,  # (B, Hkv, S, D)
    V,  # (B, Hkv, S, DV)
    DOut,  # (B, H, T, DV)
    Lse,  # (B, H, T) contiguous, as the next two
    Delta,
    DEntropy,
    DQueries,  # (B, H, T, D)
    DSlopes,  # (B, H, tiles of rows) or None
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
    stride_vb,
    stride_vh,
    stride_vt,
    stride_dob,
    stride_doh,
    stride_dot,
    stride_dqb,
    stride_dqh,
    stride_dqt,
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
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of rows first..first + BM; grid (tiles of rows, B * H)."""
    DOCUMENTS: tl.constexpr = DocStarts is not None
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows start first
    first = tile * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    n = length_of(KvLengths, b, S)
    offsets = tl.arange(0, BM)
    n_rows = T - first
    i = n - n_rows + offsets
    start, end = document_of(DocStarts, DocEnds, i, n, b, S)
    wide_b, wide_h, wide_first = b.to(tl.int64), h.to(tl.int64), first.to(tl.int64)
    Q += wide_b * stride_qb + wide_h * stride_qh + wide_first * stride_qt
    K += wide_b * stride_kb + wide_h // GROUP * stride_kh
    V += wide_b * stride_vb + wide_h // GROUP * stride_vh
    DOut += wide_b * stride_dob + wide_h * stride_doh + wide_first * stride_dot
    DQueries += wide_b * stride_dqb + wide_h * stride_dqh + wide_first * stride_dqt
    row = (wide_b * H + wide_h) * T + wide_first + offsets
    lse, delta, d_entropy = load_row_terms(Lse, Delta, DEntropy, row, offsets < n_rows, True)
    if Slopes is not None:
        slope = tl.load(Slopes + h) * LOG2E
    else:
        slope = None
    q = load_rows(Q, offsets, stride_qt, n_rows, D, BLOCK_D, True)
    d_out = load_rows(DOut, offsets, stride_dot, n_rows, DV, BLOCK_DV, True)
    d_q = tl.zeros([BM, BLOCK_D], tl.float32)
    d_slope = tl.zeros([BM], tl.float32)

    near, full, tail, stop, sink, sink_stop = key_ranges(
        first, n, b, T, S, DocStarts, DocEnds, window, sinks, prefix, CAUSAL, BM, BN
    )
    for masked in tl.static_range(2):
        d_q, d_slope = _gather(
            d_q,
            d_slope,
            q,
            d_out,
            K,
            V,
            stride_kt,
            stride_vt,
            near,
            full,
            tail,
            stop,
            sink,
            sink_stop,
            n,
            i,
            start,
            end,
            lse[:, None],
            delta[:, None],
            d_entropy[:, None],
            scale,
            softcap,
            slope,
            window,
            sinks,
            prefix,
            CAUSAL,
            DOCUMENTS,
            masked == 1,
            DEntropy is not None,
            DSlopes is not None,
            D,
            DV,
            BLOCK_D,
            BLOCK_DV,
            BN,
            PRECISION,
        )
    store_rows(DQueries, offsets, stride_dqt, n_rows, d_q * scale, D, BLOCK_D)
    if DSlopes is not None:
        place = (wide_b * H + wide_h) * tl.num_programs(0) + tile
        tl.store(DSlopes + place, tl.sum(d_slope, 0))
