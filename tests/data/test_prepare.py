"""Preparation: the right tokens on disk, made once, and again exactly when something changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data import prepare as module
from data.prepare import Prepared, prepare
from data.sources import DataConfig, Document, Log, Splits
from data.token_files import TokenFile
from data.tokenizers import TokenizerConfig, build_tokenizer

TRAIN = ["To be, or not to be:\nthat is the question.\n" * 5, "é 🙂 <|endoftext|>\n" * 3, "x"]
VAL = ["Whether 'tis nobler in the mind to suffer\n" * 4]


class Source:
    """Stands in for a text source; counts how often the text is walked."""

    def __init__(self) -> None:
        self.train, self.val = TRAIN, VAL
        self.split_rule = "by hand"
        self.error: Exception | None = None

    def load(self, config: DataConfig, log: Log) -> Splits:
        if self.error:
            raise self.error
        texts = json.dumps([self.train, self.val])
        return Splits(
            train=[Document(text=text, name=f"train {n}") for n, text in enumerate(self.train)],
            val=[Document(text=text, name=f"val {n}") for n, text in enumerate(self.val)],
            fingerprint={"texts": hashlib.sha256(texts.encode()).hexdigest()},
            description="a few lines",
            split_rule=self.split_rule,
        )


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    stand_in = Source()
    monkeypatch.setattr(module, "load_documents", stand_in.load)
    return stand_in


@pytest.fixture
def run(source: Source, tmp_path: Path) -> Callable[..., Prepared]:
    """Prepare in a cache of its own; keywords that begin with a group's name go there."""

    def prepare_with(
        kind: str = "bpe", *, context_length: int = 8, log: Log = lambda line: None, **options: Any
    ) -> Prepared:
        own = {name: options.pop(name) for name in ("vocab_size",) if name in options}
        path = options.pop("tokenizer_path", None)
        size = options.pop("bpe_size", 280)
        data = DataConfig(cache_dir=str(tmp_path / "cache"), **options)
        tokenizer = TokenizerConfig(kind=kind, vocab_size=size, path=path)
        return prepare(data, tokenizer, context_length=context_length, log=log, **own)

    return prepare_with


def ids_of(tokens: TokenFile) -> list[int]:
    return tokens.read(0, len(tokens)).tolist()


# What is written


def test_bpe_documents_lie_between_marks(run: Callable[..., Prepared]) -> None:
    prepared = run("bpe")
    expected: list[int] = []
    starts = []
    for text in TRAIN:
        starts.append(len(expected))
        expected += [0, *prepared.tokenizer.encode(text)]
    assert ids_of(prepared.train) == [*expected, 0]
    assert prepared.train.starts.tolist() == starts


def test_characters_lie_next_to_each_other_with_nothing_between(
    run: Callable[..., Prepared],
) -> None:
    prepared = run("char")
    assert prepared.tokenizer.decode(ids_of(prepared.train)) == "".join(TRAIN)
    assert prepared.train.starts.tolist() == [0, len(TRAIN[0]), len(TRAIN[0]) + len(TRAIN[1])]
    assert set("".join(TRAIN + VAL)) == prepared.tokenizer.alphabet


def test_bytes_are_the_text_itself(run: Callable[..., Prepared]) -> None:
    assert bytes(ids_of(run("byte").val)) == VAL[0].encode()


def test_separate_marks_enclose_each_document(run: Callable[..., Prepared], tmp_path: Path) -> None:
    bpe = tmp_path / "bpe.json"
    build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=280), TRAIN, []).save(bpe)
    layout = json.loads(bpe.read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    layout["added_tokens"] = [
        {"id": 280, "content": "<s>", "special": True, **flags},
        {"id": 281, "content": "</s>", "special": True, **flags},
    ]
    bpe.write_text(json.dumps(layout), encoding="utf-8")
    prepared = run("file", tokenizer_path=str(bpe))
    encoded = [prepared.tokenizer.encode(text) for text in TRAIN]
    assert ids_of(prepared.train) == [i for ids in encoded for i in (280, *ids, 281)]


def test_the_sidecar_counts_the_text(run: Callable[..., Prepared]) -> None:
    sidecar = run("bpe").train.sidecar
    assert sidecar.n_documents == 3
    assert sidecar.n_characters == sum(map(len, TRAIN))
    assert sidecar.n_bytes == sum(len(text.encode()) for text in TRAIN)
    assert sidecar.provenance.split_rule == "by hand"


def test_empty_documents_leave_no_trace(run: Callable[..., Prepared], source: Source) -> None:
    source.train = [TRAIN[0], "", TRAIN[2]]
    assert run("bpe").train.sidecar.n_documents == 2


# Made once


def test_a_second_time_nothing_is_written(
    run: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run("bpe")
    monkeypatch.setattr(module, "build_tokenizer", None)  # cannot be called
    again = run("bpe")
    assert (first.reused, again.reused) == (False, True)
    assert again.folder == first.folder
    assert ids_of(again.train) == ids_of(first.train)


def test_how_tokens_are_read_makes_no_difference(run: Callable[..., Prepared]) -> None:
    run("bpe")
    assert run("bpe", mode="bos_aligned").reused
    assert run("bpe", mode="document", context_length=4).reused


def test_anything_that_changes_the_tokens_makes_them_again(
    run: Callable[..., Prepared], source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {run("bpe").folder}
    folders.add(run("bpe", bpe_size=285).folder)
    folders.add(run("char").folder)
    source.split_rule = "otherwise"
    folders.add(run("bpe").folder)
    source.val = ["another validation text"]
    folders.add(run("bpe").folder)
    folders.add(run("bpe", source="tiny_shakespeare").folder)
    folders.add(run("bpe", source="tiny_shakespeare", val_fraction=0.2).folder)
    monkeypatch.setattr(module, "PREPARATION_VERSION", 99)
    folders.add(run("bpe").folder)
    assert len(folders) == 8


def test_a_tokenizer_file_counts_by_its_content(
    run: Callable[..., Prepared], tmp_path: Path
) -> None:
    small, large = (
        build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=size), TRAIN, [])
        for size in (270, 280)
    )
    path, copy = tmp_path / "tokenizer.json", tmp_path / "copy.json"
    small.save(path)
    small.save(copy)
    first = run("file", tokenizer_path=str(path))
    assert run("file", tokenizer_path=str(copy)).reused
    large.save(path)
    second = run("file", tokenizer_path=str(path))
    assert not second.reused
    assert second.tokenizer.sha256 != first.tokenizer.sha256


@pytest.mark.parametrize(
    "name", ["train.bin", "val.bin", "train.json", "val.starts.npy", "tokenizer.json"]
)
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_damaged_data_is_made_again_with_a_message(
    name: str, damage: str, run: Callable[..., Prepared]
) -> None:
    first = run("bpe")
    whole = ids_of(first.train)
    path = first.folder / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5])
    lines: list[str] = []
    again = run("bpe", log=lines.append)
    assert not again.reused
    assert ids_of(again.train) == whole
    messages = [line for line in lines if "made again" in line]
    assert len(messages) == 1
    assert name in messages[0]
    assert run("bpe").reused


def test_tokens_of_another_tokenizer_are_made_again(run: Callable[..., Prepared]) -> None:
    first = run("bpe")
    build_tokenizer(TokenizerConfig(kind="byte"), [], []).save(first.folder / "tokenizer.json")
    lines: list[str] = []
    assert not run("bpe", log=lines.append).reused
    assert any("another tokenizer" in line for line in lines)


def test_a_failure_leaves_nothing_behind(
    run: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_move_into_place", fail)
        with pytest.raises(KeyboardInterrupt):
            run("bpe")
    assert list((tmp_path / "cache").iterdir()) == []
    assert not run("bpe").reused


def test_another_process_that_was_faster_is_no_error(
    run: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run("bpe")
    monkeypatch.setattr(module, "_open_if_sound", lambda folder, log: None)
    again = run("bpe")
    assert ids_of(again.train) == ids_of(first.train)
    assert [path.name for path in first.folder.parent.iterdir()] == [first.folder.name]


# Checks and messages


def test_bos_alignment_without_bos_is_refused_before_text_is_read(
    run: Callable[..., Prepared], source: Source
) -> None:
    source.error = AssertionError("the text was read")
    for kind in ("char", "byte"):
        with pytest.raises(ValueError, match="bos_aligned needs a tokenizer with a BOS token"):
            run(kind, mode="bos_aligned")


def test_a_missing_tokenizer_file_is_noticed_before_text_is_read(
    run: Callable[..., Prepared], source: Source
) -> None:
    source.error = AssertionError("the text was read")
    with pytest.raises(FileNotFoundError, match=r"gone\.json"):
        run("file", tokenizer_path="gone.json")


@pytest.mark.parametrize("prepared_before", [False, True])
def test_a_model_with_too_few_ids_is_refused_before_anything_is_encoded(
    prepared_before: bool, run: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    if prepared_before:
        run("bpe")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_build", None)  # cannot be called
        with pytest.raises(ValueError, match=r"model\.vocab_size=279 .* the tokenizer's 280 ids"):
            run("bpe", vocab_size=279)
    for enough in (280, 384, 0, None):
        run("bpe", vocab_size=enough)


def test_a_short_validation_split_is_an_error(run: Callable[..., Prepared]) -> None:
    with pytest.raises(ValueError, match=r"the val split has 168 tokens, .* needs 201"):
        run("char", context_length=200)


def test_an_unknown_character_is_an_error_that_names_the_document(
    run: Callable[..., Prepared], source: Source, tmp_path: Path
) -> None:
    path = tmp_path / "char.json"
    build_tokenizer(TokenizerConfig(kind="char"), TRAIN, VAL).save(path)
    source.train = [TRAIN[0], "strange: ß"]
    with pytest.raises(ValueError, match=r"train 1 holds characters .*'ß' at 9"):
        run("file", tokenizer_path=str(path))


def test_the_log_says_what_there_is(run: Callable[..., Prepared]) -> None:
    lines: list[str] = []
    prepared = run("bpe", bpe_size=5000, log=lines.append)
    text = "\n".join(lines)
    n_train, n_val = len(prepared.train), len(prepared.val)
    assert f"tokenizer: bpe, {prepared.tokenizer.vocab_size} ids (5,000 asked for)" in text
    assert f"train: 3 documents, 270 characters, {n_train} tokens, {(n_train - 1) // 8} win" in text
    assert f"val: 1 documents, 168 characters, {n_val} tokens, {(n_val - 1) // 8} windows" in text
    assert "a few lines; by hand; prepared in " in text
    again: list[str] = []
    run("bpe", bpe_size=5000, log=again.append)
    assert "a few lines; by hand; as prepared earlier in " in "\n".join(again)


def test_your_own_file_becomes_tokens(tmp_path: Path) -> None:
    """The real source, once from end to end."""
    path = tmp_path / "text.txt"
    path.write_text("All the world's a stage,\r\nand all the men é\n" * 20, encoding="utf-8")
    data = DataConfig(path=str(path), cache_dir=str(tmp_path / "cache"))
    first = prepare(data, TokenizerConfig(kind="char"), context_length=16, log=lambda line: None)
    text = "All the world's a stage,\nand all the men é\n" * 20
    whole = ids_of(first.train) + ids_of(first.val)
    assert first.tokenizer.decode(whole) == text
    assert len(first.train) == int(len(text) * 0.9)
    path.write_text("Another text, and quite another one, to be sure.\n" * 20, encoding="utf-8")
    second = prepare(data, TokenizerConfig(kind="char"), context_length=16, log=lambda line: None)
    assert second.tokenizer.decode(ids_of(second.train)).startswith("Another text")
