"""Speed of our attention beside PyTorch's own on one GPU, after a check that it is right.

    python benchmarks/attention.py --json out.json

With default options it should take eight minutes or so on an H100 or H200, an estimate, most of
them compiling; `--quick` does less. What is measured is written to the file as it comes.

First every result and gradient of a few small calls is held against the definition in float64; a
single one out of bounds ends the program. Then bfloat16 self-attention is timed: 16,384 tokens of
width 2,048 (heads = 2,048 / D) in sequences of each length. Peers are PyTorch's fused backends,
each forced, and compiled FlexAttention with a block mask. `+stats` returns all statistics, and
its backward trains lse and entropy too.

TFLOP/s count 4 D for each visible logit in the forward and 10 D in the backward, multiply-adds as
two, for every side alike. All sides take turns within a repeat, with the cache cleared before each
call; numbers are medians over the repeats, ±n is half of their range in percent. Ratios are of
the same repeat, peer's time / ours, so more than 1 is better for us.

Returns 1 if a result is out of bounds or our kernels refuse a call, 2 if there is no such device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_parity import ALL_STATISTICS, calls, deviations
from attention_timing import (
    Clock,
    Forward,
    Shape,
    measure,
    median_ratio,
    ours,
    sides,
    spread,
    torch_sdpa,
)
from own_runs import machine_line

from kernels.attention import AttentionSpec, attention, column_mass

LENGTHS = (1024, 2048, 4096, 8192, 16384)
TOKENS, WIDTH = 16384, 2048
FLEX_LENGTHS = (4096, 16384)  # it is compiled anew for every shape, which takes time
ERROR_LENGTH, ERROR_HEADS = 1024, 4
CACHES = ((1, 32768), (8, 16384), (32, 4096))  # sequences and keys of a decoding step
CACHE_HEADS, CACHE_KV_HEADS = 32, 8
COPY_BYTES = 2**30
LEGEND = """
TFLOP/s: 4 D per visible logit forward, 10 D backward; medians, ± half of the range in percent.
+stats: all statistics, and lse and entropy trained; its cost is time over ours without.
ratio: time of the best peer / time of ours without statistics; above 1, ours is faster."""


@dataclass
class Bench:
    """Where and how much is measured, and what was found.

    Attributes:
        found: what `--json` writes: a list of rows for each section.
        failed: whether a call of ours was refused.
    """

    device: torch.device
    head_sizes: list[int]
    lengths: list[int]
    repeats: int
    with_flex: bool
    found: dict[str, Any] = field(default_factory=dict)
    failed: bool = False

    def __post_init__(self) -> None:
        self.gpu = self.device.type == "cuda"
        self.ours = "triton" if self.gpu else "sdpa"
        self.tokens = TOKENS if self.gpu else max(self.lengths)
        self.width = WIDTH if self.gpu else max(self.head_sizes)
        self.dtype = torch.bfloat16

    def add(self, section: str, **row: Any) -> None:
        """Keep one row of a section."""
        self.found.setdefault(section, []).append(row)

    def shape(self, head_size: int, length: int, causal: bool) -> Shape:
        """As many sequences of this length as there are tokens for."""
        heads = max(1, self.width // head_size)
        return Shape(max(1, self.tokens // length), heads, length, head_size, causal)


def print_table(title: str, rows: list[list[str]]) -> None:
    """Print rows of cells, the first the header: left column to the left, others to the right."""
    print(f"\n{title}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells), flush=True)


def check_parity(bench: Bench, backend: str) -> bool:
    """Print the largest error of each result of each call; whether all are within bounds."""
    right = True
    rows = [["call", "type", "out", "gradients", "statistics", "worst: error / allowed"]]
    for call in calls(bench.head_sizes, bench.device):
        found = deviations(call, backend)
        right &= all(x.ok for x in found)
        for x in found:
            bench.add("parity", backend=backend, **asdict(x), ok=x.ok)
        worst = max(found, key=lambda x: x.error / x.allowed if x.error == x.error else 1e30)
        gradients = [x.error for x in found if x.result.startswith("d_")]
        others = [x.error for x in found if x.result != "out" and not x.result.startswith("d_")]
        cells = [f"{x:.1e}" for x in (found[0].error, max(gradients), max(others))]
        verdict = "" if all(x.ok for x in found) else "  OUT OF BOUNDS"
        last = f"{worst.result} {worst.error:.1e} / {worst.allowed:.1e}{verdict}"
        rows.append([call.name, found[0].dtype, *cells, last])
    print_table(f"Errors of {backend} against the definition in float64, relative", rows)
    return right


def time_lengths(bench: Bench, clock: Clock, head_size: int, causal: bool) -> None:
    """Time all lengths and print forward, backward, and both together."""
    cells: dict[str, list[list[str]]] = {"forward": [], "backward": [], "both": []}
    refused: dict[str, str] = {}
    for length in bench.lengths:
        shape = bench.shape(head_size, length, causal)
        with_flex = bench.with_flex and length in FLEX_LENGTHS
        makers = sides(shape, bench.device, with_flex=with_flex)
        found = measure(makers, shape.inputs(bench.device, bench.dtype), clock, bench.repeats)
        for name, series in found.items():
            if series.refused:
                refused.setdefault(f"{name} at {length}", series.refused)
                bench.failed |= name in (bench.ours, "+stats")
            bench.add("times", side=name, **asdict(shape), **asdict(series))
        for phase, flops in (
            ("forward", shape.forward_flops),
            ("backward", shape.backward_flops),
            ("both", shape.forward_flops + shape.backward_flops),
        ):
            seconds = {name: getattr(x, phase) for name, x in found.items() if not x.refused}
            cells[phase].append([str(length), str(shape.batch), *_speeds(bench, seconds, flops)])
    mask = "causal" if causal else "full"
    for phase, rows in cells.items():
        name = "forward and backward" if phase == "both" else phase
        header = ["length", "B", *_columns(bench), "stats cost", "best peer", "ratio"]
        print_table(f"{name}, D {head_size}, {mask}, bf16: TFLOP/s ±%", [header, *rows])
    for name, reason in refused.items():
        print(f"refused: {name}: {reason[:160]}")


def _columns(bench: Bench) -> list[str]:
    peers = ["flash", "efficient", "cudnn", "math", "flex"] if bench.gpu else ["eager", "torch"]
    return [bench.ours, "+stats", *peers]


def _speeds(bench: Bench, seconds: dict[str, list[float]], flops: int) -> list[str]:
    """One cell for each column of a row, "-" for what did not run."""
    cells = []
    for name in _columns(bench):
        if name not in seconds:
            cells.append("-")
            continue
        speed = flops / statistics.median(seconds[name]) / 1e12
        digits = f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}"
        cells.append(f"{digits} ±{100 * spread(seconds[name]):.0f}")
    own, full = seconds.get(bench.ours), seconds.get("+stats")
    peers = {name: x for name, x in seconds.items() if name not in (bench.ours, "+stats")}
    cells.append(f"{median_ratio(full, own) - 1:+.1%}" if own and full else "-")
    best = min(peers, key=lambda name: statistics.median(peers[name]), default="-")
    cells.append(best)
    cells.append(f"{median_ratio(peers[best], own):.2f}" if own and best in peers else "-")
    return cells


def compare_errors(bench: Bench, head_size: int) -> None:
    """Print how far each side is from float64, for one sequence with few heads."""
    length = min(ERROR_LENGTH, max(bench.lengths))
    shape = Shape(1, ERROR_HEADS, length, head_size, True)
    inputs = shape.inputs(bench.device, bench.dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = _results(ours("eager", True, False), exact)
    rows = [["side", "out", "d_q", "d_k", "d_v"]]
    for name, make in sides(shape, bench.device, with_flex=bench.with_flex).items():
        if name == "+stats":
            continue
        try:
            results = _results(make(), inputs)
        except Exception:  # the reason stands under the table of times
            continue
        errors = [
            ((x.double() - y).norm() / y.norm()).item() for x, y in zip(results, truth, strict=True)
        ]
        rows.append([name, *(f"{x:.2e}" for x in errors)])
        bench.add("errors", side=name, head_size=head_size, length=length, errors=errors)
    print_table(f"Error against float64, relative: D {head_size}, causal, {length} tokens", rows)


def _results(forward: Forward, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v, d_out = inputs
    out = forward(q, k, v)[0]
    return [out, *torch.autograd.grad(out, [q, k, v], d_out)]


def time_column_mass(bench: Bench, clock: Clock) -> None:
    """Print what the mass of the columns costs beside a backward, for the longest sequence."""
    rows = [["D", "ms", "of a backward"]]
    for head_size in bench.head_sizes:
        shape = bench.shape(head_size, max(bench.lengths), True)
        q, k, v, d_out = shape.inputs(bench.device, bench.dtype)
        spec = AttentionSpec()
        lse = attention(q, k, v, spec, stats=ALL_STATISTICS, backend=bench.ours).lse
        assert lse is not None
        lse = lse.detach()
        forward = ours(bench.ours, True, False)
        masses, backwards = [], []
        for _ in range(bench.repeats + 1):  # the first compiles
            _, seconds = clock(partial(column_mass, q, k, lse, spec, backend=bench.ours))
            masses.append(seconds)
            (out,) = forward(q, k, v)
            _, seconds = clock(partial(torch.autograd.grad, out, [q, k, v], d_out))
            backwards.append(seconds)
        masses, backwards = masses[1:], backwards[1:]
        share = median_ratio(masses, backwards)
        bench.add("column_mass", **asdict(shape), column_mass=masses, backward=backwards)
        rows.append([str(head_size), f"{1e3 * statistics.median(masses):.3f}", f"{share:.1%}"])
    print_table(f"Column mass, causal, {max(bench.lengths)} tokens", rows)


def time_decoding(bench: Bench, clock: Clock) -> None:
    """Print how fast a decoding step reads the cache, beside a copy in the same repeat."""
    head_size = max(bench.head_sizes)
    decoders = {
        bench.ours: ours(bench.ours, True, False),
        "+stats": ours(bench.ours, True, True),
        "torch": torch_sdpa(False),
    }
    source = torch.zeros(COPY_BYTES if bench.gpu else 2**20, dtype=torch.int8, device=bench.device)
    target = torch.empty_like(source)
    rows = [["B", "keys", "cache MB", "copy GB/s", *decoders]]
    for batch, keys in CACHES if bench.gpu else ((2, 300),):
        sizes = ((CACHE_HEADS, 1), (CACHE_KV_HEADS, keys), (CACHE_KV_HEADS, keys))
        q, k, v = (
            torch.randn(batch, heads, length, head_size, device=bench.device).to(bench.dtype)
            for heads, length in sizes
        )
        cache = (k.numel() + v.numel()) * k.element_size()
        times: dict[str, list[float]] = {name: [] for name in ("copy", *decoders)}
        for _ in range(bench.repeats + 1):
            times["copy"].append(clock(partial(target.copy_, source))[1])
            with torch.no_grad():
                for name, forward in decoders.items():
                    times[name].append(clock(partial(forward, q, k, v))[1])
        times = {name: seconds[1:] for name, seconds in times.items()}  # the first compiles
        copied = 2 * source.numel()  # bytes read and written
        cells = [f"{copied / statistics.median(times['copy']) / 1e9:.0f}"]
        for name in decoders:
            share = cache / copied * median_ratio(times["copy"], times[name])
            cells.append(f"{share:.0%}")
        rows.append([str(batch), str(keys), f"{cache / 1e6:.0f}", *cells])
        bench.add("decode", batch=batch, keys=keys, cache_bytes=cache, seconds=times)
    heads = f"{CACHE_HEADS} heads on {CACHE_KV_HEADS}"
    print_table(f"Decoding one token, D {head_size}, {heads}: bandwidth, of a copy's", rows)


def describe(device: torch.device) -> str:
    """The machine in one or two lines: processor, GPU, versions."""
    line = machine_line()
    if device.type == "cuda":
        import triton

        gpu = torch.cuda.get_device_properties(device)
        line += (
            f"\nGPU: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, "
            f"{gpu.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}, "
            f"cuDNN {torch.backends.cudnn.version()}, Triton {triton.__version__}"
        )
    return line


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, print; returns what the program ends with."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[64, 128], metavar="D")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T", help="default: 1k to 16k")
    parser.add_argument("--repeats", type=int, help="of every time (default: 7)")
    parser.add_argument("--quick", action="store_true", help="few lengths and repeats, no flex")
    parser.add_argument("--parity-only", action="store_true", help="check, and time nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here too")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu runs the same program small, on the backends there are, to test it",
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: --device=cuda needs a CUDA device and there is none; "
            "--device cpu runs the same program small",
            file=sys.stderr,
        )
        return 2
    short = (64, 128) if options.device == "cpu" else (1024, 4096)
    quick = options.quick or options.device == "cpu"
    bench = Bench(
        device=torch.device(options.device),
        head_sizes=options.head_sizes,
        lengths=options.lengths or list(short if quick else LENGTHS),
        repeats=options.repeats or (3 if quick else 7),
        with_flex=not quick,
    )
    bench.found["machine"] = describe(bench.device)
    print(bench.found["machine"])
    right = [check_parity(bench, backend) for backend in _checked(bench)]
    _save(bench, options.json)
    if not all(right):
        print("error: a result is out of bounds, so nothing is timed", file=sys.stderr)
        return 1
    if not options.parity_only:
        time_everything(bench, options.json)
    return int(bench.failed)


def _checked(bench: Bench) -> list[str]:
    """Backends to check: the one that is timed, and Triton's where its interpreter is on."""
    interpreted = not bench.gpu and os.environ.get("TRITON_INTERPRET") == "1"
    return [bench.ours, "triton"] if interpreted else [bench.ours]


def time_everything(bench: Bench, path: Path | None) -> None:
    """Measure section by section; what is measured is saved before the next one."""
    print(LEGEND)
    clock = Clock(bench.device)
    for head_size in bench.head_sizes:
        compare_errors(bench, head_size)
        for causal in (True, False):
            time_lengths(bench, clock, head_size, causal)
            _save(bench, path)
    time_decoding(bench, clock)
    _save(bench, path)
    time_column_mass(bench, clock)
    _save(bench, path)


def _save(bench: Bench, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(bench.found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
