"""One page about a run: what its heads did while it learned.

    python -m analysis.report runs/latest

reads the run's folder and writes ``report.html`` into it, at the end of a run or in its middle.
The page holds everything it shows, the plotting library included, and opens without a network.
"""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from analysis.event_files import Event
from analysis.report_charts import (
    draw_detectors,
    draw_history,
    draw_max_logit,
    draw_null_mass,
    draw_sink_formation,
    draw_sink_values,
)
from analysis.report_maps import draw_head_maps, draw_patterns, find_panels, slider_steps
from analysis.run_facts import describe
from analysis.run_record import RunRecord, read_run

FILE_NAME = "report.html"
STYLE = Path(__file__).with_name("report.css")
# Plotly's own set of buttons has one that sends the chart to a server.
CHART_CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    "plotlyServerURL": "",
}
MOST_EVENTS = 500  # rows of the table; the file holds the others


class Section(NamedTuple):
    """A chart with its heading, a sentence on what to look for, the source of its definition.

    `missing` says why there is no chart and which setting brings it.
    """

    name: str
    heading: str
    draw: Callable[[RunRecord], Any]
    look: str
    source: str
    missing: str


HISTORY = Section(
    "history",
    "Loss and learning rate",
    draw_history,
    "Validation loss (orange) should keep falling with training loss (blue); where it turns up "
    "while the other falls, the model learns its training text by heart.",
    "Mean negative log-likelihood per counted token, in nats, over the step's batch and over "
    "fixed validation windows.",
    "No loss has been logged yet: train.log_every and train.eval_every set how often it is.",
)
HEADS = (
    Section(
        "heads",
        "Every head over training",
        draw_head_maps,
        "Move the slider to see heads part ways: dark in entropy_norm is a head that looks at few "
        "tokens, bright in sink_mass_1 and alpha_0 one that rests on the first token.",
        "entropy_norm: entropy of a row over that of a uniform one, log n (after Zhai et al. "
        "2023); sink_mass_1: weight on the first token in the training batches (Xiao et al. 2023); "
        "alpha_0: the same on fixed texts of telemetry.sink_length tokens, every row counted (Gu "
        "et al. 2024). Colours are fixed from 0 to 1.",
        "No measure of this map has been taken yet: telemetry.every sets how often they are.",
    ),
    Section(
        "sinks",
        "Attention sinks as they form",
        draw_sink_formation,
        "A head that leaves the dashed line, what uniform attention would give, and crosses the "
        "dotted one has formed a sink; the star marks where it did for good.",
        "alpha_0 (Gu et al. 2024, section 3.2): mean weight of all rows on the first token of the "
        "probe's texts. A sink is formed when three probes in a row lie above the limit.",
        "No alpha_0 has been measured: the probe runs at each evaluation (train.eval_every), on "
        "texts of telemetry.sink_length tokens, which must fit into model.context_length.",
    ),
    Section(
        "logits",
        "Largest attention logit",
        draw_max_logit,
        "Steady growth without an end comes before instability; hovering names the head.",
        "Largest scaled score of any query and key it can see, before soft-cap and position bias. "
        "For scale: clipping at 100 is what Kimi K2 (2025) trained with, and every run of Wortsman "
        "et al. (2023) above 10,000 diverged.",
        "No logits have been measured: telemetry.every sets how often they are.",
    ),
    Section(
        "null",
        "Weight given to nothing",
        draw_null_mass,
        "A layer near 1 mostly writes nothing; a head that can give its weight to nothing needs no "
        "sink among the tokens.",
        "Share of the softmax that the sink logit takes, mean over rows and heads.",
        'The model cannot "attend to nothing": model.sink_logit=zero or learned lets it.',
    ),
    Section(
        "detectors",
        "What heads have learned to do",
        draw_detectors,
        "A sudden rise of induction, after previous token, is when the model learns to copy from "
        "its context; the dashed lines are what a uniform head would score.",
        "Mean weight on the token before (previous token), on the earlier copy of this token "
        "(duplicate), on the token after that copy (induction; Olsson et al. 2022), in repeated "
        "random tokens; the best head of the model is drawn.",
        "No detector has been run: they are part of the probe at each evaluation "
        "(train.eval_every).",
    ),
    Section(
        "values",
        "Values and activations at the sink",
        draw_sink_values,
        "A value norm far below 1 makes resting on the sink harmless, and large activations above "
        "the median by orders of magnitude mark the tokens that serve as sinks.",
        "sink_vnorm: norm of the first token's value over the mean of the others', lowest "
        "key/value head of each layer (Guo et al. 2024); largest over median absolute entry of the "
        "block's output (Sun et al. 2024).",
        "No values have been measured: they are part of the probe at each evaluation "
        "(train.eval_every).",
    ),
)
PATTERNS = Section(
    "patterns",
    "Attention patterns",
    draw_patterns,
    "Choose a head: a bright first column is a sink, a bright diagonal a head that looks back by a "
    "fixed distance; hovering names query, key and weight.",
    "Softmax weights of the newest probe over a piece of validation text, rows add up to 1; the "
    "colour follows the square root of the weight.",
    "No attention patterns have been written: the probe does at each evaluation "
    "(train.eval_every).",
)


def write_report(run: Path) -> Path:
    """Write the report of a run into its folder and return the file.

    Raises:
        FileNotFoundError: when the folder is not a run.
        ModuleNotFoundError: in one line, when plotly is not installed.
        ValueError: naming the file when one of the run's is damaged.
    """
    library = _plotting_library()
    page = render(read_run(run), library)
    path = run / FILE_NAME
    temporary = path.with_name(f".{FILE_NAME}.{os.getpid()}.tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path


def render(run: RunRecord, library: str) -> str:
    """Return the report as HTML; `library` is the text of plotly's script."""
    name = html.escape(str(run.setting("name", run.path.resolve().name)))
    folder = html.escape(run.path.resolve().name)
    body = [f"<h1>{name}</h1>", _facts(describe(run)), _section(run, HISTORY)]
    if run.train or run.probe:
        body += [_section(run, section) for section in HEADS]
    else:
        body.append(f"<h2>Heads</h2>{_missing(_why_no_heads(run))}")
    body += [_events(run), _section(run, PATTERNS) if run.probe or run.patterns else ""]
    body.append(_config(run))
    written = datetime.now().strftime("%Y-%m-%d %H:%M")
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{name}: run report</title>",
            f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>",
            f"<script>{library}</script>\n</head>\n<body>",
            *body,
            f"<footer>Run folder {folder}; report written {written}.</footer>",
            "</body>\n</html>\n",
        ]
    )


def _section(run: RunRecord, section: Section) -> str:
    figure = section.draw(run)
    heading = f'<h2 id="{section.name}">{section.heading}</h2>'
    if figure is None:
        return heading + _missing(section.missing)
    chart = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=f"chart-{section.name}",
        default_width="100%",
        config=CHART_CONFIG,
    )
    return (
        f"{heading}\n<figure>{chart}<figcaption><p>{section.look}{_thinned(run, section)}</p>"
        f'<p class="source">{section.source}</p></figcaption></figure>'
    )


def _thinned(run: RunRecord, section: Section) -> str:
    """Say so when the slider leaves out measured steps."""
    if section.draw is not draw_head_maps:
        return ""
    shown, measured = slider_steps(find_panels(run))
    if len(shown) == measured:
        return ""
    return f" The slider stops at {len(shown)} of the {measured:,} measured steps, densely early."


def _why_no_heads(run: RunRecord) -> str:
    if run.setting("telemetry.enabled") is False:
        return (
            "Heads were not measured in this run, which was made with telemetry=none; "
            "telemetry=default measures them."
        )
    if run.status == "running":
        return "No heads have been measured yet: telemetry.every sets how often they are."
    return "The run's folder has no measurements of heads; telemetry=default brings them."


def _missing(reason: str) -> str:
    return f'<p class="missing">{html.escape(reason, quote=False)}</p>'


def _facts(facts: dict[str, str]) -> str:
    items = "\n".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in facts.items()
    )
    return f'<dl class="facts">\n{items}\n</dl>'


def _events(run: RunRecord) -> str:
    heading = '<h2 id="events">Events</h2>'
    if not run.events:
        if run.setting("telemetry.enabled") is False:
            return heading + _missing("Events come with telemetry=default.")
        return heading + "<p>None so far.</p>"
    shown = sorted(run.events, key=lambda event: event.step)[:MOST_EVENTS]
    more = len(run.events) - len(shown)
    note = f"<p>The first {len(shown)}; {more:,} more are in events.jsonl.</p>" if more else ""
    rows = "\n".join(_event_row(event) for event in shown)
    return (
        f'{heading}<p class="lead">Each is dated at the step where it began; thresholds are '
        f"settings of telemetry.</p>\n{note}"
        '<div class="scroll"><table><thead><tr><th class="number">step</th><th>kind</th>'
        '<th class="number">layer</th><th class="number">head</th><th class="number">value</th>'
        f'<th class="number">limit</th><th>what</th></tr></thead>\n<tbody>{rows}</tbody></table>'
        "</div>"
    )


def _event_row(event: Event) -> str:
    head = "" if event.head is None else str(event.head)
    numbers = (event.layer, head, f"{event.value:.4g}", f"{event.limit:.4g}")
    cells = "".join(f'<td class="number">{html.escape(str(x))}</td>' for x in numbers)
    kind = html.escape(event.kind.replace("_", " "))
    return (
        f'<tr><td class="number">{event.step:,}</td><td>{kind}</td>{cells}'
        f"<td>{html.escape(event.text)}</td></tr>"
    )


def _config(run: RunRecord) -> str:
    path = run.path / "config.yaml"
    heading = '<h2 id="config">Configuration</h2>'
    if not path.is_file():
        return heading + _missing("The run's folder has no config.yaml.")
    settings = html.escape(path.read_text(encoding="utf-8", errors="replace"))
    return f"{heading}<details><summary>Every setting</summary><pre>{settings}</pre></details>"


def _plotting_library() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the report needs plotly: pip install glassgpt[report]"
        ) from error
    return str(get_plotlyjs())


def main() -> int:
    """Write the report of the run named on the command line, and return the exit status."""
    from model.checkpoint import resolve_run

    if len(sys.argv) != 2:
        print("usage: python -m analysis.report RUN   (a run's folder, or runs/latest)")
        return 2
    try:
        print(write_report(resolve_run(sys.argv[1])))
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
