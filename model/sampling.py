"""From the logits of the next token to one token, in small steps.

First the logits are adjusted by what has been said and what is wanted (penalties, bias), then
sharpened by the temperature, then filtered. Each filter takes logits (B, V) and returns logits in
which the tokens it rules out are -inf, so that a softmax gives them exactly no probability.
`choose` puts the steps in order; `distribution` is what it draws from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

REMOVED = float("-inf")
MAX_BIAS = 100  # of a logit: enough to force or to forbid a token for all purposes
LARGEST = 1e30  # number to compute with; what is above it counts as this, so float32 holds results


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is drawn; raises ValueError in one line for values out of range."""

    temperature: float = 1.0  # 0 takes the most likely token
    top_k: int | None = None  # keep the k most likely tokens; None or 0 keeps all
    top_p: float | None = None  # keep the likeliest tokens that reach this mass; None keeps all
    min_p: float | None = None  # drop tokens below this share of the likeliest; None keeps all
    typical_p: float | None = None  # keep the most typical ones that reach this mass; None: all
    repetition_penalty: float = 1.0  # above 1, tokens of prompt and text become less likely
    presence_penalty: float = 0.0  # taken off the logit of every token produced so far
    frequency_penalty: float = 0.0  # taken off the logit each time a token has been produced
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # id -> added to it

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
        if self.typical_p is not None and not 0 < self.typical_p <= 1:
            raise ValueError(
                f"typical_p={self.typical_p} must be above 0 and at most 1 (1: no limit)"
            )
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} must be a finite positive number "
                "(1: none)"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number (0: none)")
        for token, bias in (self.logit_bias or {}).items():
            if token < 0:
                raise ValueError(f"logit_bias names the id {token}; ids begin with 0")
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise ValueError(
                    f"logit_bias={bias} of the id {token} must be from {-MAX_BIAS} to {MAX_BIAS}"
                )

    @property
    def filters_by_probability(self) -> bool:
        """Whether some filter asks how probable tokens are at this temperature."""
        return bool(self.min_p) or self.top_p not in (None, 1) or self.typical_p not in (None, 1)

    def check_ids(self, vocab_size: int) -> None:
        """Raise ValueError in one line for a bias of a token that a model cannot draw."""
        highest = max(self.logit_bias or {}, default=0)
        if highest >= vocab_size:
            raise ValueError(
                f"logit_bias names the id {highest}, tokens have ids from 0 to {vocab_size - 1}"
            )


class Occurrences:
    """Which tokens occurred in each of B texts, as far as the penalties of `options` ask for it.

    `seen` (B, V) marks the tokens of prompt and text, for the repetition penalty; `counts` (B, V)
    tells how often each has been produced, for the presence and the frequency penalty. What no
    penalty needs is None.
    """

    def __init__(self, options: SamplingOptions, prompts: Tensor, vocab_size: int):
        """Begin after `prompts` (B, P), whose ids are below `vocab_size`."""
        shape = (prompts.shape[0], vocab_size)
        self.seen: Tensor | None = None
        self.counts: Tensor | None = None
        if options.repetition_penalty != 1:
            self.seen = prompts.new_zeros(shape, dtype=torch.bool).scatter_(1, prompts, True)
        if options.presence_penalty or options.frequency_penalty:
            self.counts = prompts.new_zeros(shape, dtype=torch.float32)

    def record(self, tokens: Tensor) -> None:
        """Note one more token (B,) in each text."""
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        if self.counts is not None:
            self.counts[torch.arange(len(tokens), device=tokens.device), tokens] += 1

    def copy(self) -> Occurrences:
        """Return the same texts, to go on with elsewhere."""
        other = object.__new__(Occurrences)
        other.seen = None if self.seen is None else self.seen.clone()
        other.counts = None if self.counts is None else self.counts.clone()
        return other


def choose(
    logits: Tensor,
    options: SamplingOptions,
    generators: Sequence[torch.Generator],
    seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return the next token of each row, (B,).

    `logits` (B, V) must be free of ids that may not be drawn (see `keep_first`). Row b draws from
    `generators[b]` only. `seen` and `counts`, both (B, V), are those of `Occurrences`.
    """
    logits = adjust(logits, options, seen, counts)
    if options.temperature == 0:
        return logits.argmax(dim=-1)
    logits = at_least_float32(logits)
    if not options.filters_by_probability:
        logits, temperature = _from_largest(logits, options.temperature)
        return race(_top_k(logits, options), generators, temperature)
    return race(filtered(logits, options), generators)


def distribution(
    logits: Tensor,
    options: SamplingOptions,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return the probability (B, V) with which `choose` returns each token."""
    logits = adjust(logits, options, seen, counts)
    if options.temperature == 0:
        certain = torch.zeros_like(logits)
        return certain.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return filtered(at_least_float32(logits), options).softmax(dim=-1)


def adjust(
    logits: Tensor, options: SamplingOptions, seen: Tensor | None, counts: Tensor | None
) -> Tensor:
    """Apply the penalties and the bias to logits (B, V), of whatever temperature."""
    if seen is not None:
        logits = penalise_repetition(logits, seen, options.repetition_penalty)
    if counts is not None:
        presence, frequency = options.presence_penalty, options.frequency_penalty
        logits = penalise_counts(logits, counts, presence, frequency)
    if options.logit_bias:
        logits = add_bias(logits, options.logit_bias)
    return logits


def filtered(logits: Tensor, options: SamplingOptions) -> Tensor:
    """Sharpen and filter adjusted logits (B, V); their softmax is what is drawn from.

    The temperature comes first: `top_p`, `min_p` and `typical_p` then speak of the distribution
    in use, and each of what the filter before it left.
    """
    logits, temperature = _from_largest(logits, options.temperature)
    logits = _top_k(logits / temperature, options)
    if options.top_p is not None and options.top_p < 1:
        logits = keep_top_p(logits, options.top_p)
    if options.min_p:
        logits = keep_min_p(logits, options.min_p)
    if options.typical_p is not None and options.typical_p < 1:
        logits = keep_typical(logits, options.typical_p)
    return logits


def _from_largest(logits: Tensor, temperature: float) -> tuple[Tensor, float]:
    """Logits counted from the largest, and a temperature to compute with.

    So counted, they cannot overflow at a tiny temperature, nor swallow what little it leaves to
    chance. A temperature smaller than float32 can hold would be rounded to 0.
    """
    temperature = max(_held(temperature), torch.finfo(torch.float32).tiny)
    return logits - logits.amax(dim=-1, keepdim=True), temperature


def draw(probabilities: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw one token (B,) from each row of (B, V), row b with the randomness of `generators[b]`.

    A token of probability 0 is never drawn.
    """
    return race(probabilities.log(), generators)


def race(logits: Tensor, generators: Sequence[torch.Generator], temperature: float = 1.0) -> Tensor:
    """Draw one token (B,) from each softmax of logits (B, V) / temperature.

    Exponential race: with E_i independent and exponential, the argmax of p_i / E_i is i with
    probability p_i. Here it is run in logarithms, times the temperature, which needs no softmax.
    """
    noise = torch.empty_like(logits)
    for row, generator in zip(noise.unbind(), generators, strict=True):
        row.exponential_(generator=generator)
    return torch.sub(logits, noise.log_(), alpha=temperature).argmax(dim=-1)


def keep_first(logits: Tensor, count: int) -> Tensor:
    """Rule out every id from `count` on: a padded vocabulary has ids that stand for no text."""
    if count >= logits.shape[-1]:
        return logits
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(ids >= count, REMOVED)


def _top_k(logits: Tensor, options: SamplingOptions) -> Tensor:
    return keep_top_k(logits, options.top_k) if options.top_k else logits


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
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return keep_until(logits, order, p)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least `p` times as likely as the likeliest.

    Min-p sampling (Nguyen et al. 2024, arXiv:2407.01082, section 3).
    """
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + math.log(p), REMOVED)


def keep_typical(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest most typical tokens whose probabilities reach `p`; at least one.

    Typical is a token whose information, -log p, is close to its expectation, the entropy
    (locally typical sampling: Meister et al. 2022, arXiv:2202.00666, section 4).
    """
    log_p = logits.log_softmax(dim=-1)
    entropy = torch.special.entr(log_p.exp()).sum(dim=-1, keepdim=True)
    order = (log_p + entropy).abs().argsort(dim=-1, stable=True)
    return keep_until(logits, order, p)


def keep_until(logits: Tensor, order: Tensor, p: float) -> Tensor:
    """Keep the first tokens of `order` (B, V), a permutation, that together reach the mass `p`."""
    ordered = logits.softmax(dim=-1).gather(-1, order)
    mass_before = ordered.cumsum(dim=-1) - ordered
    too_late = mass_before >= p
    too_late[..., 0] = False
    return logits.masked_fill(too_late.scatter(-1, order, too_late), REMOVED)


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make the tokens marked in `seen` (B, V) less likely, for a penalty above 1.

    Positive logits are divided and negative ones multiplied (CTRL: Keskar et al. 2019,
    arXiv:1909.05858, section 4.1).
    """
    logits = at_least_float32(logits)
    penalty = max(_held(penalty), 1 / LARGEST)
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)


def penalise_counts(logits: Tensor, counts: Tensor, presence: float, frequency: float) -> Tensor:
    """Take `presence` once and `frequency` each time off the logits of tokens produced before.

    `counts` (B, V) says how often; tokens of the prompt alone do not count. These are the
    penalties of OpenAI's completions interface; negative ones favour what was said.
    """
    return at_least_float32(logits) - _held(presence) * (counts > 0) - _held(frequency) * counts


def add_bias(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Add a number to the logits (B, V) of some tokens; what is ruled out stays so."""
    logits = at_least_float32(logits)
    ids = torch.tensor(list(bias), device=logits.device)
    values = torch.tensor(list(bias.values()), device=logits.device, dtype=logits.dtype)
    return logits.index_add(-1, ids, values.expand(len(logits), -1))


def _held(number: float) -> float:
    """The number, or the nearest that is fit to compute with."""
    return float(min(max(number, -LARGEST), LARGEST))


def at_least_float32(logits: Tensor) -> Tensor:
    """Return logits in float32, or as they are where that is wider."""
    if logits.dtype == torch.float32:
        return logits
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class TokenLogprob(NamedTuple):
    """How likely the model itself held a token, in nats, and what it held likeliest."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, log-probability), the likeliest first


def token_logprobs(logits: Tensor, tokens: Sequence[int], n: int) -> list[TokenLogprob]:
    """Log-probabilities of `tokens` (B) and of the `n` likeliest in their place.

    They are of the model's own distribution, the softmax of `logits` (B, V) as they come, before
    penalties, bias, temperature and filters: so they say the same whatever way a token was drawn.
    """
    log_p = at_least_float32(logits).log_softmax(dim=-1)
    chosen = log_p.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    top = log_p.topk(n, dim=-1)
    rows = zip(chosen, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprob(logprob, tuple(zip(ids, values, strict=True))) for logprob, ids, values in rows
    ]
