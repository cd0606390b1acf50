"""The public functions: which path a call takes, and one-line errors for calls that do not fit."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels import sdpa
from kernels.attention import (
    BACKENDS,
    AttentionSpec,
    Stats,
    attention,
    column_mass,
    pick_backend,
)
from tests.kernels.cases import ALL_STATS, make_inputs, square


def tensors(**shapes: tuple[int, ...]) -> list[torch.Tensor]:
    defaults = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 8)}
    return [torch.randn(shapes.get(name, shape)) for name, shape in defaults.items()]


BAD_CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "groups": (
        lambda: attention(*tensors(k=(2, 3, 7, 8), v=(2, 3, 7, 8)), AttentionSpec()),
        "4 query heads cannot share 3 key/value heads",
    ),
    "head size": (
        lambda: attention(*tensors(q=(2, 4, 5, 257), k=(2, 2, 7, 257)), AttentionSpec()),
        "head size 257 is above the limit of 256",
    ),
    "value head size": (
        lambda: attention(*tensors(v=(2, 2, 7, 300)), AttentionSpec()),
        "value head size 300 is above the limit of 256",
    ),
    "head sizes differ": (
        lambda: attention(*tensors(k=(2, 2, 7, 9)), AttentionSpec()),
        "differ in batch or head size",
    ),
    "batch differs": (
        lambda: attention(*tensors(k=(1, 2, 7, 8), v=(1, 2, 7, 8)), AttentionSpec()),
        "differ in batch or head size",
    ),
    "dimensions": (
        lambda: attention(*tensors(q=(4, 5, 8)), AttentionSpec()),
        r"got \(4, 5, 8\)",
    ),
    "no keys": (
        lambda: attention(*tensors(k=(2, 2, 0, 8), v=(2, 2, 0, 8)), AttentionSpec()),
        "at least one query and one key; got 5 and 0",
    ),
    "value length": (
        lambda: attention(*tensors(v=(2, 2, 6, 8)), AttentionSpec()),
        r"v \(2, 2, 6, 8\) must have batch, heads and length of k \(2, 2, 7, 8\)",
    ),
    "types differ": (
        lambda: attention(*(x.to(t) for x, t in zip(tensors(), MIXED, strict=True)), SPEC),
        "q is torch.float32 and v is torch.bfloat16",
    ),
    "integers": (
        lambda: attention(*(x.int() for x in tensors()), AttentionSpec()),
        "q is torch.int32",
    ),
    "devices differ": (
        lambda: attention(*(x.to(d) for x, d in zip(tensors(), DEVICES, strict=True)), SPEC),
        "q is on cpu and k on meta",
    ),
    "stride": (
        lambda: attention(*(x.mT.contiguous().mT for x in tensors()), AttentionSpec()),
        "q has stride 5 in its last dimension; it must be 1",
    ),
    "documents shape": (
        lambda: attention(*tensors(), AttentionSpec(documents=torch.zeros(2, 5).long())),
        r"documents has shape \(2, 5\); it must be \(2, 7\)",
    ),
    "documents type": (
        lambda: attention(*tensors(), AttentionSpec(documents=torch.zeros(2, 7))),
        "documents is torch.float32; it must be one of int32, int64",
    ),
    "slopes": (
        lambda: attention(*tensors(), AttentionSpec(alibi_slopes=torch.zeros(2))),
        r"alibi_slopes has shape \(2,\); it must be \(4,\)",
    ),
    "sink logit": (
        lambda: attention(*tensors(), AttentionSpec(sink_logit=torch.zeros(4, 1))),
        r"sink_logit has shape \(4, 1\); it must be \(4,\)",
    ),
    "kv_lengths": (
        lambda: attention(*tensors(), AttentionSpec(), kv_lengths=torch.tensor([1.0, 2.0])),
        "kv_lengths is torch.float32; it must be one of int32, int64",
    ),
    "window": (lambda: AttentionSpec(window=0), "window is 0; it must be at least 1"),
    "sinks": (lambda: AttentionSpec(window=3, sinks=-1), "sinks is -1"),
    "prefix": (lambda: AttentionSpec(prefix=-2), "prefix is -2"),
    "window without causal": (
        lambda: AttentionSpec(causal=False, window=3),
        "window is 3 with causal=False",
    ),
    "prefix without causal": (
        lambda: AttentionSpec(causal=False, prefix=3),
        "prefix is 3 with causal=False",
    ),
    "soft-cap": (lambda: AttentionSpec(softcap=0.0), "softcap is 0.0; it must be above 0"),
    "scale": (lambda: AttentionSpec(scale=-1.0), "scale is -1.0; it must be above 0"),
    "sink mass": (lambda: Stats(sink_mass=(4, 17)), "sink_mass over 17 keys"),
    "statistic": (lambda: Stats.of(["entropi"]), "'entropi'; did you mean 'entropy'"),
    "no such statistic": (lambda: Stats.of(["xyz"]), "'xyz'; choose from lse, entropy"),
    "precision": (
        lambda: attention(*tensors(), AttentionSpec(), precision="tf32"),
        "unknown precision 'tf32'; choose from tf32x3, ieee",
    ),
    "backend": (
        lambda: attention(*tensors(), AttentionSpec(), backend="flash"),
        "unknown attention backend 'flash'; choose from auto, eager, sdpa, triton",
    ),
    "triton": (
        lambda: attention(*(x.double() for x in tensors()), SPEC, backend="triton"),
        "'triton' takes bfloat16, float16 or float32, not torch.float64",
    ),
    "received shape": (
        lambda: attention(*tensors(), SPEC, received=torch.zeros(2, 2, 7, requires_grad=True)),
        r"received has shape \(2, 2, 7\); it must be \(2, 4, 7\)",
    ),
    "received type": (
        lambda: attention(*tensors(), SPEC, received=torch.zeros(2, 4, 7).bfloat16()),
        "received is torch.bfloat16; it must be one of float32",
    ),
    "received device": (
        lambda: attention(*tensors(), SPEC, received=torch.zeros(2, 4, 7, device="meta")),
        "q is on cpu and received on meta",
    ),
    "received without grad": (
        lambda: attention(*tensors(), SPEC, received=torch.zeros(2, 4, 7)),
        "received does not require grad; make it with requires_grad=True",
    ),
    "column mass, lse": (
        lambda: column_mass(*tensors()[:2], torch.zeros(2, 4, 7), AttentionSpec()),
        r"lse has shape \(2, 4, 7\); it must be \(2, 4, 5\)",
    ),
    "column mass, backend": (
        lambda: column_mass(
            *(x.double() for x in tensors()[:2]), torch.zeros(2, 4, 5), SPEC, backend="triton"
        ),
        "'triton' takes bfloat16, float16 or float32, not torch.float64",
    ),
}
SPEC = AttentionSpec()
every_backend = pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
MIXED = (torch.float32, torch.float32, torch.bfloat16)
DEVICES = ("cpu", "meta", "cpu")


@pytest.mark.parametrize(("call", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_a_call_that_does_not_fit_is_refused_in_one_line(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


class Counter:
    """Counts calls of PyTorch's own attention and lets them through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        stock = F.scaled_dot_product_attention

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.calls += 1
            return stock(*args, **kwargs)

        monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", counted)


@pytest.mark.parametrize(
    ("n_rows", "options", "stats", "plain"),
    [
        (7, {}, None, True),
        (7, {}, Stats(), True),
        (7, {"window": 7}, None, True),
        (7, {"scale": 0.3}, None, True),
        (7, {"causal": False}, None, True),
        (3, {"causal": False}, None, True),
        (1, {}, None, True),
        (1, {"window": 3}, None, True),
        (1, {"prefix": 3}, None, True),
        (7, {}, Stats(lse=True), True),
        (7, {"window": 6}, None, False),
        (7, {"prefix": 2}, None, False),
        (7, {"softcap": 3.0}, None, False),
        (3, {}, None, False),
        (1, {"window": 3, "sinks": 1}, None, False),
        (1, {"window": 3, "prefix": 9}, None, False),
    ],
    ids=str,
)
def test_plain_calls_go_to_the_stock_operation(
    monkeypatch: pytest.MonkeyPatch,
    n_rows: int,
    options: dict[str, Any],
    stats: Stats | None,
    plain: bool,
) -> None:
    counter = Counter(monkeypatch)
    q, k, v = tensors(q=(2, 4, n_rows, 8))
    attention(q, k, v, AttentionSpec(**options), stats=stats, backend="sdpa")
    assert counter.calls == int(plain)


def test_values_of_another_size_stay_off_the_stock_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = Counter(monkeypatch)
    attention(*tensors(q=(2, 4, 7, 8), v=(2, 2, 7, 6)), AttentionSpec(), backend="sdpa")
    assert counter.calls == 0


def test_auto_is_the_backend_that_the_device_stands_for() -> None:
    assert pick_backend(torch.device("cpu")) == "sdpa"
    assert {"auto", pick_backend(torch.device("cpu"))} <= set(BACKENDS)
    inputs = make_inputs(square("causal", 9), torch.float32)
    auto, named = (
        attention(inputs.q, inputs.k, inputs.v, inputs.spec, stats=ALL_STATS, backend=backend)
        for backend in ("auto", "sdpa")
    )
    assert torch.equal(auto.out, named.out)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_statistics_change_no_bit_of_output_or_gradients(
    backend: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    inputs = make_inputs(square("causal", 65, options=options), dtype)
    q, k, v = inputs.q, inputs.k, inputs.v
    plain, measured = (
        attention(q, k, v, inputs.spec, stats=stats, backend=backend).out
        for stats in (None, ALL_STATS)
    )
    assert torch.equal(measured, plain)
    upstream = torch.randn_like(plain)
    for gradients in zip(
        *(torch.autograd.grad(out, (q, k, v), upstream) for out in (plain, measured)), strict=True
    ):
        assert torch.equal(*gradients)


@pytest.mark.parametrize("options", [{}, {"causal": False}], ids=str)
def test_statistics_of_a_stock_call_are_those_of_the_definition(options: dict[str, Any]) -> None:
    inputs = make_inputs(square("causal", 65, options=options), torch.float32)
    q, k, v = inputs.q, inputs.k, inputs.v
    found, true = (
        attention(q, k, v, inputs.spec, stats=ALL_STATS, backend=backend)
        for backend in ("sdpa", "eager")
    )
    for result, expected in zip(found, true, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=2e-5)
    of_found, of_true = (
        torch.autograd.grad(x.out.sum() + 2 * x.lse.sum() - x.entropy.sum(), (q, k, v))
        for x in (found, true)
    )
    torch.testing.assert_close(of_found, of_true, rtol=1e-5, atol=1e-5)


@every_backend
def test_only_what_was_asked_for_is_returned(backend: str) -> None:
    inputs = make_inputs(square("causal", 9), torch.float32)
    for name in ALL_STATS.row_names:
        stats = Stats.of([name])
        output = attention(inputs.q, inputs.k, inputs.v, inputs.spec, stats=stats, backend=backend)
        present = [field for field, value in output._asdict().items() if value is not None]
        assert present == ["out", name]
    output = attention(
        inputs.q, inputs.k, inputs.v, inputs.spec, stats=Stats(sink_mass=(3,)), backend=backend
    )
    assert output.sink_mass is not None
    assert output.sink_mass.shape == (2, 4, 9, 1)


@pytest.mark.parametrize("stats", [None, ALL_STATS], ids=["plain", "statistics"])
@every_backend
def test_autocast_changes_nothing(backend: str, stats: Stats | None) -> None:
    inputs = make_inputs(square("causal", 9), torch.float32)
    expected = attention(inputs.q, inputs.k, inputs.v, SPEC, stats=stats, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(inputs.q, inputs.k, inputs.v, SPEC, stats=stats, backend=backend)
    assert output.out.dtype == torch.float32
    assert torch.equal(output.out, expected.out)
    gradient, expected_gradient = (
        torch.autograd.grad(x.out.sum(), inputs.q)[0] for x in (output, expected)
    )
    assert torch.equal(gradient, expected_gradient)


def test_autocast_does_not_reach_into_the_backward_of_the_chunks() -> None:
    inputs = make_inputs(square("causal", 9), torch.float32)
    gradients = []
    for enabled in (False, True):
        output = attention(inputs.q, inputs.k, inputs.v, AttentionSpec(window=3), backend="sdpa")
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            gradients.append(torch.autograd.grad(output.out.sum(), inputs.q)[0])
    assert torch.equal(*gradients)


@every_backend
def test_rows_that_see_nothing(backend: str) -> None:
    inputs = make_inputs(square("causal", 9), torch.float32)
    k, v = inputs.k[:, :, :3], inputs.v[:, :, :3]
    z = torch.randn(4)
    for sink_logit in (None, z):
        spec = AttentionSpec(sink_logit=sink_logit)
        output = attention(inputs.q, k, v, spec, stats=ALL_STATS, backend=backend)
        dead = {name: x[:, :, :6].detach() for name, x in output._asdict().items()}
        lse, null, lowest = dead.pop("lse"), dead.pop("null_mass"), dead.pop("max_logit")
        for name, x in dead.items():
            assert (x == 0).all(), name
        assert (lowest == -torch.inf).all()
        if sink_logit is None:
            assert (lse == -torch.inf).all()
            assert (null == 0).all()
        else:
            torch.testing.assert_close(lse, z[:, None].expand_as(lse))
            assert (null == 1).all()


@every_backend
def test_keys_past_the_length_are_never_read_into_a_result(backend: str) -> None:
    """A preallocated cache may hold any numbers past its length."""
    inputs = make_inputs(square("causal", 12), torch.float32)
    q = inputs.q[:, :, :2].detach()
    lengths = torch.tensor([12, 7], dtype=torch.int32)
    k, v = inputs.k.detach().clone(), inputs.v.detach().clone()
    first = attention(q, k, v, SPEC, kv_lengths=lengths, stats=ALL_STATS, backend=backend)
    k[1, :, 7:], v[1, :, 7:] = 1e4, 1e4
    second = attention(q, k, v, SPEC, kv_lengths=lengths, stats=ALL_STATS, backend=backend)
    for name, x in first._asdict().items():
        assert torch.equal(x, getattr(second, name)), name


def test_chunks_write_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh buffers hold NaN here, so an element that is never written shows."""
    stock = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *sizes: Any, **options: Any) -> torch.Tensor:
        return stock(self, *sizes, **options).fill_(torch.nan)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    for case in (square("causal", 70), square("window", 70, options={"window": 3, "sinks": 2})):
        inputs = make_inputs(case, torch.float32)
        output = attention(
            inputs.q, inputs.k, inputs.v, inputs.spec, stats=ALL_STATS, backend="sdpa"
        )
        for name, x in output._asdict().items():
            assert x.isfinite().all(), name
        for x in torch.autograd.grad(output.out.sum(), [inputs.q, inputs.k, inputs.v]):
            assert x.isfinite().all()


def test_two_runs_are_bitwise_equal() -> None:
    case = square("everything", 70, options={"window": 9, "sinks": 3}, sink_logit="learned")
    results = []
    for _ in range(2):
        inputs = make_inputs(case, torch.float32)
        output = attention(
            inputs.q, inputs.k, inputs.v, inputs.spec, stats=ALL_STATS, backend="sdpa"
        )
        gradients = torch.autograd.grad(output.out.sum(), list(inputs.leaves().values()))
        results.append([*output, *gradients])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_every_field_of_a_spec_reaches_the_chunked_operator(monkeypatch):
    """A field added to `AttentionSpec` must not be lost on its way through the operator."""
    from kernels import chunked_op

    numbers = {"causal": True, "window": 5, "sinks": 2, "prefix": 3, "softcap": 7.0, "scale": 0.3}
    tensors = {
        "documents": torch.zeros(1, 6, dtype=torch.int64),
        "alibi_slopes": torch.ones(2),
        "sink_logit": torch.ones(2),
    }
    spec = AttentionSpec(**numbers, **tensors)
    assert {field.name for field in fields(AttentionSpec)} == numbers.keys() | tensors.keys()
    seen = {}
    real = chunked_op.chunked.forward

    def watch(q, k, v, given, *others):
        seen["spec"] = given
        return real(q, k, v, given, *others)

    monkeypatch.setattr(chunked_op.chunked, "forward", watch)
    q = torch.randn(1, 2, 6, 8)
    chunked_op.chunked_attention(q, q, q, spec, None, Stats())
    for name, value in numbers.items():
        assert getattr(seen["spec"], name) == value, name
    for name, tensor in tensors.items():
        assert getattr(seen["spec"], name).equal(tensor), name
