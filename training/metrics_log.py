"""Appending to a run's ``metrics.jsonl`` so that kills, resumes and full disks leave it whole.

The format is described in `analysis/metrics_file.py`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from analysis.metrics_file import FILE_NAME, decode_row, encode_row


class MetricsLog:
    """The open metrics file of one run.

    Each row is handed to the operating system in one piece before `log` returns, so killing the
    process loses nothing that was logged. When the disk is full, rows wait in memory for the next
    call and training goes on.

    Args:
        run: the run's folder.
        note: where a warning about a failing disk goes.
    """

    def __init__(self, run: Path, note: Callable[[str], None] = print) -> None:
        self.path = run / FILE_NAME
        self._note = note
        self._waiting = b""  # rows that the disk has refused so far
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        self._size = self._mend_last_line()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one row; see `encode_row` for what counts as a value."""
        first_refusal = not self._waiting
        self._waiting += encode_row(step, values)
        problem = self._write_waiting()
        if problem and first_refusal:
            self._note(f"{self.path} cannot be written ({problem}): rows are kept until it can")

    def truncate_after(self, step: int) -> int:
        """Cut off the rows measured after `step` and return how many there were.

        A run that goes on from the checkpoint of `step` measures those again. What stays is not
        touched, byte for byte.

        Raises:
            ValueError: when a line that would stay is damaged.
        """
        lines = self._read().splitlines(keepends=True)
        kept = 0
        while kept < len(lines) and decode_row(lines[kept])["step"] <= step:
            kept += 1
        self._cut(sum(len(line) for line in lines[:kept]))
        return len(lines) - kept

    def close(self) -> None:
        """Close the file, after a last try to write what still waits."""
        if not self._file.closed:
            self._write_waiting()
            self._file.close()

    def _write_waiting(self) -> str | None:
        """Write all rows that wait, or none of them; return what went wrong."""
        if not self._waiting:
            return None
        problem = "no space left"  # what a write that stops short means
        try:
            if self._file.write(self._waiting) == len(self._waiting):
                self._size += len(self._waiting)
                self._waiting = b""
                return None
        except OSError as error:
            problem = str(error)
        self._cut(self._size)  # no half line may stay: the next row needs a line of its own
        return problem

    def _mend_last_line(self) -> int:
        """Drop the half line that a killed process left, and return the file's size."""
        content = self._read()
        whole_lines, newline, rest = content.rpartition(b"\n")
        if not rest:
            return len(content)
        try:
            decode_row(rest)
        except ValueError:
            return self._cut(len(whole_lines) + len(newline))
        self._file.write(b"\n")  # the row is whole and only its line end is missing
        return len(content) + 1

    def _read(self) -> bytes:
        self._file.seek(0)
        return self._file.read()

    def _cut(self, size: int) -> int:
        self._size = self._file.truncate(size)
        return size
