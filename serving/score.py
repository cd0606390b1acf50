"""`sample.py --score FILE`: how well a model predicts a text.

Losses are summed in float64 and divided by the number of tokens counted. Bits per byte are all
those nats, over ln 2 and over the UTF-8 bytes of the tokens counted: the same definition as in
`training.evaluate`, and with `--stride` at the context length the same windows.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data.tokenizers import Tokenizer
from model.kv_cache import FullCache, KVCache
from model.scoring import Losses, score_stream, score_windows
from model.streaming_cache import POSITIONS as STREAMING
from model.streaming_cache import StreamingCache
from serving.command_line import CACHES, MANY, METHODS, OF_EACH_TEXT, ONLY_FOR_MANY, refuse_options
from serving.printing import say
from serving.prompts import read_text
from serving.session import Session, open_run

TO_GENERATE = (
    *(*MANY, *ONLY_FOR_MANY, *OF_EACH_TEXT, *METHODS, *CACHES),
    *("logprobs", "at_limit", "no_cache", "compile", "weights"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the tokens of a text have cost together."""

    nats: float
    counted_tokens: int
    counted_bytes: int  # of UTF-8 behind the counted tokens
    tokens: int  # of the whole text

    @property
    def loss(self) -> float:
        """Nats per counted token."""
        return self.nats / self.counted_tokens

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits for each byte of the counted text."""
        return self.nats / math.log(2) / self.counted_bytes

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f} nats per token, perplexity {self.perplexity:.2f}, "
            f"{self.bits_per_byte:.4f} bits per byte; "
            f"{self.counted_tokens:,} of {self.tokens:,} tokens counted"
        )

    def to_json(self, **more: object) -> str:
        """One line of JSON; a number that is not finite is null there."""
        values = {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        counts = {name: value for name, value in asdict(self).items() if name != "nats"}
        return json.dumps(finite | counts | more)


def score(args: argparse.Namespace) -> None:
    """Load the model, score the text, print one line."""
    refuse_options(args, "--score", TO_GENERATE)
    text = read_text(args.score, "--score")
    name = "standard input" if args.score == "-" else args.score
    if not text:
        raise ValueError(f"{name} is empty: there is nothing to score")
    session = open_run(args)
    session.tokenizer.check_known(text, name)
    ids = encode_text(text, session.tokenizer)
    losses, method = start_scoring(session, ids, args)

    started = time.perf_counter()
    result = add_up(losses, ids, session.tokenizer)
    seconds = time.perf_counter() - started
    step = session.checkpoint.step
    if args.json:
        print(result.to_json(method=method, step=step))
    else:
        print(f"{result} ({method})")
    rate = result.tokens / seconds
    say(f"step {step} on {session.device}: {seconds:.3f} s ({rate:,.0f} tokens/s)")


def encode_text(text: str, tokenizer: Tokenizer) -> Tensor:
    """Ids (N,) of a text, begun with BOS where there is one, as in training."""
    ids = array("q", [] if tokenizer.bos_id is None else [tokenizer.bos_id])
    for piece in tokenizer.encode_pieces([text]):
        ids.extend(piece.ids)
    return torch.frombuffer(ids, dtype=torch.int64)


def start_scoring(
    session: Session, ids: Tensor, args: argparse.Namespace
) -> tuple[Iterator[Losses], str]:
    """Check everything; return the losses to come, and in words how they are measured."""
    length = session.model.config.context_length
    if args.score_stream is not None:
        cache = make_stream_cache(session, len(ids) - 1, args.score_stream)
        kept = "all tokens"
        if len(ids) - 1 > cache.capacity:
            kept = f"the first {args.score_stream} and the last {length - args.score_stream}"
        return score_stream(session.model, ids, cache), f"one reading that keeps {kept}"
    stride = max(1, length // 2) if args.stride is None else args.stride
    losses = score_windows(session.model, ids, stride=stride)
    return losses, f"windows of {length}, stride {stride}"


def make_stream_cache(session: Session, length: int, sinks: int) -> KVCache:
    """The cache to read `length` tokens through; ValueError if the model cannot go on so far.

    It keeps as many tokens as the context holds: the first `sinks`, and the last ones.
    """
    config, weight = session.model.config, session.model.embed.weight
    place: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    if config.position not in STREAMING and length <= config.context_length:
        return FullCache(config, **place)
    return StreamingCache(config, sinks=sinks, **place)


def add_up(losses: Iterator[Losses], ids: Tensor, tokenizer: Tokenizer) -> Score:
    """Sum the losses of a text, showing on a terminal how far it is."""
    nats, tokens, n_bytes = 0.0, 0, 0
    with tqdm(total=len(ids) - 1, unit=" tokens", disable=None, leave=False) as bar:
        for part in losses:
            end = part.start + len(part.nats)
            counted = ids[part.start : end][part.counted]
            nats += float(part.nats[part.counted].sum())
            tokens += len(counted)
            n_bytes += tokenizer.n_bytes(counted.numpy())
            bar.update(len(part.nats))
    in_text = len(ids) - (tokenizer.bos_id is not None)
    return Score(nats=nats, counted_tokens=tokens, counted_bytes=n_bytes, tokens=in_text)
