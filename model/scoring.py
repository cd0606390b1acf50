"""How well a model predicts a given text: one loss per token, by windows or as a stream.

Token i of a text is predicted from those before it, so the first one is not predicted by anything,
and every other one is scored exactly once. Whoever sums the losses in float64 and divides by
their number has the loss in nats per token; its exponential is the perplexity.

`score_windows` cuts a text of any length into windows that begin `stride` tokens apart. A window
reads up to `context_length` tokens, and counts only what no window before it has counted: its last
`stride` targets, each predicted from at least `context_length - stride + 1` tokens (Press et al.
2021, "Shortformer", arXiv:2012.15832, section 2: sliding-window inference). A small
stride gives every token a long context and costs `context_length / stride` passes over the text;
a stride of `context_length` is what evaluation during training does, window beside window.

`score_stream` reads the text once, one token at a time, through a cache of any kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ModelConfig
from model.decoder import IGNORE, Decoder, counted_targets, next_token_loss
from model.kv_cache import KVCache

LOGITS_AT_ONCE = 1 << 25  # 128 MiB in float32: what bounds the windows of one forward pass


class Losses(NamedTuple):
    """Losses of consecutive tokens of a text, those from number `start` on.

    nats: (n,) float64 on the CPU, the loss of each token.
    counted: (n,) bool, False where the model does not predict but sees the token, as in the
        prefix of mask=prefix; the loss there is 0.
    """

    start: int
    nats: Tensor
    counted: Tensor


def score_windows(
    model: Decoder,
    tokens: Sequence[int] | Tensor,
    *,
    stride: int | None = None,
    batch_size: int | None = None,
) -> Iterator[Losses]:
    """Yield the losses of tokens 1, 2, ... of a text, in order, a batch of windows at a time.

    Args:
        model: the decoder, in evaluation mode.
        tokens: (N,) ids of the whole text.
        stride: tokens between the beginnings of windows, 1 to context_length; None: half of it.
        batch_size: windows per forward pass; None: as many as LOGITS_AT_ONCE allows, which is
            also all that memory depends on.

    Raises:
        ValueError: in one line, before any work, for a text, model or number that cannot be used.
    """
    ids = _checked(model, tokens)
    length = model.config.context_length
    stride = max(1, length // 2) if stride is None else stride
    if not 1 <= stride <= length:
        raise ValueError(f"stride={stride} must be from 1 to the context of {length} tokens")
    if batch_size is None:
        batch_size = max(1, LOGITS_AT_ONCE // (length * model.config.vocab_size))
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    return _score_windows(model, ids, stride, batch_size)


def _score_windows(model: Decoder, ids: Tensor, stride: int, batch_size: int) -> Iterator[Losses]:
    n_targets = len(ids) - 1
    length = min(model.config.context_length, n_targets)
    stride = min(stride, length)
    n_windows = 1 + max(0, -(-(n_targets - length) // stride))
    for first in range(0, n_windows, batch_size):
        last = min(first + batch_size, n_windows) - 1
        rows = [
            _window(ids, number * stride, length, skip=0 if number == 0 else length - stride)
            for number in range(first, last + 1)
        ]
        inputs, targets = (torch.stack(part) for part in zip(*rows, strict=True))
        nats, counted = _losses(model, inputs, targets)
        begin = 0 if first == 0 else first * stride + length - stride
        end = min(last * stride + length, n_targets)
        fresh = _fresh(len(rows), length, stride, is_first=first == 0)
        yield Losses(1 + begin, nats[fresh][: end - begin], counted[fresh][: end - begin])


def _window(ids: Tensor, start: int, length: int, *, skip: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a window, (T,) each, its first `skip` targets left out.

    Behind the end of the text there is padding without loss, which causal attention from within
    the text does not see.
    """
    inputs, targets = ids.new_zeros(length), ids.new_full((length,), IGNORE)
    text = ids[start : start + length + 1]
    inputs[: len(text) - 1] = text[:-1]
    targets[: len(text) - 1] = text[1:]
    targets[:skip] = IGNORE
    return inputs, targets


def _fresh(rows: int, length: int, stride: int, *, is_first: bool) -> Tensor:
    """Mark the targets that each window of a batch is the first to count, (B, T)."""
    fresh = torch.zeros(rows, length, dtype=torch.bool)
    fresh[:, length - stride :] = True
    if is_first:
        fresh[0] = True
    return fresh


def score_stream(
    model: Decoder, tokens: Sequence[int] | Tensor, cache: KVCache
) -> Iterator[Losses]:
    """Yield the loss of tokens 1, 2, ... of a text, each as the model that read on sees it.

    The cache decides what stays visible: with a full one, which must have room for the whole
    text, the losses are those of one forward pass; with one that forgets, the text may be longer
    than the context. With mask=prefix the first step reads the whole prefix.

    Args:
        model: the decoder, in evaluation mode.
        tokens: (N,) ids of the whole text.
        cache: an empty one for a single sequence.

    Raises:
        ValueError: in one line, before any work for a text or model that cannot be used, and when
            the cache is full.
    """
    ids = _checked(model, tokens)
    if cache.length:
        raise ValueError(f"the cache holds {cache.length} tokens of something else; reset it")
    return _score_stream(model, ids, cache)


def _score_stream(model: Decoder, ids: Tensor, cache: KVCache) -> Iterator[Losses]:
    start = 0
    while start < len(ids) - 1:
        end = max(start + 1, min(model.config.prefix, len(ids) - 1))
        inputs, targets = ids[None, start:end], ids[None, start + 1 : end + 1]
        if start == 0:
            targets = counted_targets(model.config, targets)
        nats, counted = _losses(model, inputs, targets, cache)
        yield Losses(start + 1, nats[0], counted[0])
        start = end


@torch.inference_mode()
def _losses(
    model: Decoder, inputs: Tensor, targets: Tensor, cache: KVCache | None = None
) -> tuple[Tensor, Tensor]:
    """Losses (B, T) in float64 and which of them count, both on the CPU."""
    device = model.embed.weight.device
    if cache is None:
        targets = counted_targets(model.config, targets)
    # Not `model(...)`, which may be compiled: its graph would be made anew for every length.
    logits = model.forward(inputs.to(device), cache=cache).logits
    nats = next_token_loss(logits, targets.to(device), "none")
    return nats.cpu().double(), targets != IGNORE


def _checked(model: Decoder, tokens: Sequence[int] | Tensor) -> Tensor:
    """The ids on the CPU, once the text and the model are known to be good for scoring."""
    config: ModelConfig = model.config
    if config.mask == "bidirectional":
        raise ValueError(
            "a model with model.mask=bidirectional sees the token it should predict: it cannot "
            "score text"
        )
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() before scoring")
    ids = torch.as_tensor(tokens, dtype=torch.int64, device="cpu")
    if len(ids) < 2:
        raise ValueError(
            f"a text of {len(ids)} tokens has nothing to score: each token is predicted from "
            "those before it"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        wrong = int(ids[(ids < 0) | (ids >= config.vocab_size)][0])
        raise ValueError(
            f"the text holds the id {wrong}, the model knows 0 to {config.vocab_size - 1}"
        )
    if len(ids) <= config.prefix:
        raise ValueError(
            f"the text has {len(ids)} tokens, all inside model.prefix={config.prefix}, which the "
            "model sees and does not predict"
        )
    return ids
