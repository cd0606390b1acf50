"""The tokens that a model sees while a text grows, and reading those it has not read yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.caches import SampleCache, compute_dtype, make_cache
from model.config import ModelConfig
from model.kv_cache import FullCache
from model.sampling import Occurrences, SamplingOptions, keep_first

if TYPE_CHECKING:
    from model.generate import Generator


class Context:
    """The tokens a model sees: B rows of equal length in memory allocated once.

    The cache holds the first part of them; what it lacks is read when logits are asked for.
    """

    def __init__(
        self, generator: Generator, prompt: list[int], samples: int, max_new_tokens: int
    ) -> None:
        # Prompts are read eagerly: a compiled pass would be built anew for every length.
        self._step = generator.step
        self._forward = generator.step.model.forward
        self._config = config = generator.model.config
        self._samples = samples
        self._slides = generator.at_limit == "slide"
        self._cache_options = generator.cache
        self._known_ids = generator.vocab_size
        self._chunk = max(generator.prefill_chunk or config.context_length, config.prefix)
        self._cache: SampleCache | None = None

        weight = generator.model.embed.weight
        self._dtype = compute_dtype(weight)
        needed = len(prompt) + max_new_tokens - 1  # the last token is never read
        self._streams = generator.at_limit == "stream" and needed > config.context_length
        if self._slides or generator.step.compiled:  # one size of memory, compiled for once
            needed = config.context_length
        self._capacity = min(needed, config.context_length)
        visible = self._visible_part(prompt)
        self._tokens = torch.zeros(samples, self._capacity, dtype=torch.int64, device=weight.device)
        self._tokens[:, : len(visible)] = torch.tensor(visible)
        self._length = len(visible)
        self._use_cache = generator.use_cache

    @property
    def at_end(self) -> bool:
        """Whether no further token can be read."""
        goes_on = self._slides or self._streams
        return self._length == self._config.context_length and not goes_on

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values, 0 without a cache."""
        return 0 if self._cache is None else self._cache.nbytes

    @property
    def compile_seconds(self) -> float:
        """Seconds that the step which reads a token has spent on compiling itself."""
        return self._step.compile_seconds

    def occurrences(self, options: SamplingOptions) -> Occurrences:
        """Begin to note which tokens occur, as the penalties ask for it."""
        return Occurrences(options, self._tokens[:, : self._length], self._config.vocab_size)

    def reorder(self, rows: Tensor) -> None:
        """Let row b go on from what row `rows[b]` holds; `rows` is (B,) int64."""
        self._tokens[:, : self._length] = self._tokens[rows, : self._length]
        if self._cache is not None:
            assert isinstance(self._cache, FullCache)
            self._cache.reorder(rows)

    def next_logits(self, latest: Tensor | None) -> Tensor:
        """Logits (B, V) of the token after `latest` (B,), or after the prompt if None."""
        if latest is None:
            logits = self._read_prompt()
        elif self._streams and self._cache is not None:  # which alone knows what is visible
            logits = self._last_logits(latest[:, None], self._cache)
        else:
            self._append(latest)
            up_to_date = self._cache is not None and self._cache.length == self._length - 1
            logits = self._last_logits(latest[:, None], self._cache) if up_to_date else self._read()
        return keep_first(logits, self._known_ids)

    def _visible_part(self, prompt: list[int]) -> list[int]:
        """The part of the prompt that the model reads, as one text."""
        if not self._streams:
            return prompt[-visible_tokens(len(prompt), self._config) :]
        if len(prompt) <= self._capacity:
            return prompt
        sinks = self._cache_options.sinks
        return prompt[:sinks] + prompt[len(prompt) - self._capacity + sinks :]

    def _append(self, tokens: Tensor) -> None:
        if self._length == self._config.context_length:
            self._drop_older_half()
        self._tokens[:, self._length] = tokens
        self._length += 1

    def _drop_older_half(self) -> None:
        kept = kept_tokens(self._config)
        self._tokens[:, :kept] = self._tokens[:, self._length - kept : self._length].clone()
        self._length = kept
        if self._cache is not None:
            self._cache.reset()

    def _read_prompt(self) -> Tensor:
        """Read the prompt once for all samples, which share it."""
        prompt = self._tokens[:1, : self._length]
        if not self._use_cache:
            return self._last_logits(prompt).expand(self._samples, -1)
        self._cache = self._new_cache(self._samples, self._capacity)
        if self._samples == 1:
            return self._fill(self._cache, prompt)
        single = self._new_cache(1, self._capacity if self._streams else self._length)
        logits = self._fill(single, prompt)
        self._cache.copy_from(single)
        return logits.expand(self._samples, -1)

    def _read(self) -> Tensor:
        """Read what has not been read: with a cache the new tokens, without one everything."""
        visible = self._tokens[:, : self._length]
        return (
            self._last_logits(visible) if self._cache is None else self._fill(self._cache, visible)
        )

    def _fill(self, cache: SampleCache, tokens: Tensor) -> Tensor:
        """Read the tokens that `cache` lacks, a chunk at a time; logits (B, V) after the last."""
        for start in range(cache.length, tokens.shape[1], self._chunk):
            logits = self._last_logits(tokens[:, start : start + self._chunk], cache)
        return logits

    def _last_logits(self, tokens: Tensor, cache: SampleCache | None = None) -> Tensor:
        if cache is not None and cache is self._cache and tokens.shape[1] == 1:
            return self._step(tokens, cache)
        logits = self._forward(tokens, cache=cache, only_last=True).logits  # (B, 1, V)
        return logits[:, -1]

    def _new_cache(self, batch: int, capacity: int) -> SampleCache:
        return make_cache(
            self._config,
            self._cache_options,
            batch=batch,
            capacity=capacity,
            stream=self._streams,
            device=self._tokens.device,
            dtype=self._dtype,
        )


def kept_tokens(config: ModelConfig) -> int:
    """How many tokens stay when a full context drops its older half."""
    return config.context_length // 2


def visible_tokens(length: int, config: ModelConfig) -> int:
    """How many of the last tokens the model sees after `length` of them, having slid if need be.

    A full context slides when one more token comes, and again each time it has filled up.
    """
    limit, kept = config.context_length, kept_tokens(config)
    if length <= limit:
        return length
    return kept + 1 + (length - limit - 1) % (limit - kept)
