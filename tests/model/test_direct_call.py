"""Compiled once and then called without checks: only where every input is known for sure."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from model.direct_call import DirectCall, numbers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # on loading the compiler


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch.inference_mode():
        yield


def compilations() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class Scaled:
    """Part of a memory, from `begin` on and `length` long, times a weight."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.layer = nn.Linear(1, 1, bias=False)
            self.layer.weight.data.fill_(2.0)

    def __call__(self, tensors: list[Tensor], sizes: Tensor) -> Tensor:
        begin, length = numbers(sizes)
        return tensors[0].narrow(0, begin, length).sum()[None] * self.layer.weight[0]


def sides(call: DirectCall, memory: Tensor, begin: int, length: int) -> tuple[float, float]:
    got = call("case", [memory], (begin, length), compiles=True).item()
    return got, memory[begin : begin + length].sum().item()


def test_one_compilation_serves_all_numbers_and_changed_weights() -> None:
    function = Scaled()
    call = DirectCall(function, function.layer, {})
    memory = torch.randn(40)
    for begin, length in [(0, 3), (0, 39), (5, 7), (7, 7), (39, 1), (0, 40), (3, 2)]:
        got, plain = sides(call, memory, begin, length)
        assert got == pytest.approx(2 * plain, abs=1e-5)
    with torch.inference_mode(False), torch.no_grad():
        function.layer.weight.mul_(3)
    got, plain = sides(call, torch.randn(40), 1, 30)
    assert got == pytest.approx(6 * plain, abs=1e-5)
    assert compilations() == 1
    assert "case" in call._direct


def test_a_new_case_is_checked_and_compiled_for_what_it_is() -> None:
    function = Scaled()
    call = DirectCall(function, function.layer, {})
    for case, memory in [("float32", torch.randn(9)), ("float64", torch.randn(9).double())]:
        for _ in range(2):
            result = call(case, [memory], (2, 5), compiles=True)
            assert result.dtype == memory.dtype
            torch.testing.assert_close(result, 2 * memory[2:7].sum()[None])
    assert compilations() == 2


def test_what_should_not_be_compiled_for_runs_as_it_is() -> None:
    function = Scaled()
    call = DirectCall(function, function.layer, {})
    result = call("case", [torch.ones(4)], (0, 4), compiles=False)
    assert result.item() == 8
    assert compilations() == 0
    assert "case" not in call._direct


def test_a_tensor_from_elsewhere_keeps_the_checks() -> None:
    held = [torch.ones(1)]
    call = DirectCall(lambda tensors, sizes: tensors[0] * held[0], nn.Identity(), {})
    for value in (1.0, 5.0):
        held[0] = torch.full((1,), value)
        assert call("case", [torch.full((1,), 2.0)], (0, 2), compiles=True).item() == 2 * value
    assert "case" not in call._direct


def test_a_function_in_pieces_keeps_the_checks() -> None:
    def function(tensors: list[Tensor], sizes: Tensor) -> Tensor:
        doubled = tensors[0] * 2
        torch._dynamo.graph_break()
        return doubled + 1

    call = DirectCall(function, nn.Identity(), {})
    for value in (1.0, 2.0):
        result = call("case", [torch.full((1,), value)], (0, 2), compiles=True)
        assert result.item() == 2 * value + 1
    assert "case" not in call._direct


def test_any_number_of_them_is_compiled() -> None:
    """PyTorch stops compiling after so many versions of one function; these are not versions."""
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        function = Scaled()
        call = DirectCall(function, function.layer, {})
        assert sides(call, torch.ones(9), 1, 4) == (8, 4)
        assert "case" in call._direct


def test_nothing_keeps_a_model_alive() -> None:
    function = Scaled()
    call = DirectCall(function, function.layer, {})
    sides(call, torch.ones(9), 1, 4)
    weight = weakref.ref(function.layer.weight)
    del call, function
    gc.collect()
    assert weight() is None


def test_a_number_compiled_for_as_it_is_keeps_the_checks() -> None:
    """As where a check leaves only one length: every length is right, none is called directly."""

    def function(tensors: list[Tensor], sizes: Tensor) -> Tensor:
        return tensors[0] * (3 if numbers(sizes)[1] == 7 else 2)

    call = DirectCall(function, nn.Identity(), {})
    for length, factor in [(7, 3), (5, 2), (7, 3), (6, 2)]:
        assert call("case", [torch.ones(1)], (0, length), compiles=True).item() == factor
    assert "case" not in call._direct
