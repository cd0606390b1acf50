"""The attention layer: projections and positions around the function in `kernels`.

What a head computes is decided by two products of its weights, not by the weights themselves:
W_Q W_Kᵀ says which keys a query prefers and W_V W_O what is written when it looks there.
`Attention.qk_circuit` and `Attention.ov_circuit` give them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from kernels.attention import AttentionOutput, AttentionSpec, Stats, attention, column_mass
from model.config import ModelConfig
from model.norms import RMSNorm
from model.positions import FixedTable, Rotation, alibi_slopes, rotate_pair, rotation_matrix

if TYPE_CHECKING:
    from model.kv_cache import KVCache, Observer


class Shared(NamedTuple):
    """What all layers have in common in one forward pass."""

    rotation: Rotation | None = None
    documents: Tensor | None = None  # (B, T) integer ids
    cache: KVCache | None = None
    observer: Observer | None = None  # the cache, if it wants to know what its keys received


class Attention(nn.Module):
    """Grouped-query self-attention: query head h reads key/value head h // group."""

    def __init__(self, config: ModelConfig, layer: int, *, backend: str, precision: str):
        super().__init__()
        self.config = config
        self.layer = layer
        self.backend = backend
        self.precision = precision
        C, D = config.n_embd, config.head_size
        query_width, kv_width = config.n_head * D, config.kv_heads * D
        self.q_proj = nn.Linear(C, query_width, bias=config.bias)
        self.k_proj = nn.Linear(C, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(C, kv_width, bias=config.bias)
        self.o_proj = nn.Linear(query_width, C, bias=config.bias)
        self.gate_proj = nn.Linear(C, query_width, bias=config.bias) if config.output_gate else None
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.alibi = None
        if config.position == "alibi":
            self.alibi = FixedTable(partial(alibi_slopes, config.n_head))
        self.sink_logit = None
        if config.sink_logit == "learned":
            self.sink_logit = nn.Parameter(torch.zeros(config.n_head))

    def forward(
        self, x: Tensor, shared: Shared, stats: Stats | None = None
    ) -> tuple[Tensor, AttentionOutput]:
        """(B, T, C) -> the layer's output (B, T, C), and what the attention function returned."""
        q, k, v = self.queries_keys_values(x, shared.rotation)
        lengths = None
        if shared.cache is not None:
            k, v = shared.cache.append(self.layer, k, v)  # (B, Hkv, S, D)
            lengths = shared.cache.lengths
        if shared.observer is not None:
            stats = replace(stats or Stats(), lse=True)
        spec = self.spec(shared.documents)
        result = attention(
            q,
            k,
            v,
            spec,
            kv_lengths=lengths,
            stats=stats,
            precision=self.precision,
            backend=self.backend,
        )
        if shared.observer is not None:
            assert result.lse is not None
            received = column_mass(q, k, result.lse, spec, kv_lengths=lengths, backend=self.backend)
            shared.observer.observe(self.layer, received)
        heads = result.out.transpose(1, 2).flatten(2)  # (B, T, H * D)
        if self.gate_proj is not None:
            # One gate per head and channel, from the layer's input, before the output projection:
            # Qiu et al. 2025, "Gated Attention for Large Language Models" (arXiv:2505.06708).
            heads = heads * torch.sigmoid(self.gate_proj(x))
        return self.o_proj(heads), result

    def queries_keys_values(
        self, x: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What enters the attention function for inputs x (B, T, C), after QK-norm and rotation.

        q (B, H, T, D), k and v (B, Hkv, T, D).
        """
        B, T, _ = x.shape
        D = self.config.head_size
        q = self.q_proj(x).view(B, T, -1, D)  # (B, T, H, D)
        k = self.k_proj(x).view(B, T, -1, D)  # (B, T, Hkv, D)
        v = self.v_proj(x).view(B, T, -1, D)  # (B, T, Hkv, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate_pair(q, k, rotation, self.backend)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def spec(self, documents: Tensor | None = None) -> AttentionSpec:
        """What attention means in this layer, over packed documents (B, T) if there are any."""
        config = self.config
        return AttentionSpec(
            causal=config.mask != "bidirectional",
            window=config.window_of(self.layer),
            sinks=config.window_sinks if config.window_of(self.layer) else 0,
            prefix=config.prefix,
            documents=documents,
            alibi_slopes=None if self.alibi is None else self.alibi.weight,
            softcap=config.softcap or None,
            sink_logit=self._sink_logits(),
        )

    def _sink_logits(self) -> Tensor | None:
        if self.sink_logit is not None:
            return self.sink_logit.float()
        if self.config.sink_logit == "zero":
            return torch.zeros(self.config.n_head, device=self.q_proj.weight.device)
        return None

    # --- the weights of one head, as the matrices of y = x W with row vectors x ---------------

    def query_weight(self, head: int) -> Tensor:
        """W_Q of a query head, (C, D); with QK-norm its gains are folded in."""
        weight = self._rows(self.q_proj, self._checked(head)).T
        return weight if self.q_norm is None else weight * self.q_norm.weight

    def key_weight(self, head: int) -> Tensor:
        """W_K of the key head that query head `head` reads, (C, D); QK-norm's gains folded in."""
        weight = self._rows(self.k_proj, self._checked(head) // self.config.group).T
        return weight if self.k_norm is None else weight * self.k_norm.weight

    def value_weight(self, head: int) -> Tensor:
        """W_V of the value head that query head `head` reads, (C, D)."""
        return self._rows(self.v_proj, self._checked(head) // self.config.group).T

    def output_weight(self, head: int) -> Tensor:
        """W_O of a head, (D, C): its share of the output projection."""
        D = self.config.head_size
        start = self._checked(head) * D
        return self.o_proj.weight[:, start : start + D].T

    def qk_circuit(self, head: int, offset: int = 0) -> Tensor:
        """c W_Q R(offset) W_Kᵀ, (C, C) of rank at most D: the bilinear form behind a score.

        For inputs x_i, x_j of this layer (after the block's norm) score_ij = x_i W x_jᵀ, where
        offset = j - i matters with RoPE only. Left out: biases, ALiBi, the soft-cap, and with
        QK-norm the length of each query and key. (Elhage et al. 2021, "A Mathematical Framework
        for Transformer Circuits".)
        """
        query, key = self.query_weight(head), self.key_weight(head)
        if self.config.position == "rope":
            query = query @ rotation_matrix(self.config, offset).to(query)
        return self.config.head_size**-0.5 * query @ key.T

    def ov_circuit(self, head: int) -> Tensor:
        """W_V W_O, (C, C) of rank at most D: what a head writes, x W, for an input it looks at.

        Left out: biases and the output gate, which depends on the reading token.
        """
        return self.value_weight(head) @ self.output_weight(head)

    def _rows(self, projection: nn.Linear, head: int) -> Tensor:
        D = self.config.head_size
        return projection.weight[head * D : (head + 1) * D]

    def _checked(self, head: int) -> int:
        if not 0 <= head < self.config.n_head:
            raise ValueError(f"head {head} is outside 0 .. {self.config.n_head - 1} (model.n_head)")
        return head
