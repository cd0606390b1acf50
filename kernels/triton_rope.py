"""The rotation of RoPE as a Triton kernel: queries and keys of a layer in one launch.

The plain version, and the meaning, is `rotate` in `model/positions.py`. Here every element is
read once and written once; arithmetic is in float32 whatever the type of q and k.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.flash_common import INTERPRETED, narrow

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Rows (token and head) per program. The interpreter's cost is per program, whatever its size.
BLOCK_ROWS = 512 if INTERPRETED else 32


def rotate_queries_and_keys(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys to their positions.

    Channel d is paired with channel d + D/2; the result has the type of the input.

    Args:
        q: (B, T, H, D) in bfloat16, float16 or float32; D is even. Any strides.
        k: (B, T, Hkv, D), of the type of q.
        cos: (T, 1, D) or (B, T, 1, D) float32, equal in both halves of D.
        sin: the same shape; its second half is the sines, its first half their negatives.

    Raises:
        ValueError: shapes, types or devices do not fit; one line that names the value.
    """
    _check(q, k, cos, sin)
    return _rotate(q, k, cos, sin, False)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    batch, length, _, head_size = q.shape
    if (k.shape[0], k.shape[1], k.shape[3]) != (batch, length, head_size):
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in more than heads")
    if head_size % 2:
        raise ValueError(f"head size {head_size} is odd; RoPE turns pairs of channels")
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        raise ValueError(
            f"q is {q.dtype} and k {k.dtype}; the RoPE kernel takes one of bfloat16, float16, "
            "float32 for both"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if tuple(table.shape) not in ((length, 1, head_size), (batch, length, 1, head_size)):
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}; it must be {(length, 1, head_size)}, "
                "with the batch before it if sequences differ"
            )
        if table.dtype != torch.float32:
            raise ValueError(f"{name} is {table.dtype}; it must be float32")
    if {x.device for x in (k, cos, sin)} != {q.device}:
        raise ValueError(f"q is on {q.device}; k, cos and sin must be there too")


@torch.library.custom_op("glassgpt::rotate", mutates_args=())
def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backwards: bool
) -> tuple[Tensor, Tensor]:
    """Turn by the angles, or back by them: what a gradient needs, rotations being orthogonal."""
    return launch(q, k, cos, sin, backwards)


def launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backwards: bool
) -> tuple[Tensor, Tensor]:
    """Run the kernel into fresh tensors."""
    q, k, cos, sin = (_with_unit_stride(x) for x in (q, k, cos, sin))
    cos, sin = cos.expand(len(q), -1, -1, -1), sin.expand(len(q), -1, -1, -1)  # (B, T, 1, D)
    turned_q, turned_k = _new(q), _new(k)
    if q.numel() or k.numel():
        batch, length, heads, head_size = q.shape
        kv_heads = k.shape[2]
        q_blocks = triton.cdiv(length * heads, BLOCK_ROWS)
        k_blocks = triton.cdiv(length * kv_heads, BLOCK_ROWS)
        rotate_kernel[(q_blocks + k_blocks, batch)](
            q, k, cos, sin, turned_q, turned_k,
            *q.stride()[:3], *k.stride()[:3], *cos.stride()[:2], *sin.stride()[:2],
            length, heads, kv_heads,
            HALF=head_size // 2,
            BLOCK_HALF=triton.next_power_of_2(head_size // 2),
            BLOCK_ROWS=BLOCK_ROWS,
            BACKWARDS=backwards,
        )  # fmt: skip
    return turned_q, turned_k


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _new(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@_rotate.register_fake
def _rotated_shapes(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backwards: bool
) -> tuple[Tensor, Tensor]:
    return _new(q), _new(k)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, cos, sin, ctx.backwards = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor | None, ...]:
    d_q, d_k = _rotate(d_q, d_k, *ctx.saved_tensors, not ctx.backwards)
    return d_q, d_k, None, None, None


_rotate.register_autograd(_gradients, setup_context=_save_for_backward)


@triton.jit(do_not_specialize=["length"])
def rotate_kernel(
    Q,
    K,
    Cos,
    Sin,
    TurnedQ,
    TurnedK,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    cos_batch_stride,
    cos_token_stride,
    sin_batch_stride,
    sin_token_stride,
    length,
    heads,
    kv_heads,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """Turn one block of query rows or of key rows; a row is one head of one token.

    The first blocks of a sequence are queries, those behind them keys.
    """
    block = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    q_blocks = tl.cdiv(length * heads, BLOCK_ROWS)
    Cos += batch * cos_batch_stride
    Sin += batch * sin_batch_stride
    if block < q_blocks:
        turn_rows(
            Q + batch * q_batch_stride, TurnedQ + batch * length * heads * (2 * HALF), Cos, Sin,
            q_token_stride, q_head_stride, cos_token_stride, sin_token_stride,
            block, length, heads, HALF, BLOCK_HALF, BLOCK_ROWS, BACKWARDS,
        )  # fmt: skip
    else:
        turn_rows(
            K + batch * k_batch_stride, TurnedK + batch * length * kv_heads * (2 * HALF), Cos, Sin,
            k_token_stride, k_head_stride, cos_token_stride, sin_token_stride,
            block - q_blocks, length, kv_heads, HALF, BLOCK_HALF, BLOCK_ROWS, BACKWARDS,
        )  # fmt: skip


@triton.jit
def turn_rows(
    X,
    Turned,
    Cos,
    Sin,
    token_stride,
    head_stride,
    cos_token_stride,
    sin_token_stride,
    block,
    length,
    heads,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """Turn the rows of one block; the results are written contiguously."""
    rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # over (token, head)
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (rows < length * heads)[:, None] & (pairs < HALF)
    token = (rows // heads).to(tl.int64)[:, None]
    head = (rows % heads)[:, None]

    cos = tl.load(Cos + token * cos_token_stride + pairs, mask=inside)
    sin = tl.load(Sin + token * sin_token_stride + HALF + pairs, mask=inside)
    if BACKWARDS:
        sin = -sin
    first = X + token * token_stride + head * head_stride + pairs
    a = tl.load(first, mask=inside).to(tl.float32)
    b = tl.load(first + HALF, mask=inside).to(tl.float32)

    first = Turned + rows.to(tl.int64)[:, None] * (2 * HALF) + pairs
    dtype = Turned.dtype.element_ty
    tl.store(first, narrow(a * cos - b * sin, dtype), mask=inside)
    tl.store(first + HALF, narrow(b * cos + a * sin, dtype), mask=inside)
