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
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from model.checkpoint import (
    Checkpoint,
    is_checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_valid,
    resolve_run,
    set_aside_after,
)
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
    """Record how the run stands: running, preempted (resume it), done or failed."""
    write_atomically(run / "status", f"{status}\n")


def read_status(run: Path) -> str:
    """Return the recorded status, or ``unknown``."""
    path = run / "status"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else "unknown"


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def find_resumed_run(config: Config) -> tuple[Path | None, str]:
    """Return the run that ``resume`` means, or None for a fresh start, and why in one line.

    ``auto`` continues the newest unfinished run of the same name that has a checkpoint; `latest`
    and a path must name a run that has one.

    Raises:
        UserError: when `latest` or a path names nothing that can be resumed.
    """
    if config.resume is None:
        return None, "fresh start"
    if config.resume == "auto":
        candidates = sorted(Path(config.runs_dir).resolve().glob("*/config.yaml"), reverse=True)
        for path in candidates:
            run = path.parent
            if read_status(run) == "done" or read_config(run).get("name") != config.name:
                continue
            if list_checkpoints(run):
                return run, f"resume=auto: continuing {run} ({read_status(run)})"
        return (
            None,
            f"resume=auto: no unfinished run named {config.name} has a checkpoint, so fresh",
        )
    name = Path(config.runs_dir) / "latest" if config.resume == "latest" else Path(config.resume)
    try:
        run = resolve_run(name)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"resume={config.resume}: {error}") from error
    if not list_checkpoints(run):
        raise UserError(
            f"resume={config.resume}: {run} has no checkpoint; resume=auto would start fresh"
        )
    return run, f"resuming {run}"


def resumed_config(run: Path, overrides: list[str]) -> tuple[Config, list[str]]:
    """Return the run's own configuration with command-line overrides on top, and their list.

    Args:
        run: the run being resumed.
        overrides: ``key=value`` items of the command line.

    Raises:
        UserError: for a group choice such as ``model=small`` or a change of what the checkpoint
            is made of (model, data, tokenizer, seed).
    """
    saved = read_config(run)
    plain = OmegaConf.create(saved)
    applied = []
    for item in overrides:
        key, _, value = item.lstrip("+").partition("=")
        if key in ("resume", "dry_run", "runs_dir"):
            continue
        if isinstance(saved.get(key), dict) or key == "experiment":
            raise UserError(
                f"{item}: a resumed run keeps its own configuration; override single values such "
                f"as train.max_steps=5000, or start a new run with init_from={run}"
            )
        root = key.partition(".")[0]
        if root in ("model", "data", "tokenizer", "seed", "name", "init_from"):
            raise UserError(
                f"{item}: {key} is part of what the checkpoint is and cannot change on resume; "
                f"start a new run with init_from={run}"
            )
        plain.merge_with_dotlist([f"{key}={value}"])
        applied.append(item)
    return from_dict({**as_plain(plain), "resume": str(run), "dry_run": False}), applied


def open_resumed_run(
    name: str | Path, run: Path, tokenizer_sha256: str, log: Callable[[str], None]
) -> Checkpoint:
    """Load the checkpoint that a run goes on from: the one `name` is, else the newest valid one.

    Raises:
        ValueError: when every checkpoint is damaged, or the tokenizer is not the run's own.
    """
    if is_checkpoint(Path(name)):
        checkpoint: Checkpoint | None = load_checkpoint(Path(name))
    else:
        checkpoint = newest_valid(run, log)
    if checkpoint is None:
        raise UserError(f"resume: every checkpoint of {run} is damaged")
    if checkpoint.state["tokenizer_sha256"] != tokenizer_sha256:
        raise UserError(
            f"resume: {run} was trained with another tokenizer than its data now gives; has the "
            "text changed?"
        )
    return checkpoint


def leave_later_checkpoints(run: Path, step: int, log: Callable[[str], None]) -> None:
    """Set aside checkpoints newer than the one resumed from: another future begins here."""
    for path in set_aside_after(run, step):
        log(f"set aside {path.name}, which is newer than the step resumed from")
