"""The few numbers that stand for a whole record of heads in ``metrics.jsonl`` and trackers.

Every key carries the record's source, "train/" or "probe/", in front. What a record did not
measure has no key; training statistics lack what takes the probe.

    key                                     what
    attn/entropy_norm/mean, .../min_head    mean, lowest head
    attn/entropy_norm/p10, p50, p90         quantiles over all heads
    attn/collapsed_frac                     share of heads with entropy_norm below 0.05
    attn/max_prob/mean
    attn/mean_distance_norm/mean            of distance_norm
    attn/sink_rate                          share of sequences and heads with a sink
    attn/alpha0_mean, alpha0_max            mean, highest head
    attn/alpha0_p10, _p50, _p90             quantiles over all heads
    attn/sink_mass_1, sink_mass_4
    attn/sink_mass_1_p10, _p50, _p90        where there is no alpha_0
    attn/sink_vnorm, sink_knorm             over key/value heads
    attn/null_mass/mean                     where heads can attend to nothing
    attn/max_logit/max                      the largest of all
    attn/logit_std/mean
    attn/qk_gain/mean                       qk_norm over that of the run's first probe
    resid/massive/count, max_over_median    per sequence
    heads/prev_token/max, duplicate/max, induction/max
    icl/score, icl/repeat_gain
    attn/layer03/entropy_norm, alpha0       mean of the layer's heads
    attn/layer03/max_logit                  the largest of the layer
    attn/layer03/grad_norm_q, _k, _v, _o    of the projections' gradients, before clipping
    attn/layer03/head05/entropy, alpha0, max_logit      where there are at most 16 heads in all

Means are over the heads of each layer, then over layers. Extremes and quantiles are over heads,
each with its mean over rows (max_logit: with its largest).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from analysis.events import Thresholds
from analysis.head_files import HeadRecord

COLLAPSED = Thresholds().collapse  # the same in all runs, so that they can be compared
QUANTILES = (10, 50, 90)  # per cent
MAX_HEADS_SHOWN = 16  # in the whole model, with keys of their own

# Keys, and the measures they are made of.
MEANS = {
    "attn/entropy_norm/mean": "entropy_norm",
    "attn/max_prob/mean": "max_prob",
    "attn/mean_distance_norm/mean": "distance_norm",
    "attn/sink_rate": "sink_rate",
    "attn/alpha0_mean": "alpha_0",
    "attn/sink_mass_1": "sink_mass_1",
    "attn/sink_mass_4": "sink_mass_4",
    "attn/sink_vnorm": "sink_vnorm",
    "attn/sink_knorm": "sink_knorm",
    "attn/null_mass/mean": "null_mass",
    "attn/logit_std/mean": "logit_std",
    "resid/massive/count": "massive_count",
    "resid/massive/max_over_median": "massive_max_over_median",
    "icl/score": "icl_score",
    "icl/repeat_gain": "repeat_gain",
}
MAXIMA = {
    "attn/alpha0_max": "alpha_0",
    "attn/max_logit/max": "max_logit",
    "heads/prev_token/max": "prev_token",
    "heads/duplicate/max": "duplicate",
    "heads/induction/max": "induction",
}
PER_LAYER: dict[str, tuple[str, Callable[..., np.ndarray]]] = {
    "entropy_norm": ("entropy_norm", np.mean),
    "alpha0": ("alpha_0", np.mean),
    "max_logit": ("max_logit", np.max),
}
PER_HEAD = {"entropy": "entropy", "alpha0": "alpha_0", "max_logit": "max_logit"}


def scalars(record: HeadRecord, first_probe: HeadRecord | None = None) -> dict[str, float]:
    """The logged keys of a record and their values.

    Args:
        record: of either source.
        first_probe: the run's first, which qk_gain is measured against; without it, or when it
            looked at other layers, there is no qk_gain.
    """
    found = {name: measure.values for name, measure in record.measures.items()}
    with np.errstate(invalid="ignore"):  # infinities of both signs make a mean that is no number
        values = _over_all(found)
        gain = _qk_gain(record, first_probe)
        if gain is not None:
            values["attn/qk_gain/mean"] = float(np.mean(gain))
        for i, layer in enumerate(record.layers):
            values |= _of_layer(f"attn/layer{layer:02d}", found, i)
    return {f"{record.kind}/{key}": value for key, value in values.items()}


def _over_all(found: dict[str, np.ndarray]) -> dict[str, float]:
    # Every layer has as many heads as any other, so one mean is the mean over both.
    values = {key: float(np.mean(found[name])) for key, name in MEANS.items() if name in found}
    values |= {key: float(np.max(found[name])) for key, name in MAXIMA.items() if name in found}
    if "entropy_norm" in found:
        entropy_norm = found["entropy_norm"]
        values["attn/entropy_norm/min_head"] = float(np.min(entropy_norm))
        values["attn/collapsed_frac"] = float(np.mean(entropy_norm < COLLAPSED))
        values |= _quantiles("attn/entropy_norm/", entropy_norm)
    if "alpha_0" in found:
        values |= _quantiles("attn/alpha0_", found["alpha_0"])
    elif "sink_mass_1" in found:
        values |= _quantiles("attn/sink_mass_1_", found["sink_mass_1"])
    return values


def _of_layer(prefix: str, found: dict[str, np.ndarray], i: int) -> dict[str, float]:
    """What has keys of its own for the `i`-th layer of the record, and for its heads."""
    values = {
        f"{prefix}/{key}": float(reduce(found[name][i]))
        for key, (name, reduce) in PER_LAYER.items()
        if name in found
    }
    values |= {
        f"{prefix}/{name}": float(found[name][i]) for name in found if name.startswith("grad_norm_")
    }
    for key, name in PER_HEAD.items():
        if name in found and found[name].size <= MAX_HEADS_SHOWN:
            for head, value in enumerate(found[name][i].tolist()):
                values[f"{prefix}/head{head:02d}/{key}"] = value
    return values


def _qk_gain(record: HeadRecord, first_probe: HeadRecord | None) -> np.ndarray | None:
    if first_probe is None or first_probe.layers != record.layers:
        return None
    if "qk_norm" not in record.measures or "qk_norm" not in first_probe.measures:
        return None
    first = first_probe.measures["qk_norm"].values
    return record.measures["qk_norm"].values / first if np.all(first > 0) else None


def _quantiles(prefix: str, heads: np.ndarray) -> dict[str, float]:
    found = np.percentile(heads, QUANTILES)
    return {f"{prefix}p{q}": float(x) for q, x in zip(QUANTILES, found, strict=True)}
