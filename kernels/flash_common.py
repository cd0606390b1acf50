"""What all flash kernels share: tiles in and out, rounding, logits, and who sees whom in a tile.

Conventions of every kernel here. Logits are in base 2 inside a kernel (natural logits times
log2 e), because the hardware's exponential is 2^x. An option that is None, pointer or number,
compiles to nothing. i is the position of a query, j that of a key; a tile of rows starts at row
`first`, a tile of keys at key `begin`.

Triton's interpreter, under which the kernels are tested on a CPU, multiplies bf16 as if the bits
were integers and rounds float32 to bf16 towards zero, so products and casts have one place each.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# The logit of a hidden key, and the peak of a row that has seen no key yet. Both are finite, so
# no difference of them is NaN, and the peak is far above: 2^(HIDDEN - FLOOR) is exactly 0.
HIDDEN = tl.constexpr(-1e30)
FLOOR = tl.constexpr(-1e29)
# Stands for the lse of a row that sees no key in the backward: no weight survives it.
NO_KEY = tl.constexpr(1e30)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Matrix product with float32 sums."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr):
    """Add a matrix product to float32 sums."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Float32 values in another float type, rounded to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def load_rows(
    base,
    offsets,
    stride,
    n_rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Load a (rows, BLOCK) tile of vectors of SIZE numbers; 0 past SIZE and, if bounded, n_rows."""
    columns = tl.arange(0, BLOCK)
    pointers = base + offsets[:, None] * stride + columns[None, :]
    if BOUNDED and BLOCK > SIZE:
        inside = (offsets < n_rows)[:, None] & (columns < SIZE)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    elif BOUNDED:
        return tl.load(pointers, mask=(offsets < n_rows)[:, None], other=0.0)
    elif BLOCK > SIZE:
        return tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(base, offsets, stride, n_rows, x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store a float32 (rows, BLOCK) tile in the type of the pointer, up to n_rows and SIZE."""
    columns = tl.arange(0, BLOCK)
    inside = (offsets < n_rows)[:, None] & (columns < SIZE)[None, :]
    pointers = base + offsets[:, None] * stride + columns[None, :]
    tl.store(pointers, narrow(x, base.dtype.element_ty), mask=inside)


@triton.jit
def load_tile(
    Tiles,
    b,
    h,
    begin,
    base,
    offsets,
    stride,
    n_rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """Load rows begin.. of a head, through a descriptor, or by `load_rows` where it is None.

    `base` points to row begin. Past the end of the tensor a descriptor reads 0, but from n_rows
    up to there it reads what the memory holds, NaN included; CLEARED turns that into 0.
    """
    if Tiles is None:
        return load_rows(base, offsets, stride, n_rows, SIZE, BLOCK, BOUNDED)
    else:
        x = Tiles.load([b, h, begin, 0]).reshape(offsets.shape[0], BLOCK)
        if CLEARED:
            x = tl.where((offsets < n_rows)[:, None], x, 0.0)
        return x


@triton.jit
def store_tile(
    Tiles,
    b,
    h,
    begin,
    base,
    offsets,
    stride,
    n_rows,
    x,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store rows begin.. of a head: the counterpart of `load_tile`."""
    if Tiles is None:
        store_rows(base, offsets, stride, n_rows, x, SIZE, BLOCK)
    else:
        rows = narrow(x, base.dtype.element_ty)
        Tiles.store([b, h, begin, 0], rows.reshape(1, 1, offsets.shape[0], BLOCK))


@triton.jit
def squash(x):
    """Hyperbolic tangent; it is 1 in float32 long before the power is cut off."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(x * (2.0 * LOG2E), 64.0)))


@triton.jit
def logits(x, i, j, scale, softcap, slope):
    """Base-2 logits from plain products, and tanh of the soft-cap (the products without one).

    i and j are float positions from any common origin; slope is in base 2.
    """
    if softcap is not None:
        squashed = squash(x * (scale / softcap))
        s = squashed * (softcap * LOG2E)
    else:
        squashed = x
        s = x * (scale * LOG2E)
    if slope is not None:
        s -= slope * tl.abs(i - j)
    return s, squashed


@triton.jit
def visible(
    i,
    j,
    start,
    end,
    window,
    sinks,
    prefix,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Whether key j is seen from row i, whose document is start..end; broadcasts its arguments."""
    seen = j < end
    if DOCUMENTS:
        seen = seen & (j >= start)
    if CAUSAL:
        past = j <= i
        if window is not None:
            near = i - j < window
            if sinks is not None:
                near = near | (j - start < sinks)
            past = past & near
        if prefix is not None:
            past = past | ((i - start < prefix) & (j - start < prefix))
        seen = seen & past
    return seen


@triton.jit
def length_of(KvLengths, b, S):
    """Number of valid keys of a sequence."""
    if KvLengths is None:
        return S
    else:
        return tl.minimum(tl.load(KvLengths + b).to(tl.int32), S)


@triton.jit
def document_of(DocStarts, DocEnds, i, n, b, S):
    """First and one past the last valid position of the documents of positions i."""
    if DocStarts is None:
        return i * 0, i * 0 + n
    else:
        at = tl.cast(b, tl.int64) * S + tl.minimum(tl.maximum(i, 0), S - 1)
        return tl.load(DocStarts + at), tl.minimum(tl.load(DocEnds + at), n)


@triton.jit
def key_ranges(
    first,
    n,
    b,
    T,
    S,
    DocStarts,
    DocEnds,
    window,
    sinks,
    prefix,
    CAUSAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Which tiles of keys a tile of rows visits, all as key positions.

    Returns:
        near, full, tail, stop: tiles at near..full are masked, full..tail need no mask,
            tail..stop are masked. The first three are multiples of BN.
        sink, sink_stop: masked tiles before `near`, for sinks beside a window.
    """
    low = n - T + first  # position of the first row of the tile, and of its last
    high = n - T + tl.minimum(first + BM, T) - 1
    start, end = document_of(DocStarts, DocEnds, low, n, b, S)
    last_start, last_end = document_of(DocStarts, DocEnds, high, n, b, S)
    # A row sees keys from..stop - 1 at most, and every row of the tile sees full..tail - 1.
    # Documents that begin inside the tile need no thought: they begin after `low`.
    near = start
    full = last_start
    if CAUSAL:
        stop = high + 1
        tail = low + 1
        if window is not None:
            near = tl.maximum(near, low - window + 1)
            full = tl.maximum(full, high - window + 1)
        if prefix is not None:
            near = tl.where(low - start < prefix, start, near)
            reach = tl.minimum(last_start + prefix, last_end)
            inside = high - last_start < prefix
            stop = tl.where(inside, tl.maximum(stop, reach), stop)
            all_inside = inside & (start == last_start)
            full = tl.where(all_inside, start, full)
            tail = tl.where(all_inside, tl.maximum(tail, reach), tail)
    else:
        stop = last_end
        tail = end
    stop = tl.minimum(stop, n)
    near = near // BN * BN
    full = tl.maximum((full + BN - 1) // BN * BN, near)
    tail = tl.maximum(tl.maximum(tail, 0) // BN * BN, full)
    sink = start // BN * BN
    sink_stop = sink
    if sinks is not None:
        sink_stop = tl.minimum(start + sinks, near)
    return near, full, tail, stop, sink, sink_stop


@triton.jit
def row_ranges(
    begin,
    n,
    b,
    T,
    S,
    DocStarts,
    DocEnds,
    window,
    sinks,
    prefix,
    CAUSAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Which tiles of rows see a tile of keys: the counterpart of `key_ranges`, in row numbers.

    Returns:
        first, full, tail, stop: tiles at first..full are masked, full..tail need no mask,
            tail..stop are masked. The first three are multiples of BM.
    """
    shift = n - T  # position of row 0
    last = tl.minimum(begin + BN, n) - 1
    start, end = document_of(DocStarts, DocEnds, begin, n, b, S)
    last_start, last_end = document_of(DocStarts, DocEnds, last, n, b, S)
    # Rows before the first key count to the first document.
    origin = tl.where(start == 0, tl.minimum(shift, 0), start)
    # Positions of rows: low..high - 1 see some key of the tile, full..tail - 1 see all of them.
    high = last_end
    tail = end
    if CAUSAL:
        low = begin
        full = begin + BN - 1
        if window is not None:
            high = tl.minimum(high, last + window)
            tail = tl.minimum(tail, begin + window)
            if sinks is not None:
                high = tl.where(last_start + sinks > begin, last_end, high)
        if prefix is not None:
            low = tl.where(begin - start < prefix, tl.minimum(origin, begin), low)
            reach = tl.minimum(last_start + prefix, last_end)
            high = tl.where(last_start + prefix > begin, tl.maximum(high, reach), high)
    else:
        low = origin
        full = origin
    whole = (begin + BN <= n) & (start == last_start)
    first = tl.maximum(low - shift, 0) // BM * BM
    stop = tl.where(begin < n, tl.minimum(high - shift, T), 0)
    full = tl.maximum(full - shift, 0)
    full = tl.where(whole, tl.maximum((full + BM - 1) // BM * BM, first), stop // BM * BM + BM)
    tail = tl.maximum(tl.minimum(tail - shift, T), 0) // BM * BM
    tail = tl.where(whole, tl.maximum(tail, full), full)
    return first, full, tail, stop


@triton.jit
def load_row_terms(Lse, Delta, DEntropy, row, inside, BOUNDED: tl.constexpr):
    """What the backward needs of each row, as `delta_kernel` left it; no weight outside."""
    if BOUNDED:
        lse = tl.load(Lse + row, mask=inside, other=NO_KEY)
        delta = tl.load(Delta + row, mask=inside, other=0.0)
    else:
        lse = tl.load(Lse + row)
        delta = tl.load(Delta + row)
    if DEntropy is None:
        d_entropy = tl.zeros_like(delta)
    elif BOUNDED:
        d_entropy = tl.load(DEntropy + row, mask=inside, other=0.0)
    else:
        d_entropy = tl.load(DEntropy + row)
    return lse, delta, d_entropy


@triton.jit
def d_logits(
    x,
    d_weights,
    i,
    j,
    seen,
    lse,
    delta,
    d_entropy,
    scale,
    softcap,
    slope,
    ENTROPY: tl.constexpr,
):
    """Weights p, gradient of the final logits, and of the raw ones, all of the shape of x.

    With log p from the logits, d_logit = p (d_weight - delta - d_entropy log p). `seen` is None
    where every key is visible; d_entropy is in base 2, as log p is here.
    """
    s, squashed = logits(x, i, j, scale, softcap, slope)
    if seen is not None:
        s = tl.where(seen, s, HIDDEN)
    log_p = s - lse
    p = tl.exp2(log_p)
    d_s = d_weights - delta
    if ENTROPY:
        d_s -= d_entropy * log_p
    d_s *= p
    if softcap is not None:
        d_x = d_s * (1.0 - squashed * squashed)
    else:
        d_x = d_s
    return p, d_s, d_x
