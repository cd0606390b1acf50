"""What is shown while a run trains, and its copy in log.txt."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import termios
from pathlib import Path

from training.progress import Progress, RunLog


class Terminal:
    """A pseudo-terminal of a given size: a stream to write to, and what was shown on it."""

    def __init__(self, lines: int, columns: int) -> None:
        self._screen, self._keyboard = pty.openpty()
        termios.tcsetwinsize(self._keyboard, (lines, columns))
        self.stream = open(self._keyboard, "w", encoding="utf-8")  # noqa: SIM115

    def shown(self) -> str:
        self.stream.close()
        content = b""
        with contextlib.suppress(OSError):  # how Linux says that a terminal has nothing more
            while part := os.read(self._screen, 4096):
                content += part
        os.close(self._screen)
        return content.decode().replace("\r\n", "\n")


def run_steps(progress: Progress, first: int, last: int) -> None:
    for step in range(first, last + 1):
        progress.update(step, loss=2.0 / step, lr=1e-3, tokens_per_s=12_345.0)
    progress.close()


def test_elsewhere_than_on_a_terminal_every_nth_step_and_the_last_is_a_line() -> None:
    stream = io.StringIO()
    run_steps(Progress(total=25, every=10, stream=stream), 1, 25)
    lines = stream.getvalue().splitlines()
    assert [line.split("/")[0].split()[-1] for line in lines] == ["10", "20", "25"]
    assert "loss 0.2000" in lines[0]
    assert "lr 1.00e-03" in lines[0]
    assert "12.3k tokens/s" in lines[0]
    assert "left" in lines[0]


def test_a_resumed_run_counts_from_where_it_was() -> None:
    stream = io.StringIO()
    run_steps(Progress(total=25, start=15, every=10, stream=stream), 16, 25)
    assert len(stream.getvalue().splitlines()) == 2


def test_a_speed_that_is_not_known_yet_is_left_out() -> None:
    stream = io.StringIO()
    Progress(total=1, stream=stream).update(1, loss=1.0, lr=0.1, tokens_per_s=None)
    assert "tokens/s" not in stream.getvalue()


def test_a_terminal_gets_a_bar_with_everything_and_notes_on_lines_of_their_own() -> None:
    terminal = Terminal(24, 120)
    progress = Progress(total=4, every=1, stream=terminal.stream)
    progress.update(1, loss=1.25, lr=1e-3, tokens_per_s=950)
    progress.note("step 1: validation loss 1.5")
    run_steps(progress, 2, 4)
    progress.close()  # a second time, as a `finally` may
    shown = terminal.shown()
    assert "\rstep 1: validation loss 1.5\n" in shown  # the bar was wiped first
    last = shown.rsplit("\r", 1)[-1]
    for part in ("4/4", "100%", "loss 0.5000", "lr 1.00e-03", "12.3k tokens/s", "<00:00]"):
        assert part in last


def test_a_terminal_without_a_size_gets_lines() -> None:
    terminal = Terminal(0, 0)
    run_steps(Progress(total=2, every=1, stream=terminal.stream), 1, 2)
    assert [line[:8] for line in terminal.shown().splitlines()] == ["step 1/2", "step 2/2"]


def test_the_run_keeps_a_copy_of_notes_and_progress_lines(tmp_path: Path) -> None:
    terminal = Terminal(24, 80)
    for number, stream in enumerate((io.StringIO(), terminal.stream)):
        path = tmp_path / f"log{number}.txt"
        log = RunLog(stream=stream)
        log.note("before the folder exists")
        log.write_to(path)
        progress = Progress(total=2, every=2, log=log)
        progress.note("ROMEO: Ay me! é")
        run_steps(progress, 1, 2)
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[:2] == ["before the folder exists", "ROMEO: Ay me! é"]
        assert lines[2].startswith("step 2/2  loss 1.0000")
        assert len(lines) == 3
    terminal.shown()


def test_a_resumed_run_appends_to_its_log(tmp_path: Path) -> None:
    for text in ("one", "two"):
        RunLog(tmp_path / "log.txt", stream=io.StringIO()).note(text)
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "one\ntwo\n"


def test_a_stream_that_cannot_show_a_character_gets_a_substitute() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    RunLog(stream=stream).note("naïve")
    assert raw.getvalue() == b"na?ve\n"


def test_a_log_file_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    stream = io.StringIO()
    RunLog(tmp_path, stream=stream).note("still printed")  # a folder cannot be opened as a file
    assert stream.getvalue() == "still printed\n"
