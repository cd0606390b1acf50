"""`sample.py --prompts-file`: continue every prompt of a JSON Lines file, many at a time.

A line is an object with `prompt` and, where it differs from the command line, `max_new_tokens`,
the sampling options by their names there (`temperature`, `top_p`, ...; `logit_bias` is an object
from ids to numbers), `seed`, `stop` (a text or several) and an `id` to tell its answer by. Answers
come in the order of the prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from data.tokenizers import Tokenizer
from model.batching import Handle, Request
from model.sampling import SamplingOptions
from model.text_batch import TextBatch
from serving.command_line import ONLY_FOR_ONE, ONLY_TO_SERVE, refuse_options
from serving.json_fields import (
    NAME,
    NUMBER,
    OBJECT,
    TEXT,
    TEXTS,
    WHOLE,
    check_fields,
    read_bias,
    read_object,
)
from serving.printing import say
from serving.prompts import decode, encode_prompt
from serving.session import open_run, sampling_options
from serving.texts import finish_reason, open_batch

SAMPLING = {
    "temperature": NUMBER,
    "top_k": WHOLE,
    "top_p": NUMBER,
    "min_p": NUMBER,
    "typical_p": NUMBER,
    "repetition_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "logit_bias": OBJECT,
}
FIELDS = {
    "prompt": TEXT,
    "max_new_tokens": WHOLE,
    "seed": WHOLE,
    "stop": TEXTS,
    "id": NAME,
    **SAMPLING,
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the file, checked."""

    id: str | int
    request: Request
    stop: tuple[str, ...]


def continue_file(args: argparse.Namespace) -> None:
    """Continue every prompt of `--prompts-file`; write one line for each to `--output`.

    Raises ValueError or OSError in one line, before anything is generated, for what cannot work.
    """
    refuse_options(args, "--prompts-file", ["num_samples", *ONLY_FOR_ONE, *ONLY_TO_SERVE])
    defaults = sampling_options(args)
    check_output(args)
    raw = read_objects(args.prompts_file)
    session = open_run(args)
    texts = open_batch(args, session)
    lines = [
        parse_line(line, number, place, args, defaults, session.tokenizer)
        for number, place, line in raw
    ]
    handles = submit_all(texts, lines, [place for _, place, _ in raw])
    started = time.perf_counter()
    with open_output(args.output) as output:
        for answer in answers(texts, lines, handles):
            output.write(json.dumps(answer, ensure_ascii=False) + "\n")
            output.flush()
    seconds = time.perf_counter() - started
    produced = sum(len(handle.tokens) for handle in handles)
    rate = f" ({produced / seconds:,.0f} tokens/s)" if produced else ""
    say(
        f"step {session.checkpoint.step} on {session.device}: {len(lines)} texts, "
        f"{produced} tokens in {seconds:.3f} s{rate}"
    )


def check_output(args: argparse.Namespace) -> None:
    """Refuse to overwrite the prompts by the answers."""
    if args.output is not None and os.path.exists(args.output):
        if os.path.isdir(args.output):
            raise ValueError(f"--output {args.output} is a folder")
        if os.path.samefile(args.output, args.prompts_file):
            raise ValueError(f"--output {args.output} is the file that the prompts come from")


def read_objects(path: str) -> list[tuple[int, str, dict[str, Any]]]:
    """Return the number, the place for messages, and the object of every line that is not blank."""
    try:
        text = decode(Path(path).read_bytes(), path)
    except OSError as error:
        raise ValueError(f"--prompts-file {path}: {error.strerror}") from error
    objects = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}:{number}"
            objects.append((number, place, read_object(line, place)))
    if not objects:
        raise ValueError(f"--prompts-file {path} holds no prompt")
    return objects


def parse_line(
    line: dict[str, Any],
    number: int,
    place: str,
    args: argparse.Namespace,
    defaults: SamplingOptions,
    tokenizer: Tokenizer,
) -> Line:
    """Check one line and fill in the command line's values; ValueError names file and line."""
    try:
        check_fields(line, FIELDS)
        if "prompt" not in line:
            raise ValueError("there is no prompt")
        stop = line.get("stop", args.stop)
        options = {name: line[name] for name in SAMPLING if name in line}
        if "logit_bias" in options:
            options["logit_bias"] = read_bias(options["logit_bias"])
        request = Request(
            prompt=encode_prompt(line["prompt"], tokenizer),
            max_new_tokens=line.get("max_new_tokens", args.max_new_tokens),
            options=replace(defaults, **options),
            seed=line.get("seed", args.seed + number - 1),
            eos_id=tokenizer.eos_id,
        )
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    return Line(line.get("id", number), request, stops)


def submit_all(texts: TextBatch, lines: Iterable[Line], places: Iterable[str]) -> list[Handle]:
    """Let every prompt wait for its turn; ValueError names the line that cannot be met."""
    handles = []
    for line, place in zip(lines, places, strict=True):
        try:
            handles.append(texts.submit(line.request, line.stop))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    return handles


def answers(texts: TextBatch, lines: list[Line], handles: list[Handle]) -> Iterator[dict[str, Any]]:
    """Generate; yield the answers in order, each as soon as those before it are there."""
    written = dict.fromkeys(handles, "")
    done = 0
    with tqdm(total=len(lines), desc="texts", unit="text", disable=None) as bar:
        while done < len(lines):
            for piece in texts.step():
                written[piece.handle] += piece.text
                bar.update(piece.is_last)
            while done < len(lines) and (handle := handles[done]).end is not None:
                yield {
                    "id": lines[done].id,
                    "text": written.pop(handle),
                    "tokens": len(handle.tokens),
                    "finish_reason": finish_reason(handle),
                }
                done += 1


@contextlib.contextmanager
def open_output(path: str | None) -> Iterator[IO[str]]:
    """Open the file for the answers, or standard output if there is none."""
    if path is None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(encoding="utf-8")
        yield sys.stdout
        return
    with open(path, "w", encoding="utf-8") as file:
        yield file
