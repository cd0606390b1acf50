"""Appending to metrics.jsonl: kills, resumes and a full disk leave a whole file behind."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.metrics_file import encode_row, read_rows
from training.metrics_log import MetricsLog


def steps(run: Path) -> list[int]:
    return [row["step"] for row in read_rows(run / "metrics.jsonl")]


def write_steps(run: Path, *numbers: int) -> bytes:
    log = MetricsLog(run)
    for step in numbers:
        log.log(step, {"train/loss": 1 / (step + 1)})
    log.close()
    return (run / "metrics.jsonl").read_bytes()


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file grow past `size` bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_row_is_in_the_file_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.log(1, {"train/loss": 2.5})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": 2.5}]
    log.close()


def test_reopening_appends(tmp_path: Path) -> None:
    first = write_steps(tmp_path, 1, 2)
    second = write_steps(tmp_path, 3)
    assert second.startswith(first)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_kill_at_any_byte_costs_at_most_the_row_being_written(tmp_path: Path) -> None:
    whole = write_steps(tmp_path, 1, 2)
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:length])
        written = write_steps(tmp_path, 3)
        assert written.startswith(whole[:first])
        complete = length >= len(whole) - 1
        assert steps(tmp_path) == ([1, 2, 3] if complete else [1, 3]), length


def test_resume_cuts_what_comes_after_the_checkpoint_and_no_byte_more(tmp_path: Path) -> None:
    before = write_steps(tmp_path, 0, 10, 10, 20)
    write_steps(tmp_path, 21, 30, 30)
    for _ in range(2):  # twice in a row
        log = MetricsLog(tmp_path)
        assert log.truncate_after(20) == 3
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        for step in (21, 30, 30):
            log.log(step, {"val/loss": 1.0})
        log.close()
        assert steps(tmp_path) == [0, 10, 10, 20, 21, 30, 30]


def test_truncating_after_the_last_step_changes_nothing(tmp_path: Path) -> None:
    before = write_steps(tmp_path, 1, 2)
    log = MetricsLog(tmp_path)
    assert log.truncate_after(2) == 0
    log.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_resume_from_the_start_empties_the_file(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    log = MetricsLog(tmp_path)
    assert log.truncate_after(0) == 2
    log.log(1, {})
    log.close()
    assert steps(tmp_path) == [1]


def test_on_a_full_disk_rows_wait_and_the_file_stays_whole(tmp_path: Path) -> None:
    notes: list[str] = []
    log = MetricsLog(tmp_path, notes.append)
    log.log(1, {"train/loss": 1.0})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    for room in (0, 10):  # the write fails at once, or stops in the middle of the row
        with full_disk(size + room):
            log.log(2 + room, {"train/loss": 2.0})
            log.log(3 + room, {"train/loss": 3.0})
            assert steps(tmp_path)[-1] == (1 if room == 0 else 4)
        log.log(4 + room, {"train/loss": 4.0})
        size = (tmp_path / "metrics.jsonl").stat().st_size
    log.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 12, 13, 14]
    assert len(notes) == 2  # one per shortage, not one per row
    assert "metrics.jsonl cannot be written" in notes[0]


def test_a_disk_that_fills_after_a_resume_leaves_no_half_row(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    log = MetricsLog(tmp_path, lambda text: None)
    log.truncate_after(1)
    with full_disk((tmp_path / "metrics.jsonl").stat().st_size + 5):
        log.log(2, {})
        assert (tmp_path / "metrics.jsonl").read_bytes() == encode_row(1, {"train/loss": 0.5})
    log.close()
    assert steps(tmp_path) == [1, 2]


def test_closing_writes_what_still_waits_and_may_be_repeated(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, lambda text: None)
    with full_disk(0):
        log.log(1, {})
    log.close()
    log.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == encode_row(1, {})


def test_a_value_that_is_no_number_is_refused_and_leaves_the_file_alone(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    with pytest.raises(TypeError, match="train/mfu"):
        log.log(1, {"train/mfu": None})
    log.log(2, {})
    log.close()
    assert steps(tmp_path) == [2]
