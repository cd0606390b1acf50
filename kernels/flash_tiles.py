"""Tile sizes of the flash kernels: a fixed table instead of tuning at run time.

A tile that spills many registers is several times slower than the next smaller one, and what
spills depends on the architecture, the head size and the type. `python -m kernels.compile_report`
lists what the kernels need with the sizes chosen here.
"""

from typing import NamedTuple

import torch

from kernels.flash_common import INTERPRETED


class Tile(NamedTuple):
    """Rows and keys of a tile, and how it is compiled."""

    rows: int
    keys: int
    warps: int
    stages: int


INTERPRETER = Tile(rows=32, keys=32, warps=4, stages=1)
DELTA = Tile(rows=64, keys=0, warps=4, stages=1)

# For head sizes up to each of these.
HEAD_SIZES = (64, 128, 256)

HALF = {
    "sm_80": {
        "forward": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 32, 8, 2)),
        "backward_keys": (Tile(32, 64, 8, 2), Tile(32, 64, 8, 2), Tile(16, 32, 8, 1)),
        "backward_queries": (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 32, 8, 1)),
        "column_mass": (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
    },
    "sm_90": {
        "forward": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 32, 8, 2)),
        "forward_descriptor": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 32, 8, 2)),
        "backward_keys": (Tile(32, 128, 8, 2), Tile(32, 128, 8, 2), Tile(32, 64, 8, 1)),
        "backward_queries": (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
        "column_mass": (Tile(64, 128, 8, 3), Tile(64, 128, 8, 3), Tile(64, 64, 8, 2)),
    },
    "sm_100": {
        "forward": (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(128, 32, 8, 1)),
        "forward_descriptor": (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(128, 32, 8, 1)),
        "backward_keys": (Tile(32, 64, 8, 1), Tile(32, 64, 8, 1), Tile(32, 32, 8, 1)),
        "backward_queries": (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 32, 8, 1)),
        "column_mass": (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 1)),
    },
    "gfx942": {
        "forward": (Tile(128, 64, 8, 1), Tile(128, 32, 8, 1), Tile(64, 32, 8, 1)),
        "backward_keys": (Tile(32, 64, 8, 1), Tile(32, 64, 8, 1), Tile(16, 32, 8, 1)),
        "backward_queries": (Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
        "column_mass": (Tile(64, 64, 8, 1), Tile(64, 64, 8, 1), Tile(32, 64, 8, 1)),
    },
}

# Float32 takes twice the room, and three products of the matrix units for one.
FLOAT32 = {
    "forward": (Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "backward_keys": (Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)),
    "backward_queries": (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)),
    "column_mass": (Tile(32, 64, 8, 2), Tile(32, 64, 8, 2), Tile(32, 32, 8, 1)),
}

# NVIDIA's matrix units do not multiply float32 exactly, so "ieee" multiplies in plain registers.
IEEE = {
    "forward": (Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
    "backward_keys": (Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
    "backward_queries": (Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
    "column_mass": (Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
}


def tile_for(kernel: str, arch: str, head_size: int, dtype: torch.dtype, precision: str) -> Tile:
    """The tile of a kernel.

    Args:
        kernel: "forward", "forward_descriptor" (sm_90 and later, half types), "delta",
            "backward_keys", "backward_queries" or "column_mass".
        arch: what `architecture` says of the device.
        head_size: the larger of D and DV, at most 256.
        dtype: type of the inputs.
        precision: "tf32x3" or "ieee", how float32 is multiplied.
    """
    if arch == "interpreter":
        return INTERPRETER
    if kernel == "delta":
        return DELTA
    if dtype != torch.float32:
        table = HALF[arch]
    elif precision == "ieee" and not arch.startswith("gfx"):
        table = IEEE
    else:
        table = FLOAT32
    size = next(n for n, limit in enumerate(HEAD_SIZES) if head_size <= limit)
    return table[kernel][size]


def architecture(device: torch.device) -> str:
    """The row of the table that a device reads: its own, or that of the nearest older one."""
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")
