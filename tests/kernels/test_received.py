"""Column mass from the backward pass, in the place of a gradient of `received`.

Parity with the definition, in all cases and types, is in `test_parity.py`; this is what else is
promised of it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import flash_launch
from kernels.attention import AttentionSpec, Stats, attention, column_mass
from tests.kernels.cases import (
    ALL_STATS,
    EVERYTHING,
    Case,
    Inputs,
    coefficients,
    make_inputs,
    square,
    unread,
)
from tests.kernels.test_parity import short

SMALL: dict[str, Any] = {"B": 1, "H": 2, "Hkv": 1}
CASES = [
    square("causal", 37, B=1),
    square("sink logit", 33, sink_logit="learned", **SMALL),
    square("window, sinks", 35, options={"window": 5, "sinks": 2}, **SMALL),
    Case(name="dead rows, sink logit", T=21, S=9, sink_logit="learned", **SMALL),
    Case(name="dead rows", T=21, S=9, **SMALL),
    Case(name="ragged", T=7, S=40, B=3, H=2, Hkv=1, lengths=(40, 17, 0)),
    square("everything, documents", 40, documents=((9, 31),), **EVERYTHING, **SMALL),
]
every_backend = pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])


def forward(inputs: Inputs, backend: str, received: Tensor | None, stats: Stats | None = ALL_STATS):
    return attention(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.spec,
        kv_lengths=inputs.kv_lengths,
        stats=stats,
        received=received,
        backend=backend,
    )


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(CASES[-1], torch.bfloat16), *((case, torch.float32) for case in CASES)],
    ids=short,
)
@every_backend
def test_it_is_what_the_own_pass_sums(backend: str, case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    received = unread(inputs)
    output = forward(inputs, backend, received)
    assert output.lse is not None
    assert output.null_mass is not None
    output.out.float().sum().backward()
    own = column_mass(
        inputs.q,
        inputs.k,
        output.lse,
        inputs.spec,
        kv_lengths=inputs.kv_lengths,
        backend=backend,
    )
    assert received.grad is not None
    torch.testing.assert_close(received.grad, own)
    given = (output.lse.isfinite().float() - output.null_mass).sum(-1)  # what the rows give to keys
    torch.testing.assert_close(received.grad.sum(-1), given.detach())


@pytest.mark.parametrize("stats", [None, ALL_STATS], ids=["plain", "statistics"])
@every_backend
def test_nothing_else_changes_by_a_bit(backend: str, stats: Stats | None) -> None:
    inputs = make_inputs(CASES[-1], torch.bfloat16)
    results = []
    for received in (None, unread(inputs)):
        output = forward(inputs, backend, received, stats)
        upstream = coefficients(output)
        gradients = torch.autograd.grad(
            [getattr(output, name) for name in upstream],
            list(inputs.leaves().values()),
            list(upstream.values()),
        )
        results.append([*(x for x in output if x is not None), *gradients])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_a_plain_call_of_sdpa_changes_by_rounding_alone() -> None:
    inputs = make_inputs(CASES[0], torch.float32)
    outputs = [forward(inputs, "sdpa", x, None).out for x in (None, unread(inputs))]
    torch.testing.assert_close(*outputs)


@every_backend
def test_what_flows_back_does_not_matter(backend: str) -> None:
    """Not through which result, and not how much: zeros are enough."""
    inputs = make_inputs(CASES[1], torch.float32)
    masses = []
    for name, size in (("out", 1.0), ("lse", 0.0), ("entropy", 1e4)):
        received = unread(inputs)
        x = getattr(forward(inputs, backend, received), name)
        masses += torch.autograd.grad(x, received, torch.full_like(x, size))
    assert torch.equal(masses[0], masses[1])
    assert torch.equal(masses[0], masses[2])


@every_backend
def test_backward_passes_and_calls_add_up(backend: str) -> None:
    inputs = make_inputs(CASES[1], torch.float32)
    received = unread(inputs)
    loss = forward(inputs, backend, received).out.sum()
    loss.backward(retain_graph=True)
    assert received.grad is not None
    once = received.grad.clone()
    loss.backward()
    torch.testing.assert_close(received.grad, 2 * once)
    received.grad = None
    (
        forward(inputs, backend, received).out + forward(inputs, backend, received).out
    ).sum().backward()
    torch.testing.assert_close(received.grad, 2 * once)


@every_backend
def test_frozen_inputs_are_measured_too(backend: str) -> None:
    inputs = make_inputs(CASES[0], torch.float32)
    frozen = replace(inputs, q=inputs.q.detach(), k=inputs.k.detach(), v=inputs.v.detach())
    masses = []
    for given in (inputs, frozen):
        received = unread(given)
        masses += torch.autograd.grad(forward(given, backend, received, None).out.sum(), received)
    assert torch.equal(*masses)


@every_backend
def test_without_a_backward_nothing_arrives(backend: str) -> None:
    inputs = make_inputs(CASES[0], torch.float32)
    received = unread(inputs)
    with torch.no_grad():
        assert not forward(inputs, backend, received).out.requires_grad
    assert forward(inputs, backend, received).out.isfinite().all()
    assert received.grad is None


@pytest.mark.parametrize("group_splits", [2, 4])
def test_every_head_of_a_split_group_has_its_own(
    monkeypatch: pytest.MonkeyPatch, group_splits: int
) -> None:
    inputs = make_inputs(square("causal", 37, B=1, H=4, Hkv=1), torch.float32)
    masses = []
    for splits in (1, group_splits):
        monkeypatch.setattr(flash_launch, "_group_splits", lambda *_, splits=splits: splits)
        received = unread(inputs)
        masses += torch.autograd.grad(forward(inputs, "triton", received).out.sum(), received)
    assert torch.equal(*masses)


# What PyTorch's own tracer does to an autograd function, and warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@every_backend
def test_a_compiled_caller_is_one_graph(backend: str) -> None:
    inputs = make_inputs(CASES[1], torch.float32)
    torch.compiler.reset()

    def loss(q: Tensor, received: Tensor) -> Tensor:
        output = attention(
            q * 2, inputs.k, inputs.v, AttentionSpec(), received=received, backend=backend
        )
        return output.out.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    masses = []
    for f in (compiled, loss):
        received = torch.zeros(1, 2, 33, requires_grad=True)
        f(inputs.q, received).backward()
        masses.append(received.grad)
    torch.testing.assert_close(*masses)
    torch.testing.assert_close(masses[0].sum(), torch.tensor(66.0))
