"""Where a run computes and in which precision: named once in the config, decided here.

Nothing here touches CUDA unless the run may use it. A name that cannot work raises one line before
any work starts; what "auto" settles on depends only on the machine.
"""

import os
import random
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import nn

from training.choices import check_choice
from training.distributed import Ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILE_MODES = ("auto", "true", "false")


def resolve_device(name: str, ranks: Ranks | None = None) -> torch.device:
    """Return the device called `name`: auto, cpu, cuda, cuda:N or mps.

    "auto" is the best there is: cuda, then mps, then cpu. With several ranks each takes the GPU of
    its local rank.

    Raises:
        ValueError: when the device is unknown, absent, or cannot be shared by the ranks.
    """
    ranks = ranks or Ranks()
    numbered = re.fullmatch(r"cuda:(\d+)", name)
    if not numbered:
        check_choice("device", name, ("auto", "cpu", "cuda", "cuda:N", "mps"))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if _has_mps() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name == "mps":
        if not _has_mps():
            raise ValueError("device=mps but this machine has no usable MPS: use device=auto")
        return torch.device("mps")
    if numbered and ranks.world > 1:
        raise ValueError(
            f"device={name} names one GPU for {ranks.world} ranks: use device=cuda, "
            "each rank takes its own"
        )
    return _resolve_cuda(name, int(numbered[1]) if numbered else ranks.local_rank)


def _resolve_cuda(name: str, index: int) -> torch.device:
    if not torch.cuda.is_available():
        reason = "sees no usable GPU" if torch.backends.cuda.is_built() else "is built without CUDA"
        raise ValueError(f"device={name} but this PyTorch {reason}: use device=auto or device=cpu")
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"device={name} needs GPU number {index}, this machine has {count}")
    return torch.device("cuda", index)


def _has_mps() -> bool:
    return torch.backends.mps.is_available()


def device_name(device: torch.device) -> str:
    """Return the product name of a GPU, or the kind of any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# --- Precision ------------------------------------------------------------------------------------


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type matrix products are computed in: auto, fp32, bf16 or fp16.

    Parameters and optimizer state stay float32; this is the type `autocast` uses. "auto" is
    bfloat16 on a GPU that has it in hardware and float32 elsewhere.

    Raises:
        ValueError: when the name is unknown or the device does not compute in that type.
    """
    check_choice("dtype", name, ("auto", *DTYPES))
    bf16_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        return torch.bfloat16 if bf16_gpu else torch.float32
    if name == "bf16" and device.type == "cuda" and not bf16_gpu:
        raise ValueError(
            f"dtype=bf16 but {device_name(device)} only emulates it: use dtype=fp16 or dtype=fp32"
        )
    if name == "fp16" and device.type == "cpu":
        raise ValueError(
            "dtype=fp16 needs a GPU, on a CPU it is slower than float32 and less exact: "
            "use dtype=fp32 or dtype=bf16"
        )
    return DTYPES[name]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return the context in which a forward pass computes its matrix products in `dtype`."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype)


def grad_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """Return the loss scaler float16 needs; for other types it does nothing.

    Use: ``scaler.scale(loss).backward()``, ``optimizers.unscale(scaler)``, then
    ``optimizers.step()`` only if the gradients are finite, then ``scaler.update()``, which lowers
    the scale after an overflow. With float16 a rare overflow is normal operation.
    """
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)


# --- Compilation ----------------------------------------------------------------------------------


def maybe_compile(
    model: nn.Module, mode: str, device: torch.device, log: Callable[[str], None] = print
) -> bool:
    """Compile `model` in place as `mode` says: auto, true or false; return whether it was.

    "auto" compiles on CUDA if a small probe works, and says why when it runs eagerly. Call this
    before `Ranks.wrap`. The state-dict names do not change.

    Raises:
        ValueError: with mode "true", when the compiler does not work here, with its reason.
    """
    mode = mode.lower()  # a YAML true arrives as "True"
    check_choice("compile", mode, COMPILE_MODES)
    if mode == "false":
        return False
    if mode == "auto" and device.type != "cuda":
        log(f"compile=auto: eager on {device.type}")
        return False
    problem = probe_compiler(device)
    if problem is not None and mode == "true":
        raise ValueError(f"compile=true but compiling fails here ({problem}): use compile=auto")
    if problem is not None:
        log(f"compile=auto: eager, because compiling fails here ({problem})")
        return False
    model.compile()
    log(f"compile={mode}: compiled")
    return True


def probe_compiler(device: torch.device) -> str | None:
    """Compile and run a small function; return None, or the reason it failed in one line.

    What may be missing is a C++ compiler, Triton, support for this GPU, Python version or platform.
    """

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    try:
        torch.compile(double)(torch.ones(8, device=device))
    except Exception as error:  # the compiler raises errors of every class
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    return None


# --- Reproducibility ------------------------------------------------------------------------------


def seed_everything(seed: int, *, deterministic: bool = False, rank: int = 0) -> None:
    """Seed Python, NumPy and PyTorch (every device), a different stream per rank.

    With `deterministic`, PyTorch uses only algorithms that repeat bit for bit, and raises where it
    has none. What is guaranteed, for equal versions of everything:

    - CPU: the same machine and thread count give the same bits, with or without the switch.
    - CUDA: the same kind of GPU gives the same bits with the switch; without it the last bits of
      gradients may differ between runs.
    - MPS, and any two different devices: close, never promised equal.

    Call it before the first use of CUDA: cuBLAS reads its setting when it starts.
    """
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = False
