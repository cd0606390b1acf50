"""Decoding: a few queries against a long cache, whose keys are split among programs.

With few rows there are too few tiles to fill a GPU, and reading the cache is what takes time. So
the heads that share keys lie in one tile, every key is read once, and each program takes a part
of the keys. It leaves its sums as they are (`flash_forward` explains them); the merge moves them
to the highest peak, as one more step of the same recursion, and finishes as the forward does.

Layout of a cache in pages: k and v are pools (pages, Hkv, page length, D), and a block table
(B, most pages of a sequence) int32 holds in row b the numbers of the pages where sequence b has
its keys 0.., in order. Without a table, page b is the whole of sequence b.
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
    logits,
    narrow,
    product,
    visible,
)
from kernels.flash_sink_mass import SINK_TILE


@triton.jit
def _load_keys(
    X,
    Table,
    j,
    b,
    n,
    stride_page,
    stride_token,
    page_length,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load a (keys, BLOCK) tile of keys or values j of sequence b; 0 past n and past SIZE."""
    if Table is None:
        token = tl.cast(b, tl.int64) * stride_page + j.to(tl.int64) * stride_token
    else:
        page = tl.load(Table + j // page_length, mask=j < n, other=0).to(tl.int64)
        token = page * stride_page + (j % page_length).to(tl.int64) * stride_token
    columns = tl.arange(0, BLOCK)
    inside = (j < n)[:, None] & (columns < SIZE)[None, :]
    return tl.load(X + token[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit(
    do_not_specialize=["stride_table", "page_length", "B", "T", "S", "window", "sinks", "prefix"]
)
def decode_kernel(
    Q,  # (B, H, T, D)
    K,  # (B, Hkv, S, D), or pages
    V,  # (B, Hkv, S, DV), or pages
    Acc,  # (splits, B, H, T, DV) float32: the sums of each split, as the next five
    Peak,  # (splits, B, H, T)
    Total,
    Spread,  # None where not wanted, as what follows
    Far,
    Top,
    FirstPeak,  # (B, H, T): peak and, for each of COUNTS, sum over the first keys
    First,  # (B, H, T, len(COUNTS))
    KvLengths,
    DocStarts,
    DocEnds,
    Slopes,
    Table,  # (B, pages) int32 or None
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_table,
    page_length,
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
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BM: tl.constexpr,  # at least GROUP * T
    BN: tl.constexpr,
    COUNTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The sums of one part of the keys for all rows of a key head; grid (splits, B * Hkv)."""
    DOCUMENTS: tl.constexpr = DocStarts is not None
    split = tl.program_id(0)
    b = tl.program_id(1) // Hkv
    kv_head = tl.program_id(1) % Hkv
    wide_b, wide_kv = b.to(tl.int64), kv_head.to(tl.int64)
    n = length_of(KvLengths, b, S)
    r = tl.arange(0, BM)  # row of the tile: head r // T of the group, query r % T
    head, t = r // T, r % T
    inside = r < GROUP * T
    i = n - T + t
    start, end = document_of(DocStarts, DocEnds, i, n, b, S)
    K += wide_kv * stride_kh
    V += wide_kv * stride_vh
    if Table is not None:
        Table += wide_b * stride_table
    if Slopes is not None:
        slope = tl.load(Slopes + kv_head * GROUP + head, mask=inside, other=0.0)[:, None] * LOG2E
    else:
        slope = None
    at = (wide_kv * GROUP + head) * stride_qh + t.to(tl.int64) * stride_qt
    columns = tl.arange(0, BLOCK_D)
    q = tl.load(
        Q + wide_b * stride_qb + at[:, None] + columns[None, :],
        mask=inside[:, None] & (columns < D)[None, :],
        other=0.0,
    )

    acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    peak = tl.full([BM], FLOOR, tl.float32)
    total = tl.zeros([BM], tl.float32)
    spread = tl.zeros([BM], tl.float32)
    far = tl.zeros([BM], tl.float32)
    top = tl.full([BM], FLOOR, tl.float32)
    near, _full, _tail, stop, sink, sink_stop = key_ranges(
        0, n, b, T, S, DocStarts, DocEnds, window, sinks, prefix, CAUSAL, BM, BN
    )
    share = tl.cdiv(tl.cdiv(stop - near, BN), tl.num_programs(0)) * BN
    for part in tl.static_range(2):
        if part == 0:  # sinks beside a window go to the first split
            lo, hi = sink, tl.where(split == 0, sink_stop, sink)
        else:
            lo, hi = near + split * share, tl.minimum(near + (split + 1) * share, stop)
        if part == 1 or sinks is not None:
            for begin in range(lo, hi, BN):
                j = begin + tl.arange(0, BN)
                k = _load_keys(K, Table, j, b, n, stride_kb, stride_kt, page_length, D, BLOCK_D)
                x = product(q, tl.trans(k), PRECISION)  # (BM, BN)
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
                distance = (i[:, None] - j[None, :]).to(tl.float32)
                s, _squashed = logits(x, distance, 0.0, scale, softcap, slope)
                s = tl.where(seen, s, HIDDEN)
                new_peak = tl.maximum(peak, tl.max(s, 1))
                shifted = s - new_peak[:, None]
                w = tl.exp2(shifted)
                rise = peak - new_peak
                decay = tl.exp2(rise)
                if Spread is not None:
                    spread = decay * (spread + total * rise) + tl.sum(w * shifted, 1)
                if Far is not None:
                    far = decay * far + tl.sum(w * distance, 1)
                if Top is not None:
                    top = tl.maximum(top, tl.max(tl.where(seen, x, HIDDEN), 1))
                total = decay * total + tl.sum(w, 1)
                v = _load_keys(V, Table, j, b, n, stride_vb, stride_vt, page_length, DV, BLOCK_DV)
                acc = add_product(acc * decay[:, None], narrow(w, v.dtype), v, PRECISION)
                peak = new_peak

    row = (wide_b * Hkv + wide_kv) * GROUP * T + r  # place in (B, H, T)
    place = tl.cast(split, tl.int64) * B * Hkv * GROUP * T + row
    tl.store(Peak + place, peak, mask=inside)
    tl.store(Total + place, total, mask=inside)
    if Spread is not None:
        tl.store(Spread + place, spread, mask=inside)
    if Far is not None:
        tl.store(Far + place, far, mask=inside)
    if Top is not None:
        tl.store(Top + place, top * scale, mask=inside)
    columns = tl.arange(0, BLOCK_DV)
    tl.store(
        Acc + place[:, None] * DV + columns[None, :],
        acc,
        mask=inside[:, None] & (columns < DV)[None, :],
    )

    if First is not None:  # noqa: SIM102 - this test is settled when the kernel is compiled
        if split == 0:
            # All rows are in one document, or there are no documents: they share the start.
            age = tl.arange(0, SINK_TILE)
            j = tl.max(start, 0) + age
            k = _load_keys(K, Table, j, b, n, stride_kb, stride_kt, page_length, D, BLOCK_D)
            x = product(q, tl.trans(k), PRECISION)  # (BM, SINK_TILE)
            distance = (i[:, None] - j[None, :]).to(tl.float32)
            s, _squashed = logits(x, distance, 0.0, scale, softcap, slope)
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
            s = tl.where(seen, s, HIDDEN)
            first_peak = tl.maximum(tl.max(s, 1), FLOOR)
            w = tl.exp2(s - first_peak[:, None])
            tl.store(FirstPeak + row, first_peak, mask=inside)
            for c in tl.static_range(len(COUNTS)):
                mass = tl.sum(tl.where((age < COUNTS[c])[None, :], w, 0.0), 1)
                tl.store(First + row * len(COUNTS) + c, mass, mask=inside)


@triton.jit(do_not_specialize=["T", "n_rows", "n_splits"])
def merge_kernel(
    Acc,  # (splits, B, H, T, DV): the sums of each split, as the next five
    Peak,  # (splits, B, H, T)
    Total,
    Spread,
    Far,
    Top,
    FirstPeak,
    First,
    Out,  # (B, H, T, DV)
    Lse,  # (B, H, T) contiguous, as are all statistics
    Entropy,  # None where not wanted, as the next ones
    EntropyTokens,
    MaxLogit,
    MaxProb,
    NullMass,
    MeanDistance,
    SinkMass,  # (B, H, T, len(COUNTS))
    SinkLogit,
    stride_ob,
    stride_oh,
    stride_ot,
    H,
    T,
    n_rows,  # B * H * T
    n_splits,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BM: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Merge the splits of rows; grid (tiles of BM rows)."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < n_rows
    b, h, t = row // T // H, row // T % H, row % T
    split = tl.arange(0, BLOCK_SPLITS)
    place = split.to(tl.int64)[None, :] * n_rows + row[:, None]  # (BM, BLOCK_SPLITS)
    there = inside[:, None] & (split < n_splits)[None, :]

    peaks = tl.load(Peak + place, mask=there, other=FLOOR)
    totals = tl.load(Total + place, mask=there, other=0.0)
    peak = tl.max(peaks, 1)
    rises = peaks - peak[:, None]
    decays = tl.exp2(rises)
    total = tl.sum(decays * totals, 1)
    # What is said of real keys alone. A row without keys has total 0, and divides by 1 instead.
    sees = total > 0
    divisor = tl.where(sees, total, 1.0)
    if Spread is not None:
        spreads = tl.load(Spread + place, mask=there, other=0.0)
        spread = tl.sum(decays * (spreads + totals * rises), 1)
    if EntropyTokens is not None:
        tl.store(EntropyTokens + row, (tl.log2(divisor) - spread / divisor) * LN2, mask=inside)
    if MeanDistance is not None:
        far = tl.sum(decays * tl.load(Far + place, mask=there, other=0.0), 1)
        tl.store(MeanDistance + row, far / divisor, mask=inside)
    if MaxLogit is not None:
        highest = tl.max(tl.load(Top + place, mask=there, other=-float("inf")), 1)
        tl.store(MaxLogit + row, tl.where(sees, highest, -float("inf")), mask=inside)

    kept = tl.where(sees, 1.0, 0.0)  # what scales sums over real keys once the null has joined
    null = tl.zeros([BM], tl.float32)
    joint = peak
    if SinkLogit is not None:
        z = tl.load(SinkLogit + h, mask=inside, other=0.0) * LOG2E
        joint = tl.maximum(peak, z)
        kept = tl.exp2(peak - joint) * kept
        null = tl.exp2(z - joint)
        if Entropy is not None:
            spread = kept * (spread + total * (peak - joint))
            spread += tl.where(null > 0, null * (z - joint), 0.0)
        total = kept * total + null
        divisor = tl.where(total > 0, total, 1.0)
    share = kept / divisor  # the weight of a real key at the real peak
    lse = (joint + tl.log2(divisor)) * LN2
    tl.store(Lse + row, tl.where(total > 0, lse, -float("inf")), mask=inside)
    if Entropy is not None:
        tl.store(Entropy + row, (tl.log2(divisor) - spread / divisor) * LN2, mask=inside)
    if MaxProb is not None:
        tl.store(MaxProb + row, share, mask=inside)
    if NullMass is not None:
        tl.store(NullMass + row, null / divisor, mask=inside)
    if SinkMass is not None:
        first_peak = tl.load(FirstPeak + row, mask=inside, other=FLOOR)
        first_share = share * tl.exp2(first_peak - peak)
        for c in tl.static_range(len(COUNTS)):
            first = tl.load(First + row * len(COUNTS) + c, mask=inside, other=0.0)
            tl.store(SinkMass + row * len(COUNTS) + c, first * first_share, mask=inside)

    columns = tl.arange(0, BLOCK_DV)
    acc = tl.load(
        Acc + place[:, :, None] * DV + columns[None, None, :],
        mask=there[:, :, None] & (columns < DV)[None, None, :],
        other=0.0,
    )
    out = tl.sum(acc * (decays * share[:, None])[:, :, None], 1)  # (BM, BLOCK_DV)
    at = b * stride_ob + h * stride_oh + t * stride_ot
    tl.store(
        Out + at[:, None] + columns[None, :],
        narrow(out, Out.dtype.element_ty),
        mask=inside[:, None] & (columns < DV)[None, :],
    )
