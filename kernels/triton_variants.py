"""The variants of our kernels that are compiled without a GPU to see what they need.

A covering set: every kernel on every architecture, with no option, with all statistics and with
everything at once, and a few types and head sizes that take another way through the compiler.

On sm_90 and later, half-type forwards without documents go through tensor descriptors, and those
of an expanded batch ("expanded") through pointers, as everywhere on older GPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import flash_decode_launch, flash_launch, triton_rope
from kernels.flash_launch import Rule
from kernels.spec import ROW_STATISTICS, AttentionOutput
from kernels.triton_compile import TARGETS

BATCH, LENGTH, HEADS, KV_HEADS = 2, 4096, 16, 4
SINK_MASS = (1, 4, 16)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel, compiled for one architecture.

    Attributes:
        kernel: name of the kernel, without "_kernel".
        options: what is on, in words.
        head_size: D and Dv.
        dtype: type of the inputs, in Triton's short form.
        run: launches the kernel (and maybe others beside it) on the meta device.
    """

    arch: str
    kernel: str
    options: str
    head_size: int
    dtype: str
    run: Callable[[], object]


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "statistics": {"names": ROW_STATISTICS, "sink_mass": SINK_MASS},
    "statistics, expanded": {
        "names": ROW_STATISTICS,
        "sink_mass": SINK_MASS,
        "expanded": True,
    },
    "statistics, ieee": {"names": ROW_STATISTICS, "sink_mass": SINK_MASS, "precision": "ieee"},
    "entropy": {"names": ("lse", "entropy")},  # with gradients of both
    "received": {"received": True},
    "everything": {"names": ROW_STATISTICS, "sink_mass": SINK_MASS, "masks": True},
}


def variants() -> list[Variant]:
    """All variants, architecture by architecture."""
    listed = []
    for arch in TARGETS:
        for kernel, options, head_size, dtype in _everywhere():
            listed.append(_variant(arch, kernel, options, head_size, dtype))
    for arch in ("sm_90", "sm_100"):
        listed.append(_variant(arch, "forward", "plain", 64, "bf16"))
        for head_size in (64, 128):
            listed.append(_variant(arch, "forward", "statistics, expanded", head_size, "bf16"))
    for kernel, options, head_size, dtype in (
        ("forward", "statistics, ieee", 64, "fp32"),
        ("forward", "statistics", 256, "bf16"),
        ("forward", "plain", 80, "fp16"),
        ("backward_keys", "plain", 64, "fp32"),
        ("backward_queries", "plain", 64, "bf16"),
        ("backward_keys", "received", 128, "bf16"),
        ("column_mass", "plain", 128, "bf16"),
        ("decode", "everything", 128, "bf16"),
        ("merge", "everything", 128, "bf16"),
        ("rotate", "plain", 128, "bf16"),
    ):
        listed.append(_variant("sm_90", kernel, options, head_size, dtype))
    return listed


def _everywhere() -> list[tuple[str, str, int, str]]:
    return [
        ("forward", "plain", 128, "bf16"),
        ("forward", "statistics", 64, "bf16"),
        ("forward", "statistics", 128, "bf16"),
        ("forward", "everything", 128, "bf16"),
        ("forward", "statistics", 64, "fp32"),
        ("backward_keys", "plain", 64, "bf16"),
        ("backward_keys", "entropy", 128, "bf16"),
        ("backward_keys", "everything", 128, "bf16"),
        ("backward_queries", "entropy", 128, "bf16"),
        ("backward_queries", "everything", 128, "bf16"),
        ("decode", "statistics", 128, "bf16"),
    ]


def _variant(arch: str, kernel: str, options: str, head_size: int, dtype: str) -> Variant:
    calls: dict[str, Callable[..., object]] = {
        "forward": _forward,
        "column_mass": _column_mass,
        "decode": _decode,
        "merge": _decode,
        "rotate": _rotate,
    }
    call = calls.get(kernel, _backward)
    run = partial(call, head_size, DTYPES[dtype], **OPTIONS[options])
    return Variant(
        arch=arch, kernel=kernel, options=options, head_size=head_size, dtype=dtype, run=run
    )


def _heads(count: int, head_size: int, dtype: torch.dtype) -> Tensor:
    """A (B, heads, T, D) tensor as a projection makes it, without memory."""
    return torch.empty(BATCH, LENGTH, count, head_size, dtype=dtype, device="meta").transpose(1, 2)


def _qkv(head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    key, value = (_heads(KV_HEADS, head_size, dtype) for _ in range(2))
    return _heads(HEADS, head_size, dtype), key, value


def _rule(head_size: int, *, masks: bool = False, precision: str = "tf32x3") -> Rule:
    tokens = torch.empty(BATCH, LENGTH, dtype=torch.int32, device="meta")
    per_head = torch.empty(HEADS, device="meta")
    return Rule(
        kv_lengths=torch.empty(BATCH, dtype=torch.int32, device="meta") if masks else None,
        starts=tokens if masks else None,
        ends=tokens if masks else None,
        alibi_slopes=per_head if masks else None,
        sink_logit=per_head if masks else None,
        causal=True,
        window=LENGTH // 4 if masks else None,
        sinks=4 if masks else 0,
        prefix=7 if masks else 0,
        softcap=30.0 if masks else None,
        scale=head_size**-0.5,
        precision=precision,
    )


def _forward(
    head_size: int,
    dtype: torch.dtype,
    *,
    names: tuple[str, ...] = (),
    sink_mass: tuple[int, ...] = (),
    expanded: bool = False,
    **options: Any,
) -> AttentionOutput:
    q, k, v = _qkv(head_size, dtype)
    if expanded:
        q, k, v = (x[:1].expand_as(x) for x in (q, k, v))
    return flash_launch.forward(q, k, v, _rule(head_size, **options), names, sink_mass)


def _backward(
    head_size: int,
    dtype: torch.dtype,
    *,
    names: tuple[str, ...] = (),
    sink_mass: tuple[int, ...] = (),
    received: bool = False,
    **options: Any,
) -> object:
    q, k, v = _qkv(head_size, dtype)
    rule = _rule(head_size, **options)
    row = torch.empty(BATCH, HEADS, LENGTH, device="meta")
    results = AttentionOutput(out=torch.empty_like(q), lse=row, entropy=row)
    d_row = row if names else None
    learned = rule.alibi_slopes is not None
    return flash_launch.backward(
        q,
        k,
        v,
        rule,
        results,
        results.out,
        d_row,
        d_row,
        slope_gradient=learned,
        received=received,
    )


def _decode(
    head_size: int,
    dtype: torch.dtype,
    *,
    names: tuple[str, ...] = (),
    sink_mass: tuple[int, ...] = (),
    masks: bool = False,
) -> AttentionOutput:
    """One query per sequence; with everything on, the cache lies in pages."""
    q, k, v = _qkv(head_size, dtype)
    table = None
    if masks:
        k, v = (x.unflatten(2, (-1, 64)).transpose(1, 2).flatten(0, 1) for x in (k, v))
        table = torch.empty(BATCH, LENGTH // 64, dtype=torch.int32, device="meta")
    rule = _rule(head_size, masks=masks)
    return flash_decode_launch.decode(q[:, :, :1], k, v, rule, names, sink_mass, table)


def _column_mass(head_size: int, dtype: torch.dtype) -> Tensor:
    q, k, _ = _qkv(head_size, dtype)
    lse = torch.empty(BATCH, HEADS, LENGTH, device="meta")
    return flash_launch.column_mass(q, k, lse, _rule(head_size))


def _rotate(head_size: int, dtype: torch.dtype) -> object:
    q, k, _ = (x.transpose(1, 2) for x in _qkv(head_size, dtype))
    table = torch.empty(LENGTH, 1, head_size, device="meta")
    return triton_rope.launch(q, k, table, table, False)
