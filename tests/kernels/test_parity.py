"""Every backend agrees with the definition in float64: outputs, gradients, all statistics.

A result may be off by twice the error of the eager version in the same type, or by the amount
in the table below, whichever is larger. A new backend joins by adding its name to BACKENDS.
"""

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import CASES, Case, Inputs, make_inputs, run

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


def assert_close(backend: str, inputs: Inputs) -> None:
    """Compare all results of a backend with the definition in float64."""
    dtype = inputs.q.dtype
    exact = inputs.to(torch.float64)
    truth = run(exact, "eager")
    results = run(inputs, backend)
    eager = run(inputs, "eager")
    largest_input = max(x.abs().max().item() for x in (exact.q, exact.k, exact.v))
    logits = truth["max_logit"][truth["max_logit"].isfinite()]
    size = 1 + (logits.abs().max().item() if logits.numel() else 0) / 10
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
        assert relative <= bound or absolute <= vanishing, (
            f"{name}: error {relative:.2e} relative, {absolute:.2e} absolute; "
            f"allowed {bound:.2e} or {vanishing:.2e} (eager: {own:.2e})"
        )


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", TABLE, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_agrees_with_the_definition(backend: str, case: Case, dtype: torch.dtype) -> None:
    assert_close(backend, make_inputs(case, dtype))
