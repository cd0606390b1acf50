"""Every backend agrees with the definition in float64: outputs, gradients, all statistics.

A result may be off by twice the error of the eager version in the same type, or by the amount
in the table below, whichever is larger. A new backend joins by adding its name to BACKENDS.
The Triton kernels run in the interpreter here, which is slow: they take every case in float32,
half of them in a half type too, some without statistics, and most with one key/value head and,
where nothing differs between sequences, one sequence.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention import Stats
from tests.kernels.cases import ALL_STATS, CASES, Case, Inputs, make_inputs, run

BACKENDS = ("sdpa",)

# Relative Frobenius error for inputs of unit variance: output, gradients, statistics.
TABLE = {
    torch.float64: (1e-13, 1e-13, 1e-13),
    torch.float32: (2e-6, 4e-6, 2e-6),
    torch.float16: (5e-4, 8e-4, 2e-6),
    torch.bfloat16: (4e-3, 6e-3, 2e-6),
}


def table_bound(name: str, dtype: torch.dtype) -> float:
    output, gradient, statistic = TABLE[dtype]
    if name == "out":
        return output
    return gradient if name.startswith("d_") else statistic


def error(result: Tensor, truth: Tensor) -> tuple[float, float]:
    """Relative and largest absolute error over the finite entries."""
    finite = truth.isfinite()
    off = (result.double() - truth)[finite]
    size = truth[finite].norm().item()
    relative = off.norm().item() / size if size else (0.0 if not off.any() else float("inf"))
    return relative, off.abs().max().item() if off.numel() else 0.0


def largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def assert_close(backend: str, inputs: Inputs, stats: Stats | None = ALL_STATS) -> None:
    """Compare all results of a backend with the definition in float64."""
    dtype = inputs.q.dtype
    exact = inputs.to(torch.float64)
    everything = run(exact, "eager")
    truth = everything if stats is not None else run(exact, "eager", stats=None)
    results = run(inputs, backend, stats)
    eager = run(inputs, "eager", stats)
    largest_input = max(largest(x) for x in (exact.q, exact.k, exact.v))
    size = 1 + largest(everything["max_logit"]) / 10
    assert results.keys() == truth.keys()
    for name, true in truth.items():
        result = results[name]
        assert result.dtype == eager[name].dtype, name
        assert result.shape == true.shape, name
        same_infinities = (result.double() == true)[~true.isfinite()]
        assert same_infinities.all(), f"{name}: infinities differ"
        relative, absolute = error(result, true)
        own, _ = error(eager[name], true)
        bound = max(2 * own, size * table_bound(name, dtype))
        vanishing = 1e-6 * largest_input  # where the true value is 0, relative error says nothing
        if largest(true) <= vanishing:
            vanishing = max(1e-6, table_bound(name, dtype)) * largest_input
        assert relative <= bound or absolute <= vanishing, (
            f"{name}: error {relative:.2e} relative, {absolute:.2e} absolute; "
            f"allowed {bound:.2e} or {vanishing:.2e} (eager: {own:.2e})"
        )


def slow_cases(dtypes: tuple[torch.dtype, ...], every: int) -> list[tuple[Case, torch.dtype]]:
    """Every n-th case, in turn in each of the types; two of three cut down to one group of heads.

    These have one sequence too, unless documents or lengths differ between the sequences.
    """
    chosen = []
    for n, case in enumerate(CASES[::every]):
        if n % 3:
            alike = case.documents is None and case.lengths is None
            case = replace(case, B=1 if alike else case.B, H=case.H // case.Hkv, Hkv=1)
        chosen.append((case, dtypes[n % len(dtypes)]))
    return chosen


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", TABLE, ids=lambda x: str(x).removeprefix("torch."))


@pytest.mark.usefixtures("small_chunks")
@every_dtype
@every_case
@every_backend
def test_backend_agrees_with_the_definition(backend: str, case: Case, dtype: torch.dtype) -> None:
    assert_close(backend, make_inputs(case, dtype))


@pytest.mark.usefixtures("small_chunks")
@every_case
@every_backend
def test_backend_agrees_without_statistics(backend: str, case: Case) -> None:
    """Without statistics a backend may take another path to the same values."""
    for dtype in (torch.float32, torch.bfloat16):
        assert_close(backend, make_inputs(case, dtype), stats=None)


def short(value: Case | torch.dtype) -> str:
    """Name of a case or a type."""
    return value.name if isinstance(value, Case) else str(value).removeprefix("torch.")


FLOAT32 = slow_cases((torch.float32,), every=1)
HALF = slow_cases((torch.bfloat16, torch.float16), every=2)


@pytest.mark.parametrize(("case", "dtype"), FLOAT32 + HALF, ids=short)
def test_triton_agrees_with_the_definition(case: Case, dtype: torch.dtype) -> None:
    assert_close("triton", make_inputs(case, dtype))


@pytest.mark.parametrize(
    ("case", "dtype"), slow_cases((torch.float32, torch.bfloat16), every=5), ids=short
)
def test_triton_agrees_without_statistics(case: Case, dtype: torch.dtype) -> None:
    assert_close("triton", make_inputs(case, dtype), stats=None)
