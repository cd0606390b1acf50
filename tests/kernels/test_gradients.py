"""Gradients agree with finite differences; what has no gradient says so."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention import AttentionSpec, Stats, attention
from tests.kernels.cases import ALL_STATS, EVERYTHING, Case, make_inputs, square

BACKENDS = ("eager", "sdpa")
TINY = {"H": 2, "Hkv": 1, "D": 3, "Dv": 2}
CASES = [
    square("causal", 5, **TINY),
    Case(name="dead rows", T=5, S=3, **TINY),  # type: ignore[arg-type]
    Case(name="dead rows, sink logit", T=5, S=3, sink_logit="learned", **TINY),  # type: ignore[arg-type]
    square("everything", 6, documents=((2, 4), (6,)), **EVERYTHING, **TINY),
]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_agree_with_finite_differences(backend: str, case: Case) -> None:
    inputs = make_inputs(case, torch.float64)
    leaves = inputs.leaves()

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        named = dict(zip(leaves, tensors, strict=True))
        q, k, v = (named.pop(name) for name in ("q", "k", "v"))
        spec = replace(inputs.spec, **named)
        stats = Stats(lse=True, entropy=True)
        output = attention(q, k, v, spec, stats=stats, backend=backend)
        assert output.lse is not None
        assert output.entropy is not None
        lse = output.lse.masked_fill(output.lse == -torch.inf, 0.0)  # differences of inf are NaN
        return output.out, lse, output.entropy

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@pytest.mark.parametrize("result", ["out", "lse", "entropy"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_through_one_result_alone(backend: str, result: str) -> None:
    inputs = make_inputs(square("causal", 9, sink_logit="learned"), torch.float64)
    truth = attention(inputs.q, inputs.k, inputs.v, inputs.spec, stats=ALL_STATS, backend="eager")
    output = attention(inputs.q, inputs.k, inputs.v, inputs.spec, stats=ALL_STATS, backend=backend)
    leaves = list(inputs.leaves().values())
    expected = torch.autograd.grad(
        getattr(truth, result).square().sum(), leaves, materialize_grads=True
    )
    actual = torch.autograd.grad(
        getattr(output, result).square().sum(), leaves, materialize_grads=True
    )
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    "name",
    ["entropy_tokens", "max_logit", "max_prob", "null_mass", "mean_distance", "sink_mass"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_statistics_carry_no_gradient(backend: str, name: str) -> None:
    inputs = make_inputs(square("causal", 9, sink_logit="learned"), torch.float32)
    output = attention(inputs.q, inputs.k, inputs.v, inputs.spec, stats=ALL_STATS, backend=backend)
    assert not getattr(output, name).requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(getattr(output, name).sum(), inputs.q)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_nothing_get_zero_gradient_whatever_flows_back(backend: str) -> None:
    """The square of lse has an infinite gradient where lse is -inf; it must not spread."""
    inputs = make_inputs(Case(name="dead rows", T=6, S=4), torch.float32)
    output = attention(inputs.q, inputs.k, inputs.v, inputs.spec, stats=ALL_STATS, backend=backend)
    assert output.lse is not None
    loss = output.lse.square().sum() + output.out.sum()
    d_q, d_k, d_v = torch.autograd.grad(loss, [inputs.q, inputs.k, inputs.v])
    assert (d_q[:, :, :2] == 0).all()
    for gradient in (d_q, d_k, d_v):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_nan_is_made_on_the_way(backend: str) -> None:
    """NaNs that a later mask would hide still stop a user who looks for them."""
    inputs = make_inputs(Case(name="dead rows", T=6, S=4, logit_size=300.0), torch.float32)
    with torch.autograd.set_detect_anomaly(True):
        output = attention(
            inputs.q, inputs.k, inputs.v, inputs.spec, stats=ALL_STATS, backend=backend
        )
        assert output.entropy is not None
        (output.out.sum() + output.entropy.sum()).backward()


def test_double_backward_of_the_chunks_raises() -> None:
    inputs = make_inputs(square("causal", 9), torch.float64)
    output = attention(inputs.q, inputs.k, inputs.v, AttentionSpec(window=3), backend="sdpa")
    (gradient,) = torch.autograd.grad(output.out.square().sum(), inputs.q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(gradient.sum(), inputs.q)


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_inputs_get_no_gradient(backend: str) -> None:
    inputs = make_inputs(square("causal", 9, slopes=True, sink_logit="learned"), torch.float32)
    frozen = {name: x.detach() for name, x in inputs.leaves().items()}
    spec = replace(
        inputs.spec, alibi_slopes=frozen["alibi_slopes"], sink_logit=frozen["sink_logit"]
    )
    output = attention(inputs.q, frozen["k"], frozen["v"], spec, backend=backend)
    (gradient,) = torch.autograd.grad(output.out.sum(), inputs.q)
    full = attention(inputs.q, inputs.k, inputs.v, inputs.spec, backend=backend)
    (expected,) = torch.autograd.grad(full.out.sum(), inputs.q)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_learned_vectors_in_half_precision_get_gradients_of_their_own_type(backend: str) -> None:
    """A whole model cast to bfloat16 casts its sink logits too."""
    inputs = make_inputs(square("causal", 40, slopes=True, sink_logit="learned"), torch.bfloat16)
    names = ("alibi_slopes", "sink_logit")
    rounded = {name: inputs.leaves()[name].detach().bfloat16() for name in names}
    gradients = {}
    for dtype in (torch.bfloat16, torch.float32):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in rounded.items()}
        spec = replace(inputs.spec, **leaves)
        out = attention(inputs.q, inputs.k, inputs.v, spec, backend=backend).out
        gradients[dtype] = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    for half, full in zip(gradients[torch.bfloat16], gradients[torch.float32], strict=True):
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half, full.bfloat16())
