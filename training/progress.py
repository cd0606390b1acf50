"""What a person sees of a run while it trains, and the copy of it in ``log.txt``.

On a terminal a bar shows where the run stands; elsewhere (a file, a pipe, a cluster's log) one
line every N steps says the same. Either way the run's ``log.txt`` receives every note and those
lines, so the folder tells the whole story afterwards.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

BAR = "{n_fmt}/{total_fmt} |{bar}| {percentage:3.0f}% [{elapsed}<{remaining}] {desc}"


class RunLog:
    """Prints lines and keeps a copy of them in a file.

    Args:
        path: the file to append to; None keeps the lines until `write_to` names one.
        stream: where lines are printed; None means standard output.
    """

    def __init__(self, path: Path | None = None, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self._path = path
        self._early: list[str] = []

    def write_to(self, path: Path) -> None:
        """Keep the copy in `path` from now on, earlier lines included."""
        self._path = path
        for text in self._early:
            self.record(text)

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one, and keep a copy."""
        encoding = self.stream.encoding or "utf-8"
        printable = text.encode(encoding, errors="replace").decode(encoding)
        tqdm.write(printable, file=self.stream)
        self.stream.flush()
        self.record(text)

    def record(self, text: str) -> None:
        """Keep a line without printing it."""
        if self._path is None:
            self._early.append(text)
            return
        # A full disk must not end a run: the line was printed, its copy is lost.
        with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
            file.write(text + "\n")


class Progress:
    """Shows how far a run is: loss, learning rate, speed and time left.

    Args:
        total: the step the run ends at.
        start: steps already taken when a resumed run goes on.
        every: steps between two lines, in ``log.txt`` and where there is no terminal.
        stream: where to show it; None means the log's own stream.
        log: receives the lines; None makes one that prints only.
    """

    def __init__(
        self,
        total: int,
        start: int = 0,
        every: int = 100,
        stream: TextIO | None = None,
        log: RunLog | None = None,
    ) -> None:
        self._total, self._start, self._every = total, start, every
        self._log = log or RunLog(stream=stream)
        stream = stream or self._log.stream
        self._began = time.monotonic()
        self._bar = None
        if _is_terminal(stream):
            # smoothing=0: time left from the mean of the whole run, evaluations included.
            self._bar = tqdm(
                total=total,
                initial=start,
                file=stream,
                bar_format=BAR,
                dynamic_ncols=True,
                smoothing=0,
            )

    def update(self, step: int, loss: float, lr: float, tokens_per_s: float | None = None) -> None:
        """Show the state after `step` optimizer steps; a speed of None is not known yet."""
        values = f"loss {loss:.4f}  lr {lr:.2e}"
        if tokens_per_s is not None:
            values += f"  {_short(tokens_per_s)} tokens/s"
        if self._bar is not None:
            self._bar.set_description_str(values, refresh=False)
            self._bar.update(step - self._bar.n)
        if step % self._every == 0 or step == self._total:
            width = len(str(self._total))
            line = f"step {step:{width}}/{self._total}  {values}  {self._time_left(step)} left"
            if self._bar is None:
                self._log.note(line)
            else:
                self._log.record(line)

    def note(self, text: str) -> None:
        """Print a line without breaking the bar."""
        self._log.note(text)

    def close(self) -> None:
        """Leave the bar as it stands and give the terminal back."""
        if self._bar is not None:
            self._bar.close()

    def _time_left(self, step: int) -> str:
        seconds_per_step = (time.monotonic() - self._began) / max(1, step - self._start)
        return tqdm.format_interval(seconds_per_step * (self._total - step))


def _is_terminal(stream: TextIO) -> bool:
    """Whether a bar can be drawn; some pseudo-terminals have no height, and tqdm draws nothing."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).lines > 0


def _short(number: float) -> str:
    """Write a count with three digits and a unit: 950, 12.3k, 1.05M."""
    return tqdm.format_sizeof(number) if number >= 1000 else f"{number:.0f}"
