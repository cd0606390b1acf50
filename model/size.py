"""How big a model is and what it costs, worked out from its config alone.

Nothing is built, so a model that does not fit into memory can still be described. The tests hold
every number here against built models.
"""

from __future__ import annotations

from collections import Counter

from model.config import ModelConfig


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part of the model; every tensor once, so a tied output head counts 0.

    All of them are trained.
    """
    C, V = config.n_embd, config.vocab_size
    norm = C * (1 + (config.norm == "layernorm" and config.bias))
    return {
        "embed": V * C,
        "position_embed": config.context_length * C if config.position == "learned" else 0,
        "attention": config.n_layer * _attention_parameters(config),
        "mlp": config.n_layer * _mlp_parameters(config),
        "norms": (2 * config.n_layer + 1) * norm,
        "lm_head": 0 if config.tie_embeddings else V * C,
    }


def parameter_count(config: ModelConfig) -> int:
    """All parameters of the model, every tensor once."""
    return sum(parameter_counts(config).values())


def flops_per_token(config: ModelConfig, seq_len: int | None = None) -> float:
    """Floating-point operations of a forward pass, per token, at a sequence length.

    seq_len None means context_length. A multiplication and an addition count as two. Counted are
    the matrix products, the output head included (once, tied or not), and 4·D for every logit
    a head can see: half the square under a causal mask, less under windows. Left out, as usual:
    embedding look-ups, norms, activations and the softmax itself, together about a percent.
    """
    length = config.context_length if seq_len is None else seq_len
    windows = Counter(config.window_of(layer) for layer in range(config.n_layer))
    seen = sum(n * mean_visible_keys(config, window, length) for window, n in windows.items())
    attention = 4 * config.head_size * config.n_head * seen
    return 2 * _matrix_entries(config) + attention


def training_flops_per_token(config: ModelConfig, seq_len: int | None = None) -> float:
    """The same for a forward and a backward pass, which multiplies every matrix twice more."""
    return 3 * flops_per_token(config, seq_len)


def mean_visible_keys(config: ModelConfig, window: int | None, seq_len: int) -> float:
    """Keys that a query sees in a layer with this window, averaged over seq_len positions."""
    if config.mask == "bidirectional":
        return seq_len
    near = seq_len if window is None else window
    total = 0
    for position in range(seq_len):
        before = position + 1  # the token itself included
        if position < config.prefix:
            total += min(config.prefix, seq_len)
        else:
            total += min(before, near) + min(max(before - near, 0), config.window_sinks)
    return total / seq_len


def kv_cache_bytes(
    config: ModelConfig, *, batch_size: int, length: int, bytes_per_value: int
) -> int:
    """Memory of the keys and values of `length` tokens in every layer."""
    per_token = 2 * config.n_layer * config.kv_heads * config.head_size
    return per_token * batch_size * length * bytes_per_value


def _matrix_entries(config: ModelConfig) -> int:
    """Weights that every token is multiplied with, the output head included."""
    per_layer = sum(n_in * n_out for n_in, n_out in _attention_shapes(config) + _mlp_shapes(config))
    return config.n_layer * per_layer + config.n_embd * config.vocab_size


def _attention_parameters(config: ModelConfig) -> int:
    total = _linear_parameters(config, _attention_shapes(config))
    if config.qk_norm:
        total += 2 * config.head_size
    if config.sink_logit == "learned":
        total += config.n_head
    return total


def _mlp_parameters(config: ModelConfig) -> int:
    return _linear_parameters(config, _mlp_shapes(config))


def _linear_parameters(config: ModelConfig, shapes: list[tuple[int, int]]) -> int:
    return sum(n_in * n_out + (n_out if config.bias else 0) for n_in, n_out in shapes)


def _attention_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one attention layer."""
    C = config.n_embd
    query, key = config.n_head * config.head_size, config.kv_heads * config.head_size
    gate = [(C, query)] if config.output_gate else []
    return [(C, query), (C, key), (C, key), (query, C), *gate]


def _mlp_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one MLP."""
    C, hidden = config.n_embd, config.mlp_size
    gate = [(C, hidden)] if config.mlp == "swiglu" else []
    return [*gate, (C, hidden), (hidden, C)]
