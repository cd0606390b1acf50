"""Tiny models for tests, and a list of every option a model has."""

from typing import Any

import torch

from model.config import ModelConfig
from model.decoder import Decoder

TINY: dict[str, Any] = {
    "vocab_size": 17,
    "context_length": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 32,
    "init_std": 0.2,
}

# Every option alone, as a change of TINY.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi_head": {"n_kv_head": None},
    "multi_query": {"n_kv_head": 1},
    "head_dim": {"head_dim": 12},
    "linear": {"rope_scaling": "linear", "rope_scaling_factor": 2.0},
    "ntk": {"rope_scaling": "ntk", "rope_scaling_factor": 2.0},
    "yarn": {"rope_scaling": "yarn", "rope_scaling_factor": 2.0},
    "alibi": {"position": "alibi"},
    "learned": {"position": "learned"},
    "sinusoidal": {"position": "sinusoidal"},
    "no_positions": {"position": "none"},
    "layernorm": {"norm": "layernorm"},
    "gelu": {"mlp": "gelu"},
    "gelu_tanh": {"mlp": "gelu_tanh"},
    "relu2": {"mlp": "relu2"},
    "mlp_dim": {"mlp_dim": 40},
    "bias": {"bias": True},
    "layernorm_bias": {"norm": "layernorm", "bias": True},
    "untied": {"tie_embeddings": False},
    "dropout": {"dropout": 0.3},
    "qk_norm": {"qk_norm": True},
    "output_gate": {"output_gate": True},
    "windows": {"windows": [3, 0]},
    "window_sinks": {"windows": [3], "window_sinks": 2},
    "sink_zero": {"sink_logit": "zero"},
    "sink_learned": {"sink_logit": "learned"},
    "softcap": {"softcap": 5.0},
    "prefix": {"mask": "prefix", "prefix": 4},
    "bidirectional": {"mask": "bidirectional"},
    "all_at_once": {
        "head_dim": 12,
        "rope_scaling": "yarn",
        "rope_scaling_factor": 2.0,
        "norm": "layernorm",
        "bias": True,
        "tie_embeddings": False,
        "dropout": 0.1,
        "qk_norm": True,
        "output_gate": True,
        "windows": [3, 0, 5],
        "window_sinks": 1,
        "sink_logit": "learned",
        "softcap": 5.0,
        "mask": "prefix",
        "prefix": 4,
    },
    "all_with_alibi": {
        "position": "alibi",
        "mlp": "relu2",
        "bias": True,
        "qk_norm": True,
        "output_gate": True,
        "windows": [3],
        "window_sinks": 1,
        "sink_logit": "learned",
        "softcap": 5.0,
    },
}


def tiny_config(**changes: Any) -> ModelConfig:
    return ModelConfig(**(TINY | changes))


def tiny_model(
    *, backend: str = "auto", dtype: torch.dtype = torch.float32, **changes: Any
) -> Decoder:
    """A tiny decoder in eval mode with random weights, biases and sink logits included."""
    torch.manual_seed(0)
    model = Decoder(tiny_config(**changes), backend=backend).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype)


def tiny_tokens(batch: int, length: int, *, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TINY["vocab_size"], (batch, length), generator=generator)
