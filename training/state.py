"""Everything a run needs to go on exactly where it was: gathered, saved, put back.

A resumed run on the same CPU computes the same bits as one that was never interrupted, so the
state holds the optimizer, the data position, the random states of every rank and what the loop
has counted, not only the weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.windows import WindowOrder
from model.checkpoint import Checkpoint, CheckpointError, mark_best, prune, save_checkpoint
from model.decoder import Decoder
from model.load import check_tokenizer, load_model
from training.distributed import Ranks
from training.optim import Optimizers

STATE_VERSION = 1


@dataclass
class Counters:
    """What the loop has counted so far."""

    step: int = 0  # optimizer steps taken
    tokens: int = 0  # counted targets trained on, over all ranks
    best_loss: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0

    def count_step(self, tokens: int) -> None:
        """Note a finished step over `tokens` counted targets."""
        self.step += 1
        self.tokens += tokens

    def count_evaluation(self, loss: float) -> bool:
        """Note a validation loss; return whether it is the best so far (NaN never is)."""
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.best_step = loss, self.step
            self.evaluations_since_best = 0
            return True
        self.evaluations_since_best += 1
        return False

    def out_of_patience(self, patience: int | None) -> bool:
        """Whether `patience` evaluations in a row have brought no new best."""
        return patience is not None and self.evaluations_since_best >= patience


def initial_weights(
    name: str, model: Decoder, tokenizer_sha256: str, log: Callable[[str], None]
) -> dict[str, Tensor]:
    """Return the weights that ``init_from=name`` starts a new run with: nothing else is taken.

    Raises:
        ValueError, FileNotFoundError: when the run is missing, has another shape than `model`, or
            was trained with another tokenizer.
    """
    try:
        source, checkpoint = load_model(name)
        check_tokenizer(checkpoint, tokenizer_sha256)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"init_from={name}: {error}") from error
    ours, theirs = model.state_dict(), source.state_dict()
    unlike = [
        n
        for n in sorted(ours.keys() | theirs.keys())
        if n not in ours or n not in theirs or ours[n].shape != theirs[n].shape
    ]
    if unlike:
        raise ValueError(
            f"init_from={name} has another shape of model: {unlike[0]} and {len(unlike) - 1} more "
            f"differ; its sizes are in its config.yaml"
        )
    log(f"weights from {checkpoint.path}")
    return theirs


def random_state() -> dict[str, Any]:
    """Capture the random states of this process as JSON values and tensors."""
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    key = numpy_state["state"]["key"]
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key.tolist()}},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` captured."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = state["numpy"]
    key = np.asarray(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def save_state(
    run: Path,
    *,
    model: Decoder,
    optimizers: Optimizers,
    scaler: torch.amp.GradScaler,
    order: WindowOrder,
    counters: Counters,
    tokenizer_sha256: str,
    text: list[str],
    tracker_id: str | None,
    keep_last_n: int,
    ranks: Ranks,
    log: Callable[[str], None],
) -> None:
    """Write a checkpoint, mark it if it is the best, and drop those no longer kept.

    Every rank must call this: the random states of all are gathered, then rank 0 writes. A disk
    that refuses costs this checkpoint and a warning, never the run.
    """
    gathered = ranks.gather_objects(random_state())
    if not ranks.is_main:
        return
    rng_tensors: dict[str, Tensor] = {}
    rng_json = []
    for rank, state in enumerate(gathered):
        rng_tensors |= {f"{rank}/{k}": v for k, v in state.items() if isinstance(v, Tensor)}
        rng_json.append({k: v for k, v in state.items() if not isinstance(v, Tensor)})
    tensors = {
        "model": model.state_dict(),
        "optimizer": optimizers.state_tensors(),
        "random": rng_tensors,
    }
    state = {
        "version": STATE_VERSION,
        "model_config": model.config.to_dict(),
        "tokenizer_sha256": tokenizer_sha256,
        "text": text,
        "optimizer": optimizers.state_json(),
        "scaler": scaler.state_dict(),
        "data": order.state_dict(),
        "counters": asdict(counters),
        "random": rng_json,
        "tracker_id": tracker_id,
    }
    try:
        save_checkpoint(run, counters.step, tensors, state)
        if counters.best_step == counters.step:
            mark_best(run, counters.step)
        prune(run, keep_last_n)
    except CheckpointError as error:
        log(f"warning: {error}; training goes on")


def restore_state(
    checkpoint: Checkpoint,
    *,
    optimizers: Optimizers,
    scaler: torch.amp.GradScaler,
    order: WindowOrder,
    ranks: Ranks,
) -> tuple[Counters, str | None, str | None]:
    """Put back everything but the weights; return counters, the tracker's id and a notice.

    The notice is None unless the number of ranks changed: the data position does not depend on it,
    the random states do, so dropout then draws anew.

    Raises:
        ValueError: naming the part that is missing or of another version.
    """
    state = checkpoint.state
    parts = ("optimizer", "scaler", "data", "counters", "random", "tracker_id", "version")
    missing = [part for part in parts if part not in state]
    missing += [
        f"{group}.safetensors"
        for group in ("model", "optimizer", "random")
        if group not in checkpoint.tensors
    ]
    if missing:
        raise ValueError(
            f"{checkpoint.path} lacks {', '.join(missing)}: it cannot be resumed, only used as "
            "init_from="
        )
    if state["version"] != STATE_VERSION:
        raise ValueError(
            f"{checkpoint.path} has training state of version {state['version']}, this code reads "
            f"{STATE_VERSION}: use it as init_from="
        )
    optimizers.load(checkpoint.tensors["optimizer"], state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    order.load_state_dict(state["data"])
    notice = None
    if len(state["random"]) == ranks.world:
        prefix = f"{ranks.rank}/"
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in checkpoint.tensors["random"].items()
            if name.startswith(prefix)
        }
        set_random_state({**state["random"][ranks.rank], **tensors})
    else:
        notice = (
            f"saved with {len(state['random'])} ranks, resumed with {ranks.world}: the data goes "
            "on exactly, dropout draws anew"
        )
    return Counters(**state["counters"]), state["tracker_id"], notice
