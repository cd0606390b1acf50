"""What a completion request may say, and the shape of the answers, as OpenAI's API has them.

https://platform.openai.com/docs/api-reference/completions. Beyond it: `top_k`, `min_p`, `typical_p`
and `repetition_penalty`. What is not there is refused by name and never left out in silence.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data.tokenizers import Tokenizer
from model.batching import Request
from model.sampling import SamplingOptions
from serving.engine import Piece
from serving.json_fields import (
    ANYTHING,
    FLAG,
    NUMBER,
    OBJECT,
    TEXT,
    TEXTS,
    WHOLE,
    FieldError,
    check_fields,
    read_bias,
    read_object,
    shown,
)
from serving.prompts import encode_prompt

MAX_BODY = 1 << 20  # bytes
MAX_PROMPTS = 64
MAX_N = 16
MAX_LOGPROBS = 5
MAX_STOPS = 4
MAX_STOP_LENGTH = 256  # characters
DEFAULT_MAX_TOKENS = 16

SAMPLING = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": WHOLE,
    "min_p": NUMBER,
    "typical_p": NUMBER,
    "repetition_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "logit_bias": OBJECT,
}
# Known to OpenAI's API but not to ours: nothing but the value that changes nothing is taken.
WITHOUT_EFFECT: dict[str, tuple[str, Any]] = {
    "suffix": (TEXT, ""),
    "best_of": (WHOLE, 1),
}
FIELDS = {
    "model": TEXT,
    "prompt": ANYTHING,  # looked at more closely later
    "max_tokens": WHOLE,
    "n": WHOLE,
    "seed": WHOLE,
    "stop": TEXTS,
    "stream": FLAG,
    "stream_options": OBJECT,
    "echo": FLAG,
    "user": TEXT,
    "logprobs": WHOLE,
    **SAMPLING,
    **{name: kind for name, (kind, _) in WITHOUT_EFFECT.items()},
}


class ApiError(Exception):
    """An answer that is an error: its status and what OpenAI's clients expect in the body."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        kind = "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status >= 500:
            kind = "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A request that has been checked. Choice i continues prompt i // n."""

    requests: tuple[Request, ...]
    stop: tuple[str, ...]
    openings: tuple[str, ...]  # what each choice's text begins with: its prompt with `echo`
    prompt_tokens: int
    stream: bool
    include_usage: bool


def read_completion(
    raw: bytes, *, model: str, tokenizer: Tokenizer, context_length: int, max_choices: int
) -> Completion:
    """Check the body of a request; raises ApiError in one line for what cannot be met.

    The texts' own limits (length of prompt and context) are for the engine to check.
    """
    try:
        body = read_object(raw, "the body")
        check_fields(body, FIELDS)
        _check_model(body.get("model", model), model)
        _check_without_effect(body)
        n = _within(body, "n", 1, 1, MAX_N)
        max_tokens = _within(body, "max_tokens", DEFAULT_MAX_TOKENS, 1, context_length)
        stop = _stops(body)
        options = _options(body)
        logprobs = _logprobs(body, tokenizer.vocab_size)
        prompts = _prompts(body.get("prompt"), tokenizer)
        if n * len(prompts) > max_choices:
            raise FieldError(
                "n",
                f"{len(prompts)} prompts with n={n} are {n * len(prompts)} texts; this server "
                f"takes {max_choices} at a time",
            )
        seed = body.get("seed", secrets.randbelow(2**31))
        openings = [text for text, _ in prompts] if body.get("echo") else [""] * len(prompts)
        return Completion(
            requests=tuple(
                Request(
                    prompt=ids,
                    max_new_tokens=max_tokens,
                    options=options,
                    seed=seed + i,
                    eos_id=tokenizer.eos_id,
                    logprobs=logprobs,
                )
                for _, ids in prompts
                for i in range(n)
            ),
            stop=stop,
            openings=tuple(text for text in openings for _ in range(n)),
            prompt_tokens=sum(len(ids) for _, ids in prompts),
            stream=body.get("stream", False),
            include_usage=_include_usage(body),
        )
    except FieldError as error:
        raise ApiError(400, str(error), param=_param(error.field)) from error
    except ValueError as error:
        raise bad_request(error) from error


def bad_request(error: ValueError) -> ApiError:
    """The answer to a value out of range, whose message begins with NAME=VALUE."""
    message = str(error).replace("max_new_tokens=", "max_tokens=")
    name = message.partition("=")[0].partition(" ")[0]
    return ApiError(400, message, param=_param(name))


def _param(name: str) -> str | None:
    """The name of a known field; an unknown one may be anything, half a character even."""
    return name if name in FIELDS else None


def _check_model(asked: str, model: str) -> None:
    if asked != model:
        raise ApiError(
            404,
            f"model {shown(asked)} is not served here; this server has {shown(model)}",
            param="model",
            code="model_not_found",
        )


def _check_without_effect(body: dict[str, Any]) -> None:
    for name, (_, neutral) in WITHOUT_EFFECT.items():
        if name in body and body[name] != neutral:
            raise FieldError(name, f"{name}={shown(body[name])} is not supported; leave it out")


def _within(body: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name, default if default <= high else high)
    if not low <= value <= high:
        raise FieldError(name, f"{name}={shown(value)} must be from {low} to {high}")
    return value


def _options(body: dict[str, Any]) -> SamplingOptions:
    options = {name: body[name] for name in SAMPLING if name in body}
    if "logit_bias" in options:
        options["logit_bias"] = read_bias(options["logit_bias"])
    return SamplingOptions(**options)


def _logprobs(body: dict[str, Any], vocab_size: int) -> int | None:
    if "logprobs" not in body:
        return None
    if body.get("echo"):
        raise FieldError("logprobs", "logprobs of the prompt, with echo=true, are not supported")
    return min(_within(body, "logprobs", 0, 0, MAX_LOGPROBS), vocab_size)


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    value = body.get("stop", [])
    stops = (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > MAX_STOPS:
        raise FieldError("stop", f"stop has {len(stops)} texts; at most {MAX_STOPS} are taken")
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise FieldError(
                "stop",
                f"stop has a text of {len(text)} characters; it must be 1 to {MAX_STOP_LENGTH}",
            )
    return stops


def _prompts(value: Any, tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
    """Each prompt as text and as ids, from a text, ids, or a list of either."""
    if value is None:
        raise FieldError("prompt", "there is no prompt")
    items = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not items:
        raise FieldError("prompt", "prompt=[] holds no prompt")
    if len(items) > MAX_PROMPTS:
        raise FieldError(
            "prompt", f"{len(items)} prompts are given; at most {MAX_PROMPTS} are taken"
        )
    try:
        return [_prompt(item, tokenizer) for item in items]
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError("prompt", str(error)) from error


def _prompt(item: Any, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    if isinstance(item, str):
        check_fields({"prompt": item}, {"prompt": TEXT})
        return item, encode_prompt(item, tokenizer)
    if not isinstance(item, list) or not _is_ids(item):
        raise FieldError(
            "prompt", f"prompt={shown(item)} must be a text, token ids, or a list of either"
        )
    for token in item:
        if not 0 <= token < tokenizer.vocab_size:
            raise FieldError(
                "prompt",
                f"prompt has the id {shown(token)}; ids are 0 to {tokenizer.vocab_size - 1}",
            )
    return tokenizer.decode(item), item


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(token) is int for token in value)


def _include_usage(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not body.get("stream"):
        raise FieldError("stream_options", "stream_options has no meaning without stream=true")
    check_fields(options, {"include_usage": FLAG})
    return options.get("include_usage", False)


class Answer:
    """The bodies that answer one request: a whole one, or chunks while texts are made."""

    def __init__(self, completion: Completion, model: str, tokenizer: Tokenizer):
        self._completion = completion
        self._tokenizer = tokenizer
        count = len(completion.requests)
        # What log-probabilities have been told of: so many tokens, and characters in them.
        self._told = [0] * count
        self._offsets = [0] * count
        self._decoders = [tokenizer.stream() for _ in range(count)]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Every choice complete, in one piece each."""
        openings = self._completion.openings
        choices = [self._choice(piece, openings[piece.choice]) for piece in pieces]
        tokens = sum(piece.tokens for piece in pieces)
        return self._head | {"choices": choices, "usage": self._usage(tokens)}

    def openings(self) -> Iterator[dict[str, Any]]:
        """Chunks for the prompts that are to be repeated."""
        for index, text in enumerate(self._completion.openings):
            if text:
                yield self._head | {"choices": [_choice(index, text)]}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Some more text of one choice."""
        return self._head | {"choices": [self._choice(piece)]}

    def usage_chunk(self, completion_tokens: int) -> dict[str, Any]:
        """The last chunk where `include_usage` asks for it."""
        return self._head | {"choices": [], "usage": self._usage(completion_tokens)}

    def _choice(self, piece: Piece, opening: str = "") -> dict[str, Any]:
        logprobs = None
        if piece.handle.request.logprobs is not None:
            logprobs = self._new_logprobs(piece)
        return _choice(piece.choice, opening + piece.text, piece.finish_reason, logprobs)

    def _new_logprobs(self, piece: Piece) -> dict[str, list[Any]]:
        """Those of the tokens since the last piece, a stop text's own included."""
        choice = piece.choice
        new = slice(self._told[choice], piece.tokens)
        self._told[choice] = piece.tokens
        tokens, logprobs = piece.handle.tokens[new], piece.handle.logprobs[new]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(self._decoders[choice].step(token))
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [
                {self._name(token): value for token, value in entry.top} for entry in logprobs
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """The text of a token; bytes that are no whole characters as OpenAI writes them."""
        raw = self._tokenizer.token_bytes[token]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = self._completion.prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }


def _choice(
    index: int, text: str, reason: str | None = None, logprobs: dict[str, list[Any]] | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
