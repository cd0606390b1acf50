"""What the compiler makes of our kernels for GPUs that are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.compile_report import COLUMNS, Line, main, print_table

ROOT = Path(__file__).parents[2]

# The unit that should do the matrix products. Decoding has too few rows for the newer ones.
MATRIX_UNIT = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
NARROW_UNIT = {"sm_80": "mma", "sm_90": "mma", "sm_100": "mma", "gfx942": "mfma"}
WITHOUT_PRODUCTS = ("delta", "merge", "rotate")

# Spill loads or stores, whichever are more, that are known and accepted; all others have none.
KNOWN_SPILLS = {
    "sm_90 forward bf16 128 everything": 6,
    "sm_100 backward_queries bf16 128 everything": 50,
}

# Instructions that all statistics together add for each logit of a lane on sm_90, by head size.
STATISTICS_PER_LOGIT = {128: 2.72, 64: 2.84}


def compiled(*choices: str) -> list[Line]:
    """The report, made in a process where Triton compiles; no choice means everything."""
    command = [sys.executable, "-m", "kernels.compile_report", "--json"]
    for words in choices:
        command += ["--only", words]
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return [Line(**json.loads(line)) for line in done.stdout.splitlines()]


def name(line: Line) -> str:
    return f"{line.arch} {line.kernel} {line.dtype} {line.head_size} {line.options}"


def assert_compiles(line: Line) -> None:
    assert not line.refused, f"{name(line)}: {line.refused}"
    assert line.matrix is not None
    if line.kernel in WITHOUT_PRODUCTS or line.options.endswith("ieee"):
        return
    unit = NARROW_UNIT if line.kernel == "decode" else MATRIX_UNIT
    assert line.matrix.get(unit[line.arch]), f"{name(line)} has no {unit[line.arch]}"


@pytest.fixture(scope="module")
def report() -> list[Line]:
    """Forwards and decoding of halves with all statistics; on sm_90 also forwards without."""
    sizes = list(STATISTICS_PER_LOGIT)
    with_statistics = [f"forward statistics bf16 {size}" for size in sizes]
    return compiled(
        *with_statistics, "decode 128", *(f"sm_90 forward plain bf16 {size}" for size in sizes)
    )


@pytest.fixture
def lines(report: list[Line]) -> list[Line]:
    """Those of the report with statistics."""
    return [line for line in report if line.options != "plain"]


def test_statistics_cost_no_spills_and_matrix_units_stay_in_use(lines: list[Line]) -> None:
    assert len(lines) >= 12
    for line in lines:
        assert_compiles(line)
        assert (line.spill_loads, line.spill_stores) == (0, 0), name(line)


def test_tiles_are_copied_through_descriptors_where_the_gpu_and_the_tensors_allow_it(
    lines: list[Line],
) -> None:
    forwards = [line for line in lines if line.kernel == "forward"]
    for line in forwards:
        copied = line.arch in ("sm_90", "sm_100") and "expanded" not in line.options
        assert bool(line.tma) is copied, f"{name(line)}: {line.tma} copies"
    assert sum(bool(line.tma) for line in forwards) == 4


def test_statistics_add_few_instructions_per_logit(report: list[Line]) -> None:
    forwards = [line for line in report if (line.arch, line.kernel) == ("sm_90", "forward")]
    by_name = {(line.options, line.head_size): line for line in forwards}
    for head_size, known in STATISTICS_PER_LOGIT.items():
        plain, full = (by_name[options, head_size] for options in ("plain", "statistics"))
        assert (plain.tile, plain.warps) == (full.tile, full.warps)
        assert plain.per_logit is not None
        assert full.per_logit is not None
        assert plain.per_logit[1] == full.per_logit[1] < 1.1  # one tile a pass, one lane a logit
        added = full.per_logit[0] - plain.per_logit[0]
        assert 2 < added < known + 0.3, f"D {head_size}: {added:.2f} instructions more"


@pytest.mark.slow
def test_no_variant_spills_more_than_is_known() -> None:
    lines = compiled()
    assert len(lines) <= 60
    assert {line.arch for line in lines} == set(MATRIX_UNIT)
    for line in lines:
        if line.dtype == "fp32" and line.kernel.startswith("backward"):
            assert not line.refused, name(line)  # tiles too small for the newest units
        else:
            assert_compiles(line)
        spills = max(line.spill_loads or 0, line.spill_stores or 0)
        assert spills <= KNOWN_SPILLS.get(name(line), 0), f"{name(line)}: {spills} spills"


def test_a_report_under_the_interpreter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_the_table_shows_numbers_or_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    described = {"arch": "sm_90", "kernel": "forward", "dtype": "bf16", "head_size": 128}
    tile = {"options": "plain", "tile": "128x64", "warps": 8, "stages": 3}
    numbers = {"registers": 230, "spill_loads": 5, "spill_stores": 4, "shared": 131072, "tma": 18}
    per_logit = (11.09375, 1.0625)
    good = Line(**described, **tile, **numbers, per_logit=per_logit, matrix={"wgmma": 24})
    bad = Line(**described, **tile, refused="OutOfResources: shared memory")
    print_table([good, bad])
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == list(COLUMNS)
    assert first.endswith("128x64 w8 s3  230   5+4     131072  18   11.1 (1.06)  24 wgmma")
    refused = "-     -       -       -    -            refused: OutOfResources: shared memory"
    assert second.endswith(f"128x64 w8 s3  {refused}")
