"""The backward kernel of keys and values: one tile of keys, all the rows that see it.

The rows of every query head of the group go by in tiles, and the weights are made again from the
saved lse. A tile is laid out with keys as rows, so that both sums are plain products:

    dv_j = sum_i p_ij dO_i,    dk_j = scale sum_i dx_ij q_i

The column mass, sum_i p_ij of each query head, is a by-product for one more add per logit.
Nothing is added atomically: a program owns its keys and adds in a fixed order.
"""

import triton
import triton.language as tl

from kernels.flash_common import (
    LOG2E,
    add_product,
    d_logits,
    document_of,
    length_of,
    load_row_terms,
    load_rows,
    narrow,
    product,
    row_ranges,
    store_rows,
    visible,
)


@triton.jit
def _gather(
    d_k,
    d_v,
    k,
    v,
    Q,
    DOut,
    Lse,
    Delta,
    DEntropy,
    ColumnMass,
    DocStarts,
    DocEnds,
    Slopes,
    stride_qh,
    stride_qt,
    stride_doh,
    stride_dot,
    lo,
    full,
    tail,
    hi,
    begin,
    n,
    b,
    first_head,
    H,
    T,
    S,
    scale,
    softcap,
    window,
    sinks,
    prefix,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the rows of HEADS heads send back to a tile of keys.

    The rows are those from `full` to `tail`; if masked, those from `lo` to `hi` but for them. One
    loop goes over the tiles of all heads: a loop in a loop would keep more in registers.
    """
    rows = tl.arange(0, BM)
    columns = tl.arange(0, BN)
    mass = tl.zeros([BN], tl.float32)
    if MASKED:
        n_tiles = tl.maximum(tl.cdiv(hi - lo - (tail - full), BM), 0)
    else:
        n_tiles = (tail - full) // BM
    for step in range(0, HEADS * n_tiles):
        member = step // tl.maximum(n_tiles, 1)  # before the loop it may be worked out for 0
        tile = step - member * n_tiles
        if MASKED:
            first = lo + tile * BM
            first += tl.where(first >= full, tail - full, 0)
        else:
            first = full + tile * BM
        h = first_head + member
        left = T - first
        wide_h, wide_first = tl.cast(h, tl.int64), tl.cast(first, tl.int64)
        q_tile = Q + wide_h * stride_qh + wide_first * stride_qt
        q = load_rows(q_tile, rows, stride_qt, left, D, BLOCK_D, MASKED)
        x = product(k, tl.trans(q), PRECISION)  # (BN, BM)
        d_out_tile = DOut + wide_h * stride_doh + wide_first * stride_dot
        d_out = load_rows(d_out_tile, rows, stride_dot, left, DV, BLOCK_DV, MASKED)
        d_weights = product(v, tl.trans(d_out), PRECISION)
        row = (tl.cast(b, tl.int64) * H + wide_h) * T + wide_first + rows
        lse, delta, d_entropy = load_row_terms(Lse, Delta, DEntropy, row, rows < left, MASKED)
        if Slopes is not None:
            slope = tl.load(Slopes + h) * LOG2E
        else:
            slope = None
        i = n - left + rows
        if MASKED:
            start, end = document_of(DocStarts, DocEnds, i, n, b, S)
            seen = visible(
                i[None, :],
                (begin + columns)[:, None],
                start[None, :],
                end[None, :],
                window,
                sinks,
                prefix,
                CAUSAL,
                DocStarts is not None,
            )
        else:
            seen = None
        p, _, d_x = d_logits(
            x,
            d_weights,
            (i - begin).to(tl.float32)[None, :],
            columns.to(tl.float32)[:, None],
            seen,
            lse[None, :],
            delta[None, :],
            d_entropy[None, :],
            scale,
            softcap,
            slope,
            DEntropy is not None,
        )
        if ColumnMass is not None:
            mass = tl.where(tile == 0, 0.0, mass) + tl.sum(p, 1)
            key = (tl.cast(b, tl.int64) * H + wide_h) * S + begin + columns
            whole = (columns < S - begin) & (tile == n_tiles - 1)
            tl.store(ColumnMass + key, mass, mask=whole)
        d_v = add_product(d_v, narrow(p, d_out.dtype), d_out, PRECISION)
        d_k = add_product(d_k, narrow(d_x, q.dtype), q, PRECISION)
    return d_k, d_v


@triton.jit(do_not_specialize=["B", "T", "S", "window", "sinks", "prefix"])
def backward_keys_kernel(
    Q,  # (B, H, T, D)
    K,  # (B, Hkv, S, D)
    V,  # (B, Hkv, S, DV)
    DOut,  # (B, H, T, DV)
    Lse,  # (B, H, T) contiguous, as the next two; all three from `delta_kernel`
    Delta,
    DEntropy,  # None where nothing flows back through the entropy
    DKeys,  # (splits, B, Hkv, S, D)
    DValues,  # (splits, B, Hkv, S, DV)
    ColumnMass,  # (2, B, H, S) float32 zeros, or None: what full and what masked tiles receive
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
    B,
    Hkv,
    T,
    S,
    scale,
    softcap,
    window,
    sinks,
    prefix,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,  # parts of the group, each with sums of its own
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of keys begin..begin + BN; grid (tiles of keys, B * Hkv, SPLITS)."""
    begin = tl.program_id(0) * BN
    b = tl.program_id(1) // Hkv
    kv_head = tl.program_id(1) % Hkv
    split = tl.program_id(2)
    n = length_of(KvLengths, b, S)
    wide_b, wide_kv, wide_begin = b.to(tl.int64), kv_head.to(tl.int64), begin.to(tl.int64)
    columns = tl.arange(0, BN)
    Q += wide_b * stride_qb
    DOut += wide_b * stride_dob
    K += wide_b * stride_kb + wide_kv * stride_kh + wide_begin * stride_kt
    V += wide_b * stride_vb + wide_kv * stride_vh + wide_begin * stride_vt
    k = load_rows(K, columns, stride_kt, n - begin, D, BLOCK_D, True)
    v = load_rows(V, columns, stride_vt, n - begin, DV, BLOCK_DV, True)
    d_k = tl.zeros([BN, BLOCK_D], tl.float32)
    d_v = tl.zeros([BN, BLOCK_DV], tl.float32)
    first, full, tail, stop = row_ranges(
        begin, n, b, T, S, DocStarts, DocEnds, window, sinks, prefix, CAUSAL, BM, BN
    )
    HEADS: tl.constexpr = GROUP // SPLITS
    for masked in tl.static_range(2):
        if ColumnMass is not None:
            column_mass = ColumnMass + masked * (tl.cast(B, tl.int64) * Hkv * GROUP * S)
        else:
            column_mass = None
        d_k, d_v = _gather(
            d_k,
            d_v,
            k,
            v,
            Q,
            DOut,
            Lse,
            Delta,
            DEntropy,
            column_mass,
            DocStarts,
            DocEnds,
            Slopes,
            stride_qh,
            stride_qt,
            stride_doh,
            stride_dot,
            first,
            full,
            tail,
            stop,
            begin,
            n,
            b,
            kv_head * GROUP + split * HEADS,
            Hkv * GROUP,
            T,
            S,
            scale,
            softcap,
            window,
            sinks,
            prefix,
            CAUSAL,
            masked == 1,
            HEADS,
            D,
            DV,
            BLOCK_D,
            BLOCK_DV,
            BM,
            BN,
            PRECISION,
        )
    key = ((split.to(tl.int64) * B + wide_b) * Hkv + wide_kv) * S + wide_begin
    store_rows(DKeys + key * D, columns, D, S - begin, d_k * scale, D, BLOCK_D)
    store_rows(DValues + key * DV, columns, DV, S - begin, d_v, DV, BLOCK_DV)
