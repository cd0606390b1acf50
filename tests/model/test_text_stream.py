"""Text of generated tokens: whole characters, stop strings, one last piece per sample."""

import codecs
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.generate import Generation
from model.text_stream import Piece, collect_texts, stream_text


class Bytes:
    """Each token is a piece of UTF-8; the decoder of Python's own library."""

    def __init__(self, vocabulary: list[bytes]):
        self.vocabulary = vocabulary
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        return self.decoder.decode(self.vocabulary[token_id])

    def flush(self) -> str:
        return self.decoder.decode(b"", final=True)


class Scripted(Generation):
    """A generation whose samples say what the test wants."""

    def __init__(self, *scripts: list[int]):
        self.scripts = scripts
        self.ends = [None] * len(scripts)
        self.tokens = [[] for _ in scripts]

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for number in range(max(map(len, self.scripts))):
            step = []
            for sample, script in enumerate(self.scripts):
                if self.ends[sample] is None:
                    self.tokens[sample].append(script[number])
                    step.append((sample, script[number]))
                    if len(script) == number + 1:
                        self.ends[sample] = "length"
            yield step

    def stop(self, sample: int) -> None:
        self.ends[sample] = self.ends[sample] or "stopped"


def stream(parts: list[bytes], *stop: str) -> list[str]:
    """Pieces of the text of one sample whose tokens are `parts`."""
    generation = Scripted(list(range(len(parts))))
    return [piece.text for piece in stream_text(generation, lambda: Bytes(parts), stop)]


@pytest.mark.parametrize("text", ["plain", "aé中🙂 ß", "🙂🙂"])
def test_characters_cut_by_tokens_come_out_whole(text: str) -> None:
    pieces = stream([bytes([byte]) for byte in text.encode()])
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_a_character_left_unfinished_is_replaced_at_the_end_only() -> None:
    assert stream([b"a", "é".encode()[:1]]) == ["a", "\ufffd"]


def test_without_stop_texts_nothing_is_held_back() -> None:
    assert stream([b"R", b"OM", b"EO"]) == ["R", "OM", "EO", ""]


@pytest.mark.parametrize(
    ("parts", "stop", "expected"),
    [
        ([b"one", b"STOP", b"two"], ["STOP"], "one"),
        ([b"one S", b"TO", b"P two"], ["STOP"], "one "),
        ([b"oneSTOPtwoSTOP"], ["STOP"], "one"),
        ([b"STOP"], ["STOP"], ""),
        ([b"a\n", b"\nb"], ["\n\n"], "a"),
        ([b"aa", b"ab"], ["ab"], "aa"),
        ([b"S", b"T", b"O"], ["STOP"], "STO"),
        ([b"x", "é".encode()[:1], "é".encode()[1:]], ["é"], "x"),
        ([b"abcd"], ["abcd", "bc"], "a"),
        ([b"a", b"b", b"c", b"d"], ["abcd", "bc"], "a"),
        ([b"x", "é".encode()[:1]], ["\ufffd"], "x"),
    ],
)
def test_the_text_ends_before_the_first_stop_text(
    parts: list[bytes], stop: list[str], expected: str
) -> None:
    assert "".join(stream(parts, *stop)) == expected


def test_only_what_may_begin_a_stop_text_is_held_back() -> None:
    assert stream([b"a", b"\n", b"b", b"\n", b"\n"], "\n\n") == ["a", "\nb", ""]


def test_generation_stops_with_the_stop_text() -> None:
    generation = Scripted([0, 1, 2, 3, 3], [0, 0, 0])
    texts = collect_texts(generation, lambda: Bytes([b"a", b"S", b"T", b"z"]), ["ST"])
    assert texts == ["a", "aaa"]
    assert generation.tokens == [[0, 1, 2], [0, 0, 0]]
    assert generation.ends == ["stopped", "length"]


def test_a_stop_text_that_the_last_token_completes_is_why_the_text_ended() -> None:
    generation = Scripted([0, 1, 2], [0, 0, 0])
    texts = collect_texts(generation, lambda: Bytes([b"a", b"S", b"T"]), ["ST"])
    assert texts == ["a", "aaa"]
    assert generation.ends == ["stopped", "length"]


def first_completed(text: str, stop: list[str]) -> str:
    """Read character by character; the longest stop text that ends there counts."""
    for end in range(len(text) + 1):
        endings = [word for word in stop if text[:end].endswith(word)]
        if endings:
            return text[: end - max(map(len, endings))]
    return text


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_the_result_does_not_depend_on_how_tokens_cut_the_text(parts, stop) -> None:
    expected = first_completed("".join(parts), stop)
    assert "".join(stream([part.encode() for part in ["", *parts]], *stop)) == expected


def test_each_sample_has_one_last_piece_and_none_after_it() -> None:
    generation = Scripted([0], [0, 1, 0], [1, 1])
    pieces = list(stream_text(generation, lambda: Bytes([b"a", b"b"])))
    for sample, text in enumerate(["a", "aba", "bb"]):
        own = [piece for piece in pieces if piece.sample == sample]
        assert "".join(piece.text for piece in own) == text
        assert [piece.is_last for piece in own] == [False] * (len(own) - 1) + [True]
    assert pieces[-1] == Piece(1, "", is_last=True)


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        stream([b"a"], "")
