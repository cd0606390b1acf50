"""Live memory of the sdpa backend grows linearly with the length, forward and backward."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kernels.attention import AttentionSpec, Stats, attention

STATS = Stats(lse=True, entropy=True, mean_distance=True, max_logit=True, sink_mass=(1, 4))
B, H, HKV, D = 1, 2, 1, 32


def peak_bytes(
    n: int,
    options: dict,
    document_length: int | None,
    backend: str = "sdpa",
    stats: Stats | None = STATS,
) -> int:
    """Most bytes alive at once in a forward and backward over n tokens, inputs not counted."""
    q = torch.randn(B, H, n, D, requires_grad=True)
    k, v = (torch.randn(B, HKV, n, D, requires_grad=True) for _ in range(2))
    documents = None
    if document_length is not None:
        documents = (torch.arange(n) // document_length).expand(B, n)
    spec = AttentionSpec(documents=documents, **options)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = attention(q, k, v, spec, stats=stats, backend=backend)
        loss = output.out.sum()
        if output.entropy is not None:
            loss = loss + output.entropy.sum()
        loss.backward()
    assert profiler.profiler is not None
    live = peak = 0
    events = profiler.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    for _, change in sorted(changes, key=lambda time_and_bytes: time_and_bytes[0]):
        live += change
        peak = max(peak, live)
    return peak


CALLS = {
    "causal": ({}, None),
    "window": ({"window": 256, "sinks": 4}, None),
    "documents": ({}, 300),
}


@pytest.mark.parametrize(("options", "document_length"), CALLS.values(), ids=CALLS.keys())
def test_memory_is_linear_in_the_length(options: dict, document_length: int | None) -> None:
    short, long = (peak_bytes(n, options, document_length) for n in (1024, 4096))
    assert long < 4.4 * short
    assert long < H * 4096 * 4096 * 4 / 4, "a quarter of one matrix of logits"


def test_memory_of_plain_calls_is_linear_too() -> None:
    short, long = (peak_bytes(n, {}, None, stats=None) for n in (1024, 4096))
    assert long < 4.4 * short


def test_the_measure_sees_a_whole_matrix() -> None:
    short, long = (peak_bytes(n, {}, None, backend="eager") for n in (256, 1024))
    assert long > 12 * short
    assert long > H * 1024 * 1024 * 4


@pytest.mark.slow
@pytest.mark.parametrize(("options", "document_length"), CALLS.values(), ids=CALLS.keys())
def test_memory_is_linear_up_to_32k(options: dict, document_length: int | None) -> None:
    peaks = {n: peak_bytes(n, options, document_length) for n in (8192, 16384, 32768)}
    print({n: f"{peak / 2**20:.0f} MiB" for n, peak in peaks.items()})
    assert peaks[16384] < 2.1 * peaks[8192]
    assert peaks[32768] < 2.1 * peaks[16384]
    per_token = peaks[32768] / 32768
    inputs = (H + 2 * HKV) * D * 4
    assert per_token < 12 * inputs
