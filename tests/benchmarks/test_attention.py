"""The attention benchmark, run small on a CPU."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def benchmark() -> ModuleType:
    return importlib.import_module("attention")


@pytest.fixture
def without_triton(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the check of Triton's kernels, which is slow in the interpreter, out of a run."""
    monkeypatch.setattr(benchmark, "_checked", lambda bench: [bench.ours])


@pytest.fixture
def timing(benchmark: ModuleType) -> ModuleType:
    return importlib.import_module("attention_timing")


@pytest.fixture
def parity(benchmark: ModuleType) -> ModuleType:
    return importlib.import_module("attention_parity")


@pytest.mark.usefixtures("without_triton")
def test_a_small_run_prints_and_saves_every_section(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    options = ["--head-sizes", "16", "--lengths", "8", "16", "--repeats", "2", "--json", str(path)]
    assert benchmark.main(["--device", "cpu", *options]) == 0
    found = json.loads(path.read_text())
    assert set(found) == {"machine", "parity", "errors", "times", "decode", "column_mass"}
    assert {row["side"] for row in found["times"]} == {"sdpa", "+stats", "eager", "torch"}
    assert all(len(row["forward"]) == len(row["backward"]) == 2 for row in found["times"])
    printed = capsys.readouterr().out
    for words in ("PyTorch", "best peer", "backward, D 16, full", "Column mass", "Decoding"):
        assert words in printed


def test_without_a_gpu_one_line_says_so(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --device=cuda")
    assert error.count("\n") == 1


@pytest.mark.usefixtures("without_triton")
def test_a_wrong_result_ends_the_program_before_timing(
    benchmark: ModuleType,
    parity: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = parity.results_of

    def wrong(call: object, backend: str) -> dict[str, torch.Tensor]:
        results = right(call, backend)
        if backend == "sdpa":
            results["entropy"] = results["entropy"] * 1.0001
        return results

    monkeypatch.setattr(parity, "results_of", wrong)
    assert benchmark.main(["--device", "cpu", "--head-sizes", "16"]) == 1
    printed = capsys.readouterr()
    assert "entropy" in printed.out
    assert "OUT OF BOUNDS" in printed.out
    assert "TFLOP" not in printed.out
    assert "nothing is timed" in printed.err


def test_nan_is_out_of_bounds(parity: ModuleType) -> None:
    assert not parity.Deviation("call", "bfloat16", "out", float("nan"), 1.0).ok


def test_triton_is_checked_too_in_its_interpreter(
    benchmark: ModuleType, parity: ModuleType
) -> None:
    assert benchmark._checked(benchmark.Bench(CPU, [16], [16], 1, False)) == ["sdpa", "triton"]
    found = parity.deviations(parity.calls([16], CPU)[0], "triton")
    assert {"out", "entropy", "column_mass", "d_v"} <= {x.result for x in found}
    assert all(x.ok for x in found), found


def test_flops_are_of_visible_logits(timing: ModuleType) -> None:
    full = timing.Shape(batch=2, heads=3, length=4, head_size=5, causal=False)
    assert full.forward_flops == 4 * 5 * 2 * 3 * 16
    causal = timing.Shape(batch=2, heads=3, length=4, head_size=5, causal=True)
    assert causal.forward_flops == 4 * 5 * 2 * 3 * 10
    assert causal.backward_flops == 10 * 5 * 2 * 3 * 10


def test_a_side_that_fails_is_left_out_with_its_reason(timing: ModuleType) -> None:
    def refuse() -> None:
        raise RuntimeError("No available kernel.\nmore")

    shape = timing.Shape(1, 1, 4, 8, True)
    makers = {"good": lambda: timing.torch_sdpa(True), "bad": refuse}
    inputs = shape.inputs(CPU, torch.float32)
    found = timing.measure(makers, inputs, timing.Clock(CPU), repeats=3)
    assert found["bad"].refused == "RuntimeError: No available kernel."
    assert found["bad"].forward == []
    assert len(found["good"].both) == 3


def test_speeds_name_the_best_peer_and_the_cost_of_statistics(benchmark: ModuleType) -> None:
    bench = benchmark.Bench(CPU, [16], [16], 3, False)
    seconds = {
        "sdpa": [1.0, 2.0, 3.0],
        "+stats": [1.1, 2.2, 3.3],
        "eager": [9.0, 9.0, 9.0],
        "torch": [0.5, 1.0, 1.5],
    }
    cells = benchmark._speeds(bench, seconds, 400 * 10**12)
    assert cells == ["200 ±50", "182 ±50", "44.4 ±0", "400 ±50", "+10.0%", "torch", "0.50"]
    del seconds["torch"], seconds["eager"]
    assert benchmark._speeds(bench, seconds, 10**12)[2:] == ["-", "-", "+10.0%", "-", "-"]
