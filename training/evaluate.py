"""Loss, perplexity and bits per byte over fixed windows of a split.

Evaluation has its own windows and never touches the training stream. Every counted token weighs
the same: losses are summed over all windows and ranks and divided once.

    python -m training.evaluate runs/latest
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from data.tokenizers import Tokenizer
from data.windows import IGNORE, Windows
from model.decoder import Decoder
from training.distributed import Ranks


@dataclass(frozen=True)
class Evaluation:
    """The result over `tokens` counted targets in `windows` windows; loss in nats per token."""

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


def fixed_windows(total: int, limit: int | None) -> np.ndarray:
    """Return all window numbers, or `limit` of them spread evenly over the split."""
    if limit is None or limit >= total:
        return np.arange(total)
    return np.arange(limit) * total // limit


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
        targets = batch.targets
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
        loss=nats / total,
        bits_per_byte=nats / math.log(2) / total_bytes if total_bytes else math.nan,
        tokens=int(total),
        windows=len(chosen),
    )
