"""Cutting long texts where a cut cannot change how they are encoded.

A tokenizer takes more than twice the time for a text of twice the length, and works on several
texts at once. So texts are encoded in pieces of a few thousand characters; where they may be cut
depends on how the tokenizer splits text into words, and is one of the `Edge` functions below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

PIECE_CHARACTERS = 4096

# (text, wanted) -> the first place from `wanted` on where the text may be cut
Edge = Callable[[str, int], int]

_WORD_EDGE = re.compile(r"\S(?=[ \n])")


class TextPiece(NamedTuple):
    """Part of a text; `first` and `last` tell where a text begins and ends."""

    text: str
    first: bool
    last: bool


def edge_anywhere(text: str, wanted: int) -> int:
    """For tokenizers that look at one character at a time."""
    return min(wanted, len(text))


def edge_of_word(text: str, wanted: int) -> int:
    """For GPT-2's split, which starts a new word between a visible character and a blank.

    It does so whatever surrounds the two, and BPE never merges over words.
    """
    edge = _WORD_EDGE.search(text, wanted)
    return edge.end() if edge else len(text)


def edge_nowhere(text: str, wanted: int) -> int:
    """For tokenizers whose split is not understood here: they get their texts whole."""
    return len(text)


def cut(texts: Iterable[str], edge: Edge) -> Iterator[TextPiece]:
    """Cut each text at edges about `PIECE_CHARACTERS` apart; an empty text is one empty piece."""
    for text in texts:
        begin = 0
        while True:
            end = edge(text, begin + PIECE_CHARACTERS)
            yield TextPiece(text[begin:end], first=begin == 0, last=end == len(text))
            if end == len(text):
                break
            begin = end
