"""Small token files for the tests, written from lists of ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data.token_files import Provenance, TokenFile, TokenFileWriter


def write_tokens(
    folder: Path,
    documents: Sequence[Sequence[int]],
    *,
    split: str = "train",
    vocab_size: int = 100,
    bos_id: int | None = None,
    eos_id: int | None = None,
    tail: Sequence[int] = (),
) -> TokenFile:
    """A token file of the given documents, marks included; `tail` follows the last document."""
    provenance = Provenance(
        split=split,
        source={"text.txt": "abc"},
        split_rule="by hand",
        tokenizer_sha256="def",
        vocab_size=vocab_size,
        bos_id=bos_id,
        eos_id=eos_id,
    )
    with TokenFileWriter(folder, provenance) as writer:
        for document in documents:
            writer.begin_document()
            writer.add(document)
            writer.count_text(n_characters=len(document), n_bytes=2 * len(document))
        writer.add(tail)
    return TokenFile(folder, split)
