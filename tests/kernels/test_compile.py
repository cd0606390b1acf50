"""Attention inside a compiled caller: one whole graph, the same values and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import chunked_op, flash_decode_launch, flash_op
from kernels.attention import AttentionSpec, Stats, attention
from tests.kernels.cases import EVERYTHING, Case, make_inputs, square


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


@pytest.mark.parametrize(("names", "measure"), [("", False), ("entropy mean_distance", True)])
def test_the_operation_is_well_formed(names: str, measure: bool) -> None:
    inputs = make_inputs(square("sink", 7, sink_logit="learned", slopes=True), torch.float32)
    spec = inputs.spec
    received = torch.zeros(2, 4, 7, requires_grad=True) if measure else None
    tensors = (inputs.q, inputs.k, inputs.v, torch.tensor([7, 3], dtype=torch.int32), None)
    torch.library.opcheck(
        chunked_op._forward,
        (
            *tensors,
            spec.alibi_slopes,
            spec.sink_logit,
            True,
            3,
            1,
            2,
            None,
            0.5,
            received,
            names,
            [1, 4],
        ),
    )


def test_the_triton_backward_is_well_formed_by_itself() -> None:
    inputs = make_inputs(
        square("sink", 7, B=1, H=2, Hkv=1, sink_logit="learned", slopes=True), torch.float32
    )
    vectors = inputs.spec.alibi_slopes, inputs.spec.sink_logit
    qkv = inputs.q.detach(), inputs.k.detach(), inputs.v.detach()
    tensors = (
        *qkv,
        torch.tensor([5], dtype=torch.int32),
        None,
        None,
        *(x.detach() for x in vectors),
    )
    numbers = (True, 3, 1, 2, None, 0.5, "ieee")
    out, lse, entropy, *_ = flash_op.forward(*tensors, *numbers, None, "entropy", [])
    results = out, lse, entropy
    upstream = tuple(torch.randn_like(x) for x in results)
    torch.library.opcheck(flash_op.backward, (*tensors, *results, *upstream, True, True, *numbers))


def test_the_triton_operation_is_well_formed_where_it_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_decode_launch, "KEYS_PER_SPLIT", 16)
    case = Case(name="decode", T=1, S=40, B=1, H=2, Hkv=1, documents=((9, 31),), lengths=(37,))
    inputs = make_inputs(case, torch.float32)
    starts = torch.tensor([[0] * 9 + [9] * 31], dtype=torch.int32)
    ends = torch.tensor([[9] * 9 + [40] * 31], dtype=torch.int32)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.kv_lengths, starts, ends, None, None)
    numbers = (True, 30, 1, 2, None, 0.5, "ieee")
    statistics = "entropy max_logit", [1, 4]
    torch.library.opcheck(flash_op.forward, (*tensors, *numbers, None, *statistics))
