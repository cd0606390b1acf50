"""The forward kernel: attention of one tile of query rows, and the statistics of their weights.

The keys go by in tiles. For every row the kernel keeps the peak of the logits so far and sums of
w = 2^(logit - peak), moved to the new peak when it rises:

    total   sum of w
    acc     sum of w v
    spread  sum of w (logit - peak)        entropy = ln2 (log2 total - spread / total)
    far     sum of w (i - j)               mean distance = far / total

Both terms of the entropy are at least 0, so nothing cancels. The sink logit joins at the end,
after what is said of real keys alone has been stored. Statistics that are off (pointer None)
cost nothing.
"""

import triton
import triton.language as tl

from kernels.flash_common import (
    FLOOR,
    HIDDEN,
    LN2,
    LOG2E,
    add_product,
    document_of,
    key_ranges,
    length_of,
    load_tile,
    logits,
    narrow,
    product,
    store_tile,
    visible,
)
from kernels.flash_sink_mass import SINK_TILE, sum_first_keys


@triton.jit
def _attend(
    acc,
    peak,
    total,
    spread,
    far,
    top,
    q,
    K,
    V,
    KTiles,
    VTiles,
    stride_kt,
    stride_vt,
    b,
    kv_head,
    lo,
    hi,
    n,
    i,
    start,
    end,
    scale,
    softcap,
    slope,
    window,
    sinks,
    prefix,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    RAGGED: tl.constexpr,
    MASKED: tl.constexpr,
    ENTROPY: tl.constexpr,
    DISTANCE: tl.constexpr,
    TOP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Let the rows of a tile see the tiles of keys from lo to hi."""
    columns = tl.arange(0, BN)
    column = columns.to(tl.float32)[None, :]
    for begin in range(lo, hi, BN):
        at = tl.cast(begin, tl.int64)
        k = load_tile(
            KTiles,
            b,
            kv_head,
            begin,
            K + at * stride_kt,
            columns,
            stride_kt,
            n - begin,
            D,
            BLOCK_D,
            MASKED,
            False,
        )
        x = product(q, tl.trans(k), PRECISION)  # (BM, BN)
        distance = (i - begin).to(tl.float32)
        if MASKED:
            j = begin + columns
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
            if TOP:
                top = tl.maximum(top, tl.max(tl.where(seen, x, HIDDEN), 1))
        elif TOP:
            top = tl.maximum(top, tl.max(x, 1))
        if MASKED or softcap is not None or slope is not None:
            s, _ = logits(x, distance[:, None], column, scale, softcap, slope)
            if MASKED:
                s = tl.where(seen, s, HIDDEN)
            new_peak = tl.maximum(peak, tl.max(s, 1))
            shifted = s - new_peak[:, None]
        else:  # one multiply-add per logit
            new_peak = tl.maximum(peak, tl.max(x, 1) * (scale * LOG2E))
            shifted = x * (scale * LOG2E) - new_peak[:, None]
        w = tl.exp2(shifted)
        rise = peak - new_peak
        decay = tl.exp2(rise)
        row_sum = tl.sum(w, 1)
        if ENTROPY:
            spread = decay * (spread + total * rise) + tl.sum(w * shifted, 1)
        if DISTANCE:
            far = decay * far + distance * row_sum - tl.sum(w * column, 1)
        total = decay * total + row_sum
        v = load_tile(
            VTiles,
            b,
            kv_head,
            begin,
            V + at * stride_vt,
            columns,
            stride_vt,
            n - begin,
            DV,
            BLOCK_DV,
            MASKED,
            MASKED and RAGGED,
        )
        acc = add_product(acc * decay[:, None], narrow(w, v.dtype), v, PRECISION)
        peak = new_peak
    return acc, peak, total, spread, far, top


@triton.jit(do_not_specialize=["T", "S", "window", "sinks", "prefix"])
def forward_kernel(
    Q,  # (B, H, T, D)
    K,  # (B, Hkv, S, D)
    V,  # (B, Hkv, S, DV)
    Out,  # (B, H, T, DV)
    QTiles,  # descriptors of the same four, of tiles (1, 1, rows, BLOCK_D or BLOCK_DV);
    KTiles,  # all None where tiles are read and written through the pointers
    VTiles,
    OutTiles,
    Lse,  # (B, H, T) contiguous, as are all statistics; None where not wanted
    Entropy,
    EntropyTokens,
    MaxLogit,
    MaxProb,
    NullMass,
    MeanDistance,
    SinkMass,  # (B, H, T, len(COUNTS))
    KvLengths,  # (B,) or None
    DocStarts,  # (B, S) int32 or None: first position of each token's document
    DocEnds,  # (B, S) int32 or None: one past the last
    Slopes,  # (H,) float32 or None
    SinkLogit,  # (H,) float32 or None
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_ob,
    stride_oh,
    stride_ot,
    H,
    T,
    S,
    scale,
    softcap,  # None without
    window,  # None without, as the next two
    sinks,
    prefix,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key/value head
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,  # powers of two of at least 16
    BLOCK_DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    COUNTS: tl.constexpr,  # tuple of the k of sink_mass
    PRECISION: tl.constexpr,
):
    """Attention and statistics of rows first..first + BM; grid (tiles of rows, B * H)."""
    ENTROPY: tl.constexpr = Entropy is not None or EntropyTokens is not None
    DISTANCE: tl.constexpr = MeanDistance is not None
    # Without cap and bias the largest raw logit is the peak itself.
    TOP: tl.constexpr = MaxLogit is not None and (softcap is not None or Slopes is not None)
    DOCUMENTS: tl.constexpr = DocStarts is not None

    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # the longest rows start first
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
    Out += wide_b * stride_ob + wide_h * stride_oh + wide_first * stride_ot
    row = (wide_b * H + wide_h) * T + wide_first + offsets  # place in a (B, H, T) tensor
    inside = offsets < n_rows
    if Slopes is not None:
        slope = tl.load(Slopes + h) * LOG2E
    else:
        slope = None

    q = load_tile(
        QTiles, b, h, first, Q, offsets, stride_qt, n_rows, D, BLOCK_D, True, False
    )  # (BM, BLOCK_D)
    acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    peak = tl.full([BM], FLOOR, tl.float32)
    total = tl.zeros([BM], tl.float32)
    spread = tl.zeros([BM], tl.float32)
    far = tl.zeros([BM], tl.float32)
    top = tl.full([BM], FLOOR, tl.float32)

    near, full, tail, stop, sink, sink_stop = key_ranges(
        first, n, b, T, S, DocStarts, DocEnds, window, sinks, prefix, CAUSAL, BM, BN
    )
    for part in tl.static_range(4):
        if part == 0:
            lo, hi = sink, sink_stop
        elif part == 1:
            lo, hi = near, tl.minimum(full, stop)
        elif part == 2:
            lo, hi = full, tail
        else:
            lo, hi = tail, stop
        if part > 0 or sinks is not None:
            acc, peak, total, spread, far, top = _attend(
                acc,
                peak,
                total,
                spread,
                far,
                top,
                q,
                K,
                V,
                KTiles,
                VTiles,
                stride_kt,
                stride_vt,
                b,
                h // GROUP,
                lo,
                hi,
                n,
                i,
                start,
                end,
                scale,
                softcap,
                slope,
                window,
                sinks,
                prefix,
                CAUSAL,
                DOCUMENTS,
                KvLengths is not None,
                part != 2,
                ENTROPY,
                DISTANCE,
                TOP,
                D,
                DV,
                BLOCK_D,
                BLOCK_DV,
                BN,
                PRECISION,
            )

    # What is said of real keys alone. A row without keys has total 0, and divides by 1 instead.
    sees = total > 0
    divisor = tl.where(sees, total, 1.0)
    if EntropyTokens is not None:
        tl.store(EntropyTokens + row, (tl.log2(divisor) - spread / divisor) * LN2, mask=inside)
    if MeanDistance is not None:
        tl.store(MeanDistance + row, far / divisor, mask=inside)
    if MaxLogit is not None:
        highest = top * scale if TOP else peak * LN2
        tl.store(MaxLogit + row, tl.where(sees, highest, -float("inf")), mask=inside)

    kept = tl.where(sees, 1.0, 0.0)  # what scales sums over real keys once the null has joined
    if SinkLogit is not None:
        z = tl.load(SinkLogit + h) * LOG2E
        joint = tl.maximum(peak, z)
        kept = tl.exp2(peak - joint) * kept
        null = tl.exp2(z - joint)
        if ENTROPY:
            spread = kept * (spread + total * (peak - joint))
            spread += tl.where(null > 0, null * (z - joint), 0.0)
        total = kept * total + null
        peak = joint
        divisor = tl.where(total > 0, total, 1.0)
    share = kept / divisor  # the weight of a real key at the real peak
    store_tile(
        OutTiles, b, h, first, Out, offsets, stride_ot, n_rows, acc * share[:, None], DV, BLOCK_DV
    )
    if Lse is not None:
        lse = (peak + tl.log2(divisor)) * LN2
        tl.store(Lse + row, tl.where(total > 0, lse, -float("inf")), mask=inside)
    if Entropy is not None:
        tl.store(Entropy + row, (tl.log2(divisor) - spread / divisor) * LN2, mask=inside)
    if MaxProb is not None:
        tl.store(MaxProb + row, share, mask=inside)
    if NullMass is not None:
        if SinkLogit is not None:
            tl.store(NullMass + row, null / divisor, mask=inside)
        else:
            tl.store(NullMass + row, total * 0.0, mask=inside)

    if SinkMass is not None:
        # The first keys of the first row's document, then those of documents that begin inside
        # the tile; without documents there is only the former.
        WIDTH: tl.constexpr = triton.next_power_of_2(len(COUNTS))
        masses = tl.zeros([BM, WIDTH], tl.float32)
        low = n - n_rows
        first_start, _ = document_of(DocStarts, DocEnds, low, n, b, S)
        for part in tl.static_range(2):
            if part == 0:
                lo, hi = first_start, tl.minimum(first_start + SINK_TILE, stop)
            else:
                high = n - T + tl.minimum(first + BM, T) - 1
                last_start, _ = document_of(DocStarts, DocEnds, high, n, b, S)
                lo = tl.maximum(first_start + SINK_TILE, low + 1)
                hi = tl.where(
                    last_start > first_start, tl.minimum(last_start + SINK_TILE, stop), lo
                )
            if part == 0 or DOCUMENTS:
                masses = sum_first_keys(
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
                    CAUSAL,
                    DOCUMENTS,
                    D,
                    BLOCK_D,
                    COUNTS,
                    PRECISION,
                )
        which = tl.arange(0, WIDTH)
        masses /= divisor[:, None]
        tl.store(
            SinkMass + row[:, None] * len(COUNTS) + which[None, :],
            masses,
            mask=inside[:, None] & (which < len(COUNTS))[None, :],
        )
