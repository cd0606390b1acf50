"""Several processes training one model, and stopping them cleanly.

torchrun starts the processes and says through the environment who is who; without it there is one
rank and nothing here costs anything. Values that ranks exchange (counts, losses, objects, flags)
travel over gloo from CPU memory, so asking for them never waits for a GPU; gradients travel over
nccl on CUDA. Every rank must make the same calls in the same order.
"""

import gc
import importlib
import inspect
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")

# How long a rank waits for the others. One rank may be preparing a large data set meanwhile.
_TIMEOUT = timedelta(hours=2)
_STOP_SIGNALS = tuple(
    signal.Signals[name]
    for name in ("SIGTERM", "SIGINT", "SIGUSR1")
    if hasattr(signal, name)  # SIGUSR1 does not exist on every platform
)
# PyTorch 2.13 renamed the option that sends buffers again before every forward pass.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class RankFailedError(OSError):
    """Another rank has failed, and says why itself."""


class Ranks:
    """The processes of this run, and what they say to each other.

    ``Ranks.from_environment()`` only reads who we are; ``with ranks.connect(device):`` joins the
    others and leaves at the end. `rank` numbers all processes, `local_rank` those of this machine,
    `world` is their count.

    Do the work of the ``with`` block in a function of its own: the threads of the group end only
    when nothing refers to it, a wrapped model included, and a thread that outlives the interpreter
    can abort a process that had finished.
    """

    def __init__(self, rank: int = 0, world: int = 1, local_rank: int = 0) -> None:
        self.rank = rank
        self.world = world
        self.local_rank = local_rank

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Ranks":
        """Read torchrun's variables; without them this is the only rank.

        Raises:
            ValueError: when only some of the variables are set.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        missing = [name for name in names if name not in environment]
        if len(missing) == len(names):
            return cls()
        if missing:
            raise ValueError(
                f"the environment sets {', '.join(n for n in names if n not in missing)} but not "
                f"{', '.join(missing)}: start with torchrun, or unset them"
            )
        rank, world, local_rank = (int(environment[name]) for name in names)
        return cls(rank, world, local_rank)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    def connect(self, device: torch.device) -> "Ranks":
        """Join the other ranks; with one rank there is nobody to join.

        Raises:
            ValueError: when this PyTorch or `device` does not serve several ranks.
        """
        if self.world == 1:
            return self
        if not torch.distributed.is_available():
            raise ValueError(
                f"this PyTorch cannot connect {self.world} ranks: start without torchrun"
            )
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"device={device.type} cannot train with {self.world} ranks: use cpu or cuda"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # Its functions have the current group as a default argument. Imported now, before there is
        # one, they cannot keep ours alive after the end.
        importlib.import_module("torch.distributed.nn.functional")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(
            backend, rank=self.rank, world_size=self.world, timeout=_TIMEOUT
        )
        return self

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error the other ranks may be waiting in a collective, and leaving in good order
        # could wait for them: let this process fail, torchrun then ends theirs.
        if error is None and self.world > 1 and torch.distributed.is_initialized():
            gc.collect()  # wrapped models hold on to the group until they are collected
            torch.distributed.destroy_process_group()

    # --- Saying things ----------------------------------------------------------------------------

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, each value added up in float64."""
        if self.world == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's `value` on every rank, such as the run folder it has chosen."""
        if self.world == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's `value`, in the order of the ranks, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(values, value)
        return values

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on rank 0, then on the others, which find what it has prepared.

        Raises:
            RankFailedError: on the others, when the block failed on rank 0 (which raises its own
                error), so that nobody waits for a file that will not come.
        """
        if self.is_main:
            done = False
            try:
                yield
                done = True
            finally:
                self.broadcast_object(done)
        else:
            if not self.broadcast_object(True):
                raise RankFailedError(f"rank {self.rank} stops because rank 0 failed")
            yield

    # --- Training together ------------------------------------------------------------------------

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return `model` so that its backward pass averages gradients over the ranks.

        Rank 0's weights are sent to all. Compile before wrapping, build the optimizers from and
        save the plain module. Buffers are constants (position tables) and are not sent again.
        """
        if self.world == 1:
            return model
        options: dict[str, Any] = {_SYNC_BUFFERS: False, "gradient_as_bucket_view": True}
        if device.type == "cuda":
            options["device_ids"] = [device]
        return DistributedDataParallel(model, **options)


def sync_gradients(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Return the context of one micro-step: forward *and* backward belong inside.

    Ranks exchange gradients on the `last` micro-step of a step only. The forward pass already
    decides whether its backward will, so wrapping the backward alone loses the earlier micro-steps.
    """
    if last or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


class StopFlag:
    """A wish to stop, raised by a signal and acted upon at the edge of a step.

    Within ``with StopFlag() as stop:`` SIGTERM, SIGINT and SIGUSR1 only set the flag, so no step
    and no checkpoint is cut in half. A second SIGINT (Ctrl-C again) interrupts at once.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopFlag":
        # Python allows handlers in the main thread only; elsewhere the flag is simply never set.
        if threading.current_thread() is threading.main_thread():
            for number in _STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def agreed(self, ranks: Ranks) -> str | None:
        """Return the signal's name once *any* rank has received one, on all ranks alike.

        Call it on every rank at every step edge: all leave the loop after the same step.
        """
        received = self._received
        counts = ranks.all_reduce_sum([received is number for number in _STOP_SIGNALS])
        return next((n.name for n, count in zip(_STOP_SIGNALS, counts, strict=True) if count), None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._received == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = signal.Signals(number)
