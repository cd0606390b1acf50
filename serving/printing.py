"""What goes to standard output and what to standard error."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data.tokenizers import Tokenizer
    from model.generate import Generation, Generator
    from model.text_stream import Piece, TokenStream

BETWEEN_SAMPLES = "---------------"


def print_samples(prompt: str, pieces: Iterable[Piece], count: int) -> None:
    """Print the samples in order, one of them as it comes and those behind it when it has ended.

    Each is the prompt, its continuation and a line break.
    """
    use_utf8()
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


def use_utf8() -> None:
    """Write standard output in UTF-8, whatever the machine's habit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


def say(line: str) -> None:
    """Print a line that is not text of the model."""
    print(line, file=sys.stderr, flush=True)


def say_logprobs(generation: TokenStream, tokenizer: Tokenizer) -> None:
    """Print a line for each token: how likely the model held it, and what it held likeliest."""
    for sample, logprobs in enumerate(generation.logprobs):
        if len(generation.logprobs) > 1:
            say(f"--- text {sample} ---")
        say("    log p       p      id  token       likeliest")
        for token, (logprob, top) in zip(generation.tokens[sample], logprobs, strict=True):
            likeliest = "  ".join(
                f"{show_token(other, tokenizer)} {math.exp(value):.4f}" for other, value in top
            )
            say(
                f"{logprob:9.4f}  {math.exp(logprob):.4f}  {token:6}  "
                f"{show_token(token, tokenizer):<10}  {likeliest}".rstrip()
            )


def show_token(token: int, tokenizer: Tokenizer) -> str:
    """Return the text of a token in quotes, or its number if it stands for none."""
    raw = tokenizer.token_bytes[token]
    return repr(raw.decode("utf-8", "backslashreplace")) if raw else f"<{token}>"


def say_limit(generation: TokenStream, generator: Generator, *, goes_on: bool = True) -> None:
    """Say where the context length cut something off."""
    context_length = generator.model.config.context_length
    if generation.report.prompt_tokens > context_length:
        slides = generator.at_limit == "slide"
        read = "its end was" if slides else "its beginning and its end were"
        say(f"the prompt is longer than the context of {context_length}: only {read} read")
    if "context" in generation.ends:
        hint = "; --at-limit slide or stream goes on" if goes_on else ""
        say(f"ended at the context length of {context_length} tokens{hint}")


def say_cache_error(generator: Generator, prompt: list[int], generation: Generation) -> None:
    """Say how far an inexact cache was off on the first text; an exact one is not mentioned."""
    error = generator.cache_error(prompt + generation.tokens[0])
    if error is not None:
        say(f"cache {generator.cache.kind}, {generation.cache_bytes:,} bytes: {error}")
