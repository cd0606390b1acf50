"""The format of a run's history, ``metrics.jsonl``: one JSON object per line.

    {"step": 200, "train/loss": 1.7342, "train/lr": 0.00093}
    {"step": 250, "val/loss": 1.8011, "val/perplexity": 6.0563}

This file is the truth about a run; plots and trackers are views of it. A line holds an optimizer
step and what was measured there, and one step may have several lines. JSON has no word for the
three floats that are not finite, and readers outside Python stop at Python's `NaN`: they are
written as the strings "NaN", "Infinity" and "-Infinity" (as protobuf's JSON format does), which
`float()` and pandas turn back into numbers.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"
NON_FINITE = ("NaN", "Infinity", "-Infinity")

Row = dict[str, Any]  # "step": int, and a number for every key measured at that step


def encode_row(step: int, values: Mapping[str, Any]) -> bytes:
    """Return one line of the file, newline included.

    Args:
        step: optimizer steps taken when the values were measured.
        values: numbers by key; NumPy scalars and tensors of one element count as numbers.

    Raises:
        TypeError: for a value that is not a number, naming its key.
        ValueError: for a value called "step".
    """
    if "step" in values:
        raise ValueError('"step" is the row\'s own key and cannot be a measurement')
    row = {"step": int(step)} | {key: encode_number(key, value) for key, value in values.items()}
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def decode_row(line: bytes) -> Row:
    """Return the row written on one line.

    Raises:
        ValueError: when the line is not a whole JSON object with an integer "step".
    """
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError('a row is a JSON object with an integer "step"')
    return {key: float(value) if value in NON_FINITE else value for key, value in row.items()}


def read_rows(path: Path) -> list[Row]:
    """Return every row of a metrics file, in the order written.

    A process that is killed can leave half a line at the end, which is ignored.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: naming the file and line when a line before the last is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: nothing was measured in this folder")
    lines = path.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(decode_row(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is damaged: {error}") from error
    return rows


def encode_number(key: str, value: Any) -> float | str:
    """Return a number as JSON can hold it: one that is not finite becomes a word.

    Raises:
        TypeError: when it is not a number, naming its key.
    """
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, (int, float)):
        raise TypeError(f"{key}={value!r} is not a number")
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number
