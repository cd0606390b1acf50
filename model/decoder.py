"""The language model: tokens in, logits and a loss out.

Shapes: B sequences of T tokens, C = n_embd channels, V = vocab_size. What the attention layers
have to tell comes back as values, so nothing is recorded on the side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention import AttentionOutput, Stats
from model.attention import Shared
from model.blocks import Block
from model.config import ModelConfig
from model.kv_cache import KVCache, Observer
from model.norms import make_norm
from model.positions import (
    RotaryTable,
    document_positions,
    has_position_limit,
    position_embedding,
    rows,
)

IGNORE = -100  # a target with this id does not count
REDUCTIONS = ("mean", "sum", "none")


class ModelOutput(NamedTuple):
    """What one forward pass returns."""

    loss: Tensor | None  # scalar, or (B, T) with reduction="none"; None without targets
    logits: Tensor  # (B, T, V), or (B, 1, V) with only_last
    attention: tuple[AttentionOutput, ...] | None  # one per chosen layer; None without stats


class Decoder(nn.Module):
    """A decoder-only transformer as its config describes it.

    `backend` and `precision` say how attention runs (see `kernels.attention`), not what it means.
    Raises ValueError when the config has no vocabulary size yet.
    """

    def __init__(self, config: ModelConfig, *, backend: str = "auto", precision: str = "tf32x3"):
        super().__init__()
        if config.vocab_size == 0:
            raise ValueError("model.vocab_size=0: take it from the tokenizer before building")
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.position_embed = position_embedding(config)
        self.rope = RotaryTable(config) if config.position == "rope" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, layer, backend=backend, precision=precision)
            for layer in range(config.n_layer)
        )
        self.norm = make_norm(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw fresh weights, as GPT-2 does (Radford et al. 2019, section 2.3).

        Matrices are normal(0, init_std), gains of norms 1, biases and sink logits 0. The
        projections that write into the residual stream are smaller by sqrt(2 · n_layer), the
        square root of how many there are, so that the stream keeps its size whatever the depth.
        """
        std = self.config.init_std
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=std / (2 * self.config.n_layer) ** 0.5)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=std)
            elif name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            else:
                nn.init.zeros_(parameter)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        stats: Stats | None = None,
        layers: Sequence[int] | None = None,
        reduction: str = "mean",
        only_last: bool = False,
    ) -> ModelOutput:
        """Logits of the next token at every position, and with `targets` the loss in nats.

        tokens: (B, T) int64. targets: (B, T) int64; IGNORE and, with mask=prefix, tokens of the
        visible prefix do not count; when nothing counts the loss is 0. reduction: "mean" | "sum"
        over what counts, or "none" for (B, T). documents: (B, T) integer ids, equal ids
        contiguous: attention stays inside a document and positions restart with it, so packed
        documents give what each gives alone. cache: holds earlier keys and values; `tokens` go on
        where it ends. stats: statistics to return from the layers in `layers` (None: all).
        only_last: logits of the last position alone.

        Raises ValueError for sequences beyond context_length (where positions come from a table),
        for an unknown reduction or layer, and for combinations that have no meaning.
        """
        self.check_call(tokens, targets, documents, cache, reduction, only_last)
        chosen = self._chosen_layers(stats, layers)
        length = tokens.shape[1]
        positions = _positions(tokens, documents, cache)  # None means 0 .. T - 1

        x = self.embed(tokens)  # (B, T, C)
        if self.position_embed is not None:
            x = x + rows(self.position_embed.weight, positions, length).to(x.dtype)
        x = self.dropout(x)

        rotation = None if self.rope is None else self.rope.at(positions, length)
        shared = Shared(rotation, documents, cache, cache if isinstance(cache, Observer) else None)
        attention = []
        for layer, block in enumerate(self.blocks):
            x, result = block(x, shared, stats if layer in chosen else None)
            if layer in chosen:
                attention.append(result)

        logits = self.lm_head(self.norm(x[:, -1:] if only_last else x))  # (B, T or 1, V)
        loss = None
        if targets is not None:
            if self.config.mask == "prefix":
                targets = _without_prefix(targets, positions, self.config.prefix)
            loss = next_token_loss(logits, targets, reduction)
        return ModelOutput(loss, logits, None if stats is None else tuple(attention))

    def check_call(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        reduction: str = "mean",
        only_last: bool = False,
    ) -> None:
        """Raise ValueError as `forward` would for the same arguments."""
        config, length = self.config, tokens.shape[1]
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction={reduction!r} is not one of {', '.join(REDUCTIONS)}")
        if only_last and targets is not None:
            raise ValueError("only_last leaves out the logits that targets need; give one of them")
        end = length
        if cache is not None:
            self._check_cache(cache, length, documents)
            end = min(cache.length + length, cache.capacity)
        if end > config.context_length and has_position_limit(config):
            raise ValueError(
                f"a sequence of {end} tokens is longer than "
                f"model.context_length={config.context_length} (model.position={config.position})"
            )

    def _check_cache(self, cache: KVCache, length: int, documents: Tensor | None) -> None:
        config = self.config
        if documents is not None:
            raise ValueError("documents and a cache do not go together: cache one text at a time")
        if config.mask == "bidirectional":
            raise ValueError(
                "model.mask=bidirectional has no cache: a new token changes all earlier ones"
            )
        prefix_end = length if cache.length == 0 else cache.length
        if prefix_end < config.prefix:
            raise ValueError(
                f"the first call with a cache must hold the whole prefix: {prefix_end} tokens "
                f"given, model.prefix={config.prefix}"
            )

    def _chosen_layers(self, stats: Stats | None, layers: Sequence[int] | None) -> Sequence[int]:
        if stats is None:
            return ()
        if layers is None:
            return range(self.config.n_layer)
        for layer in layers:
            if not 0 <= layer < self.config.n_layer:
                raise ValueError(
                    f"layer {layer} is outside 0 .. {self.config.n_layer - 1} (model.n_layer)"
                )
        return layers


def next_token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats, computed in at least float32; 0 where no target counts.

    logits (B, T, V), targets (B, T) -> scalar, or (B, T) with reduction="none".
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    per_token = reduction == "none"
    loss = F.cross_entropy(
        wide,
        targets.flatten(),
        ignore_index=IGNORE,
        reduction="none" if per_token else "sum",
    )
    if per_token:
        return loss.view_as(targets)
    if reduction == "sum":
        return loss
    return loss / (targets != IGNORE).sum().clamp(min=1)


def counted_targets(
    config: ModelConfig, targets: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Targets (B, T) with IGNORE wherever the model's loss leaves them out.

    That is where they already are IGNORE and, with mask=prefix, inside the visible prefix of the
    sequence or of each document. Whoever divides a summed loss counts what is left.
    """
    if config.mask != "prefix":
        return targets
    positions = None if documents is None else document_positions(documents)
    return _without_prefix(targets, positions, config.prefix)


def _positions(tokens: Tensor, documents: Tensor | None, cache: KVCache | None) -> Tensor | None:
    if cache is not None:
        return cache.extend(tokens.shape[1])
    if documents is not None:
        return document_positions(documents)
    return None


def _without_prefix(targets: Tensor, positions: Tensor | None, prefix: int) -> Tensor:
    """Targets with IGNORE for tokens of the prefix, which the model has already seen."""
    if positions is None:
        positions = torch.arange(targets.shape[1], device=targets.device)
    return targets.masked_fill(positions + 1 < prefix, IGNORE)
