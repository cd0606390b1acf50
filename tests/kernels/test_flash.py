"""The Triton kernels, in the interpreter: what parity with the definition does not show."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kernels import flash_launch, flash_op, flash_tiles
from kernels.attention import AttentionSpec, Stats, attention, column_mass
from kernels.flash_common import narrow, product
from kernels.flash_tiles import Tile
from tests.kernels.cases import ALL_STATS, EVERYTHING, Case, Inputs, make_inputs, run, square
from tests.kernels.test_parity import assert_close

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"B": 1, "H": 2, "Hkv": 1}
FULL_CASE = square("everything", 40, documents=((9, 31),), **EVERYTHING, **SMALL)


@pytest.fixture
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tile]:
    rows, keys = request.param
    chosen = Tile(rows, keys, warps=4, stages=1)
    monkeypatch.setattr(flash_tiles, "INTERPRETER", chosen)
    return chosen


TILE_CASES = [
    square("causal", 70, **SMALL),
    square("window and sinks", 70, options={"window": 20, "sinks": 3}, **SMALL),
    square("prefix", 70, options={"prefix": 37}, **SMALL),
    square("prefix and window", 70, options={"prefix": 37, "window": 20}, **SMALL),
    square("long documents", 100, documents=((33, 67),), options={"causal": False}, **SMALL),
    Case(name="ragged", T=40, S=70, lengths=(70, 47), H=2, Hkv=1),
    square(
        "documents, windows, sinks",
        100,
        documents=((50, 10, 40),),
        options={"window": 18, "sinks": 2, "prefix": 19},
        **SMALL,
    ),
]


@pytest.mark.parametrize("tile", [(16, 16), (16, 64), (64, 16)], indirect=True, ids=str)
@pytest.mark.parametrize("case", TILE_CASES, ids=lambda case: case.name)
def test_the_shape_of_a_tile_changes_nothing(tile: Tile, case: Case) -> None:
    assert_close("triton", make_inputs(case, torch.float32))


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh buffers hold NaN here, so an element that is never written shows."""
    stock_empty, stock_like = torch.Tensor.new_empty, torch.empty_like

    def poisoned(self: Tensor, *sizes: Any, **options: Any) -> Tensor:
        fresh = stock_empty(self, *sizes, **options)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x, **o: stock_like(x, **o).fill_(torch.nan))
    for case in (
        square("causal", 70, sink_logit="learned", slopes=True, **SMALL),
        Case(name="ragged", T=20, S=50, lengths=(50, 0, 3), B=3, H=2, Hkv=1, sink_logit="learned"),
        square("window, sinks", 70, options={"window": 3, "sinks": 2}, **SMALL),
    ):
        for name, x in run(make_inputs(case, torch.float32), "triton").items():
            assert not x.isnan().any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_bitwise_equal(dtype: torch.dtype) -> None:
    first, second = (run(make_inputs(FULL_CASE, dtype), "triton") for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@pytest.mark.parametrize("group_splits", [2, 4])
def test_heads_of_a_group_may_be_summed_apart(
    monkeypatch: pytest.MonkeyPatch, group_splits: int
) -> None:
    monkeypatch.setattr(flash_launch, "_group_splits", lambda *_: group_splits)
    for dtype in (torch.float32, torch.bfloat16):
        assert_close("triton", make_inputs(square("causal", 40, B=1, H=4, Hkv=1), dtype))


def test_group_is_split_until_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        multi_processor_count = 10

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    splits = [flash_launch._group_splits(n, 6, torch.device("cuda")) for n in (20, 19, 7, 4, 1)]
    assert splits == [1, 2, 3, 6, 6]


def test_keys_past_the_length_may_be_nan() -> None:
    inputs = make_inputs(Case(name="ragged", T=3, S=40, lengths=(40, 7)), torch.float32)
    expected = run(inputs, "triton")
    with torch.no_grad():
        inputs.k[1, :, 7:] = torch.nan
        inputs.v[1, :, 7:] = torch.nan
    for name, x in run(inputs, "triton").items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("result", ["out", "lse", "entropy"])
def test_gradient_through_one_result_alone(result: str) -> None:
    inputs = make_inputs(square("causal", 20, sink_logit="learned", **SMALL), torch.float32)
    leaves = list(inputs.leaves().values())
    gradients = []
    for backend in ("triton", "eager"):
        output = attention(
            inputs.q, inputs.k, inputs.v, inputs.spec, stats=ALL_STATS, backend=backend
        )
        loss = getattr(output, result).square().sum()
        gradients.append(torch.autograd.grad(loss, leaves, materialize_grads=True))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def test_upstream_gradients_may_have_any_strides() -> None:
    inputs = make_inputs(square("causal", 20, **SMALL), torch.float32)
    weight = torch.randn(1, 2, 16, 20).mT  # (B, H, T, Dv) with a unit stride in T
    gradients = []
    for backend in ("triton", "eager"):
        out = attention(inputs.q, inputs.k, inputs.v, inputs.spec, backend=backend).out
        gradients.append(torch.autograd.grad(out, inputs.q, weight)[0])
    torch.testing.assert_close(*gradients)


def test_infinite_gradients_of_rows_that_see_nothing_go_nowhere() -> None:
    inputs = make_inputs(Case(name="dead rows", T=9, S=4, **SMALL), torch.float32)
    output = attention(inputs.q, inputs.k, inputs.v, inputs.spec, stats=ALL_STATS, backend="triton")
    upstream = torch.zeros_like(output.lse)
    upstream[:, :, :5] = torch.inf
    leaves = list(inputs.leaves().values())
    results = [output.lse, output.entropy]
    for x in torch.autograd.grad(results, leaves, [upstream, upstream]):
        assert (x == 0).all()


def test_frozen_inputs_get_no_gradient() -> None:
    inputs = make_inputs(FULL_CASE, torch.float32)
    spec = replace(
        inputs.spec,
        alibi_slopes=inputs.spec.alibi_slopes.detach(),
        sink_logit=inputs.spec.sink_logit.detach(),
    )
    k, v = inputs.k.detach(), inputs.v.detach()
    (gradient,) = torch.autograd.grad(
        attention(inputs.q, k, v, spec, backend="triton").out.sum(), inputs.q
    )
    full = attention(inputs.q, inputs.k, inputs.v, inputs.spec, backend="triton").out
    assert torch.equal(gradient, torch.autograd.grad(full.sum(), inputs.q)[0])


def test_double_backward_raises() -> None:
    inputs = make_inputs(square("causal", 9, **SMALL), torch.float32)
    out = attention(inputs.q, inputs.k, inputs.v, inputs.spec, backend="triton").out
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs.q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(gradient.sum(), inputs.q)


def future_gradient(inputs: Inputs, t: int) -> tuple[Tensor, Tensor]:
    """How much output, lse and entropy of row t depend on each key: (S,) for k and for v."""
    output = attention(inputs.q, inputs.k, inputs.v, inputs.spec, stats=ALL_STATS, backend="triton")
    assert output.lse is not None
    assert output.entropy is not None
    total = output.out[:, :, t].sum() + output.lse[:, :, t].sum() + output.entropy[:, :, t].sum()
    d_k, d_v = torch.autograd.grad(total, [inputs.k, inputs.v])
    return d_k.abs().sum(dim=(0, 1, 3)), d_v.abs().sum(dim=(0, 1, 3))


@pytest.mark.parametrize("t", [0, 31, 32, 45])
def test_a_row_depends_on_every_key_up_to_it_and_on_none_after(t: int) -> None:
    inputs = make_inputs(square("causal", 50, sink_logit="learned", **SMALL), torch.float32)
    for reach in future_gradient(inputs, t):
        assert (reach[t + 1 :] == 0).all()
        assert (reach[: t + 1] > 0).all()


def test_both_precisions_meet_the_bound() -> None:
    inputs = make_inputs(square("causal", 40, **SMALL), torch.float32)
    outputs = [
        attention(inputs.q, inputs.k, inputs.v, inputs.spec, backend="triton", precision=precision)
        for precision in ("tf32x3", "ieee")
    ]
    for output in outputs:
        torch.testing.assert_close(
            output.out, attention(inputs.q, inputs.k, inputs.v, inputs.spec, backend="eager").out
        )


@triton.jit
def _narrow_kernel(X, Y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(Y + at, narrow(tl.load(X + at), Y.dtype.element_ty))


@triton.jit
def _product_kernel(A, B, C, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    at = row * N + column
    tl.store(C + at, product(tl.load(A + at), tl.load(B + at), "ieee"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11  # half a unit in the last place of 1
    ties = torch.tensor([1 + step, 1 + 3 * step, -1 - step, 1 + 1.01 * step, 1 + 0.99 * step, 0.0])
    x = torch.cat([ties, torch.randn(64 - len(ties))])
    y = torch.empty(64, dtype=dtype)
    _narrow_kernel[(1,)](x, y, 64)
    assert torch.equal(y, x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_of_the_numbers(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 16, 16).to(dtype)
    c = torch.empty(16, 16)
    _product_kernel[(1,)](a, b, c, 16)
    torch.testing.assert_close(c, a.float() @ b.float())


@pytest.mark.parametrize(("names", "measure"), [("", False), ("entropy mean_distance", True)])
def test_the_operations_are_well_formed(names: str, measure: bool) -> None:
    case = square("sink", 7, sink_logit="learned", slopes=True, **SMALL)
    inputs = make_inputs(case, torch.float32)
    lengths = torch.tensor([5], dtype=torch.int32)
    tensors = (inputs.q, inputs.k, inputs.v, lengths, None, None, inputs.spec.alibi_slopes)
    numbers = (True, 3, 1, 2, None, 0.5, "tf32x3")
    received = torch.zeros(1, 2, 7, requires_grad=True) if measure else None
    torch.library.opcheck(
        flash_op.forward, (*tensors, inputs.spec.sink_logit, *numbers, received, names, [1, 4])
    )
    lse = torch.zeros(1, 2, 7)
    q, k = inputs.q.detach(), inputs.k.detach()
    slopes = inputs.spec.alibi_slopes.detach()
    torch.library.opcheck(flash_op.column_mass, (q, k, lse, lengths, None, None, slopes, *numbers))


@pytest.mark.parametrize("stats", [None, Stats(entropy=True, max_logit=True, sink_mass=(1, 4))])
def test_a_compiled_caller_is_one_graph(stats: Stats | None) -> None:
    inputs = make_inputs(FULL_CASE, torch.float32)
    leaves = list(inputs.leaves().values())
    torch.compiler.reset()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = attention(q * 2, k, v, inputs.spec, stats=stats, backend="triton")
        total = output.out.square().sum()
        return total if output.entropy is None else total + output.entropy.sum()

    compiled: Callable[..., Tensor] = torch.compile(loss, fullgraph=True, backend="aot_eager")
    values = [f(inputs.q, inputs.k, inputs.v) for f in (compiled, loss)]
    torch.testing.assert_close(*values)
    for x, y in zip(*(torch.autograd.grad(value, leaves) for value in values), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("n_rows", "n_keys", "options"),
    [
        (7, 7, {}),
        (3, 9, {}),
        (9, 4, {}),
        (5, 8, {"causal": False}),
        (20, 20, {"window": 4}),
        (20, 20, {"window": 4, "sinks": 2}),
        (20, 20, {"window": 4, "sinks": 9, "prefix": 6}),
        (9, 20, {"prefix": 30}),
    ],
)
def test_operations_are_counted_over_visible_pairs(
    n_rows: int, n_keys: int, options: dict[str, Any]
) -> None:
    q = torch.randn(2, 4, n_rows, 16, requires_grad=True)
    k, v = torch.randn(2, 2, n_keys, 16), torch.randn(2, 2, n_keys, 32)
    spec = AttentionSpec(**options)
    # The weights themselves, without a scale: every visible key has some.
    identity = torch.eye(n_keys).expand(2, 2, n_keys, n_keys)
    pairs = int((attention(q, k, identity, spec, backend="eager").out > 0).sum())
    with FlopCounterMode(display=False) as counter:
        out = attention(q, k, v, spec, backend="triton").out
    assert counter.get_total_flops() == 2 * pairs * (16 + 32)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * 16 + 2 * 32)


def test_a_cpu_without_the_interpreter_is_refused_in_one_line() -> None:
    code = (
        "import torch; from kernels.attention import *; x = torch.zeros(1, 1, 2, 16)\n"
        "try: attention(x, x, x, AttentionSpec(), backend='triton')\n"
        "except ValueError as error: print(error)"
    )
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout.startswith("attention backend 'triton' runs on CUDA and ROCm devices")
    assert done.stdout.count("\n") == 1


def test_column_mass_reads_the_lse_in_any_layout() -> None:
    inputs = make_inputs(square("causal", 20, **SMALL), torch.float32)
    lse = torch.randn(20, 2, 1).permute(2, 1, 0)
    masses = [
        column_mass(inputs.q, inputs.k, lse, inputs.spec, backend=backend)
        for backend in ("triton", "eager")
    ]
    torch.testing.assert_close(*masses)
