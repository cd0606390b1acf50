"""What goes to standard output and what to standard error."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model.generate import Generation, Generator
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


def say_limit(generation: Generation, generator: Generator) -> None:
    """Say where the context length cut something off."""
    context_length = generator.model.config.context_length
    if generation.report.prompt_tokens > context_length:
        slides = generator.at_limit == "slide"
        read = "its end was" if slides else "its beginning and its end were"
        say(f"the prompt is longer than the context of {context_length}: only {read} read")
    if "context" in generation.ends:
        say(
            f"ended at the context length of {context_length} tokens; --at-limit slide goes on, "
            f"and so does stream"
        )


def say_cache_error(generator: Generator, prompt: list[int], generation: Generation) -> None:
    """Say how far an inexact cache was off on the first text; an exact one is not mentioned."""
    error = generator.cache_error(prompt + generation.tokens[0])
    if error is not None:
        say(f"cache {generator.cache.kind}, {generation.cache_bytes:,} bytes: {error}")
