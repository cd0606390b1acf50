"""What looking at the heads costs, measured against the steps of the same run without a look."""

from __future__ import annotations

import statistics
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NEIGHBOURS = 5  # ordinary steps on either side that a step is compared with


class Overhead:
    """Times every step, and the probes apart.

    A step with statistics is compared with the median of the ordinary steps around it, so slow
    drifts of the machine cancel. The first step of a process warms up, with or without statistics,
    and is left out. Where compiling is on, the first step of the other kind compiles a second graph
    for telemetry's sake: it counts as well.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = 0.0
        self._has_statistics = False
        self._steps: list[tuple[bool, float]] = []  # with statistics or not, seconds
        self._probe_seconds: list[float] = []

    def begin_step(self, has_statistics: bool) -> None:
        """Start the clock of a step."""
        self._has_statistics, self._began = has_statistics, self._clock()

    def end_step(self) -> None:
        """Stop it, when everything about the step has been written."""
        self._steps.append((self._has_statistics, self._clock() - self._began))

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Time the block as a probe."""
        began = self._clock()
        try:
            yield
        finally:
            self._probe_seconds.append(self._clock() - began)

    def describe(self, training_seconds: float) -> str:
        """Return the cost in one line, as a share of the time of all steps."""
        probes = sum(self._probe_seconds)
        looked = f"{_count(sum(is_due for is_due, _ in self._steps), 'step')} with statistics"
        probed = f"{_count(len(self._probe_seconds), 'probe')} {probes:.1f} s"
        extra = self._extra_seconds()
        if extra is None or training_seconds <= 0:
            return f"telemetry: {looked}, too few without them to tell the cost; {probed}"
        share = (extra + probes) / training_seconds
        return (
            f"telemetry: {share:.1%} of training time ({looked} cost {extra:.1f} s more than "
            f"their neighbours, {probed})"
        )

    def _extra_seconds(self) -> float | None:
        """What steps with statistics took more than ordinary ones; None without any of those."""
        later = list(enumerate(self._steps))[1:]
        ordinary = [(number, seconds) for number, (is_due, seconds) in later if not is_due]
        if not ordinary:
            return None
        counted = [(number, seconds) for number, (is_due, seconds) in later if is_due]
        if self._steps[0][0]:
            counted.append(ordinary[0])
        numbers = [number for number, _ in ordinary]
        extra = 0.0
        for number, seconds in counted:
            at = bisect(numbers, number)
            near = ordinary[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]
            extra += seconds - statistics.median(s for _, s in near)
        return extra


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
