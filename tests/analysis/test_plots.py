"""Plots of a run: the right curves, from any history a run can leave behind."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis.metrics_file import Row, encode_row
from analysis.plots import (
    SMOOTH_POINTS,
    Series,
    draw_learning_rate,
    draw_loss,
    draw_throughput,
    main,
    plot_run,
    series,
    smooth,
)

NAMES = ["loss.png", "learning_rate.png", "throughput.png"]


def history(steps: int = 100) -> list[Row]:
    rows: list[Row] = []
    for step in range(0, steps + 1, 10):
        loss = 1.0 + 3.0 * math.exp(-step / 30)
        if step:
            speed = {"train/lr": 1e-3, "train/tokens_per_s": 20_000.0}
            rows.append({"step": step, "train/loss": loss, **speed})
        if step % 50 == 0:
            rows.append({"step": step, "val/loss": loss + 0.1})
    return rows


def write(run: Path, rows: list[Row]) -> Path:
    lines = [encode_row(row["step"], {k: v for k, v in row.items() if k != "step"}) for row in rows]
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    return run


def drawn(draw: Any, rows: list[Row]) -> Any:
    axes = Figure().add_subplot()
    assert draw(axes, rows)
    return axes


def legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    return struct.unpack(">II", content[16:24])


def test_a_run_gets_three_pictures_in_its_folder(tmp_path: Path) -> None:
    paths = plot_run(write(tmp_path, history()))
    assert paths == [tmp_path / "plots" / name for name in NAMES]
    assert all(png_size(path) == (960, 540) for path in paths)
    assert plot_run(tmp_path) == paths  # drawn again over the old ones


def test_the_curves_are_what_was_measured_with_units() -> None:
    rows = history()
    axes = drawn(draw_loss, rows)
    raw, smoothed, val = axes.get_lines()
    np.testing.assert_array_equal(raw.get_xdata(), range(10, 101, 10))
    np.testing.assert_array_equal(
        raw.get_ydata(), [r["train/loss"] for r in rows if "train/loss" in r]
    )
    np.testing.assert_array_equal(val.get_xdata(), [0, 50, 100])
    assert raw.get_alpha() < 0.5 < (smoothed.get_alpha() or 1)
    assert raw.get_color() != val.get_color()
    assert axes.get_ylabel() == "loss (nats per token)"
    assert any("best 1.2070 at step 100" in text for text in legend(axes))
    (rate,) = drawn(draw_learning_rate, rows).get_lines()
    np.testing.assert_array_equal(rate.get_ydata(), [1e-3] * 10)
    assert legend(drawn(draw_throughput, rows)) == ["median 20,000 tokens/s"]


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([], []),
        ([{"step": 0, "val/loss": 4.2}], ["loss.png"]),
        ([{"step": 1, "train/loss": 4.2}], ["loss.png"]),
        ([{"step": 1, "train/loss": 0.0, "train/lr": 0.0, "train/tokens_per_s": 0.0}], NAMES),
        ([{"step": 5, "train/lr": 1e-3}], ["learning_rate.png"]),
        ([{"step": 5, "train/tokens_per_s": 1e4}], ["throughput.png"]),
        ([{"step": 5, "train/loss": math.nan}, {"step": 6, "val/loss": math.inf}], []),
        ([{"step": s, "train/loss": 2.0} for s in (1, 2)], ["loss.png"]),
    ],
)
def test_poor_histories_give_the_pictures_they_can(
    tmp_path: Path, rows: list[Row], names: list[str]
) -> None:
    assert [path.name for path in plot_run(write(tmp_path, rows))] == names


def test_a_single_point_is_visible_on_an_axis_of_whole_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: saved.append(figure))
    plot_run(write(tmp_path, [{"step": 5, "train/lr": 1e-3}]))
    (axes,) = saved[0].axes
    assert axes.get_lines()[0].get_marker() == "o"
    low, high = axes.get_xlim()
    assert low <= 4 < 6 <= high


def test_points_that_are_not_finite_are_left_out() -> None:
    rows: list[Row] = [{"step": s, "a": v} for s, v in ((1, 1.0), (2, math.nan), (3, math.inf))]
    steps, values = series(rows, "a")
    assert (steps.tolist(), values.tolist()) == ([1], [1.0])


def test_a_spike_neither_flattens_the_axis_nor_bends_the_smoothed_curve() -> None:
    rows: list[Row] = [{"step": s, "train/loss": 2.0 - s / 400} for s in range(1, 401)]
    rows[200]["train/loss"] = 500.0
    axes = drawn(draw_loss, rows)
    assert axes.get_ylim()[1] < 3
    assert axes.get_yscale() == "linear"
    assert axes.get_lines()[1].get_ydata().max() < 2


def test_a_loss_that_falls_by_orders_of_magnitude_gets_a_logarithmic_axis() -> None:
    rows: list[Row] = [{"step": s, "train/loss": 4.0 * 0.9**s} for s in range(1, 101)]
    assert drawn(draw_loss, rows).get_yscale() == "log"
    assert drawn(draw_loss, history()).get_yscale() == "linear"


def test_smoothing_is_a_centred_median_that_leaves_a_straight_line_alone() -> None:
    line = Series(np.arange(50), np.linspace(3.0, 1.0, 50))
    np.testing.assert_allclose(smooth(line, 5).values, line.values)
    bump = Series(np.arange(5), np.array([1.0, 1.0, 9.0, 2.0, 2.0]))
    assert smooth(bump, 1).values.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert smooth(bump, 0).values.tolist() == bump.values.tolist()


def test_smoothing_a_long_run_keeps_both_ends_and_few_points() -> None:
    count = 3 * SMOOTH_POINTS
    long = smooth(Series(np.arange(count), np.ones(count)), 100)
    assert len(long.steps) == SMOOTH_POINTS
    assert (long.steps[0], long.steps[-1]) == (0, count - 1)


def test_the_command_prints_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, history())
    monkeypatch.setattr(sys, "argv", ["plots", str(tmp_path)])
    assert main() == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "plots" / n) for n in NAMES]


@pytest.mark.parametrize("argument", ["no-such-run", ""])
def test_the_command_refuses_what_is_not_a_run_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argument: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["plots", str(tmp_path / argument)])
    assert main() == 1
    message = capsys.readouterr().err
    assert message.startswith("plots: ")
    assert message.count("\n") == 1
