"""The report's curves over steps: loss, sinks as they form, logits, detectors, activations.

Each function returns a plotly figure, or None where the run has nothing to draw. Definitions of
the measures are those of the records (see analysis/head_files.py); the sentences under the charts
are in analysis/report.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.plots import SMOOTHING_SHARE, Series, series, smooth
from analysis.report_style import (
    LINES,
    MOST_POINTS,
    QUIET,
    dress,
    line_colours,
    step_scale_buttons,
    text,
)
from analysis.run_record import Curve, RunRecord, curve, head_name, thin

NAMED_HEADS = 6  # curves with a colour of their own; the others are drawn in grey
DETECTORS = {
    "induction": "induction",
    "duplicate": "duplicate token",
    "prev_token": "previous token",
    "prev_token_text": "previous token, on text",
}


def draw_history(run: RunRecord) -> Any:
    """Draw training and validation loss above the learning rate."""
    from plotly.subplots import make_subplots

    train, val, rate = (series(run.rows, key) for key in ("train/loss", "val/loss", "train/lr"))
    if not len(train.steps) and not len(val.steps):
        return None
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.06
    )
    if len(train.steps):
        reach = round(SMOOTHING_SHARE / 2 * len(train.steps))
        label = f"train, median of {2 * reach + 1} points" if reach else "train"
        _add(figure, _thinned(train), "train, as measured", QUIET, width=1, row=1)
        _add(figure, _thinned(smooth(train, reach)), label, LINES[0], row=1)
    _add(figure, _thinned(val), "validation", LINES[1], row=1, mode="lines+markers")
    _add(figure, _thinned(rate), "learning rate", LINES[0], row=2, showlegend=False)
    low, high = _loss_range(train, val)
    figure.update_yaxes(title_text="nats per token", range=[low, high], row=1, col=1)
    figure.update_yaxes(title_text="learning rate", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(exponentformat="power", row=2, col=1)
    figure.update_xaxes(title_text="optimizer step", tickformat=",", row=2, col=1)
    dress(figure, 520)
    step_scale_buttons(figure)
    return figure


def draw_sink_formation(run: RunRecord) -> Any:
    """Draw alpha_0 of every head over steps, strongest heads in colour, formed sinks marked."""
    import plotly.graph_objects as go

    found = curve(run.probe, "alpha_0", "uniform/alpha_0")
    if found is None:
        return None
    figure = go.Figure()
    _add_heads(figure, found, "alpha_0")
    for steps, values in _distinct_baselines(found):
        _add(figure, Series(steps, values), "uniform", "#000000", dash="dash", width=1.5)
    limit = float(run.setting("telemetry.sink", 0.3))
    ends = found.steps[[0, -1]]
    line = Series(ends, np.full(2, limit))
    _add(figure, line, f"limit of a sink, {limit:g}", "#000000", dash="dot", width=1)
    events = [event for event in run.events if event.kind == "sink_formed"]
    if events:
        figure.add_scatter(
            x=[event.step for event in events],
            y=[event.value for event in events],
            mode="markers",
            name="sink formed",
            marker={
                "symbol": "star",
                "size": 10,
                "color": "#000000",
                "line": {"color": "white", "width": 1},
            },
            customdata=[text(event.text) for event in events],
            hovertemplate="%{customdata}<br>step %{x:,}<extra></extra>",
        )
    figure.update_yaxes(title_text="alpha_0", range=[0, 1.02])
    figure.update_xaxes(title_text="optimizer step", tickformat=",")
    dress(figure, 520)
    step_scale_buttons(figure)
    return figure


def draw_max_logit(run: RunRecord) -> Any:
    """Draw the largest logit of each layer over steps; the hover names the head."""
    source = run.train or run.probe
    found = curve(source, "max_logit")
    if found is None:
        return None
    largest = found.values.argmax(axis=-1)
    figure = _layers(found, found.values.max(axis=-1), "largest logit", heads=largest)
    limit = float(run.setting("telemetry.logit", 1000.0))
    for event in (event for event in run.events if event.kind == "logit_blowup"):
        figure.add_vline(x=event.step, line={"color": LINES[1], "dash": "dot", "width": 1})
    if found.values.max() > limit / 3:
        ends = Series(found.steps[[0, -1]], np.full(2, limit))
        _add(figure, ends, f"limit of a blow-up, {limit:g}", "#000000", dash="dot", width=1)
    return figure


def draw_null_mass(run: RunRecord) -> Any:
    """Draw the mean weight that each layer's heads give to nothing."""
    found = curve(run.train, "null_mass") or curve(run.probe, "null_mass")
    if found is None:
        return None
    figure = _layers(found, found.values.mean(axis=-1), "weight on nothing")
    figure.update_yaxes(range=[0, 1.02])
    return figure


def draw_detectors(run: RunRecord) -> Any:
    """Draw the best head of each detector over steps; the hover names it."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for colour, (name, label) in zip(LINES, DETECTORS.items(), strict=False):
        found = curve(run.probe, name, f"uniform/{name}")
        if found is None:
            continue
        flat = found.values.reshape(len(found.steps), -1)
        heads = [
            head_name(found.layers[best // found.values.shape[2]], best % found.values.shape[2])
            for best in flat.argmax(axis=1).tolist()
        ]
        shown = thin(found.steps, MOST_POINTS)
        figure.add_scatter(
            x=found.steps[shown],
            y=flat.max(axis=1)[shown],
            mode="lines+markers",
            name=f"{label}: {heads[-1]}",
            legendgroup=name,
            marker={"size": 5},
            line={"color": colour, "width": 2},
            customdata=[heads[i] for i in shown],
            hovertemplate=f"{label}: %{{customdata}}<br>step %{{x:,}}, %{{y:.3f}}<extra></extra>",
        )
        if found.baseline is not None:
            uniform = Series(found.steps, found.baseline.max(axis=1))
            _add(
                figure,
                _thinned(uniform),
                f"{label}, uniform",
                colour,
                dash="dash",
                width=1,
                legendgroup=name,
                showlegend=False,
            )
    if not figure.data:
        return None
    figure.update_yaxes(title_text="best head", range=[0, 1.02])
    figure.update_xaxes(title_text="optimizer step", tickformat=",")
    dress(figure, 460)
    step_scale_buttons(figure)
    return figure


def draw_sink_values(run: RunRecord) -> Any:
    """Draw value norms at the sink beside the largest activation of the residual stream."""
    from plotly.subplots import make_subplots

    norms = curve(run.probe, "sink_vnorm")
    massive = curve(run.probe, "massive_max_over_median")
    if norms is None and massive is None:
        return None
    figure = make_subplots(
        rows=1,
        cols=2,
        horizontal_spacing=0.12,
        subplot_titles=["value norm at the sink", "largest activation / median"],
    )
    if norms is not None:
        _add_layers(figure, norms, norms.values.min(axis=-1), "lowest sink_vnorm", col=1)
        ends = Series(norms.steps[[0, -1]], np.ones(2))
        _add(figure, ends, "no sink: 1", "#000000", dash="dash", width=1, row=1, col=1)
    if massive is not None:
        _add_layers(
            figure, massive, massive.values, "max / median", col=2, showlegend=norms is None
        )
    figure.update_yaxes(rangemode="tozero", row=1, col=1)
    figure.update_yaxes(type="log", exponentformat="power", dtick=1, row=1, col=2)
    figure.update_xaxes(title_text="optimizer step", tickformat=",")
    return dress(figure, 420, legend_y=-0.22)


def _layers(found: Curve, values: Any, label: str, heads: Any = None) -> Any:
    """Return a figure with one curve per layer."""
    import plotly.graph_objects as go

    figure = go.Figure()
    _add_layers(figure, found, values, label, heads=heads)
    figure.update_yaxes(title_text=label)
    figure.update_xaxes(title_text="optimizer step", tickformat=",")
    dress(figure, 420)
    step_scale_buttons(figure)
    return figure


def _add_layers(
    figure: Any,
    found: Curve,
    values: Any,
    label: str,
    *,
    heads: Any = None,
    col: int | None = None,
    showlegend: bool = True,
) -> None:
    """Add one curve per layer: values (N, layers), and which head (N, layers) they come from.

    Of values that would fall together the largest is shown, so no peak is lost.
    """
    points = _peaks(values, thin(found.steps, MOST_POINTS))
    for row, colour in enumerate(line_colours(len(found.layers))):
        layer, at = f"layer {found.layers[row]}", points[:, row]
        figure.add_scatter(
            x=found.steps[at],
            y=np.round(values[at, row], 5),
            mode="lines" if len(at) > 1 else "markers",
            name=layer,
            legendgroup=layer,
            showlegend=showlegend,
            line={"color": colour, "width": 1.8},
            customdata=None if heads is None else heads[at, row],
            hovertemplate=f"{layer}{', head %{customdata}' * (heads is not None)}<br>"
            f"step %{{x:,}}<br>{label} %{{y:.4g}}<extra></extra>",
            row=None if col is None else 1,
            col=col,
        )


def _add_heads(figure: Any, found: Curve, label: str) -> None:
    """Add one curve per head; those that end highest get a colour and a name in the legend."""
    n_head = found.values.shape[2]
    flat = found.values.reshape(len(found.steps), -1)
    order = np.argsort(-flat[-1], kind="stable").tolist()
    shown = thin(found.steps, MOST_POINTS)
    for place in reversed(range(len(order))):  # the named heads are drawn last, above the others
        head = order[place]
        name = head_name(found.layers[head // n_head], head % n_head)
        named = place < NAMED_HEADS
        others = len(order) - NAMED_HEADS
        figure.add_scatter(
            x=found.steps[shown],
            y=np.round(flat[shown, head], 4),
            mode="lines" if len(shown) > 1 else "markers",
            name=name if named else f"{others} other head{'s' * (others > 1)}",
            legendgroup=name if named else "others",
            showlegend=named or place == len(order) - 1,
            legendrank=place if named else NAMED_HEADS,
            line={
                "color": LINES[place] if named else QUIET,
                "width": 2 if named else 1,
            },
            hovertemplate=f"{name}<br>step %{{x:,}}<br>{label} %{{y:.3f}}<extra></extra>",
        )


def _peaks(values: Any, starts: Any) -> Any:
    """Return where each column of `values` is largest within each stretch that begins at `starts`.

    (stretches, columns) of row numbers.
    """
    stretches = zip(starts, [*starts[1:], len(values)], strict=True)
    return np.stack([first + values[first:end].argmax(axis=0) for first, end in stretches])


def _distinct_baselines(found: Curve) -> list[tuple[Any, Any]]:
    """Return the baseline once per kind of layer: they differ where windows do."""
    if found.baseline is None:
        return []
    kinds = {tuple(column): column for column in np.round(found.baseline.T, 4)}
    shown = thin(found.steps, MOST_POINTS)
    return [(found.steps[shown], column[shown]) for column in kinds.values()]


def _add(
    figure: Any,
    points: Series,
    name: str,
    colour: str,
    *,
    row: int | None = None,
    col: int | None = None,
    dash: str = "solid",
    width: float = 2,
    mode: str = "lines",
    **more: Any,
) -> None:
    """Add one curve; a single point is drawn as a marker, which a line would not show."""
    if not len(points.steps):
        return
    figure.add_scatter(
        x=points.steps,
        y=np.round(points.values, 6) if np.abs(points.values).max() > 0.01 else points.values,
        mode=mode if len(points.steps) > 1 else "markers",
        name=name,
        line={"color": colour, "width": width, "dash": dash},
        marker={"color": colour, "size": 6},
        hovertemplate=f"{name}<br>step %{{x:,}}<br>%{{y:.4g}}<extra></extra>",
        row=row,
        col=col if row is None else (col or 1),
        **more,
    )


def _thinned(points: Series) -> Series:
    shown = thin(points.steps, MOST_POINTS)
    return Series(points.steps[shown], points.values[shown])


def _loss_range(train: Series, val: Series) -> tuple[float, float]:
    """Return limits that fit what matters: a single spike must not flatten the curve."""
    ends = [np.percentile(train.values, [1, 99])] if len(train.values) else []
    shown = np.concatenate([*ends, val.values, smooth(train, 2).values])
    low, high = float(shown.min()), float(shown.max())
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin
