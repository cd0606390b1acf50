"""Documents as rows of a table on disk, read by the `datasets` library.

The library resolves nothing here: it is always handed the exact files. Given a folder, it would
keep one kind of file without a word and guess splits from names.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data.documents import Document

if TYPE_CHECKING:
    from datasets import Dataset

READER_VERSION = 1  # raise it when the same files would give other rows
BATCH_ROWS = 1000
BATCH_CHARACTERS = 1 << 24
UTF8_WITHOUT_MARK = "utf-8-sig"  # a leading byte-order mark is not part of the text


class TableDocuments:
    """The rows of a table as documents, few of them in memory at a time; empty rows are left out.

    `name` gives a row its name. `lengths`, the characters of each row, are counted if not given;
    ValueError is raised for a row without a text.
    """

    def __init__(
        self, table: Dataset, name: Callable[[int], str], lengths: np.ndarray | None = None
    ) -> None:
        self._table = table
        self._name = name
        self.lengths = _text_lengths(table, name) if lengths is None else lengths

    def __len__(self) -> int:
        return int(np.count_nonzero(self.lengths))

    def __iter__(self) -> Iterator[Document]:
        row = 0
        longest = max(1, int(self.lengths.max(initial=0)))
        batch_rows = min(BATCH_ROWS, max(1, BATCH_CHARACTERS // longest))
        for batch in self._table.iter(batch_rows):
            for text in batch["text"]:
                if text:
                    yield Document(text=text, name=self._name(row))
                row += 1

    def cut(self, row: int) -> tuple[TableDocuments, TableDocuments]:
        """Divide into the rows before `row` and those from `row` on, which keep their names."""
        name, lengths = self._name, self.lengths
        before = self._table.select(range(row))
        after = self._table.select(range(row, len(lengths)))
        return (
            TableDocuments(before, name, lengths[:row]),
            TableDocuments(after, lambda index: name(row + index), lengths[row:]),
        )


def read_txt(files: Sequence[Path], folder: Path) -> Dataset:
    """Read one row per file; `folder` keeps the table."""
    table = _load("text", files, folder, sample_by="document", encoding=UTF8_WITHOUT_MARK)
    assert len(table) == len(files), "one row per file"
    return table


def read_jsonl(files: Sequence[Path], text_field: str, folder: Path) -> Dataset:
    """Read one row per line that is not blank.

    The library's own JSON reader guesses types (texts that look like dates become dates) and
    repairs what it cannot parse. We take the lines from it and parse them ourselves.
    """
    from datasets import concatenate_datasets

    tables = []
    for file in files:
        lines = _load("text", [file], folder, sample_by="line", encoding=UTF8_WITHOUT_MARK)
        with _progress_on_terminals_only():
            table = lines.map(
                _parse_lines,
                batched=True,
                batch_size=BATCH_ROWS,
                with_indices=True,
                fn_kwargs={"file": str(file), "text_field": text_field},
                desc=f"parse {file.name}",
            )
        tables.append(table)
    return concatenate_datasets(tables)


def read_parquet(files: Sequence[Path], text_field: str, folder: Path) -> Dataset:
    """Read one row per row, of which only the column `text_field` is kept."""
    for file in files:
        _check_column(file, text_field)
    table = _load("parquet", files, folder, columns=[text_field])
    return table if text_field == "text" else table.rename_column(text_field, "text")


def _text_lengths(table: Dataset, name: Callable[[int], str]) -> np.ndarray:
    import pyarrow.compute

    lengths = np.empty(len(table), dtype=np.int64)
    row = 0
    for batch in table.with_format("arrow").iter(BATCH_ROWS):
        column = batch["text"]
        if column.null_count:  # the library passes nulls on
            empty = row + column.is_null().to_pylist().index(True)
            raise ValueError(f"{name(empty)} holds null, not text")
        lengths[row : row + len(column)] = pyarrow.compute.utf8_length(column).to_numpy()
        row += len(column)
    return lengths


def name_some(files: Sequence[Path]) -> str:
    """Name the first few of the files, for a message of one line."""
    names = [str(file) for file in files[:3]]
    more = [f"{len(files) - len(names):,} more"] if len(files) > len(names) else []
    return ", ".join(names + more)


def _load(builder: str, files: Sequence[Path], folder: Path, **options: Any) -> Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    # The library reads names as patterns: brackets and stars in them have to be escaped.
    data_files = {"train": [escape(str(file.absolute())) for file in files]}
    with _progress_on_terminals_only():
        try:
            return load_dataset(
                builder, data_files=data_files, split="train", cache_dir=str(folder), **options
            )
        except DatasetGenerationError as error:
            cause = str(error.__cause__).strip().splitlines() or ["no reason given"]
            raise ValueError(f"cannot read {name_some(files)}: {cause[0]}") from error


@contextmanager
def _progress_on_terminals_only() -> Iterator[None]:
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _parse_lines(
    batch: dict[str, list[str]], indices: list[int], file: str, text_field: str
) -> dict[str, list[str]]:
    texts = [
        _text_of_line(line, f"{file}, line {index + 1}", text_field)
        for line, index in zip(batch["text"], indices, strict=True)
        if line.strip()
    ]
    return {"text": texts}


def _text_of_line(line: str, place: str, text_field: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: holds a {type(row).__name__}, not an object with fields")
    if text_field not in row:
        raise ValueError(f"{place}: {_no_field(text_field, list(row))}")
    text = row[text_field]
    if not isinstance(text, str):
        raise ValueError(f"{place}: field {text_field} holds {json.dumps(text)[:40]}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: field {text_field} holds half a surrogate pair at character {error.start}"
        ) from None
    return text


def _check_column(file: Path, text_field: str) -> None:
    import pyarrow.parquet

    try:
        schema = pyarrow.parquet.read_schema(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a parquet file ({str(error).splitlines()[0]})") from error
    if text_field not in schema.names:
        raise ValueError(f"{file}: {_no_field(text_field, schema.names)}")
    kind = schema.field(text_field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ValueError(f"{file}: field {text_field} holds {kind}, not text")


def _no_field(text_field: str, fields: list[str]) -> str:
    nearest = difflib.get_close_matches(text_field, fields, n=1)
    hint = f", for example data.text_field={nearest[0]}" if nearest else ""
    there = ", ".join(fields) or "none"
    return f"no field {text_field}; fields there: {there}; choose with data.text_field{hint}"
