"""Where text comes from: the settings, and one table with a function per source.

To add a source, write a function that takes a `DataConfig` and a `Log` and returns `Splits`, give
it a line in `SOURCES`, and add a file of values to `configs/data`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from data.documents import Document, Documents, Log, Splits

__all__ = [
    "MODES",
    "SOURCES",
    "DataConfig",
    "Document",
    "Documents",
    "Log",
    "Splits",
    "load_documents",
]

MODES = ("stream", "bos_aligned", "document")

# Sources that come with their validation split.
FIXED_SPLITS = {"shakespeare": "four whole plays", "back_copy": "a random stream of its own"}

DEFAULT_VAL_FRACTION = 0.1
DEFAULT_TEXT_FIELD = "text"


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Which text to train on and how windows are cut from it.

    A `path` always means that file or folder, whatever `source` says, so `data.path=FILE` on top of
    any other settings trains on FILE. Relative paths are taken from the launch directory.
    """

    source: str = "shakespeare"  # a name in SOURCES
    path: str | None = None  # .txt, .jsonl, .parquet, or a folder of one kind
    val_path: str | None = None  # validation text of its own; None: the end of `path`
    val_fraction: float = DEFAULT_VAL_FRACTION  # share of the characters kept for validation
    text_field: str = DEFAULT_TEXT_FIELD  # the column of .jsonl and .parquet files
    mode: str = "stream"  # how windows meet document edges, one of MODES
    cache_dir: str = "data/cache"  # downloads and prepared data

    def __post_init__(self) -> None:
        """Raise ValueError, in one line, for values that cannot work together."""
        _check_choice("data.source", self.source, SOURCES)
        _check_choice("data.mode", self.mode, MODES)
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction={self.val_fraction} must lie between 0 and 1")
        for name in ("path", "val_path", "text_field", "cache_dir"):
            if getattr(self, name) == "":
                raise ValueError(f"data.{name} is empty; leave it out to use its default")
        self._check_path_settings()

    def _check_path_settings(self) -> None:
        if self.path is None:
            if self.source == "files":
                raise ValueError("data.source=files needs data.path=FILE_OR_FOLDER")
            if self.val_path is not None:
                raise ValueError("data.val_path needs data.path, the text to train on")
            if self.text_field != DEFAULT_TEXT_FIELD:
                raise ValueError(f"data.text_field={self.text_field} needs data.path")
        fraction_is_set = self.val_fraction != DEFAULT_VAL_FRACTION
        if fraction_is_set and self.val_path is not None:
            raise ValueError("data.val_fraction and data.val_path exclude each other; set one")
        if fraction_is_set and self.used_source in FIXED_SPLITS:
            raise ValueError(
                f"data.val_fraction does not apply to data.source={self.used_source}, "
                f"whose validation split is {FIXED_SPLITS[self.used_source]}"
            )

    @property
    def used_source(self) -> str:
        """The source that is read: `files` as soon as a path is given."""
        return self.source if self.path is None else "files"


def load_documents(config: DataConfig, log: Log = print) -> Splits:
    """Read the source that `config` names and divide it into training and validation.

    Raises ValueError or FileNotFoundError, in one line, for text that is missing, damaged or empty.
    """
    return SOURCES[config.used_source](config, log)


def _shakespeare(config: DataConfig, log: Log) -> Splits:
    from data.shakespeare import load_shakespeare

    return load_shakespeare(Path(config.cache_dir), log)


def _tiny_shakespeare(config: DataConfig, log: Log) -> Splits:
    from data.shakespeare import load_tiny_shakespeare

    return load_tiny_shakespeare(Path(config.cache_dir), config.val_fraction, log)


def _back_copy(config: DataConfig, log: Log) -> Splits:
    from data.back_copy import load_back_copy

    return load_back_copy()


def _files(config: DataConfig, log: Log) -> Splits:
    from data.files import load_files

    assert config.path is not None, "used_source is files only with a path"
    return load_files(
        Path(config.path),
        val_path=Path(config.val_path) if config.val_path else None,
        val_fraction=config.val_fraction,
        text_field=config.text_field,
        cache_dir=Path(config.cache_dir),
        log=log,
    )


SOURCES: dict[str, Callable[[DataConfig, Log], Splits]] = {
    "shakespeare": _shakespeare,
    "tiny_shakespeare": _tiny_shakespeare,
    "back_copy": _back_copy,
    "files": _files,
}


def _check_choice(knob: str, value: str, choices: Iterable[str]) -> None:
    names = list(choices)
    if value in names:
        return
    nearest = difflib.get_close_matches(value, names, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ValueError(f"{knob}={value} is not one of {', '.join(names)}{hint}")
