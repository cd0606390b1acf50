"""The format of metrics.jsonl: exact, strict JSON, and readable after a kill."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.metrics_file import decode_row, encode_row, read_rows


def reject_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_a_row_is_one_line_and_comes_back_exactly() -> None:
    values = {"train/loss": 0.1 + 0.2, "train/tokens": 2**60, "train/lr": 5e-324}
    line = encode_row(7, values)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_row(line) == {"step": 7, **values}


def test_numbers_that_json_lacks_survive_strict_readers() -> None:
    line = encode_row(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    strict = json.loads(line, parse_constant=reject_constant)
    assert strict == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    row = decode_row(line)
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


def test_numpy_scalars_and_one_element_tensors_are_numbers() -> None:
    line = encode_row(np.int64(3), {"a": np.float32(0.5), "b": torch.tensor(2.0), "c": np.int32(4)})
    assert decode_row(line) == {"step": 3, "a": 0.5, "b": 2.0, "c": 4}


@pytest.mark.parametrize("value", [None, "text", [1.0]])
def test_what_is_not_a_number_is_refused_by_its_key(value: object) -> None:
    with pytest.raises(TypeError, match=r"train/loss=.* is not a number"):
        encode_row(1, {"train/loss": value})


def test_the_step_cannot_be_overwritten_by_a_measurement() -> None:
    with pytest.raises(ValueError, match="step"):
        encode_row(1, {"step": 2})


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_half_a_line_at_the_end_is_ignored(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [encode_row(step, {"loss": 1.5}) for step in (1, 2)]
    path.write_bytes(rows[0] + rows[1][:-cut])
    complete = cut == 1  # only the line end is missing
    assert [row["step"] for row in read_rows(path)] == ([1, 2] if complete else [1])


@pytest.mark.parametrize(
    "damage", [b'{"step": 2, "lo\n', b"[1, 2]\n", b'{"loss": 1.0}\n', b"\xff\n"]
)
def test_damage_before_the_last_line_is_an_error_naming_the_line(
    tmp_path: Path, damage: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode_row(1, {}) + damage + encode_row(3, {}))
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is damaged") as caught:
        read_rows(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line_naming_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"metrics.jsonl does not exist"):
        read_rows(tmp_path / "metrics.jsonl")


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert read_rows(tmp_path / "metrics.jsonl") == []
