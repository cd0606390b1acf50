"""The benchmark of streaming: its losses against slow ones, its texts, and one small run."""

import copy
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from data.token_files import Provenance, TokenFile, TokenFileWriter
from tests.model.slow_stream import SlowStream
from tests.model.tiny import tiny_model, tiny_tokens
from tests.training.runs import run as train_run


@pytest.fixture
def benchmark() -> ModuleType:
    return importlib.import_module("streaming")


def test_streamed_loss_is_that_of_the_definition(benchmark: ModuleType) -> None:
    model = tiny_model(context_length=6, init_std=0.4)
    tokens = tiny_tokens(2, 30)
    for sinks in (0, 2):
        slow = SlowStream(copy.deepcopy(model).double(), 6, sinks)
        logits = slow.all_logits(tokens[:, :-1])[:, 5:]
        expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 6:].flatten()).item()
        assert benchmark.streamed(model, tokens, sinks) == pytest.approx(expected, rel=1e-5)


def test_read_anew_loss_is_that_of_every_window(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "WINDOWS_AT_A_TIME", 7)
    model = tiny_model(context_length=6, init_std=0.4)
    tokens = tiny_tokens(2, 20)
    each = []
    with torch.no_grad():
        for row in tokens:
            for target in range(6, 20):
                logits = model(row[None, target - 6 : target]).logits[0, -1]
                each.append(F.cross_entropy(logits, row[target]).item())
    assert benchmark.read_anew(model, tokens) == pytest.approx(sum(each) / len(each), rel=1e-5)


def test_of_one_layer_a_window_alone_loses_nothing(benchmark: ModuleType) -> None:
    """With one layer, keys and values do not depend on what came before their token."""
    model = tiny_model(context_length=6, n_layer=1, init_std=0.4)
    tokens = tiny_tokens(2, 40)
    anew = benchmark.read_anew(model, tokens)
    assert benchmark.streamed(model, tokens, 0) == pytest.approx(anew, rel=1e-5)
    assert abs(benchmark.streamed(model, tokens, 4) - anew) > 1e-3


def test_texts_are_spread_over_the_split_without_overlap(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    provenance = Provenance(
        split="val",
        source={},
        split_rule="",
        tokenizer_sha256="",
        vocab_size=200,
        bos_id=None,
        eos_id=None,
    )
    with TokenFileWriter(tmp_path, provenance) as writer:
        writer.begin_document()
        writer.add(range(100))
        writer.count_text(n_characters=100, n_bytes=100)
    file = TokenFile(tmp_path, "val")
    assert benchmark.texts(file, 3, 20)[:, 0].tolist() == [0, 33, 66]
    assert benchmark.texts(file, 9, 30).shape == (3, 30)
    with pytest.raises(ValueError, match="val split has 100 tokens, one text needs 101"):
        benchmark.texts(file, 1, 101)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # on loading the compiler
def test_a_small_run_prints_memory_and_a_table(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    run = train_run(tmp_path)
    arguments = ["--run", str(run), "--beside", str(run), "--tokens", "60", "--texts", "2"]
    monkeypatch.setattr(sys, "argv", ["streaming.py", *arguments, "--times", "3"])
    benchmark.main()
    out = capsys.readouterr().out
    cache = 2 * 2 * 1 * (2 * 16 + 4) * 8 * 4
    assert "60 tokens generated in " in out
    assert f" s: cache {cache:,} bytes throughout; peak of the process " in out
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == [
        "",
        "window alone",
        "1 sink and a window",
        "2 sinks and a window",
        "4 sinks and a window",
        "window read anew",
    ]
    for row in rows[1:]:
        nats, perplexity = map(float, re.findall(r"\d+\.\d+", row)[:2])
        assert torch.tensor(nats).exp().item() == pytest.approx(perplexity, rel=1e-3)
        assert row.split("|")[2:4] == row.split("|")[4:6]  # both columns are the same run
