"""Time attention calls beside each other: the sides, the clock, and the numbers it gives."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from attention_parity import ALL_STATISTICS, DIFFERENTIABLE
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import AttentionSpec, attention

FLUSH_BYTES = 512 * 2**20  # well above any GPU's cache
FLUSHES = 6  # about a millisecond on a large GPU, in which launches queue up
WARMUPS = 2

TORCH_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Shape:
    """One self-attention call: B sequences of T tokens, H heads of size D, all of them KV heads."""

    batch: int
    heads: int
    length: int
    head_size: int
    causal: bool

    @property
    def forward_flops(self) -> int:
        """4 D for each visible logit: two products, a multiply-add counting as two."""
        n = self.length
        pairs = n * (n + 1) // 2 if self.causal else n * n
        return 4 * self.head_size * self.batch * self.heads * pairs

    @property
    def backward_flops(self) -> int:
        """10 D for each visible logit: five products, however many a kernel needs."""
        return self.forward_flops * 5 // 2

    def inputs(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v and the gradient of the output: (B, H, T, D) views, as projections make them."""
        size = (self.batch, self.length, self.heads, self.head_size)
        generator = torch.Generator(device).manual_seed(11)
        draws = [torch.randn(size, generator=generator, device=device) for _ in range(4)]
        q, k, v, d_out = (x.to(dtype).transpose(1, 2) for x in draws)
        return [*(x.requires_grad_() for x in (q, k, v)), d_out]


# The results of a forward that have gradients, the output first.
Forward = Callable[[Tensor, Tensor, Tensor], list[Tensor]]


@dataclass
class Series:
    """Seconds of one side, one entry for each repeat; or why it did not run."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    refused: str = ""

    @property
    def both(self) -> list[float]:
        """Seconds of forward and backward together."""
        return [a + b for a, b in zip(self.forward, self.backward, strict=True)]


class Clock:
    """Times single calls with a cold cache: by events on a GPU, else by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self.flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """Result of the call and its seconds.

        The launches of the call queue up behind the clearing of the cache, so that the events
        measure what the GPU does and not how fast Python asks for it.
        """
        if not self.on_gpu:
            started = time.perf_counter()
            return run(), time.perf_counter() - started
        torch.cuda.synchronize()
        for _ in range(FLUSHES):
            self.flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        return result, begin.elapsed_time(end) / 1e3


def ours(backend: str, causal: bool, statistics: bool) -> Forward:
    """Our attention; with statistics, lse and entropy are trained as well."""
    spec = AttentionSpec(causal=causal)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        stats = ALL_STATISTICS if statistics else None
        output = attention(q, k, v, spec, stats=stats, backend=backend)
        return [getattr(output, name) for name in DIFFERENTIABLE] if statistics else [output.out]

    return forward


def torch_sdpa(causal: bool, backend: SDPBackend | None = None) -> Forward:
    """PyTorch's attention, by this backend alone; None leaves the choice to PyTorch."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
        grouped = q.shape[1] != k.shape[1]
        if backend is None:
            return [call(enable_gqa=grouped)]
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they say why the other backends are not chosen
            return [call(enable_gqa=grouped)]

    return forward


def flex(shape: Shape, device: torch.device) -> Forward:
    """FlexAttention, compiled for this very shape; its block mask is made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # one shape at a time: it would stop compiling after a few
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = None
    if shape.causal:
        n = shape.length
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=device)
    return lambda q, k, v: [compiled(q, k, v, block_mask=mask)]


def sides(
    shape: Shape, device: torch.device, *, with_flex: bool
) -> dict[str, Callable[[], Forward]]:
    """All that are timed, ours and ours with all statistics first."""
    causal = shape.causal
    backend = "triton" if device.type == "cuda" else "sdpa"
    found: dict[str, Callable[[], Forward]] = {
        backend: partial(ours, backend, causal, False),
        "+stats": partial(ours, backend, causal, True),
    }
    if device.type != "cuda":
        found["eager"] = partial(ours, "eager", causal, False)
        found["torch"] = partial(torch_sdpa, causal)
        return found
    for name, choice in TORCH_BACKENDS.items():
        if name != "math" or _matrices_fit(shape):
            found[name] = partial(torch_sdpa, causal, choice)
    if with_flex:
        found["flex"] = partial(flex, shape, device)
    return found


def _matrices_fit(shape: Shape) -> bool:
    """Whether about ten float32 matrices of logits take at most half of the free memory."""
    matrix = 4 * shape.batch * shape.heads * shape.length**2
    return 10 * matrix < torch.cuda.mem_get_info()[0] / 2


def measure(
    makers: Mapping[str, Callable[[], Forward]], inputs: list[Tensor], clock: Clock, repeats: int
) -> dict[str, Series]:
    """Seconds of forward and backward of all sides, taking turns; what fails is refused."""
    found = {name: Series() for name in makers}
    forwards: dict[str, Forward] = {}
    for name, make in makers.items():
        try:
            forwards[name] = make()
            for _ in range(WARMUPS):
                _once(forwards[name], inputs, clock)
        except Exception as error:  # a peer may not support a shape, or run out of memory
            found[name].refused = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
            forwards.pop(name, None)
    for repeat in range(repeats):
        names = list(forwards)
        turn = repeat % len(names) if names else 0
        for name in names[turn:] + names[:turn]:
            forward, backward = _once(forwards[name], inputs, clock)
            found[name].forward.append(forward)
            found[name].backward.append(backward)
    return found


def _once(forward: Forward, inputs: list[Tensor], clock: Clock) -> tuple[float, float]:
    q, k, v, d_out = inputs
    results, forward_seconds = clock(lambda: forward(q, k, v))
    gradients = [d_out, *(torch.ones_like(x) for x in results[1:])]
    _, backward_seconds = clock(lambda: torch.autograd.grad(results, [q, k, v], gradients))
    return forward_seconds, backward_seconds


def median_ratio(above: list[float], below: list[float]) -> float:
    """Median over the repeats of one series over another."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def spread(series: list[float]) -> float:
    """Half of the range of a series, over its median."""
    return (max(series) - min(series)) / 2 / statistics.median(series)
