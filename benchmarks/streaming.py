"""Loss far past the context, through sinks and a window, against reading the window anew.

    python benchmarks/streaming.py --run runs/latest
    python benchmarks/streaming.py --run RUN --beside OTHER    such as one with a learned sink logit

Texts of 16 times the context come from the validation split of each run. A text is read token by
token through the streaming cache, with 0, 1, 2 and 4 first tokens kept beside the window; the
row "window read anew" gives the model, for every token, the last `context` tokens as a text of
their own, which is what the cache stands in for and costs `context` times as much. The loss is
the mean over all tokens past the first context, the same ones in every row.

Before that, the first run generates --tokens tokens with at_limit=stream. What the cache takes
must not change, and the peak of the process is printed after a tenth of them and at the end: it
also holds the text so far.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from own_runs import ROOT, machine_line
from torch import Tensor

sys.path.insert(0, str(ROOT))
from data.prepare import prepare
from data.token_files import TokenFile
from model.checkpoint import resolve_run
from model.decoder import Decoder, next_token_loss
from model.generate import Generator
from model.load import check_tokenizer, load_model
from model.streaming_cache import StreamingCache
from training.config import from_dict
from training.run_folder import read_config

WINDOWS_AT_A_TIME = 64
ANEW = "window read anew"


class Run(NamedTuple):
    """A trained model, the number of ids its tokenizer knows, and its validation split."""

    name: str
    model: Decoder
    known_ids: int
    text: TokenFile


def open_run(name: str, cache_dir: str | None) -> Run:
    folder = resolve_run(name)
    model, checkpoint = load_model(folder)
    config = from_dict(read_config(folder))
    if cache_dir is not None:
        config.data.cache_dir = cache_dir
    text = prepare(
        config.data,
        config.tokenizer,
        context_length=model.config.context_length,
        log=lambda line: None,
    )
    check_tokenizer(checkpoint, text.tokenizer.sha256)
    label = f"{config.name}, sink logit {model.config.sink_logit}, step {checkpoint.step}"
    return Run(label, model, text.tokenizer.vocab_size, text.val)


def texts(file: TokenFile, count: int, length: int) -> Tensor:
    """Pieces of a split, spread evenly and without overlap: (B, length) with B at most `count`.

    Raises ValueError if the split holds less than one.
    """
    count = min(count, len(file) // length)
    if count == 0:
        raise ValueError(
            f"the val split has {len(file)} tokens, one text needs {length}: lower --times or "
            f"give the run more text"
        )
    starts = [len(file) // count * number for number in range(count)]
    return torch.from_numpy(file.read_rows(starts, length).astype(np.int64))


@torch.inference_mode()
def streamed(model: Decoder, tokens: Tensor, sinks: int) -> float:
    """Mean loss of the tokens (B, T) past the first context, read once each."""
    context = model.config.context_length
    cache = StreamingCache(model.config, batch=tokens.shape[0], sinks=sinks)
    total = 0.0
    chunks = [context] + [1] * (tokens.shape[1] - context)
    for chunk, target in zip(tokens.split(chunks, 1)[:-1], tokens.T[context:], strict=True):
        logits = model.forward(chunk, cache=cache, only_last=True).logits
        total += next_token_loss(logits, target[:, None], "sum").item()
    return total / tokens[:, context:].numel()


@torch.inference_mode()
def read_anew(model: Decoder, tokens: Tensor) -> float:
    """The same with the last `context` tokens read as a text of their own for every token."""
    context = model.config.context_length
    windows = tokens[:, :-1].unfold(1, context, 1).flatten(0, 1)  # (B * (T - context), context)
    targets = tokens[:, context:].flatten()
    total = 0.0
    for window, target in zip(
        windows.split(WINDOWS_AT_A_TIME), targets.split(WINDOWS_AT_A_TIME), strict=True
    ):
        logits = model.forward(window, only_last=True).logits
        total += next_token_loss(logits, target[:, None], "sum").item()
    return total / targets.numel()


def way(sinks: int) -> str:
    """Name of a row: what attention sees."""
    if sinks == 0:
        return "window alone"
    return f"{sinks} sink{'s' * (sinks > 1)} and a window"


def losses(run: Run, sinks: Sequence[int], count: int, times: int) -> dict[str, float]:
    """Nats per token of each way to go on, by its name."""
    tokens = texts(run.text, count, times * run.model.config.context_length)
    found = {}
    for number in sinks:
        found[way(number)] = streamed(run.model, tokens, number)
    found[ANEW] = read_anew(run.model, tokens)
    for name, loss in found.items():
        print(f"{run.name}, {tuple(tokens.shape)} tokens, {name}: {loss:.4f}", file=sys.stderr)
    return found


def table(runs: Sequence[Run], measured: Sequence[dict[str, float]]) -> str:
    """A Markdown table: ways to go on by runs."""
    heads = [f"{run.name}: nats per token | perplexity" for run in runs]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + 2 * len(measured)) + "|"]
    for name in measured[0]:
        cells = [f"{found[name]:.4f} | {math.exp(found[name]):.3f}" for found in measured]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def peak_mib() -> float:
    """Largest memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def memory_of_a_long_text(run: Run, count: int) -> str:
    """Generate `count` tokens; say what the cache and the process took on the way.

    Raises RuntimeError if the cache grew.
    """
    model, context = run.model, run.model.config.context_length
    generator = Generator(model, at_limit="stream", vocab_size=run.known_ids, compiled=True)
    prompt = texts(run.text, 1, context)[0].tolist()
    generation = generator.generate(prompt, max_new_tokens=count)
    sizes, peaks = [], []
    started = time.perf_counter()
    for number, _ in enumerate(generation, start=1):
        if number in (max(count // 10, 1), count):
            sizes.append(generation.cache_bytes)
            peaks.append(peak_mib())
    seconds = time.perf_counter() - started
    if len(set(sizes)) != 1:
        raise RuntimeError(f"the cache took {sizes} bytes in the course of {count} tokens")
    return (
        f"{count:,} tokens generated in {seconds:.0f} s: cache {sizes[0]:,} bytes throughout; "
        f"peak of the process {peaks[0]:.1f} MiB after a tenth, {peaks[-1]:.1f} MiB at the end"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", default="runs/latest")
    parser.add_argument("--beside", metavar="RUN", help="a second run, in columns of its own")
    parser.add_argument("--sinks", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--times", type=int, default=16, help="length of a text in contexts (16)")
    parser.add_argument("--texts", type=int, default=4, help="how many texts (4)")
    parser.add_argument("--tokens", type=int, default=100_000, help="to generate; 0: none")
    parser.add_argument("--cache-dir", help="where texts are prepared, if not where the run says")
    options = parser.parse_args()
    try:
        if options.times < 2:
            raise ValueError(f"--times {options.times} must be at least 2 to pass the context")
        if options.texts < 1:
            raise ValueError(f"--texts {options.texts} must be at least 1")
        names = [options.run, *([options.beside] if options.beside else [])]
        runs = [open_run(name, options.cache_dir) for name in names]
        print(machine_line())
        if options.tokens > 0:
            print(memory_of_a_long_text(runs[0], options.tokens), flush=True)
        measured = [losses(run, options.sinks, options.texts, options.times) for run in runs]
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"\n{table(runs, measured)}")


if __name__ == "__main__":
    main()
