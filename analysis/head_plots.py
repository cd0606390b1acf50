"""Pictures of a run's heads, for papers and READMEs: the report's main charts as PNG files.

    python -m analysis.plots runs/latest

draws them with the others, from the records of heads in the run's folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.plots import STYLE
from analysis.report_maps import NOTHING, Panel, find_panels
from analysis.report_style import LINES, QUIET
from analysis.run_record import (
    RunRecord,
    curve,
    head_name,
    interesting_heads,
    read_run,
    shortened,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOUR_MAP = "cividis"
DPI = 120
NAMED_HEADS = 6
PATTERN_HEADS = 6
MOST_TOKENS = 32  # of the patterns; more could not be read
LAYERS_WITH_NUMBERS, HEADS_WITH_NUMBERS = 8, 8


def plot_heads(run: Path) -> list[Path]:
    """Draw the pictures of a run's heads under ``plots/`` and return the files written.

    A picture whose measurements the run does not have is left out.

    Raises:
        FileNotFoundError: when the folder is not a run.
    """
    from matplotlib import rc_context

    record = read_run(run)
    pictures: dict[str, Callable[[RunRecord], Figure | None]] = {
        "heads": draw_maps,
        "sink_formation": draw_sink_formation,
        "entropy": draw_entropy,
        "patterns": draw_patterns,
    }
    written = []
    for name, draw in pictures.items():
        with rc_context(STYLE):
            figure = draw(record)
            if figure is not None:
                path = run / "plots" / f"{name}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, dpi=DPI)
                written.append(path)
    return written


def draw_maps(run: RunRecord) -> Figure | None:
    """Draw layer by head maps of entropy and sink mass as last measured."""
    panels = find_panels(run)
    if not panels:
        return None
    layers = max(len(panel.found.layers) for panel in panels)
    figure = _figure(4.2 * len(panels), 2.2 + 0.34 * max(6, layers))
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        image = _draw_map(axes, panel)
    row[0].set_ylabel("layer")
    figure.colorbar(image, ax=row.tolist(), fraction=0.03, pad=0.02)
    return figure


def draw_sink_formation(run: RunRecord) -> Figure | None:
    """Draw alpha_0 of every head over steps beside what uniform attention would give."""
    found = curve(run.probe, "alpha_0", "uniform/alpha_0")
    if found is None:
        return None
    figure = _figure(8, 4.8)
    axes = figure.add_subplot()
    n_head = found.values.shape[2]
    flat = found.values.reshape(len(found.steps), -1)
    order = np.argsort(-flat[-1], kind="stable").tolist()
    marker = "o" if len(found.steps) == 1 else None
    for head in order[NAMED_HEADS:]:
        values = flat[:, head]
        axes.plot(found.steps, values, color=QUIET, linewidth=0.8, marker=marker, label="others")
    for colour, head in reversed(list(zip(LINES, order[:NAMED_HEADS], strict=False))):
        name = head_name(found.layers[head // n_head], head % n_head)
        axes.plot(found.steps, flat[:, head], color=colour, label=name, marker=marker)
    if found.baseline is not None:
        for column in np.unique(np.round(found.baseline.T, 4), axis=0):
            axes.plot(found.steps, column, color="black", linestyle="--", label="uniform")
    limit = float(run.setting("telemetry.sink", 0.3))
    axes.axhline(limit, color="black", linestyle=":", linewidth=1, label=f"limit {limit:g}")
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("alpha_0")
    axes.set_title("Attention sinks as they form")
    handles, names = axes.get_legend_handles_labels()
    unique = dict(zip(reversed(names), reversed(handles), strict=True))  # strongest head first
    figure.legend(unique.values(), unique.keys(), loc="outside right center", fontsize=10)
    _step_axis(axes)
    return figure


def draw_entropy(run: RunRecord) -> Figure | None:
    """Draw each layer's mean entropy over steps, on a band from the lowest to the highest head."""
    found = curve(run.train, "entropy_norm") or curve(run.probe, "entropy_norm")
    if found is None:
        return None
    from matplotlib import colormaps

    figure = _figure(8, 4.5)
    axes = figure.add_subplot()
    count, low = len(found.layers), found.values.min(axis=(1, 2))
    colours = LINES if count <= len(LINES) else colormaps[COLOUR_MAP](np.linspace(0, 0.9, count))
    axes.fill_between(
        found.steps,
        low,
        found.values.max(axis=(1, 2)),
        color=QUIET,
        alpha=0.3,
        linewidth=0,
        label="all heads",
    )
    marker = "o" if len(found.steps) == 1 else None
    for row, layer in enumerate(found.layers):
        mean = found.values[:, row].mean(axis=-1)
        axes.plot(found.steps, mean, color=colours[row], label=f"layer {layer}", marker=marker)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("entropy / entropy of a uniform row")
    axes.set_title("Attention entropy")
    figure.legend(loc="outside right center", fontsize=10)
    _step_axis(axes)
    return figure


def draw_patterns(run: RunRecord) -> Figure | None:
    """Draw the attention of the most interesting heads over the beginning of the text."""
    patterns = run.patterns
    if patterns is None or not patterns.tokens:
        return None
    from matplotlib.colors import PowerNorm

    heads = interesting_heads(run)[:PATTERN_HEADS]
    size = min(len(patterns.tokens), MOST_TOKENS)
    with_null = bool(patterns.null_mass.any())
    queries = [_plain(token) for token in patterns.tokens[:size]]
    keys = [NOTHING, *queries] if with_null else queries
    columns = min(3, len(heads))
    rows = -(-len(heads) // columns)
    figure = _figure(4.6 * columns, 4.6 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(heads) :]:
        axes.remove()
    for place, (axes, head) in enumerate(zip(grid.flat, heads, strict=False)):
        weights = patterns.weights[head.row, head.head, :size, :size]
        shown = np.where(np.tri(size, dtype=bool) | (weights > 0), weights, np.nan)
        if with_null:
            null = patterns.null_mass[head.row, head.head, :size, None]
            shown = np.concatenate([null, shown], axis=1)
        # The colour follows the square root of the weight, so that weights of a few percent show.
        image = axes.imshow(
            shown, cmap=COLOUR_MAP, norm=PowerNorm(0.5, 0, 1), interpolation="nearest"
        )
        axes.set_title(
            f"{head_name(patterns.layers[head.row], head.head)}\n{head.reason}", fontsize=12
        )
        # All show the same text: it stands at the edges of the grid only.
        if place + columns >= len(heads):
            axes.set_xticks(range(len(keys)), keys, rotation=90, fontsize=8)
        else:
            axes.set_xticks([])
        if place % columns == 0:
            axes.set_yticks(range(size), queries, fontsize=8)
        else:
            axes.set_yticks([])
        axes.grid(False)
    figure.supxlabel("key: the token looked at")
    figure.supylabel("query: the token that looks")
    figure.colorbar(image, ax=grid.ravel().tolist()[: len(heads)], fraction=0.03, label="weight")
    return figure


def _draw_map(axes: Any, panel: Panel) -> Any:
    """Draw one layer by head map and return the image."""
    values = panel.found.values[-1]
    n_layer, n_head = values.shape
    image = axes.imshow(values, cmap=COLOUR_MAP, vmin=0, vmax=1, aspect="auto")
    if n_layer <= LAYERS_WITH_NUMBERS and n_head <= HEADS_WITH_NUMBERS:
        for (row, head), value in np.ndenumerate(values):
            colour = "black" if value > 0.6 else "white"
            axes.text(head, row, f"{value:.2f}", ha="center", va="center", color=colour, size=10)
    axes.set_title(f"{panel.name}\n{panel.source}, step {panel.found.steps[-1]:,}", fontsize=12)
    axes.set_xticks(range(n_head))
    axes.set_yticks(range(n_layer), [str(layer) for layer in panel.found.layers])
    axes.tick_params(labelsize=10)
    axes.set_xlabel("head")
    axes.grid(False)
    return image


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    return Figure(figsize=(width, height), layout="constrained")


def _step_axis(axes: Any) -> None:
    """Show steps on a scale that is logarithmic but has a place for step 0: most happens early."""
    from matplotlib.ticker import StrMethodFormatter

    axes.set_xscale("symlog", linthresh=10, linscale=0.5)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("optimizer step")


def _plain(token: str) -> str:
    """Return a token as a label of a picture, where dollar signs would start mathematics."""
    return shortened(token).replace("$", r"\$")
