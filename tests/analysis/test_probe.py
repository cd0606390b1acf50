"""The probe: a batch that never changes, measured without a trace, equal to whole matrices."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from analysis import probe as probe_module
from analysis.head_files import HeadRecord, read_patterns, read_record, write_patterns, write_record
from analysis.inside import inside
from analysis.probe import Probe, ProbeResult, build_probe, run_probe, word
from data.tokenizers import TokenizerConfig, build_tokenizer
from data.windows import IGNORE, Batch, Windows
from kernels import eager
from kernels.attention import Stats
from model.decoder import Decoder
from tests.analysis import by_hand
from tests.data.token_data import write_tokens
from tests.model.tiny import tiny_config, tiny_model

TEXT = "abcdefghijklmnop \nABC"
T = 32


def char_tokenizer(text: str = TEXT):
    return build_tokenizer(TokenizerConfig(kind="char"), [text], [text])


def make(folder, *, mode: str = "stream", **changes: Any) -> tuple[Decoder, Probe]:
    """A random model and its probe on random validation text of three documents."""
    folder.mkdir(exist_ok=True)
    tokenizer = char_tokenizer()
    generator = np.random.default_rng(0)
    documents = [generator.integers(1, tokenizer.vocab_size, n).tolist() for n in (150, 7, 120)]
    val = write_tokens(folder, documents, split="val", vocab_size=tokenizer.vocab_size)
    model = tiny_model(**{"vocab_size": tokenizer.vocab_size, "context_length": T} | changes)
    windows = Windows(val, T, mode)
    probe = build_probe(model.config, windows, tokenizer, n_windows=4, sink_length=8, n_repeats=3)
    return model, probe


def measure(model: Decoder, probe: Probe, **options: Any) -> ProbeResult:
    return run_probe(model, probe, device=torch.device("cpu"), **options)


# --- What it is made of ---------------------------------------------------------------------------


def test_windows_are_spread_evenly_and_repeats_are_distinct_tokens_twice(tmp_path):
    torch.manual_seed(1)
    _, probe = make(tmp_path)
    assert probe.text.tokens.shape == (4, T)
    assert probe.repeats is not None
    assert probe.period == (T - 1) // 2
    bos = char_tokenizer().encode("\n")[0]
    for row in probe.repeats.tolist():
        first, second = row[1 : 1 + probe.period], row[1 + probe.period :]
        assert row[0] == bos
        assert first == second
        assert len(set(first)) == probe.period
        assert bos not in first
    assert len({tuple(row) for row in probe.repeats.tolist()}) == 3


def test_the_probe_depends_on_no_random_state_and_changes_none(tmp_path):
    probes = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
        probes.append(build_probe(tiny_config(), FakeWindows(), char_tokenizer()))
        assert torch.get_rng_state().equal(state)
        assert np.array_equal(np.random.get_state()[1], numpy_state)
    one, other = probes
    assert torch.equal(one.repeats, other.repeats)
    assert torch.equal(one.sample, other.sample)


class FakeWindows:
    """Windows of zeros, as many as asked for."""

    def __init__(self, length: int = T):
        self.length = length

    def __len__(self) -> int:
        return 5

    def batch(self, numbers):
        zeros = torch.zeros(len(numbers), self.length, dtype=torch.int64)
        return Batch(zeros, zeros, None)


@pytest.mark.parametrize(
    ("kind", "text", "first", "note"),
    [
        ("bpe", TEXT, None, "[BOS]"),
        ("char", TEXT, "\n", "[newline]"),
        ("byte", TEXT, "\n", "[newline]"),
        ("char", "abcdefg", "a", "[id 0]"),
    ],
)
def test_repeats_begin_with_bos_or_what_stands_in_for_it(kind, text, first, note):
    tokenizer = build_tokenizer(TokenizerConfig(kind=kind, vocab_size=300), [text], [text])
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    probe = build_probe(config, FakeWindows(), tokenizer)
    expected = tokenizer.bos_id if first is None else tokenizer.encode(first)[0]
    assert probe.repeats is not None
    assert (probe.repeats[:, 0] == expected).all()
    assert note in probe.note
    assert f"{probe.period} random tokens" in probe.note
    assert ("stands for BOS" in probe.note) == (first is not None)


@pytest.mark.parametrize(
    ("context", "text", "period"), [(129, TEXT, 20), (400, None, 64), (20, TEXT, 9), (8, "abc", 2)]
)
def test_repeats_are_as_long_as_context_and_vocabulary_allow(context, text, period):
    kind = TokenizerConfig(kind="byte" if text is None else "char")
    tokenizer = build_tokenizer(kind, [text or ""], [text or ""])
    config = tiny_config(vocab_size=tokenizer.vocab_size, context_length=context)
    probe = build_probe(config, FakeWindows(context), tokenizer)
    assert probe.period == period
    assert probe.repeats is not None
    assert probe.repeats.shape == (16, 2 * period + 1)


def test_without_room_for_repeats_their_measures_are_absent():
    tokenizer = char_tokenizer("ab")
    model = tiny_model(vocab_size=2)
    probe = build_probe(model.config, FakeWindows(), tokenizer)
    assert probe.repeats is None
    assert "no repeated tokens" in probe.note
    found = measure(model, probe).measures
    assert not {"prev_token", "induction", "duplicate", "repeat_gain"} & found.keys()
    assert "alpha_0" in found


def test_sampled_rows_are_spread_over_windows_and_positions(tmp_path):
    _, probe = make(tmp_path, mode="document")
    assert probe.sample.shape == (4, 16)
    assert probe.text.documents is not None
    for rows, documents in zip(probe.sample.tolist(), probe.text.documents.tolist(), strict=True):
        assert rows == sorted(set(rows))
        assert all(i > 0 and documents[i - 1] == documents[i] for i in rows)
    whole = build_probe(tiny_config(), FakeWindows(), char_tokenizer(), n_windows=1)
    assert whole.sample.shape == (1, 64)
    assert len(whole.sample.unique()) == T - 1


def test_words_can_be_read():
    tokenizer = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), [TEXT], [TEXT])
    letters = [tokenizer.encode(c)[0] for c in "a \n\t\x00"]
    assert [word(tokenizer, i) for i in letters] == ["a", "␣", "↵", "⇥", "\\x00"]
    assert word(tokenizer, tokenizer.encode("é")[0]) == "\\xc3"
    assert word(tokenizer, tokenizer.bos_id) == "[BOS]"


# --- What it measures -----------------------------------------------------------------------------

HEAD = [
    "entropy",
    "entropy_norm",
    "max_prob",
    "mean_distance",
    "distance_norm",
    "sink_mass_1",
    "sink_mass_4",
    "max_logit",
    "alpha_0",
    "sink_rate",
    "sink_cos",
    "sink_write",
    "logit_std",
    "qk_norm",
    "prev_token",
    "prev_token_text",
    "duplicate",
    "induction",
    "write",
]
LAYER = [
    "uniform/entropy",
    "uniform/max_prob",
    "uniform/mean_distance",
    "uniform/sink_mass_1",
    "uniform/sink_mass_4",
    "uniform/distance_norm",
    "uniform/alpha_0",
    "uniform/prev_token",
    "uniform/duplicate",
    "uniform/induction",
    "uniform/prev_token_text",
    "sink_hnorm",
    "massive_count",
    "massive_max",
    "massive_max_over_median",
]
AXES = (
    dict.fromkeys(HEAD, "head")
    | dict.fromkeys(LAYER, "layer")
    | dict.fromkeys(("sink_vnorm", "sink_knorm"), "kv_head")
    | dict.fromkeys(("icl_score", "repeat_gain", "loss"), "scalar")
)
SHAPES = {"head": (2, 4), "kv_head": (2, 2), "layer": (2,), "scalar": ()}


def test_every_measure_has_its_name_axis_and_shape_and_is_a_number(tmp_path):
    found = measure(*make(tmp_path)).measures
    assert {name: measure.axis for name, measure in found.items()} == AXES
    for name, (axis, values) in found.items():
        assert values.shape == SHAPES[axis], name
        assert values.dtype == np.float64, name
        assert np.isfinite(values).all(), name
    with_null = measure(*make(tmp_path / "null", sink_logit="learned")).measures
    assert with_null.keys() - found.keys() == {"null_mass"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mode": "document"},
        {"windows": [5, 0], "window_sinks": 1, "sink_logit": "learned", "mode": "document"},
        {"position": "alibi", "softcap": 2.0, "output_gate": True},
        {"mask": "prefix", "prefix": 3},
    ],
    ids=str,
)
@torch.no_grad()
def test_every_measure_is_that_of_loops_over_whole_matrices(tmp_path, changes):
    model, probe = make(tmp_path, **changes)
    found = measure(model, probe).measures
    _, views = inside(model, probe.text.tokens, probe.text.documents)
    _, repeat_views = inside(model, probe.repeats)
    for n, block in enumerate(model.blocks):
        layer = by_hand.Layer(views[n], probe.text.targets != IGNORE)
        expected = by_hand.on_text(layer, block, probe.sample, probe.sink_length)
        every_row = torch.ones(probe.repeats.shape, dtype=torch.bool)
        repeats = by_hand.Layer(repeat_views[n], every_row)
        expected |= by_hand.on_repeats(repeats, probe.period)
        for name, values in expected.items():
            if values is not None:
                np.testing.assert_allclose(
                    found[name].values[n], values, rtol=1e-5, atol=1e-6, err_msg=name
                )


def losses(model: Decoder, tokens: torch.Tensor, following: torch.Tensor) -> np.ndarray:
    """Loss of every row, (B, T)."""
    logits = model(tokens).logits.double()
    chosen = logits.gather(2, following.unsqueeze(2)).squeeze(2)
    return (logits.logsumexp(-1) - chosen).numpy()


@torch.no_grad()
def test_losses_are_those_of_each_token(tmp_path):
    model, probe = make(tmp_path)
    found = measure(model, probe).measures
    text = losses(model, probe.text.tokens, probe.text.targets)  # row t predicts token t + 1
    assert found["loss"].values == pytest.approx(text.mean(), rel=1e-6)
    late, early = int(0.98 * T), int(0.1 * T)
    expected = text[:, late - 1].mean() - text[:, early - 1].mean()
    assert found["icl_score"].values == pytest.approx(expected, abs=1e-6)
    copies = losses(model, probe.repeats[:, :-1], probe.repeats[:, 1:])
    gain = copies[:, : probe.period].mean() - copies[:, probe.period :].mean()
    assert found["repeat_gain"].values == pytest.approx(gain, abs=1e-6)


@torch.no_grad()
def test_measuring_twice_gives_the_same_and_leaves_no_trace(tmp_path):
    model, probe = make(tmp_path, dropout=0.5)
    model.train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    one, other = measure(model, probe), measure(model, probe)
    assert one.measures.keys() == other.measures.keys()
    for name in one.measures:
        assert np.array_equal(one.measures[name].values, other.measures[name].values), name
    assert np.array_equal(one.patterns.weights, other.patterns.weights)
    assert torch.get_rng_state().equal(state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_failing_probe_puts_the_mode_back(tmp_path):
    model, probe = make(tmp_path)
    model.train()
    with pytest.raises(ValueError, match="layer 7"):
        measure(model, probe, layers=[7])
    assert model.training


def test_parts_that_bound_memory_give_the_same(tmp_path, monkeypatch):
    model, probe = make(tmp_path, sink_logit="zero", mode="document")
    whole = measure(model, probe)
    monkeypatch.setattr(probe_module, "PASS_NUMBERS", 1)
    parts = measure(model, probe)
    assert whole.measures.keys() == parts.measures.keys()
    for name in whole.measures:
        np.testing.assert_allclose(
            parts.measures[name].values, whole.measures[name].values, rtol=1e-5, atol=1e-7
        )
    np.testing.assert_allclose(parts.patterns.weights, whole.patterns.weights, atol=1e-6)


def test_chosen_layers_are_those_of_all(tmp_path):
    model, probe = make(tmp_path, n_layer=3)
    every, chosen = measure(model, probe), measure(model, probe, layers=[2, 0])
    assert chosen.patterns.layers == (2, 0)
    for name, (axis, values) in chosen.measures.items():
        expected = every.measures[name].values
        expected = expected if axis == "scalar" else expected[[2, 0]]
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_measured_from_the_numbers_as_they_are(tmp_path, dtype):
    model, probe = make(tmp_path)
    autocast = partial(torch.autocast, "cpu", dtype)
    found = measure(model, probe, autocast=autocast)
    exact = measure(model, probe, autocast=nullcontext)
    with torch.no_grad(), autocast():
        _, (view, _) = inside(model, probe.text.tokens)
    assert view.q.dtype == dtype
    layer = by_hand.Layer(view, probe.text.targets != IGNORE)
    expected = by_hand.on_text(layer, model.blocks[0], probe.sample, probe.sink_length)
    for name, values in expected.items():
        np.testing.assert_allclose(
            found.measures[name].values[0], values, rtol=1e-5, atol=1e-6, err_msg=name
        )
    assert found.measures["loss"].values == pytest.approx(exact.measures["loss"].values, rel=0.02)


@pytest.mark.parametrize("changes", [{}, {"sink_logit": "learned", "mode": "document"}], ids=str)
@torch.no_grad()
def test_patterns_are_the_weights_over_the_first_window(tmp_path, changes):
    model, probe = make(tmp_path, **changes)
    patterns = measure(model, probe, step=12).patterns
    tokens, _, documents = (None if x is None else x[:1] for x in probe.text)
    _, views = inside(model, tokens, documents)
    assert patterns.step == 12
    assert patterns.layers == (0, 1)
    assert patterns.weights.shape == (2, 4, T, T)
    assert len(patterns.tokens) == T
    for n, view in enumerate(views):
        one_hot = torch.eye(T).expand(1, 2, T, T)
        stats = Stats(null_mass=True)
        whole = eager.attention(view.q, view.k, one_hot, view.spec, None, stats, None)
        np.testing.assert_allclose(patterns.weights[n], whole.out[0], atol=1e-6)
        np.testing.assert_allclose(patterns.null_mass[n], whole.null_mass[0], atol=1e-6)


def test_results_fit_the_files_of_a_run(tmp_path):
    model, probe = make(tmp_path)
    result = measure(model, probe)
    path = write_record(tmp_path, HeadRecord("probe", 5, (0, 1), result.measures))
    back = read_record(path)
    assert back.measures.keys() == result.measures.keys()
    assert np.array_equal(back.measures["alpha_0"].values, result.measures["alpha_0"].values)
    write_patterns(tmp_path, result.patterns)
    patterns = read_patterns(tmp_path)
    assert patterns is not None
    assert patterns.tokens == probe.words
    assert np.array_equal(patterns.weights, result.patterns.weights)
