"""A run as its folder tells it: what the report and the pictures of heads are drawn from.

Everything but the folder's existence is optional. A run in progress, one made before heads were
measured and one that measured none are read alike, with empty lists where there is nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.event_files import Event, read_events
from analysis.head_files import (
    Array,
    HeadRecord,
    Patterns,
    read_patterns,
    read_records,
    stack,
)
from analysis.metrics_file import FILE_NAME, Row, read_rows

# What makes a head worth looking at first, and the words for it.
INTERESTS = {"alpha_0": "sink", "induction": "induction", "prev_token": "previous token"}
LONGEST_LABEL = 14  # characters of a token on an axis


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run's folder holds.

    Attributes:
        config: the plain settings of ``config.yaml``; empty where there is none.
        status: running, preempted, done, failed or unknown.
        log: the text of ``log.txt``.
        train, probe: records of heads by step, all of the same layers as the newest.
    """

    path: Path
    config: dict[str, Any]
    status: str
    log: str
    rows: list[Row]
    events: list[Event]
    train: list[HeadRecord]
    probe: list[HeadRecord]
    patterns: Patterns | None

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting by its dotted name, or `default` where the run has none."""
        value: Any = self.config
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return default if value is None else value


class Curve(NamedTuple):
    """One measure over steps.

    steps: (N,), increasing. values: (N, ...), the measure's own axes behind the steps.
    baseline: what a head with equal logits would give, (N, ...) by layer, None where unknown.
    layers: the layers measured, in order.
    """

    steps: np.ndarray[Any, Any]
    values: Array
    baseline: Array | None
    layers: tuple[int, ...]


class Head(NamedTuple):
    """A head, and why it is shown where it is: "sink 0.82"; `row` counts the layers measured."""

    row: int
    head: int
    reason: str


def read_run(path: Path) -> RunRecord:
    """Read a run's folder.

    Raises:
        FileNotFoundError: when it holds neither a configuration nor measurements.
        ValueError: naming the file when one is damaged.
    """
    config, metrics = path / "config.yaml", path / FILE_NAME
    if not config.is_file() and not metrics.is_file():
        raise FileNotFoundError(f"{path} is not a run: it has neither config.yaml nor {FILE_NAME}")
    return RunRecord(
        path=path,
        config=_read_config(config) if config.is_file() else {},
        status=(_text(path / "status").split() or ["unknown"])[0],
        log=_text(path / "log.txt"),
        rows=read_rows(metrics) if metrics.is_file() else [],
        events=read_events(path),
        train=_same_layers(read_records(path, "train")),
        probe=_same_layers(read_records(path, "probe")),
        patterns=read_patterns(path),
    )


def curve(records: list[HeadRecord], name: str, baseline: str | None = None) -> Curve | None:
    """Return a measure over steps; None where it was never taken.

    `baseline` names the measure that a uniform head would give. It is left out unless every
    record with the measure has it too.
    """
    steps, values = stack(records, name)
    if not len(steps):
        return None
    uniform_steps, uniform = stack(records, baseline) if baseline else (np.empty(0), np.empty(0))
    known = np.array_equal(steps, uniform_steps)
    return Curve(steps, values, uniform if known else None, records[-1].layers)


def interesting_heads(run: RunRecord) -> list[Head]:
    """Every head with a pattern, best of each kind first, then the second best, and so on.

    The kinds are those of `INTERESTS`, as the newest probe measured them.
    """
    if run.patterns is None:
        return []
    layers, n_head = run.patterns.layers, run.patterns.weights.shape[1]
    last = len(layers) * n_head  # a place behind every ranked head, for what no probe measured
    rank: dict[tuple[int, int], tuple[tuple[int, int], str]] = {
        (row, head): ((last, 0), "") for row in range(len(layers)) for head in range(n_head)
    }
    for kind, (name, word) in enumerate(INTERESTS.items()):
        found = curve(run.probe, name)
        if found is None or found.layers != layers:
            continue
        newest = found.values[-1]
        for place, flat in enumerate(np.argsort(-newest, axis=None, kind="stable")):
            row, head = divmod(int(flat), n_head)
            reason = f"{word} {newest[row, head]:.2f}"
            rank[row, head] = min(rank[row, head], ((place, kind), reason))
    ordered = sorted(rank.items(), key=lambda item: item[1][0])  # stable: else by layer and head
    return [Head(row, head, reason) for (row, head), (_, reason) in ordered]


def thin(steps: np.ndarray[Any, Any], limit: int) -> np.ndarray[Any, Any]:
    """Return at most `limit` indices of increasing steps, the first and the last among them.

    Half of them are spread evenly and half on a logarithmic scale, since most happens early.
    """
    if len(steps) <= limit:
        return np.arange(len(steps))
    first, last = max(1, int(steps[0])), int(steps[-1])
    half = limit // 2
    wanted = np.concatenate(
        [np.linspace(steps[0], last, limit - half), np.geomspace(first, last, half)]
    )
    return np.unique(np.searchsorted(steps, np.floor(wanted)).clip(max=len(steps) - 1))


def head_name(layer: int, head: int) -> str:
    """Return the name of a head for people."""
    return f"layer {layer}, head {head}"


def visible(token: str) -> str:
    """Return a token as a label: spaces, line ends and other unseen characters as signs."""
    signs = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"}
    letters = (signs.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in token)
    return "".join(letters) or "(empty)"


def shortened(token: str) -> str:
    """Return a token as a label on an axis, cut where it is too long."""
    return visible(token if len(token) <= LONGEST_LABEL else token[: LONGEST_LABEL - 1] + "…")


def _same_layers(records: list[HeadRecord]) -> list[HeadRecord]:
    """Leave out records of other layers: the choice may change when a run is resumed."""
    return [record for record in records if record.layers == records[-1].layers]


def _read_config(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        plain = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
