"""Where attention sinks form and where not: `experiment=sink_formation` in five variants.

    python benchmarks/sink_formation.py                    a table, and docs/sinks.png
    python benchmarks/sink_formation.py --shakespeare RUN  with a default run trained earlier

The variants are the plain softmax, a zero and a learned sink logit, an output gate, and SGD (at a
rate of 0.1) in place of AdamW, each with three random states; beside them the default Shakespeare
run, evaluated more often. Every run is train.py in a process of its own, and its curve is that of
its own probe records: alpha_0 as the event detector sees it, the mean weight on the first token
over all rows of the first 64, triggers and the first row included.

The table is measured on the last checkpoint and the whole validation split. A row counts as
"without a trigger" when it is not the first of its window and its own token is none, so that
nothing has to be copied; "uniform" is what a head that looks everywhere would give BOS in the same
rows. The value norm is that of BOS against the mean of the other tokens.

Fails if a softmax run has no `sink_formed` event, or a run has one whose alpha_0 never passed 0.3.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from own_runs import machine_line, run_experiment

from analysis.event_files import read_events
from analysis.head_files import read_records, stack
from analysis.inside import inside
from analysis.plots import STYLE
from data.back_copy import N_TRIGGERS, attainable_loss, bigram_loss
from data.prepare import prepare
from data.sources import DataConfig
from data.windows import Windows
from model.checkpoint import resolve_run
from model.load import load_model
from training.config import from_dict
from training.run_folder import read_config, read_status

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VARIANTS = {
    "softmax": [],
    "zero sink logit": ["model.sink_logit=zero"],
    "learned sink logit": ["model.sink_logit=learned"],
    "output gate": ["model.output_gate=true"],
    "SGD": ["optim=sgd", "optim.lr=0.1"],
}
LOOKS = {  # Okabe and Ito's colours; the dashes serve those who print in grey
    "softmax": ("#D55E00", "-"),
    "zero sink logit": ("#0072B2", "--"),
    "learned sink logit": ("#56B4E9", "-."),
    "output gate": ("#009E73", "-"),
    "SGD": ("#000000", ":"),
}
LAYER_COLOURS = ["#0072B2", "#56B4E9", "#009E73", "#D55E00"]
LIMIT = 0.3  # telemetry.sink
QUICK = ["train.max_steps=40", "train.eval_every=20", "optim.decay_steps=1500"]


class Curves(NamedTuple):
    """Probe records of a run: steps (N,), alpha_0 (N, layers, H), that of a uniform head."""

    steps: np.ndarray
    alpha: np.ndarray
    uniform: float


class Measured(NamedTuple):
    """One checkpoint: weights on BOS in rows without and with a trigger, and the rest."""

    plain: float
    triggered: float
    uniform: float  # of `plain`
    null_mass: float  # in the rows of `plain`
    value_norm: float
    loss: float


class Found(NamedTuple):
    """What one run came to."""

    curves: Curves
    before: Measured
    after: Measured
    formed: int | None  # the step at which the detector dates the first sink


def train(name: str, folder: Path, cache_dir: str, overrides: list[str]) -> Path:
    """Train one run in a folder of its own, unless it lies there finished; return its folder."""
    latest = folder / "latest"
    if not latest.is_file() or read_status(Path(latest.read_text("utf-8").strip())) != "done":
        run_experiment(name, folder, DataConfig(cache_dir=cache_dir), overrides)
    return Path(latest.read_text("utf-8").strip())


def curves(run: Path) -> Curves:
    records = read_records(run, "probe")
    if not records:
        raise SystemExit(f"{run} has no probe records: train it with telemetry=default")
    steps, alpha = stack(records, "alpha_0")
    _, uniform = stack(records, "uniform/alpha_0")
    return Curves(steps, alpha, float(uniform.mean()))


@torch.no_grad()
def measure(run: Path, step: int) -> Measured:
    """Measure the checkpoint of a step on the run's whole validation split."""
    config = from_dict(read_config(run))
    model, _ = load_model(run, which=step)
    context = model.config.context_length
    text = prepare(config.data, config.tokenizer, context_length=context, log=lambda line: None)
    windows = Windows(text.val, context, config.data.mode)
    batch = windows.batch(range(len(windows)))
    output, (view,) = inside(model, batch.tokens)
    assert view.result.sink_mass is not None
    on_bos = view.result.sink_mass[:, 0, :, 0]  # (B, T)
    null = view.result.null_mass
    is_trigger = batch.tokens < N_TRIGGERS
    rows = ~is_trigger
    rows[:, 0] = False
    norms = view.v.norm(dim=-1)  # (B, 1, T)
    return Measured(
        plain=on_bos[rows].double().mean().item(),
        triggered=on_bos[is_trigger].double().mean().item(),
        uniform=(1 / torch.arange(1.0, context + 1)).expand_as(rows)[rows].mean().item(),
        null_mass=0.0 if null is None else null[:, 0][rows].double().mean().item(),
        value_norm=(norms[..., 0].mean() / norms[..., 1:].mean()).item(),
        loss=_loss(output.logits, batch.targets),
    )


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> float:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def find(run: Path) -> Found:
    seen = curves(run)
    sinks = [event.step for event in read_events(run) if event.kind == "sink_formed"]
    last = int(seen.steps[-1])
    return Found(seen, measure(run, 0), measure(run, last), min(sinks, default=None))


# --- Table, check and picture ---------------------------------------------------------------------


def table(found: dict[str, list[Found]]) -> str:
    """A Markdown table: median, and range over the random states."""
    lines = [
        "| | weight on BOS, rows without a trigger | rows with one | null mass "
        "| value norm of BOS | sink formed at step | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    first = next(iter(found))
    lines.append(_row(f"{first}, before training", [run.before for run in found[first]], ""))
    for variant, runs in found.items():
        dates = [run.formed for run in runs]
        formed = "never" if set(dates) == {None} else ", ".join(str(d or "never") for d in dates)
        lines.append(_row(variant, [run.after for run in runs], formed))
    return "\n".join(lines)


def _row(name: str, measured: list[Measured], formed: str) -> str:
    plain, triggered, _, null_mass, value_norm, loss = map(_spread, zip(*measured, strict=True))
    cells = [name, plain, triggered, null_mass, value_norm, formed, loss]
    return f"| {' | '.join(cells)} |"


def _spread(values: Iterable[float]) -> str:
    numbers = [f"{value:.3f}" for value in sorted(values)]
    median = f"{statistics.median(float(number) for number in numbers):.3f}"
    return median if numbers[0] == numbers[-1] else f"{median} ({numbers[0]} to {numbers[-1]})"


def complaints(found: dict[str, list[Found]]) -> list[str]:
    """What the detector should have seen and did not, or the other way round."""
    faults = []
    for variant, runs in found.items():
        for number, run in enumerate(runs, start=1):
            if variant == "softmax" and run.formed is None:
                faults.append(f"softmax, run {number}: no sink was seen")
            if run.formed is not None and run.curves.alpha.max() <= LIMIT:
                faults.append(f"{variant}, run {number}: a sink was seen, alpha_0 is below {LIMIT}")
    return faults


def draw(path: Path, found: dict[str, list[Found]], shakespeare: Curves) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**STYLE, "font.size": 11}):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for variant, runs in found.items():
            colour, dashes = LOOKS[variant]
            for number, run in enumerate(runs):
                label = variant if number == 0 else None
                _line(left, run.curves, run.curves.alpha[:, 0, 0], colour, dashes, label)
                if run.formed is not None:
                    place = int(np.searchsorted(run.curves.steps, run.formed))
                    left.plot(run.formed, run.curves.alpha[place, 0, 0], "o", color=colour)
        for layer in range(shakespeare.alpha.shape[1]):
            colour = LAYER_COLOURS[layer % len(LAYER_COLOURS)]
            for head in range(shakespeare.alpha.shape[2]):
                label = f"layer {layer}" if head == 0 else None
                _line(right, shakespeare, shakespeare.alpha[:, layer, head], colour, "-", label)
        first = next(iter(found.values()))[0].curves
        for axes, uniform in ((left, first.uniform), (right, shakespeare.uniform)):
            axes.axhline(LIMIT, color="#999999", linewidth=1)
            axes.axhline(uniform, color="#999999", linewidth=1)
            axes.set_xlabel("optimizer step")
        edge = right.get_xlim()[1]
        grey: dict[str, Any] = {"color": "#777777", "fontsize": 9, "ha": "right", "va": "bottom"}
        right.text(edge, LIMIT, "limit of the event, 0.3", **grey)
        right.text(edge, shakespeare.uniform, "a head that looks everywhere", **grey)
        left.set_ylim(0, 1)
        left.set_ylabel("alpha_0: mean weight on the first token")
        left.set_title("Back-copy task, one head")
        right.set_title(f"Shakespeare, {shakespeare.alpha[0].size} heads")
        left.legend(fontsize=9, loc="center right", bbox_to_anchor=(1, 0.62))
        right.legend(fontsize=9, loc="upper right")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)


def _line(
    axes: Axes, points: Curves, values: np.ndarray, colour: str, dashes: str, label: str | None
) -> None:
    style: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": 1.4}
    axes.plot(points.steps, values, label=label, **style)


def main() -> None:
    """Train what is not there yet, print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="keep the runs here, and use those that are")
    parser.add_argument("--shakespeare", type=Path, help="a default run with its probe records")
    parser.add_argument("--figure", type=Path, default=Path("docs/sinks.png"))
    parser.add_argument("--cache-dir", default="data/cache", help="where texts are prepared")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on its cores")
    parser.add_argument("--quick", action="store_true", help="a few steps of one seed, no checks")
    options = parser.parse_args()

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.jobs)))
    seeds = options.seeds[:1] if options.quick else options.seeds
    short = QUICK if options.quick else []
    print(machine_line())
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        folder = (options.runs or Path(temporary)).resolve()
        keep = ["train.keep_last_n=1000", "telemetry.report=false", *short]  # step 0 is measured
        jobs = {
            (variant, seed): pool.submit(
                train,
                "sink_formation",
                folder / f"{variant.replace(' ', '-')}-{seed}",
                options.cache_dir,
                [f"seed={seed}", *keep, *overrides],
            )
            for seed in seeds
            for variant, overrides in VARIANTS.items()
        }
        text = ["train.eval_every=50", "train.eval_windows=64", "telemetry.report=false", *short]
        other = None
        if options.shakespeare is None:
            other = pool.submit(
                train, "shakespeare_char", folder / "shakespeare", options.cache_dir, text
            )
        found: dict[str, list[Found]] = {variant: [] for variant in VARIANTS}
        for (variant, seed), job in jobs.items():
            run = find(job.result())
            found[variant].append(run)
            print(
                f"{variant}, seed {seed}: alpha_0 {run.curves.alpha[0].max():.3f} at first, "
                f"{run.curves.alpha[-1].max():.3f} at last, at most {run.curves.alpha.max():.3f}; "
                f"sink formed at step {run.formed or '-'}; loss {run.after.loss:.4f}",
                flush=True,
            )
        shakespeare = curves(other.result() if other else resolve_run(options.shakespeare))
    draw(options.figure, found, shakespeare)

    softmax = found["softmax"][0]
    print(f"\n{table(found)}\n")
    print(
        f"uniform weight on BOS in rows without a trigger {softmax.after.uniform:.3f}; "
        f"uniform alpha_0 {softmax.curves.uniform:.3f}"
    )
    print(
        f"lowest expected loss of any model {attainable_loss():.4f}, "
        f"of one that sees a single token {bigram_loss():.4f}"
    )
    print(
        f"Shakespeare: alpha_0 of a head at most {shakespeare.alpha.max():.3f}, at the end "
        f"{shakespeare.alpha[-1].min():.3f} to {shakespeare.alpha[-1].max():.3f}; "
        f"uniform {shakespeare.uniform:.3f}"
    )
    print(options.figure)
    faults = complaints(found)
    if faults and not options.quick:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main()
