"""From a source of text to token files on disk: done once, and again when something changed.

The result of a preparation is a folder in `data.cache_dir` whose name ends in a key: the hash of
everything that decides its content. Other settings, another text or another tokenizer have another
key, so stale data is never taken for fresh. The folder is built under a temporary name and renamed,
so that it is either complete or not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from data.sources import DataConfig, Document, Log, Splits, load_documents
from data.token_files import FORMAT_VERSION, Provenance, TokenFile, TokenFileWriter
from data.tokenizers import WITHOUT_BOS, Piece, Tokenizer, TokenizerConfig, build_tokenizer
from data.windows import NO_BOS, Windows

# Raise this when a change of the code changes what is written for the same input.
PREPARATION_VERSION = 1

# Settings that say where things lie, which their hashes stand for, or how tokens are read later.
_NOT_IN_KEY = (
    "data.source",
    "data.path",
    "data.val_path",
    "data.cache_dir",
    "data.mode",
    "tokenizer.path",
)

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Token files of both splits, the tokenizer they were made with, and the folder they are in."""

    train: TokenFile
    val: TokenFile
    tokenizer: Tokenizer
    folder: Path
    reused: bool  # taken from an earlier preparation


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    context_length: int,
    vocab_size: int | None = None,
    log: Log = print,
) -> Prepared:
    """Load the text, build or find its tokenizer, and encode both splits into token files.

    Checks that both splits fill a window of `context_length`, and that the tokenizer's ids fit into
    the model's `vocab_size` (None or 0 leaves it open), so that no run fails on them later.

    Raises:
        ValueError, FileNotFoundError: in one line, for text, a tokenizer or settings that cannot be
            used together.
    """
    if data.mode == "bos_aligned" and tokenizer.kind in WITHOUT_BOS:
        raise ValueError(NO_BOS)
    given = Tokenizer.load(tokenizer.path) if tokenizer.path else None
    splits = load_documents(data, log)
    folder = Path(data.cache_dir) / _folder_name(data, tokenizer, given, splits)
    prepared = _open_if_sound(folder, log)
    if prepared is None:
        built = build_tokenizer(tokenizer, _texts(splits.train), _texts(splits.val))
        _check_vocab(built, vocab_size)  # before the long part
        _build(folder, built, splits, log)
        prepared = _open(folder, reused=False)
    _check_vocab(prepared.tokenizer, vocab_size)
    _report(prepared, tokenizer, splits, log)
    for tokens in (prepared.train, prepared.val):
        log(_describe(tokens, Windows(tokens, context_length, data.mode)))
    return prepared


def _folder_name(
    data: DataConfig, tokenizer: TokenizerConfig, given: Tokenizer | None, splits: Splits
) -> str:
    """Name that ends in a hash of everything that decides what the files hold.

    The settings enter one by one, so that one which is added to `DataConfig` is not forgotten here.
    """
    settings = {f"data.{name}": value for name, value in asdict(data).items()}
    settings |= {f"tokenizer.{name}": value for name, value in asdict(tokenizer).items()}
    content = {
        "settings": {name: settings[name] for name in settings if name not in _NOT_IN_KEY},
        "versions": [PREPARATION_VERSION, FORMAT_VERSION],
        "source": [data.used_source, splits.fingerprint, splits.split_rule],
        "tokenizer": given.sha256 if given else None,
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{data.used_source}-{tokenizer.kind}-{key[:16]}"


def _open_if_sound(folder: Path, log: Log) -> Prepared | None:
    if not folder.exists():
        return None
    try:
        return _open(folder, reused=True)
    except (OSError, ValueError) as error:
        log(f"prepared data cannot be used and is made again: {error}")
        shutil.rmtree(folder)
        return None


def _open(folder: Path, *, reused: bool) -> Prepared:
    tokenizer = Tokenizer.load(folder / TOKENIZER_FILE)
    train, val = TokenFile(folder, "train"), TokenFile(folder, "val")
    for tokens in (train, val):
        if tokens.provenance.tokenizer_sha256 != tokenizer.sha256:
            raise ValueError(
                f"{tokens.path} was encoded with another tokenizer than lies beside it"
            )
    return Prepared(train=train, val=val, tokenizer=tokenizer, folder=folder, reused=reused)


def _build(folder: Path, tokenizer: Tokenizer, splits: Splits, log: Log) -> None:
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        tokenizer.save(temporary / TOKENIZER_FILE)
        _encode(temporary, "train", splits.train, tokenizer, splits, log)
        _encode(temporary, "val", splits.val, tokenizer, splits, log)
        _move_into_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_into_place(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.exists():  # otherwise another process has just made the same
            raise


def _encode(
    folder: Path,
    split: str,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    splits: Splits,
    log: Log,
) -> None:
    """Write a split: each document as BOS, its text and EOS.

    Where one token is both it stands between two documents once, and once more behind the last.
    """
    bos_id, eos_id = tokenizer.bos_id, tokenizer.eos_id
    provenance = Provenance(
        split=split,
        source=splits.fingerprint,
        split_rule=splits.split_rule,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        bos_id=bos_id,
        eos_id=eos_id,
    )
    pieces = tokenizer.encode_pieces(_known_texts(documents, tokenizer))
    with TokenFileWriter(folder, provenance) as writer:
        for piece in _with_progress(pieces, split, documents, log):
            if piece.first:
                writer.begin_document()
                if bos_id is not None:
                    writer.add([bos_id])
            writer.add(piece.ids)
            writer.count_text(n_characters=piece.n_characters, n_bytes=tokenizer.n_bytes(piece.ids))
            if piece.last and eos_id is not None and eos_id != bos_id:
                writer.add([eos_id])
        if eos_id is not None and eos_id == bos_id:
            writer.add([eos_id])


def _with_progress(
    pieces: Iterator[Piece], split: str, documents: Iterable[Document], log: Log
) -> Iterator[Piece]:
    """Show a bar on a terminal, and elsewhere one line when all is done."""
    n_characters = sum(len(text) for text in _texts(documents))
    began = time.perf_counter()
    bar = tqdm(
        total=n_characters,
        desc=f"encoding {split}",
        unit="char",
        unit_scale=True,
        disable=None,
        leave=False,
    )
    with bar:
        for piece in pieces:
            yield piece
            bar.update(piece.n_characters)
    log(f"encoded {split}: {n_characters:,} characters in {time.perf_counter() - began:.1f} s")


def _texts(documents: Iterable[Document]) -> Iterator[str]:
    return (document.text for document in documents)


def _known_texts(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[str]:
    """Texts that can be encoded; the first that cannot is an error that names its document."""
    for document in documents:
        tokenizer.check_known(document.text, document.name)
        if document.text:
            yield document.text


def _check_vocab(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    if vocab_size and vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} "
            "ids; leave it at 0 to take the tokenizer's"
        )


def _report(prepared: Prepared, config: TokenizerConfig, splits: Splits, log: Log) -> None:
    state = "as prepared earlier" if prepared.reused else "prepared"
    log(f"data: {splits.description}; {splits.split_rule}; {state} in {prepared.folder}")
    asked = f" ({config.vocab_size:,} asked for)" if config.kind == "bpe" else ""
    log(f"tokenizer: {config.kind}, {prepared.tokenizer.vocab_size:,} ids{asked}")


def _describe(tokens: TokenFile, windows: Windows) -> str:
    sizes = tokens.sidecar
    return (
        f"{tokens.provenance.split}: {sizes.n_documents:,} documents, "
        f"{sizes.n_characters:,} characters, {sizes.n_tokens:,} tokens, {windows.describe()}"
    )
