"""The table of heads in the terminal: what stands where, and errors that say what is missing."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.event_files import Event, append_events
from analysis.head_files import HeadRecord, Measure, write_record
from analysis.head_table import head_table
from analysis.telemetry import describe, main
from tests.analysis.head_records import changed, made_up

EVENT = Event(
    step=20,
    seen=40,
    kind="logit_blowup",
    layer=0,
    head=1,
    value=math.inf,
    limit=1000.0,
    text="step 20: logits blew up",
)


def record(**measures: Any) -> HeadRecord:
    """A probe of layers 0 and 2 with two heads each; `uniform_x` stands for "uniform/x"."""
    axes = {1: "layer", 2: "head"}
    found = {}
    for name, values in measures.items():
        array = np.array(values, float)
        found[name.replace("uniform_", "uniform/")] = Measure(axes[array.ndim], array)
    return HeadRecord("probe", 1500, (0, 2), found)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (0, 50, 100):
        write_record(tmp_path, made_up("probe", step))
    for step in (50, 110):
        write_record(tmp_path, made_up("train", step))
    append_events(tmp_path, [EVENT])
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, *options: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["telemetry", *map(str, options)])
    return main()


# --- The table ------------------------------------------------------------------------------------


def test_the_table_of_a_record() -> None:
    each = record(
        entropy_norm=[[0.5, 0.25], [1, 0.0625]],
        alpha_0=[[0.1, 0.0001], [math.nan, 0.9]],
        max_logit=[[1, -20], [300, 4]],
        uniform_alpha_0=[0.0741, 0.0741],
        sink_hnorm=[1, 12.5],
    )
    measures = each.measures | {"loss": Measure("scalar", np.array(2.5))}
    assert describe(each._replace(measures=measures), [EVENT]) == (
        "Probe batch after step 1,500: loss 2.5\n"
        "\n"
        "layer  head  ent_norm  alpha_0  maxlogit\n"
        "----------------------------------------\n"
        "    0     0     0.500    0.100       1.0\n"
        "    0     1     0.250  1.0e-04     -20.0\n"
        "    2     0     1.000      nan     300.0\n"
        "    2     1     0.062    0.900       4.0\n"
        "----------------------------------------\n"
        "uniform         1.000    0.074          \n"
        "\n"
        "layer  hnorm\n"
        "    0   1.00\n"
        "    2  12.50\n"
        "\n"
        "Events\n"
        "  step 20: logits blew up"
    )


def test_layers_with_other_baselines_have_lines_of_their_own() -> None:
    lines = describe(record(alpha_0=[[0, 0], [0, 0]], uniform_alpha_0=[0.25, 0.125]), []).split(
        "\n"
    )
    assert "uniform        0.250  layer 0" in lines
    assert "uniform        0.125  layer 2" in lines
    assert lines[-2:] == ["Events", "  none"]


def test_sorted_rows_begin_with_the_largest_and_end_with_what_is_no_number() -> None:
    each = record(
        max_prob=[[1, 2], [3, 4]],
        sink_cos=[[0.1, math.nan], [0.3, 0.2]],
    )
    lines = describe(each, [], sort="sink_cos").split("\n")
    assert lines[2] == "layer  head  maxprob  sink_cos"
    rows = [tuple(map(int, line.split()[:2])) for line in lines[4:8]]
    assert rows == [(2, 0), (2, 1), (0, 0), (0, 1)]


def test_every_line_of_a_large_model_fits_the_width_of_a_page() -> None:
    each = made_up("probe", 100, layers=tuple(range(12)), heads=12, kv_heads=4)
    each = changed(each, max_logit=1e5 * each.measures["max_logit"].values)
    lines = describe(each, []).split("\n")
    rows = [line for line in lines if line[:11].replace(" ", "").isdigit()]
    heads = rows[:144]
    assert len({len(line) for line in heads}) == 1
    assert max(map(len, lines)) <= 120


def test_a_key_value_head_stands_in_every_row_it_serves() -> None:
    each = made_up("probe", 5, layers=(0, 2), heads=4, kv_heads=2)
    each = changed(each, sink_vnorm=[[1, 2], [3, 4]], alpha_0=[[0, 1, 2, 3], [4, 5, 6, 7]])
    table = head_table(each)
    assert table.columns[:4] == ["step", "layer", "head", "kv_head"]
    assert table.column("step") == [5] * 8
    assert table.column("layer") == [0] * 4 + [2] * 4
    assert table.column("kv_head") == [0, 0, 1, 1] * 2
    assert table.column("sink_vnorm") == [1, 1, 2, 2, 3, 3, 4, 4]
    assert table.column("alpha_0") == list(range(8))
    assert head_table(made_up("train", 5)).column("kv_head") == [None] * 4


# --- The command ----------------------------------------------------------------------------------


def test_the_newest_probe_is_shown_unless_training_or_a_step_is_asked_for(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, title in [
        ((), "Probe batch after step 100"),
        (("--source", "train"), "Training batches of step 110"),
        (("--step", "50"), "Probe batch after step 50"),
        (("--step", "110"), "Training batches of step 110"),
    ]:
        assert call(monkeypatch, run, *options) == 0
        assert capsys.readouterr().out.startswith(title)


def test_a_file_that_names_a_run_stands_for_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latest").write_text(str(run), encoding="utf-8")
    assert call(monkeypatch, tmp_path / "latest") == 0
    assert "step 20: logits blew up" in capsys.readouterr().out


def test_events_after_the_step_asked_for_are_not_listed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, run, "--step", "0") == 0
    assert "Events\n  none" in capsys.readouterr().out


def test_json_has_every_measure_and_event(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    each = changed(made_up("probe", 200), max_logit=[[1, 2], [3, math.nan]])
    write_record(run, each)
    assert call(monkeypatch, run, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["source"], shown["step"]) == ("probe", 200)
    assert [row["max_logit"] for row in shown["heads"]] == [1, 2, 3, "NaN"]
    assert shown["heads"][2]["kv_head"] == 0
    layers = [row["uniform/alpha_0"] for row in shown["layers"]]
    assert layers == each.measures["uniform/alpha_0"].values.tolist()
    assert shown["model"]["loss"] == float(each.measures["loss"].values)
    assert [event["value"] for event in shown["events"]] == ["Infinity"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "60"], "has no record of step 60; near it: 0, 50, 100, 110"),
        (
            ["--step", "100", "--source", "train"],
            "has no train record of step 100; near it: 50",
        ),
        (["--sort", "indction"], "--sort indction: the record has alpha_0, "),
    ],
)
def test_what_a_run_does_not_have_is_told_in_one_line(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    assert call(monkeypatch, run, *options) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_a_run_without_records_names_the_setting_that_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ((), ("--step", "3"), ("--source", "train")):
        assert call(monkeypatch, tmp_path, *options) == 1
        assert "telemetry=default writes them" in capsys.readouterr().err
    assert call(monkeypatch, tmp_path / "no") == 1
    assert capsys.readouterr().err.startswith("telemetry: there is no run at ")
