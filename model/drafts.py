"""What proposes the next few tokens to a model: a smaller one, or the text itself.

A draft says which tokens may come next and from which distribution it drew each. How good they are
decides how fast speculative decoding is, never what it produces (see `model/speculative.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from model.generate import Generator, compute_dtype
from model.kv_cache import FullCache
from model.sampling import Occurrences, SamplingOptions, distribution, draw


class Chance:
    """All that is random in speculative decoding."""

    def __init__(self, generator: torch.Generator):
        self._generator = generator

    def accept(self, probability: float) -> bool:
        """Say yes with this probability; 1 and more is certain.

        Certain or not, it uses up one number: else rounding around 1 would change all later ones.
        """
        uniform = torch.rand((), generator=self._generator, device=self._generator.device)
        return uniform.item() < probability

    def draw(self, probabilities: Tensor) -> int:
        """Draw a token from a distribution (V,)."""
        return int(draw(probabilities[None], [self._generator]))


class Reader:
    """One text as a model sees it: reads what is new, goes back where the text does."""

    def __init__(self, generator: Generator, capacity: int):
        weight = generator.model.embed.weight
        self.config = config = generator.model.config
        self._forward = generator.step.model.forward
        self.known_ids = generator.vocab_size
        self.device = weight.device
        self._chunk = max(generator.prefill_chunk or config.context_length, config.prefix)
        self._cache: FullCache | None = None
        if generator.use_cache:
            self._cache = FullCache(
                config,
                capacity=min(capacity, config.context_length),
                device=weight.device,
                dtype=compute_dtype(weight),
            )

    def logits(self, text: Sequence[int], last: int = 1) -> Tensor:
        """Logits (last, known ids) of the token after each of the `last` last tokens of `text`.

        `text` goes on where what is kept of the one read before ends.
        """
        read = 0 if self._cache is None else self._cache.length
        assert read <= len(text) - last
        unread = torch.tensor([text[read:]], device=self.device)
        # Without a cache a part would not see those before it.
        chunk = len(text) if self._cache is None else self._chunk
        parts = [
            self._forward(part, cache=self._cache, only_last=last == 1).logits[0]
            for part in unread.split(chunk, dim=1)
        ]
        return torch.cat(parts)[-last:, : self.known_ids]

    def keep(self, length: int) -> None:
        """Forget what was read beyond the first `length` tokens."""
        if self._cache is None:
            return
        if length < self.config.prefix:  # these tokens see each other: they are read together
            length = 0
        self._cache.truncate(min(self._cache.length, length))


class Proposal(NamedTuple):
    """Tokens that may come next, and the distribution (V,) that each was drawn from."""

    tokens: list[int]
    distributions: list[Tensor]


class Draft(Protocol):
    """What speculative decoding needs of whatever proposes tokens."""

    def propose(
        self, text: list[int], count: int, occurrences: Occurrences, chance: Chance
    ) -> Proposal:
        """Propose up to `count` tokens to follow `text`."""

    def keep(self, length: int) -> None:
        """Go back to the first `length` tokens."""


class ModelDraft:
    """Tokens drawn from a smaller model, with the same options."""

    def __init__(self, reader: Reader, options: SamplingOptions):
        self._reader = reader
        self._options = options

    def propose(
        self, text: list[int], count: int, occurrences: Occurrences, chance: Chance
    ) -> Proposal:
        """Draw up to `count` tokens to follow `text`; none beyond the model's own context."""
        occurrences = occurrences.copy()
        proposal = Proposal([], [])
        room = self._reader.config.context_length - len(text) + 1  # the last one is not read
        for _ in range(min(count, room)):
            logits = self._reader.logits(text + proposal.tokens)
            q = distribution(logits, self._options, occurrences.seen, occurrences.counts)[0]
            token = chance.draw(q)
            proposal.tokens.append(token)
            proposal.distributions.append(q)
            occurrences.record(torch.tensor([token], device=q.device))
        return proposal

    def keep(self, length: int) -> None:
        """Go back to the first `length` tokens."""
        self._reader.keep(length)


@dataclass(frozen=True, slots=True)
class LookUp:
    """Propose what followed the latest place whose last tokens, up to `ngram`, are those now."""

    ngram: int = 3

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise ValueError(f"lookup={self.ngram} must be at least 1 token")


class LookUpDraft:
    """Tokens that followed the last time: certain, as far as the proposal goes."""

    def __init__(self, ngram: int, generator: Generator):
        self._ngram = ngram
        self._known_ids = generator.vocab_size
        self._device = generator.model.embed.weight.device

    def propose(
        self, text: list[int], count: int, occurrences: Occurrences, chance: Chance
    ) -> Proposal:
        """Propose what followed before, up to the first id that may not be drawn."""
        found = look_up(text, self._ngram, count)
        tokens = list(takewhile(lambda token: token < self._known_ids, found))
        certain = torch.zeros(len(tokens), self._known_ids, device=self._device)
        certain[torch.arange(len(tokens)), tokens] = 1.0
        return Proposal(tokens, list(certain))

    def keep(self, length: int) -> None:
        """Do nothing: the text is looked through anew each time."""


def look_up(text: Sequence[int], ngram: int, count: int) -> list[int]:
    """Return up to `count` tokens that followed the place most like the end of `text`.

    That is the place before whose end most of the last `ngram` tokens agree, at least one; of
    several the latest.
    """
    best, best_end = 0, len(text)
    for end in range(len(text) - 1, 0, -1):
        if text[end - 1] == text[-1]:
            length = _agreement(text, end, ngram)
            if length > best:
                best, best_end = length, end
            if best == ngram:
                break
    return list(text[best_end : best_end + count])


def _agreement(text: Sequence[int], end: int, limit: int) -> int:
    """How many tokens before `end` are those at the end of the text, up to `limit`."""
    length = 0
    while length < min(limit, end) and text[end - 1 - length] == text[-1 - length]:
        length += 1
    return length
