"""RMSNorm and LayerNorm: bring every token's vector to unit size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size) in x's type."""
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # Under autocast the activations are narrower than the weights: normalise in the wider type.
        wide = x.to(self.weight.dtype)
        return F.rms_norm(wide, self.weight.shape, self.weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / std · weight + bias over the last axis, the bias being optional."""

    def __init__(self, size: int, eps: float, bias: bool):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size) in x's type."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm of the residual stream that a config asks for."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, config.norm_eps)
    return LayerNorm(config.n_embd, config.norm_eps, config.bias)
