"""Attention inside a compiled caller: one whole graph, the same values and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import chunked_op
from kernels.attention import AttentionSpec, Stats, attention
from tests.kernels.cases import EVERYTHING, make_inputs, square


def loss(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, stats: Stats | None) -> Tensor:
    output = attention(q * 2, k, v, spec, stats=stats)
    total = output.out.square().sum()
    if output.entropy is not None:
        total = total + output.entropy.sum()
    return total


@pytest.mark.parametrize("stats", [None, Stats(entropy=True, max_logit=True, sink_mass=(1, 4))])
@pytest.mark.parametrize(
    "case",
    [square("causal", 9), square("everything", 12, documents=((5, 7), (12,)), **EVERYTHING)],
    ids=lambda case: case.name,
)
def test_a_compiled_caller_is_one_graph(case, stats: Stats | None) -> None:
    inputs = make_inputs(case, torch.float32)
    leaves = list(inputs.leaves().values())
    torch.compiler.reset()

    def caller(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return loss(q, k, v, inputs.spec, stats)

    compiled: Callable[..., Tensor] = torch.compile(caller, fullgraph=True, backend="aot_eager")
    plain_loss = caller(inputs.q, inputs.k, inputs.v)
    compiled_loss = compiled(inputs.q, inputs.k, inputs.v)
    torch.testing.assert_close(compiled_loss, plain_loss)
    for x, y in zip(
        torch.autograd.grad(compiled_loss, leaves),
        torch.autograd.grad(plain_loss, leaves),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("names", ["", "entropy max_logit mean_distance"])
def test_the_operation_is_well_formed(names: str) -> None:
    inputs = make_inputs(square("sink", 7, sink_logit="learned", slopes=True), torch.float32)
    spec = inputs.spec
    tensors = (inputs.q, inputs.k, inputs.v, torch.tensor([7, 3], dtype=torch.int32), None)
    torch.library.opcheck(
        chunked_op._forward,
        (*tensors, spec.alibi_slopes, spec.sink_logit, True, 3, 1, 2, None, 0.5, names, [1, 4]),
    )
