"""One layer of the decoder: attention and an MLP, each reading from and adding to the stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention import AttentionOutput, Stats
from model.attention import Attention, Shared
from model.config import ModelConfig
from model.norms import make_norm


def relu2(x: Tensor) -> Tensor:
    """The square of ReLU (So et al. 2021, "Primer", arXiv:2109.08668)."""
    return x * F.relu(x)  # faster than squaring: the gradient of a power is slow on CPUs


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # GPT-2's
    "relu2": relu2,
}


class MLP(nn.Module):
    """down(activation(up(x))) for every token on its own."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.mlp]
        self.up_proj = nn.Linear(config.n_embd, config.mlp_size, bias=config.bias)
        self.down_proj = nn.Linear(config.mlp_size, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.down_proj(self.activation(self.up_proj(x)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) for every token on its own (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.mlp_size, bias=config.bias)
        self.up_proj = nn.Linear(config.n_embd, config.mlp_size, bias=config.bias)
        self.down_proj = nn.Linear(config.mlp_size, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def make_mlp(config: ModelConfig) -> nn.Module:
    """The MLP that a config asks for."""
    return SwiGLU(config) if config.mlp == "swiglu" else MLP(config)


class Block(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, *, backend: str, precision: str):
        super().__init__()
        self.attn_norm = make_norm(config)
        self.attn = Attention(config, layer, backend=backend, precision=precision)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, shared: Shared, stats: Stats | None = None
    ) -> tuple[Tensor, AttentionOutput]:
        """(B, T, C) -> (B, T, C), and what the attention function returned."""
        branch, result = self.attn(self.attn_norm(x), shared, stats)
        x = x + self.dropout(branch)
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x, result
