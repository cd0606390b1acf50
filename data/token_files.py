"""Token files: the ids of a split in one flat file, and what is known about them beside it.

A split named `train` is three files: `train.bin` (the ids, little-endian, one after the other),
`train.starts.npy` (where each document begins) and `train.json` (the `Sidecar`). The width of an id
follows from the vocabulary size and is checked when the file is opened, so ids can neither wrap
around nor be read with another width than they were written with.

Ids are read with `os.pread` at their offset. A memory map would keep every page it has touched in
the process, so that memory grows to the size of the file over an epoch; a read leaves nothing
behind, and costs little beside a training step.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike

FORMAT_VERSION = 1

# Up to this size the whole file is compared with its hash when it is opened (about a second);
# beyond it only the sizes are checked, so that a start does not wait for the disk.
HASHED_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where the ids of a token file come from."""

    split: str  # "train" or "val"
    source: dict[str, str]  # sha256 of everything the text was read from
    split_rule: str  # how the text was divided into splits, in words
    tokenizer_sha256: str
    vocab_size: int  # of the tokenizer
    bos_id: int | None
    eos_id: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sidecar:
    """What `SPLIT.json` holds."""

    version: int
    dtype: str
    n_tokens: int
    n_documents: int
    n_characters: int  # of the text
    n_bytes: int  # of the text in UTF-8
    max_id: int
    tokens_sha256: str
    starts_sha256: str
    provenance: Provenance


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the narrowest unsigned little-endian type that holds every id below `vocab_size`."""
    for name in ("u1", "<u2", "<u4"):
        dtype = np.dtype(name)
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    raise ValueError(f"a vocabulary of {vocab_size} ids does not fit into 32 bits")


class TokenFileWriter:
    """Writes the three files of a split; use it as a context manager.

    The sidecar is written last and only if nothing failed, so a file without one was never
    finished. Whoever wants the three to appear at once writes into a temporary folder.
    """

    def __init__(self, folder: Path, provenance: Provenance) -> None:
        self._folder = folder
        self._provenance = provenance
        self._dtype = dtype_for(provenance.vocab_size)
        self._starts = array("q")
        self._hash = hashlib.sha256()
        self._max_id = -1
        self._n_characters = 0
        self._n_bytes = 0
        self.n_tokens = 0
        path = _tokens_path(folder, provenance.split)
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115  (closed by __exit__)

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._finish()
        self._file.close()

    def begin_document(self) -> None:
        """Let a document begin with the next id."""
        self._starts.append(self.n_tokens)

    def add(self, ids: ArrayLike) -> None:
        """Append ids.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        numbers = np.asarray(ids, dtype=np.int64)
        if not numbers.size:
            return
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= self._provenance.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(
                f"token id {wrong} is outside the vocabulary of {self._provenance.vocab_size}"
            )
        raw = numbers.astype(self._dtype).tobytes()
        self._file.write(raw)
        self._hash.update(raw)
        self._max_id = max(self._max_id, high)
        self.n_tokens += numbers.size

    def count_text(self, *, n_characters: int, n_bytes: int) -> None:
        """Add to the size of the text that the ids stand for."""
        self._n_characters += n_characters
        self._n_bytes += n_bytes

    def _finish(self) -> None:
        split = self._provenance.split
        self._file.flush()
        os.fsync(self._file.fileno())
        starts = np.asarray(self._starts, dtype="<i8")
        np.save(_starts_path(self._folder, split), starts)
        sidecar = Sidecar(
            version=FORMAT_VERSION,
            dtype=self._dtype.name,
            n_tokens=self.n_tokens,
            n_documents=len(starts),
            n_characters=self._n_characters,
            n_bytes=self._n_bytes,
            max_id=self._max_id,
            tokens_sha256=self._hash.hexdigest(),
            starts_sha256=hashlib.sha256(starts.tobytes()).hexdigest(),
            provenance=self._provenance,
        )
        text = json.dumps(asdict(sidecar), indent=1, ensure_ascii=False)
        _sidecar_path(self._folder, split).write_text(text + "\n", encoding="utf-8")


class TokenFile:
    """The ids of one split, read from disk piece by piece.

    Memory: 8 bytes per document; the ids stay on disk.

    Attributes:
        sidecar: what is known about the file; `provenance` is its part on the origin of the ids.
        starts: (n_documents,) int64, index of the first id of each document.

    Raises:
        FileNotFoundError: one of the three files is missing.
        ValueError: they are damaged, of another version, or do not belong together.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.path = _tokens_path(folder, split)
        self.sidecar = _read_sidecar(_sidecar_path(folder, split))
        self.starts = _read_starts(_starts_path(folder, split), self.sidecar)
        self._dtype = dtype_for(self.provenance.vocab_size)
        _check_tokens(self.path, self.sidecar, self._dtype)
        self._descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return self.sidecar.n_tokens

    @property
    def provenance(self) -> Provenance:
        """Where the ids come from."""
        return self.sidecar.provenance

    def read(self, start: int, count: int) -> np.ndarray[Any, Any]:
        """Ids `start` to `start + count`, as stored."""
        return self.read_rows([start], count)[0]

    def read_rows(self, starts: Sequence[int], length: int) -> np.ndarray[Any, Any]:
        """One row of `length` ids, as stored, from each of `starts`: (len(starts), length)."""
        width = self._dtype.itemsize
        size = length * width
        rows = [os.pread(self._descriptor, size, start * width) for start in starts]
        raw = b"".join(rows)
        if len(raw) != size * len(rows):
            raise ValueError(
                f"{self.path}: asked for ids past the end ({len(self)} ids), or it was cut short"
            )
        return np.frombuffer(raw, self._dtype).reshape(len(rows), length)


def _tokens_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.bin"


def _starts_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.starts.npy"


def _sidecar_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.json"


def _read_sidecar(path: Path) -> Sidecar:
    _check_exists(path)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        version = fields["version"]
        if version == FORMAT_VERSION:
            provenance = Provenance(**fields.pop("provenance"))
            sidecar = Sidecar(**fields, provenance=provenance)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: this is no sidecar of a token file ({error!r})") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: format version {version}, this code reads {FORMAT_VERSION}")
    dtype = dtype_for(provenance.vocab_size)
    if sidecar.dtype != dtype.name:
        raise ValueError(
            f"{path}: ids stored as {sidecar.dtype}, but a vocabulary of "
            f"{provenance.vocab_size} is stored as {dtype.name}"
        )
    if sidecar.max_id >= provenance.vocab_size:
        raise ValueError(
            f"{path}: id {sidecar.max_id} is outside the vocabulary of {provenance.vocab_size}"
        )
    return sidecar


def _read_starts(path: Path, sidecar: Sidecar) -> np.ndarray[Any, Any]:
    _check_exists(path)
    try:
        starts = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path}: unreadable document starts ({error})") from error
    if hashlib.sha256(starts.tobytes()).hexdigest() != sidecar.starts_sha256:
        raise ValueError(f"{path}: the document starts are not those the sidecar describes")
    return starts


def _check_tokens(path: Path, sidecar: Sidecar, dtype: np.dtype[Any]) -> None:
    _check_exists(path)
    size, expected = path.stat().st_size, sidecar.n_tokens * dtype.itemsize
    if size != expected:
        raise ValueError(
            f"{path}: {size} bytes, but {sidecar.n_tokens} ids of type {sidecar.dtype} "
            f"are {expected} bytes"
        )
    if size > HASHED_BYTES:
        return
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sidecar.tokens_sha256:
            raise ValueError(f"{path}: the content has changed since it was written")


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; it is part of a prepared data set")
