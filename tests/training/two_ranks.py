"""What each of two torchrun processes does for test_distributed.py; results go to a JSON file.

Usage: torchrun --nproc-per-node 2 two_ranks.py FOLDER
"""

import json
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.functional import cross_entropy

from data.windows import IGNORE, Batch
from model.config import ModelConfig
from training.devices import grad_scaler
from training.distributed import Ranks, StopFlag
from training.optim import OptimConfig, build_optimizers
from training.step import take_step

CPU = torch.device("cpu")


class TinyModel(nn.Module):
    """Predicts each target from its token alone, behind the decoder's interface."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lm_head = nn.Linear(6, 11)
        self.register_buffer("table", torch.ones(6))

    def forward(
        self, tokens: Tensor, targets: Tensor, documents: None, reduction: str
    ) -> SimpleNamespace:
        logits = self.lm_head(self.embed(tokens) * self.table)
        loss = cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction=reduction
        )
        return SimpleNamespace(loss=loss)


def global_batch() -> Batch:
    """Return 8 sequences whose numbers of counted targets differ a lot; one counts none."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (8, 7), generator=generator)
    targets = torch.randint(0, 11, (8, 7), generator=generator)
    for row, counted in enumerate((7, 1, 5, 0, 2, 2, 1, 3)):
        targets[row, counted:] = IGNORE
    return Batch(tokens, targets, None)


def step_gradients(
    model: nn.Module, wrapped: nn.Module, ranks: Ranks, batch: Batch, micro_batch: int
) -> list[list[float]]:
    """Take one step on this rank's share of the sequences; return the gradients it used."""
    optimizers = build_optimizers(model, OptimConfig(kind="sgd", grad_clip=0.0))
    gradients: list[list[float]] = []
    # Record instead of update: the same weights serve every comparison.
    optimizers.step = lambda: gradients.extend(
        p.grad.flatten().tolist() for p in model.parameters()
    )
    starts = range(0, len(batch.tokens), micro_batch)
    parts = [slice(start, start + micro_batch) for start in starts]
    take_step(
        wrapped,
        optimizers,
        grad_scaler(CPU, torch.float32),
        [Batch(batch.tokens[part], batch.targets[part], None) for part in parts],
        config=ModelConfig(),
        device=CPU,
        autocast=nullcontext,
        ranks=ranks,
    )
    return gradients


def count_exchanges(wrapped: nn.Module) -> list[None]:
    """Return a list that grows with every exchange of gradients (all fit into one message)."""
    exchanges: list[None] = []

    def hook(group: Any, bucket: GradBucket) -> Future[Tensor]:
        exchanges.append(None)
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, hook)
    return exchanges


def compare_gradients(ranks: Ranks) -> dict[str, Any]:
    """Return gradients of 1 rank x 8 sequences and of 2 ranks x 2 micro-steps x 2 sequences."""
    everything = global_batch()
    torch.manual_seed(ranks.rank)  # different weights, until wrap sends rank 0's
    model = TinyModel()
    wrapped = ranks.wrap(model, CPU)
    exchanges = count_exchanges(wrapped)
    rows = slice(ranks.rank * 4, ranks.rank * 4 + 4)
    mine = Batch(everything.tokens[rows], everything.targets[rows], None)
    shared = step_gradients(model, wrapped, ranks, mine, micro_batch=2)
    nothing = Batch(mine.tokens, torch.full_like(mine.targets, IGNORE), None)
    return {
        "exchanges": len(exchanges),
        "shared": shared,
        "alone": step_gradients(model, model, Ranks(), everything, micro_batch=8),
        "nothing_counted": step_gradients(model, wrapped, ranks, nothing, micro_batch=2),
    }


def prepare_in_turn(ranks: Ranks, folder: Path) -> str:
    with ranks.main_first():
        if ranks.is_main:
            (folder / "prepared").write_text("by rank 0", encoding="utf-8")
        return (folder / "prepared").read_text(encoding="utf-8")


def fail_in_turn(ranks: Ranks) -> str:
    try:
        with ranks.main_first():
            raise OSError("bad data")
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def stop_together(ranks: Ranks) -> tuple[int, str | None]:
    """Signal rank 1 alone during step 2; return the last step and the signal agreed upon."""
    with StopFlag() as stop:
        for step in range(5):
            if step == 2 and ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            agreed = stop.agreed(ranks)
            if agreed:
                break
        return step, agreed


def work(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return {
        "who": [ranks.rank, ranks.world, ranks.is_main],
        "run_folder": ranks.broadcast_object(f"chosen by rank {ranks.rank}"),
        "gathered": ranks.gather_objects({"rank": ranks.rank}),
        "sums": ranks.all_reduce_sum([2**24 + ranks.rank, 0.5]),
        "gradients": compare_gradients(ranks),
        "prepared": prepare_in_turn(ranks, folder),
        "failed": fail_in_turn(ranks),
        "stop": stop_together(ranks),
    }


def gloo_threads() -> list[str]:
    """Return the names of gloo's threads in this process; only Linux shows them."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    ranks = Ranks.from_environment()
    with ranks.connect(CPU):
        result = work(ranks, folder)
        ranks.all_reduce_sum([0.0])
    result["left_over"] = [torch.distributed.is_initialized(), gloo_threads()]
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
