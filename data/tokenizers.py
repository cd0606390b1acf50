"""Text to token ids and back: byte-level BPE, single characters, raw bytes, or numbers.

Every kind is one `tokenizer.json` of the `tokenizers` library, so other tools can open a run's
tokenizer. `Tokenizer` wraps that library and adds what training needs: text is always encoded as
text (never as a special token), unknown characters are an error instead of vanishing, long texts
are encoded in pieces on all cores, each id knows its raw bytes (for bits per byte), and a decoder
for streams never prints half a character.

The module shares its last name with the library, which is therefore imported absolutely and lazily.
"""

from __future__ import annotations

import codecs
import difflib
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from data import byte_level
from data.pieces import Edge, TextPiece, cut, edge_anywhere, edge_nowhere, edge_of_word

KINDS = ("char", "bpe", "byte", "identity", "file")
WITHOUT_BOS = ("char", "byte")  # kinds that have no mark for the beginning of a document
END_OF_TEXT = "<|endoftext|>"
BEGIN_OF_SEQUENCE = "<|bos|>"
SYMBOLS = "0123456789abcdefghijklmnopqrstuv"  # of made-up text: the digit of 0, 1, ..., 31
MIN_BPE_VOCAB = 257  # the 256 bytes and END_OF_TEXT

# How tokenizers mark the beginning and the end of a document, None being not at all; the first pair
# found counts.
BOS_EOS_NAMES: tuple[tuple[str, str | None], ...] = (
    ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<s>", "</s>"),
    ("<bos>", "<eos>"),
    ("[BOS]", "[EOS]"),
    (END_OF_TEXT, END_OF_TEXT),
    (BEGIN_OF_SEQUENCE, None),
)

# How much is encoded at once: an encoded token costs about 100 bytes until its ids are read.
GROUP_CHARACTERS = 1 << 18

# Every length of UTF-8, runs of blanks, line ends, and a special token written as text.
_ROUND_TRIP_TEXT = f"A  b\tc\r\n\n don't  \x00\x7f é ß 中文。\n🙂\U0010ffff {END_OF_TEXT} end \n"


@dataclass(kw_only=True, slots=True)
class TokenizerConfig:
    """Which tokenizer to build; `vocab_size` concerns `bpe` only, `path` concerns `file` only."""

    kind: str = "char"
    vocab_size: int = 4096
    path: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            nearest = difflib.get_close_matches(self.kind, KINDS, n=1, cutoff=0)[0]
            choices = ", ".join(KINDS)
            raise ValueError(
                f"tokenizer.kind={self.kind!r} is unknown; did you mean {nearest}? ({choices})"
            )
        if self.kind == "bpe" and self.vocab_size < MIN_BPE_VOCAB:
            raise ValueError(
                f"tokenizer.vocab_size={self.vocab_size} is too small for bpe: at least "
                f"{MIN_BPE_VOCAB} (256 bytes and {END_OF_TEXT})"
            )
        if self.kind == "file" and not self.path:
            raise ValueError("tokenizer.kind=file needs tokenizer.path=<a tokenizer.json>")
        if self.kind != "file" and self.path:
            raise ValueError(
                f"tokenizer.path={self.path} is read by tokenizer.kind=file only, "
                f"but tokenizer.kind={self.kind}"
            )


class Piece(NamedTuple):
    """Ids of one piece of a text; `first` and `last` tell where a text begins and ends."""

    ids: list[int]
    n_characters: int
    first: bool
    last: bool


class Tokenizer:
    """A `tokenizers.Tokenizer` built from the text of a `tokenizer.json`.

    Attributes:
        vocab_size: number of ids; every id is below it.
        bos_id, eos_id: ids that begin and end a document (one id may do both), or None.
        alphabet: the known characters if it knows only some (`char`, `identity`), else None.
        token_bytes: the raw bytes of each id; none for special tokens, which are not text.
        sha256: hash of the canonical JSON, the same whatever the file's layout.

    Raises:
        ValueError: the text is no tokenizer, or one whose bytes per token are not defined.
    """

    def __init__(self, json_text: str) -> None:
        self._json_text = json_text
        try:
            self._library = _tokenizers().Tokenizer.from_str(json_text)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"this is no tokenizer.json: {_one_line(error)}") from error
        self._library.encode_special_tokens = True
        layout = json.loads(self._library.to_str())  # every field present, unlike in old files
        vocab: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        specials = {token["content"] for token in layout["added_tokens"] if token["special"]}
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.bos_id, self.eos_id = _document_marks(vocab, specials)
        self.alphabet = _alphabet(layout)
        is_byte_level = _is_byte_level(layout)
        if self.alphabet is None and not is_byte_level:
            raise ValueError(
                "this tokenizer is neither byte-level nor made of single characters, so text would "
                "not come back exactly; use a byte-level BPE such as GPT-2's"
            )
        self._edge = _find_edge(layout, self.alphabet)
        to_bytes = byte_level.bytes_of if is_byte_level else str.encode
        self.token_bytes = [b""] * self.vocab_size
        for token, token_id in vocab.items():
            if token not in specials:
                self.token_bytes[token_id] = to_bytes(token)
        self._n_bytes = np.array([len(raw) for raw in self.token_bytes], dtype=np.int64)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not UTF-8, or no tokenizer this class can hold.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such tokenizer file")
        try:
            return cls(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {_one_line(error)}") from error

    def save(self, path: str | Path) -> None:
        """Write the `tokenizer.json`, whole or not at all."""
        path = Path(path)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(self._json_text, encoding="utf-8")
        os.replace(temporary, path)

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the tokenizer's canonical JSON (sorted keys, no blanks)."""
        canonical = json.dumps(json.loads(self._json_text), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, all of it taken as plain text, without BOS or EOS.

        Raises:
            ValueError: `text` holds characters that a character tokenizer has never seen.
        """
        return [token_id for piece in self.encode_pieces([text]) for token_id in piece.ids]

    def encode_pieces(self, texts: Iterable[str]) -> Iterator[Piece]:
        """Encode `texts` one after the other, piece by piece, on all cores and in bounded memory.

        The ids of a text's pieces, put together, are those of the whole text.

        Raises:
            ValueError: a text holds characters that a character tokenizer has never seen.
        """
        group: list[TextPiece] = []
        n_characters = 0
        for piece in cut(self._known(texts), self._edge):
            group.append(piece)
            n_characters += len(piece.text)
            if n_characters >= GROUP_CHARACTERS:
                yield from self._encode_group(group)
                group, n_characters = [], 0
        yield from self._encode_group(group)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`. Special tokens have none; bytes that are not UTF-8 become U+FFFD."""
        return self._library.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> StreamDecoder:
        """Make a decoder that takes ids one at a time and returns text once it is complete."""
        return StreamDecoder(self.token_bytes)

    def n_bytes(self, ids: ArrayLike) -> int:
        """Count the bytes of text in `ids` (any shape), parts of characters included.

        Negative ids, which mark targets without loss, count nothing.
        """
        numbers = np.asarray(ids, dtype=np.int64)
        return int(self._n_bytes[numbers[numbers >= 0]].sum())

    def check_known(self, text: str, name: str = "the text") -> None:
        """Raise a ValueError listing the characters of `text` that have no id, with positions."""
        if self.alphabet is None:
            return
        unknown = set(text) - self.alphabet
        if not unknown:
            return
        shown = sorted(unknown, key=text.index)[:8]
        places = ", ".join(f"{character!r} at {text.index(character)}" for character in shown)
        more = f" and {len(unknown) - len(shown)} more" if len(unknown) > len(shown) else ""
        raise ValueError(
            f"{name} holds characters the tokenizer has never seen: {places}{more}; "
            f"it knows {len(self.alphabet)} (tokenizer=bpe and tokenizer=byte know all)"
        )

    def _known(self, texts: Iterable[str]) -> Iterator[str]:
        for text in texts:
            self.check_known(text)
            yield text

    def _encode_group(self, group: list[TextPiece]) -> Iterator[Piece]:
        texts = [piece.text for piece in group]
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        for piece, encoding in zip(group, encodings, strict=True):
            yield Piece(encoding.ids, len(piece.text), piece.first, piece.last)


class StreamDecoder:
    """Text of ids that arrive one at a time; a character is returned once its last byte is here.

    Everything returned, put together, equals `Tokenizer.decode` of all the ids.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        """Text that `token_id` completes, possibly none."""
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """Text of what is left: U+FFFD for a character that never was completed, else nothing."""
        return self._decoder.decode(b"", final=True)


def build_tokenizer(config: TokenizerConfig, train: Iterable[str], val: Iterable[str]) -> Tokenizer:
    """Build the tokenizer `config` asks for from the texts of the two splits.

    BPE is trained on `train` alone; characters are taken from both, as an unknown one cannot be
    encoded. Built twice from the same texts it is the same; `byte` and `identity` do not look at
    the texts at all.

    Raises:
        ValueError: there is no text to build from, or the given file is no usable tokenizer.
        FileNotFoundError: the given file does not exist.
    """
    if config.kind == "file":
        assert config.path is not None  # held by TokenizerConfig
        tokenizer = Tokenizer.load(config.path)
    elif config.kind == "bpe":
        tokenizer = _train_bpe(config.vocab_size, train)
    elif config.kind == "char":
        tokenizer = _collect_characters(train, val)
    elif config.kind == "identity":
        tokenizer = _numbers()
    else:
        tokenizer = _raw_bytes()
    _check_round_trip(tokenizer, config)
    return tokenizer


def _train_bpe(vocab_size: int, texts: Iterable[str]) -> Tokenizer:
    library = _tokenizers()
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((piece.text for piece in cut(texts, edge_of_word)), trainer)
    return Tokenizer(bpe.to_str(pretty=True))


def _collect_characters(train: Iterable[str], val: Iterable[str]) -> Tokenizer:
    characters: set[str] = set()
    for texts in (train, val):
        for text in texts:
            characters.update(text)
    if not characters:
        raise ValueError("there is no text to take characters from; check data.path")
    return Tokenizer(_single_characters(sorted(characters)).to_str(pretty=True))


def _numbers() -> Tokenizer:
    """Kind `identity`, for tasks whose text is made of numbers: the id of a symbol is its number.

    Unlike those of `char`, the ids do not depend on which symbols the text happens to hold, and
    after them comes a mark for the beginning of a sequence, which task and model can rely on.
    """
    identity = _single_characters(SYMBOLS)
    identity.add_special_tokens([BEGIN_OF_SEQUENCE])
    return Tokenizer(identity.to_str(pretty=True))


def _single_characters(characters: Iterable[str]) -> Any:
    """The library's tokenizer whose ids are the places of single characters."""
    library = _tokenizers()
    vocab = {character: token_id for token_id, character in enumerate(characters)}
    single = library.Tokenizer(library.models.BPE(vocab=vocab, merges=[]))
    single.decoder = library.decoders.Fuse()
    return single


def _raw_bytes() -> Tokenizer:
    library = _tokenizers()
    vocab = {symbol: byte for byte, symbol in enumerate(byte_level.SYMBOLS)}
    raw = library.Tokenizer(library.models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = library.decoders.ByteLevel()
    return Tokenizer(raw.to_str(pretty=True))


def _check_round_trip(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    if tokenizer.alphabet is None:
        # With and without a blank in front, which some tokenizers add or take away.
        texts = [_ROUND_TRIP_TEXT, f" {_ROUND_TRIP_TEXT}"]
    else:
        texts = ["".join(sorted(tokenizer.alphabet))]
    if any(tokenizer.decode(tokenizer.encode(text)) != text for text in texts):
        where = f"tokenizer.path={config.path}" if config.path else f"tokenizer.kind={config.kind}"
        raise ValueError(f"{where}: text does not come back exactly from this tokenizer")


def _document_marks(vocab: dict[str, int], specials: set[str]) -> tuple[int | None, int | None]:
    for bos, eos in BOS_EOS_NAMES:
        if bos in specials and (eos is None or eos in specials):
            return vocab[bos], None if eos is None else vocab[eos]
    return None, None


def _parts(step: dict[str, Any] | None, nested: str) -> list[dict[str, Any]]:
    """Steps of a pre-tokenizer or decoder, a sequence being taken apart."""
    if step is None:
        return []
    return step[nested] if step["type"] == "Sequence" else [step]


def _is_byte_level(layout: dict[str, Any]) -> bool:
    splits = _parts(layout["pre_tokenizer"], "pretokenizers")
    joins = _parts(layout["decoder"], "decoders")
    return any(step["type"] == "ByteLevel" for step in splits) and any(
        step["type"] == "ByteLevel" for step in joins
    )


def _alphabet(layout: dict[str, Any]) -> frozenset[str] | None:
    model = layout["model"]
    is_char = (
        model["type"] == "BPE"
        and not model["merges"]
        and layout["normalizer"] is None
        and layout["pre_tokenizer"] is None
        and layout["decoder"] == {"type": "Fuse"}
    )
    return frozenset(token for token in model["vocab"] if len(token) == 1) if is_char else None


def _find_edge(layout: dict[str, Any], alphabet: frozenset[str] | None) -> Edge:
    """Choose how texts may be cut; a tokenizer whose split is not understood gets them whole."""
    if alphabet is not None:
        return edge_anywhere
    split = layout["pre_tokenizer"]
    sees_raw_text = layout["normalizer"] is None and all(
        token["special"] for token in layout["added_tokens"]
    )
    if not sees_raw_text or split["type"] != "ByteLevel" or split["add_prefix_space"]:
        return edge_nowhere
    if split["use_regex"]:
        return edge_of_word
    only_bytes = all(len(token) == 1 for token in layout["model"]["vocab"])
    return edge_anywhere if only_bytes else edge_nowhere


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@functools.cache
def _tokenizers() -> ModuleType:
    """Import the library, and tell forked workers not to use its threads, which a fork loses.

    After a first fork the parent encodes on one core too.
    """
    import tokenizers

    os.register_at_fork(before=lambda: os.environ.setdefault("TOKENIZERS_PARALLELISM", "false"))
    return tokenizers
