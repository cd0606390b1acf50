"""Compile kernels for GPUs that are not there, and count what the machine code needs.

A launch on the meta device, under a driver that only pretends, shows which kernel would be
compiled with which types, alignments and constants. So what is looked at here is what would run.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources

from kernels.machine_code import PerLogit, per_logit, read_amd, read_nvidia

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

# Bytes of shared memory that one program can have.
SHARED_MEMORY = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}

# Instructions of the matrix units: their common name, and how they begin in the assembly.
MATRIX_INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma": r"mma\.sync",
    "mfma": r"v_mfma",
}

# Copies of whole tiles through a descriptor, by the copy engine of sm_90 and later.
TILE_COPY = r"cp\.async\.bulk\.tensor"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What Triton compiles for one launch."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    alignments: dict[Any, Any]
    warps: int
    stages: int

    def constant(self, name: str) -> Any:
        """Value of a constant of the kernel; None where it has none of this name."""
        names = self.kernel.arg_names
        return self.constants.get((names.index(name),)) if name in names else None


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the machine code of a kernel needs: per thread, or per program for shared memory.

    Attributes:
        spill_loads, spill_stores: instructions that move registers from and to memory.
        shared: bytes.
        matrix: how many matrix instructions there are of each kind.
        tma: instructions that copy a tile through a descriptor.
        per_logit: what the loop over tiles without masks issues; None for a kernel without logits.
    """

    registers: int
    spill_loads: int
    spill_stores: int
    shared: int
    matrix: dict[str, int]
    tma: int
    per_logit: PerLogit | None


class PretendedDriver:
    """As much of a Triton driver as is asked for before a kernel is compiled."""

    def __init__(self, arch: str):
        self.target = TARGETS[arch]
        self.device = list(TARGETS).index(arch)  # Triton remembers targets by device number

    def get_current_device(self) -> int:
        """Number of the device."""
        return self.device

    def get_current_stream(self, device: int) -> int:
        """Handle of a stream; nothing is ever put on it."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target


def launches(run: Callable[[], object], arch: str) -> list[Launch]:
    """The kernels that `run`, on meta tensors, would launch on a GPU of this architecture."""
    found = []

    def remember(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.append(
            Launch(
                kernel=fn.jit_function,
                signature=compile["signature"],
                constants=compile["constants"],
                alignments=compile["configs"][0],
                warps=compile["num_warps"],
                stages=compile["num_stages"],
            )
        )
        return True  # go no further

    with _pretended(arch, remember):
        run()
    return found


@contextmanager
def _pretended(arch: str, hook: Callable[..., bool]) -> Iterator[None]:
    """Let Triton, and what PyTorch is asked about the device, be as on this architecture."""
    target = TARGETS[arch]
    amd = target.backend == "hip"
    capability = (0, 0) if amd else divmod(target.arch, 10)
    triton.runtime.driver.set_active(PretendedDriver(arch))
    with (
        mock.patch.object(triton.knobs.runtime, "jit_cache_hook", hook),
        mock.patch.object(torch.version, "hip", "pretended" if amd else None),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
    ):
        yield


def compile_launch(launch: Launch, arch: str) -> Needs:
    """Compile, and read the machine code; raises what Triton raises when it refuses a launch."""
    source = ASTSource(
        fn=launch.kernel,
        signature=launch.signature,
        constexprs=launch.constants,
        attrs=launch.alignments,
    )
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    compiled = triton.compile(source, target=TARGETS[arch], options=options)
    shared = compiled.metadata.shared
    if shared > SHARED_MEMORY[arch]:
        raise OutOfResources(shared, SHARED_MEMORY[arch], "shared memory")
    amd = TARGETS[arch].backend == "hip"
    assembly = compiled.asm["amdgcn" if amd else "ptx"]
    counts = {name: _count(start, assembly) for name, start in MATRIX_INSTRUCTIONS.items()}
    if amd:
        registers = int(_found(r"\.vgpr_count:\s*(\d+)", assembly))
        loads, stores = _count("scratch_load", assembly), _count("scratch_store", assembly)
        code = read_amd(assembly)
    else:
        usage, listing = _read_cubin(compiled.asm["cubin"])
        registers = int(_found(r"REG:(\d+)", usage))
        loads, stores = _count(r"\bLDL", listing), _count(r"\bSTL", listing)
        code = read_nvidia(listing)
    rows, keys = launch.constant("BM"), launch.constant("BN")
    lanes = launch.warps * TARGETS[arch].warp_size
    exponentials = 2 if launch.signature.get("softcap") == "fp32" else 1
    return Needs(
        registers=registers,
        spill_loads=loads,
        spill_stores=stores,
        shared=shared,
        matrix={name: count for name, count in counts.items() if count},
        tma=_count(TILE_COPY, assembly),
        per_logit=per_logit(code, rows * keys / lanes, exponentials) if rows and keys else None,
    )


def _read_cubin(cubin: bytes) -> tuple[str, str]:
    """Resource usage and machine code, by the tool that Triton brings along."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True).stdout
            for option in ("-res-usage", "-sass")
        )
    return usage, code


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None
    return match[1]
