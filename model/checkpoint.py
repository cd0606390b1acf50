"""Checkpoints: named tensors and plain JSON in a folder that is either whole or not there.

A run keeps its checkpoints like this::

    RUN/checkpoints/step-00002000/model.safetensors    one file per group of tensors
                                  optimizer.safetensors
                                  state.json           everything that is not a tensor
                                  manifest.json        size and sha256 of each file, written last
    RUN/checkpoints/best                               one line: the name of the best step folder

A folder is built under a temporary name, each file is flushed to the disk, and only then is the
folder renamed. So a kill, a full disk or a power cut in the middle of a save costs at most the
checkpoint being written. Damage that happens later is found by the hashes, and `newest_valid`
falls back to the checkpoint before. Nothing is pickled, so loading a checkpoint never runs code.

This file knows nothing of optimizers or training: it stores the groups of tensors it is given.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT_VERSION = 1

_STATE = "state.json"
_MANIFEST = "manifest.json"
_BEST = "best"
_TENSOR_SUFFIX = ".safetensors"
_TIED = "tied"  # key in a tensor file's metadata: which names are second names of stored tensors
_BUILDING = ".building-"  # prefix of a folder that is still being written
_REPLACED = ".replaced"  # suffix of the old folder while a new one of the same step moves in
_SET_ASIDE = ".set-aside"  # suffix of a checkpoint that a resumed run has left behind
_STEP_FOLDER = re.compile(r"step-(\d+)(?:\.replaced)?")


class CheckpointError(ValueError):
    """A checkpoint that could not be written, or that is damaged; the message is one line."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in memory: `tensors` maps group -> name -> tensor (on the CPU)."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


# Saving


def save_checkpoint(
    run: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> Path:
    """Write `RUN/checkpoints/step-XXXXXXXX` and return its path.

    `tensors` maps a group ("model" is one of them) to named tensors of any device, type and
    layout; names that share one tensor, like tied embeddings, are stored once and share it again
    after loading. `state` is plain JSON data. A checkpoint of the same step is replaced.

    Raises TypeError if `state` is not plain data, and CheckpointError if the disk refuses; all
    earlier checkpoints are then as they were.
    """
    folder = Path(run) / "checkpoints"
    final = folder / f"step-{step:08d}"
    building = folder / f"{_BUILDING}{final.name}"
    # Converted first: state that is not plain data is a bug of the caller, not of the disk.
    state_text = json.dumps({"step": step, "state": state})
    try:
        _build(building, tensors, state_text)
        _move_into_place(building, final)
    except Exception as error:  # full disks show up as errors of many classes
        shutil.rmtree(building, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint of step {step} was not saved in {folder}: {_reason(error)} "
            "(earlier checkpoints are untouched)"
        ) from error
    return final


def _build(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state_text: str) -> None:
    """Write every file of a checkpoint to `folder` and flush it to the disk."""
    shutil.rmtree(folder, ignore_errors=True)  # left by a save that was killed
    folder.mkdir(parents=True)
    _write_text(folder / _STATE, state_text)
    for group, named in tensors.items():
        path = folder / f"{group}{_TENSOR_SUFFIX}"
        stored, tied = _storable(named)
        save_file(stored, path, metadata={_TIED: json.dumps(tied)})
        # safetensors makes its files 0600; the state file has what the umask allows.
        shutil.copymode(folder / _STATE, path)
        _sync(path)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    _write_text(
        folder / _MANIFEST, json.dumps({"version": FORMAT_VERSION, "files": files}, indent=2)
    )
    _sync(folder)


def _storable(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split named tensors into ones safetensors accepts and second names of the same tensor.

    Returns (name -> contiguous CPU tensor with memory of its own, second name -> first name).
    """
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_name: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in named.items():
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and identity in first_name:
            tied[name] = first_name[identity]
            continue
        first_name[identity] = name
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != plain.nbytes:
            plain = plain.clone()  # a view of something larger, or of a tensor stored already
        storages.add(plain.untyped_storage().data_ptr())
        stored[name] = plain
    return stored, tied


def _move_into_place(building: Path, final: Path) -> None:
    """Rename the finished folder; at every moment one whole checkpoint of the step is findable."""
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        # A folder cannot be renamed over another. The old one keeps a second, still readable
        # name until the new one is there.
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    building.rename(final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    """One line that says what went wrong."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


# Loading


def load_checkpoint(path: Path, *, groups: Collection[str] | None = None) -> Checkpoint:
    """Read and verify one checkpoint folder; `groups` limits which tensor files are read.

    Raises CheckpointError naming the folder, the file and what is wrong with it.
    """
    path = Path(path)
    try:
        return _load(path, groups)
    except CheckpointError:
        raise
    except Exception as error:  # unreadable files raise errors of many classes
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error


def _load(path: Path, groups: Collection[str] | None) -> Checkpoint:
    files = _read_manifest(path)
    stored = {name.removesuffix(_TENSOR_SUFFIX) for name in files if name.endswith(_TENSOR_SUFFIX)}
    wanted = stored if groups is None else set(groups)
    if missing := wanted - stored:
        raise CheckpointError(f"{path} has no {_listed(missing)}: it holds only {_listed(stored)}")
    for name in [_STATE, *(f"{group}{_TENSOR_SUFFIX}" for group in sorted(wanted))]:
        _verify(path, name, files)
    content = json.loads((path / _STATE).read_text(encoding="utf-8"))
    tensors = {group: _read_tensors(path / f"{group}{_TENSOR_SUFFIX}") for group in sorted(wanted)}
    return Checkpoint(path, content["step"], tensors, content["state"])


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Return file name -> size and hash."""
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    if not (path / _MANIFEST).is_file():
        raise CheckpointError(f"{path} has no {_MANIFEST}: it is not a complete checkpoint")
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        version, files = manifest["version"], dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / _MANIFEST} is damaged: {_reason(error)}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format {version!r}, this program reads {FORMAT_VERSION}"
        )
    for name in files:
        if name != _STATE and not name.endswith(_TENSOR_SUFFIX):
            raise CheckpointError(f"{path / _MANIFEST} is damaged: it lists {name!r}")
    return files


def _verify(path: Path, name: str, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare one file with its line in the manifest."""
    if name not in files:
        raise CheckpointError(f"{path / _MANIFEST} is damaged: it does not list {name}")
    if not (path / name).is_file():
        raise CheckpointError(f"{path} lacks {name}")
    size, expected = (path / name).stat().st_size, files[name]["bytes"]
    if size != expected:
        raise CheckpointError(f"{path / name} is damaged: {size} bytes instead of {expected}")
    if _sha256(path / name) != files[name]["sha256"]:
        raise CheckpointError(f"{path / name} is damaged: its sha256 is not the one in {_MANIFEST}")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        tied = json.loads((file.metadata() or {}).get(_TIED, "{}"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
    return tensors | {name: tensors[first] for name, first in tied.items()}


# Which checkpoints a run has


def list_checkpoints(run: Path) -> list[Path]:
    """Return the step folders of a run, oldest step first; anything else there is ignored."""
    folder = Path(run) / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    found = [folder / name for name in names if _STEP_FOLDER.fullmatch(name)]
    return sorted((path for path in found if path.is_dir() and not _is_spare(path)), key=step_of)


def _is_spare(path: Path) -> bool:
    """Whether this is a checkpoint being replaced whose successor is already in place."""
    return path.name.endswith(_REPLACED) and path.with_name(_name(path)).exists()


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    return int(_name(path).removeprefix("step-"))


def _name(path: Path) -> str:
    """Return the name of a checkpoint folder without the mark of one being replaced."""
    return path.name.removesuffix(_REPLACED)


def newest_valid(
    run: Path, log: Callable[[str], None] = print, *, groups: Collection[str] | None = None
) -> Checkpoint | None:
    """Load the newest checkpoint that is undamaged, or return None.

    Each damaged one is passed over with a line to `log` that says why.
    """
    skipped = False
    for path in reversed(list_checkpoints(run)):
        try:
            checkpoint = load_checkpoint(path, groups=groups)
        except CheckpointError as error:
            log(f"skipping a checkpoint: {error}")
            skipped = True
            continue
        if skipped:
            log(f"falling back to {path}")
        return checkpoint
    return None


def mark_best(run: Path, step: int) -> None:
    """Name the checkpoint of `step` the best of its run; raises CheckpointError if it cannot."""
    folder = Path(run) / "checkpoints"
    temporary = folder / f"{_BUILDING}{_BEST}"
    try:
        _write_text(temporary, f"step-{step:08d}\n")
        temporary.replace(folder / _BEST)
        _sync(folder)
    except OSError as error:
        raise CheckpointError(
            f"step {step} was not marked as best in {folder}: {_reason(error)}"
        ) from error


def best_checkpoint(run: Path) -> Path | None:
    """Return the folder marked as best, or None if none is marked or it is gone."""
    folder = Path(run) / "checkpoints"
    try:
        name = (folder / _BEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return next((path for path in list_checkpoints(run) if _name(path) == name), None)


def prune(run: Path, keep_last_n: int) -> None:
    """Remove all but the `keep_last_n` newest checkpoints and the best; sweep what kills left."""
    if keep_last_n < 1:
        raise ValueError(f"keep_last_n={keep_last_n}: at least 1 checkpoint must be kept")
    checkpoints = list_checkpoints(run)
    kept = {*checkpoints[-keep_last_n:], best_checkpoint(run)}
    for path in [path for path in checkpoints if path not in kept] + _leftovers(run, checkpoints):
        shutil.rmtree(path, ignore_errors=True)


def _leftovers(run: Path, checkpoints: Collection[Path]) -> list[Path]:
    """Folders that a killed save left: half written ones and ones already replaced."""
    folder = Path(run) / "checkpoints"
    unfinished = folder.glob(f"{_BUILDING}step-*")
    replaced = (path for path in folder.glob(f"step-*{_REPLACED}") if path not in checkpoints)
    return [*unfinished, *replaced]


def set_aside_after(run: Path, step: int) -> list[Path]:
    """Take the checkpoints newer than `step` out of the list, by renaming them; return them.

    A run that resumes from an older checkpoint starts another future. If the newer ones stayed
    in the list, the next resume would pick one of them, and `prune` would keep them instead of
    the ones the run is writing now.
    """
    best = best_checkpoint(run)
    moved = []
    for path in list_checkpoints(run):
        if step_of(path) > step:
            if path == best:
                (path.parent / _BEST).unlink()
            target = path.with_name(_name(path) + _SET_ASIDE)
            shutil.rmtree(target, ignore_errors=True)
            moved.append(path.rename(target))
    return moved


# Where a run is


def resolve_run(name: str | Path) -> Path:
    """Return the run folder that `name` stands for.

    `name` is a run folder, a checkpoint folder inside one, or a text file that holds the path of
    a run, like `runs/latest`. Raises FileNotFoundError in one line that says what there is.
    """
    path = Path(name)
    if path.is_file():
        path = _follow(path)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no run at {path}; {describe_folder(path.parent)}")
    return path.absolute().parents[1] if is_checkpoint(path) else path


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint folder inside a run, by its name."""
    absolute = path.absolute()
    return absolute.name.startswith("step-") and absolute.parent.name == "checkpoints"


def _follow(pointer: Path) -> Path:
    """Return the run that a text file names, also when the folder of runs has been moved."""
    try:
        text = pointer.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        text = ""
    if not text or "\n" in text:
        raise FileNotFoundError(f"{pointer} is neither a run folder nor a file that names one")
    choices = [Path(text), pointer.parent / text, pointer.parent / Path(text).name]
    return next((choice for choice in choices if choice.is_dir()), Path(text))


def describe_folder(folder: Path) -> str:
    """Say what a folder holds, newest names first, for error messages."""
    if not folder.is_dir():
        return f"there is no folder {folder} either"
    names = sorted((name for name in os.listdir(folder) if not name.startswith(".")), reverse=True)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{folder} holds {', '.join(names[:5]) or 'nothing'}{more}"


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
