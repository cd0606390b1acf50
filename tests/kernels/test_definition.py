"""The eager backend (and every other in float64) equals attention written as plain loops."""

import numpy as np
import pytest
import torch

from kernels.attention import AttentionOutput
from tests.kernels.cases import (
    ALL_STATS,
    EVERYTHING,
    Case,
    Inputs,
    coefficients,
    make_inputs,
    run,
    square,
)
from tests.reference import attention as reference

BACKENDS = ("eager", "sdpa")

SMALL = {"D": 5, "Dv": 3}
CASES = [
    square("causal", 9, **SMALL),
    square("bidirectional", 7, H=3, Hkv=1, options={"causal": False}, **SMALL),
    Case(name="dead rows", T=8, S=5, **SMALL),  # type: ignore[arg-type]
    Case(name="dead rows, sink logit", T=8, S=5, sink_logit="learned", **SMALL),  # type: ignore[arg-type]
    Case(name="dead rows, prefix", T=8, S=5, options={"prefix": 2}, **SMALL),  # type: ignore[arg-type]
    Case(name="ragged", T=4, S=9, lengths=(9, 2), options={"window": 3}, **SMALL),  # type: ignore[arg-type]
    square("window and sinks", 10, options={"window": 3, "sinks": 2}, **SMALL),
    square("prefix", 9, options={"prefix": 4, "window": 2}, **SMALL),
    square("documents", 9, documents=((4, 1, 4), (9,)), options={"causal": False}, **SMALL),
    square(
        "documents, window, sinks, prefix",
        11,
        documents=((6, 5), (1, 10)),
        options={"window": 2, "sinks": 1, "prefix": 3},
        **SMALL,
    ),
    square("alibi", 9, slopes=True, **SMALL),
    square("alibi, bidirectional", 7, slopes=True, options={"causal": False}, **SMALL),
    square("soft-cap", 8, options={"softcap": 1.5}, logit_size=3.0, **SMALL),
    square("sink logit", 8, sink_logit="learned", **SMALL),
    square("logits in the hundreds", 8, logit_size=100.0, sink_logit="learned", **SMALL),
    Case(name="everything", T=9, S=12, lengths=(12, 7), **EVERYTHING, **SMALL),  # type: ignore[arg-type]
    square("everything, documents", 12, documents=((4, 8), (11, 1)), **EVERYTHING, **SMALL),
]


def as_problem(inputs: Inputs) -> reference.Problem:
    spec = inputs.spec

    def array(x: torch.Tensor | None) -> np.ndarray | None:
        return None if x is None else x.detach().numpy()

    return reference.Problem(
        q=inputs.q.detach().numpy(),
        k=inputs.k.detach().numpy(),
        v=inputs.v.detach().numpy(),
        causal=spec.causal,
        window=spec.window,
        sinks=spec.sinks,
        prefix=spec.prefix,
        documents=array(spec.documents),
        alibi_slopes=array(spec.alibi_slopes),
        softcap=spec.softcap,
        scale=spec.scale,
        sink_logit=array(spec.sink_logit),
        kv_lengths=array(inputs.kv_lengths),
        sink_mass=ALL_STATS.sink_mass,
    )


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_equals_the_loops(backend: str, case: Case) -> None:
    inputs = make_inputs(case, torch.float64)
    problem = as_problem(inputs)
    truth = reference.attention(problem)
    shapes = AttentionOutput(*(torch.tensor(truth[name]) for name in ("out", "lse", "entropy")))
    upstream = {name: x.numpy() for name, x in coefficients(shapes).items()}
    gradients = reference.gradients(problem, upstream["out"], upstream["lse"], upstream["entropy"])
    truth |= {f"d_{name}": gradients[name] for name in inputs.leaves()}
    truth["received"] = truth["column_mass"]
    results = run(inputs, backend)
    assert results.keys() == truth.keys()
    for name, true in truth.items():
        np.testing.assert_allclose(
            results[name].numpy(), true, rtol=1e-10, atol=1e-11, err_msg=name
        )
