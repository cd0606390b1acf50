"""Linear layers for a handful of rows, written so that a compiler makes one pass over the weights.

A library's product of a matrix and a few rows stays well below the speed of the memory, and is a
call of its own. Here the product is a sum that the compiler fuses with what surrounds it:

- up to FEW_ROWS rows, a sum for each of them, all inside one walk through the matrix: what has
  been read of it serves all rows;
- up to MANY_ROWS rows, the rows lie side by side in the machine's vectors, so that a number of the
  matrix multiplies all rows at once.

`Int8Linear` stores a matrix in a quarter of the bytes. It is the one that is not exact.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.fusion import in_memory
from model.decoder import Decoder

FEW_ROWS = 8
MANY_ROWS = 32
VECTOR = 16  # numbers in the widest vector: rows are filled up to a multiple of it
BLOCKS = 8  # parts of a matrix that are read side by side for many rows
BLOCKS_OF_ONE = 4  # and for one, which keeps the memory busy where a matrix is LARGE
LARGE = 1 << 18  # numbers; smaller matrices stay in a cache and are better read in one go
INT8_LARGEST = 127


def with_linear_layers(model: Decoder, make: Callable[[nn.Linear], nn.Module]) -> Decoder:
    """Copy a model, sharing its parameters, with every linear layer replaced by `make(layer)`.

    The copy is in evaluation mode, whatever becomes of the model. Layers of a class derived from
    nn.Linear, or with hooks, compute something else and stay as they are.
    """
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    twin = copy.deepcopy(model, memo=shared)
    for module in list(twin.modules()):
        for name, child in module.named_children():
            has_hooks = child._forward_hooks or child._forward_pre_hooks
            if type(child) is nn.Linear and not has_hooks:
                setattr(module, name, make(child))
    return twin.eval()


class RowsLinear(nn.Module):
    """x Wᵀ + b, made for inputs of few rows and a compiler that fuses the sum."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., N)."""
        n_rows = math.prod(x.shape[:-1])
        fuses = torch.compiler.is_compiling() and not torch.is_autocast_enabled(x.device.type)
        if n_rows > MANY_ROWS or not fuses:
            return F.linear(x, self.weight, self.bias)
        rows = x.flatten(0, -2)
        product = row_by_row if n_rows <= FEW_ROWS else side_by_side
        y = product(rows, self.weight).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def row_by_row(rows: Tensor, weight: Tensor) -> Tensor:
    """(R, C) and (N, C) -> (R, N): a sum for every row, all in one walk through the matrix."""
    alone = len(rows) == 1 and weight.numel() >= LARGE
    blocks = _blocks(weight, BLOCKS_OF_ONE if alone else 1)
    sums = [torch.cat([(row * block).sum(-1) for block in blocks]) for row in in_memory(rows)]
    return torch.stack(sums)


def side_by_side(rows: Tensor, weight: Tensor) -> Tensor:
    """(R, C) and (N, C) -> (R, N): rows in the lanes of vectors, BLOCKS parts of W at a time."""
    missing = -len(rows) % VECTOR
    columns = in_memory(F.pad(rows, (0, 0, 0, missing)).T)  # (C, R rounded up)
    blocks = _blocks(weight, BLOCKS)
    sums = [(block.unsqueeze(-1) * columns).sum(1) for block in blocks]  # (N / blocks, R)
    return torch.cat(sums)[:, : len(rows)].T.contiguous()


def _blocks(weight: Tensor, n: int) -> tuple[Tensor, ...]:
    """The rows of a matrix in `n` equal parts, or in fewer where they do not divide."""
    return weight.chunk(math.gcd(len(weight), n))


class Int8Linear(nn.Module):
    """x Wᵀ + b with W in 8 bits, one scale per row of W.

    The scale makes the largest weight of a row 127, so that a weight is off by at most half a
    scale. Compiled and with few rows, x is used as it is; otherwise it is rounded to bfloat16.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / INT8_LARGEST
        # The scale is used in bfloat16, so the weights are rounded against it as it is there.
        scale = scale.to(torch.bfloat16)
        steps = (weight / scale.float()[:, None]).round().clamp(-INT8_LARGEST, INT8_LARGEST)
        self.width = weight.shape[1]
        # PyTorch's product reads rows of W in whole vectors: past their end, if they do not fill
        # the last one (wrong numbers or a crash, seen in 2.13 with AVX-512).
        self.filling = -self.width % (2 * VECTOR)
        self.register_buffer("weight", F.pad(steps.to(torch.int8), (0, self.filling)))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., N)."""
        kind, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        rows = x.flatten(0, -2)
        if len(rows) <= FEW_ROWS and torch.compiler.is_compiling():
            y = (row_by_row(rows, self.weight[:, : self.width]) * self.scale.to(x.dtype)).to(dtype)
        else:
            packed = torch.ops.aten._weight_int8pack_mm
            rounded = F.pad(rows.to(torch.bfloat16), (0, self.filling))
            y = packed(rounded, self.weight, self.scale).to(dtype)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)
