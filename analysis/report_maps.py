"""The report's maps: layer by head over training, and the attention patterns of single heads.

One slider moves every panel of the first, one list chooses the head of the second. Both are
plotly's own controls: what they show lies in the page, as numbers of three decimals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.head_files import Patterns
from analysis.report_style import COLOUR_MAP, FONT, INK, dress, text
from analysis.run_record import (
    Curve,
    Head,
    RunRecord,
    curve,
    head_name,
    interesting_heads,
    shortened,
    thin,
    visible,
)

SLIDER_POSITIONS = 100  # more would make the page heavy and the slider coarse all the same
MOST_LABELS = 64  # tokens named on an axis; of longer texts every second, third, ... one
LAYERS_FOR_NUMBERS, HEADS_FOR_NUMBERS = 8, 8  # larger maps have no room for numbers in the cells
NOTHING = "(nothing)"


@dataclass(frozen=True)
class Panel:
    """One map of the slider: a measure of heads over steps; `source` says who measured it."""

    name: str
    source: str
    found: Curve

    def at(self, step: int) -> int | None:
        """Return the index of the newest measurement up to `step`; None before the first."""
        index = int(np.searchsorted(self.found.steps, step, side="right")) - 1
        return index if index >= 0 else None

    def title(self, step: int) -> str:
        """Return the heading at a position of the slider."""
        index = self.at(step)
        when = "not measured yet" if index is None else f"step {self.found.steps[index]:,}"
        return f"<b>{self.name}</b><br><span style='font-size:11px'>{self.source}, {when}</span>"

    def cells(self, step: int) -> list[list[float | None]]:
        """Return the values of a position, layers by heads."""
        index = self.at(step)
        if index is None:
            return [[None] * self.found.values.shape[2]] * len(self.found.layers)
        return _rounded(self.found.values[index])

    def baselines(self, step: int) -> list[list[float | str]]:
        """Return what a uniform head would have, in the shape of `cells`."""
        index, n_head = self.at(step), self.found.values.shape[2]
        if self.name == "entropy_norm":
            return [[1] * n_head] * len(self.found.layers)
        if index is None or self.found.baseline is None:
            return [["unknown"] * n_head] * len(self.found.layers)
        return [[round(float(x), 3)] * n_head for x in self.found.baseline[index]]


def find_panels(run: RunRecord) -> list[Panel]:
    """Return the maps that a run has measurements for, in the order shown."""
    sources = {"training": run.train, "probe": run.probe}
    wanted = [
        ("entropy_norm", "training", None),
        ("sink_mass_1", "training", "uniform/sink_mass_1"),
        ("alpha_0", "probe", "uniform/alpha_0"),
    ]
    panels = []
    for name, source, baseline in wanted:
        for origin in (source, "probe"):
            found = curve(sources[origin], name, baseline)
            if found is not None:
                panels.append(Panel(name, origin, found))
                break
    return panels


def slider_steps(panels: Sequence[Panel]) -> tuple[list[int], int]:
    """Return the slider's positions, and how many steps were measured in all."""
    steps = np.unique(np.concatenate([panel.found.steps for panel in panels]))
    return steps[thin(steps, SLIDER_POSITIONS)].tolist(), len(steps)


def draw_head_maps(run: RunRecord) -> Any:
    """Draw layer by head maps of entropy and sink mass with one slider over training steps."""
    from plotly.subplots import make_subplots

    panels = find_panels(run)
    if not panels:
        return None
    steps, _ = slider_steps(panels)
    figure = make_subplots(
        rows=1,
        cols=len(panels),
        horizontal_spacing=0.07,
        subplot_titles=[panel.title(steps[-1]) for panel in panels],
    )
    for col, panel in enumerate(panels, start=1):
        n_layer, n_head = panel.found.values.shape[1:]
        small = n_layer <= LAYERS_FOR_NUMBERS and n_head <= HEADS_FOR_NUMBERS
        figure.add_heatmap(
            z=panel.cells(steps[-1]),
            customdata=panel.baselines(steps[-1]),
            x=[str(head) for head in range(n_head)],
            y=[str(layer) for layer in panel.found.layers],
            xgap=1,
            ygap=1,
            coloraxis="coloraxis",
            texttemplate="%{z:.2f}" if small else None,
            hovertemplate=f"layer %{{y}}, head %{{x}}<br>{panel.name} %{{z:.3f}}"
            "<br>uniform head %{customdata}<extra></extra>",
            hoverongaps=False,
            row=1,
            col=col,
        )
    height = 300 + 24 * max(6, max(len(panel.found.layers) for panel in panels))
    dress(
        figure,
        height,
        margin={"l": 56, "r": 8, "t": 64, "b": 130},
        coloraxis={
            "colorscale": COLOUR_MAP,
            "cmin": 0,
            "cmax": 1,
            "colorbar": {"thickness": 10, "len": 1, "tickfont": {"size": 11}, "xpad": 4},
        },
        sliders=[_slider(panels, steps)],
    )
    figure.update_xaxes(type="category", showgrid=False, title_text="head", title_standoff=4)
    figure.update_yaxes(type="category", showgrid=False, autorange="reversed")
    figure.update_yaxes(title_text="layer", col=1)
    figure.update_annotations(font={"size": 14, "family": FONT, "color": INK})
    return figure


def draw_patterns(run: RunRecord) -> Any:
    """Draw one head's attention over the piece of text, with a list of all heads."""
    import plotly.graph_objects as go
    from plotly.colors import sample_colorscale

    patterns = run.patterns
    if patterns is None or not patterns.tokens:
        return None
    names = [f"{text(visible(token))} ({place})" for place, token in enumerate(patterns.tokens)]
    with_null = bool(patterns.null_mass.any())
    keys = [NOTHING, *names] if with_null else names
    seen = (patterns.weights > 0).any(axis=(0, 1))  # by any head: what no head sees stays empty
    heads = interesting_heads(run)
    # The colour follows the square root of the weight, so that weights of a few percent show.
    shades = np.linspace(0, 1, 21)
    scale = list(zip(shades**2, sample_colorscale(COLOUR_MAP, shades.tolist()), strict=True))
    figure = go.Figure(
        go.Heatmap(
            z=_pattern(patterns, heads[0], seen, with_null),
            x=keys,
            y=names,
            zmin=0,
            zmax=1,
            colorscale=scale,
            colorbar={"thickness": 10, "tickvals": [0, 0.05, 0.1, 0.25, 0.5, 1]},
            hovertemplate="query: %{y}<br>key: %{x}<br>weight %{z:.3f}<extra></extra>",
            hoverongaps=False,
        )
    )
    buttons = [
        {
            "label": _head_label(patterns, head),
            "method": "restyle",
            "args": [{"z": [_pattern(patterns, head, seen, with_null)]}, [0]],
        }
        for head in heads
    ]
    size = len(names)
    dress(
        figure,
        min(980, 240 + 13 * size),
        margin={"l": 60, "r": 8, "t": 70, "b": 60},
        updatemenus=[
            {
                "buttons": buttons,
                "x": 0,
                "xanchor": "left",
                "y": 1,
                "yanchor": "bottom",
                "pad": {"b": 12},
                "font": {"size": 13},
                "showactive": True,
            }
        ],
    )
    every = -(-size // MOST_LABELS)
    labels = [text(shortened(token)) for token in patterns.tokens]
    font = {"size": 9 if size > 40 else 11}
    shift = int(with_null)
    figure.update_xaxes(
        type="category",
        showgrid=False,
        automargin=True,
        title_text="key: the token looked at",
        tickvals=[0] * shift + [place + shift for place in range(0, size, every)],
        ticktext=[NOTHING] * shift + labels[::every],
        tickangle=0 if max(map(len, patterns.tokens)) < 3 and not with_null else -90,
        tickfont=font,
    )
    figure.update_yaxes(
        type="category",
        showgrid=False,
        automargin=True,
        autorange="reversed",
        title_text="query: the token that looks",
        tickvals=list(range(0, size, every)),
        ticktext=labels[::every],
        tickfont=font,
    )
    return figure


def _slider(panels: list[Panel], steps: list[int]) -> dict[str, Any]:
    """Return a slider whose positions set every panel's values and heading."""
    traces = list(range(len(panels)))
    return {
        "active": len(steps) - 1,
        "pad": {"t": 48, "b": 4},
        "currentvalue": {"prefix": "step ", "font": {"size": 14}},
        "font": {"size": 11},
        "steps": [
            {
                "label": f"{step:,}",
                "method": "update",
                "args": [
                    {
                        "z": [panel.cells(step) for panel in panels],
                        "customdata": [panel.baselines(step) for panel in panels],
                    },
                    {f"annotations[{i}].text": panel.title(step) for i, panel in enumerate(panels)},
                    traces,
                ],
            }
            for step in steps
        ],
    }


def _head_label(patterns: Patterns, head: Head) -> str:
    name = head_name(patterns.layers[head.row], head.head)
    return f"{name}: {head.reason}" if head.reason else name


def _pattern(
    patterns: Patterns, head: Head, seen: Any, with_null: bool
) -> list[list[float | None]]:
    """Return the weights of one head, queries by keys, rows cut after the last visible key."""
    weights = patterns.weights[head.row, head.head]
    rows = _rounded(np.where(seen, weights, np.nan))
    if with_null:
        null = _rounded(patterns.null_mass[head.row, head.head])
        rows = [[first, *row] for first, row in zip(null, rows, strict=True)]
    for row in rows:
        while len(row) > 1 and row[-1] is None:
            row.pop()
    return rows


def _rounded(values: np.ndarray[Any, Any]) -> Any:
    """Return lists of numbers of three decimals, None for what is not a number, 0 without a point.

    Text of that form is shorter in the page than any binary encoding of the same numbers.
    """
    if values.ndim > 1:
        return [_rounded(row) for row in values]
    numbers = np.round(values.astype(np.float64), 3).tolist()
    return [(x or 0) if x == x else None for x in numbers]
