"""Tokenizers: exact round trips, pieces equal to the whole, raw bytes, and one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import pieces
from data.pieces import cut, edge_of_word
from data.tokenizers import END_OF_TEXT, SYMBOLS, Tokenizer, TokenizerConfig, build_tokenizer

patient = settings(deadline=None)  # a loaded machine is no failure

TEXT = (
    "ROMEO:\nBut soft, what light through yonder window breaks?\n"
    "It is the east, and Juliet is the sun.\n\nJULIET:\nO Romeo, wherefore art thou Romeo?\n"
) * 4

# Characters at which a split into words may change its mind.
TRICKY = st.text(
    st.sampled_from(" \n\t\r'\u2019sdtmreLvé\u0301中。…🙂1٣_-.,!\u00a0\u200b\u2028\x00\x1c\x85"),
    max_size=120,
)


def build(kind: str, *texts: str, **options: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(kind=kind, **options), texts or [TEXT], [])


BPE = build("bpe", vocab_size=300)
BYTE = build("byte")
IDENTITY = build("identity")


def library_file(tmp_path: Path, **changes: Any) -> Path:
    """A tokenizer.json as another project might write it: our BPE with some parts changed."""
    BPE.save(tmp_path / "ours.json")
    layout = json.loads((tmp_path / "ours.json").read_text(encoding="utf-8"))
    layout.update(changes)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(layout), encoding="utf-8")
    return path


# Round trips


@patient
@given(st.text())
def test_any_text_comes_back_from_bpe(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


@patient
@given(st.text())
def test_any_text_comes_back_from_bytes_whose_ids_are_its_utf8(text: str) -> None:
    ids = BYTE.encode(text)
    assert bytes(ids) == text.encode()
    assert BYTE.decode(ids) == text


@settings(patient, max_examples=50)
@given(st.text(min_size=1))
def test_any_text_comes_back_from_its_own_characters(text: str) -> None:
    char = build("char", text)
    assert char.decode(char.encode(text)) == text


def test_character_ids_are_the_places_in_the_sorted_alphabet() -> None:
    char = build_tokenizer(TokenizerConfig(kind="char"), ["cab\n"], ["d"])
    assert char.encode("\nabcd") == [0, 1, 2, 3, 4]
    assert char.vocab_size == 5
    assert (char.bos_id, char.eos_id) == (None, None)


def test_identity_ids_are_the_numbers_of_the_symbols_whatever_the_text_holds() -> None:
    identity = build("identity", "vvv")
    assert identity.encode(SYMBOLS) == list(range(32))
    assert all(int(symbol, 32) == number for number, symbol in enumerate(SYMBOLS))
    assert identity.decode([31, 0, 10]) == "v0a"
    assert identity.sha256 == build("identity", "0123").sha256


def test_identity_has_a_mark_for_the_beginning_alone() -> None:
    assert (IDENTITY.bos_id, IDENTITY.eos_id, IDENTITY.vocab_size) == (32, None, 33)
    assert IDENTITY.decode([32, 5, 32, 6]) == "56"
    assert IDENTITY.n_bytes([32, 5]) == 1


def test_identity_refuses_text_of_other_symbols() -> None:
    with pytest.raises(ValueError, match=r"'w' at 1; it knows 32"):
        build("identity").encode("0w")


def test_text_that_looks_like_a_special_token_stays_text() -> None:
    ids = BPE.encode(f"a{END_OF_TEXT}b")
    assert BPE.bos_id not in ids
    assert BPE.decode(ids) == f"a{END_OF_TEXT}b"


def test_special_tokens_have_no_text() -> None:
    assert BPE.decode([0, *BPE.encode("a"), 0]) == "a"


# Training


def test_bpe_has_the_special_first_and_the_vocabulary_asked_for() -> None:
    assert (BPE.bos_id, BPE.eos_id, BPE.vocab_size) == (0, 0, 300)


def test_bpe_without_merges_is_possible() -> None:
    smallest = build("bpe", vocab_size=257)
    assert smallest.vocab_size == 257
    assert smallest.decode(smallest.encode("é中🙂 x")) == "é中🙂 x"


def test_bpe_of_a_short_text_has_fewer_ids_than_asked_for() -> None:
    assert build("bpe", "abab", vocab_size=5000).vocab_size < 300


def test_bpe_training_is_deterministic_and_reads_the_train_split_only() -> None:
    config = TokenizerConfig(kind="bpe", vocab_size=400)
    once = build_tokenizer(config, [TEXT], ["zzzz zzzz zzzz"] * 50)
    again = build_tokenizer(config, [TEXT], [])
    assert once.sha256 == again.sha256
    assert once.sha256 != build_tokenizer(config, [TEXT + "zzzz " * 50], []).sha256


def test_bpe_training_does_not_depend_on_where_texts_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = build("bpe", vocab_size=400).sha256
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 5)
    assert build("bpe", vocab_size=400).sha256 == whole


# Pieces


@settings(patient, max_examples=300)
@given(TRICKY, st.integers(1, 30))
def test_pieces_give_the_ids_of_the_whole_text(text: str, length: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_CHARACTERS", length)
        for tokenizer in (BPE, BYTE, build("char", text + "x")):
            whole = tokenizer._library.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text) == whole


def test_long_texts_are_really_cut() -> None:
    for tokenizer in (BPE, BYTE, build("char")):
        assert len(list(tokenizer.encode_pieces([TEXT * 100]))) > 5


def test_pieces_tell_where_texts_begin_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 2)
    got = [
        (piece.n_characters, piece.first, piece.last) for piece in BYTE.encode_pieces(["abc", ""])
    ]
    assert got == [(2, True, False), (1, False, True), (0, True, True)]


@pytest.mark.slow
@pytest.mark.parametrize("blank", [" ", "\n"])
def test_a_blank_behind_any_visible_character_begins_a_new_word(blank: str) -> None:
    """The claim that `edge_of_word` rests on, for all of Unicode."""
    visible = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    text = "".join("a" + c + blank + "b" for c in visible if not c.isspace())
    words = BPE._library.pre_tokenizer.pre_tokenize_str(text)
    ends = {end for _, (_, end) in words}
    assert all(position + 2 in ends for position in range(0, len(text), 4))


def test_a_split_that_is_not_understood_gets_its_texts_whole(tmp_path: Path) -> None:
    pattern = {"Regex": r"[^\s]+\s*|\s+"}  # joins a word with the blanks behind it
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    raw = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = {"type": "Sequence", "pretokenizers": [split, raw]}
    other = Tokenizer.load(library_file(tmp_path, pre_tokenizer=steps))
    assert len(list(other.encode_pieces([TEXT * 100]))) == 1
    assert other.decode(other.encode(TEXT)) == TEXT


def test_word_edges_leave_no_piece_empty() -> None:
    text = "a  b\n\nc " * 3000
    parts = [piece.text for piece in cut([text], edge_of_word)]
    assert "".join(parts) == text
    assert all(parts)


# Streams


@patient
@given(st.lists(st.integers(0, 299), max_size=60))
def test_a_stream_equals_the_whole_for_any_ids(ids: list[int]) -> None:
    stream = BPE.stream()
    text = "".join(stream.step(token_id) for token_id in ids) + stream.flush()
    assert text == BPE.decode(ids)


@patient
@given(st.text())
def test_a_stream_never_shows_half_a_character(text: str) -> None:
    stream = BYTE.stream()
    shown = ""
    for token_id in BYTE.encode(text):
        shown += stream.step(token_id)
        assert text.startswith(shown)
    assert shown == text
    assert stream.flush() == ""


def test_flush_marks_a_character_that_was_never_completed() -> None:
    stream = BYTE.stream()
    assert [stream.step(byte) for byte in "é🙂".encode()[:4]] == ["", "é", "", ""]
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"


# Bytes per token


@patient
@given(st.text())
def test_bytes_add_up_to_the_text_in_any_tokenizer(text: str) -> None:
    for tokenizer in (BPE, BYTE, build("char", text + "x")):
        assert tokenizer.n_bytes(tokenizer.encode(text)) == len(text.encode())


def test_bytes_of_single_tokens() -> None:
    first_of_emoji = BPE.encode("🙂")[0]  # untrained: one byte of four
    assert BPE.n_bytes([first_of_emoji]) == 1
    assert BPE.n_bytes([0]) == 0  # the special token is not text
    assert BPE.n_bytes([]) == 0


def test_bytes_of_targets_skip_what_has_no_loss() -> None:
    ids = BPE.encode("Romeo")
    targets = torch.tensor([[*ids, -100], [*ids, 0]])
    assert BPE.n_bytes(targets) == 2 * len("Romeo")


# Unknown characters


def test_unknown_characters_are_listed_with_their_positions() -> None:
    with pytest.raises(ValueError, match=r"'#' at 2, 'é' at 5; it knows") as error:
        build("char", "abc").encode("ab#bcé#")
    assert "\n" not in str(error.value)


def test_many_unknown_characters_are_cut_short() -> None:
    with pytest.raises(ValueError, match="and 92 more"):
        build("char", "a").encode("".join(map(chr, range(1000, 1100))))


# Files


@pytest.mark.parametrize("tokenizer", [BPE, BYTE, build("char"), IDENTITY])
def test_a_saved_tokenizer_comes_back_with_the_same_hash(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    text = SYMBOLS if tokenizer is IDENTITY else TEXT
    assert loaded.sha256 == tokenizer.sha256
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.alphabet == tokenizer.alphabet
    assert (loaded.bos_id, loaded.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_the_hash_ignores_layout_but_not_content(tmp_path: Path) -> None:
    path = library_file(tmp_path)
    layout = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(dict(reversed(layout.items())), indent=3), encoding="utf-8")
    assert Tokenizer.load(path).sha256 == BPE.sha256
    assert BPE.sha256 != BYTE.sha256


def test_separate_marks_for_beginning_and_end_are_found(tmp_path: Path) -> None:
    def added(token_id: int, content: str) -> dict[str, Any]:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {"id": token_id, "content": content, "special": True, **flags}

    tokens = [added(300, "<s>"), added(301, "</s>")]
    other = Tokenizer.load(library_file(tmp_path, added_tokens=tokens))
    assert (other.bos_id, other.eos_id, other.vocab_size) == (300, 301, 302)


def test_a_file_is_used_as_it_is(tmp_path: Path) -> None:
    path = library_file(tmp_path)
    built = build_tokenizer(TokenizerConfig(kind="file", path=str(path)), ["other text"], [])
    assert built.sha256 == BPE.sha256


PREFIXED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": None}, "neither byte-level nor made of single characters"),
        ({"pre_tokenizer": PREFIXED}, "does not come back exactly"),
        ({"model": {"type": "Nonsense"}}, "no tokenizer.json"),
    ],
)
def test_unusable_files_are_refused_in_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = library_file(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        build_tokenizer(TokenizerConfig(kind="file", path=str(path)), [TEXT], [])
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"not json", b"\xff\xfe{}", b"[]", b""])
def test_files_that_are_no_tokenizers_are_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json: ") as error:
        Tokenizer.load(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.json: no such tokenizer file"):
        Tokenizer.load(tmp_path / "gone.json")


# Settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "bpd"}, r"'bpd' is unknown; did you mean bpe\?"),
        ({"kind": "bpe", "vocab_size": 256}, "vocab_size=256 is too small for bpe: at least 257"),
        ({"kind": "file"}, "needs tokenizer.path"),
        ({"kind": "bpe", "path": "x.json"}, "read by tokenizer.kind=file only"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenizerConfig(**options)


def test_no_text_gives_no_characters() -> None:
    with pytest.raises(ValueError, match=r"no text to take characters from; check data\.path"):
        build("char", "")


# Processes


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_the_library_is_not_loaded_before_it_is_needed() -> None:
    run_python("import sys, data.tokenizers; assert 'tokenizers' not in sys.modules")


def test_a_forked_worker_encodes_without_warnings() -> None:
    result = run_python(
        "import os\n"
        "from data.tokenizers import TokenizerConfig, build_tokenizer\n"
        "byte = build_tokenizer(TokenizerConfig(kind='byte'), [], [])\n"
        "text = 'some text ' * 5000\n"
        "byte.encode(text)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    assert os.environ['TOKENIZERS_PARALLELISM'] == 'false'\n"
        "    assert len(byte.encode(text)) == len(text)\n"
        "    os._exit(0)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    assert result.stdout.strip() == "0"
    assert result.stderr == ""
