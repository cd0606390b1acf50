"""The logged numbers of a record: the right keys, means over heads, extremes after row means."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis.head_scalars import scalars
from tests.analysis.head_records import changed, made_up

QUANTILES = ("p10", "p50", "p90")
BOTH = [
    *(f"attn/entropy_norm/{x}" for x in ("mean", "min_head", *QUANTILES)),
    *("attn/collapsed_frac", "attn/max_prob/mean", "attn/mean_distance_norm/mean"),
    *("attn/sink_mass_1", "attn/sink_mass_4", "attn/max_logit/max"),
]
TRAIN = [f"attn/sink_mass_1_{x}" for x in QUANTILES]
PROBE = [
    *("attn/sink_rate", "attn/sink_vnorm", "attn/sink_knorm"),
    *(f"attn/alpha0_{x}" for x in ("mean", "max", *QUANTILES)),
    *("attn/logit_std/mean", "attn/qk_gain/mean"),
    *("resid/massive/count", "resid/massive/max_over_median"),
    *(f"heads/{x}/max" for x in ("prev_token", "duplicate", "induction")),
    *("icl/score", "icl/repeat_gain"),
]


def per_layer(kind: str, layer: int) -> list[str]:
    names = ["entropy_norm", "max_logit"]
    names += ["alpha0"] if kind == "probe" else [f"grad_norm_{x}" for x in "qkvo"]
    return [f"attn/layer{layer:02d}/{name}" for name in names]


def per_head(kind: str, layer: int, heads: int) -> list[str]:
    names = ["entropy", "max_logit"] + (["alpha0"] if kind == "probe" else [])
    return [f"attn/layer{layer:02d}/head{h:02d}/{x}" for h in range(heads) for x in names]


@pytest.mark.parametrize("kind", ["train", "probe"])
def test_the_keys_of_a_small_model(kind: str) -> None:
    record = made_up(kind, 100, layers=(0, 2), heads=8, kv_heads=2)
    expected = BOTH + (TRAIN if kind == "train" else PROBE)
    for layer in (0, 2):
        expected += per_layer(kind, layer) + per_head(kind, layer, 8)
    assert sorted(scalars(record, record)) == sorted(f"{kind}/{key}" for key in expected)


@pytest.mark.parametrize("kind", ["train", "probe"])
def test_more_than_sixteen_heads_have_no_keys_of_their_own(kind: str) -> None:
    keys = scalars(made_up(kind, 100, layers=(0, 1, 11), heads=6))
    assert f"{kind}/attn/layer11/entropy_norm" in keys
    assert not any("head0" in key for key in keys)


def test_values_by_hand() -> None:
    record = changed(
        made_up("probe", 100, heads=3),
        entropy_norm=[[0.04, 0.5, 0.9], [0.6, 0.01, 0.05]],
        alpha_0=[[0.1, 0.2, 0.3], [0.4, 0.5, 0.9]],
        max_logit=[[1, 2, 3], [-4, -5, -6]],
        distance_norm=[[0.1, 0.2, 0.3], [0.2, 0.2, 0.2]],
        sink_vnorm=[[0.5], [1.5]],
        massive_count=[3, 1],
        induction=[[0.1, 0.1, 0.8], [0, 0, 0]],
        icl_score=-0.25,
        entropy=[[1, 2, 3], [4, 5, 6]],
    )
    found = scalars(record)
    expected = {
        "attn/entropy_norm/mean": 0.35,
        "attn/entropy_norm/min_head": 0.01,
        "attn/collapsed_frac": 2 / 6,
        "attn/entropy_norm/p50": (0.05 + 0.5) / 2,
        "attn/alpha0_mean": 0.4,
        "attn/alpha0_max": 0.9,
        "attn/alpha0_p10": 0.15,
        "attn/alpha0_p90": 0.7,
        "attn/max_logit/max": 3,
        "attn/mean_distance_norm/mean": 0.2,
        "attn/sink_vnorm": 1,
        "resid/massive/count": 2,
        "heads/induction/max": 0.8,
        "icl/score": -0.25,
        "attn/layer00/entropy_norm": 0.48,
        "attn/layer01/alpha0": 0.6,
        "attn/layer01/max_logit": -4,
        "attn/layer01/head02/entropy": 6,
        "attn/layer00/head01/alpha0": 0.2,
    }
    assert {key: found[f"probe/{key}"] for key in expected} == pytest.approx(expected)


def test_qk_gain_is_one_at_the_first_probe_and_needs_it() -> None:
    first = changed(made_up("probe", 0), qk_norm=[[1, 2], [4, 4]])
    later = changed(made_up("probe", 50), qk_norm=[[2, 2], [4, 12]])
    assert scalars(first, first)["probe/attn/qk_gain/mean"] == 1
    assert scalars(later, first)["probe/attn/qk_gain/mean"] == (2 + 1 + 1 + 3) / 4
    without = [
        None,
        changed(first, qk_norm=None),
        changed(first, qk_norm=[[0, 1], [1, 1]]),
        first._replace(layers=(0, 5)),
    ]
    for other in without:
        assert "probe/attn/qk_gain/mean" not in scalars(later, other)


def test_gradient_norms_are_those_of_their_layer() -> None:
    record = changed(made_up("train", 10, layers=(1, 3)), grad_norm_q=[0.5, 2.0])
    found = scalars(record)
    assert found["train/attn/layer01/grad_norm_q"] == 0.5
    assert found["train/attn/layer03/grad_norm_q"] == 2.0


def test_a_null_option_has_its_mean() -> None:
    record = made_up("train", 10)
    measures = record.measures | {
        "null_mass": record.measures["max_prob"]._replace(values=np.eye(2))
    }
    assert scalars(record._replace(measures=measures))["train/attn/null_mass/mean"] == 0.5


def test_a_record_without_measures_has_no_keys() -> None:
    assert scalars(made_up("probe", 0)._replace(measures={})) == {}


def test_what_is_not_finite_is_logged_as_such() -> None:
    record = changed(made_up("train", 10), max_logit=[[1, math.inf], [-math.inf, 2]])
    record = changed(record, entropy_norm=[[0.5, math.nan], [0.5, 0.5]])
    found = scalars(record)
    assert found["train/attn/max_logit/max"] == math.inf
    assert found["train/attn/layer01/max_logit"] == 2
    assert math.isnan(found["train/attn/entropy_norm/mean"])
    assert math.isnan(found["train/attn/entropy_norm/p50"])
