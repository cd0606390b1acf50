"""What happens to heads, found in the records of a run in the order they were made.

    kind               of       source   what is seen
    sink_formed        a head   probe    alpha_0 above its limit at three probes in a row
    entropy_collapse   a head   train    entropy_norm below its limit
    entropy_fall       a layer  train    mean entropy_norm down to a share of what it was
    logit_blowup       a head   both     max_logit above its limit, or not finite
    dead_head          a head   probe    `write` below its limit at three probes in a row

Each is told once while it lasts. What takes three records in a row to be certain is over at the
first record without it; what one record shows is over after three in a row without it. So a
value that wavers about its limit does not fill the log.

The same records give the same events: replaying the files of a run rebuilds the detector's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from analysis.event_files import Event
from analysis.head_files import HeadRecord

IN_A_ROW = 3  # records, to be certain of a lasting state or of its end
FALL_STEPS = 100  # a fall takes at most this many steps


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """What counts as an event.

    Attributes:
        sink: alpha_0 above which a head has a sink; the ε of Gu et al. 2024.
        sink_ratio: and above this many times the alpha_0 of a uniform head, our convention:
            over few rows a head that looks everywhere gives its first token much as well.
        collapse: entropy_norm below which a head has collapsed. There is no published limit, and a
            previous-token head has little entropy without being ill.
        fall: a layer's mean entropy_norm has fallen when it is at most this share of what it was
            within `FALL_STEPS` before. Our convention for the sharp falls that Zhai et al. 2023
            see together with instability.
        logit: max_logit above which logits have blown up: Wortsman et al. 2023 find training hurt
            from 1e3 on and every run above 1e4 diverged.
        dead: share of the stream's norm below which what a head writes is nothing; our convention.
    """

    sink: float = 0.3
    sink_ratio: float = 3.0
    collapse: float = 0.05
    fall: float = 0.5
    logit: float = 1000.0
    dead: float = 1e-3


class EventDetector:
    """Tells events from records. Steps of one source increase from record to record.

    A measure or layer that a record lacks is neither seen nor gone. A value that is not finite
    passes no limit, except as a logit.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._states: dict[tuple[str, int, int], _State] = {}  # by kind, layer and head
        self._falls: dict[int, _Fall] = {}  # by layer

    def see(self, record: HeadRecord) -> list[Event]:
        """The events that `record` makes certain, by kind, layer and head."""
        limits = self._thresholds
        if record.kind == "probe":
            return [
                *self._sinks(record),
                *self._heads(record, "logit_blowup", "max_logit", limits.logit, _is_blown_up),
                *self._heads(record, "dead_head", "write", limits.dead, _is_below),
            ]
        return [
            *self._heads(record, "entropy_collapse", "entropy_norm", limits.collapse, _is_below),
            *self._layers_that_fell(record),
            *self._heads(record, "logit_blowup", "max_logit", limits.logit, _is_blown_up),
        ]

    def _sinks(self, record: HeadRecord) -> list[Event]:
        limits: list[float] | float = self._thresholds.sink
        uniform = record.measures.get("uniform/alpha_0")
        if uniform is not None:
            ratio = self._thresholds.sink_ratio
            limits = [max(self._thresholds.sink, ratio * float(x)) for x in uniform.values]
        return self._heads(record, "sink_formed", "alpha_0", limits, _is_above)

    def _heads(
        self,
        record: HeadRecord,
        kind: str,
        name: str,
        limits: list[float] | float,
        passes: Callable[[float, float], bool],
    ) -> list[Event]:
        """Events of single heads; `limits` holds for all layers or has one entry for each."""
        measure = record.measures.get(name)
        if measure is None:
            return []
        events = []
        for i, layer in enumerate(record.layers):
            limit = limits[i] if isinstance(limits, list) else limits
            for head, value in enumerate(measure.values[i].tolist()):
                state = self._states.setdefault((kind, layer, head), _State(kind))
                if not state.is_new(record.step, value, passes(value, limit)):
                    continue
                events.append(
                    Event(
                        step=state.step,
                        seen=record.step,
                        kind=kind,
                        layer=layer,
                        head=head,
                        value=state.value,
                        limit=limit,
                        text=_text(kind, state.step, layer, head, state.value, limit),
                    )
                )
        return events

    def _layers_that_fell(self, record: HeadRecord) -> list[Event]:
        measure = record.measures.get("entropy_norm")
        if measure is None:
            return []
        events = []
        share = self._thresholds.fall
        for layer, heads in zip(record.layers, measure.values, strict=True):
            fall = self._falls.setdefault(layer, _Fall(self._thresholds))
            value = math.fsum(heads) / len(heads) if np.isfinite(heads).all() else math.nan
            if not fall.is_new(record.step, value):
                continue
            events.append(
                Event(
                    step=record.step,
                    seen=record.step,
                    kind="entropy_fall",
                    layer=layer,
                    head=None,
                    value=value,
                    limit=share * fall.peak,
                    text=f"step {record.step:,}: entropy fell in layer {layer}: mean entropy_norm "
                    f"{value:.3f}, at most {share:g} times the {fall.peak:.3f} of step "
                    f"{fall.peak_step:,}",
                )
            )
        return events


class _State:
    """Whether something holds of a head, and the step and value at which it began."""

    def __init__(self, kind: str) -> None:
        needs_several = kind in ("sink_formed", "dead_head")
        self._to_begin, self._to_end = (IN_A_ROW, 1) if needs_several else (1, IN_A_ROW)
        self._holds = 0  # records in a row with it
        self._lacks = 0  # and without
        self._is_told = False
        self.step, self.value = -1, math.nan

    def is_new(self, step: int, value: float, holds: bool) -> bool:
        """Take in a record, and say whether it makes something certain that was not told yet."""
        if not holds:
            self._holds, self._lacks = 0, self._lacks + 1
            self._is_told = self._is_told and self._lacks < self._to_end
            return False
        if self._holds == 0:
            self.step, self.value = step, value
        self._holds, self._lacks = self._holds + 1, 0
        if self._is_told or self._holds < self._to_begin:
            return False
        self._is_told = True
        return True


class _Fall:
    """Whether a layer's entropy is falling.

    A fall lasts while the mean is at most `fall` times the peak of the last `FALL_STEPS`. The next
    one is measured from where this one ended. A layer below `collapse` has nowhere left to fall.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._recent: list[tuple[int, float]] = []  # steps and values that a fall can start from
        self._is_falling = False
        self.peak, self.peak_step = math.nan, -1

    def is_new(self, step: int, value: float) -> bool:
        """Take in a layer's mean, and say whether a fall has begun."""
        if not math.isfinite(value):
            return False
        self._recent = [(s, v) for s, v in self._recent if s >= step - FALL_STEPS]
        was_falling, self._is_falling = self._is_falling, False
        if self._recent:
            self.peak, self.peak_step = max((v, s) for s, v in self._recent)
            has_room = self.peak > max(value, self._thresholds.collapse)
            self._is_falling = has_room and value <= self._thresholds.fall * self.peak
        if was_falling and not self._is_falling:
            self._recent = []
        self._recent.append((step, value))
        return self._is_falling and not was_falling


def _is_above(value: float, limit: float) -> bool:
    return math.isfinite(value) and value > limit


def _is_below(value: float, limit: float) -> bool:
    return math.isfinite(value) and value < limit


def _is_blown_up(value: float, limit: float) -> bool:
    return not math.isfinite(value) or value > limit


def _text(kind: str, step: int, layer: int, head: int, value: float, limit: float) -> str:
    """An event of a head in one line for people."""
    where = f"layer {layer}, head {head}"
    what = {
        "sink_formed": f"a sink formed in {where}: alpha_0 {value:.3f}, above {limit:.2f} for "
        "three probes",
        "entropy_collapse": f"entropy collapsed in {where}: entropy_norm {value:.3f}, below "
        f"{limit:g}",
        "logit_blowup": f"logits blew up in {where}: max_logit {value:,.0f}, "
        + (f"above {limit:,g}" if math.isfinite(value) else "not finite"),
        "dead_head": f"{where} is dead: it writes {value:.2g} of the stream, below {limit:g} for "
        "three probes",
    }
    return f"step {step:,}: {what[kind]}"
