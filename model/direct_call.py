"""Call what PyTorch compiled without its checks, for a case that has passed them.

Before every call PyTorch compares each parameter and each size with what it compiled for, and
gathers the parameters anew. For a small model that takes longer than the arithmetic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn


class _Call(NamedTuple):
    """One run of a compiled graph."""

    graph: Callable[..., Sequence[Any]]
    inputs: tuple[Any, ...]
    outputs: Sequence[Any]


class DirectCall:
    """Compile `function(tensors, sizes)`, and call the result directly where that is safe.

    `function` takes a list of tensors and one whose sizes stand for two numbers (see `numbers`),
    so that one compilation serves them all, and returns a tensor. The parameters and buffers it
    reads besides are those of `module`. Every case is compiled for by itself; its first call goes
    through PyTorch's checks, later ones do not. So a case must name all that the checks depend on:
    whatever can change between two calls, except what stands in the tensors and the two numbers.

    Args:
        function: what to compile.
        module: owns the parameters and buffers that `function` reads.
        options: the compiler's own (`torch._inductor.list_options()`).
    """

    def __init__(
        self,
        function: Callable[[list[Tensor], Tensor], Tensor],
        module: nn.Module,
        options: dict[str, Any],
    ):
        self._function = function
        self._module = module
        self._calls: list[_Call] = []
        self._backend = _noting(self._calls, options)
        self._lock = threading.Lock()
        self._direct: dict[Hashable, Callable[[list[Tensor], tuple[int, int]], Tensor]] = {}
        self._compiled: dict[Hashable, Callable[[list[Tensor], Tensor], Tensor]] = {}

    def __call__(
        self, case: Hashable, tensors: list[Tensor], numbers: tuple[int, int], compiles: bool
    ) -> Tensor:
        """Return `function` of these; `compiles` False: as it is, in a case not seen before."""
        direct = self._direct.get(case)
        if direct is not None:
            return direct(tensors, numbers)
        sizes = _sizes(numbers, tensors[0].device)
        if not compiles:
            return self._function(tensors, sizes)
        torch._dynamo.maybe_mark_dynamic(sizes, 0)
        torch._dynamo.maybe_mark_dynamic(sizes, 1)
        with self._lock:
            return self._checked(case, tensors, sizes)

    def _checked(self, case: Hashable, tensors: list[Tensor], sizes: Tensor) -> Tensor:
        """Compile if need be, and call by way of PyTorch's checks."""
        if case not in self._compiled:
            function = _on_its_own(self._function)
            self._compiled[case] = torch.compile(function, backend=self._backend, dynamic=False)
        self._calls.clear()
        result = self._compiled[case](tensors, sizes)
        direct = self._shortcut(tensors, sizes, result)
        self._calls.clear()
        if direct is not None:
            self._direct[case] = direct
        return result

    def _shortcut(
        self, tensors: list[Tensor], sizes: Tensor, result: Tensor
    ) -> Callable[[list[Tensor], tuple[int, int]], Tensor] | None:
        """How to call the graph that just ran; None unless each of its inputs is known for sure."""
        if len(self._calls) != 1:
            return None
        graph, inputs, outputs = self._calls[0]
        if len(outputs) != 1 or outputs[0] is not result:
            return None
        owned = {id(t) for t in (*self._module.parameters(), *self._module.buffers())}
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        fixed: list[Any] = []
        varying: list[tuple[int, int]] = []  # (place among the inputs, place among the tensors)
        sized: list[tuple[int, int]] = []  # (place among the inputs, which of the numbers)
        for at, value in enumerate(inputs):
            fixed.append(None)
            if id(value) in places:
                varying.append((at, places[id(value)]))
            elif isinstance(value, int) and value in sizes.shape:
                sized.append((at, sizes.shape.index(value)))
            elif id(value) in owned:
                fixed[at] = value
            else:
                return None
        if {which for _, which in sized} != {0, 1}:
            return None  # compiled for one of the numbers as it is

        def call(tensors: list[Tensor], numbers: tuple[int, int]) -> Tensor:
            inputs = fixed.copy()
            for at, place in varying:
                inputs[at] = tensors[place]
            for at, which in sized:
                inputs[at] = numbers[which] + OFFSETS[which]
            result: Tensor = graph(*inputs)[0]
            return result

        return call


def _noting(calls: list[_Call], options: dict[str, Any]) -> Callable[..., Any]:
    """A compiler like PyTorch's own, whose products note in `calls` what they are called with.

    PyTorch keeps every compiler for good, so this one must hold no model.
    """

    def compile_graph(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        compiled = cast("Callable[..., Any]", compile_fx(graph, examples, config_patches=options))

        def noted(*inputs: Any) -> Any:
            outputs = compiled(*inputs)
            calls.append(_Call(compiled, inputs, outputs))
            return outputs

        return noted

    return compile_graph


def _on_its_own(
    function: Callable[[list[Tensor], Tensor], Tensor],
) -> Callable[[list[Tensor], Tensor], Tensor]:
    """The same function, which shares its code with no other.

    PyTorch counts how often it has compiled a piece of code, and from the ninth time on does not.
    """

    def call(tensors: list[Tensor], sizes: Tensor) -> Tensor:
        return function(tensors, sizes)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


# The compiler takes the sizes of a tensor as symbols, numbers it would take as constants and
# compile anew for. The offsets keep sizes from being 0 and 1, which are constants to it as well,
# and from being equal to each other or to any other size.
OFFSETS = (1 << 30, 1 << 31)


def _sizes(numbers: tuple[int, int], device: torch.device) -> Tensor:
    return torch.empty(1, 1, device=device).expand(numbers[0] + OFFSETS[0], numbers[1] + OFFSETS[1])


def numbers(sizes: Tensor) -> tuple[int, int]:
    """The two numbers that a compiled function is given as sizes."""
    return sizes.shape[0] - OFFSETS[0], sizes.shape[1] - OFFSETS[1]
