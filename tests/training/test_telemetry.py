"""Looking at the heads: when, at no cost to what is learned, and what remains of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train as train_module
from analysis.event_files import Event, read_events
from analysis.head_files import HeadRecord, Measure, read_patterns, read_records, write_record
from model.checkpoint import list_checkpoints, load_checkpoint
from tests.training import runs
from tests.training.test_resume import interrupt
from train import train
from training import telemetry
from training.config import UserError, check_config, from_dict
from training.overhead import Overhead
from training.telemetry import TelemetryConfig, is_due

ROOT = Path(__file__).parents[2]


# --- When -----------------------------------------------------------------------------------------


def test_early_steps_are_looked_at_on_a_log_scale_and_later_ones_regularly():
    due = [step for step in range(1, 101) if is_due(step, 20)]
    assert due == [1, 2, 3, 4, 6, 8, 11, 16, 20, 23, 32, 40, 45, 60, 80, 100]
    assert [step for step in range(1, 60) if is_due(step, 10)] == [
        *(1, 2, 3, 4, 6, 8, 10, 11, 16, 20, 23, 30, 40, 50)
    ]


def test_the_cadence_ends_where_it_is_denser_than_the_log_scale():
    assert all(is_due(step, 1) for step in range(1, 100))
    assert [step for step in range(1, 12) if is_due(step, 2)] == [1, 2, 3, 4, 6, 8, 10]
    late = [step for step in range(2000, 4001) if is_due(step, 1000)]
    assert late == [2000, 2048, 3000, 4000]  # from 2048 it is 848 steps to 2896, then 1200 to 4096


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"every": 0}, "telemetry.every=0 must be at least 1"),
        ({"probe_windows": 0}, "telemetry.probe_windows=0 must be at least 1"),
        ({"sink_length": 1}, "telemetry.sink_length=1 must be at least 2"),
        ({"sink": 1.5}, "telemetry.sink=1.5 must be at least 0 and at most 1"),
        ({"logit": 0}, "telemetry.logit=0 must be above 0"),
        ({"layers": []}, "telemetry.layers=[] looks at nothing: use telemetry=none"),
        ({"layers": [1, 1]}, "telemetry.layers=[1, 1] names a layer twice"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(setting, message):
    with pytest.raises(ValueError, match="telemetry") as refused:
        TelemetryConfig(**setting)
    assert str(refused.value) == message


def test_layers_must_exist(tmp_path):
    check_config(runs.config(tmp_path, telemetry__layers=[1, 0]))
    with pytest.raises(UserError, match=r"telemetry.layers=\[0, 2\]: layer 2 is outside 0 .. 1"):
        check_config(runs.config(tmp_path, telemetry__layers=[2, 0]))


def test_switched_off_it_leaves_nothing(tmp_path):
    run = runs.run(tmp_path, telemetry__enabled=False)
    assert not (run / "attention").exists()
    assert not any("attn" in key for row in runs.rows(run) for key in row)
    assert "telemetry" not in (run / "log.txt").read_text(encoding="utf-8")


# --- What is learned stays the same ---------------------------------------------------------------


def losses(run: Path) -> list[float]:
    return [row["train/loss"] for row in runs.rows(run) if "train/loss" in row]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(list_checkpoints(run)[-1]).tensors["model"]


def with_and_without(folder: Path, **options) -> tuple[Path, Path]:
    """The same run with telemetry and without."""
    found = []
    for enabled in (True, False):
        place = folder / str(enabled)
        place.mkdir()
        found.append(runs.run(place, telemetry__enabled=enabled, **options))
    return found[0], found[1]


@pytest.mark.parametrize(
    "options",
    [
        {"attention__backend": "eager"},
        {"attention__backend": "sdpa"},
        {"model__windows": [5, 0], "model__window_sinks": 1, "model__sink_logit": "learned"},
    ],
    ids=["eager", "plain", "windows"],
)
def test_looking_changes_no_bit_of_what_is_learned(tmp_path, options):
    options |= {"model__dropout": 0.1, "optim__kind": "muon", "train__micro_batch_size": 2}
    watched, plain = with_and_without(tmp_path, **options)
    assert read_records(watched, "train")
    assert losses(watched) == losses(plain)
    assert weights(watched).keys() == weights(plain).keys()
    for name, tensor in weights(plain).items():
        assert tensor.equal(weights(watched)[name]), name


def test_looking_changes_a_compiled_run_by_rounding_at_most(tmp_path, monkeypatch):
    # The compiler's own front end; generating code takes minutes and changes no graph.
    def compile_whole(model, *args):
        model.compile(backend="aot_eager", fullgraph=True)
        return True

    monkeypatch.setattr(train_module, "maybe_compile", compile_whole)
    torch.compiler.reset()
    watched, plain = with_and_without(tmp_path)
    assert losses(watched) == pytest.approx(losses(plain), abs=1e-6)
    assert len(read_records(watched, "train")) == 5  # steps 1, 2, 3, 4 and 6 of 6


@pytest.mark.slow
def test_looking_changes_a_run_of_generated_code_by_rounding_at_most(tmp_path):
    torch.compiler.reset()
    watched, plain = with_and_without(tmp_path, compile="true")
    assert losses(watched) == pytest.approx(losses(plain), abs=1e-6)
    assert len(read_records(watched, "train")) == 5


# --- However the sequences are shared out ---------------------------------------------------------


def assert_equal_records(one: list[HeadRecord], other: list[HeadRecord], rtol: float) -> None:
    assert [record.step for record in one] == [record.step for record in other]
    for a, b in zip(one, other, strict=True):
        assert a.measures.keys() == b.measures.keys()
        for name, measure in a.measures.items():
            np.testing.assert_allclose(
                b.measures[name].values, measure.values, rtol, atol=1e-6, err_msg=name
            )


def unequal_documents(folder: Path) -> dict[str, str]:
    """Settings of a run on documents of many lengths, whose batches count unequal rows."""
    lines = [json.dumps({"text": runs.TEXT[n : n + 3 + n % 23]}) for n in range(0, 3000, 11)]
    path = folder / "texts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return {"data__path": str(path), "data__mode": "document"}


def test_micro_steps_do_not_change_a_record(tmp_path):
    found = []
    for micro in (8, 4):
        place = tmp_path / str(micro)
        place.mkdir()
        options = unequal_documents(place)
        run = runs.run(
            place,
            train__batch_size=8,
            train__micro_batch_size=micro,
            model__init_std=0.3,
            **options,
        )
        found.append(read_records(run, "train"))
    assert len(found[0]) == 5
    assert_equal_records(*found, rtol=2e-5)
    first = [records[0].measures["uniform/entropy"].values for records in found]
    np.testing.assert_allclose(*first, rtol=1e-14)  # no rounding of a model in these


def test_two_ranks_write_the_records_of_one(tmp_path):
    places = [tmp_path / "one", tmp_path / "two"]
    settings = []
    for place in places:
        place.mkdir()
        settings.append(runs.settings(place, train__batch_size=8, **unequal_documents(place)))
        settings[-1]["model"]["init_std"] = 0.3
    train(from_dict(settings[0]), [])
    (places[1] / "settings.json").write_text(json.dumps(settings[1]), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(Path(__file__).parent / "train_settings.py")
    done = subprocess.run(
        [sys.executable, *launcher, script, str(places[1] / "settings.json")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = [runs.newest(place) for place in places]
    for kind in ("train", "probe"):
        records = [read_records(run, kind) for run in found]
        assert records[0]
        assert_equal_records(*records, rtol=1e-4)
    uniform = [read_records(run, "train")[0].measures["uniform/entropy"].values for run in found]
    np.testing.assert_allclose(*uniform, rtol=1e-14)


# --- Where it goes --------------------------------------------------------------------------------


def test_a_resumed_run_has_the_records_of_one_that_was_never_interrupted(tmp_path, monkeypatch):
    options = {"model__dropout": 0.2, "train__max_steps": 12}
    (tmp_path / "whole").mkdir()
    (tmp_path / "pieces").mkdir()
    whole = runs.run(tmp_path / "whole", **options)
    interrupt(tmp_path / "pieces", monkeypatch, after=5, **options)
    pieces = runs.newest(tmp_path / "pieces")
    # What a kill may leave: records and events of steps that no checkpoint has.
    for kind in ("train", "probe"):
        write_record(pieces, HeadRecord(kind, 7, (0, 1), {}))
    (pieces / "events.jsonl").write_text(json.dumps(vars(event(seen=7))) + "\n", "utf-8")
    resumed = runs.run(tmp_path / "pieces", resume="latest", **options)

    assert resumed == pieces
    names = sorted(path.name for path in (whole / "attention").iterdir())
    assert sorted(path.name for path in (resumed / "attention").iterdir()) == names
    assert len(names) == 8 + 5 + 1  # training steps, probes, patterns
    for kind in ("train", "probe"):
        pairs = zip(read_records(resumed, kind), read_records(whole, kind), strict=True)
        for ours, theirs in pairs:
            assert ours[:3] == theirs[:3]
            assert ours.measures.keys() == theirs.measures.keys()
            for name, measure in ours.measures.items():
                assert np.array_equal(measure.values, theirs.measures[name].values), name
    assert read_events(resumed) == read_events(whole)
    assert runs.rows(resumed) == runs.rows(whole)


def event(step: int = 1, seen: int = 1) -> Event:
    return Event(
        step=step,
        seen=seen,
        kind="sink_formed",
        layer=0,
        head=1,
        value=0.5,
        limit=0.3,
        text=f"step {step}: layer 0 head 1 has formed a sink",
    )


class Detector:
    """Reports every probe, and remembers what it was shown."""

    shown: list[tuple[str, int]]

    def __init__(self, thresholds) -> None:
        self.thresholds = thresholds
        Detector.shown = []

    def see(self, record: HeadRecord) -> list[Event]:
        self.shown.append((record.kind, record.step))
        return [event(record.step, record.step)] if record.kind == "probe" else []


def test_events_reach_the_log_the_file_and_the_tracker(tmp_path, monkeypatch):
    alerts = []
    monkeypatch.setattr(telemetry, "EventDetector", Detector)
    monkeypatch.setattr(
        "training.tracking.Tracker.alert", lambda self, title, text: alerts.append((title, text))
    )
    run = runs.run(tmp_path, telemetry__sink=0.4)
    assert [event.step for event in read_events(run)] == [0, 3, 6]
    assert alerts[1] == ("sink formed", "step 3: layer 0 head 1 has formed a sink")
    log = (run / "log.txt").read_text(encoding="utf-8").splitlines()
    assert "step 3: layer 0 head 1 has formed a sink" in log


def test_a_resumed_run_shows_the_detector_what_was_before(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "EventDetector", Detector)
    runs.run(tmp_path)
    whole = list(Detector.shown)
    assert whole[:2] == [("probe", 0), ("train", 1)]
    assert whole[3:6] == [("train", 3), ("probe", 3), ("train", 4)]
    train(runs.config(tmp_path, resume="latest"), [])  # nothing is left to do: evaluates once more
    assert Detector.shown == whole
    assert [event.step for event in read_events(runs.newest(tmp_path))] == [0, 3, 6]


def test_scalars_stand_in_the_metrics_beside_losses(tmp_path):
    rows = runs.rows(runs.run(tmp_path))
    steps = {
        prefix: sorted({row["step"] for row in rows if any(k.startswith(prefix) for k in row)})
        for prefix in ("train/attn/", "probe/attn/")
    }
    assert steps == {"train/attn/": [1, 2, 3, 4, 6], "probe/attn/": [0, 3, 6]}


def test_patterns_are_those_of_the_newest_probe(tmp_path):
    patterns = read_patterns(runs.run(tmp_path))
    assert patterns is not None
    assert patterns.step == 6


def test_a_disk_that_refuses_costs_the_records_and_one_warning(tmp_path, monkeypatch):
    def refuse(run, record):
        raise OSError("no space left on device")

    monkeypatch.setattr(telemetry, "write_record", refuse)
    monkeypatch.setattr(telemetry, "write_patterns", refuse)
    run = runs.run(tmp_path)
    log = (run / "log.txt").read_text(encoding="utf-8")
    assert log.count("telemetry could not be written (no space left on device)") == 1
    assert len(losses(run)) == 6
    assert not read_records(run, "train")


def test_a_record_that_cannot_be_written_whole_leaves_nothing(tmp_path, monkeypatch):
    import safetensors.numpy

    def cut_short(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise safetensors.SafetensorError("no space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", cut_short)
    record = HeadRecord("train", 1, (0,), {"x": Measure("layer", np.zeros(1))})
    with pytest.raises(OSError, match=r"train-00000001\.safetensors: no space left"):
        write_record(tmp_path, record)
    assert list((tmp_path / "attention").iterdir()) == []


def test_a_picture_that_fails_costs_one_line(tmp_path, monkeypatch):
    from training import report

    def fail(run):
        raise ImportError("No module named 'some_plotting_library'")

    monkeypatch.setattr(report, "_plot_heads", fail)
    monkeypatch.setattr(report, "_write_report", lambda run: None)
    lines: list[str] = []
    report.draw_pictures(runs.run(tmp_path), lines.append, with_heads=True)
    assert lines == [
        "warning: no plots of heads were drawn: No module named 'some_plotting_library'"
    ]


# --- What it costs --------------------------------------------------------------------------------


class Clock:
    """A clock that stands still unless it is told otherwise."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def measured(steps: list[tuple[bool, float]], probes: list[float]) -> Overhead:
    clock = Clock()
    overhead = Overhead(clock)
    for has_statistics, seconds in steps:
        overhead.begin_step(has_statistics)
        clock.now += seconds
        overhead.end_step()
    for seconds in probes:
        with overhead.probing():
            clock.now += seconds
    return overhead


def test_the_cost_is_what_steps_with_statistics_take_more_than_their_neighbours():
    steps = [(False, 9.0)]  # the first warms up
    for seconds in (1.0, 2.0):  # and the machine becomes slower half-way
        steps += [(False, seconds)] * 10 + [(True, seconds + 0.3)] + [(False, seconds)] * 10
    steps[5] = (False, 7.0)  # one was slow for reasons of its own
    overhead = measured(steps, [0.25, 0.25])
    assert overhead.describe(100.0) == (
        "telemetry: 1.1% of training time (2 steps with statistics cost 0.6 s more than their "
        "neighbours, 2 probes 0.5 s)"
    )


def test_a_second_compiled_graph_is_part_of_the_cost():
    steps = [(True, 30.0), (True, 1.0), (False, 21.0), *[(False, 1.0)] * 9]
    assert "(2 steps with statistics cost 20.0 s more" in measured(steps, []).describe(100.0)


def test_without_ordinary_steps_there_is_nothing_to_compare_with():
    text = measured([(True, 1.0)] * 3, [0.5]).describe(3.0)
    assert text == (
        "telemetry: 3 steps with statistics, too few without them to tell the cost; 1 probe 0.5 s"
    )


def test_everything_about_a_look_is_in_its_cost(tmp_path, monkeypatch):
    """Time that passes where events are looked for counts as the cost of its look."""
    clock = Clock()

    class Slow(Detector):
        def see(self, record: HeadRecord) -> list[Event]:
            clock.now += 1.0 if record.kind == "train" else 10.0
            return []

    monkeypatch.setattr(telemetry, "EventDetector", Slow)
    monkeypatch.setattr(telemetry, "Overhead", lambda: Overhead(clock))
    log = (runs.run(tmp_path) / "log.txt").read_text(encoding="utf-8")
    assert "5 steps with statistics cost 4.0 s more" in log  # all but the first
    assert "3 probes 30.0 s" in log
    assert math.isfinite(losses(runs.newest(tmp_path))[-1])
