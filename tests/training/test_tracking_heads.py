"""Heads and events in wandb: a table, histograms and alerts, which can fail without a trace."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.event_files import Event, append_events
from analysis.head_files import write_record
from tests.analysis.head_records import changed, made_up
from tests.training.test_tracking import Say, hermetic, inspect, local_run, recorded
from training.tracking import MAX_FAILURES, Tracker, WandbTracker

EVENT = Event(
    step=20,
    seen=40,
    kind="sink_formed",
    layer=0,
    head=1,
    value=0.4,
    limit=0.3,
    text="step 20: a sink formed in layer 0, head 1",
)


class FakeRun:
    """Remembers what it is told, or refuses it."""

    id = "mine"

    def __init__(self, failing: Exception | None = None) -> None:
        self.failing = failing
        self.rows: list[dict[str, Any]] = []
        self.alerts: list[dict[str, Any]] = []

    def define_metric(self, name: str, **options: Any) -> None:
        pass

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def alert(self, **options: Any) -> None:
        if self.failing:
            raise self.failing
        self.alerts.append(options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wandb whose drawings are what they were made of."""
    module = SimpleNamespace(
        Table=lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data],
        Histogram=lambda values: {"histogram": values},
    )
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_a_run_that_is_not_tracked_takes_both() -> None:
    Tracker().alert("sink formed", "text")
    Tracker().log_heads(0, made_up("probe", 0))


def test_an_alert_waits_for_no_other_of_its_title() -> None:
    run = FakeRun()
    WandbTracker(run, "offline", Say()).alert(EVENT.title, EVENT.text)
    (alert,) = run.alerts
    assert (alert["title"], alert["text"]) == ("sink formed", EVENT.text)
    assert 0 < alert["wait_duration"] < 1  # wandb reads 0 as its default, a minute


@pytest.mark.usefixtures("drawing")
def test_heads_become_a_row_each_and_a_few_histograms() -> None:
    run = FakeRun()
    record = changed(made_up("probe", 40, layers=(0, 2)), alpha_0=[[0.1, 0.2], [0.3, 0.4]])
    WandbTracker(run, "offline", Say()).log_heads(40, record)
    (row,) = run.rows
    assert row["step"] == 40
    table = row["probe/attn/heads"]
    assert [(x["step"], x["layer"], x["head"], x["kv_head"]) for x in table] == [
        (40, layer, head, 0) for layer in (0, 2) for head in (0, 1)
    ]
    assert [x["alpha_0"] for x in table] == [0.1, 0.2, 0.3, 0.4]
    assert {"entropy", "induction", "sink_vnorm", "write"} < table[0].keys()
    assert row["probe/attn/heads_alpha_0"] == {"histogram": [0.1, 0.2, 0.3, 0.4]}
    histograms = {key for key in row if key.startswith("probe/attn/heads_")}
    assert histograms == {
        f"probe/attn/heads_{x}" for x in ("alpha_0", "entropy_norm", "max_logit", "induction")
    }


@pytest.mark.usefixtures("drawing")
def test_what_is_not_finite_or_was_not_measured_is_not_drawn() -> None:
    run = FakeRun()
    record = changed(made_up("probe", 40), max_logit=[[1, math.inf], [math.nan, 4]])
    record = changed(record, alpha_0=[[math.nan] * 2] * 2, induction=None)
    WandbTracker(run, "offline", Say()).log_heads(40, record)
    (row,) = run.rows
    assert [x["max_logit"] for x in row["probe/attn/heads"]] == [1, None, None, 4]
    assert row["probe/attn/heads_max_logit"] == {"histogram": [1, 4]}
    assert "probe/attn/heads_alpha_0" not in row
    assert "probe/attn/heads_induction" not in row


def test_failures_cost_the_view_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import fails
    say = Say()
    tracker = WandbTracker(FakeRun(OSError("no room")), "offline", say)
    for _ in range(MAX_FAILURES):
        tracker.alert("title", "text")
        tracker.log_heads(0, made_up("probe", 0))
    assert tracker.missed == 2 * MAX_FAILURES
    assert len(say) == 1


def test_a_replay_records_heads_and_alerts_with_the_real_library(run: Path, tmp_path: Path) -> None:
    local_run(run)
    record = changed(made_up("probe", 2), max_logit=[[1, math.nan], [3, 4]])
    write_record(run, record)
    write_record(run, made_up("train", 2))
    append_events(run, [EVENT, EVENT])
    command = [sys.executable, "-m", "training.tracking", "replay", str(run), "--mode", "offline"]
    done = subprocess.run(
        command, env=hermetic(tmp_path), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "lost" not in done.stdout

    folder = recorded(run)
    entries = [json.loads(line) for line in inspect(folder).splitlines()]
    alerts = [entry["alert"] for entry in entries if entry["type"] == "alert"]
    assert [(x["title"], x["text"]) for x in alerts] == [(EVENT.title, EVENT.text)] * 2
    rows = [entry["history"]["item"] for entry in entries if entry["type"] == "history"]
    (row,) = [row for row in rows if row.get("probe/attn/heads._type") == "table-file"]
    assert row["step"] == 2
    assert row["probe/attn/heads.nrows"] == 4
    assert row["probe/attn/heads_max_logit._type"] == "histogram"
    assert sum(row["probe/attn/heads_max_logit.values"]) == 3
    (path,) = folder.glob("files/media/table/probe/attn/*.table.json")
    table = json.loads(path.read_text(encoding="utf-8"))
    assert table["columns"][:4] == ["step", "layer", "head", "kv_head"]
    column = table["columns"].index("max_logit")
    assert [x[column] for x in table["data"]] == [1, None, 3, 4]
