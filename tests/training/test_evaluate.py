"""Evaluation: fixed windows, every token of equal weight, nothing of training touched."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from data.prepare import prepare
from data.windows import Windows
from model.decoder import Decoder
from tests.training import runs
from training.distributed import Ranks
from training.evaluate import Evaluation, evaluate, evaluate_run


def prepared(folder, **options):
    config = runs.config(folder, **options)
    text = prepare(
        config.data,
        config.tokenizer,
        context_length=config.model.context_length,
        log=lambda line: None,
    )
    config.model.vocab_size = text.tokenizer.vocab_size
    windows = Windows(text.val, config.model.context_length, config.data.mode)
    torch.manual_seed(0)
    return Decoder(config.model), windows, text.tokenizer


def run_evaluation(model, windows, tokenizer, ranks=None, **options) -> Evaluation:
    return evaluate(
        model,
        windows,
        tokenizer,
        **{"batch_size": 5, "device": torch.device("cpu"), "autocast": nullcontext} | options,
        ranks=ranks or Ranks(),
    )


def by_hand(model, windows, tokenizer) -> tuple[float, float, int]:
    """Loss, bits per byte and count, token by token."""
    nats, n_bytes, count = 0.0, 0, 0
    model.eval()
    for number in range(len(windows)):
        tokens, targets, documents = windows.batch([number])
        with torch.no_grad():
            logits = model(tokens, documents=documents).logits[0].double()
        for row, target in zip(logits, targets[0].tolist(), strict=True):
            if target >= 0:
                nats += float(torch.logsumexp(row, 0) - row[target])
                n_bytes += len(tokenizer.token_bytes[target])
                count += 1
    return nats / count, nats / math.log(2) / n_bytes, count


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tokenizer__kind": "bpe", "tokenizer__vocab_size": 300, "data__mode": "bos_aligned"},
        {"tokenizer__kind": "bpe", "tokenizer__vocab_size": 300, "data__mode": "document"},
    ],
)
def test_loss_and_bits_per_byte_match_a_loop_over_tokens(tmp_path, options):
    model, windows, tokenizer = prepared(tmp_path, **options)
    found = run_evaluation(model, windows, tokenizer)
    loss, bits, count = by_hand(model, windows, tokenizer)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(bits, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert (found.tokens, found.windows) == (count, len(windows))


def test_the_batch_size_does_not_change_the_result(tmp_path):
    model, windows, tokenizer = prepared(tmp_path)
    results = [run_evaluation(model, windows, tokenizer, batch_size=b).loss for b in (1, 7, 1000)]
    assert results == pytest.approx([results[0]] * 3, rel=1e-6)


def test_evaluation_changes_neither_random_state_nor_mode(tmp_path):
    model, windows, tokenizer = prepared(tmp_path, model__dropout=0.5)
    model.train()
    state = torch.get_rng_state()
    first = run_evaluation(model, windows, tokenizer)
    assert torch.get_rng_state().equal(state)
    assert model.training
    assert run_evaluation(model, windows, tokenizer) == first  # dropout is off


def test_ranks_share_the_windows_without_leaving_any_out(tmp_path):
    """Two ranks in turn, each holding its part back; their sums are the single rank's."""
    model, windows, tokenizer = prepared(tmp_path)
    sums = []

    class Half(Ranks):
        def all_reduce_sum(self, values):
            sums.append(np.array(values, dtype=np.float64))
            return list(values)

    for rank in range(2):
        run_evaluation(model, windows, tokenizer, ranks=Half(rank=rank, world=2))
    nats, tokens, _ = sums[0] + sums[1]
    whole = run_evaluation(model, windows, tokenizer)
    assert tokens == whole.tokens
    assert nats / tokens == pytest.approx(whole.loss, rel=1e-6)


def test_a_finished_run_is_evaluated_as_during_training(tmp_path):
    run = runs.run(tmp_path, train__eval_windows=None)
    logged = {row["step"]: row for row in runs.rows(run) if "val/loss" in row}
    for which, step in (("last", 6), (3, 3)):
        found, found_step = evaluate_run(run, which=which, log=lambda line: None)
        assert found_step == step
        assert found.loss == pytest.approx(logged[step]["val/loss"], rel=1e-6)
        assert found.bits_per_byte == pytest.approx(logged[step]["val/bits_per_byte"], rel=1e-6)


def test_the_command_prints_the_evaluation(tmp_path):
    run = runs.run(tmp_path, train__eval_windows=None)
    command = [sys.executable, "-m", "training.evaluate", str(run), "--checkpoint", "last"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    last = next(row for row in reversed(runs.rows(run)) if "val/loss" in row)
    assert f"validation loss {last['val/loss']:.4f} nats per token" in done.stdout
    bad = subprocess.run([*command[:3], str(run / "no")], capture_output=True, text=True)
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: there is no run at")
    assert len(bad.stderr.splitlines()) == 1
