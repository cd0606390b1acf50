"""What every head of a run does, as a table in the terminal.

    python -m analysis.telemetry runs/latest                    the newest probe
    python -m analysis.telemetry runs/latest --source train     the newest training step looked at
    python -m analysis.telemetry runs/latest --step 500 --sort induction
    python -m analysis.telemetry runs/latest --json             every measure, for programs

Reads the run's folder alone, also while it is being trained. The table holds the measures most
looked at; `--sort` with another one adds its column. Below stand the values of a uniform head,
whose logits are all equal, where a measure has one; then what has one value per layer, and the
events so far.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.event_files import Event, encode_event, read_events
from analysis.head_files import KINDS, HeadRecord, read_record, record_path, recorded_steps
from analysis.head_table import PLACE, Cell, HeadTable, head_table
from analysis.metrics_file import encode_number

# Columns of the table, where the record has them, with short headings: 144 heads on one page.
SHOWN = {
    "entropy_norm": "ent_norm",
    "max_prob": "maxprob",
    "mean_distance": "distance",
    "sink_mass_1": "sink_1",
    "alpha_0": "alpha_0",
    "null_mass": "null",
    "max_logit": "maxlogit",
    "logit_std": "std",
    "prev_token": "prev",
    "duplicate": "dup",
    "induction": "induct",
    "write": "write",
}
PER_LAYER = {
    "sink_hnorm": "hnorm",
    "massive_count": "massive",
    "massive_max": "max|x|",
    "massive_max_over_median": "max/median",
    "grad_norm_q": "grad q",
    "grad_norm_k": "grad k",
    "grad_norm_v": "grad v",
    "grad_norm_o": "grad o",
}
GAP = "  "  # between columns


class MissingError(Exception):
    """The run lacks what was asked for; one line that says what would make it."""


def choose_record(run: Path, source: str | None, step: int | None) -> HeadRecord:
    """The newest record, or that of a step.

    Args:
        run: the run's folder.
        source: "train" or "probe"; None for the probe or, where there is none, training.
        step: None for the newest.

    Raises:
        MissingError: when there is none.
    """
    kinds = (source,) if source else ("probe", "train")
    steps = {kind: recorded_steps(run, kind) for kind in kinds}
    for kind in kinds:
        wanted = step if step is not None else max(steps[kind], default=None)
        if wanted in steps[kind]:
            return read_record(record_path(run, kind, wanted))
    what = f"{source} record" if source else "record"
    known = sorted({known for each in steps.values() for known in each})
    if step is None or not known:
        raise MissingError(
            f"{run} has no {what} of its heads (attention/{source or '*'}-*.safetensors); a run "
            "with telemetry=default writes them"
        )
    near = sorted(sorted(known, key=lambda other: abs(other - step))[:4])
    raise MissingError(f"{run} has no {what} of step {step}; near it: {', '.join(map(str, near))}")


def describe(record: HeadRecord, events: Sequence[Event], sort: str | None = None) -> str:
    """Write a record and events for people.

    Args:
        record: of either source.
        events: those to list.
        sort: the measure of heads by which rows are ordered, largest first; None for the order of
            layers and heads.

    Raises:
        MissingError: when the record has no measure of that name.
    """
    table = head_table(record)
    measures = table.columns[len(PLACE) :]
    if sort is not None and sort not in measures:
        raise MissingError(
            f"--sort {sort}: the record has {', '.join(sorted(measures)) or 'no heads'}"
        )
    names = [name for name in SHOWN if name in measures]
    if sort is not None and sort not in names:
        names.append(sort)
    parts = [_title(record), _heads(record, table, names, sort), _layers(record)]
    lines = [f"  {event.text}" for event in events] or ["  none"]
    parts.append("\n".join(["Events", *lines]))
    return "\n\n".join(part for part in parts if part)


def encode(record: HeadRecord, events: Sequence[Event]) -> str:
    """Write the whole record and events as JSON; numbers that are not finite become words."""
    table = head_table(record)
    by_axis = {
        axis: {n: m.values for n, m in record.measures.items() if m.axis == axis}
        for axis in ("layer", "scalar")
    }
    layers: list[dict[str, Any]] = [
        {"layer": layer} | {name: values[i] for name, values in by_axis["layer"].items()}
        for i, layer in enumerate(record.layers)
    ]
    heads = [dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows]
    document = {
        "source": record.kind,
        "step": record.step,
        "heads": [_plain(row) for row in heads],
        "layers": [_plain(row) for row in layers],
        "model": _plain(by_axis["scalar"]),
        "events": [json.loads(encode_event(event)) for event in events],
    }
    return json.dumps(document, allow_nan=False, indent=1)


def _title(record: HeadRecord) -> str:
    what = "Probe batch after" if record.kind == "probe" else "Training batches of"
    scalars = [
        f"{name} {float(m.values):.4g}" for name, m in record.measures.items() if m.axis == "scalar"
    ]
    return f"{what} step {record.step:,}" + (f": {', '.join(scalars)}" if scalars else "")


def _heads(record: HeadRecord, table: HeadTable, names: list[str], sort: str | None) -> str:
    """The table of heads, with a rule and the values of uniform heads below it."""
    order = list(range(len(table.rows)))
    if sort is not None:  # what is no number comes last
        values = np.array(table.column(sort), dtype=np.float64)
        order = np.argsort(np.where(np.isfinite(values), -values, np.inf), kind="stable").tolist()
    uniform = _uniform(record, names)
    columns = [["layer", *(str(layer) for layer in table.column("layer")), *("" for _ in uniform)]]
    columns += [["head", *(str(head) for head in table.column("head")), *("" for _ in uniform)]]
    for i, name in enumerate(names):
        cells = [*table.column(name), *(found[i] for found in uniform)]
        columns.append([SHOWN.get(name, name), *_numbers(cells)])
    head, *body = _align(columns)
    rows, below = body[: len(order)], body[len(order) :]
    rule = "-" * len(head)
    margin = len("layer") + len(GAP) + len("head")
    lines = [f"{'uniform':{margin}}{line[margin:]}" for line in below]
    if len(lines) > 1:
        lines = [
            f"{line}{GAP}layer {', '.join(map(str, layers))}"
            for line, layers in zip(lines, uniform.values(), strict=True)
        ]
    return "\n".join([head, rule, *(rows[i] for i in order), rule, *lines])


def _uniform(record: HeadRecord, names: list[str]) -> dict[tuple[float | None, ...], list[int]]:
    """What a uniform head has of each measure, and the layers where it has that."""
    found: dict[tuple[float | None, ...], list[int]] = {}
    for i, layer in enumerate(record.layers):
        values: list[float | None] = []
        for name in names:
            measure = record.measures.get(f"uniform/{name}")
            if name == "entropy_norm":
                values.append(1.0)  # by its definition
            else:
                values.append(None if measure is None else float(measure.values[i]))
        found.setdefault(tuple(values), []).append(layer)
    return found


def _layers(record: HeadRecord) -> str:
    """The table of what has one value per layer; empty where there is none."""
    names = [name for name in PER_LAYER if name in record.measures]
    if not names:
        return ""
    columns = [["layer", *map(str, record.layers)]]
    for name in names:
        values = record.measures[name].values.tolist()
        columns.append([PER_LAYER[name], *_numbers(values)])
    return "\n".join(_align(columns))


def _align(columns: list[list[str]]) -> list[str]:
    """The lines of a table, its columns flush right and as wide as their widest cell."""
    widths = [max(map(len, column)) for column in columns]
    return [
        GAP.join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in zip(*columns, strict=True)
    ]


def _numbers(values: Sequence[Cell]) -> list[str]:
    """The cells of one column: as many decimals for all as leave the largest four digits."""
    largest = max((abs(x) for x in values if x is not None and math.isfinite(x)), default=0.0)
    decimals = 3 if largest < 10 else 2 if largest < 100 else 1
    return ["" if x is None else _number(x, decimals) for x in values]


def _number(x: float, decimals: int) -> str:
    if math.isfinite(x) and (abs(x) >= 1e6 or 0 < abs(x) < 0.5 * 10**-decimals):
        return f"{x:.1e}"  # too large for a column, or lost in rounding
    return f"{x:.{decimals}f}"


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value if value is None else encode_number(name, np.asarray(value))
        for name, value in row.items()
    }


def main() -> int:
    """Print the table that the command line asks for, and return the exit status."""
    from model.checkpoint import resolve_run

    parser = argparse.ArgumentParser(
        prog="python -m analysis.telemetry", description="What every head of a run does."
    )
    parser.add_argument("run", help="a run's folder, or runs/latest")
    parser.add_argument("--step", type=int, help="instead of the newest")
    parser.add_argument("--source", choices=KINDS, help="probe, or training where there is none")
    parser.add_argument("--sort", metavar="NAME", help="a measure of heads, largest first")
    parser.add_argument("--json", action="store_true", help="print every measure as JSON")
    options = parser.parse_args()
    try:
        run = resolve_run(options.run)
        record = choose_record(run, options.source, options.step)
        events = [e for e in read_events(run) if options.step is None or e.seen <= options.step]
        print(encode(record, events) if options.json else describe(record, events, options.sort))
    except (FileNotFoundError, MissingError) as error:
        print(f"telemetry: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
