"""What happened to a run's heads: ``events.jsonl`` in its folder, one JSON object per line.

    {"step": 450, "kind": "sink_formed", "layer": 0, "head": 1, "value": 0.412, "limit": 0.3, ...}

An event is dated at the step where it began, which may lie before the step that made it certain.
Numbers that are not finite are words, as in ``metrics.jsonl``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from analysis.metrics_file import encode_number

FILE_NAME = "events.jsonl"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a user wants to know about one head, or one layer (head None).

    Attributes:
        step: when it began.
        seen: the step that made it certain.
        kind: "sink_formed", "entropy_collapse", "entropy_fall", "logit_blowup" or "dead_head".
        value, limit: what was measured when it began, and what it passed.
        text: the same in one line for people.
    """

    step: int
    seen: int
    kind: str
    layer: int
    head: int | None
    value: float
    limit: float
    text: str

    @property
    def title(self) -> str:
        """The kind in words."""
        return self.kind.replace("_", " ")


def encode_event(event: Event) -> str:
    """One line of the file, without its end."""
    numbers = {name: encode_number(name, getattr(event, name)) for name in ("value", "limit")}
    return json.dumps(asdict(event) | numbers, allow_nan=False)


def append_events(run: Path, events: list[Event]) -> None:
    """Add events to the run's file."""
    lines = "".join(encode_event(event) + "\n" for event in events)
    with open(run / FILE_NAME, "a", encoding="utf-8") as file:
        file.write(lines)


def read_events(run: Path) -> list[Event]:
    """The run's events in the order they were seen; an empty list where there are none.

    A line cut short by a kill is left out.
    """
    path = run / FILE_NAME
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [_decode(line) for line in lines[:-1]]  # the last has no line end


def drop_events_after(run: Path, step: int) -> None:
    """Keep the events seen up to `step` only: a resumed run sees the later ones again."""
    kept = [event for event in read_events(run) if event.seen <= step]
    path = run / FILE_NAME
    if path.is_file():
        path.write_text("", encoding="utf-8")
        append_events(run, kept)


def _decode(line: str) -> Event:
    fields = json.loads(line)
    return Event(**fields | {name: float(fields[name]) for name in ("value", "limit")})
