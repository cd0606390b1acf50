"""Speculative decoding: several tokens for one call of the model, none of them different.

Something cheap proposes the next few tokens, the model reads them all in one call, and keeps each
with a probability that makes the result exactly a draw from its own distribution (Leviathan et al.
2023, arXiv:2211.17192, algorithm 1). The cheap thing is a smaller model over the same ids, or the
text itself: what followed the last time it said the same (prompt look-up: Saxena 2023).

`speculate(generator, prompt, draft=...)` gives a `SpeculativeGeneration`, which is iterated over
like any other. Greedy tokens are those of plain decoding; drawn ones have the same distribution
but, since chance is used differently, are others for the same seed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model.drafts import Chance, Draft, LookUp, LookUpDraft, ModelDraft, Proposal, Reader
from model.generate import Generator, Report
from model.sampling import Occurrences, SamplingOptions, TokenLogprob, distribution, token_logprobs


@dataclass(slots=True)
class SpeculativeReport(Report):
    """What one generation cost, and how much guessing saved."""

    drafted_tokens: int = 0  # proposed to the model
    accepted_tokens: int = 0  # of those, kept
    model_calls: int = 0  # those of the model itself, the one that read the prompt included

    @property
    def tokens_per_call(self) -> float | None:
        """Tokens that a call gave, those accepted and one of its own; None before the first."""
        return 1 + self.accepted_tokens / self.model_calls if self.model_calls else None

    def __str__(self) -> str:
        text = Report.__str__(self)
        if self.drafted_tokens:
            share = self.accepted_tokens / self.drafted_tokens
            text += f"; {self.accepted_tokens} of {self.drafted_tokens} drafted tokens accepted "
            text += f"({share:.0%})"
        else:
            text += "; no tokens drafted"
        if self.tokens_per_call is None:
            return text
        return f"{text}, {self.tokens_per_call:.2f} tokens per call of the model"


def speculate(
    generator: Generator,
    prompt: Sequence[int],
    *,
    draft: Generator | LookUp,
    draft_tokens: int = 5,
    max_new_tokens: int,
    options: SamplingOptions | None = None,
    num_samples: int = 1,
    seed: int = 0,
    eos_id: int | None = None,
    logprobs: int | None = None,
) -> SpeculativeGeneration:
    """Start continuations of one prompt, of up to `draft_tokens` + 1 tokens per call.

    `draft` is the generator of another model over the same ids, or `LookUp`. Samples are produced
    one after the other; sample i draws with the seed `seed + i` and nothing else. At the end of
    the draft model's own context no more is proposed, and tokens come one at a time. The other
    arguments are those of `Generator.generate`.

    Raises ValueError in one line, before the first token, for a request that cannot be met; a
    generator that lets go of tokens is refused, since what has left a cache cannot come back.
    """
    options = options or SamplingOptions()
    if draft_tokens < 1:
        raise ValueError(f"draft_tokens={draft_tokens} must be at least 1")
    generator.check_goes_back("speculative decoding")
    generator.check(prompt, max_new_tokens, num_samples, seed)
    generator.check_choice(options, logprobs)
    capacity = len(prompt) + max_new_tokens - 1  # the last token is never read
    proposer: Draft
    if isinstance(draft, LookUp):
        proposer = LookUpDraft(draft.ngram, generator)
    else:
        _check_draft(draft, generator, prompt)
        proposer = ModelDraft(Reader(draft, capacity), options)
    device = generator.model.embed.weight.device
    chances = [Chance(torch.Generator(device).manual_seed(seed + i)) for i in range(num_samples)]
    rounds = _Rounds(Reader(generator, capacity), proposer, options, logprobs)
    return SpeculativeGeneration(
        rounds,
        prompt,
        chances,
        draft_tokens=draft_tokens,
        max_new_tokens=max_new_tokens,
        room=generator.model.config.context_length - len(prompt) + 1,
        eos_id=eos_id,
    )


def _check_draft(draft: Generator, generator: Generator, prompt: Sequence[int]) -> None:
    draft.check_goes_back("a draft model")
    if draft.vocab_size != generator.vocab_size:
        raise ValueError(
            f"the draft model knows {draft.vocab_size} ids, the model {generator.vocab_size}: they "
            "must have the same tokenizer"
        )
    config = draft.model.config
    if max(prompt) >= config.vocab_size:
        raise ValueError(
            f"the prompt holds the id {max(prompt)}, the draft model knows 0 to "
            f"{config.vocab_size - 1}"
        )
    if len(prompt) < config.prefix:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, fewer than the draft's "
            f"model.prefix={config.prefix}"
        )
    if draft.model.embed.weight.device != generator.model.embed.weight.device:
        raise ValueError("the draft model must be on the device of the model")
    if draft.model.training:
        raise ValueError("the draft model is in training mode; call model.eval() on it")


class Round(NamedTuple):
    """What one call of the model gave: accepted tokens and one more, at least that one."""

    tokens: list[int]
    logprobs: Sequence[TokenLogprob | None]  # None where they were not asked for
    drafted: int


class _Rounds:
    """Propose, read, keep or correct: algorithm 1, and going back to what was kept."""

    def __init__(
        self, reader: Reader, draft: Draft, options: SamplingOptions, logprobs: int | None
    ):
        self._reader = reader
        self._draft = draft
        self._options = options
        self._logprobs = logprobs

    def begin(self, prompt: list[int]) -> Occurrences:
        """Go back to a prompt whose last token is to be read."""
        self._keep(len(prompt) - 1)
        known = [token for token in prompt if token < self._reader.known_ids]
        ids = torch.tensor([known], dtype=torch.int64, device=self._reader.device)
        return Occurrences(self._options, ids, self._reader.known_ids)

    def next(self, text: list[int], count: int, occurrences: Occurrences, chance: Chance) -> Round:
        """Continue `text` by 1 to `count` + 1 tokens, and note them in `occurrences`."""
        proposal = self._draft.propose(text, count, occurrences, chance)
        logits = self._reader.logits(text + proposal.tokens, len(proposal.tokens) + 1)
        tokens = self._verify(logits, proposal, occurrences, chance)
        self._keep(len(text) + len(tokens) - 1)  # the last token is not of the proposal
        logprobs: Sequence[TokenLogprob | None] = [None] * len(tokens)
        if self._logprobs is not None:
            logprobs = token_logprobs(logits[: len(tokens)], tokens, self._logprobs)
        return Round(tokens, logprobs, len(proposal.tokens))

    def _verify(
        self, logits: Tensor, proposal: Proposal, occurrences: Occurrences, chance: Chance
    ) -> list[int]:
        """Settle place by place until a proposed token is not kept, or beyond the last."""
        tokens: list[int] = []

        def add(token: int) -> None:
            tokens.append(token)
            occurrences.record(torch.tensor([token], device=logits.device))

        for row, proposed, q in zip(logits, proposal.tokens, proposal.distributions, strict=False):
            add(keep_or_correct(proposed, self._distribution(row, occurrences), q, chance))
            if tokens[-1] != proposed:
                return tokens
        add(chance.draw(self._distribution(logits[-1], occurrences)))
        return tokens

    def _distribution(self, logits: Tensor, occurrences: Occurrences) -> Tensor:
        return distribution(logits[None], self._options, occurrences.seen, occurrences.counts)[0]

    def _keep(self, length: int) -> None:
        self._reader.keep(length)
        self._draft.keep(length)


def keep_or_correct(proposed: int, p: Tensor, q: Tensor, chance: Chance) -> int:
    """Return a token distributed as `p` (V,), given one drawn from `q` (V,).

    It is kept with the chance min(1, p / q), else drawn anew from max(0, p - q): algorithm 1 of
    Leviathan et al. 2023, proven in their appendix A.1.
    """
    if chance.accept((p[proposed] / q[proposed]).item()):
        return proposed
    excess = (p - q).clamp(min=0)
    mass = excess.sum()
    # No excess is left only where p and q differ by rounding.
    return chance.draw(excess / mass if mass > 0 else p)


class SpeculativeGeneration:
    """The samples of one request, one after the other, produced while iterating.

    Each item is a list with one (sample, token), or without any where an end token came. `tokens`,
    `ends`, `logprobs` and `stop` are those of a `Generation`.
    """

    def __init__(
        self,
        rounds: _Rounds,
        prompt: Sequence[int],
        chances: Sequence[Chance],
        *,
        draft_tokens: int,
        max_new_tokens: int,
        room: int,
        eos_id: int | None,
    ):
        self.tokens: list[list[int]] = [[] for _ in chances]
        self.ends: list[str | None] = [None] * len(chances)
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in chances]
        self.report = SpeculativeReport(prompt_tokens=len(prompt))
        self._rounds = rounds
        self._prompt = list(prompt)
        self._chances = chances
        self._draft_tokens = draft_tokens
        self._max_new_tokens = max_new_tokens
        self._room = room  # new tokens that the context allows
        self._eos_id = eos_id
        self._occurrences: Occurrences | None = None
        # Drawn but not yielded yet, of the sample at hand.
        self._ready: deque[tuple[int, TokenLogprob | None]] = deque()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self

    def __next__(self) -> list[tuple[int, int]]:
        if None not in self.ends:
            raise StopIteration
        sample = self.ends.index(None)
        if not self._ready:
            self._call_model(sample)
        token, logprob = self._ready.popleft()
        if token == self._eos_id:
            self._end(sample, "eos")
            return []
        self._record(sample, token, logprob)
        return [(sample, token)]

    def run(self) -> SpeculativeGeneration:
        """Produce everything that is left."""
        for _ in self:
            pass
        return self

    def stop(self, sample: int) -> None:
        """End one sample; the others go on. Nothing happens if it has ended."""
        self._end(sample, "stopped")

    def _call_model(self, sample: int) -> None:
        """Let the model give the next tokens of a sample; the prompt is read for the first one."""
        started = time.perf_counter()
        tokens = self.tokens[sample]
        count = 0
        if tokens:
            left = min(self._max_new_tokens, self._room) - len(tokens)
            count = min(self._draft_tokens, left - 1)  # each round gives one more
        with torch.inference_mode():
            if not tokens:
                self._occurrences = self._rounds.begin(self._prompt)
            assert self._occurrences is not None
            result = self._rounds.next(
                self._prompt + tokens, count, self._occurrences, self._chances[sample]
            )
        self._ready.extend(zip(result.tokens, result.logprobs, strict=True))
        self._count(result, time.perf_counter() - started, is_first=not tokens)

    def _count(self, result: Round, seconds: float, is_first: bool) -> None:
        report = self.report
        report.model_calls += 1
        report.drafted_tokens += result.drafted
        report.accepted_tokens += len(result.tokens) - 1
        if is_first:
            report.prefill_seconds += seconds
        else:
            report.decode_seconds += seconds

    def _record(self, sample: int, token: int, logprob: TokenLogprob | None) -> None:
        tokens = self.tokens[sample]
        tokens.append(token)
        if logprob is not None:
            self.logprobs[sample].append(logprob)
        self.report.produced_tokens += 1
        self.report.decoded_tokens += len(tokens) > 1
        if len(tokens) == self._max_new_tokens:
            self._end(sample, "length")
        elif len(tokens) == self._room:
            self._end(sample, "context")

    def _end(self, sample: int, why: str) -> None:
        if self.ends[sample] is not None:
            return
        if sample == self.ends.index(None):
            self._ready.clear()
        self.ends[sample] = why
