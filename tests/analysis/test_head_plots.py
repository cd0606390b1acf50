"""Pictures of heads: the ones a run has measurements for, showing those measurements."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.head_files import FOLDER
from analysis.head_plots import (
    MOST_TOKENS,
    NAMED_HEADS,
    draw_entropy,
    draw_maps,
    draw_patterns,
    draw_sink_formation,
    plot_heads,
)
from analysis.plots import main
from analysis.run_record import interesting_heads, read_run
from tests.analysis.synthetic_run import Synthetic, sink, write_run

NAMES = ["heads.png", "sink_formation.png", "entropy.png", "patterns.png"]


def lines(figure: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in figure.axes[0].get_lines()}


@pytest.mark.parametrize(
    "made",
    [
        Synthetic(),
        Synthetic(null_mass=True, n_layer=9, n_head=2, n_kv_head=1),
        Synthetic(steps=1, train_records=1, probe_records=1, tokens=["$x$", "_^\\", "<b>"]),
        Synthetic(n_layer=1, n_head=1, n_kv_head=1, tokens=["a"]),
    ],
    ids=["plain", "null", "one measurement", "one head"],
)
def test_a_run_gets_four_pictures(tmp_path: Path, made: Synthetic) -> None:
    run = write_run(tmp_path, made)
    paths = plot_heads(run)
    assert paths == [run / "plots" / name for name in NAMES]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.parametrize(
    ("gone", "names"),
    [
        ("*", []),
        ("patterns*", NAMES[:3]),
        ("probe-*", ["heads.png", "entropy.png", "patterns.png"]),
        ("train-*", NAMES),
    ],
)
def test_pictures_without_measurements_are_left_out(
    tmp_path: Path, gone: str, names: list[str]
) -> None:
    run = write_run(tmp_path)
    for path in (run / FOLDER).glob(gone):
        path.unlink()
    assert [path.name for path in plot_heads(run)] == names


def test_the_maps_show_the_last_measurement_on_one_fixed_scale(tmp_path: Path) -> None:
    figure = draw_maps(read_run(write_run(tmp_path)))
    assert figure is not None
    titles = [axes.get_title() for axes in figure.axes[:3]]
    assert titles[1] == "sink_mass_1\ntraining, step 1,000"
    images = [axes.get_images()[0] for axes in figure.axes[:3]]
    np.testing.assert_allclose(images[1].get_array(), sink(Synthetic(), 1000) * 0.9)
    assert {image.get_clim() for image in images} == {(0, 1)}


def test_formation_curves_name_the_strongest_heads_and_the_baseline(tmp_path: Path) -> None:
    made = Synthetic()
    figure = draw_sink_formation(read_run(write_run(tmp_path)))
    assert figure is not None
    row, head = np.unravel_index(made.strength.argmax(), (4, 4))
    drawn = lines(figure)
    assert drawn[f"layer {row}, head {head}"].get_ydata()[-1] == sink(made, 1000).max()
    assert len([name for name in drawn if name.startswith("layer")]) == NAMED_HEADS
    assert drawn["uniform"].get_linestyle() == "--"
    assert set(drawn["uniform"].get_ydata()) == {0.0741}
    assert set(drawn["limit 0.3"].get_ydata()) == {0.3}


def test_entropy_is_the_mean_of_each_layer(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    figure = draw_entropy(run)
    assert figure is not None
    newest = run.train[-1].measures["entropy_norm"].values.mean(axis=1)
    ends = [lines(figure)[f"layer {layer}"].get_ydata()[-1] for layer in range(4)]
    np.testing.assert_allclose(ends, newest)


def test_patterns_are_those_of_the_most_interesting_heads(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    figure = draw_patterns(run)
    assert figure is not None
    assert run.patterns is not None
    first = interesting_heads(run)[0]
    shown = figure.axes[0].get_images()[0].get_array()
    assert shown is not None
    assert shown.shape == (MOST_TOKENS, MOST_TOKENS)
    weights = run.patterns.weights[first.row, first.head, :MOST_TOKENS, :MOST_TOKENS]
    np.testing.assert_array_equal(np.nan_to_num(np.asarray(shown.filled(0))), weights)
    assert draw_patterns(replace(run, patterns=None)) is None


def test_one_command_draws_the_history_and_the_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plots", str(run)])
    assert main() == 0
    history = ["loss.png", "learning_rate.png", "throughput.png"]
    printed = capsys.readouterr().out.splitlines()
    assert printed == [str(run / "plots" / name) for name in [*history, *NAMES]]
