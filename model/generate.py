"""Generation on token ids: read the prompt once, then produce one token at a time.

    from data.tokenizers import Tokenizer
    from model.checkpoint import resolve_run
    from model.generate import Generator
    from model.load import load_model
    from model.sampling import SamplingOptions
    from model.text_stream import stream_text

    model, _ = load_model("runs/latest")
    tokenizer = Tokenizer.load(resolve_run("runs/latest") / "tokenizer.json")
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]

    generator = Generator(model, vocab_size=tokenizer.vocab_size)
    generation = generator.generate(
        begin + tokenizer.encode("ROMEO:"),
        max_new_tokens=100,
        options=SamplingOptions(temperature=0.8, top_p=0.9),
        seed=7,
        eos_id=tokenizer.eos_id,
    )
    for piece in stream_text(generation, tokenizer.stream):  # as it comes
        print(piece.text, end="", flush=True)
    print(generation.tokens, generation.ends, generation.report)

`Generator(model).generate(prompt, ...)` checks everything, and gives a `Generation` to iterate
over. With the cache (the default) each token is read once; without it the whole context is read
for every token, which is slow, obviously right, and what the cached path is tested against.

A model sees at most `context_length` tokens. What happens at that limit is chosen before the
first token: "stop" ends the text, "slide" drops the older half of what the model sees and reads
the rest again, "error" refuses a request that would get there. "stream" never ends and reads no
token twice: the model goes on to see the first few tokens and the last ones
(`model/streaming_cache.py`). The last token produced is never read, so a context of L tokens gives
up to L - P + 1 new ones after a prompt of P.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.caches import (
    CacheOptions,
    LogitError,
    check_cache,
    check_memory,
    compute_dtype,
    logit_error,
    make_cache,
)
from model.context import Context, kept_tokens
from model.decode import DecodeStep
from model.decoder import Decoder
from model.sampling import (
    SamplingOptions,
    TokenLogprob,
    choose,
    token_logprobs,
)

AT_LIMIT = ("stop", "slide", "error", "stream")


@dataclass(slots=True)
class Report:
    """What one generation cost; times are of the model and the draws, not of who reads them."""

    prompt_tokens: int
    produced_tokens: int = 0  # over all samples
    prefill_seconds: float = 0.0  # reading the prompt and drawing each sample's first token
    decoded_tokens: int = 0  # produced after those first ones
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0  # ahead of time, for a CPU; in neither of the two above

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens read per second; samples share one reading of the prompt."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens produced per second after the first, over all samples; None if there are none."""
        return self.decoded_tokens / self.decode_seconds if self.decoded_tokens else None

    def __str__(self) -> str:
        text = (
            f"read {self.prompt_tokens} tokens in {self.prefill_seconds:.3f} s"
            f"{_rate(self.prefill_tokens_per_s)}, produced {self.produced_tokens}"
        )
        if self.decode_tokens_per_s is not None:
            text += f" in {self.decode_seconds:.3f} s{_rate(self.decode_tokens_per_s)}"
        if self.compile_seconds:
            text += f", besides {self.compile_seconds:.1f} s of compiling"
        return text


def _rate(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f" ({tokens_per_s:,.0f} tokens/s)"


class Generator:
    """Generates from one model in evaluation mode; calls share nothing but the model.

    Args:
        model: the decoder.
        use_cache: keep keys and values (fast) or read the context anew for each token.
        at_limit: what happens at the context length, one of AT_LIMIT.
        cache: how keys and values are kept, and how many first tokens `stream` keeps (None: all
            as they are, and 4).
        prefill_chunk: read prompts in pieces of this many tokens, which bounds memory (None: in
            one). With mask=prefix the first piece always holds the whole prefix.
        vocab_size: how many ids the tokenizer knows; higher ones, which pad the model's
            vocabulary, are never drawn. None: the model's own.
        compiled: compile the step that reads one token (`model.decode`): some tens of seconds
            before the first one, then up to several times the speed, for every later call too. On
            a CPU the result is kept on disk for later programs.
        weights: "full", or "int8": linear layers in 8 bits, smaller and faster but not exact.
        log: told in one line before a long compilation.

    Raises ValueError in one line for options that cannot work.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        use_cache: bool = True,
        at_limit: str = "stop",
        cache: CacheOptions | None = None,
        prefill_chunk: int | None = None,
        vocab_size: int | None = None,
        compiled: bool = False,
        weights: str = "full",
        log: Callable[[str], None] = lambda line: None,
    ):
        if at_limit not in AT_LIMIT:
            raise ValueError(f"at_limit={at_limit!r} is not one of {', '.join(AT_LIMIT)}")
        if prefill_chunk is not None and prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk} must be at least 1")
        if compiled and not use_cache:
            raise ValueError("compiled=True compiles the step that uses the cache: use_cache=False")
        config = model.config
        if vocab_size is not None and not 0 < vocab_size <= config.vocab_size:
            raise ValueError(
                f"the tokenizer has {vocab_size} ids, the model has {config.vocab_size}"
            )
        if config.mask == "bidirectional":
            raise ValueError(
                "a model with model.mask=bidirectional sees the token it should predict: it cannot "
                "generate"
            )
        if at_limit == "slide" and kept_tokens(config) + 1 < config.prefix:
            raise ValueError(
                f"at_limit=slide goes on with {kept_tokens(config) + 1} tokens, fewer than "
                f"model.prefix={config.prefix}"
            )
        cache = cache or CacheOptions()
        if not use_cache and (at_limit == "stream" or not cache.is_exact):
            wanted = "at_limit=stream" if at_limit == "stream" else f"cache={cache.kind}"
            raise ValueError(f"{wanted} does not go without a cache")
        if compiled and not cache.is_exact:
            raise ValueError(f"compiled=True is for the full cache, not for cache={cache.kind}")
        check_cache(config, cache, stream=at_limit == "stream")
        self.model = model
        self.use_cache = use_cache
        self.at_limit = at_limit
        self.cache = cache
        self.prefill_chunk = prefill_chunk
        self.vocab_size = config.vocab_size if vocab_size is None else vocab_size
        self.step = DecodeStep(model, compiled=compiled, weights=weights, log=log)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        options: SamplingOptions | None = None,
        num_samples: int = 1,
        seed: int = 0,
        eos_id: int | None = None,
        logprobs: int | None = None,
    ) -> Generation:
        """Start `num_samples` independent continuations of one prompt.

        Sample i draws with the seed `seed + i` and nothing else, so it is the same whether it is
        produced alone or beside others. `eos_id` ends a sample and is not part of it. `logprobs`
        asks for the log-probability of each token and of that many likeliest in its place.

        Raises ValueError in one line, before the first token, for a request that cannot be met.
        """
        options = options or SamplingOptions()
        self.check(prompt, max_new_tokens, num_samples, seed)
        self.check_choice(options, logprobs)
        device = self.model.embed.weight.device
        generators = [torch.Generator(device).manual_seed(seed + i) for i in range(num_samples)]
        context = self.context(prompt, num_samples, max_new_tokens)
        report = Report(prompt_tokens=len(prompt))
        return Generation(context, options, generators, max_new_tokens, eos_id, report, logprobs)

    def check(
        self, prompt: Sequence[int], max_new_tokens: int, num_samples: int = 1, seed: int = 0
    ) -> None:
        """Raise ValueError in one line for a request that cannot be met."""
        self._check_prompt(prompt)
        self._check_request(len(prompt), max_new_tokens, num_samples, seed)

    def check_choice(self, options: SamplingOptions, logprobs: int | None = None) -> None:
        """Raise ValueError in one line for a bias or log-probabilities of ids there are not."""
        options.check_ids(self.vocab_size)
        if logprobs is not None and not 0 <= logprobs <= self.vocab_size:
            raise ValueError(
                f"logprobs={logprobs} must be from 0 to the number of ids, {self.vocab_size}"
            )

    def check_goes_back(self, what: str) -> None:
        """Raise ValueError in one line if tokens once read may be gone when `what` needs them."""
        if self.at_limit in ("slide", "stream"):
            raise ValueError(f"at_limit={self.at_limit} does not go with {what}; choose stop")
        if not self.cache.is_exact:
            raise ValueError(f"cache={self.cache.kind} does not go with {what}; choose full")
        if self.step.compiled:
            raise ValueError(f"compiled=True does not go with {what}, which reads several tokens")

    def context(self, prompt: Sequence[int], rows: int, max_new_tokens: int) -> Context:
        """Prepare to read a prompt, checked before, and what `rows` continuations add to it."""
        return Context(self, list(prompt), rows, max_new_tokens)

    def cache_error(self, tokens: Sequence[int]) -> LogitError | None:
        """How much the cache changes the logits of this text; None for a cache that changes none.

        Measured on its last tokens, at most 64 of them, and on no more than fit the context.
        """
        visible = tokens[-self.model.config.context_length :]
        if self.cache.is_exact or len(visible) <= max(self.model.config.prefix, 1):
            return None
        weight = self.model.embed.weight
        cache = make_cache(
            self.model.config,
            self.cache,
            capacity=len(visible),
            device=weight.device,
            dtype=compute_dtype(weight),
        )
        return logit_error(self.model, cache, torch.tensor([visible], device=weight.device))

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        config = self.model.config
        if not len(prompt):
            raise ValueError("the prompt is empty; a model needs at least one token to go on from")
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < config.vocab_size)
            raise ValueError(
                f"the prompt holds the id {wrong}, the model knows 0 to {config.vocab_size - 1}"
            )
        if len(prompt) < config.prefix:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, fewer than model.prefix={config.prefix}"
            )
        if len(prompt) > config.context_length and self.at_limit not in ("slide", "stream"):
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, the context holds {config.context_length}; "
                "shorten the prompt, or choose at_limit=slide to go on from its end (stream: from "
                "its beginning and its end)"
            )

    def _check_request(
        self, prompt_tokens: int, max_new_tokens: int, num_samples: int, seed: int
    ) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} must be at least 1")
        if not 0 <= seed < 2**63 - num_samples:
            raise ValueError(f"seed={seed} must be a number from 0 to 2**63 - num_samples")
        room = self.model.config.context_length - prompt_tokens + 1
        if self.at_limit == "error" and max_new_tokens > room:
            raise ValueError(
                f"max_new_tokens={max_new_tokens} does not fit: after a prompt of {prompt_tokens} "
                f"tokens the context of {self.model.config.context_length} has room for {room}"
            )
        if self.model.training:
            raise ValueError("the model is in training mode; call model.eval() before generating")
        self._check_memory(num_samples, prompt_tokens + max_new_tokens - 1)

    def _check_memory(self, num_samples: int, length: int) -> None:
        if not self.use_cache:
            return
        config, weight = self.model.config, self.model.embed.weight
        held = min(length, config.context_length)
        if self.at_limit == "slide" or self.step.compiled:  # one size of memory
            held = config.context_length
        if self.at_limit == "stream" and length > config.context_length:
            held = 2 * config.context_length  # room for the window to move in
        if self.cache.budget is not None:
            held = min(held, self.cache.budget)
        asked = f"num_samples={num_samples} of {held} tokens"
        bits = self.cache.bits or 8 * compute_dtype(weight).itemsize
        check_memory(config, num_samples * held, weight.device, bits / 8, asked)


class Generation:
    """The samples of one request, produced while iterating.

    Each item is a list of (sample, token) for the samples that went on. `tokens` holds what each
    sample has produced, `ends` why it ended: "length" (max_new_tokens), "eos", "context" (the
    limit, with at_limit=stop), "stopped" (by `stop`) or None while it goes on. `logprobs` holds
    one entry per token, where they were asked for.
    """

    def __init__(
        self,
        context: Context,
        options: SamplingOptions,
        generators: Sequence[torch.Generator],
        max_new_tokens: int,
        eos_id: int | None,
        report: Report,
        logprobs: int | None = None,
    ):
        self.tokens: list[list[int]] = [[] for _ in generators]
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in generators]
        self.ends: list[str | None] = [None] * len(generators)
        self.report = report
        self._context = context
        self._options = options
        self._generators = generators
        self._max_new_tokens = max_new_tokens
        self._eos_id = eos_id
        self._going = list(range(len(generators)))
        self._latest: Tensor | None = None  # (B,) tokens drawn but not read yet
        self._occurrences = context.occurrences(options)
        self._logprobs = logprobs

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self

    def __next__(self) -> list[tuple[int, int]]:
        if not self._going:
            raise StopIteration
        started, compiled = time.perf_counter(), self._context.compile_seconds
        is_prefill = self._latest is None
        with torch.inference_mode():
            logits = self._context.next_logits(self._latest)
            self._latest = self._draw(logits)
        # Bringing the tokens to the host waits for the device, so the clock is honest there too.
        drawn = self._latest.tolist()
        step = self._record(drawn)
        if self._logprobs is not None:
            rows = token_logprobs(logits, drawn, self._logprobs)
            for sample, _ in step:
                self.logprobs[sample].append(rows[sample])
        compiling = self._context.compile_seconds - compiled
        seconds = time.perf_counter() - started - compiling
        self.report.compile_seconds += compiling
        self.report.produced_tokens += len(step)
        if is_prefill:
            self.report.prefill_seconds += seconds
        else:
            self.report.decode_seconds += seconds
            self.report.decoded_tokens += len(step)
        return step

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values of all samples; 0 before the first token, or uncached."""
        return self._context.cache_bytes

    def run(self) -> Generation:
        """Produce everything that is left."""
        for _ in self:
            pass
        return self

    def stop(self, sample: int) -> None:
        """End one sample; the others go on. Nothing happens if it has ended."""
        self._end(sample, "stopped")

    def _draw(self, logits: Tensor) -> Tensor:
        seen, counts = self._occurrences.seen, self._occurrences.counts
        tokens = choose(logits, self._options, self._generators, seen, counts)
        self._occurrences.record(tokens)
        return tokens

    def _record(self, drawn: Sequence[int]) -> list[tuple[int, int]]:
        """Keep the tokens of samples still going, and end those that are done."""
        step = []
        for sample in tuple(self._going):
            token = drawn[sample]
            if token == self._eos_id:
                self._end(sample, "eos")
                continue
            self.tokens[sample].append(token)
            step.append((sample, token))
            if len(self.tokens[sample]) == self._max_new_tokens:
                self._end(sample, "length")
        if self._context.at_end:
            for sample in tuple(self._going):
                self._end(sample, "context")
        return step

    def _end(self, sample: int, why: str) -> None:
        if self.ends[sample] is None:
            self.ends[sample] = why
            self._going.remove(sample)
