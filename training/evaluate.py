"""Loss, perplexity and bits per byte over fixed windows of a split.

Evaluation has its own windows and never touches the training stream. Every counted token weighs
the same: losses are summed over all windows and ranks and divided once.

    python -m training.evaluate runs/latest
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from data.prepare import prepare
from data.tokenizers import Tokenizer
from data.windows import IGNORE, Windows, fixed_windows
from model.checkpoint import resolve_run
from model.decoder import Decoder, counted_targets
from model.load import check_tokenizer, load_model
from training.choices import check_range
from training.config import from_dict
from training.devices import autocast as autocast_context
from training.devices import resolve_device, resolve_dtype
from training.distributed import Ranks
from training.run_folder import read_config


@dataclass(frozen=True)
class Evaluation:
    """The result over `tokens` counted targets in `windows` windows; loss in nats per token.

    Where no target counts there is no loss: it is NaN.
    """

    loss: float
    bits_per_byte: float
    tokens: int
    windows: int

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def __str__(self) -> str:
        return (
            f"validation loss {self.loss:.4f} nats per token, perplexity {self.perplexity:.2f}, "
            f"{self.bits_per_byte:.4f} bits per byte"
        )

    def metrics(self) -> dict[str, float]:
        """The logged keys and their values."""
        return {
            "val/loss": self.loss,
            "val/perplexity": self.perplexity,
            "val/bits_per_byte": self.bits_per_byte,
        }


@torch.no_grad()
def evaluate(
    model: Decoder,
    windows: Windows,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    limit: int | None = None,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]],
    ranks: Ranks,
) -> Evaluation:
    """Evaluate `model` on `windows`, shared among the ranks.

    Args:
        model: the decoder itself, not a data-parallel wrapper: the loop holds no collective call,
            so ranks may hold different numbers of windows.
        windows: the split.
        tokenizer: gives the number of raw bytes behind each target.
        batch_size: windows per forward pass.
        limit: how many windows, evenly spread and the same every time; None for all.
        device: where the model is.
        autocast: makes the mixed-precision context of a forward pass.
        ranks: this process among its peers.

    Returns:
        The same `Evaluation` on every rank.
    """
    chosen = fixed_windows(len(windows), limit)
    mine = chosen[ranks.rank :: ranks.world]
    nats, tokens, n_bytes = 0.0, 0, 0
    was_training = model.training
    model.eval()
    for start in range(0, len(mine), batch_size):
        batch = windows.batch(mine[start : start + batch_size])
        targets = counted_targets(model.config, batch.targets, batch.documents)
        counted = targets[targets != IGNORE]
        documents = None if batch.documents is None else batch.documents.to(device)
        with autocast():
            loss = model(
                batch.tokens.to(device), targets.to(device), documents=documents, reduction="none"
            ).loss
        nats += float(loss.double().sum()) if loss.device.type != "mps" else float(loss.sum())
        tokens += counted.numel()
        n_bytes += int(tokenizer.n_bytes(counted.numpy()))
    model.train(was_training)
    nats, total, total_bytes = ranks.all_reduce_sum([nats, tokens, n_bytes])
    return Evaluation(
        loss=nats / total if total else math.nan,
        bits_per_byte=nats / math.log(2) / total_bytes if total_bytes else math.nan,
        tokens=int(total),
        windows=len(chosen),
    )


def evaluate_run(
    name: str | Path,
    *,
    which: Literal["best", "last"] | int = "best",
    limit: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    log: Callable[[str], None] = print,
) -> tuple[Evaluation, int]:
    """Evaluate a run's checkpoint on its own validation split; return the result and the step.

    Args:
        name: a run folder, a checkpoint in one, or ``runs/latest``.
        which: the best checkpoint, the last one, or that of a step.
        limit: how many windows; None for all.
        device: as in the configuration.
        dtype: as in the configuration.
        log: where what is done goes.

    Raises:
        ValueError, FileNotFoundError: when the run, its text or its tokenizer is not as it was.
    """
    if limit is not None:
        check_range("--windows", limit, 1)
    config = from_dict(read_config(resolve_run(name)))
    where = resolve_device(device)
    precision = partial(autocast_context, where, resolve_dtype(dtype, where))
    model, checkpoint = load_model(name, which=which, device=where)
    context = model.config.context_length
    text = prepare(config.data, config.tokenizer, context_length=context, log=log)
    check_tokenizer(checkpoint, text.tokenizer.sha256)
    train = config.train
    found = evaluate(
        model,
        Windows(text.val, context, config.data.mode),
        text.tokenizer,
        batch_size=train.eval_batch_size or train.micro_batch_size or train.batch_size,
        limit=limit,
        device=where,
        autocast=precision,
        ranks=Ranks(),
    )
    return found, checkpoint.step


def main() -> None:
    """Evaluate a finished run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument("run", help="a run folder, a checkpoint in one, or runs/latest")
    parser.add_argument("--checkpoint", default="best", help="best (default), last, or a step")
    parser.add_argument("--windows", type=int, help="so many, evenly spread, instead of all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    which = int(args.checkpoint) if args.checkpoint.isdigit() else args.checkpoint
    try:
        found, step = evaluate_run(
            args.run, which=which, limit=args.windows, device=args.device, dtype=args.dtype
        )
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    print(f"step {step}, {found.windows:,} windows, {found.tokens:,} tokens: {found}")


if __name__ == "__main__":
    main()
