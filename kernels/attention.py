"""The attention contract: the two functions the rest of the project calls.

`kernels/spec.py` says what a call means, `kernels/eager.py` is the definition, and the other
backends compute the same values faster or in less memory.
"""

import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from kernels import eager, sdpa
from kernels.spec import (
    PRECISIONS,
    AttentionOutput,
    AttentionSpec,
    Stats,
    check_query_and_key,
    check_received,
    check_spec,
    check_value,
)

__all__ = [
    "BACKENDS",
    "AttentionOutput",
    "AttentionSpec",
    "Stats",
    "attention",
    "column_mass",
    "pick_backend",
]

NO_STATS = Stats()
BACKENDS = ("auto", "eager", "sdpa", "triton")


def pick_backend(device: torch.device, backend: str = "auto") -> str:
    """Return the backend that runs on `device` under this name.

    "auto" is sdpa on every device: the Triton kernels are proven in the interpreter and by
    compilation, and run by name until they have been measured on hardware.

    Raises:
        ValueError: the name is unknown, or that backend cannot run on this device.
    """
    if backend == "auto":
        return "sdpa"
    if backend == "triton":
        _flash().check_device(device)
    else:
        _module(backend)
    return backend


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    kv_lengths: Tensor | None = None,
    stats: Stats | None = None,
    received: Tensor | None = None,
    precision: str = "tf32x3",
    backend: str = "auto",
) -> AttentionOutput:
    """Weigh the values by the softmax of query-key products, and measure the weights.

    Args:
        q: (B, H, T, D). Any strides with a unit stride in the last dimension, here and below.
        k: (B, Hkv, S, D); query head h reads key/value head h // (H // Hkv).
        v: (B, Hkv, S, Dv).
        spec: who sees whom and how logits are made.
        kv_lengths: (B,) integers of at most S on the device of q: keys at or past it are
            invisible (whatever finite numbers lie there), and query row t sits at position
            kv_lengths[b] - T + t. None means S for every sequence.
        stats: which statistics to return beside the output.
        received: (B, H, S) in the type of a statistic, on the device of q, requiring grad: where
            the backward pass leaves the weight that each key received; see below.
        precision: how the Triton backend multiplies float32: "tf32x3" or "ieee".
        backend: one of BACKENDS. "auto" picks by device; any other is used or raises.

    Returns:
        The output in the type of q, computed in float32 or better, and the chosen statistics.

    The backward pass makes every weight again, so what `column_mass` would take a pass of its
    own for costs it one add per logit. It arrives as the gradient of `received`, whose values
    are never read: after `backward()`, `received.grad` holds the weight on each key summed over
    the queries. This is a measurement in the place of a gradient, not a derivative: it does not
    depend on what flows back from the loss, as long as something does (zeros count). It adds up
    as gradients do: over the calls that share one `received`, and over backward passes until
    `received.grad` is cleared. Outputs and other gradients stay as they are, except that `sdpa`
    makes a plain call in chunks, as it does for statistics, equal up to rounding.

    Raises:
        ValueError: shapes, types, strides or names do not fit; one line that names the value.
    """
    check_query_and_key(q, k)
    check_value(q, k, v)
    check_spec(q, k, spec, kv_lengths)
    if received is not None:
        check_received(q, k, received)
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; choose from {', '.join(PRECISIONS)}")
    if stats == NO_STATS:
        stats = None
    compute = _module(backend).attention
    options = {"precision": precision} if backend == "triton" else {}
    if torch.is_autocast_enabled(q.device.type):  # the types of the inputs decide, nothing else
        with torch.autocast(q.device.type, enabled=False):
            return compute(q, k, v, spec, kv_lengths, stats, received, **options)
    return compute(q, k, v, spec, kv_lengths, stats, received, **options)


def column_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    *,
    kv_lengths: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Weight that each key receives, summed over the queries: (B, H, S), without gradient.

    Args:
        q: (B, H, T, D).
        k: (B, Hkv, S, D).
        lse: (B, H, T), the statistic of that name from the same call.
        spec: as for `attention`.
        kv_lengths: as for `attention`.
        backend: as for `attention`.

    Raises:
        ValueError: shapes, types, strides or names do not fit; one line that names the value.
    """
    check_query_and_key(q, k)
    check_spec(q, k, spec, kv_lengths)
    if lse.shape != q.shape[:3]:
        raise ValueError(f"lse has shape {tuple(lse.shape)}; it must be {tuple(q.shape[:3])}")
    module = _module(backend)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return module.column_mass(q, k, lse, spec, kv_lengths)


def _module(backend: str) -> ModuleType:
    """The module of a backend, or of the one that "auto" stands for."""
    if backend in ("auto", "sdpa"):
        return sdpa
    if backend == "eager":
        return eager
    if backend == "triton":
        return _flash()
    raise ValueError(f"unknown attention backend {backend!r}; choose from {', '.join(BACKENDS)}")


def _flash() -> ModuleType:
    """The Triton backend, which is imported only where it is used."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError("attention backend 'triton' needs Triton, which is not installed")
    from kernels import flash_backend

    return flash_backend
