"""From the logits of the next token to one token, in small steps.

Each filter takes logits (B, V) and returns logits in which the tokens it rules out are -inf, so
that a softmax gives them exactly no probability. `choose` puts the steps in order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

REMOVED = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is drawn; raises ValueError in one line for values out of range."""

    temperature: float = 1.0  # 0 takes the most likely token
    top_k: int | None = None  # keep the k most likely tokens; None or 0 keeps all
    top_p: float | None = None  # keep the likeliest tokens that reach this mass; None keeps all
    min_p: float | None = None  # drop tokens below this share of the likeliest; None keeps all
    repetition_penalty: float = 1.0  # above 1, tokens that occurred become less likely

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} must be 0 (most likely token) or a finite "
                "positive number"
            )
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or 0 for no limit")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1 (1: no limit)")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be between 0 (no limit) and 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} must be a finite positive number "
                "(1: none)"
            )


def choose(
    logits: Tensor,
    options: SamplingOptions,
    generators: Sequence[torch.Generator],
    seen: Tensor | None = None,
) -> Tensor:
    """Return the next token of each row, (B,).

    `logits` (B, V) must be free of ids that may not be drawn (see `keep_first`). Row b draws from
    `generators[b]` only. `seen` (B, V) marks the tokens that a repetition penalty concerns.
    """
    if seen is not None:
        logits = penalise_repetition(logits, seen, options.repetition_penalty)
    if options.temperature == 0:
        return logits.argmax(dim=-1)
    return draw(probabilities(logits, options), generators)


def probabilities(logits: Tensor, options: SamplingOptions) -> Tensor:
    """Return the distribution (B, V), in float32 or better, that a token is drawn from.

    The temperature comes first: `top_p` and `min_p` then speak of the distribution in use.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Counted from the largest, so that a tiny temperature cannot overflow; a smaller one than
    # float32 can hold would be rounded to 0.
    temperature = max(options.temperature, torch.finfo(torch.float32).tiny)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if options.top_k:
        logits = keep_top_k(logits, options.top_k)
    if options.top_p is not None and options.top_p < 1:
        logits = keep_top_p(logits, options.top_p)
    if options.min_p:
        logits = keep_min_p(logits, options.min_p)
    return logits.softmax(dim=-1)


def draw(probabilities: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw one token (B,) from each row of (B, V), row b with the randomness of `generators[b]`.

    Exponential race: with E_i independent and exponential, argmax p_i / E_i is i with
    probability p_i. A token of probability 0 never wins.
    """
    race = torch.empty_like(probabilities)
    for row, generator in enumerate(generators):
        race[row].exponential_(generator=generator)
    return torch.div(probabilities, race, out=race).argmax(dim=-1)


def keep_first(logits: Tensor, count: int) -> Tensor:
    """Rule out every id from `count` on: a padded vocabulary has ids that stand for no text."""
    if count >= logits.shape[-1]:
        return logits
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(ids >= count, REMOVED)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k largest logits."""
    if k >= logits.shape[-1]:
        return logits
    top = logits.topk(k, dim=-1)
    return torch.full_like(logits, REMOVED).scatter(-1, top.indices, top.values)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest most likely tokens whose probabilities reach `p`; at least one.

    Nucleus sampling (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", 3.1).
    """
    ordered, order = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    too_late = mass_before >= p
    too_late[..., 0] = False
    return logits.masked_fill(too_late.scatter(-1, order, too_late), REMOVED)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least `p` times as likely as the likeliest.

    Min-p sampling (Nguyen et al. 2024, arXiv:2407.01082, section 3).
    """
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + math.log(p), REMOVED)


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make the tokens marked in `seen` (B, V) less likely, for a penalty above 1.

    Positive logits are divided and negative ones multiplied (CTRL: Keskar et al. 2019,
    arXiv:1909.05858, section 4.1).
    """
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)
