"""Any combination of shapes and options agrees with the definition."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.attention import Stats
from tests.kernels.cases import ALL_STATS, Case, make_inputs
from tests.kernels.test_parity import BACKENDS, assert_close


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    group, kv_heads, batch = (draw(st.integers(1, 3)) for _ in range(3))
    n_keys = draw(st.integers(1, 48))
    causal = draw(st.booleans())
    options: dict[str, object] = {"causal": causal}
    if causal:
        options["window"] = draw(st.none() | st.integers(1, 50))
        options["sinks"] = draw(st.integers(0, 5))
        options["prefix"] = draw(st.integers(0, 50))
    options["softcap"] = draw(st.none() | st.floats(0.5, 30.0))
    per_sequence = [draw(document_lengths(n_keys)) for _ in range(batch)]
    lengths = [draw(st.integers(0, n_keys)) for _ in range(batch)]
    return Case(
        name="random",
        T=draw(st.integers(1, 48)),
        S=n_keys,
        B=batch,
        H=group * kv_heads,
        Hkv=kv_heads,
        D=draw(st.integers(1, 24)),
        Dv=draw(st.integers(1, 24)),
        options=options,
        documents=draw(st.none() | st.just(tuple(per_sequence))),
        lengths=draw(st.none() | st.just(tuple(lengths))),
        slopes=draw(st.booleans()),
        sink_logit=draw(st.sampled_from([None, "zero", "learned", "high"])),
        logit_size=draw(st.sampled_from([1.0, 10.0, 200.0])),
        layout=draw(st.sampled_from(["heads_first", "rows_first"])),
    )


@st.composite
def document_lengths(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    cuts = draw(st.sets(st.integers(1, max(total - 1, 1)), max_size=5))
    edges = [0, *sorted(cut for cut in cuts if cut < total), total]
    return tuple(stop - start for start, stop in itertools.pairwise(edges))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("backend", BACKENDS)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    case=random_cases(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    stats=st.sampled_from([ALL_STATS, None]),
)
def test_any_call_agrees_with_the_definition(
    backend: str, case: Case, dtype: torch.dtype, stats: Stats | None
) -> None:
    assert_close(backend, make_inputs(case, dtype), stats)


@settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(case=random_cases(), stats=st.sampled_from([ALL_STATS, None]))
def test_any_call_to_triton_agrees_with_the_definition(case: Case, stats: Stats | None) -> None:
    assert_close("triton", make_inputs(case, torch.float32), stats)
