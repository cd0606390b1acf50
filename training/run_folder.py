"""A run's folder: its name, its configuration, its status, and which run a resume means.

runs/latest                          the path of the newest run, one line
runs/2026-01-31_12-00-00-NAME/
    config.yaml      every setting, resolved       metrics.jsonl   what was measured
    tokenizer.json   the run's own tokenizer       log.txt         what was said
    checkpoints/     see model/checkpoint.py       plots/          PNG pictures
    status           running | preempted | done | failed
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data.prepare import Prepared
from model.checkpoint import (
    Checkpoint,
    is_checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_valid,
    resolve_run,
    set_aside_after,
)
from model.load import check_tokenizer
from training.config import Config, UserError, as_plain, from_dict, to_dict


def create_run_folder(runs_dir: str | Path, name: str) -> Path:
    """Make a new folder ``<time>-<name>`` (with a suffix if it exists) and return its full path."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    base = Path(runs_dir).resolve() / f"{stamp}-{name}"
    base.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 1000):
        folder = base if attempt == 1 else base.with_name(f"{base.name}-{attempt}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{base} and 998 folders after it exist: choose another name=")


def point_latest(run: Path) -> None:
    """Let ``latest`` beside the run name it."""
    write_atomically(run.parent / "latest", f"{run}\n")


def write_config(run: Path, config: Config) -> None:
    """Write every resolved setting as ``config.yaml``."""
    write_atomically(run / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(to_dict(config))))


def read_config(run: Path) -> dict[str, Any]:
    """Return the plain settings a run was started with.

    Raises:
        FileNotFoundError: when the folder holds no ``config.yaml``.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{run} is not a run folder: it has no config.yaml")
    return as_plain(OmegaConf.load(path))


def write_status(run: Path, status: str) -> None:
    """Record how the run stands: running, preempted (resume it), done or failed.

    The second word says where: while a run is going, its machine and process.
    """
    place = f" {socket.gethostname()}:{os.getpid()}" if status == "running" else ""
    write_atomically(run / "status", f"{status}{place}\n")


def read_status(run: Path) -> str:
    """Return the recorded status, or ``unknown``."""
    return _status_words(run)[0]


def is_being_trained(run: Path) -> bool:
    """Whether a process of this machine is training the run now."""
    status, _, place = " ".join(_status_words(run)).partition(" ")
    host, _, number = place.rpartition(":")
    if status != "running" or host != socket.gethostname() or int(number) == os.getpid():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists and is another user's
        pass
    return True


def _status_words(run: Path) -> list[str]:
    path = run / "status"
    return (path.read_text(encoding="utf-8").split() if path.is_file() else []) or ["unknown"]


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


# What a checkpoint is made of: a resumed run has the same, or it is another run.
FIXED = ("model", "data", "tokenizer", "seed", "name")


def find_resumed_run(config: Config) -> tuple[Path | None, str]:
    """Return the run that ``resume`` means, or None for a fresh start, and why in one line.

    ``auto`` continues the newest unfinished run of the same name, model, data and seed that has a
    checkpoint and that nobody is training; `latest` and a path must name a run that can go on.

    Raises:
        UserError: when `latest` or a path names nothing that can be resumed.
    """
    if config.resume is None:
        return None, "fresh start"
    if config.resume != "auto" and config.init_from is not None:
        raise UserError(
            f"resume={config.resume} continues a run and init_from={config.init_from} starts a new "
            "one from weights: give one of them"
        )
    if config.resume == "auto":
        for path in sorted(Path(config.runs_dir).resolve().glob("*/config.yaml"), reverse=True):
            run = path.parent
            if _can_go_on(run, config):
                return run, f"resume=auto: continuing {run} ({read_status(run)})"
        return None, f"resume=auto: no unfinished run like this one, {config.name}, so fresh"
    name = Path(config.runs_dir) / "latest" if config.resume == "latest" else Path(config.resume)
    try:
        run = resolve_run(name).absolute()
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"resume={config.resume}: {error}") from error
    if not list_checkpoints(run):
        raise UserError(
            f"resume={config.resume}: {run} has no checkpoint; resume=auto would start fresh"
        )
    if is_being_trained(run):
        raise UserError(f"resume={config.resume}: {run} is being trained by another process")
    return run, f"resuming {run}"


def _can_go_on(run: Path, config: Config) -> bool:
    """Whether ``resume=auto`` may continue this run."""
    if read_status(run) == "done" or is_being_trained(run) or not list_checkpoints(run):
        return False
    try:
        saved = read_config(run)
    except Exception:  # a stranger, or damaged in one of YAML's many ways: not ours to continue
        return False
    wanted = to_dict(config)
    return not any(_differs(part, saved, wanted) for part in FIXED)


def _differs(key: str, saved: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a setting, or a group of them, is not the same in both configurations.

    A vocabulary size of 0 asks for the tokenizer's, whatever that was.
    """
    old, new = (OmegaConf.select(OmegaConf.create(plain), key) for plain in (saved, wanted))
    if key == "model":
        old, new = dict(old), dict(new)
        if 0 in (old["vocab_size"], new["vocab_size"]):
            old["vocab_size"] = new["vocab_size"] = 0
    return bool(old != new)


def resumed_config(run: Path, composed: Config, overrides: list[str]) -> tuple[Config, list[str]]:
    """Return the run's own configuration with command-line overrides on top, and what changed.

    An override that asks for what the run has already changes nothing, so a job can be started
    again with the command line that began it.

    Args:
        run: the run being resumed.
        composed: what the command line alone would have configured.
        overrides: its ``key=value`` items.

    Raises:
        UserError: for a change of what the checkpoint is made of (`FIXED`).
    """
    saved, wanted = read_config(run), to_dict(composed)
    plain = OmegaConf.create(saved)
    changed = []
    for item in overrides:
        key = item.lstrip("+").partition("=")[0]
        root = key.partition(".")[0]
        if root in ("resume", "dry_run", "runs_dir", "init_from"):
            continue
        fixed = [part for part in FIXED if root == "experiment"] or [key]
        for part in fixed:
            if part.partition(".")[0] in FIXED and _differs(part, saved, wanted):
                raise UserError(
                    f"{item}: {part} is part of what the checkpoint is and cannot change on "
                    f"resume; start a new run with init_from={run}"
                )
        if root not in (*FIXED, "experiment") and _differs(key, as_plain(plain), wanted):
            OmegaConf.update(plain, key, OmegaConf.select(OmegaConf.create(wanted), key))
            changed.append(item)
    return from_dict({**as_plain(plain), "resume": str(run), "dry_run": False}), changed


def find_initial_weights(config: Config) -> Path:
    """Return the run, or the checkpoint in one, that ``init_from`` names: `latest` or a path.

    Raises:
        UserError: when there is none.
    """
    name = str(config.init_from)
    path = Path(config.runs_dir) / "latest" if name == "latest" else Path(name)
    try:
        return (path if is_checkpoint(path) else resolve_run(path)).absolute()
    except FileNotFoundError as error:
        raise UserError(f"init_from={name}: {error}") from error


def open_resumed_run(
    name: str | Path, run: Path, text: Prepared, log: Callable[[str], None]
) -> Checkpoint:
    """Load the checkpoint that a run goes on from: the one `name` is, else the newest valid one.

    Raises:
        ValueError: when every checkpoint is damaged, or the text or its tokenizer has changed.
    """
    if is_checkpoint(Path(name)):
        checkpoint: Checkpoint | None = load_checkpoint(Path(name))
    else:
        checkpoint = newest_valid(run, log)
    if checkpoint is None:
        raise UserError(f"resume: every checkpoint of {run} is damaged")
    check_tokenizer(checkpoint, text.tokenizer.sha256)
    if checkpoint.state.get("text") not in (None, text_hashes(text)):
        raise UserError(
            f"resume: the text has changed since {checkpoint.path} was saved; train on it with "
            f"init_from={run}"
        )
    return checkpoint


def text_hashes(text: Prepared) -> list[str]:
    """Return the sha256 of everything the text was read from, wherever it lies."""
    return sorted(text.train.provenance.source.values())


def leave_later_checkpoints(run: Path, step: int, log: Callable[[str], None]) -> None:
    """Set aside checkpoints newer than the one resumed from: another future begins here."""
    for path in set_aside_after(run, step):
        log(f"set aside {path.name}, which is newer than the step resumed from")
