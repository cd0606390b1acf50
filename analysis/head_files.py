"""The per-head record of a run: the files under ``attention/`` in its folder.

    attention/train-00000250.safetensors    statistics of the training batches of step 250
    attention/probe-00000250.safetensors    measures of the probe batch after step 250
    attention/patterns.safetensors          weights over a piece of validation text, newest probe

A record is one file with one tensor per measure, named as in the log without its prefix. What a
tensor's shape means follows from its number of axes and the metadata entry ``axes``, a JSON object
from measure to one of

    "head"      (layers, H)     one value per query head
    "kv_head"   (layers, Hkv)   one value per key/value head
    "layer"     (layers,)       one value per layer
    "scalar"    ()              one value for the model

``layers`` in the metadata is the JSON list of the layers measured, in the order of the first axis.
All values are float64. A file is written whole or not at all, one per measured step, so a killed
run loses nothing that was measured and a reader of a run in progress never waits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = "attention"
KINDS = ("train", "probe")
AXES = {"head": 2, "kv_head": 2, "layer": 1, "scalar": 0}  # number of axes of a measure
PATTERNS = "patterns.safetensors"

Array = np.ndarray[Any, np.dtype[np.float64]]


class Measure(NamedTuple):
    """Values of one measure at one step; `axis` is a key of `AXES`."""

    axis: str
    values: Array


class HeadRecord(NamedTuple):
    """Everything that one source measured at one step.

    `kind` is "train" or "probe", `layers` the numbers of the layers measured, in order.
    """

    kind: str
    step: int
    layers: tuple[int, ...]
    measures: dict[str, Measure]


class Patterns(NamedTuple):
    """Attention weights of every head over one piece of text.

    weights: (layers, H, P, P), the row is the token that looks, 0 where it cannot see.
    null_mass: (layers, H, P), what each row gives to "attend to nothing" (0 without that option).
    tokens: the P tokens as text.
    """

    step: int
    layers: tuple[int, ...]
    tokens: list[str]
    weights: np.ndarray[Any, np.dtype[np.float32]]
    null_mass: np.ndarray[Any, np.dtype[np.float32]]


def write_record(run: Path, record: HeadRecord) -> Path:
    """Write one record into the run's folder and return its file."""
    tensors = {name: measure.values for name, measure in record.measures.items()}
    metadata = {
        "step": record.step,
        "layers": list(record.layers),
        "axes": {name: measure.axis for name, measure in record.measures.items()},
    }
    path = record_path(run, record.kind, record.step)
    _write(path, tensors, metadata)
    return path


def record_path(run: Path, kind: str, step: int) -> Path:
    """The file of one record."""
    return run / FOLDER / f"{kind}-{step:08d}.safetensors"


def recorded_steps(run: Path, kind: str) -> list[int]:
    """The steps that have a record of one kind, in order."""
    return [_step_of(path) for path in _record_files(run, kind)]


def read_record(path: Path) -> HeadRecord:
    """Read one record."""
    tensors, metadata = _read(path)
    return HeadRecord(
        kind=path.name.partition("-")[0],
        step=metadata["step"],
        layers=tuple(metadata["layers"]),
        measures={name: Measure(metadata["axes"][name], x) for name, x in tensors.items()},
    )


def read_records(run: Path, kind: str) -> list[HeadRecord]:
    """All records of one kind, by step; an empty list where there are none."""
    return [read_record(path) for path in _record_files(run, kind)]


def drop_records_after(run: Path, step: int) -> int:
    """Delete what was measured after `step`, and return how many records that were.

    Patterns of a later step go with them.

    A run that goes on from the checkpoint of `step` measures those again.
    """
    late = [path for kind in KINDS for path in _record_files(run, kind) if _step_of(path) > step]
    for path in late:
        path.unlink()
    patterns = read_patterns(run)
    if patterns is not None and patterns.step > step:
        (run / FOLDER / PATTERNS).unlink()
    return len(late)


def stack(records: Iterable[HeadRecord], name: str) -> tuple[np.ndarray[Any, Any], Array]:
    """Steps (N,) and values (N, ...) of one measure over the records that have it."""
    found = [(record.step, record.measures[name]) for record in records if name in record.measures]
    steps = np.array([step for step, _ in found], dtype=np.int64)
    values = [measure.values for _, measure in found]
    return steps, np.stack(values) if values else np.empty((0,))


def write_patterns(run: Path, patterns: Patterns) -> Path:
    """Write the newest patterns, in place of earlier ones."""
    path = run / FOLDER / PATTERNS
    metadata = {
        "step": patterns.step,
        "layers": list(patterns.layers),
        "tokens": patterns.tokens,
    }
    _write(path, {"weights": patterns.weights, "null_mass": patterns.null_mass}, metadata)
    return path


def read_patterns(run: Path) -> Patterns | None:
    """Read the newest patterns; None where there are none."""
    path = run / FOLDER / PATTERNS
    if not path.is_file():
        return None
    tensors, metadata = _read(path)
    return Patterns(
        step=metadata["step"],
        layers=tuple(metadata["layers"]),
        tokens=metadata["tokens"],
        weights=tensors["weights"],
        null_mass=tensors["null_mass"],
    )


def _record_files(run: Path, kind: str) -> list[Path]:
    names = re.compile(rf"{kind}-\d{{8,}}\.safetensors")
    return sorted(
        (path for path in (run / FOLDER).glob(f"{kind}-*") if names.fullmatch(path.name)),
        key=_step_of,
    )


def _step_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _write(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    words = {name: json.dumps(value) for name, value in metadata.items()}
    try:
        save_file({name: np.asarray(x, order="C") for name, x in tensors.items()}, temporary, words)
        os.replace(temporary, path)
    except SafetensorError as error:  # what a full disk becomes
        raise OSError(f"{path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        metadata = {name: json.loads(text) for name, text in file.metadata().items()}
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
