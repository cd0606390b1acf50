"""Text of your own: a .txt, .jsonl or .parquet file, or a folder of files of one of these kinds.

- .txt: a file is one document, kept as it is, save for a leading byte-order mark and Windows line
  ends, which become plain newlines.
- .jsonl: a line is one document, the text in its field `text_field`.
- .parquet: a row is one document, the text in its column `text_field`.

Files are found and checked here, before the `datasets` library reads them, because it reports
missing, empty and badly encoded files with one and the same message.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.documents import Documents, Log, Splits, first_val_document, split_text
from data.tables import (
    READER_VERSION,
    TableDocuments,
    name_some,
    read_jsonl,
    read_parquet,
    read_txt,
)

KINDS = (".txt", ".jsonl", ".parquet")
CHUNK_BYTES = 1 << 20
MAX_TXT_BYTES = (1 << 31) - 1  # what one cell of a table can hold


def load_files(
    path: Path,
    *,
    val_path: Path | None,
    val_fraction: float,
    text_field: str,
    cache_dir: Path,
    log: Log,
) -> Splits:
    """Load the documents of `path` and divide them.

    Validation is `val_path` if given. Otherwise it is taken from the end of `path`: of many
    documents whole ones, whose share of the characters is as near to `val_fraction` as they allow;
    of a single document the last `val_fraction` of its characters. Documents are in the order of
    the file names, then of the rows.

    Raises FileNotFoundError for a path that is not there, and ValueError for files that are empty,
    damaged, of another kind or without `text_field`; each in one line with the place.
    """
    found = find_files("data.path", path, log)
    if val_path is None:
        documents, fingerprint = _read(found, text_field, cache_dir, log)
        train, val, split_rule = _split(documents, val_fraction)
    else:
        val_found = find_files("data.val_path", val_path, log)
        _refuse_shared_files(found, val_found)
        train, fingerprint = _read(found, text_field, cache_dir, log)
        val, val_hashes = _read(val_found, text_field, cache_dir, log)
        fingerprint |= {f"validation {name}": sha256 for name, sha256 in val_hashes.items()}
        split_rule = f"validation is {val_path}"
    return Splits(
        train=train,
        val=val,
        fingerprint=fingerprint,
        description=f"{path} ({len(found.files)} {found.kind})",
        split_rule=split_rule,
    )


@dataclass(kw_only=True, slots=True)
class FoundFiles:
    """Files of one kind, in the order in which they are read."""

    root: Path
    kind: str
    files: list[Path]

    def name(self, file: Path) -> str:
        """The path of a file inside the folder, or its plain name."""
        return file.name if file == self.root else file.relative_to(self.root).as_posix()


def find_files(knob: str, path: Path, log: Log) -> FoundFiles:
    """Find what `path` stands for; `knob` is the setting it came from.

    In a folder, and in the folders inside it, hidden files and files of no readable kind are passed
    over, and so are empty ones; the log names some of them.
    """
    path = path.expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{knob}={path} does not exist{_nearest_name(path)}")
    files = [path] if path.is_file() else _visible_files(path)
    readable = [file for file in files if file.suffix.lower() in KINDS]
    kinds = sorted({file.suffix.lower() for file in readable})
    if not kinds:
        what = "is not a" if path.is_file() else "holds no"
        raise ValueError(f"{knob}={path} {what} {', '.join(KINDS[:-1])} or {KINDS[-1]} file")
    if len(kinds) > 1:
        raise ValueError(f"{knob}={path} holds {' and '.join(kinds)} files; keep one kind")
    filled = [file for file in readable if file.stat().st_size]
    if not filled:
        raise ValueError(f"{knob}={path} is empty")
    if strangers := sorted(set(files) - set(readable)):
        log(f"{path}: passed over {name_some(strangers)}, not {kinds[0]}")
    if empty := sorted(set(readable) - set(filled)):
        log(f"{path}: passed over {name_some(empty)}, empty")
    return FoundFiles(root=path, kind=kinds[0], files=filled)


def _visible_files(folder: Path) -> list[Path]:
    files = (file for file in folder.rglob("*") if file.is_file())
    inside = [(file.relative_to(folder), file) for file in files]
    return [
        file
        for name, file in sorted(inside, key=lambda pair: pair[0].as_posix())
        if not any(part.startswith(".") for part in name.parts)
    ]


def _nearest_name(path: Path) -> str:
    """Name what is there instead, at the first part of the path that does not exist."""
    missing = path.absolute()
    while not missing.parent.exists():
        missing = missing.parent
    there = [entry.name for entry in missing.parent.iterdir()] if missing.parent.is_dir() else []
    nearest = difflib.get_close_matches(missing.name, there, n=1)
    return f"; did you mean {missing.parent / nearest[0]}?" if nearest else ""


def _refuse_shared_files(train: FoundFiles, val: FoundFiles) -> None:
    shared = {file.resolve() for file in train.files} & {file.resolve() for file in val.files}
    if shared:
        raise ValueError(f"{min(shared)} is in both data.path and data.val_path")


@dataclass(kw_only=True, slots=True)
class FileFacts:
    """What one pass over the bytes of a file shows."""

    sha256: str
    carriage_returns: int


class Utf8Check:
    """Follows a file chunk by chunk and finds the first byte that is not UTF-8."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._offset = 0

    def feed(self, chunk: bytes, *, final: bool = False) -> None:
        """Raise ValueError with the offset, counted from 0, of a byte that is not UTF-8."""
        waiting = len(self._decoder.getstate()[0])  # bytes of a character cut by the last chunk
        try:
            self._decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            place = self._offset - waiting + error.start
            raise ValueError(
                f"{self._file}: byte {place} (0x{error.object[error.start]:02x}) is not UTF-8; "
                "convert the file to UTF-8"
            ) from None
        self._offset += len(chunk)


def check_file(file: Path, *, is_text: bool, progress: Callable[[int], object]) -> FileFacts:
    """Hash a file and, if it is text, check its encoding; `progress` is told of bytes read."""
    digest = hashlib.sha256()
    encoding = Utf8Check(file)
    carriage_returns = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            if is_text:
                encoding.feed(chunk)
                carriage_returns += chunk.count(b"\r")
            progress(len(chunk))
    encoding.feed(b"", final=True)
    return FileFacts(sha256=digest.hexdigest(), carriage_returns=carriage_returns)


def _read(
    found: FoundFiles, text_field: str, cache_dir: Path, log: Log
) -> tuple[TableDocuments, dict[str, str]]:
    """Check the files and read them; returns all their documents and the hash of each file."""
    hashes = _check_files(found, log)
    # A table's folder is named by what it is made from, so an old table is never taken for new.
    recipe = json.dumps([READER_VERSION, found.kind, text_field, hashes])
    folder = cache_dir / f"files-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    if found.kind == ".txt":
        names = [found.name(file) for file in found.files]
        documents = TableDocuments(read_txt(found.files, folder), names.__getitem__)
    else:
        read = read_jsonl if found.kind == ".jsonl" else read_parquet
        table = read(found.files, text_field, folder)
        documents = TableDocuments(table, lambda row: f"{found.root}, row {row + 1}")
        hashes = {f"{name}#{text_field}": sha256 for name, sha256 in hashes.items()}
    if not len(documents):
        raise ValueError(f"{found.root} holds no text")
    return documents, hashes


def _check_files(found: FoundFiles, log: Log) -> dict[str, str]:
    is_text = found.kind != ".parquet"
    sizes = [file.stat().st_size for file in found.files]
    if found.kind == ".txt" and max(sizes) > MAX_TXT_BYTES:
        largest = found.files[sizes.index(max(sizes))]
        raise ValueError(
            f"{largest} has {max(sizes):,} bytes, more than {MAX_TXT_BYTES:,}; "
            "cut it into several files in a folder"
        )
    hashes, carriage_returns = {}, 0
    with tqdm(total=sum(sizes), desc="check files", unit="B", unit_scale=True, disable=None) as bar:
        for file in found.files:
            facts = check_file(file, is_text=is_text, progress=bar.update)
            hashes[found.name(file)] = facts.sha256
            carriage_returns += facts.carriage_returns
    if found.kind == ".txt" and carriage_returns:
        log(f"{found.root}: {carriage_returns:,} carriage returns (Windows line ends) become \\n")
    return hashes


def _split(documents: TableDocuments, val_fraction: float) -> tuple[Documents, Documents, str]:
    if len(documents) == 1:
        start, end = split_text(next(iter(documents)), val_fraction)
        return [start], [end], f"validation is the last {val_fraction:.4g} of the characters"
    filled = np.flatnonzero(documents.lengths)
    first = first_val_document(documents.lengths[filled], val_fraction)
    train, val = documents.cut(int(filled[first]))
    share = val.lengths.sum() / documents.lengths.sum()
    rule = f"validation is the last {len(val):,} of {len(documents):,} documents"
    return train, val, f"{rule}, {share:.4g} of the characters"
