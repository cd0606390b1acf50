"""What goes to standard output and what to standard error."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model.generate import Generation
    from model.text_stream import Piece

BETWEEN_SAMPLES = "---------------"


def print_samples(prompt: str, pieces: Iterable[Piece], count: int) -> None:
    """Print the samples in order, one of them as it comes and those behind it when it has ended.

    Each is the prompt, its continuation and a line break.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    waiting = [prompt] + [f"{BETWEEN_SAMPLES}\n{prompt}"] * (count - 1)
    ended: set[int] = set()
    current = 0

    def show() -> None:
        sys.stdout.write(waiting[current])
        sys.stdout.flush()
        waiting[current] = ""

    show()
    for piece in pieces:
        waiting[piece.sample] += piece.text
        if piece.is_last:
            waiting[piece.sample] += "\n"
            ended.add(piece.sample)
        show()
        while current in ended and current + 1 < count:
            current += 1
            show()


def say(line: str) -> None:
    """Print a line that is not text of the model."""
    print(line, file=sys.stderr, flush=True)


def say_limit(generation: Generation, context_length: int) -> None:
    """Say where the context length cut something off."""
    if generation.report.prompt_tokens > context_length:
        say(f"the prompt is longer than the context of {context_length}: only its end was read")
    if "context" in generation.ends:
        say(f"ended at the context length of {context_length} tokens; --at-limit slide goes on")
