"""The benchmark of what looking at the heads costs: its arithmetic, its peer, and one small run."""

import importlib
from types import ModuleType

import pytest
import torch

from analysis.row_stats import wanted_stats
from kernels.attention import AttentionSpec, attention
from model.config import ModelConfig


@pytest.fixture
def benchmark() -> ModuleType:
    return importlib.import_module("telemetry_overhead")


@pytest.fixture
def memory() -> ModuleType:
    return importlib.import_module("telemetry_memory")


def test_times_at_another_batch_lie_on_a_straight_line(benchmark: ModuleType) -> None:
    assert benchmark.at_batch(32, (2, 1.2), (8, 1.8)) == pytest.approx(4.2)
    assert benchmark.at_batch(8, (2, 1.2), (8, 1.8)) == 1.8


def test_the_share_counts_early_looks_and_the_first_probe(benchmark: ModuleType) -> None:
    config = benchmark.defaults()
    config.train.max_steps, config.train.eval_every, config.telemetry.every = 100, 40, 20
    assert benchmark.cadence(config) == (100, 16, 4)  # probes at 0, 40, 80 and 100
    assert benchmark.share(config, 2.0, 0.5, 5.0) == (pytest.approx(0.04), pytest.approx(0.1))


def test_the_peer_computes_the_statistics_that_a_look_asks_for(benchmark: ModuleType) -> None:
    q, k = torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 4)
    stats = wanted_stats(ModelConfig(vocab_size=8))
    ours = attention(q, k, k, AttentionSpec(), stats=stats, backend="eager")
    assert ours.sink_mass is not None
    mass = ours.sink_mass.unbind(-1)
    expected = (ours.entropy_tokens, ours.max_logit, ours.max_prob, ours.mean_distance, *mass)
    for found, wanted in zip(benchmark.matrix_statistics(q, k), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_a_small_run_prints_parts_total_and_limit(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "CONTEXT", 32)
    monkeypatch.setattr(benchmark, "BATCHES", {"nano": (2, 4)})
    assert benchmark.main(["--models", "nano", "--pairs", "2", "--probes", "1"]) in (0, 1)
    printed = capsys.readouterr().out
    for words in ("attention's statistics", "sums", "writing", "a probe", "limit 3%"):
        assert words in printed


@pytest.mark.slow
def test_twice_the_context_takes_about_twice_the_memory(memory: ModuleType) -> None:
    short, long = memory.measured(4096, look=True), memory.measured(8192, look=True)
    assert 0 < long < 2.3 * short
    assert long < memory.N_HEAD * 8192**2 * 4 / 2  # half of one layer's matrix of weights
