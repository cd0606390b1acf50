"""Many prompts at once: requests come and go, and those that run share every forward pass.

Continuous batching (Yu et al. 2022, "Orca: A Distributed Serving System for Transformer-Based
Generative Models", OSDI, section 3.2) over the paged cache: a request joins as soon as a row and
the blocks for its longest possible text are free, so none is ever put out again midway. Each
draws with its own options and its own seed. It gets the tokens it would get alone, but for ties
within the rounding of a matrix product, which depends on the number of its rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from model.caches import check_memory, compute_dtype
from model.decoder import Decoder
from model.generate import Generator
from model.paged_cache import BlockPool, PagedCache, PagedSequence
from model.sampling import (
    Occurrences,
    SamplingOptions,
    TokenLogprob,
    choose,
    keep_first,
    token_logprobs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue, and how; as the arguments of `Generator.generate`."""

    prompt: Sequence[int]
    max_new_tokens: int
    options: SamplingOptions = field(default_factory=SamplingOptions)
    seed: int = 0
    eos_id: int | None = None
    logprobs: int | None = None


@dataclass(eq=False, slots=True)
class Handle:
    """A request that has been submitted and what has become of it.

    `end` is None while it waits or runs, then "length", "eos", "context" or "stopped". `logprobs`
    holds one entry per token, where the request asks for them.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: str | None = None


class Step(NamedTuple):
    """What one step has brought."""

    tokens: list[tuple[Handle, int]]
    ended: list[Handle]


@dataclass(eq=False, slots=True)
class _Row:
    """A request that runs."""

    handle: Handle
    sequence: PagedSequence
    prompt_logits: Tensor  # (V,), of the first new token
    generator: torch.Generator
    occurrences: Occurrences


class ContinuousBatch:
    """Runs requests of any number, length and options together on one model.

    Args:
        model: the decoder, in evaluation mode.
        max_batch: the most requests that run together; the others wait their turn.
        cache_tokens: how many tokens of keys and values there is memory for (None: a full
            context for each of `max_batch`).
        block_size: tokens in a block of that memory.
        prefill_chunk: read prompts in pieces of this many tokens (None: in one).
        vocab_size: how many ids the tokenizer knows (None: as many as the model).
        at_limit: "stop" or "error", as for `Generator`.

    Raises ValueError in one line for options that cannot work.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_batch: int = 16,
        cache_tokens: int | None = None,
        block_size: int = 16,
        prefill_chunk: int | None = None,
        vocab_size: int | None = None,
        at_limit: str = "stop",
    ):
        if at_limit in ("slide", "stream"):
            raise ValueError(
                f"at_limit={at_limit} is for one prompt at a time; a batch takes stop or error"
            )
        if max_batch < 1:
            raise ValueError(f"max_batch={max_batch} must be at least 1")
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be at least 1")
        context = model.config.context_length
        if cache_tokens is None:
            cache_tokens = max_batch * -(-context // block_size) * block_size
        if cache_tokens < block_size:
            raise ValueError(
                f"cache_tokens={cache_tokens} must hold at least a block of {block_size} tokens"
            )
        weight = model.embed.weight
        dtype = compute_dtype(weight)
        asked = f"cache_tokens={cache_tokens} (max_batch={max_batch})"
        check_memory(model.config, cache_tokens, weight.device, dtype.itemsize, asked)
        self._single = Generator(
            model, at_limit=at_limit, prefill_chunk=prefill_chunk, vocab_size=vocab_size
        )
        self._forward = model.forward  # eager on purpose: every step has another shape
        self._config = model.config
        self._chunk = max(prefill_chunk or context, model.config.prefix)
        self._pool = BlockPool(
            model.config,
            blocks=cache_tokens // block_size,
            block_size=block_size,
            device=weight.device,
            dtype=dtype,
        )
        self.max_batch = max_batch
        self._waiting: deque[Handle] = deque()
        self._rows: list[_Row] = []
        self._view: PagedCache | None = None  # of the rows; None when they have changed

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._rows)

    @property
    def blocks(self) -> int:
        """Blocks of memory altogether."""
        return self._pool.blocks

    @property
    def free_blocks(self) -> int:
        """Blocks of memory that nobody holds."""
        return self._pool.free

    @property
    def cache_nbytes(self) -> int:
        """Memory of all keys and values in bytes, used or not."""
        return self._pool.nbytes

    def check(self, request: Request) -> None:
        """Raise ValueError in one line for a request that can never be met."""
        prompt_tokens, limit = len(request.prompt), self._config.context_length
        if prompt_tokens > limit:
            raise ValueError(
                f"the prompt has {prompt_tokens} tokens, the context holds {limit}; shorten it "
                "(only a prompt alone can slide or stream)"
            )
        self._single.check(request.prompt, request.max_new_tokens, seed=request.seed)
        self._single.check_choice(request.options, request.logprobs)
        tokens = self._longest(request)
        if self._pool.blocks_for(tokens) > self._pool.blocks:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens with "
                f"max_new_tokens={request.max_new_tokens} needs room for {tokens}, the cache "
                f"holds {self._pool.blocks * self._pool.block_size} (cache_tokens)"
            )

    def submit(self, request: Request) -> Handle:
        """Let a request wait for its turn; ValueError in one line if it can never be met."""
        self.check(request)
        handle = Handle(request)
        self._waiting.append(handle)
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a request as "stopped" and free its memory. Nothing happens if it has ended."""
        if handle.end is not None:
            return
        row = next((row for row in self._rows if row.handle is handle), None)
        if row is not None:
            self._end(row, "stopped")
        else:
            self._waiting.remove(handle)
            handle.end = "stopped"

    @torch.inference_mode()
    def step(self) -> Step:
        """Produce one token of every request that runs, and begin those there is room for."""
        step = Step([], [])
        if self._rows:
            self._produce(self._rows, self._read_latest(), step)
        for _ in range(self.max_batch):
            row = self._begin_next()
            if row is None:
                break
            self._produce([row], row.prompt_logits[None], step)
        return step

    # --- beginning and ending -----------------------------------------------------------------

    def _longest(self, request: Request) -> int:
        """The most tokens it will ever store; the last one produced is never read."""
        tokens = len(request.prompt) + request.max_new_tokens - 1
        return min(tokens, self._config.context_length)

    def _begin_next(self) -> _Row | None:
        """Read the prompt of the next request in line; None if it has to wait, or none does."""
        if not self._waiting or len(self._rows) == self.max_batch:
            return None
        handle = self._waiting[0]
        request = handle.request
        twin = self._with_prompt(request.prompt)
        shared = 0 if twin is None else len(request.prompt) // self._pool.block_size
        if self._pool.blocks_for(self._longest(request)) - shared > self._pool.free:
            return None
        sequence, logits = self._read_prompt(request) if twin is None else _follow(twin)
        sequence.reserve(self._longest(request))
        self._waiting.popleft()
        generator = torch.Generator(self._pool.device).manual_seed(request.seed)
        prompt = torch.tensor([request.prompt], device=self._pool.device)
        occurrences = Occurrences(request.options, prompt, self._config.vocab_size)
        row = _Row(handle, sequence, logits, generator, occurrences)
        self._rows.append(row)
        self._view = None
        return row

    def _with_prompt(self, prompt: Sequence[int]) -> _Row | None:
        """A running request with the same prompt, so that it need not be read again."""
        return next((row for row in self._rows if row.handle.request.prompt == prompt), None)

    def _read_prompt(self, request: Request) -> tuple[PagedSequence, Tensor]:
        """Read a prompt by itself, as a single call would; logits (V,) of the next token."""
        sequence = PagedSequence(self._pool)
        cache = PagedCache([sequence])
        tokens = torch.tensor([request.prompt], device=self._pool.device)
        try:
            for part in tokens.split(self._chunk, dim=1):
                logits = self._last_logits(part, cache)
        except BaseException:
            sequence.release()
            raise
        return sequence, logits[0].clone()

    def _end(self, row: _Row, why: str) -> None:
        row.handle.end = why
        row.sequence.release()
        self._rows.remove(row)
        self._view = None

    # --- reading and drawing ------------------------------------------------------------------

    def _read_latest(self) -> Tensor:
        """Read the token that each row has drawn last; logits (B, V) of the next."""
        if self._view is None:
            self._view = PagedCache([row.sequence for row in self._rows])
        latest = [[row.handle.tokens[-1]] for row in self._rows]
        return self._last_logits(torch.tensor(latest, device=self._pool.device), self._view)

    def _last_logits(self, tokens: Tensor, cache: PagedCache) -> Tensor:
        logits = self._forward(tokens, cache=cache, only_last=True).logits[:, -1]  # (B, V)
        return keep_first(logits, self._single.vocab_size)

    def _produce(self, rows: Sequence[_Row], logits: Tensor, step: Step) -> None:
        """Draw a token for every row from logits (B, V), keep it, and end what is done."""
        tokens = self._draw(rows, logits)
        for row, token, row_logits in zip(tuple(rows), tokens, logits, strict=True):
            handle = row.handle
            if token == handle.request.eos_id:
                self._end(row, "eos")
            else:
                if handle.request.logprobs is not None:
                    handle.logprobs += token_logprobs(
                        row_logits[None], [token], handle.request.logprobs
                    )
                handle.tokens.append(token)
                step.tokens.append((handle, token))
                if len(handle.tokens) == handle.request.max_new_tokens:
                    self._end(row, "length")
                elif row.sequence.length == self._config.context_length:
                    self._end(row, "context")
            if handle.end is not None:
                step.ended.append(handle)

    def _draw(self, rows: Sequence[_Row], logits: Tensor) -> list[int]:
        """One token for every row; rows with equal options are drawn together."""
        drawn = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        for options, members in _by_options(rows):
            group = [rows[i] for i in members]
            seen = _joined([row.occurrences.seen for row in group])
            counts = _joined([row.occurrences.counts for row in group])
            generators = [row.generator for row in group]
            drawn[members] = choose(logits[members], options, generators, seen, counts)
        for row, token in zip(rows, drawn.split(1), strict=True):
            row.occurrences.record(token)
        return drawn.tolist()


def _follow(twin: _Row) -> tuple[PagedSequence, Tensor]:
    """A sequence that begins with the prompt of another row, and its logits (V,)."""
    return twin.sequence.fork(len(twin.handle.request.prompt)), twin.prompt_logits


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Rows (1, V) as one (B, V), or None where equal options need none."""
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _by_options(rows: Iterable[_Row]) -> list[tuple[SamplingOptions, list[int]]]:
    """Row numbers, put together where the options are equal."""
    groups: list[tuple[SamplingOptions, list[int]]] = []
    for i, row in enumerate(rows):
        options = row.handle.request.options
        members = next((members for other, members in groups if other == options), None)
        if members is None:
            groups.append((options, [i]))
        else:
            members.append(i)
    return groups


def generate_batch(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    options: SamplingOptions | None = None,
    seed: int = 0,
    eos_id: int | None = None,
    max_batch: int = 16,
    cache_tokens: int | None = None,
) -> list[Handle]:
    """Continue prompts of any lengths together; each as `generator.generate` would alone.

    Prompt i draws with the seed `seed + i`. `max_batch` and `cache_tokens` bound the memory, see
    `ContinuousBatch`. Returns tokens and end of each prompt, in the order of the prompts.

    Raises ValueError in one line, before anything is read, for a request that cannot be met.
    """
    if not generator.use_cache:
        raise ValueError("a batch needs the cache: use_cache=False reads one prompt at a time")
    if not generator.cache.is_exact:
        raise ValueError(
            f"a batch keeps keys and values as they are: not cache={generator.cache.kind}"
        )
    batch = ContinuousBatch(
        generator.step.model,
        max_batch=max_batch,
        cache_tokens=cache_tokens,
        prefill_chunk=generator.prefill_chunk,
        vocab_size=generator.vocab_size,
        at_limit=generator.at_limit,
    )
    options = options or SamplingOptions()
    handles = [
        batch.submit(
            Request(
                prompt=prompt,
                max_new_tokens=max_new_tokens,
                options=options,
                seed=seed + i,
                eos_id=eos_id,
            )
        )
        for i, prompt in enumerate(prompts)
    ]
    while batch.waiting or batch.running:
        batch.step()
    return handles
