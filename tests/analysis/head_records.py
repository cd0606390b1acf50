"""Made-up records for tests of what reads them."""

from __future__ import annotations

import numpy as np

from analysis.head_files import HeadRecord, Measure

HEAD = ["entropy", "entropy_norm", "max_prob", "mean_distance", "distance_norm"]
HEAD += ["sink_mass_1", "sink_mass_4", "max_logit"]
PROBE_HEAD = ["alpha_0", "sink_rate", "sink_cos", "sink_write", "logit_std", "qk_norm", "write"]
PROBE_HEAD += ["prev_token", "prev_token_text", "duplicate", "induction"]
UNIFORM = ["entropy", "max_prob", "mean_distance", "distance_norm", "sink_mass_1", "sink_mass_4"]
PROBE_UNIFORM = ["alpha_0", "prev_token", "duplicate", "induction", "prev_token_text"]
PROBE_LAYER = ["sink_hnorm", "massive_count", "massive_max", "massive_max_over_median"]
GRADIENTS = ["grad_norm_q", "grad_norm_k", "grad_norm_v", "grad_norm_o"]
SCALARS = ["icl_score", "repeat_gain", "loss"]


def made_up(
    kind: str, step: int, layers: tuple[int, ...] = (0, 1), heads: int = 2, kv_heads: int = 1
) -> HeadRecord:
    """A record with every measure of its source, filled with random numbers between 0 and 1."""
    rng = np.random.default_rng([step, len(kind)])
    n = len(layers)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = dict.fromkeys(HEAD, ("head", (n, heads)))
    shapes |= {f"uniform/{x}": ("layer", (n,)) for x in UNIFORM}
    if kind == "train":
        shapes |= dict.fromkeys(GRADIENTS, ("layer", (n,)))
    else:
        shapes |= dict.fromkeys(PROBE_HEAD, ("head", (n, heads)))
        shapes |= {f"uniform/{x}": ("layer", (n,)) for x in PROBE_UNIFORM}
        shapes |= dict.fromkeys(PROBE_LAYER, ("layer", (n,)))
        shapes |= dict.fromkeys(("sink_vnorm", "sink_knorm"), ("kv_head", (n, kv_heads)))
        shapes |= dict.fromkeys(SCALARS, ("scalar", ()))
    measures = {
        name: Measure(axis, np.asarray(rng.uniform(size=shape)))
        for name, (axis, shape) in shapes.items()
    }
    return HeadRecord(kind, step, layers, measures)


def changed(record: HeadRecord, **values: object) -> HeadRecord:
    """The record with other values of some measures; None takes a measure away."""
    measures = dict(record.measures)
    for name, value in values.items():
        axis = measures.pop(name).axis
        if value is not None:
            measures[name] = Measure(axis, np.asarray(value, dtype=np.float64))
    return record._replace(measures=measures)
