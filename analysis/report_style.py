"""How the report's charts look, and how text from a run gets into them unharmed."""

from __future__ import annotations

from typing import Any

import numpy as np

# Okabe and Ito's colours without their yellow, which is too light for a line on white.
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
QUIET = "#bbbbbb"  # of curves that give the others their background
COLOUR_MAP = "Cividis"  # the same to every kind of colour vision, and in grey print
INK, GRID = "#222222", "#e4e4e4"
FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"
MOST_POINTS = 400  # of one curve; more would fall on the same pixels


def text(value: object) -> str:
    """Return data as text that a chart shows letter by letter.

    Labels of charts understand some HTML tags and entities; escaped, these are only letters.
    """
    return str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def line_colours(count: int) -> list[str]:
    """Return colours for curves that have an order, like layers: named hues, or a scale of many."""
    if count <= len(LINES):
        return list(LINES[:count])
    from plotly.colors import sample_colorscale

    return list(sample_colorscale(COLOUR_MAP, np.linspace(0, 0.9, count).tolist()))


def dress(figure: Any, height: int, **layout: Any) -> Any:
    """Give a figure the report's look and return it."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        font={"family": FONT, "size": 13, "color": INK},
        margin={"l": 64, "r": 28, "t": 44, "b": 56},
        legend={"orientation": "h", "yanchor": "top", "y": -0.18, "x": 0, "font_size": 12},
        hoverlabel={"font": {"family": FONT, "size": 13}, "bgcolor": "white"},
        hovermode="closest",
    )
    axes = {"gridcolor": GRID, "zeroline": False, "linecolor": INK, "title_font_size": 13}
    figure.update_xaxes(ticks="outside", **axes)
    figure.update_yaxes(**axes)
    figure.update_layout(**layout)
    return figure


def step_scale_buttons(figure: Any) -> None:
    """Add the choice between an even and a logarithmic axis of steps."""
    axes = [name for name in figure.to_plotly_json()["layout"] if name.startswith("xaxis")]
    figure.update_layout(
        updatemenus=[
            {
                "type": "buttons",
                "direction": "right",
                "x": 0,
                "xanchor": "left",
                "y": 1,
                "yanchor": "bottom",
                "pad": {"b": 6},
                "font": {"size": 11},
                "showactive": True,
                "buttons": [
                    {
                        "label": label,
                        "method": "relayout",
                        "args": [{f"{axis}.type": kind for axis in axes}],
                    }
                    for label, kind in (("steps", "linear"), ("log steps", "log"))
                ],
            }
        ]
    )
