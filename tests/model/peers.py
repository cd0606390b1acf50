"""Models of Hugging Face transformers that ours are compared with; absent, their tests skip."""

from typing import Any

import pytest
import torch
from torch import Tensor


def llama_rotation(
    context: int, head_dim: int, theta: float, scaling: dict[str, Any], *, length: int
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines (length, head_dim) of a Llama trained at `context`, scaled so."""
    # Names of the settings before were others.
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    peer = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=2 * head_dim,
            num_attention_heads=2,
            head_dim=head_dim,
            max_position_embeddings=context,
            rope_parameters={"rope_theta": theta, **scaling},
        )
    )
    cos, sin = peer(torch.zeros(1), torch.arange(length)[None])
    sign = torch.ones(head_dim)
    sign[: head_dim // 2] = -1  # ours carries the sign of the rotation, theirs is applied later
    return cos[0], sin[0] * sign
