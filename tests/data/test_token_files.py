"""Token files: exact ids at any width, every kind of damage noticed, memory that stays small."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import token_files
from data.token_files import TokenFile, TokenFileWriter, dtype_for
from tests.data.token_data import write_tokens

MEGABYTE = 1 << 20


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_the_width_follows_from_the_vocabulary(vocab_size: int, name: str, tmp_path: Path) -> None:
    assert dtype_for(vocab_size).name == name
    tokens = write_tokens(tmp_path, [[0, vocab_size - 1]], vocab_size=vocab_size)
    assert tokens.read(0, 2).tolist() == [0, vocab_size - 1]
    assert tokens.path.stat().st_size == 2 * np.dtype(name).itemsize


def test_a_vocabulary_beyond_32_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit into 32 bits"):
        dtype_for(2**32 + 1)


@pytest.mark.parametrize("wrong", [100, 65536 + 3, -1])
def test_ids_outside_the_vocabulary_are_refused_when_written(wrong: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary of 100"):
        write_tokens(tmp_path, [[1, wrong, 2]])


def test_a_file_that_was_not_finished_has_no_sidecar(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        write_tokens(tmp_path, [[100]])
    with pytest.raises(FileNotFoundError, match=r"train\.json: no such file"):
        TokenFile(tmp_path, "train")


def test_the_sidecar_describes_the_file(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path, [[1, 2, 3], [4, 9]], bos_id=1, eos_id=4)
    sidecar = tokens.sidecar
    assert len(tokens) == sidecar.n_tokens == 5
    assert tokens.starts.tolist() == [0, 3]
    assert (sidecar.n_documents, sidecar.n_characters, sidecar.n_bytes) == (2, 5, 10)
    assert (sidecar.max_id, sidecar.dtype) == (9, "uint8")
    assert tokens.provenance.source == {"text.txt": "abc"}
    assert (tokens.provenance.bos_id, tokens.provenance.eos_id) == (1, 4)


@settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_rows_are_slices_of_the_ids(data: st.DataObject, tmp_path: Path) -> None:
    ids = data.draw(st.lists(st.integers(0, 299), min_size=1, max_size=50))
    tokens = write_tokens(tmp_path, [ids], vocab_size=300)
    length = data.draw(st.integers(1, len(ids)))
    starts = data.draw(st.lists(st.integers(0, len(ids) - length), max_size=5))
    expected = [ids[start : start + length] for start in starts]
    assert tokens.read_rows(starts, length).tolist() == expected


def test_reading_past_the_end_is_an_error(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path, [[1, 2, 3]])
    with pytest.raises(ValueError, match=r"past the end \(3 ids\)"):
        tokens.read_rows([0, 2], 2)


# Damage


def change_sidecar(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "train.json"
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["provenance"].update(changes.pop("provenance", {}))
        path.write_text(json.dumps(fields | changes), encoding="utf-8")

    return change


def change_bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


DAMAGE = {
    "cut short": (change_bytes("train.bin", lambda raw: raw[:-1]), "7 bytes, but 4 ids"),
    "grown": (change_bytes("train.bin", lambda raw: raw + b"\0\0"), "10 bytes, but 4 ids"),
    "one bit": (change_bytes("train.bin", lambda raw: raw[:-1] + b"\0"), "content has changed"),
    "starts": (change_bytes("train.starts.npy", lambda raw: raw[:-1] + b"\1"), "document starts"),
    "no array": (change_bytes("train.starts.npy", lambda raw: raw[:20]), "document starts"),
    "empty": (change_bytes("train.starts.npy", lambda raw: b""), "document starts"),
    "garbage": (change_bytes("train.json", lambda raw: b"\xff{"), "no sidecar"),
    "half": (change_bytes("train.json", lambda raw: raw[: len(raw) // 2]), "no sidecar"),
    "list": (change_bytes("train.json", lambda raw: b"[]"), "no sidecar"),
    "version": (change_sidecar(version=99), "format version 99, this code reads 1"),
    "field": (change_sidecar(surprise=1), "no sidecar"),
    "width": (change_sidecar(dtype="uint32"), "stored as uint32, but .* stored as uint16"),
    "vocabulary": (change_sidecar(provenance={"vocab_size": 70000}), "stored as uint16, but"),
    "too high": (change_sidecar(max_id=300), "id 300 is outside the vocabulary of 300"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_reported_in_one_line_with_the_file(kind: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[kind]
    write_tokens(tmp_path, [[1, 2], [3, 299]], vocab_size=300)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        TokenFile(tmp_path, "train")
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["train.bin", "train.starts.npy", "train.json"])
def test_a_missing_part_is_named(name: str, tmp_path: Path) -> None:
    write_tokens(tmp_path, [[1, 2]])
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name}: no such file"):
        TokenFile(tmp_path, "train")


def test_files_above_the_limit_are_checked_by_size_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tokens(tmp_path, [[1, 2]]).path
    path.write_bytes(b"\1\3")
    monkeypatch.setattr(token_files, "HASHED_BYTES", 1)
    assert TokenFile(tmp_path, "train").read(0, 2).tolist() == [1, 3]


# Resources


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_part_of_the_file_that_was_read(tmp_path: Path) -> None:
    size = 32 * MEGABYTE
    tokens = write_tokens(tmp_path, [np.zeros(MEGABYTE, dtype=np.uint8)] * 32)
    gc.collect()
    before = resident_bytes()
    for start in range(0, size, MEGABYTE):
        tokens.read_rows(range(start, start + MEGABYTE, MEGABYTE // 4), MEGABYTE // 4)
    assert resident_bytes() - before < size // 4


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are read from /proc")
def test_the_file_is_closed_when_it_is_no_longer_used(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path, [[1, 2]])
    path = tokens.path.resolve()

    def is_open() -> bool:
        links = Path("/proc/self/fd").iterdir()
        return any(link.exists() and link.resolve() == path for link in links)

    assert is_open()
    del tokens
    gc.collect()
    assert not is_open()


def test_the_writer_counts_what_it_wrote(tmp_path: Path) -> None:
    provenance = write_tokens(tmp_path, [[1]]).provenance
    with TokenFileWriter(tmp_path, provenance) as writer:
        writer.begin_document()
        writer.add([5, 6])
        writer.add([])
        assert writer.n_tokens == 2
