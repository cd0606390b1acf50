"""The `triton` backend: flash attention in our own kernels, statistics in the same pass.

It runs on CUDA and ROCm devices, and on a CPU in Triton's interpreter, for tests.
"""

import torch
from torch import Tensor

from kernels import flash_op
from kernels.flash_common import INTERPRETED
from kernels.spec import AttentionOutput, AttentionSpec, Stats
from kernels.visibility import document_ends, document_starts

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    kv_lengths: Tensor | None,
    stats: Stats | None,
    received: Tensor | None,
    precision: str = "tf32x3",
) -> AttentionOutput:
    """Compute attention and its statistics in linear memory; see `kernels.attention`."""
    _check(q)
    stats = stats or Stats()
    results = flash_op.forward(
        q,
        k,
        v,
        kv_lengths,
        *_document_bounds(spec),
        spec.alibi_slopes,
        spec.sink_logit,
        *_numbers(spec, q.shape[3]),
        precision,
        received,
        " ".join(stats.row_names),
        list(stats.sink_mass),
    )
    wanted = ["out", *stats.row_names, *(["sink_mass"] if stats.sink_mass else [])]
    named = zip(AttentionOutput._fields, results, strict=True)
    return AttentionOutput(**{name: result for name, result in named if name in wanted})


def column_mass(
    q: Tensor, k: Tensor, lse: Tensor, spec: AttentionSpec, kv_lengths: Tensor | None
) -> Tensor:
    """Sum the weights of each key over all queries: (B, H, S); see `kernels.attention`."""
    _check(q)
    return flash_op.column_mass(
        q,
        k,
        lse,
        kv_lengths,
        *_document_bounds(spec),
        spec.alibi_slopes,
        *_numbers(spec, q.shape[3]),
        "tf32x3",
    )


def check_device(device: torch.device) -> None:
    """Raise ValueError, in one line, on a device that the kernels cannot run on."""
    if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        raise ValueError(
            f"attention backend 'triton' runs on CUDA and ROCm devices, not on {device.type}; "
            "use 'sdpa', or set TRITON_INTERPRET=1 to test it slowly on a CPU"
        )


def _check(q: Tensor) -> None:
    check_device(q.device)
    if q.dtype not in DTYPES:
        raise ValueError(
            f"attention backend 'triton' takes bfloat16, float16 or float32, not {q.dtype}; "
            "use 'sdpa' or 'eager'"
        )


def _document_bounds(spec: AttentionSpec) -> tuple[Tensor | None, Tensor | None]:
    """First and one past the last position of each token's document: (B, S) int32."""
    if spec.documents is None:
        return None, None
    starts, ends = document_starts(spec.documents), document_ends(spec.documents)
    return starts.int().contiguous(), ends.int().contiguous()


def _numbers(
    spec: AttentionSpec, head_size: int
) -> tuple[bool, int | None, int, int, float | None, float]:
    scale = spec.scale_for(head_size)
    return spec.causal, spec.window, spec.sinks, spec.prefix, spec.softcap, scale
