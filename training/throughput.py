"""How fast a run trains: tokens per second and model FLOPs utilisation (MFU).

Both have one meaning here. Tokens are all tokens of the optimizer step, over micro-steps and ranks;
time is wall time with evaluation and saving left out. MFU is the share of the devices' peak that
the model's own FLOPs make up (Chowdhery et al. 2022, PaLM, appendix B); recomputation does not
count, and for a device whose peak is not known there is no MFU.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# Dense 16-bit peak in TFLOP/s with float32 accumulation, without sparsity, from the vendors'
# data sheets and architecture white papers (NVIDIA Volta, Turing, Ampere GA100 and GA102, Ada,
# Hopper, Blackwell; AMD CDNA 2 and 3). The full product name must match: laptop versions, power-
# limited variants and MIG slices of the same chip are other devices. MI250X is per die, which is
# what PyTorch shows as one device.
_PEAK_TFLOPS = {
    r"Tesla T4": 65.0,
    r"Tesla V100-SXM2-(16|32)GB": 125.0,
    r"(NVIDIA )?A100-(SXM4|PCIE)-(40|80)GB": 312.0,
    r"(NVIDIA )?A100 80GB PCIe": 312.0,
    r"NVIDIA A10": 125.0,
    r"NVIDIA A30": 165.0,
    r"NVIDIA A40": 149.7,
    r"NVIDIA RTX A6000": 154.8,
    r"NVIDIA L4": 121.0,
    r"NVIDIA L40": 181.0,
    r"NVIDIA L40S": 362.0,
    r"NVIDIA H100 80GB HBM3": 989.4,
    r"NVIDIA H100 PCIe": 756.0,
    r"NVIDIA H100 NVL": 835.0,
    r"NVIDIA H200": 989.4,
    r"NVIDIA H200 NVL": 835.0,
    r"NVIDIA GH200 (120|480)GB": 989.4,
    r"NVIDIA B200": 2250.0,
    r"NVIDIA GB200": 2500.0,
    r"NVIDIA GeForce RTX 3090": 71.0,
    r"NVIDIA GeForce RTX 3090 Ti": 80.0,
    r"NVIDIA GeForce RTX 4080": 97.5,
    r"NVIDIA GeForce RTX 4090": 165.2,
    r"NVIDIA GeForce RTX 5090": 209.5,
    r"AMD Instinct MI210": 181.0,
    r"AMD Instinct MI250X": 191.5,
    r"AMD Instinct MI300X": 1307.4,
    r"AMD Instinct MI325X": 1307.4,
}


def peak_flops(name: str, dtype: torch.dtype, override_tflops: float | None = None) -> float | None:
    """Return the peak FLOP/s of one device computing in `dtype`, or None where it is not known.

    `name` is the product name (`devices.device_name`). The table covers float16 and bfloat16;
    `override_tflops`, in units of 1e12, wins over it and serves any device and type.
    """
    if override_tflops is not None:
        return override_tflops * 1e12
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    for pattern, tflops in _PEAK_TFLOPS.items():
        if re.fullmatch(pattern, name):
            return tflops * 1e12
    return None


def mfu(
    tokens_per_s: float, flops_per_token: float, peak: float | None, world: int = 1
) -> float | None:
    """Return model FLOPs utilisation, from 0 to 1, or None for an unknown `peak`.

    `flops_per_token` counts forward and backward; `peak` is one device's FLOP/s, `world` their
    number, `tokens_per_s` that of all of them together.
    """
    return None if peak is None else tokens_per_s * flops_per_token / (peak * world)


class Meter:
    """Counts tokens against training time: `start` it just before the first step.

    Read the clock only where the device has finished its work (the trainer reads the loss every
    step, which waits for it); the recent rate is over the last `window` steps.
    """

    def __init__(self, window: int = 50, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._paused = 0.0
        self._tokens = 0
        self._marks: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=window + 1)

    def start(self) -> None:
        """Start the clock, again if it was running: what came before does not count."""
        self._start, self._paused = self._clock(), 0.0

    @property
    def seconds(self) -> float:
        """Training time so far, pauses left out."""
        return self._clock() - self._start - self._paused

    @property
    def step_seconds(self) -> float:
        """Training time up to the end of the last step."""
        return self._marks[-1][0]

    def add(self, tokens: int) -> None:
        """Note the end of an optimizer step of `tokens` tokens, over all ranks and micro-steps."""
        self._tokens += tokens
        self._marks.append((self.seconds, self._tokens))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out: evaluation, saving, sampling."""
        begin = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - begin

    def tokens_per_s(self) -> float:
        """Return the rate over the recent steps; 0 before the first."""
        return _rate(self._marks[0], self._marks[-1])

    def average_tokens_per_s(self) -> float:
        """Return the rate over all steps of this process; 0 before the first."""
        return _rate((0.0, 0), self._marks[-1])


def _rate(begin: tuple[float, int], end: tuple[float, int]) -> float:
    seconds, tokens = end[0] - begin[0], end[1] - begin[1]
    return tokens / seconds if seconds > 0 else 0.0
