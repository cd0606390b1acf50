"""Launches of decoding: how many splits, the sums between the two kernels, and the results."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import flash_launch
from kernels.flash_common import INTERPRETED
from kernels.flash_decode import decode_kernel, merge_kernel
from kernels.flash_launch import Rule
from kernels.flash_tiles import Tile
from kernels.spec import ROW_STATISTICS, AttentionOutput

MAX_ROWS = 64  # rows of a tile: queries times the heads that share their keys
KEYS_PER_SPLIT = 256  # fewer are not worth a program of their own
MAX_SPLITS = 128
# Twice the number of multiprocessors of an H100, for devices that cannot be asked.
DEFAULT_PROGRAMS = 264


def can_decode(q: Tensor, k: Tensor, rule: Rule) -> bool:
    """Whether a call is a few queries against many keys, as `decode` takes them.

    Documents come with one query only: with more, the rows may lie in different ones.
    """
    n_rows, n_keys = q.shape[2], k.shape[2]
    rows = n_rows * (q.shape[1] // k.shape[1])
    return rows <= MAX_ROWS and n_keys > KEYS_PER_SPLIT and (rule.starts is None or n_rows == 1)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    names: Sequence[str],
    sink_mass: Sequence[int],
    block_table: Tensor | None = None,
) -> AttentionOutput:
    """Attention and the named statistics, lse always among them; the same as the forward.

    Args:
        q: (B, H, T, D), where T * H / Hkv is at most MAX_ROWS.
        k: (B, Hkv, S, D), or with a block table a pool of pages (pages, Hkv, page length, D).
        v: like k, with the head size of the values.
        rule: as for the forward; a rule with documents allows one query only.
        names: the statistics.
        sink_mass: its counts of keys.
        block_table: (B, most pages of a sequence) int32: row b lists the pages that hold the keys
            of sequence b, in order. S is then the page length times the columns, and
            `rule.kv_lengths` says how many keys there are; entries past them are never read.
    """
    batch, heads, n_rows, _ = q.shape
    kv_heads, page_length, value_size = v.shape[1:]
    n_keys = page_length if block_table is None else page_length * block_table.shape[1]
    splits = _splits(batch * kv_heads, n_keys, q.device)
    float32 = torch.float32
    wanted = {"lse", *names}
    entropy = bool({"entropy", "entropy_tokens"} & wanted)
    sums = {
        "Acc": q.new_empty(splits, batch, heads, n_rows, value_size, dtype=float32),
        "Peak": q.new_empty(splits, batch, heads, n_rows, dtype=float32),
        "Total": q.new_empty(splits, batch, heads, n_rows, dtype=float32),
        "Spread": _if(entropy, q, splits, batch, heads, n_rows),
        "Far": _if("mean_distance" in wanted, q, splits, batch, heads, n_rows),
        "Top": _if("max_logit" in wanted, q, splits, batch, heads, n_rows),
        "FirstPeak": _if(bool(sink_mass), q, batch, heads, n_rows),
        "First": _if(bool(sink_mass), q, batch, heads, n_rows, len(sink_mass)),
    }
    tile = decode_tile(n_rows * heads // kv_heads, max(q.shape[3], value_size), q)
    decode_kernel[splits, batch * kv_heads](
        **_inputs(q, k, rule, tile, n_keys),
        **flash_launch._strides("v", v),
        **sums,
        V=v,
        Table=block_table,
        stride_table=0 if block_table is None else block_table.stride(0),
        page_length=page_length,
        B=batch,
        Hkv=kv_heads,
        DV=value_size,
        BLOCK_DV=flash_launch._block(value_size),
        COUNTS=tuple(sink_mass),
    )

    out = flash_launch._rows_first(q, value_size)
    rows = {name: _if(name in wanted, q, batch, heads, n_rows) for name in ROW_STATISTICS}
    masses = _if(bool(sink_mass), q, batch, heads, n_rows, len(sink_mass))
    total_rows = batch * heads * n_rows
    block_rows = 16 if INTERPRETED else 1  # the interpreter's cost is per program
    merge_kernel[(flash_launch._cdiv(total_rows, block_rows),)](
        **sums,
        **flash_launch._strides("o", out),
        Out=out,
        Lse=rows["lse"],
        Entropy=rows["entropy"],
        EntropyTokens=rows["entropy_tokens"],
        MaxLogit=rows["max_logit"],
        MaxProb=rows["max_prob"],
        NullMass=rows["null_mass"],
        MeanDistance=rows["mean_distance"],
        SinkMass=masses,
        SinkLogit=flash_launch._float32(rule.sink_logit),
        H=heads,
        T=n_rows,
        n_rows=total_rows,
        n_splits=splits,
        DV=value_size,
        BLOCK_DV=flash_launch._block(value_size),
        BLOCK_SPLITS=1 << (splits - 1).bit_length(),
        BM=block_rows,
        COUNTS=tuple(sink_mass),
        num_warps=4,
    )
    return AttentionOutput(out=out, sink_mass=masses, **rows)


def _inputs(q: Tensor, k: Tensor, rule: Rule, tile: Tile, n_keys: int) -> dict[str, Any]:
    """The arguments shared with the other kernels, for n_keys keys that may lie in pages."""
    window = rule.window if rule.window is not None and rule.window < n_keys else None
    return flash_launch._inputs(q, k, rule, tile) | {
        "S": n_keys,
        "window": window,
        "sinks": None if window is None else min(rule.sinks, n_keys) or None,
        "prefix": min(rule.prefix, n_keys) or None,
    }


def decode_tile(rows: int, head_size: int, q: Tensor) -> Tile:
    """Tile of the kernel: all rows, and as many keys as keep enough of them on their way."""
    keys = 64 if head_size <= 128 and q.dtype != torch.float32 else 32
    if head_size > 128 and q.dtype == torch.float32:
        keys = 16
    stages = 2 if q.dtype == torch.float32 or torch.version.hip else 3
    return Tile(rows=flash_launch._block(rows), keys=keys, warps=4, stages=stages)


def _splits(tiles: int, n_keys: int, device: torch.device) -> int:
    """Parts to split the keys into, so that two programs fall to each multiprocessor."""
    programs = DEFAULT_PROGRAMS
    if device.type == "cuda":
        programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    worth = flash_launch._cdiv(n_keys, KEYS_PER_SPLIT)
    return max(1, min(flash_launch._cdiv(programs, tiles), worth, MAX_SPLITS))


def _if(wanted: bool, like: Tensor, *shape: int) -> Tensor | None:
    """A fresh float32 tensor, or None."""
    return like.new_empty(shape, dtype=torch.float32) if wanted else None
