"""How a token knows where it stands: RoPE, ALiBi, learned and sinusoidal positions.

Everything here works on positions 0 .. context_length - 1. The attention function knows nothing
of it: rotated queries and keys, or ALiBi's slopes, are all it gets to see.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.visibility import document_starts
from model.config import ModelConfig


class FixedTable(nn.Module):
    """A constant float32 table that follows its module to a device, but never to another type.

    Angles rounded to bfloat16 are wrong by whole turns far from the start, so a cast of the model
    must not reach them. The table is not part of the state dict: it follows from the config.
    """

    weight: Tensor

    def __init__(self, build: Callable[[], Tensor]):
        super().__init__()
        self.build = build
        self.register_buffer("weight", build().to(torch.get_default_device()), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FixedTable:
        device = fn(self.weight).device
        self.weight = self.build().to(device)  # built again: also fills a table left on "meta"
        return self


def rows(table: Tensor, positions: Tensor | None, length: int) -> Tensor:
    """Rows of a table (L, ...) for a batch of sequences.

    positions None means 0 .. length - 1 and gives a view (length, ...); positions (B, T) give
    (B, T, ...).
    """
    return table[:length] if positions is None else table[positions]


def document_positions(documents: Tensor) -> Tensor:
    """Position of every token inside its own document: (B, T) ids -> (B, T) int64.

    Equal ids are contiguous; counting starts at 0 with each document.
    """
    index = torch.arange(documents.shape[1], device=documents.device)
    return index - document_starts(documents)


# --- RoPE: rotate pairs of channels by an angle proportional to the position -----------------


class Rotation(NamedTuple):
    """Cosines and sines of some positions, (T, 1, D) or (B, T, 1, D): one for all heads.

    `sin` carries the sign of the rotation: minus on the first half of the channels.
    """

    cos: Tensor
    sin: Tensor


class RotaryTable(FixedTable):
    """Rotations of the first 2 · context_length positions, computed in float64, rounded once.

    A text has context_length positions. The rest are for a cache whose window moves on: only the
    distances in it matter, and they stay below context_length (`model/streaming_cache.py`).
    """

    def __init__(self, config: ModelConfig):
        super().__init__(partial(rotary_table, config, 2 * config.context_length))

    def at(self, positions: Tensor | None, length: int) -> Rotation:
        """The rotations of `positions` (B, T), or of 0 .. length - 1 where None."""
        cos, sin = rows(self.weight, positions, length).unsqueeze(-2).unbind(-3)
        return Rotation(cos, sin)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn queries or keys (B, T, H, D), or any (..., D) with a rotation that fits.

    Channel d is paired with channel d + D/2 (the convention of Llama in Hugging Face
    transformers). Computed in at least float32, returned in x's type.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * rotation.cos + swapped * rotation.sin).to(x.dtype)


def rotate_pair(q: Tensor, k: Tensor, rotation: Rotation, backend: str) -> tuple[Tensor, Tensor]:
    """Turn queries (B, T, H, D) and keys (B, T, Hkv, D) together, by the attention backend's means.

    Triton has a kernel for it; everywhere else, and in meaning, it is `rotate` of each.
    """
    if backend == "triton":
        from kernels.triton_rope import rotate_queries_and_keys

        return rotate_queries_and_keys(q, k, *rotation)
    return rotate(q, rotation), rotate(k, rotation)


def rotary_table(config: ModelConfig, length: int) -> Tensor:
    """Cosines and signed sines of positions 0 .. length - 1: (length, 2, D) float32 on the CPU."""
    _, attention_factor = rope_frequencies(config)
    return (_turns(config, length) * attention_factor).float()


def shift_table(config: ModelConfig, length: int) -> Tensor:
    """What turns a rotated key on by 0 .. length - 1 positions: (length, 2, D) float32 on the CPU.

    Pure rotations: YaRN's attention factor is in the key already.
    """
    return _turns(config, length).float()


def _turns(config: ModelConfig, length: int) -> Tensor:
    """Cosines and signed sines of positions 0 .. length - 1: (length, 2, D) float64 on the CPU."""
    frequencies, _ = rope_frequencies(config)
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, frequencies)  # (length, D/2)
    cos = angles.cos().repeat(1, 2)
    sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)
    return torch.stack([cos, sin], dim=1)


def rotation_matrix(config: ModelConfig, offset: int) -> Tensor:
    """R(offset), (D, D) float64 on the CPU, for row vectors.

    A query q at position i and a key k at position j, once rotated, have the inner product
    q R(j - i) kᵀ; with YaRN the matrix holds the square of its attention factor.
    """
    frequencies, attention_factor = rope_frequencies(config)
    angles = frequencies * offset
    cos, sin = torch.diag(angles.cos()), torch.diag(angles.sin())
    upper = torch.cat([cos, -sin], dim=1)
    lower = torch.cat([sin, cos], dim=1)
    return torch.cat([upper, lower]) * attention_factor**2


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per token of every channel pair, (D/2,) float64, and YaRN's attention factor.

    RoPE: Su et al. 2021 (arXiv:2104.09864), section 3.2.2. Scalings for a context `factor` times
    as long: "linear" squeezes positions (Chen et al. 2023, arXiv:2306.15595); "ntk" raises theta
    so that the slowest pair is squeezed and the fastest is not (bloc97's "NTK-aware" scaling, here
    at a fixed factor: one that followed the length would leave cached keys wrong); "yarn" chooses
    pair by pair (Peng et al. 2023, arXiv:2309.00071).
    """
    D, factor = config.head_size, config.rope_scaling_factor
    theta = config.rope_theta
    if config.rope_scaling == "ntk":
        theta *= factor ** (D / (D - 2))
    exponents = torch.arange(0, D, 2, dtype=torch.float64, device="cpu") / D
    frequencies = theta**-exponents
    if config.rope_scaling == "linear":
        frequencies = frequencies / factor
    if config.rope_scaling == "yarn":
        stretch = _yarn_stretch(config)
        frequencies = frequencies * (1 - stretch) + frequencies / factor * stretch
        return frequencies, 0.1 * math.log(factor) + 1  # equation 22
    return frequencies, 1.0


def _yarn_stretch(config: ModelConfig) -> Tensor:
    """How far each channel pair is stretched, 0 (not) to 1 (fully): section 3.2.

    The ramp runs over pair numbers between the pairs that turn beta_fast and beta_slow times over
    the original context, whole numbers taken outwards.
    """
    D, context = config.head_size, config.yarn_original_context

    def pair_turning(turns: float) -> float:
        return D * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first = max(math.floor(pair_turning(config.rope_beta_fast)), 0)
    last = min(math.ceil(pair_turning(config.rope_beta_slow)), D - 1)
    pairs = torch.arange(D // 2, dtype=torch.float64, device="cpu")
    return ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)


# --- ALiBi, sinusoidal ----------------------------------------------------------------------


def alibi_slopes(n_head: int) -> Tensor:
    """Slope of every head: its scores fall by the slope per token of distance. (H,) float32.

    Press et al. 2021 (arXiv:2108.12409): the powers 2^(-8/n), 2^(-16/n), ... for n a power of
    two. For other head counts, those of the next lower power of two, then every second slope of
    twice that number.
    """
    power = 2 ** int(math.log2(n_head))
    slopes = _power_slopes(power) + _power_slopes(2 * power)[0::2][: n_head - power]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


def _power_slopes(n: int) -> list[float]:
    return [2.0 ** (-8 * (head + 1) / n) for head in range(n)]


def sinusoidal_table(length: int, width: int) -> Tensor:
    """Fixed position vectors, (length, width) float32 on the CPU.

    Vaswani et al. 2017 (arXiv:1706.03762), section 3.5: channels 2i and 2i + 1 are the sine and
    cosine of position / 10000^(2i / width).
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, 10000.0**-exponents)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()


def position_embedding(config: ModelConfig) -> nn.Embedding | FixedTable | None:
    """What is added to the token embeddings: a module with `weight` (context_length, n_embd)."""
    if config.position == "learned":
        return nn.Embedding(config.context_length, config.n_embd)
    if config.position == "sinusoidal":
        return FixedTable(partial(sinusoidal_table, config.context_length, config.n_embd))
    return None


def has_position_limit(config: ModelConfig) -> bool:
    """Whether positions end at context_length because they are looked up in a table."""
    return config.position in ("rope", "learned", "sinusoidal")
