"""Pictures of a run's history: loss, learning rate and throughput over steps.

    python -m analysis.plots runs/latest

reads ``metrics.jsonl`` and writes PNG files under ``plots/`` in the run's folder, and those of
analysis/head_plots.py beside them. Sizes and colours
are chosen to stay legible at half size in a README, in grey print and to colour-blind readers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from analysis.metrics_file import FILE_NAME, Row, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by every kind of colour vision.
BLUE, ORANGE = "#0072B2", "#D55E00"
STYLE: dict[Any, Any] = {
    "font.size": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "legend.frameon": False,
}
LOG_SCALE_RATIO = 30.0  # a loss that falls by more than this is drawn on a logarithmic axis
SMOOTHING_SHARE = 0.05  # share of the run that one smoothed point stands for
SMOOTH_POINTS = 2000  # more would fall on the same pixels


class Series(NamedTuple):
    """One measured key: the steps and values where it was finite."""

    steps: np.ndarray  # (N,) int64, increasing
    values: np.ndarray  # (N,) float64


def plot_run(run: Path) -> list[Path]:
    """Draw the history of a run and return the files written.

    A picture whose measurements the run does not have is left out.

    Raises:
        FileNotFoundError: when the run has no ``metrics.jsonl``.
    """
    rows = read_rows(run / FILE_NAME)
    pictures: dict[str, Callable[[Axes, list[Row]], bool]] = {
        "loss": draw_loss,
        "learning_rate": draw_learning_rate,
        "throughput": draw_throughput,
    }
    written = []
    for name, draw in pictures.items():
        path = run / "plots" / f"{name}.png"
        if _write_picture(path, draw, rows):
            written.append(path)
    return written


def series(rows: list[Row], key: str) -> Series:
    """Return what was measured under `key`; points that are not finite are left out."""
    points = [(row["step"], row[key]) for row in rows if key in row and math.isfinite(row[key])]
    steps = np.array([step for step, _ in points], dtype=np.int64)
    return Series(steps, np.array([value for _, value in points], dtype=np.float64))


def smooth(points: Series, reach: int) -> Series:
    """Return the median of each point and `reach` neighbours on either side.

    The window is symmetric, narrower towards the ends, so the result neither lags behind a falling
    curve nor bends its ends; and a single spike leaves no trace in a median. Long series are
    reduced to `SMOOTH_POINTS` places.
    """
    last = len(points.values) - 1
    centres = np.unique(np.linspace(0, last, min(last + 1, SMOOTH_POINTS)).round().astype(int))
    sides = np.minimum(reach, np.minimum(centres, last - centres))
    medians = [
        np.median(points.values[centre - side : centre + side + 1])
        for centre, side in zip(centres, sides, strict=True)
    ]
    return Series(points.steps[centres], np.array(medians))


def draw_loss(axes: Axes, rows: list[Row]) -> bool:
    """Draw training loss, as measured and smoothed, and validation loss with its best point."""
    train, val = series(rows, "train/loss"), series(rows, "val/loss")
    shown = []
    if len(train.steps):
        reach = round(SMOOTHING_SHARE / 2 * len(train.steps))
        smoothed = smooth(train, reach)
        label = f"train, median of {2 * reach + 1} points" if reach else "train"
        axes.plot(*train, color=BLUE, alpha=0.3, linewidth=1)
        axes.plot(*smoothed, color=BLUE, linewidth=2, marker=_marker(train), label=label)
        shown += [smoothed.values, np.percentile(train.values, [1, 99])]
    if len(val.steps):
        best = int(np.argmin(val.values))
        label = f"validation, best {val.values[best]:.4f} at step {val.steps[best]:,}"
        axes.plot(*val, color=ORANGE, linewidth=1.5, marker="o", markersize=6, label=label)
        shown.append(val.values)
    if not shown:
        return False
    _fit_loss_axis(axes, np.concatenate(shown))
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Loss")
    axes.legend(loc="upper right")
    return True


def draw_learning_rate(axes: Axes, rows: list[Row]) -> bool:
    """Draw the learning rate of each step."""
    rate = series(rows, "train/lr")
    if not len(rate.steps):
        return False
    axes.plot(*rate, color=BLUE, linewidth=2, marker=_marker(rate))
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    axes.set_ylabel("learning rate")
    axes.set_title("Learning rate")
    return True


def draw_throughput(axes: Axes, rows: list[Row]) -> bool:
    """Draw tokens per second with its median, from zero so that slow stretches look their size."""
    from matplotlib.ticker import EngFormatter

    speed = series(rows, "train/tokens_per_s")
    if not len(speed.steps):
        return False
    median = float(np.median(speed.values))
    axes.plot(*speed, color=BLUE, linewidth=1.5, marker=_marker(speed))
    axes.axhline(median, color=ORANGE, linewidth=1.5, label=f"median {median:,.0f} tokens/s")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("tokens per second")
    axes.set_title("Throughput (evaluation and saving excluded)")
    axes.legend(loc="lower right")
    return True


def _write_picture(path: Path, draw: Callable[[Axes, list[Row]], bool], rows: list[Row]) -> bool:
    """Draw one picture and write it, unless it has nothing to show."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    with rc_context(STYLE):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        if not draw(axes, rows):
            return False
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        low, high = axes.get_xlim()
        if high - low < 1:  # a single step, which would get a fraction of a step as its axis
            axes.set_xlim(low - 1, high + 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    return True


def _fit_loss_axis(axes: Axes, values: np.ndarray) -> None:
    """Fit the axis to what matters, so that a single spike does not flatten the curve."""
    low, high = float(values.min()), float(values.max())
    if low > 0 and high > LOG_SCALE_RATIO * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.3)
        return
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)


def _marker(points: Series) -> str | None:
    """A single point has no line to be seen by."""
    return "o" if len(points.steps) == 1 else None


def main() -> int:
    """Draw the run named on the command line, print the files, and return the exit status."""
    from analysis.head_plots import plot_heads
    from model.checkpoint import resolve_run

    if len(sys.argv) != 2:
        print("usage: python -m analysis.plots RUN   (a run's folder, or runs/latest)")
        return 2
    try:
        run = resolve_run(sys.argv[1])
        paths = plot_run(run) + plot_heads(run)
    except (FileNotFoundError, ValueError) as error:
        print(f"plots: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
