"""Where a prompt comes from, and the ids it becomes."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from serving.printing import say

if TYPE_CHECKING:
    from data.tokenizers import Tokenizer


def read_prompt(args: argparse.Namespace) -> str:
    """Return the prompt from the command line, a file or standard input; "" if there is none."""
    if args.prompt_file not in (None, "-"):
        return read_text(args.prompt_file, "--prompt-file")
    if args.prompt not in (None, "-"):
        return decode(os.fsencode(args.prompt), "--prompt")
    asked_for = "-" in (args.prompt, args.prompt_file)
    if not asked_for and not is_piped():
        return ""
    if not asked_for:
        say("reading the prompt from standard input")
    return read_text("-", "--prompt")


def read_text(path: str, option: str) -> str:
    """Return the text of the UTF-8 file that an option names; "-" is standard input."""
    if path == "-":
        if sys.stdin is None:
            raise ValueError(f"{option} - reads standard input, which is closed")
        return decode(sys.stdin.buffer.read(), "standard input")
    try:
        return decode(Path(path).read_bytes(), path)
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from error


def decode(raw: bytes, source: str) -> str:
    """Return UTF-8 bytes as text."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise ValueError(f"{source} is not UTF-8: byte 0x{byte:02x} at {error.start}") from error


def is_piped() -> bool:
    """Whether standard input is a pipe or a file, and not a terminal or nothing."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something of Python's
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids to go on from: BOS where there is one, as in training, then the prompt."""
    from training.report import neutral_prompt

    tokenizer.check_known(prompt, "the prompt")
    if not prompt:
        return neutral_prompt(tokenizer)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return begin + tokenizer.encode(prompt)
