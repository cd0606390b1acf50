"""Look inside a forward pass: what every attention layer was given, did and passed on.

    from analysis.inside import inside
    from model.load import load_model

    model, _ = load_model("runs/latest")
    output, views = inside(model, tokens)  # tokens: (B, T) int64
    views[2].q  # queries of layer 2 as they enter the dot product, (B, H, T, D)
    views[2].result.entropy_tokens  # how widely its heads look, (B, H, T)

Any model works, in any mode, on any device, and gradients flow if they are switched on. Nothing
is left behind in the model.

B sequences of T tokens, H query heads, Hkv key/value heads, D channels per head, C = n_embd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from kernels.attention import AttentionOutput, AttentionSpec, Stats
from model.attention import Attention
from model.blocks import Block
from model.decoder import Decoder, ModelOutput

STATS = Stats(
    lse=True,
    entropy_tokens=True,
    max_logit=True,
    max_prob=True,
    null_mass=True,
    mean_distance=True,
    sink_mass=(1, 4),
)


class LayerView(NamedTuple):
    """What one layer saw and did; types are those of the forward pass.

    layer: its number.
    q: (B, H, T, D), k and v: (B, Hkv, T, D), as they enter the attention function: after biases,
        QK-norm and rotation. Query head h reads key/value head h // (H // Hkv).
    spec: who sees whom, and how a logit is made from a query and a key.
    result: the attention function's output with its statistics, lse always among them.
    heads: (B, H, T, D), what each head hands to the output projection: gated, if there is a gate.
    stream_in, stream_out: (B, T, C), the residual stream before and after the block.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    result: AttentionOutput
    heads: Tensor
    stream_in: Tensor
    stream_out: Tensor


def inside(
    model: Decoder,
    tokens: Tensor,
    documents: Tensor | None = None,
    stats: Stats = STATS,
    layers: Sequence[int] | None = None,
) -> tuple[ModelOutput, list[LayerView]]:
    """Run `model` once, uncompiled, and return its output and a view of each chosen layer.

    Args:
        model: the decoder itself, not a data-parallel wrapper.
        tokens: (B, T) int64 on the model's device.
        documents: (B, T) ids of packed documents, or None.
        stats: the statistics wanted of each layer; lse comes with them.
        layers: numbers of the layers, in the order of the views; None for all.

    Raises:
        ValueError: for a layer the model does not have, or what its forward pass refuses.
    """
    chosen = range(model.config.n_layer) if layers is None else layers
    found: dict[int, dict[str, Any]] = {layer: {} for layer in chosen}
    handles = []
    try:
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            if layer in found:
                parts = found[layer]
                handles += [
                    block.register_forward_hook(partial(_keep_stream, parts)),
                    block.attn.register_forward_hook(partial(_keep_attention, parts)),
                    block.attn.o_proj.register_forward_pre_hook(partial(_keep_heads, parts)),
                ]
        # Not `model(...)`, which may be compiled: its graph would not call the hooks.
        output = model.forward(
            tokens, documents=documents, stats=replace(stats, lse=True), layers=chosen
        )
    finally:
        for handle in handles:
            handle.remove()
    return output, [LayerView(layer=layer, **found[layer]) for layer in chosen]


def _keep_stream(parts: dict[str, Any], block: nn.Module, inputs: Any, outputs: Any) -> None:
    parts["stream_in"], parts["stream_out"] = inputs[0], outputs[0]


def _keep_attention(parts: dict[str, Any], attn: Attention, inputs: Any, outputs: Any) -> None:
    x, shared = inputs[:2]
    parts["q"], parts["k"], parts["v"] = attn.queries_keys_values(x, shared.rotation)
    parts["spec"] = attn.spec(shared.documents)
    parts["result"] = outputs[1]
    parts["heads"] = parts["heads"].unflatten(2, (attn.config.n_head, -1)).transpose(1, 2)


def _keep_heads(parts: dict[str, Any], o_proj: nn.Module, inputs: Any) -> None:
    parts["heads"] = inputs[0]  # (B, T, H * D)
