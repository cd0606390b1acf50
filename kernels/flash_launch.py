"""Launches of the flash kernels: fresh outputs, grids, tiles, and the arguments all share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.flash_backward_keys import backward_keys_kernel
from kernels.flash_backward_queries import backward_queries_kernel, delta_kernel
from kernels.flash_column_mass import column_mass_kernel
from kernels.flash_forward import forward_kernel
from kernels.flash_tiles import Tile, architecture, tile_for
from kernels.spec import ROW_STATISTICS, AttentionOutput

DESCRIPTOR_ARCHITECTURES = ("sm_90", "sm_100")
HALF_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False, kw_only=True)
class Rule:
    """The parts of a spec as the kernels want them, and the number of keys of each sequence.

    Attributes:
        starts, ends: (B, S) int32, first and one past the last position of each token's document.
    """

    kv_lengths: Tensor | None
    starts: Tensor | None
    ends: Tensor | None
    alibi_slopes: Tensor | None
    sink_logit: Tensor | None
    causal: bool
    window: int | None
    sinks: int
    prefix: int
    softcap: float | None
    scale: float
    precision: str


def forward(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, names: Sequence[str], sink_mass: Sequence[int]
) -> AttentionOutput:
    """Attention and the named statistics, lse always among them."""
    batch, heads, n_rows, _ = q.shape
    out = _rows_first(q, v.shape[3])
    wanted = {"lse", *names}
    rows = {
        name: q.new_empty(batch, heads, n_rows, dtype=torch.float32)
        for name in ROW_STATISTICS
        if name in wanted
    }
    masses = None
    if sink_mass:
        masses = q.new_empty(batch, heads, n_rows, len(sink_mass), dtype=torch.float32)
    described = describable((q, k, v, out), rule)
    tile = _tile("forward_descriptor" if described else "forward", q, v, rule)
    forward_kernel[_cdiv(n_rows, tile.rows), batch * heads](
        **_inputs(q, k, rule, tile),
        **_strides("v", v),
        **_strides("o", out),
        V=v,
        Out=out,
        QTiles=_descriptor(q, tile.rows) if described else None,
        KTiles=_descriptor(k, tile.keys) if described else None,
        VTiles=_descriptor(v, tile.keys) if described else None,
        OutTiles=_descriptor(out, tile.rows) if described else None,
        Lse=rows["lse"],
        Entropy=rows.get("entropy"),
        EntropyTokens=rows.get("entropy_tokens"),
        MaxLogit=rows.get("max_logit"),
        MaxProb=rows.get("max_prob"),
        NullMass=rows.get("null_mass"),
        MeanDistance=rows.get("mean_distance"),
        SinkMass=masses,
        SinkLogit=_float32(rule.sink_logit),
        H=heads,
        DV=v.shape[3],
        BLOCK_DV=_block(v.shape[3]),
        COUNTS=tuple(sink_mass),
    )
    return AttentionOutput(out=out, sink_mass=masses, **rows)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    results: AttentionOutput,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    d_entropy: Tensor | None,
    *,
    slope_gradient: bool,
    received: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, slopes and sink logit from those of out, lse and entropy.

    `results` holds what `forward` returned: out, lse, and entropy if its gradient is given. The
    last result is the column mass, (B, H, S) float32, where `received` asks for it.
    """
    if d_out is None:
        d_out = torch.zeros_like(results.out)
    if d_out.stride(3) != 1:
        d_out = d_out.contiguous()
    d_lse = None if d_lse is None else d_lse.contiguous()
    d_entropy = None if d_entropy is None else d_entropy.contiguous()
    terms, d_sink_logit = _row_terms(rule, results, d_out, d_lse, d_entropy)
    d_k, d_v, mass = _backward_keys(q, k, v, rule, d_out, terms, received=received)
    d_q, d_slopes = _backward_queries(q, k, v, rule, d_out, terms, slope_gradient=slope_gradient)
    return d_q, d_k, d_v, d_slopes, d_sink_logit, mass


def column_mass(q: Tensor, k: Tensor, lse: Tensor, rule: Rule) -> Tensor:
    """Weight that each key receives from all rows: (B, H, S) float32."""
    batch, heads = q.shape[:2]
    mass = q.new_empty(batch, heads, k.shape[2], dtype=torch.float32)
    tile = _tile("column_mass", q, q, rule)
    column_mass_kernel[_cdiv(k.shape[2], tile.keys), batch * heads](
        **_inputs(q, k, rule, tile), Lse=lse.float().contiguous(), Mass=mass, H=heads
    )
    return mass


def _row_terms(
    rule: Rule,
    results: AttentionOutput,
    d_out: Tensor,
    d_lse: Tensor | None,
    d_entropy: Tensor | None,
) -> tuple[dict[str, Tensor | None], Tensor | None]:
    """What the other kernels need of every row, by argument; and d_sink_logit."""
    out, lse = results.out, results.lse
    assert lse is not None
    batch, heads, n_rows, value_size = out.shape
    tile = _tile("delta", out, out, rule)
    n_tiles = _cdiv(n_rows, tile.rows)
    delta, base_lse = torch.empty_like(lse), torch.empty_like(lse)
    base_d_entropy = None if d_entropy is None else torch.empty_like(lse)
    parts = None
    if rule.sink_logit is not None:
        parts = lse.new_empty(batch, heads, n_tiles)
    delta_kernel[n_tiles, batch * heads](
        **_strides("o", out),
        **_strides("do", d_out),
        Out=out,
        DOut=d_out,
        Lse=lse,
        Entropy=results.entropy,
        DLse=d_lse,
        DEntropy=d_entropy,
        Delta=delta,
        BaseLse=base_lse,
        BaseDEntropy=base_d_entropy,
        SinkLogit=_float32(rule.sink_logit),
        DSinkLogit=parts,
        H=heads,
        T=n_rows,
        DV=value_size,
        BLOCK_DV=_block(value_size),
        BM=tile.rows,
        num_warps=tile.warps,
    )
    terms = {"Lse": base_lse, "Delta": delta, "DEntropy": base_d_entropy}
    return terms, _per_head(parts, rule.sink_logit)


def _backward_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    d_out: Tensor,
    terms: dict[str, Tensor | None],
    *,
    received: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    tile = _tile("backward_keys", q, v, rule)
    batch, kv_heads, n_keys, _ = k.shape
    n_tiles = _cdiv(n_keys, tile.keys)
    splits = _group_splits(n_tiles * batch * kv_heads, q.shape[1] // kv_heads, q.device)
    dtype = k.dtype if splits == 1 else torch.float32
    d_k = k.new_empty(splits, *k.shape, dtype=dtype)
    d_v = v.new_empty(splits, *v.shape, dtype=dtype)
    parts = None
    if received:  # a tile of keys may see no row; no head is in two splits
        parts = q.new_zeros(2, batch, q.shape[1], n_keys, dtype=torch.float32)
    backward_keys_kernel[n_tiles, batch * kv_heads, splits](
        **_inputs(q, k, rule, tile),
        **_strides("v", v),
        **_strides("do", d_out),
        V=v,
        DOut=d_out,
        **terms,
        DKeys=d_k,
        DValues=d_v,
        ColumnMass=parts,
        B=batch,
        Hkv=kv_heads,
        SPLITS=splits,
        DV=v.shape[3],
        BLOCK_DV=_block(v.shape[3]),
    )
    mass = None if parts is None else parts.sum(0)
    if splits == 1:
        return d_k[0], d_v[0], mass
    return d_k.sum(0).to(k.dtype), d_v.sum(0).to(v.dtype), mass


def _backward_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    d_out: Tensor,
    terms: dict[str, Tensor | None],
    *,
    slope_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    batch, heads, n_rows, head_size = q.shape
    tile = _tile("backward_queries", q, v, rule)
    n_tiles = _cdiv(n_rows, tile.rows)
    d_q = _rows_first(q, head_size)
    parts = None
    if slope_gradient:
        parts = q.new_empty(batch, heads, n_tiles, dtype=torch.float32)
    backward_queries_kernel[n_tiles, batch * heads](
        **_inputs(q, k, rule, tile),
        **_strides("v", v),
        **_strides("do", d_out),
        **_strides("dq", d_q),
        V=v,
        DOut=d_out,
        **terms,
        DQueries=d_q,
        DSlopes=parts,
        H=heads,
        DV=v.shape[3],
        BLOCK_DV=_block(v.shape[3]),
    )
    return d_q, _per_head(parts, rule.alibi_slopes)


def _inputs(q: Tensor, k: Tensor, rule: Rule, tile: Tile) -> dict[str, Any]:
    """The arguments that every kernel over queries and keys takes."""
    n_rows, n_keys = q.shape[2], k.shape[2]
    # What hides or shows nothing is off. No row is n_keys or more ahead of a key.
    window = rule.window if rule.window is not None and rule.window < n_keys else None
    sinks = min(rule.sinks, n_keys) or None
    precision = rule.precision
    if q.dtype != torch.float32 or architecture(q.device).startswith("gfx"):
        precision = "ieee"  # the one way to multiply halves, and float32 on ROCm
    return {
        **_strides("q", q),
        **_strides("k", k),
        "Q": q,
        "K": k,
        "KvLengths": rule.kv_lengths,
        "DocStarts": rule.starts,
        "DocEnds": rule.ends,
        "Slopes": _float32(rule.alibi_slopes),
        "T": n_rows,
        "S": n_keys,
        "scale": rule.scale,
        "softcap": rule.softcap,
        "window": window,
        "sinks": None if window is None else sinks,
        "prefix": min(rule.prefix, n_keys) or None,
        "CAUSAL": rule.causal,
        "GROUP": q.shape[1] // k.shape[1],
        "D": q.shape[3],
        "BLOCK_D": _block(q.shape[3]),
        "BM": tile.rows,
        "BN": tile.keys,
        "PRECISION": precision,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def describable(tensors: Sequence[Tensor], rule: Rule) -> bool:
    """Whether the forward can move the tiles of these tensors through descriptors.

    On sm_90 and later a descriptor hands whole tiles to the copy engine (TMA), and the kernel
    keeps no addresses in registers. Everything else goes through pointers:

    - older GPUs and ROCm, for which Triton turns a descriptor back into pointers;
    - documents and float32, which have tiles chosen for the pointers;
    - what a descriptor cannot hold: a base or a stride that is no multiple of 16 bytes, a stride
      of 0 (as `expand` leaves), and a size of 0.

    Descriptors are made on the host, so the kernel asks for no scratch memory and needs no
    `triton.set_allocator`: Triton 3.6 and 3.7 ask the allocator only for a kernel whose
    `global_scratch_size` is above 0.
    """
    return (
        architecture(tensors[0].device) in DESCRIPTOR_ARCHITECTURES
        and rule.starts is None
        and all(x.dtype in HALF_TYPES and _is_aligned(x) for x in tensors)
    )


def _is_aligned(x: Tensor) -> bool:
    strides = [stride * x.element_size() for stride in x.stride()[:-1]]
    whole = all(stride > 0 and stride % 16 == 0 for stride in strides)
    return whole and x.numel() > 0 and x.data_ptr() % 16 == 0


def _descriptor(x: Tensor, n_rows: int) -> TensorDescriptor:
    """A descriptor of tiles of n_rows vectors of a (B, heads, length, D) tensor."""
    tile = [1, 1, n_rows, _block(x.shape[3])]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), tile)


def _tile(kernel: str, q: Tensor, v: Tensor, rule: Rule) -> Tile:
    head_size = max(q.shape[3], v.shape[3])
    return tile_for(kernel, architecture(q.device), head_size, q.dtype, rule.precision)


def _strides(name: str, x: Tensor) -> dict[str, int]:
    """Strides of batch, heads and length of a (B, heads, length, D) tensor."""
    b, h, t, _ = x.stride()
    return {f"stride_{name}b": b, f"stride_{name}h": h, f"stride_{name}t": t}


def _block(size: int) -> int:
    """The power of two that a head size is padded to; matrix units need at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _group_splits(programs: int, group: int, device: torch.device) -> int:
    """Into how many parts to split the heads of a group so that the device is filled."""
    if device.type != "cuda":
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    divisors = [d for d in range(1, group + 1) if group % d == 0]
    return next((d for d in divisors if programs * d >= wanted), group)


def _rows_first(q: Tensor, size: int) -> Tensor:
    """An empty (B, H, T, size) that lies in memory as (B, T, H, size), as projections want it."""
    batch, heads, n_rows, _ = q.shape
    return q.new_empty(batch, n_rows, heads, size).transpose(1, 2)


def _float32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _per_head(parts: Tensor | None, like: Tensor | None) -> Tensor | None:
    """Sum (B, H, tiles) to the (H,) gradient of a vector."""
    if parts is None or like is None:
        return None
    return parts.sum(dim=(0, 2)).to(like.dtype)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
