"""Text files, tables and folders of one's own, and everything that can be wrong with them."""

import json
import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.files import CHUNK_BYTES, check_file, find_files
from data.sources import DataConfig, load_documents


@pytest.fixture
def load(tmp_path):
    """Load `path` with a cache folder of the test's own; the log is kept in `load.log`."""

    def load(path, **settings):
        load.log = []
        config = DataConfig(path=str(path), cache_dir=str(tmp_path / "cache"), **settings)
        return load_documents(config, load.log.append)

    return load


def texts(documents):
    return [document.text for document in documents]


def names(documents):
    return [document.name for document in documents]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def write_parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


# Text files


def test_one_file_is_split_by_characters_as_nanogpt_does(load, tmp_path):
    text = "".join(f"line {i}: ünïcödé\n" for i in range(1000))
    file = tmp_path / "a.txt"
    file.write_text(text, "utf-8")
    splits = load(file)
    cut = int(0.9 * len(text))
    assert texts(splits.train) == [text[:cut]]
    assert texts(splits.val) == [text[cut:]]
    assert splits.split_rule == "validation is the last 0.1 of the characters"


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # content decides, not the folder
)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), min_size=1))
def test_text_is_kept_byte_for_byte(load, tmp_path, text):
    file = tmp_path / "any.txt"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())  # the mark itself is not text
    splits = load(file)
    assert "".join(texts(splits.train) + texts(splits.val)) == text


def test_windows_line_ends_are_named_and_become_newlines(load, tmp_path):
    file = tmp_path / "dos.txt"
    file.write_bytes(b"one\r\ntwo\r\n\r\nthree")
    splits = load(file)
    assert "".join(texts(splits.train) + texts(splits.val)) == "one\ntwo\n\nthree"
    assert load.log == [f"{file}: 3 carriage returns (Windows line ends) become \\n"]


def test_a_folder_gives_whole_documents_in_order_of_names(load, tmp_path):
    folder = tmp_path / "books"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, text in {
        "z.txt": "z" * 12,
        "b/one.txt": "first\n\n" * 10,
        "a.TXT": "a" * 30,
        "empty.txt": "",
        "cover.jpg": "not text",
        ".git/log.txt": "hidden",
        ".hidden.txt": "hidden",
    }.items():
        (folder / name).write_text(text, "utf-8")
    splits = load(folder)
    assert names(splits.train) == ["a.TXT", "b/one.txt"]
    assert texts(splits.train) == ["a" * 30, "first\n\n" * 10]
    assert names(splits.val) == ["z.txt"]
    assert texts(splits.val) == ["z" * 12]
    assert list(splits.fingerprint) == ["a.TXT", "b/one.txt", "z.txt"]
    assert "last 1 of 3 documents" in splits.split_rule
    assert load.log == [
        f"{folder}: passed over {folder}/cover.jpg, not .txt",
        f"{folder}: passed over {folder}/empty.txt, empty",
    ]


def test_test_txt_is_a_document_like_any_other(load, tmp_path):
    for name in ("test.txt", "train.txt", "validation.txt"):
        (tmp_path / name).write_text(name * 10, "utf-8")
    splits = load(tmp_path)
    assert len(splits.train) + len(splits.val) == 3


def test_names_with_pattern_characters_are_read(load, tmp_path):
    (tmp_path / "a*").mkdir()
    file = tmp_path / "a*" / "b[1]?.txt"
    file.write_text("text " * 9, "utf-8")
    assert "".join(texts(load(file).train)) == ("text " * 9)[:40]


def test_reading_files_needs_no_network(load, tmp_path, monkeypatch):
    def connect(*_):
        pytest.fail("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", connect)
    (tmp_path / "a.txt").write_text("text " * 9, "utf-8")
    assert len(load(tmp_path / "a.txt").train) == 1


def test_relative_paths_start_at_the_launch_directory(load, tmp_path, monkeypatch):
    (tmp_path / "own.txt").write_text("my text " * 10, "utf-8")
    monkeypatch.chdir(tmp_path)
    assert len(load("own.txt").train) == 1


def test_changed_text_is_read_again(load, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old text " * 10, "utf-8")
    old = load(file)
    stamp = file.stat()
    file.write_text("new text " * 10, "utf-8")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same name, size and time
    new = load(file)
    assert texts(new.train)[0].startswith("new text")
    assert new.fingerprint != old.fingerprint


# Validation text of its own


def test_val_path_is_the_whole_validation_split(load, tmp_path):
    train, val = tmp_path / "train.txt", tmp_path / "val.jsonl"
    train.write_text("to train on", "utf-8")
    write_lines(val, [{"text": "one"}, {"text": "two"}])
    splits = load(train, val_path=str(val))
    assert texts(splits.train) == ["to train on"]
    assert texts(splits.val) == ["one", "two"]
    assert list(splits.fingerprint) == ["train.txt", "validation val.jsonl#text"]


def test_a_file_in_both_splits_is_refused(load, tmp_path):
    (tmp_path / "a.txt").write_text("a", "utf-8")
    (tmp_path / "b.txt").write_text("b", "utf-8")
    with pytest.raises(ValueError, match=r"b\.txt is in both data\.path and data\.val_path"):
        load(tmp_path, val_path=str(tmp_path / "b.txt"))


# Tables


@pytest.fixture(params=["jsonl", "parquet"])
def write_table(request, tmp_path):
    """Write columns as a table of either kind and return its path."""

    def write(name, **columns):
        path = tmp_path / f"{name}.{request.param}"
        if request.param == "parquet":
            return write_parquet(path, **columns)
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return write_lines(path, rows)

    return write


def test_rows_are_documents_kept_as_they_are(load, write_table):
    rows = ["a\r\n b \n", "2020-01-01", " ", "", "12", "é\u2028\x85\ufeffz", "last one"]
    path = write_table("rows", text=rows, score=list(range(len(rows))))
    splits = load(path, val_fraction=0.3)
    assert texts(splits.train) + texts(splits.val) == [row for row in rows if row]
    assert texts(splits.val) == ["last one"]
    assert len(splits.train) == 5
    assert names(splits.val) == [f"{path}, row 7"]
    assert texts(splits.train) == texts(splits.train)  # walked twice


def test_another_field_can_be_chosen(load, write_table):
    path = write_table("rows", title=["t"] * 3, content=["one", "two", "three"])
    splits = load(path, text_field="content")
    assert texts(splits.train) + texts(splits.val) == ["one", "two", "three"]
    assert splits.fingerprint.keys() == {f"{path.name}#content"}


def test_a_missing_field_lists_those_there(load, write_table):
    path = write_table("rows", title=["t"], texts=["one"])
    with pytest.raises(
        ValueError,
        match=r"no field text; fields there: title, texts; .* for example data\.text_field=texts",
    ):
        load(path)


def test_a_field_of_numbers_is_refused(load, write_table):
    with pytest.raises(ValueError, match=r"field text holds .*, not text"):
        load(write_table("rows", text=[1, 2]))


def test_rows_without_any_text_are_refused(load, write_table):
    with pytest.raises(ValueError, match="holds no text"):
        load(write_table("rows", text=["", ""]))


def test_a_folder_of_tables_is_one_text(load, write_table):
    path = write_table("a", text=["one", "two"])
    write_table("b", text=["three", "four"])
    splits = load(path.parent)
    assert texts(splits.train) + texts(splits.val) == ["one", "two", "three", "four"]


def test_many_rows_keep_their_order_and_names(load, write_table):
    rows = [f"document {i}" for i in range(2500)]
    path = write_table("many", text=rows)
    splits = load(path)
    assert texts(splits.train) + texts(splits.val) == rows
    assert names(splits.val)[-1] == f"{path}, row 2500"
    assert 240 < len(splits.val) < 260


def test_a_null_in_a_parquet_file_is_refused(load, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", text=["one", "two", None])
    with pytest.raises(ValueError, match=r"a\.parquet, row 3 holds null, not text"):
        load(path)


def test_bad_parquet_files_are_named(load, tmp_path):
    whole = write_parquet(tmp_path / "whole.parquet", text=["some text"] * 100)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"cut\.parquet: not a parquet file"):
        load(cut)
    spoilt = tmp_path / "spoilt.parquet"
    content = bytearray(whole.read_bytes())
    content[4:40] = bytes(36)
    spoilt.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot read .*spoilt\.parquet: ") as caught:
        load(spoilt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        ('{"text": ', r"line 2: not JSON \(Expecting value at column 10\)"),
        ('{"text": "a"} {"text": "b"}', r"line 2: not JSON \(Extra data at column 15\)"),
        ('["a", "b"]', "line 2: holds a list, not an object"),
        ('{"text": null}', "line 2: field text holds null, not text"),
        ('{"text": 5}', "line 2: field text holds 5, not text"),
        ("{}", "line 2: no field text; fields there: none"),
        ('{"body": "b"}', "line 2: no field text; fields there: body"),
        ('{"text": "b\\ud800"}', "line 2: field text holds half a surrogate pair at character 1"),
    ],
)
def test_a_bad_line_is_named(load, tmp_path, second_line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' + second_line + '\n{"text": "c"}\n', "utf-8")
    with pytest.raises(ValueError, match=rf"rows\.jsonl, {message}") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_blank_lines_and_a_byte_order_mark_are_no_rows(load, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}')
    splits = load(path)
    assert texts(splits.train) + texts(splits.val) == ["a", "b"]


# Faults of files and paths


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_bytes_that_are_not_utf8_are_named(load, tmp_path, suffix):
    path = tmp_path / f"latin{suffix}"
    path.write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=rf"latin{suffix}: byte 13 \(0xe9\) is not UTF-8; convert"):
        load(path)


@pytest.mark.parametrize("before", [0, 1, CHUNK_BYTES - 2, CHUNK_BYTES - 1, CHUNK_BYTES])
@pytest.mark.parametrize(
    ("bad", "at"),
    [(b"\xff", 0), (b"\xe2\x82", 0), (b"\xc3\xa9\x80", 2)],
    ids=["never", "cut_off", "alone"],
)
def test_the_offset_is_right_across_chunks(tmp_path, before, bad, at):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * before + bad)
    with pytest.raises(ValueError, match=rf"byte {before + at} \(0x{bad[at]:02x}\)"):
        check_file(path, is_text=True, progress=print)


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.parquet"])
def test_an_empty_file_is_refused(load, tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"data\.path=.*{name} is empty"):
        load(tmp_path / name)


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf", b"\n"], ids=["mark", "blank_line"])
def test_a_file_without_text_is_refused(load, tmp_path, content):
    suffix = "jsonl" if content == b"\n" else "txt"
    path = tmp_path / f"blank.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="holds no text"):
        load(path)


def test_a_mistyped_path_gets_the_nearest_name(load, tmp_path):
    (tmp_path / "stories").mkdir()
    (tmp_path / "stories" / "moby-dick.txt").write_text("Call me", "utf-8")
    with pytest.raises(FileNotFoundError, match=r"does not exist; did you mean .*moby-dick\.txt\?"):
        load(tmp_path / "stories" / "moby_dick.txt")
    with pytest.raises(FileNotFoundError, match=r"does not exist; did you mean .*stories\?"):
        load(tmp_path / "storys" / "moby-dick.txt")
    with pytest.raises(FileNotFoundError, match=r"data\.val_path=.*x\.txt does not exist$"):
        load(tmp_path / "stories", val_path=str(tmp_path / "x.txt"))


def test_files_of_no_readable_kind_are_refused(load, tmp_path):
    (tmp_path / "a.pdf").write_text("%PDF", "utf-8")
    with pytest.raises(ValueError, match=r"a\.pdf is not a \.txt, \.jsonl or \.parquet file"):
        load(tmp_path / "a.pdf")
    with pytest.raises(ValueError, match=r"holds no \.txt, \.jsonl or \.parquet file"):
        load(tmp_path)


def test_a_folder_of_two_kinds_is_refused(load, tmp_path):
    (tmp_path / "a.txt").write_text("a", "utf-8")
    write_lines(tmp_path / "b.jsonl", [{"text": "b"}])
    with pytest.raises(ValueError, match=r"holds \.jsonl and \.txt files; keep one kind"):
        load(tmp_path)


def test_a_text_file_too_large_for_a_table_is_refused(load, tmp_path):
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.truncate(1 << 31)  # takes no room on disk
    with pytest.raises(ValueError, match=r"huge\.txt has 2,147,483,648 bytes, more than 2,147,483"):
        load(path)


def test_the_home_folder_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("a", "utf-8")
    assert find_files("data.path", Path("~/a.txt"), print).files == [tmp_path / "a.txt"]
