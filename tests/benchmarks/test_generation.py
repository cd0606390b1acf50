"""The benchmark of generation: both sides are one model, and its tables say what was measured."""

import importlib
import re
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from model.decoder import Decoder

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("generation")
    tiny = replace(module.SHAPE, vocab_size=64, n_layer=1, n_embd=32, mlp_dim=48, init_std=0.2)
    monkeypatch.setattr(module, "SHAPE", tiny)
    return module


def test_both_sides_are_one_model(benchmark: ModuleType) -> None:
    torch.manual_seed(0)
    ours = Decoder(benchmark.SHAPE).eval()
    tokens = torch.randint(64, (2, 9))
    with torch.inference_mode():
        theirs = benchmark.their_model(ours)(tokens).logits
        torch.testing.assert_close(ours(tokens).logits, theirs, rtol=0, atol=1e-4)
    matrices = sum(p.nbytes for p in ours.parameters() if p.ndim == 2)
    assert benchmark.weight_bytes(ours) == matrices  # tied: the embedding is the output head


def test_the_table_is_of_what_was_measured(
    benchmark: ModuleType, capsys: pytest.CaptureFixture
) -> None:
    benchmark.against_transformers(1, 8, repeats=2)
    out = capsys.readouterr().out
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \((\d+) to (\d+)\) \| ([\d.]+) ", out, re.M)
    names = ["transformers", "ours", "ours, compiled", "ours, compiled, int8", "bound (fp32)"]
    assert [row[0] for row in rows] == names
    assert rows[0][4] == "1.00"
    for _, median, least, most, _ in rows:
        assert 0 < int(least) <= int(median) <= int(most)
    assert "greedy text equal to transformers' for 8 of 8 tokens" in out


def test_median_and_range_of_speeds_and_ratios(benchmark: ModuleType) -> None:
    speeds = {
        "peer": benchmark.Speeds("peer", [10.0, 20.0, 40.0]),
        "ours": benchmark.Speeds("ours", [30.0, 40.0, 200.0]),
    }
    assert benchmark.table(speeds, "peer").splitlines()[2:] == [
        "| peer | 20 (10 to 40) | 1.00 (1.00 to 1.00) |",
        "| ours | 40 (30 to 200) | 3.00 (2.00 to 5.00) |",
    ]


@pytest.mark.parametrize("option", ["--run", "--nanogpt"])
def test_a_wrong_path_is_refused_before_anything_is_measured(
    benchmark: ModuleType, option: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", ["generation.py", option, "no/such/place"])
    with pytest.raises(SystemExit):
        benchmark.main()
    captured = capsys.readouterr()
    assert "no/such/place" in captured.err
    assert captured.out == ""
