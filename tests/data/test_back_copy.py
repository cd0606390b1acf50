"""The back-copy task: the rule holds everywhere, the sequences are fixed, the losses are exact."""

from __future__ import annotations

import numpy as np
import pytest

from data import back_copy
from data.back_copy import (
    LENGTH,
    N_SYMBOLS,
    N_TRIGGERS,
    attainable_loss,
    bigram_loss,
    load_back_copy,
    sequences,
    transitions,
)
from data.prepare import prepare
from data.sources import DataConfig
from data.tokenizers import TokenizerConfig
from data.windows import IGNORE, Windows

STREAM = 77  # random numbers that no split uses


@pytest.fixture(scope="module")
def walks():
    return sequences(20_000, STREAM)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(back_copy, "N_TRAIN", 60)
    monkeypatch.setattr(back_copy, "N_VAL", 20)


def test_what_follows_a_trigger_repeats_what_was_before_it(walks):
    before, now, after = walks[:, :-2], walks[:, 1:-1], walks[:, 2:]
    assert (after == before)[now < N_TRIGGERS].all()
    assert (after == before)[now >= N_TRIGGERS].mean() < 0.2


def test_walks_begin_with_no_trigger_and_never_hold_two_in_a_row(walks):
    is_trigger = walks < N_TRIGGERS
    assert not is_trigger[:, 0].any()
    assert not (is_trigger[:, 1:] & is_trigger[:, :-1]).any()
    assert 0.05 < is_trigger.mean() < 0.15


def test_other_symbols_are_followed_as_the_matrix_says(walks):
    counts = np.zeros((N_SYMBOLS, N_SYMBOLS))
    np.add.at(counts, (walks[:, :-1], walks[:, 1:]), 1)
    plain = counts[N_TRIGGERS:]
    found = plain / plain.sum(axis=1, keepdims=True)
    assert np.abs(found - transitions()[N_TRIGGERS:]).max() < 0.02
    np.testing.assert_allclose(transitions().sum(axis=1), [0] * N_TRIGGERS + [1] * 29)


def test_attainable_loss_is_what_knowing_the_rule_costs(walks):
    """Minus the mean log-probability of the walks themselves, an estimate of the entropy."""
    now, after = walks[:, :-1], walks[:, 1:]
    drawn = now >= N_TRIGGERS
    nats = -np.log(transitions()[now[drawn], after[drawn]]).sum()
    nats += len(walks) * np.log(N_SYMBOLS - N_TRIGGERS)  # the first symbol of each
    assert nats / walks.size == pytest.approx(attainable_loss(), abs=0.01)


def test_bigram_loss_adds_what_is_unknown_behind_triggers(walks):
    now, after = walks[:, :-1], walks[:, 1:]
    nats = 0.0
    for trigger in range(N_TRIGGERS):
        counts = np.bincount(after[now == trigger], minlength=N_SYMBOLS)
        shares = counts[counts > 0] / counts.sum()
        nats -= counts.sum() * (shares * np.log(shares)).sum()
    assert nats / walks.size == pytest.approx(bigram_loss() - attainable_loss(), abs=0.003)


def test_sequences_are_always_the_same_and_splits_are_not(few):
    first, again = load_back_copy(), load_back_copy()
    assert (list(first.train), first.fingerprint) == (list(again.train), again.fingerprint)
    # Kept by value: whoever changes the sequences raises VERSION and this line.
    assert next(iter(first.train)).text.startswith("uff94bnoluf5ar8vahj1jvk667ij")
    texts = [document.text for split in (first.train, first.val) for document in split]
    assert len(set(texts)) == 80
    assert {len(text) for text in texts} == {LENGTH}


def test_the_fingerprint_tells_other_sequences(few, monkeypatch):
    fingerprint = load_back_copy().fingerprint
    monkeypatch.setattr(back_copy, "RANDOM_STATE", 5)
    transitions.cache_clear()
    other = load_back_copy().fingerprint
    transitions.cache_clear()
    assert fingerprint.keys() == other.keys()
    assert fingerprint != other


def test_every_window_is_bos_and_one_sequence(few, tmp_path):
    data = DataConfig(source="back_copy", mode="bos_aligned", cache_dir=str(tmp_path))
    text = prepare(
        data, TokenizerConfig(kind="identity"), context_length=LENGTH, log=lambda line: None
    )
    windows = Windows(text.train, LENGTH, data.mode)
    assert (len(windows), windows.padding) == (60, 0)
    batch = windows.batch(range(60))
    assert (batch.tokens[:, 0] == text.tokenizer.bos_id).all()
    assert (batch.tokens[:, 1:] == batch.targets[:, :-1]).all()
    assert not (batch.targets == IGNORE).any()
    assert (batch.targets.numpy() == sequences(60, back_copy._TRAIN)).all()
