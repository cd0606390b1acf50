"""Rows, sums and baselines of attention's statistics: closed forms, loops and limiting cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.head_files import Measure
from analysis.row_stats import (
    RowSums,
    head_sums,
    measures,
    merge,
    row_layout,
    row_layouts,
    uniform_head,
    wanted_stats,
)
from data.windows import IGNORE
from kernels.attention import AttentionOutput, AttentionSpec, Stats, attention
from model.config import ModelConfig
from tests.kernels.cases import document_ids
from tests.reference.attention import Problem

T = 24
DOCUMENTS = ((24,), (1, 5, 6, 12))
MASKS = {
    "causal": {},
    "window": {"windows": [5]},
    "window of one": {"windows": [1]},
    "window with sinks": {"windows": [5], "window_sinks": 3},
    "more sinks than window": {"windows": [2], "window_sinks": 7},
    "prefix": {"mask": "prefix", "prefix": 4},
    "prefix and window": {"mask": "prefix", "prefix": 9, "windows": [3]},
    "all": {"mask": "prefix", "prefix": 4, "windows": [3], "window_sinks": 2},
    "bidirectional": {"mask": "bidirectional"},
}


def model_config(**fields) -> ModelConfig:
    return ModelConfig(n_layer=2, n_head=2, n_embd=8, context_length=64, **fields)


def spec_of(config: ModelConfig, documents: torch.Tensor | None) -> AttentionSpec:
    window = config.window_of(0)
    return AttentionSpec(
        causal=config.mask != "bidirectional",
        window=window,
        sinks=config.window_sinks if window else 0,
        prefix=config.prefix,
        documents=documents,
    )


def all_kept(batch: int = 1, length: int = T) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.int64)


def some_kept() -> torch.Tensor:
    targets = all_kept(2)
    targets[0, 17:] = IGNORE
    targets[1, [3, 4, 11]] = IGNORE
    return targets


def values(heads: RowSums, uniform: RowSums) -> dict[str, np.ndarray]:
    """Every measure of one layer by name: (H,), and of the uniform head a number."""
    return {name: found.values[0] for name, found in measures([heads], [uniform]).items()}


def uniform_values(config: ModelConfig, length: int) -> dict[str, float]:
    layout = row_layout(config, 0, all_kept(length=length), None)
    sums = head_sums(uniform_head(layout), layout)
    return {name: x.item() for name, x in values(sums, sums).items() if x.ndim == 0}


# --- What rows see --------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "documents"])
@pytest.mark.parametrize("mask", MASKS)
def test_the_uniform_head_is_what_attention_gives_to_equal_logits(mask, documents):
    config = model_config(**MASKS[mask])
    ids = None if documents is None else document_ids(documents)
    nothing = torch.zeros(2, 1, T, 1, dtype=torch.float64)
    stats = Stats(entropy_tokens=True, max_prob=True, mean_distance=True, sink_mass=(1, 4))
    expected = attention(
        nothing, nothing, nothing, spec_of(config, ids), stats=stats, backend="eager"
    )
    found = uniform_head(row_layout(config, 0, all_kept(2), ids))
    for name in ("entropy_tokens", "max_prob", "mean_distance", "sink_mass"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=name)


@pytest.mark.parametrize("mask", MASKS)
def test_rows_are_laid_out_as_the_written_rule_says(mask):
    config, ids = model_config(**MASKS[mask]), document_ids(DOCUMENTS)
    layout = row_layout(config, 0, some_kept(), ids)
    spec = spec_of(config, ids)
    nothing = np.zeros((2, 1, T, 1))
    problem = Problem(
        q=nothing,
        k=nothing,
        v=nothing,
        causal=spec.causal,
        window=spec.window,
        sinks=spec.sinks,
        prefix=spec.prefix,
        documents=ids.numpy(),
    )
    for b in range(2):
        for i in range(T):
            seen = sum(problem.sees(b, i, j, T) for j in range(T))
            assert layout.visible[b, i] == seen, (b, i)
            assert layout.age[b, i] == i - problem.document_start(b, i)
    assert layout.keep.sum() == 2 * T - 7 - 3


def test_layers_with_equal_windows_share_a_layout():
    config = model_config(windows=[3, 0])
    first, second, third = row_layouts(config, [0, 1, 2], all_kept(), None)
    assert first is third
    assert first.visible.max() == 3
    assert second.visible.max() == T


# --- Sums -----------------------------------------------------------------------------------------


def random_result(config: ModelConfig, ids: torch.Tensor | None) -> AttentionOutput:
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(2, 3, T, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return attention(q, k, k, spec_of(config, ids), stats=wanted_stats(config), backend="eager")


def test_means_are_over_the_rows_that_count_and_no_others():
    config, ids, targets = model_config(windows=[5]), document_ids(DOCUMENTS), some_kept()
    layout = row_layout(config, 0, targets, ids)
    result = random_result(config, ids)
    found = values(head_sums(result, layout), head_sums(uniform_head(layout), layout))

    rows: dict[str, list[np.ndarray]] = {}
    for b in range(2):
        for i in range(T):
            age, seen = layout.age[b, i].item(), layout.visible[b, i].item()
            if targets[b, i] == IGNORE:
                continue
            at = {
                name: x[b, :, i].numpy()
                for name, x in result._asdict().items()
                if x is not None and name != "out"
            }
            rows.setdefault("max_logit", []).append(at["max_logit"])
            if age >= 1:
                rows.setdefault("entropy", []).append(at["entropy_tokens"])
                rows.setdefault("max_prob", []).append(at["max_prob"])
                rows.setdefault("mean_distance", []).append(at["mean_distance"])
                rows.setdefault("distance_norm", []).append(at["mean_distance"] / age)
                rows.setdefault("sink_mass_1", []).append(at["sink_mass"][:, 0])
                rows.setdefault("uniform/max_prob", []).append(1 / seen)
                rows.setdefault("uniform/entropy", []).append(math.log(seen))
            if age >= 4:
                rows.setdefault("sink_mass_4", []).append(at["sink_mass"][:, 1])
            if seen >= 2:
                rows.setdefault("entropy_norm", []).append(at["entropy_tokens"] / math.log(seen))
    for name, each in rows.items():
        expected = np.max(each, axis=0) if name == "max_logit" else np.mean(each, axis=0)
        np.testing.assert_allclose(found[name], expected, rtol=1e-12, err_msg=name)
    assert set(found) - set(rows) == {
        "uniform/mean_distance",
        "uniform/distance_norm",
        "uniform/sink_mass_1",
        "uniform/sink_mass_4",
    }


def test_parts_of_a_batch_merge_to_the_whole():
    config, targets = model_config(sink_logit="zero"), some_kept()
    result = random_result(config, None)._replace(null_mass=torch.rand(2, 3, T))

    def sums(rows: slice) -> RowSums:
        part = AttentionOutput(*(None if x is None else x[rows] for x in result))
        return head_sums(part, row_layout(config, 0, targets[rows], None))

    whole, merged = sums(slice(0, 2)), merge(sums(slice(0, 1)), sums(slice(1, 2)))
    assert merged.names == whole.names
    torch.testing.assert_close(merged.totals, whole.totals, rtol=1e-12, atol=0)
    assert merged.counts.equal(whole.counts)
    assert merged.max_logit is not None
    assert merged.max_logit.equal(whole.max_logit)
    assert "null_mass" in whole.names


def test_a_measure_without_rows_is_left_out():
    config = model_config(windows=[1])
    layout = row_layout(config, 0, all_kept(), None)
    sums = head_sums(random_result(config, None), row_layout(config, 0, all_kept(2), None))
    found = measures([sums], [head_sums(uniform_head(layout), layout)])
    assert "entropy_norm" not in found
    assert found["entropy"].values.tolist() == [[0.0] * 3]
    nothing = row_layout(config, 0, torch.full((2, T), IGNORE), None)
    empty = head_sums(random_result(config, None), nothing)
    assert measures([empty], [head_sums(uniform_head(nothing), nothing)]) == {}


def test_a_record_has_one_row_per_layer():
    config = model_config()
    layouts = row_layouts(config, [0, 1], all_kept(2), None)
    heads = [head_sums(random_result(config, None), layout) for layout in layouts]
    uniform = [head_sums(uniform_head(layout), layout) for layout in layouts]
    found = measures(heads, uniform)
    assert found["entropy"].axis == "head"
    assert found["entropy"].values.shape == (2, 3)
    assert found["uniform/entropy"].axis == "layer"
    assert found["uniform/entropy"].values.shape == (2,)
    assert all(isinstance(x, Measure) and x.values.dtype == np.float64 for x in found.values())


# --- Limiting cases -------------------------------------------------------------------------------


def harmonic(n: int) -> float:
    return sum(1 / t for t in range(1, n + 1))


@pytest.mark.parametrize("length", [8, 64])
def test_uniform_attention_has_the_closed_forms_of_its_means(length):
    found = uniform_values(model_config(), length)
    for k in (1, 4):
        expected = k * (harmonic(length) - harmonic(k)) / (length - k)
        assert found[f"uniform/sink_mass_{k}"] == pytest.approx(expected, rel=1e-12)
    expected = math.lgamma(length + 1) / (length - 1)  # mean of log n over n = 2 .. T
    assert found["uniform/entropy"] == pytest.approx(expected, rel=1e-12)
    assert found["uniform/max_prob"] == pytest.approx((harmonic(length) - 1) / (length - 1))
    assert found["uniform/mean_distance"] == pytest.approx(length / 4)  # mean of i / 2
    assert found["uniform/distance_norm"] == pytest.approx(0.5)


def head_that_looks_at(targets: list[int]) -> dict[str, np.ndarray]:
    """The measures of a causal head whose row i puts all its weight on key targets[i]."""
    config, length = model_config(), len(targets)
    keys = torch.eye(length, dtype=torch.float64)[None, None]
    queries = 1000 * keys[:, :, targets]
    spec = AttentionSpec(scale=1.0)
    result = attention(queries, keys, keys, spec, stats=wanted_stats(config), backend="eager")
    layout = row_layout(config, 0, all_kept(length=length), None)
    return values(head_sums(result, layout), head_sums(uniform_head(layout), layout))


@pytest.mark.parametrize(
    ("name", "looks_at", "distance", "norm", "sink_1", "sink_4"),
    [
        ("itself", lambda i: i, 0, 0, 0, 0),
        ("previous token", lambda i: max(i - 1, 0), 1, None, 1 / 19, 1 / 16),
        ("first token", lambda i: 0, 10, 1, 1, 1),
    ],
)
def test_a_head_that_looks_at_one_token(name, looks_at, distance, norm, sink_1, sink_4):
    length = 20
    found = head_that_looks_at([looks_at(i) for i in range(length)])
    if norm is None:
        norm = (harmonic(length - 1)) / (length - 1)  # mean of 1 / i
    expected = {
        "entropy": 0,
        "entropy_norm": 0,
        "max_prob": 1,
        "mean_distance": distance,
        "distance_norm": norm,
        "sink_mass_1": sink_1,
        "sink_mass_4": sink_4,
        "max_logit": 1000,
    }
    for measure, value in expected.items():
        assert found[measure].item() == pytest.approx(value, abs=1e-12), (name, measure)


def test_a_head_of_equal_logits_is_its_own_baseline():
    config = model_config()
    nothing = torch.zeros(1, 1, T, 4, dtype=torch.float64)
    result = attention(
        nothing, nothing, nothing, AttentionSpec(), stats=wanted_stats(config), backend="eager"
    )
    layout = row_layout(config, 0, all_kept(), None)
    found = values(head_sums(result, layout), head_sums(uniform_head(layout), layout))
    assert found["entropy_norm"].item() == pytest.approx(1)
    for name in [name for name in found if name.startswith("uniform/")]:
        assert found[name.removeprefix("uniform/")].item() == pytest.approx(found[name]), name


def entropy_floor(logits: np.ndarray) -> float:
    """The least entropy of logits with this spread (Zhai et al. 2023, theorem 3.1)."""
    n = len(logits)
    spread = float(np.linalg.norm(logits - logits.mean()))
    beta = math.exp(-spread * math.sqrt(n / (n - 1)))
    total = 1 + (n - 1) * beta
    return math.log(total) + spread * math.sqrt(n * (n - 1)) * beta / total


def entropy_of(logits: np.ndarray) -> float:
    keys = torch.tensor(logits, dtype=torch.float64).view(1, 1, -1, 1)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    spec = AttentionSpec(scale=1.0)
    result = attention(one, keys, keys, spec, stats=Stats(entropy_tokens=True), backend="eager")
    assert result.entropy_tokens is not None
    return result.entropy_tokens.item()


@settings(deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=2, max_size=40))
def test_no_row_falls_below_the_entropy_floor_of_its_spread(row):
    logits = np.array(row)
    assert entropy_of(logits) >= entropy_floor(logits) - 1e-9


@settings(deadline=None)
@given(st.integers(2, 40), st.floats(0, 30))
def test_one_logit_above_equal_ones_lies_on_the_floor(n, height):
    logits = np.array([height] + [0.0] * (n - 1))
    assert entropy_of(logits) == pytest.approx(entropy_floor(logits), abs=1e-9)
