"""What our Triton kernels need on GPUs that are not there: `python -m kernels.compile_report`.

Prints, for a list of variants and four architectures, registers per thread, spills (instructions
that load and store registers from memory, which make a kernel slow), shared memory, copies of
tiles through descriptors (TMA), and the matrix instructions. `per_logit` is how many instructions
a warp issues for each logit of a lane, in the loop without masks, and how many of them are
exponentials. `--only "sm_90 forward"` picks the variants whose line has these words.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.triton_variants import Variant


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the report; the last six are None, and `refused` says why, if it failed."""

    arch: str
    kernel: str
    dtype: str
    head_size: int
    options: str
    tile: str
    warps: int
    stages: int
    refused: str = ""
    registers: int | None = None
    spill_loads: int | None = None
    spill_stores: int | None = None
    shared: int | None = None
    per_logit: tuple[float, float] | None = None
    matrix: dict[str, int] | None = None
    tma: int | None = None


COLUMNS = (
    *("arch", "kernel", "type", "D", "options", "tile"),
    *("regs", "spills", "shared", "TMA", "per_logit", "matrix"),
)


def main(arguments: list[str] | None = None) -> int:
    """Print the report; returns 1 if a variant was refused."""
    parser = argparse.ArgumentParser(prog="python -m kernels.compile_report", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        metavar="WORDS",
        help="compile variants with all these words; may be given again to add others",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), metavar="N")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("error: TRITON_INTERPRET=1 leaves nothing to compile; unset it", file=sys.stderr)
        return 2
    choices = [set(words.split()) for words in options.only or [""]]
    lines = report(choices, options.jobs)
    print_json(lines) if options.json else print_table(lines)
    return int(any(line.refused for line in lines))


def report(choices: list[set[str]], jobs: int) -> list[Line]:
    """Compile all variants that have every word of some choice, several at a time."""
    from kernels.triton_variants import variants

    chosen = [
        number
        for number, variant in enumerate(variants())
        if any(words <= _words(variant) for words in choices)
    ]
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        return list(pool.map(_line, chosen))


def _words(variant: "Variant") -> set[str]:
    options = variant.options.replace(",", "").split()
    return {variant.arch, variant.kernel, variant.dtype, str(variant.head_size), *options}


def _line(number: int) -> Line:
    """Compile one variant."""
    from kernels.triton_compile import compile_launch, launches
    from kernels.triton_variants import variants

    variant = variants()[number]
    by_name = {launch.kernel.__name__: launch for launch in launches(variant.run, variant.arch)}
    launch = by_name[f"{variant.kernel}_kernel"]
    sizes = {name: launch.constant(name) for name in ("BM", "BN", "BLOCK_ROWS")}
    described: dict[str, Any] = {
        "arch": variant.arch,
        "kernel": variant.kernel,
        "dtype": variant.dtype,
        "head_size": variant.head_size,
        "options": variant.options,
        "tile": "x".join(str(size) for size in sizes.values() if size is not None),
        "warps": launch.warps,
        "stages": launch.stages,
    }
    try:
        return Line(**described, **asdict(compile_launch(launch, variant.arch)))
    except Exception as error:
        return Line(**described, refused=_cause(error))


def _cause(error: BaseException) -> str:
    """The innermost message, in one line: Triton wraps it in the source of every caller."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())


def print_json(lines: Iterable[Line]) -> None:
    """Print one object per line of the report."""
    for line in lines:
        print(json.dumps(asdict(line)))


def print_table(lines: Iterable[Line]) -> None:
    """Print the report with aligned columns."""
    rows = [COLUMNS, *(_cells(line) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _cells(line: Line) -> tuple[str, ...]:
    described = (line.arch, line.kernel, line.dtype, str(line.head_size), line.options)
    tile = f"{line.tile} w{line.warps} s{line.stages}"
    if line.matrix is None:
        return (*described, tile, "-", "-", "-", "-", "-", f"refused: {line.refused}")
    matrix = ", ".join(f"{count} {name}" for name, count in line.matrix.items())
    spills = f"{line.spill_loads}+{line.spill_stores}"
    per_logit = "-"
    if line.per_logit is not None:
        instructions, exponentials = line.per_logit
        per_logit = f"{instructions:.1f} ({exponentials:.2f})"
    numbers = (str(line.registers), spills, str(line.shared), str(line.tma), per_logit)
    return (*described, tile, *numbers, matrix or "-")


if __name__ == "__main__":
    sys.exit(main())
