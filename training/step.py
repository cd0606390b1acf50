"""One optimizer step: the gradient of the mean loss over every counted token of the step.

However the sequences of a step are shared among micro-steps and ranks, and however unevenly the
counted tokens fall, losses are summed and divided once by the count of all of them, so 1 x 8 and
2 x 4 sequences give the same gradient. Gradients are clipped once, after the last reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from data.windows import IGNORE, Batch
from model.config import ModelConfig
from model.decoder import counted_targets
from training.distributed import Ranks, sync_gradients
from training.optim import Optimizers

if TYPE_CHECKING:
    from training.telemetry import StepStatistics


@dataclass(frozen=True)
class StepResult:
    """What one step computed, the same on every rank.

    `loss` is in nats per counted token, `tokens` the number of those over all ranks, `grad_norm`
    the global norm before clipping. `taken` is False when a value was not finite: the weights are
    then as they were.
    """

    loss: float
    tokens: int
    grad_norm: float
    taken: bool


def take_step(
    model: nn.Module,
    optimizers: Optimizers,
    scaler: torch.amp.GradScaler,
    batches: Sequence[Batch],
    *,
    config: ModelConfig,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
    ranks: Ranks,
    statistics: StepStatistics | None = None,
) -> StepResult:
    """Run this rank's micro-steps, reduce, clip and update.

    Args:
        model: the decoder, or its data-parallel wrapper.
        optimizers: with the learning rate of this step already set.
        scaler: for float16; does nothing when disabled.
        batches: one per micro-step, targets of `IGNORE` carrying no loss.
        config: the model's, which says which targets its loss counts.
        device: where the model is.
        autocast: makes the mixed-precision context of a forward pass.
        ranks: this process among its peers.
        statistics: receives what the forward passes say about the heads, if that is wanted; the
            step computes the same.
    """
    counted = sum(
        int((counted_targets(config, batch.targets, batch.documents) != IGNORE).sum())
        for batch in batches
    )
    (total,) = ranks.all_reduce_sum([counted])
    # Data-parallel backward averages over ranks; with this factor the average is a mean over
    # tokens. Without a single counted token the loss is 0 and so is its gradient.
    scale = ranks.world / max(total, 1.0)

    summed = torch.zeros((), device=device)
    for number, batch in enumerate(batches, start=1):
        with sync_gradients(model, last=number == len(batches)):
            loss = _summed_loss(model, batch, device, autocast, statistics)
            scaler.scale(loss * scale).backward()
        summed += loss.detach()

    optimizers.unscale(scaler)
    if statistics is not None:
        statistics.add_gradients()
    norm = optimizers.clip_grad_norm()
    (nats,) = ranks.all_reduce_sum([summed.item()])
    grad_norm = norm.item()
    taken = math.isfinite(nats) and math.isfinite(grad_norm)
    if taken:
        optimizers.step()
    scaler.update()
    optimizers.zero_grad()
    return StepResult(nats / max(total, 1.0), int(total), grad_norm, taken)


def _summed_loss(
    model: nn.Module,
    batch: Batch,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
    statistics: StepStatistics | None,
) -> Tensor:
    """The summed loss of one micro-step; only what backward needs outlives this call."""
    documents = None if batch.documents is None else batch.documents.to(device)
    targets = batch.targets.to(device, non_blocking=True)
    wanted = {}
    if statistics is not None:
        wanted = {"stats": statistics.stats, "layers": statistics.layers}
    with autocast():
        output = model(
            batch.tokens.to(device, non_blocking=True),
            targets,
            documents=documents,
            reduction="sum",
            **wanted,
        )
    if statistics is not None:
        statistics.add(output.attention, targets, documents)
    return output.loss


class NonFiniteError(RuntimeError):
    """Training stopped because a loss or gradient was no longer a number."""


class StepGuard:
    """Decides what a step with a non-finite loss or gradient means.

    The weights are never touched by such a step. Up to `max_skipped` of them in a row are skipped;
    with float16 an overflowing gradient of a finite loss is normal, the scaler lowers its factor.
    """

    def __init__(self, max_skipped: int) -> None:
        self.max_skipped = max_skipped
        self._skipped = 0
        self._last_finite = math.nan

    def check(
        self,
        result: StepResult,
        *,
        step: int,
        lr: float,
        windows: np.ndarray,
        scaler: torch.amp.GradScaler,
        log: Callable[[str], None],
    ) -> None:
        """Note a step's outcome.

        Raises:
            NonFiniteError: naming step, learning rate, last finite loss and the windows read.
        """
        if result.taken:
            self._skipped = 0
            self._last_finite = result.loss
            return
        if scaler.is_enabled() and math.isfinite(result.loss):
            log(f"step {step}: float16 overflow, skipped; loss scale is now {scaler.get_scale():g}")
            return
        self._skipped += 1
        what = (
            f"step {step}: loss {result.loss}, gradient norm {result.grad_norm} (lr {lr:.3g}, last "
            f"finite loss {self._last_finite:.4f}, windows {', '.join(map(str, windows[:8]))}"
            f"{', ...' if len(windows) > 8 else ''})"
        )
        if self._skipped > self.max_skipped:
            raise NonFiniteError(
                f"{what}: stopped with the weights of the step before; lower optim.lr, or allow "
                f"train.max_skipped_steps={self.max_skipped + 1}"
            )
        log(f"{what}: skipped")
