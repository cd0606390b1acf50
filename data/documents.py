"""What every text source gives: documents, divided into training and validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Log = Callable[[str], None]


@dataclass(kw_only=True, slots=True)
class Document:
    """One text that belongs together: a play, a file, a row of a table."""

    text: str
    name: str


class Documents(Protocol):
    """Documents in a fixed order, to be walked any number of times: a list, or rows on disk."""

    def __len__(self) -> int:
        """How many documents there are."""

    def __iter__(self) -> Iterator[Document]:
        """The documents, one after another."""


@dataclass(kw_only=True, slots=True)
class Splits:
    """The documents of a source, divided once and for good.

    `fingerprint` maps the name of each thing that was read to its sha256, and `split_rule` says in
    words how the division was made: while both stay the same, so do the documents.
    """

    train: Documents
    val: Documents
    fingerprint: dict[str, str]
    description: str
    split_rule: str


def split_text(document: Document, val_fraction: float) -> tuple[Document, Document]:
    """Divide one document by characters: the last `val_fraction` of it is for validation."""
    text = document.text
    cut = int(len(text) * (1 - val_fraction))
    return (
        Document(text=text[:cut], name=f"{document.name} (start)"),
        Document(text=text[cut:], name=f"{document.name} (end)"),
    )


def first_val_document(lengths: Sequence[int] | np.ndarray, val_fraction: float) -> int:
    """Where validation starts when whole documents are taken from the end.

    Returns the index whose tail holds the share of characters nearest to `val_fraction`, with at
    least one document on each side. `lengths` are in characters, two documents or more.
    """
    tails = np.cumsum(lengths[::-1], dtype=np.int64)  # characters of the last 1, 2, ... documents
    distance = np.abs(tails[:-1] - val_fraction * tails[-1])
    return len(lengths) - 1 - int(np.argmin(distance))
