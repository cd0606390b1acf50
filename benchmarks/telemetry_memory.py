"""Peak memory of one training step that looks at the heads, by context length, on a CPU.

    python benchmarks/telemetry_memory.py

Each length is a process of its own: it trains one step on one sequence of random letters with
statistics of all layers, and says by how much its peak grew beyond that of a warm-up step on 256
tokens. The same without statistics stands beside it, and what one matrix of weights of every head
of one layer would take alone. Linux only: the peak is that of /proc/self/status.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from own_runs import ROOT, machine_line

sys.path.insert(0, str(ROOT))
from data.windows import Batch
from model.config import ModelConfig
from model.decoder import Decoder
from training.devices import grad_scaler
from training.distributed import Ranks
from training.optim import OptimConfig, build_optimizers
from training.step import take_step
from training.telemetry import StepStatistics

LENGTHS = (1024, 2048, 4096, 8192, 16384)
WARMUP_LENGTH = 256
LETTERS = 65
N_LAYER, N_HEAD, N_EMBD = 2, 4, 64
MIB = 2**20


def grown_bytes(length: int, look: bool) -> int:
    """How far one step on `length` tokens raises this process's peak above a short step's."""
    config = ModelConfig(
        vocab_size=LETTERS,
        context_length=length,
        n_layer=N_LAYER,
        n_head=N_HEAD,
        n_embd=N_EMBD,
    )
    torch.manual_seed(0)
    model = Decoder(config, backend="sdpa")
    optimizers = build_optimizers(model, OptimConfig())
    optimizers.set_lr(1.0)
    device, ranks = torch.device("cpu"), Ranks.from_environment()

    def step(length: int) -> None:
        ids = torch.randint(0, LETTERS, (1, length + 1))
        found = StepStatistics(model, 1, tuple(range(N_LAYER))) if look else None
        take_step(
            model,
            optimizers,
            grad_scaler(device, torch.float32),
            [Batch(ids[:, :-1], ids[:, 1:], None)],
            config=config,
            device=device,
            autocast=nullcontext,
            ranks=ranks,
            statistics=found,
        )
        if found is not None:
            found.record(ranks)

    step(WARMUP_LENGTH)
    before = peak_bytes()
    step(length)
    return peak_bytes() - before


def peak_bytes() -> int:
    """The most resident memory that this process has had."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def measured(length: int, look: bool) -> int:
    """`grown_bytes` in a process of its own; raises RuntimeError when it fails."""
    command = [sys.executable, __file__, "--one", str(length), *(["--look"] if look else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"a step on {length} tokens failed:\n{done.stderr[-2000:]}")
    return int(done.stdout)


def main() -> None:
    """Measure all lengths and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--one", type=int, help="measure one length in this process")
    parser.add_argument("--look", action="store_true", help="with --one: with statistics")
    options = parser.parse_args()
    if options.one is not None:
        print(grown_bytes(options.one, options.look))
        return
    print(machine_line())
    print(f"{N_LAYER} layers, {N_HEAD} heads, width {N_EMBD}, batch 1; MiB beyond a short step")
    print("context   with a look   without   bytes per token   one layer's weights alone")
    for length in options.lengths:
        looked, plain = measured(length, True), measured(length, False)
        print(
            f"{length:7d}   {looked / MIB:11.1f}   {plain / MIB:7.1f}   {looked / length:15,.0f}   "
            f"{N_HEAD * length**2 * 4 / MIB:25,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
