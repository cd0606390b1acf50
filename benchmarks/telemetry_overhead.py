"""What looking at the heads costs: the share of training time at the default cadence, on a CPU.

    python benchmarks/telemetry_overhead.py                   nano and small at context 256
    python benchmarks/telemetry_overhead.py --models nano --pairs 40
    python benchmarks/telemetry_overhead.py --cpu-time        one thread, for a busy machine

A run of train.py's own parts trains on random letters with a look at every second step: an ordinary
step, a step with statistics, and so on. The cost of a look is what its step takes more than the
mean of the two around it, writing included; medians over all looks are printed with the quarter and
three-quarter points. The probe, which follows an evaluation, is timed on its own.

The share is that of a whole default run: its looks, the early ones among them, and its probes, over
its steps. Where a step of the default batch would take too long (`small`), the times of two smaller
batches are measured and drawn out in a straight line: a part for every step, a part per sequence.

The peer is the usual way to such numbers, with the matrix of all weights of every layer.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from own_runs import ROOT, machine_line
from torch import Tensor

sys.path.insert(0, str(ROOT))  # for train.py
from train import Session, set_up
from training.config import Config, to_config
from training.devices import autocast
from training.distributed import Ranks
from training.step import take_step
from training.telemetry import is_due

LIMIT = 0.03
CONTEXT = 256
WARMUP_STEPS = 6  # of a run; from the fourth on every second step has a look
BATCHES = {"nano": (8, 32), "small": (2, 8)}  # sequences of a step, a smaller and a larger number
VOCABULARY = {"small": 16384}  # the size that the comment of its config names


@dataclass
class Times:
    """Seconds, one number per look or probe."""

    batch: int  # sequences of a step
    plain: list[float] = field(default_factory=list)  # the step without a look
    look: list[float] = field(default_factory=list)  # what the look's step takes more
    sums: list[float] = field(default_factory=list)  # over rows, and the gradients' norms
    writing: list[float] = field(default_factory=list)  # record, scalars, events
    probe: list[float] = field(default_factory=list)
    matrices: list[float] = field(default_factory=list)  # the peer, all layers


_clocks = [time.perf_counter]  # the last one counts


def _now() -> float:
    return _clocks[-1]()


def composed(model: str, batch: int, folder: Path) -> Config:
    """The default run with this model, on random letters, with a look at every second step."""
    text = folder / "letters.txt"
    if not text.exists():
        letters = np.random.default_rng(0).integers(0, 26, 400_000).astype(np.uint8) + ord("a")
        text.write_bytes(letters.tobytes())
    overrides = [
        f"model={model}",
        f"model.context_length={CONTEXT}",
        f"model.vocab_size={VOCABULARY.get(model, 0)}",
        f"train.batch_size={batch}",
        "telemetry.every=2",
        "tracker=none",
        "device=cpu",
        "dtype=fp32",
        "compile='false'",
        "attention.backend=sdpa",
        f"data.path={text}",
        f"data.cache_dir={folder / 'cache'}",
        f"runs_dir={folder / 'runs'}",
    ]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return to_config(compose("train", overrides))


def defaults() -> Config:
    """The default run, whose cadence is judged."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return to_config(compose("train", []))


def measure(model: str, batch: int, pairs: int, probes: int, folder: Path) -> Times:
    """Train alternately with and without a look, then probe and build the peer's matrices."""
    ranks = Ranks.from_environment()
    with redirect_stdout(io.StringIO()):  # the log of a run
        session = set_up(composed(model, batch, folder), [], ranks)
    assert session is not None
    times = Times(batch)
    with session.records:
        seconds = [_step(session, ranks, n + 1, times) for n in range(WARMUP_STEPS + 2 * pairs + 1)]
        precision = partial(autocast, session.device, session.dtype)
        for number in range(probes):
            probe = partial(session.telemetry.probe, number, session.device, precision)
            times.probe.append(_timed(probe))
        session.records.status = "done"
    # Steps count from 1, so a step with a look has an odd place in the list.
    for at in range(WARMUP_STEPS + 1, len(seconds) - 1, 2):
        around = (seconds[at - 1] + seconds[at + 1]) / 2
        times.plain.append(around)
        times.look.append(seconds[at] - around)
    del times.sums[:-pairs], times.writing[:-pairs]
    layer = _queries_and_keys(session, batch)
    layers = range(session.config.model.n_layer)
    for _ in range(max(3, min(pairs, 5))):
        times.matrices.append(_timed(lambda: [matrix_statistics(*layer) for _ in layers]))
    return times


def _step(session: Session, ranks: Ranks, number: int, times: Times) -> float:
    """One step as in train.py, and the parts of its look."""
    began = _now()
    found = session.telemetry.begin_step(number)
    parts: list[float] = []
    if found is not None:
        look: Any = found  # its two methods are timed in place
        look.add, look.add_gradients = _timer(found.add, parts), _timer(found.add_gradients, parts)
    session.optimizers.set_lr(0.1)
    indices = session.order.next_indices(session.config.train.batch_size)
    take_step(
        session.model,
        session.optimizers,
        session.scaler,
        [session.train_windows.batch(indices)],
        config=session.config.model,
        device=session.device,
        autocast=partial(autocast, session.device, session.dtype),
        ranks=ranks,
        statistics=found,
    )
    writing = _timed(lambda: session.telemetry.end_step(found))
    if found is not None:
        times.sums.append(sum(parts))
        times.writing.append(writing)
    return _now() - began


def _timed(work: Callable[[], object]) -> float:
    began = _now()
    work()
    return _now() - began


def _timer(work: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
    def timed(*args: Any) -> None:
        seconds.append(_timed(lambda: work(*args)))

    return timed


# --- The peer -------------------------------------------------------------------------------------


def _queries_and_keys(session: Session, batch: int) -> tuple[Tensor, Tensor]:
    """Random queries and keys of one layer, (B, H, T, D)."""
    config = session.config.model
    shape = (batch, config.n_head, CONTEXT, config.head_size)
    return torch.randn(shape), torch.randn(shape)


@torch.no_grad()
def matrix_statistics(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """The row statistics of one layer from the whole matrix of its weights, (B, H, T) each."""
    T = q.shape[2]
    logits = (q @ k.transpose(2, 3)) * q.shape[3] ** -0.5  # (B, H, T, T)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    logits = logits.masked_fill(hidden, -1e30)
    log_weights = logits.log_softmax(-1)
    weights = log_weights.exp()
    position = torch.arange(T, dtype=q.dtype)
    return (
        -(weights * log_weights).sum(-1),
        logits.amax(-1),
        weights.amax(-1),
        position - weights @ position,
        weights[..., :1].sum(-1),
        weights[..., :4].sum(-1),
    )


# --- The share ------------------------------------------------------------------------------------


def cadence(config: Config) -> tuple[int, int, int]:
    """Steps, looks and probes of a run."""
    steps = config.train.max_steps
    looks = sum(is_due(step, config.telemetry.every) for step in range(1, steps + 1))
    probes = len({0, *range(0, steps + 1, config.train.eval_every), steps})
    return steps, looks, probes


def at_batch(batch: int, few: tuple[int, float], many: tuple[int, float]) -> float:
    """Seconds at a batch size, on the straight line through the seconds at two others."""
    slope = (many[1] - few[1]) / (many[0] - few[0])
    return many[1] + slope * (batch - many[0])


def share(config: Config, step: float, look: float, probe: float) -> tuple[float, float]:
    """Shares of a run's training time that its looks and its probes take; times in seconds."""
    steps, looks, probes = cadence(config)
    return looks * look / (steps * step), probes * probe / (steps * step)


def report(model: str, few: Times, many: Times, config: Config) -> float:
    """Print what was measured of a model, and return the share of its training time."""
    batch = config.train.batch_size
    print(f"\n{model}, context {CONTEXT}")
    for times in (few, many):
        step, look = statistics.median(times.plain), statistics.median(times.look)
        sums, writing = statistics.median(times.sums), statistics.median(times.writing)
        matrices = statistics.median(times.matrices)
        print(
            f"  {times.batch} sequences a step: step {_spread(times.plain)}, a look "
            f"{_spread(times.look)} = {look / step:.1%} of a step\n"
            f"    attention's statistics {1e3 * (look - sums - writing):.1f} ms, sums "
            f"{1e3 * sums:.1f} ms, writing {1e3 * writing:.1f} ms; with whole matrices "
            f"{_spread(times.matrices)} in place of attention's statistics, "
            f"{matrices / step:.1%} of a step"
        )
    step, look = (
        at_batch(
            batch,
            (few.batch, statistics.median(getattr(few, name))),
            (many.batch, statistics.median(getattr(many, name))),
        )
        for name in ("plain", "look")
    )
    probe = statistics.median(many.probe)
    looks, probes = share(config, step, look, probe)
    steps, n_looks, n_probes = cadence(config)
    drawn_out = "" if batch == many.batch else " (drawn out)"
    print(
        f"  {batch} sequences a step{drawn_out}: step {1e3 * step:.0f} ms, look {1e3 * look:.1f} "
        f"ms; a probe {probe:.2f} s, from {min(many.probe):.2f} to {max(many.probe):.2f}\n"
        f"  {steps} steps with {n_looks} looks and {n_probes} probes: looks {looks:.2%} + probes "
        f"{probes:.2%} = {looks + probes:.2%} of training time (limit {LIMIT:.0%})"
    )
    return looks + probes


def _spread(seconds: list[float]) -> str:
    low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75]) * 1e3
    return f"{middle:.1f} ms ({low:.1f} to {high:.1f})"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return 1 where a share is above the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=sorted(BATCHES), default=sorted(BATCHES))
    parser.add_argument("--pairs", type=int, default=20, help="looks per model and batch size")
    parser.add_argument("--probes", type=int, default=3)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count CPU time of one thread, which other processes do not take",
    )
    options = parser.parse_args(arguments)
    if options.cpu_time:
        torch.set_num_threads(1)
        _clocks.append(time.process_time)
    for name in ("pairs", "probes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}={getattr(options, name)} must be at least 1")

    config = defaults()
    print(machine_line())
    print(
        f"telemetry.every={config.telemetry.every}, train.eval_every={config.train.eval_every}, "
        f"telemetry.probe_windows={config.telemetry.probe_windows}, float32, not compiled, sdpa, "
        f"{'CPU time of one thread' if options.cpu_time else 'time on the clock'}"
    )
    worst = 0.0
    for model in options.models:
        with tempfile.TemporaryDirectory() as temporary:
            few, many = (
                measure(model, batch, options.pairs, probes, Path(temporary))
                for batch, probes in zip(BATCHES[model], (0, options.probes), strict=True)
            )
        worst = max(worst, report(model, few, many, config))
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
