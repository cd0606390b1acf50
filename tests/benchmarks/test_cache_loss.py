"""The benchmark of what quantised caches cost: its loss against a slow one, and one small run."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from model.caches import CacheOptions
from tests.model.tiny import tiny_model, tiny_tokens
from tests.training.runs import run as train_run


@pytest.fixture
def benchmark() -> ModuleType:
    return importlib.import_module("cache_loss")


def test_the_loss_is_that_of_the_tokens_that_see_a_quantised_one(benchmark: ModuleType) -> None:
    model = tiny_model(context_length=20, init_std=0.4)
    tokens = tiny_tokens(2, 21)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    each = F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    options = {"sinks": 2, "group": 5}
    full, *quantised = (
        benchmark.read_loss(model, tokens, CacheOptions(kind=kind, **options))
        for kind in benchmark.KINDS
    )
    assert full == pytest.approx(each[:, 7:].mean().item(), rel=1e-5)
    off = [abs(loss - full) for loss in quantised]
    assert 1e-6 < off[0] < off[1] < 0.1 * full


def test_a_small_run_prints_three_losses(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    run = train_run(tmp_path)
    arguments = ["cache_loss.py", "--run", str(run), "--texts", "2", "--sinks", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--group", "4"])
    benchmark.main()
    out = capsys.readouterr().out
    assert "22 tokens after the first 5 of 2 texts" in out
    losses = re.findall(r"^(\w+): (\d+\.\d{4}) bits per byte( \([+-]\d\.\d{3} %\))?$", out, re.M)
    assert [(name, bool(change)) for name, _, change in losses] == [
        ("full", False),
        ("int8", True),
        ("int4", True),
    ]
    assert all(0 < float(loss) < 10 for _, loss, _ in losses)
    monkeypatch.setattr(sys, "argv", [*arguments, "--group", "15"])
    with pytest.raises(SystemExit, match="leave nothing to quantise in a context of 16 tokens"):
        benchmark.main()
