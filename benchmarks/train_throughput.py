"""Tokens per second of our training loop and of nanoGPT's own, in nanoGPT's shape on a CPU.

    python benchmarks/train_throughput.py --peer PATH          PATH: a checkout of nanoGPT

Both train the character model of nanoGPT's README (4 layers, 4 heads, width 128, context 64, 12
sequences a step, float32, not compiled) on the same ids: ours as `experiment=nanogpt_char_cpu`,
nanoGPT with its unmodified train.py. Each repeat is one process of either side, one after the
other, taking turns in who goes first. What counts is everything in the loop: fetching batches,
forward, backward, clipping, update, logging. The first steps, evaluation and saving do not count.

The ratio is ours / nanoGPT's of one repeat, so 1.00 is a draw and more is better for us.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from nanogpt import CONTEXT, TOKENS_PER_STEP, NanoGPT
from own_runs import (
    METER_WINDOW,
    data_config,
    machine_line,
    prepare_characters,
    run_experiment,
    training_seconds,
)

from data.sources import DataConfig

WARMUP_STEPS = METER_WINDOW


def our_speed(folder: Path, data: DataConfig, steps: int) -> float:
    """Tokens per second of our loop after the warm-up steps."""
    last = WARMUP_STEPS + steps
    overrides = [f"train.max_steps={last}", f"train.eval_every={last}", "train.eval_windows=1"]
    overrides.append("optim.decay_steps=2000")  # the schedule of the whole run
    seconds = training_seconds(run_experiment("nanogpt_char_cpu", folder, data, overrides))
    return steps * TOKENS_PER_STEP / (seconds[last] - seconds[WARMUP_STEPS])


def peer_speed(peer: NanoGPT, steps: int) -> float:
    """Tokens per second of nanoGPT's loop after the warm-up steps."""
    seconds = peer.step_seconds(WARMUP_STEPS + steps)
    return steps * TOKENS_PER_STEP / sum(seconds[WARMUP_STEPS:])


def main() -> None:
    """Measure both sides and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, required=True, help="a checkout of nanoGPT")
    parser.add_argument("--text", help="a text file (default: tiny_shakespeare)")
    parser.add_argument("--cache-dir", default="data/cache", help="where the text is prepared")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=250, help="measured steps of one repeat")
    options = parser.parse_args()
    if options.steps % METER_WINDOW:
        parser.error(f"--steps={options.steps} must be a multiple of {METER_WINDOW}")

    print(machine_line())
    data = data_config(options.text, options.cache_dir)
    text = prepare_characters(data, CONTEXT)
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as temporary:
        peer = NanoGPT(options.peer, Path(temporary, "peer"), text)
        for repeat in range(options.repeats):
            if repeat % 2 == 0:
                theirs.append(peer_speed(peer, options.steps))
                ours.append(our_speed(Path(temporary, "runs"), data, options.steps))
            else:
                ours.append(our_speed(Path(temporary, "runs"), data, options.steps))
                theirs.append(peer_speed(peer, options.steps))
            print(
                f"repeat {repeat + 1}: nanoGPT {theirs[-1]:,.0f} tokens/s, "
                f"glassgpt {ours[-1]:,.0f} tokens/s, ratio {ours[-1] / theirs[-1]:.3f}",
                flush=True,
            )
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    print(
        f"median: nanoGPT {statistics.median(theirs):,.0f} tokens/s, "
        f"glassgpt {statistics.median(ours):,.0f} tokens/s\n"
        f"ratio glassgpt / nanoGPT: median {statistics.median(ratios):.3f}, "
        f"from {min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} repeats"
    )


if __name__ == "__main__":
    main()
