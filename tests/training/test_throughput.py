"""Tokens per second and MFU count what they say, and nothing is guessed."""

import contextlib

import pytest
import torch

from training.throughput import Meter, mfu, peak_flops

BF16 = torch.bfloat16


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_evaluation_and_saving_do_not_count() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    clock.now += 2
    meter.add(1000)
    with meter.paused():
        clock.now += 50
    clock.now += 2
    meter.add(1000)
    assert meter.seconds == 4
    assert meter.tokens_per_s() == 500
    assert meter.average_tokens_per_s() == 500


def test_a_failing_pause_still_ends() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    with contextlib.suppress(OSError), meter.paused():
        clock.now += 5
        raise OSError
    assert meter.seconds == 0


def test_the_recent_rate_forgets_and_the_average_does_not() -> None:
    clock = Clock()
    meter = Meter(window=2, clock=clock)
    for seconds in (10, 1, 1):
        clock.now += seconds
        meter.add(60)
    assert meter.tokens_per_s() == 60
    assert meter.average_tokens_per_s() == 15


def test_before_the_first_step_the_rate_is_zero() -> None:
    meter = Meter()
    assert meter.tokens_per_s() == 0
    assert meter.average_tokens_per_s() == 0


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_devices(name: str, tflops: float) -> None:
    assert peak_flops(name, BF16) == tflops * 1e12
    assert peak_flops(name, torch.float32) is None


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "mps",
        "NVIDIA A10G",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
    ],
)
def test_unknown_devices_have_no_peak_and_no_mfu(name: str) -> None:
    peak = peak_flops(name, BF16)
    assert peak is None
    assert mfu(1e5, 1e9, peak) is None


def test_an_override_serves_any_device_and_type() -> None:
    assert peak_flops("cpu", torch.float32, override_tflops=2.0) == 2e12
    assert peak_flops("NVIDIA H200", BF16, override_tflops=800.0) == 8e14


def test_mfu_is_the_share_of_all_devices_together() -> None:
    # 8 devices of 100 TFLOP/s, 6 GFLOP per token: 400 TFLOP/s are half of the peak.
    assert mfu(4e14 / 6e9, 6e9, 1e14, world=8) == pytest.approx(0.5)
