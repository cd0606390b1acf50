"""Measures of heads: equal to loops over whole matrices, and right where the answer is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from analysis import detectors
from analysis.detectors import Mean
from analysis.inside import STATS, LayerView, inside
from analysis.probe import _on_repeats, _on_text
from analysis.row_stats import RowLayout, row_layout
from analysis.weights import pair_weights, row_weights
from data.windows import IGNORE
from kernels.attention import AttentionSpec, attention
from model.config import ModelConfig
from tests.analysis import by_hand
from tests.model.tiny import tiny_config, tiny_model, tiny_tokens

T = 24
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 4 + [2] * 11, [0] * T, [0] * 2 + [1] * 21 + [2]])
CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi_head": {"n_kv_head": None},
    "window": {"windows": [3, 0]},
    "window_sinks": {"windows": [5], "window_sinks": 2},
    "sink_logit": {"sink_logit": "learned"},
    "alibi_softcap": {"position": "alibi", "softcap": 2.0},
    "prefix": {"mask": "prefix", "prefix": 4},
    "bidirectional": {"mask": "bidirectional"},
    "qk_norm_gate": {"qk_norm": True, "output_gate": True},
    "everything": {
        "position": "alibi",
        "softcap": 3.0,
        "windows": [6],
        "window_sinks": 1,
        "sink_logit": "learned",
        "output_gate": True,
        "bias": True,
        "norm": "layernorm",
    },
}


def assert_close(found: dict[str, Mean], expected: dict[str, Any]) -> None:
    """Every measure to 1e-5 relative or 1e-6 absolute."""
    assert found.keys() == expected.keys()
    for name, mean in found.items():
        value = mean.value()
        if expected[name] is None:
            assert value is None, name
        else:
            assert value is not None, name
            np.testing.assert_allclose(
                value.numpy(), expected[name], rtol=1e-5, atol=1e-6, err_msg=name
            )


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "documents"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_measures_on_text_are_those_of_the_whole_matrix(case, documents):
    model = tiny_model(**CASES[case])
    tokens = tiny_tokens(3, T)
    targets = tiny_tokens(3, T, seed=2)
    targets[2, -2:] = IGNORE  # padding
    sample = torch.tensor([[1, 10, 20, 8], [23, 9, 4, 0], [22, 15, 3, 12]])
    _, views = inside(model, tokens, documents)
    for view, block in zip(views, model.blocks, strict=True):
        layout = row_layout(model.config, view.layer, targets, documents)
        layer = by_hand.Layer(view, layout.keep)
        found = _on_text(view, block.attn, layout, sample, 8)
        assert_close(found, by_hand.on_text(layer, block, sample, 8))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_measures_on_repeats_are_those_of_the_whole_matrix(case):
    model, period = tiny_model(**CASES[case]), 7
    r = torch.stack([torch.randperm(16)[:period] + 1 for _ in range(2)])
    tokens = torch.cat([torch.zeros(2, 1, dtype=torch.int64), r, r], dim=1)
    _, views = inside(model, tokens)
    for view in views:
        layout = row_layout(model.config, view.layer, tokens, None)
        layer = by_hand.Layer(view, layout.keep)
        assert_close(_on_repeats(view, layout, period), by_hand.on_repeats(layer, period))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_weights_made_again_are_those_of_the_whole_matrix(case):
    model, tokens = tiny_model(**CASES[case]), tiny_tokens(3, T)
    _, (view, _) = inside(model, tokens, DOCUMENTS)
    whole = torch.from_numpy(by_hand.Layer(view, torch.ones(3, T)).weights).float()
    torch.testing.assert_close(row_weights(view, torch.arange(T).expand(3, -1)), whole)
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(-2, T + 2, (3, T), generator=generator)
    outside = (targets < 0) | (targets >= T)
    expected = whole.gather(3, targets.clamp(0, T - 1)[:, None, :, None].expand(-1, 4, -1, 1))
    expected = expected.squeeze(3).masked_fill(outside.unsqueeze(1), 0)
    torch.testing.assert_close(pair_weights(view, targets), expected)


@torch.no_grad()
def test_a_few_sequences_at_a_time_add_up_to_all():
    model, tokens = tiny_model(), tiny_tokens(3, T)
    sample = torch.tensor([[1, 10], [23, 9], [22, 15]])
    parts = []
    for part in (slice(0, 3), slice(0, 1), slice(1, 3)):
        _, (view, _) = inside(model, tokens[part], DOCUMENTS[part])
        layout = row_layout(model.config, 0, tokens[part], DOCUMENTS[part])
        parts.append(_on_text(view, model.blocks[0].attn, layout, sample[part], 8))
    whole, one, other = parts
    for name, mean in whole.items():
        both = (one[name] + other[name]).value()
        torch.testing.assert_close(both, mean.value(), rtol=1e-6, atol=1e-7)


# --- Heads whose answer is known ------------------------------------------------------------------

PERIOD, N = 6, 13


def head(
    looks_at: list[int] | None = None, *, B: int = 2, length: int = N, **options: Any
) -> tuple[LayerView, RowLayout]:
    """One head whose row i looks at `looks_at[i]` alone (a negative one: everywhere alike)."""
    key = torch.eye(length)
    query = torch.zeros(length, length)
    for i, j in enumerate(looks_at or []):
        if j >= 0:
            query[i, j] = 200.0
    generator = torch.Generator().manual_seed(3)
    v = torch.nn.functional.normalize(
        torch.randn(B, 1, length, length, generator=generator), dim=-1
    )
    q, k = query.expand(B, 1, -1, -1), key.expand(B, 1, -1, -1)
    spec = AttentionSpec(scale=1.0, **options)
    result = attention(q, k, v, spec, stats=STATS)
    stream = torch.ones(B, length, 4)
    config = ModelConfig(vocab_size=9, context_length=length, n_head=1, n_embd=length + length % 2)
    layout = row_layout(config, 0, torch.zeros(B, length, dtype=torch.int64), None)
    return LayerView(0, q, k, v, spec, result, result.out, stream, stream), layout


def value(mean: Mean) -> float:
    found = mean.value()
    assert found is not None
    return float(found)


def harmonic(n: int) -> float:
    return sum(1 / t for t in range(1, n + 1))


def scores(view: LayerView, layout: RowLayout) -> dict[str, float]:
    looks = {
        "prev_token": detectors.previous_token(layout),
        "duplicate": detectors.duplicate_token(layout, PERIOD),
        "induction": detectors.induction(layout, PERIOD),
        "alpha_0": detectors.first_token(layout, 8),
    }
    found = {name: value(detectors.weight_on(view, look)) for name, look in looks.items()}
    return found | {"sink_rate": value(detectors.sink_rate(view, layout, 8))}


def test_a_head_that_looks_at_the_token_before_is_a_perfect_previous_token_head():
    found = scores(*head([i - 1 for i in range(N)]))
    # Rows 0 and 1 look at the first token, the six after them do not.
    expected = {"prev_token": 1, "duplicate": 0, "induction": 0, "alpha_0": 2 / 8, "sink_rate": 0}
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("name", "offset"), [("duplicate", PERIOD), ("induction", PERIOD - 1)])
def test_a_head_that_finds_the_earlier_copy_scores_one(name, offset):
    found = scores(*head([i - offset if i > PERIOD else i for i in range(N)]))
    others = {"duplicate", "induction"} - {name}
    assert found[name] == pytest.approx(1, abs=1e-6)
    assert found[others.pop()] == pytest.approx(0, abs=1e-6)


def test_a_head_that_looks_at_the_first_token_alone_is_a_sink_everywhere():
    found = scores(*head([0] * N))
    assert found["alpha_0"] == pytest.approx(1, abs=1e-6)
    assert found["sink_rate"] == 1


def test_a_uniform_head_has_the_harmonic_values_and_its_own_baseline():
    view, layout = head()
    found = scores(view, layout)
    second = (harmonic(N) - harmonic(PERIOD + 1)) / PERIOD
    expected = {
        "prev_token": (harmonic(N) - 1) / (N - 1),
        "duplicate": second,
        "induction": second,
        "alpha_0": harmonic(8) / 8,
        "sink_rate": 1.0,  # 0.34 over so few tokens
    }
    assert found == pytest.approx(expected, rel=1e-6)
    for look, name in (
        (detectors.previous_token(layout), "prev_token"),
        (detectors.induction(layout, PERIOD), "induction"),
        (detectors.first_token(layout, 8), "alpha_0"),
    ):
        baseline = value(detectors.uniform_weight_on(view, layout, look))
        assert baseline == pytest.approx(expected[name], rel=1e-12)


def test_over_64_tokens_a_uniform_head_is_no_sink():
    view, layout = head(length=64)
    look = detectors.first_token(layout, 64)
    assert value(detectors.weight_on(view, look)) == pytest.approx(0.0741, abs=1e-4)
    assert value(detectors.sink_rate(view, layout, 64)) == 0


def test_what_goes_to_a_sink_logit_is_missing_from_the_scores():
    view, layout = head([0] * N, sink_logit=torch.tensor([200.0]))
    assert scores(view, layout)["alpha_0"] == pytest.approx(0.5, abs=1e-6)
    assert scores(view, layout)["sink_rate"] == 1


def test_a_key_outside_the_window_has_no_weight():
    found = scores(*head([0] * N, window=1))
    assert found["prev_token"] == found["duplicate"] == found["induction"] == 0
    assert found["alpha_0"] == pytest.approx(1 / 8)


def test_the_sink_rate_counts_only_documents_that_are_long_enough():
    documents = torch.tensor([[0] * 2 + [1] * 11, [0] * 13])
    view, _ = head([0] * 2 + [2] * 11, documents=documents)
    layout = row_layout(tiny_config(), 0, torch.zeros(2, N, dtype=torch.int64), documents)
    # Of two complete documents one looks at its first token, at position 2.
    assert value(detectors.sink_rate(view, layout, 8)) == pytest.approx(0.5)
    assert detectors.sink_rate(view, layout, 14).value() is None


def test_norms_of_the_first_token_are_compared_with_the_others():
    view, layout = head()
    assert value(detectors.sink_vnorm(view, layout)) == pytest.approx(1, rel=1e-6)
    assert value(detectors.sink_knorm(view, layout)) == 1
    assert value(detectors.sink_hnorm(view, layout)) == 1
    v, stream = view.v.clone(), view.stream_out.clone()
    v[:, :, 0] *= 0.1
    stream[:, 0] *= 50
    drained = view._replace(v=v, stream_out=stream)
    assert value(detectors.sink_vnorm(drained, layout)) == pytest.approx(0.1, rel=1e-6)
    assert value(detectors.sink_hnorm(drained, layout)) == pytest.approx(50, rel=1e-6)


def test_queries_that_point_at_the_first_key_have_a_sink_cosine_of_one():
    view, layout = head([0] * N)
    assert value(detectors.sink_cos(view, layout)) == pytest.approx(1, abs=1e-6)
    view, layout = head(list(range(N)))  # each at its own key, one of the i others
    expected = -sum(1 / i for i in range(1, N)) / (N - 1)
    assert value(detectors.sink_cos(view, layout)) == pytest.approx(expected, abs=1e-6)


def one_head_layer(**changes: Any):
    return tiny_model(n_head=1, n_kv_head=1, head_dim=N + 1, position="alibi", **changes).blocks[0]


def padded(view: LayerView) -> LayerView:
    """The same with one more channel of zeros in values and heads, for an even head size."""
    pad = (0, 1)
    return view._replace(v=F.pad(view.v, pad), heads=F.pad(view.heads, pad))


@torch.no_grad()
def test_a_sink_whose_value_is_drained_writes_nothing_although_it_is_looked_at():
    rows = torch.tensor([[3, 8], [1, 12]])
    attn = one_head_layer().attn
    view, layout = head([0] * N)
    assert value(detectors.sink_write(padded(view), attn, layout, rows)) == pytest.approx(1)
    view, layout = head()
    v = view.v.clone()
    v[:, :, 0] = 0
    assert value(detectors.sink_write(padded(view._replace(v=v)), attn, layout, rows)) == 0


@torch.no_grad()
def test_a_dead_head_writes_nothing():
    view, layout = head([0] * N)
    block = one_head_layer()
    assert value(detectors.write(padded(view), block.attn, layout)) > 0.01
    block.attn.o_proj.weight.zero_()
    assert value(detectors.write(padded(view), block.attn, layout)) == 0


def test_the_spread_of_logits_needs_rows_of_age_eight():
    view, layout = head([0] * N)
    rows = torch.tensor([[8, 2], [8, 7]])
    # Nine visible logits, one of them 200 and eight 0.
    expected = 200 * math.sqrt(8) / 9
    assert value(detectors.logit_std(view, layout, rows)) == pytest.approx(expected, rel=1e-6)
    assert detectors.logit_std(view, layout, torch.tensor([[7], [3]])).value() is None


def test_massive_activations_are_large_and_far_from_the_median():
    view, layout = head()
    stream = torch.full((2, N, 4), 0.5)
    stream[0, 0, 1], stream[0, 3, 2] = -600.0, 400.0  # 1200 and 800 medians
    found = detectors.massive(view._replace(stream_out=stream), layout)
    assert value(found["massive_count"]) == 0.5  # one in two sequences
    assert value(found["massive_max"]) == (600 + 0.5) / 2
    assert value(found["massive_max_over_median"]) == (1200 + 1) / 2
    small = detectors.massive(view._replace(stream_out=stream / 10), layout)
    assert value(small["massive_count"]) == 0
    assert value(small["massive_max_over_median"]) == pytest.approx((1200 + 1) / 2)


@pytest.mark.parametrize("numbers", [[3.0, 1, 2], [4.0, 1, 2, 3], [1.0, 1, 1, 5], [2.0], [2.0, 1]])
def test_the_median_is_the_middle_or_the_mean_of_two(numbers):
    assert float(detectors._median(torch.tensor(numbers))) == np.median(numbers)


@pytest.mark.parametrize("changes", [{}, {"norm": "layernorm", "bias": True, "n_kv_head": 1}])
@torch.no_grad()
def test_the_norm_of_scores_is_that_of_the_circuit_behind_the_norm(changes):
    model = tiny_model(**changes)
    block = model.blocks[1]
    gain = block.attn_norm.weight.double()
    found = detectors.qk_norm(block)
    for h in range(4):
        circuit = gain[:, None] * block.attn.qk_circuit(h).double() * gain
        assert float(found[h]) == pytest.approx(float(circuit.norm()), rel=1e-6)
    block.attn.q_proj.weight *= 2
    block.attn_norm.weight *= 3
    torch.testing.assert_close(detectors.qk_norm(block), 18 * found)


@torch.no_grad()
def test_under_qk_norm_only_the_gains_count():
    model = tiny_model(qk_norm=True)
    attn = model.blocks[0].attn
    attn.q_norm.weight.fill_(1)
    attn.k_norm.weight.fill_(1)
    attn.q_proj.weight *= 5
    torch.testing.assert_close(detectors.qk_norm(model.blocks[0]), torch.ones(4).double())
    attn.k_norm.weight.fill_(3)
    torch.testing.assert_close(detectors.qk_norm(model.blocks[0]), 3 * torch.ones(4).double())


def test_losses_of_a_token_and_of_the_two_copies():
    losses = torch.arange(10.0).expand(2, -1)
    counted = torch.ones(2, 10, dtype=torch.bool)
    age = torch.stack([torch.arange(10), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4])])
    assert value(detectors.loss_at(losses, counted, age, token=4)) == pytest.approx((3 + 3 + 8) / 3)
    assert detectors.loss_at(losses, counted, age, token=11).value() is None
    first, second = detectors.copy_losses(losses, counted, period=4)
    assert value(first) == 1.5  # rows 0 .. 3 predict tokens 1 .. 4
    assert value(second) == 5.5
    assert detectors.icl_tokens(1024) == detectors.icl_tokens(500) == (500, 50)
    assert detectors.icl_tokens(128) == (125, 12)
