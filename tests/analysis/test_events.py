"""Events: dated where they began, told once while they last, the same when records are replayed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.event_files import FILE_NAME, Event, append_events, drop_events_after, read_events
from analysis.events import EventDetector, Thresholds
from analysis.head_files import HeadRecord, Measure

LIMITS = Thresholds()


def record(kind: str, step: int, layers: tuple[int, ...] = (0,), **measures: Any) -> HeadRecord:
    """A record of head measures, (layers, H); `uniform_alpha_0`, (layers,), is a layer's."""
    found = {name: Measure("head", np.array(values, float)) for name, values in measures.items()}
    if "uniform_alpha_0" in measures:
        values = np.array(measures["uniform_alpha_0"], float)
        found["uniform/alpha_0"] = Measure("layer", values)
    return HeadRecord(kind, step, layers, found)


def see(kind: str, name: str, values: list[float], every: int = 50, **limits: float) -> list[Event]:
    """The events of a model of one head in which `name` took these values."""
    detector = EventDetector(Thresholds(**limits))
    records = [record(kind, i * every, **{name: [[x]]}) for i, x in enumerate(values)]
    return [event for each in records for event in detector.see(each)]


# --- Sinks ----------------------------------------------------------------------------------------


def test_a_sink_is_certain_at_the_third_probe_and_dated_at_the_first() -> None:
    (event,) = see("probe", "alpha_0", [0.1, 0.412, 0.5, 0.6])
    assert event == Event(
        step=50,
        seen=150,
        kind="sink_formed",
        layer=0,
        head=0,
        value=0.412,
        limit=0.3,
        text="step 50: a sink formed in layer 0, head 0: alpha_0 0.412, above 0.30 for three "
        "probes",
    )


@pytest.mark.parametrize(
    "values", [[0.4, 0.4, 0.3, 0.4, 0.4], [0.3, 0.3, 0.3], [0.4, 0.4, math.nan, 0.4]]
)
def test_no_sink_without_three_probes_in_a_row_above_the_limit(values: list[float]) -> None:
    assert see("probe", "alpha_0", values) == []


def test_a_sink_is_told_once_while_it_lasts_and_again_when_it_formed_again() -> None:
    events = see("probe", "alpha_0", [0.4] * 6 + [0.2] + [0.5] * 3, every=10)
    assert [(event.step, event.seen) for event in events] == [(0, 20), (70, 90)]


def test_the_limit_of_a_sink_follows_the_uniform_head_of_its_layer() -> None:
    detector = EventDetector(LIMITS)
    events: list[Event] = []
    for step in range(3):
        each = record(
            "probe", step, (0, 2), alpha_0=[[0.4, 0.4], [0.4, 0.5]], uniform_alpha_0=[0.07, 0.15]
        )
        events += detector.see(each)
    assert [(event.layer, event.head) for event in events] == [(0, 0), (0, 1), (2, 1)]
    assert [event.limit for event in events] == pytest.approx([0.3, 0.3, 0.45])


def test_a_sink_in_the_training_statistics_is_no_event() -> None:
    assert see("train", "alpha_0", [0.9] * 4) == []


def test_other_layers_and_records_without_the_measure_leave_a_state_alone() -> None:
    detector = EventDetector(LIMITS)
    above = [[0.4]]
    seen = [
        detector.see(each)
        for each in (
            record("probe", 0, (1,), alpha_0=above),
            record("probe", 1, (1,)),
            record("probe", 2, (3,), alpha_0=above),
            record("train", 2, (1,), alpha_0=[[0.0]]),
            record("probe", 3, (1,), alpha_0=above),
            record("probe", 4, (1, 3), alpha_0=[[0.4], [0.1]]),
        )
    ]
    assert [len(events) for events in seen] == [0, 0, 0, 0, 0, 1]
    assert (seen[-1][0].step, seen[-1][0].layer) == (0, 1)


# --- Collapse, logits, dead heads -----------------------------------------------------------------


def test_a_collapse_is_told_at_once_and_not_again_while_it_wavers() -> None:
    low, high = 0.04, 0.06
    events = see("train", "entropy_norm", [high, low, high, high, low, high], every=10)
    assert [(event.kind, event.step, event.seen) for event in events] == [
        ("entropy_collapse", 10, 10)
    ]
    assert events[0].text == (
        "step 10: entropy collapsed in layer 0, head 0: entropy_norm 0.040, below 0.05"
    )
    after = see("train", "entropy_norm", [low, high, high, high, low], every=10)
    assert [event.step for event in after] == [0, 40]


def test_a_collapse_on_the_probe_alone_is_no_event() -> None:
    assert see("probe", "entropy_norm", [0.9, 0.01, 0.01, 0.01]) == []


@pytest.mark.parametrize("kind", ["train", "probe"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1234.5, "max_logit 1,234, above 1,000"),
        (math.inf, "max_logit inf, not finite"),
        (math.nan, "max_logit nan, not finite"),
    ],
)
def test_a_logit_that_is_large_or_not_finite_has_blown_up(
    kind: str, value: float, words: str
) -> None:
    (event,) = see(kind, "max_logit", [1000.0, value, value])
    assert (event.step, event.kind) == (50, "logit_blowup")
    assert event.text == f"step 50: logits blew up in layer 0, head 0: {words}"


def test_what_both_sources_see_is_told_once() -> None:
    detector = EventDetector(LIMITS)
    assert len(detector.see(record("train", 10, max_logit=[[2000.0]]))) == 1
    assert detector.see(record("probe", 10, max_logit=[[1500.0]])) == []


def test_a_head_that_writes_nothing_for_three_probes_is_dead() -> None:
    (event,) = see("probe", "write", [0.2, 4e-4, 0.0, 0.0, 0.0])
    assert (event.step, event.seen, event.kind, event.value) == (50, 150, "dead_head", 4e-4)
    assert event.text == (
        "step 50: layer 0, head 0 is dead: it writes 0.0004 of the stream, below 0.001 for "
        "three probes"
    )
    assert see("probe", "write", [4e-4, 4e-4, 0.2, 4e-4]) == []


@pytest.mark.parametrize(
    ("kind", "name", "values", "limit"),
    [
        ("probe", "alpha_0", [0.2] * 3, {"sink": 0.1}),
        ("train", "entropy_norm", [0.2], {"collapse": 0.3}),
        ("train", "max_logit", [20.0], {"logit": 10.0}),
        ("probe", "write", [0.2] * 3, {"dead": 0.3}),
        ("train", "entropy_norm", [0.9, 0.7], {"fall": 0.8}),
    ],
)
def test_every_threshold_can_be_set(
    kind: str, name: str, values: list[float], limit: dict[str, float]
) -> None:
    assert see(kind, name, values) == []
    assert len(see(kind, name, values, **limit)) == 1


# --- Falls ----------------------------------------------------------------------------------------


def falls(*points: tuple[int, float]) -> list[Event]:
    """The events of a layer of two heads with these means of entropy_norm at these steps."""
    detector = EventDetector(LIMITS)
    records = [record("train", step, (4,), entropy_norm=[[x - 0.1, x + 0.1]]) for step, x in points]
    return [event for each in records for event in detector.see(each)]


def test_a_fall_to_half_within_a_hundred_steps_is_told_with_where_it_came_from() -> None:
    (event,) = falls((10, 0.7), (20, 0.8), (60, 0.6), (120, 0.4))
    assert (event.kind, event.layer, event.head) == ("entropy_fall", 4, None)
    assert (event.step, event.seen) == (120, 120)
    assert (event.value, event.limit) == (pytest.approx(0.4), pytest.approx(0.4))
    assert event.text == (
        "step 120: entropy fell in layer 4: mean entropy_norm 0.400, at most 0.5 times the 0.800 "
        "of step 20"
    )


def test_a_slower_or_smaller_fall_is_none() -> None:
    assert falls((20, 0.8), (70, 0.6), (121, 0.4)) == []
    assert falls((20, 0.8), (30, 0.41)) == []


def test_a_fall_is_told_once_and_the_next_is_measured_from_where_it_ended() -> None:
    assert len(falls((10, 0.8), (20, 0.4), (30, 0.3), (40, 0.2))) == 1
    assert len(falls((10, 0.8), (20, 0.4), (30, 0.41), (40, 0.39), (50, 0.41), (60, 0.39))) == 1
    again = falls((10, 0.8), (20, 0.4), (30, 0.7), (40, 0.3))
    assert [event.step for event in again] == [20, 40]


def test_a_layer_that_has_collapsed_has_nowhere_left_to_fall() -> None:
    values = [0.04, 0.01, 0.04, 0.0]
    assert [e.kind for e in see("train", "entropy_norm", values)] == ["entropy_collapse"]


def test_a_mean_that_is_not_finite_neither_falls_nor_is_fallen_from() -> None:
    assert falls((10, math.inf), (20, 0.8), (30, math.nan), (40, 0.7)) == []
    assert len(falls((10, 0.8), (20, math.nan), (30, 0.3))) == 1


# --- Resuming and files ---------------------------------------------------------------------------


def test_a_detector_rebuilt_from_earlier_records_goes_on_as_if_it_had_never_stopped() -> None:
    rng = np.random.default_rng(3)
    records = []
    for step in range(0, 400, 10):
        noise = rng.uniform(size=(4, 2, 3))
        records.append(
            record("train", step, (0, 2), entropy_norm=noise[0] ** 2, max_logit=1050 * noise[1])
        )
        records.append(
            record("probe", step, (0, 2), alpha_0=noise[2], write=2e-3 * noise[3] ** 0.5)
        )
    whole = EventDetector(LIMITS)
    expected = [whole.see(each) for each in records]
    assert {event.kind for events in expected for event in events} == {
        "sink_formed",
        "entropy_collapse",
        "entropy_fall",
        "logit_blowup",
        "dead_head",
    }
    for cut in (1, 17, 40):
        resumed = EventDetector(LIMITS)
        for each in records[:cut]:
            resumed.see(each)
        assert [resumed.see(each) for each in records[cut:]] == expected[cut:]


def test_events_survive_their_file_as_plain_json(tmp_path: Path) -> None:
    events = [
        *see("probe", "alpha_0", [0.4] * 3),
        *see("train", "max_logit", [0.0, 0.0, 0.0, math.inf]),
    ]
    append_events(tmp_path, events[:1])
    append_events(tmp_path, events[1:])
    with open(tmp_path / FILE_NAME, "a", encoding="utf-8") as file:
        file.write('{"step": 1')  # cut short by a kill
    assert read_events(tmp_path) == events

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lines = (tmp_path / FILE_NAME).read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[1], parse_constant=refuse)["value"] == "Infinity"
    drop_events_after(tmp_path, 149)
    assert read_events(tmp_path) == events[:1]
    assert read_events(tmp_path / "elsewhere") == []
