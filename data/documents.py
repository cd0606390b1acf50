"""What every text source gives: documents, and how they are divided into training and validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Log = Callable[[str], None]


@dataclass(kw_only=True, slots=True)
class Document:
    """One text that belongs together: a play, a file, a row of a table."""

    text: str
    name: str


@dataclass(kw_only=True, slots=True)
class Splits:
    """The documents of a source, divided once and for good.

    `train` and `val` can be walked any number of times. `fingerprint` maps the name of each thing
    that was read to its sha256, so that prepared data can tell when its source has changed.
    `split_rule` says in words how the division was made.
    """

    train: Sequence[Document]
    val: Sequence[Document]
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


def first_val_document(lengths: Sequence[int], val_fraction: float) -> int:
    """Where validation starts when whole documents are taken from the end.

    Returns the index whose tail holds the share of characters nearest to `val_fraction`, with at
    least one document on each side. `lengths` are in characters, two documents or more.
    """
    wanted = val_fraction * sum(lengths)
    best, best_distance, tail = len(lengths) - 1, float("inf"), 0
    for start in range(len(lengths) - 1, 0, -1):
        tail += lengths[start]
        if abs(tail - wanted) < best_distance:
            best, best_distance = start, abs(tail - wanted)
    return best
