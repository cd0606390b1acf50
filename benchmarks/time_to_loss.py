"""How much sooner `experiment=speedrun_cpu` reaches a loss than nanoGPT's own 2,000 steps.

    python benchmarks/time_to_loss.py --peer PATH          PATH: a checkout of nanoGPT

nanoGPT trains its README's character model for a CPU with its unmodified train.py; ours has no
more parameters (804,096, every tensor once), the same ids and the same split. Losses are nats per
token over the whole validation split in windows of 64 without overlap. nanoGPT's time is that of
its 2,000 steps; ours is that of the steps up to the first evaluation at or below the target, which
is by default what nanoGPT ends at. Evaluation and saving are left out on both sides; start-up is
too, compilation would count. Each random state is one process of either side, one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nanogpt import CONTEXT, NanoGPT
from own_runs import (
    LOG_EVERY,
    data_config,
    machine_line,
    prepare_characters,
    run_experiment,
    training_seconds,
)

from data.sources import DataConfig

PEER_STEPS = 2000
TARGET = 1.918  # what nanoGPT's recipe ends at


@dataclass(frozen=True)
class Reached:
    """The first evaluation at or below the target."""

    step: int
    seconds: float
    loss: float


def time_to(target: float, folder: Path, data: DataConfig, seed: int) -> Reached | None:
    """Train until the end of the run; None if no evaluation is at or below `target`."""
    overrides = [f"seed={seed}", f"train.eval_every={LOG_EVERY}", "train.checkpoint_every=100000"]
    rows = run_experiment("speedrun_cpu", folder, data, overrides)
    seconds = training_seconds(rows)
    for row in rows:
        if row.get("val/loss", float("inf")) <= target:
            return Reached(row["step"], seconds[row["step"]], row["val/loss"])
    return None


def main() -> None:
    """Measure both sides for every random state and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, required=True, help="a checkout of nanoGPT")
    parser.add_argument("--text", help="a text file (default: tiny_shakespeare)")
    parser.add_argument("--cache-dir", default="data/cache", help="where the text is prepared")
    parser.add_argument("--target", type=float, default=TARGET, help="nats per token")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()

    print(machine_line())
    data = data_config(options.text, options.cache_dir)
    text = prepare_characters(data, CONTEXT)
    ratios, ours, theirs = [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        peer = NanoGPT(options.peer, Path(temporary, "peer"), text)
        for number, seed in enumerate(options.seeds, start=1):
            peer_seconds = sum(peer.step_seconds(PEER_STEPS, evaluation_batches=number))
            print(
                f"seed {seed}: nanoGPT {PEER_STEPS} steps in {peer_seconds:.1f} s, "
                f"ends at {peer.loss(text):.4f}",
                flush=True,
            )
            reached = time_to(options.target, Path(temporary, "runs"), data, seed)
            if reached is None:
                raise SystemExit(f"seed {seed}: glassgpt did not reach {options.target}")
            theirs.append(peer_seconds)
            ours.append(reached.seconds)
            ratios.append(peer_seconds / reached.seconds)
            print(
                f"seed {seed}: glassgpt at {reached.loss:.4f} after {reached.step} steps in "
                f"{reached.seconds:.1f} s, {ratios[-1]:.2f} times sooner",
                flush=True,
            )
    print(
        f"median: nanoGPT {statistics.median(theirs):.1f} s, "
        f"glassgpt {statistics.median(ours):.1f} s to {options.target}\n"
        f"ratio nanoGPT / glassgpt: median {statistics.median(ratios):.2f}, "
        f"from {min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} random states"
    )


if __name__ == "__main__":
    main()
