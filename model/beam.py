"""Beam search: the likeliest texts that a search of bounded width finds.

The search keeps `num_beams` texts. At each step every text is continued by every token, and of all
these the likeliest stay. A text that has ended keeps its place among them, so the search grows
narrower and is over when every text has ended (Sutskever et al. 2014, arXiv:1409.3215, section
3.2). With one beam this is greedy decoding; with as many beams as there are texts it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.generate import Generator


class Beam(NamedTuple):
    """One text that beam search found."""

    tokens: list[int]  # without the end token
    logprob: float  # of all tokens together, in nats, that of the end token included
    score: float  # what beams are compared by, see `score_of`
    end: str  # "eos", "length" (max_new_tokens) or "context" (the context length)


class _Partial(NamedTuple):
    """A text that goes on."""

    parent: int  # the row of the model that holds all its tokens but the last
    tokens: list[int]
    logprob: float


def beam_search(
    generator: Generator,
    prompt: Sequence[int],
    *,
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    eos_id: int | None = None,
) -> list[Beam]:
    """Return up to `num_beams` continuations of a prompt, the best score first.

    While texts grow they have one length, and those of the highest log-probability stay; in the
    end all are ordered by `score_of`. The probabilities are the model's own, among the ids that
    the tokenizer knows. There are fewer continuations than `num_beams` only where fewer exist.

    Raises ValueError in one line, before anything is read, for a request that cannot be met; a
    generator that lets go of tokens is refused, since beams change places in what was read.
    """
    _check(generator, num_beams, length_penalty)
    generator.check(prompt, max_new_tokens)
    context = generator.context(prompt, num_beams, max_new_tokens)
    ended: list[Beam] = []
    going = [_Partial(0, [], 0.0)]
    with torch.inference_mode():
        logits = context.next_logits(None)
        for produced in range(1, max_new_tokens + 1):
            candidates = _continue(going, logits, num_beams - len(ended))
            limit = _limit_reached(produced == max_new_tokens, context.at_end)
            going = []
            for candidate in candidates:
                why = "eos" if candidate.tokens[-1] == eos_id else limit
                if why is None:
                    going.append(candidate)
                else:
                    ended.append(_end(candidate, why, length_penalty))
            if not going:
                break
            # Rows of the model without a text repeat the first one; nobody looks at them.
            rows = going + going[:1] * (num_beams - len(going))
            context.reorder(torch.tensor([text.parent for text in rows], device=logits.device))
            latest = torch.tensor([text.tokens[-1] for text in rows], device=logits.device)
            logits = context.next_logits(latest)
    return sorted(ended, key=lambda beam: beam.score, reverse=True)


def score_of(logprob: float, length: int, length_penalty: float) -> float:
    """Return logprob / length ** length_penalty.

    0 compares whole probabilities, which favours short texts; 1 compares the mean per token. The
    length counts the end token, as the log-probability does.
    """
    return logprob * length**-length_penalty  # a huge penalty makes it 0 and cannot overflow


def _check(generator: Generator, num_beams: int, length_penalty: float) -> None:
    if num_beams < 1:
        raise ValueError(f"num_beams={num_beams} must be at least 1")
    if not 0 <= length_penalty < math.inf:
        raise ValueError(
            f"length_penalty={length_penalty} must be 0 (none) or a finite positive number"
        )
    generator.check_goes_back("beam search")


def _continue(going: Sequence[_Partial], logits: Tensor, width: int) -> list[_Partial]:
    """Return the `width` likeliest continuations, by one token, of the texts that go on.

    Row b of `logits` (B, V) belongs to text b.
    """
    before = torch.tensor([partial.logprob for partial in going], dtype=torch.float64)
    logits = logits[: len(going)].to(_widest(logits))
    total = logits.log_softmax(dim=-1) + before.to(logits)[:, None]
    best = total.flatten().topk(min(width, total.numel()))
    candidates = []
    for place, logprob in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        row, token = divmod(place, total.shape[1])
        if logprob > -math.inf:  # else an id that may not be drawn
            candidates.append(_Partial(row, [*going[row].tokens, token], logprob))
    return candidates


def _limit_reached(is_long_enough: bool, is_context_full: bool) -> str | None:
    if is_long_enough:
        return "length"
    return "context" if is_context_full else None


def _end(partial: _Partial, why: str, length_penalty: float) -> Beam:
    tokens, logprob = partial.tokens, partial.logprob
    score = score_of(logprob, len(tokens), length_penalty)
    return Beam(tokens[:-1] if why == "eos" else tokens, logprob, score, why)


def _widest(logits: Tensor) -> torch.dtype:
    """Float64, so that sums of many log-probabilities still tell texts apart; not all have it."""
    return torch.float32 if logits.device.type == "mps" else torch.float64
