"""Whether an attention backend is right on this device, before anybody times it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.attention import AttentionOutput, AttentionSpec, Stats, attention, column_mass
from kernels.spec import ROW_STATISTICS

ALL_STATISTICS = Stats.of(ROW_STATISTICS, sink_mass=(1, 4, 16))
DIFFERENTIABLE = ("out", "lse", "entropy")

# Largest relative Frobenius error for inputs of unit variance: output, gradients, statistics. The
# exponential of a GPU is approximate, which shows in the statistics of half types.
BOUNDS = {
    torch.float32: (2e-6, 4e-6, 2e-6),
    torch.float16: (5e-4, 8e-4, 1e-5),
    torch.bfloat16: (4e-3, 6e-3, 1e-5),
}
VANISHING = 1e-6  # times the largest input: absolute error allowed where the true value is 0


@dataclass(frozen=True)
class Call:
    """Inputs of one call, in the type whose result is compared."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    kv_lengths: Tensor | None = None

    def exact(self) -> Call:
        """The same numbers in float64."""
        q, k, v = (x.detach().double().requires_grad_() for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)


@dataclass(frozen=True)
class Deviation:
    """Error of one result of one call: relative, and what is allowed.

    Where the true value vanishes, both are absolute.
    """

    call: str
    dtype: str
    result: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether the error is allowed; NaN is not."""
        return self.error <= self.allowed


def calls(head_sizes: list[int], device: torch.device) -> list[Call]:
    """A few small calls that take different ways through the kernels; smaller ones on a CPU."""
    length, cache, heads, kv_heads = (200, 600, 4, 2) if device.type == "cuda" else (40, 300, 2, 1)
    generator = torch.Generator(device).manual_seed(3)

    def draw(count: int, tokens: int, size: int, dtype: torch.dtype) -> Tensor:
        x = torch.randn(2, tokens, count, size, generator=generator, device=device)
        return x.to(dtype).transpose(1, 2).requires_grad_()

    def call(
        name: str,
        size: int,
        spec: AttentionSpec,
        *,
        rows: int = length,
        keys: int = length,
        dtype: torch.dtype = torch.bfloat16,
        kv_lengths: Tensor | None = None,
    ) -> Call:
        q = draw(heads, rows, size, dtype)
        k, v = draw(kv_heads, keys, size, dtype), draw(kv_heads, keys, size, dtype)
        return Call(f"{name}, D {size}", q, k, v, spec, kv_lengths)

    documents = (torch.arange(length, device=device) // 17).expand(2, -1).contiguous()
    per_head = torch.tensor([0.05, 0.1, 0.0, 0.2], device=device)[:heads]
    everything = AttentionSpec(
        window=11,
        sinks=3,
        prefix=7,
        documents=documents,
        alibi_slopes=per_head,
        softcap=20.0,
        sink_logit=per_head,
    )
    causal = AttentionSpec()
    small = min(head_sizes)
    ragged = torch.tensor([cache, cache // 2], dtype=torch.int32, device=device)
    return [
        *(call("causal", size, causal) for size in head_sizes),
        call("full", small, AttentionSpec(causal=False)),
        call("all options", small, everything),
        call("decode", small, causal, rows=1, keys=cache, kv_lengths=ragged),
        call("causal", small, causal, dtype=torch.float16),
        call("causal", small, causal, dtype=torch.float32),
    ]


def deviations(call: Call, backend: str) -> list[Deviation]:
    """Errors of output, statistics, column mass and gradients against `eager` in float64."""
    exact = call.exact()
    truth, results = results_of(exact, "eager"), results_of(call, backend)
    dtype = call.q.dtype
    size = 1 + _largest(truth["max_logit"]) / 10
    vanishing = VANISHING * max(_largest(x) for x in (exact.q, exact.k, exact.v))
    found = []
    for name, true in truth.items():
        finite = true.isfinite()
        off = (results[name].double() - true)[finite]
        output, gradient, statistic = BOUNDS[dtype]
        bound = output if name == "out" else gradient if name.startswith("d_") else statistic
        error, allowed = off.abs().max().item(), max(vanishing, bound * vanishing / VANISHING)
        if _largest(true) > vanishing:
            error, allowed = (off.norm() / true[finite].norm()).item(), size * bound
        if not (results[name].double() == true)[~finite].all():
            error = float("inf")
        kind = str(dtype).removeprefix("torch.")
        found.append(Deviation(call.name, kind, name, error, allowed))
    return found


def results_of(call: Call, backend: str) -> dict[str, Tensor]:
    """Everything a backend makes of a call, gradients through out, lse and entropy included."""
    q, k, v, spec, lengths = call.q, call.k, call.v, call.spec, call.kv_lengths
    output = attention(q, k, v, spec, kv_lengths=lengths, stats=ALL_STATISTICS, backend=backend)
    results = {name: x for name, x in output._asdict().items() if x is not None}
    results["column_mass"] = column_mass(
        q, k, results["lse"], spec, kv_lengths=lengths, backend=backend
    )
    gradients = torch.autograd.grad(
        [results[name] for name in DIFFERENTIABLE], [q, k, v], upstream(output)
    )
    results |= dict(zip(("d_q", "d_k", "d_v"), gradients, strict=True))
    return {name: x.detach() for name, x in results.items()}


def upstream(output: AttentionOutput) -> list[Tensor]:
    """Fixed gradients of out, lse and entropy, exact in every type."""
    generator = torch.Generator().manual_seed(5)
    gradients = []
    for name in DIFFERENTIABLE:
        x = getattr(output, name)
        draw = torch.randn(x.shape, generator=generator).bfloat16()
        gradients.append(draw.to(x.device, x.dtype))
    return gradients


def _largest(x: Tensor) -> float:
    finite = x.detach()[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0
