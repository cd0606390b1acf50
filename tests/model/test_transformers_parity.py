"""The decoder equals the models of Hugging Face transformers: logits, loss, gradients, tables.

The peers are tiny and randomly initialised from a config, so nothing is downloaded. Their weights
are copied into ours by a map of names; the gradients are read back through the same map.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.decoder import IGNORE, Decoder
from model.positions import RotaryTable
from tests.model.peers import llama_rotation
from tests.model.tiny import tiny_config

transformers = pytest.importorskip("transformers")

V, C, LAYERS, HEADS, D, MLP, CONTEXT = 23, 24, 3, 4, 6, 40, 16

# Fields of our config, and names shared by Llama and Qwen3 in theirs.
OURS: dict[str, Any] = {
    "vocab_size": V,
    "context_length": CONTEXT,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_embd": C,
    "mlp_dim": MLP,
    "norm_eps": 1e-6,
}
THEIRS: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": C,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

LLAMA_NAMES = {
    "model.embed_tokens": "embed",
    "model.norm": "norm",
    "model.layers": "blocks",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn": "attn",
}


def llama(**changes: Any) -> tuple[nn.Module, ModelConfig]:
    config = transformers.LlamaConfig(**THEIRS, head_dim=D, **changes)
    ours = ModelConfig(
        **OURS,
        n_kv_head=changes["num_key_value_heads"],
        tie_embeddings=changes["tie_word_embeddings"],
    )
    return transformers.LlamaForCausalLM(config), ours


def qwen3() -> tuple[nn.Module, ModelConfig]:
    config = transformers.Qwen3Config(
        **THEIRS, head_dim=10, num_key_value_heads=2, tie_word_embeddings=False
    )
    ours = ModelConfig(**OURS, n_kv_head=2, head_dim=10, qk_norm=True, tie_embeddings=False)
    return transformers.Qwen3ForCausalLM(config), ours


def gpt2() -> tuple[nn.Module, ModelConfig]:
    config = transformers.GPT2Config(
        vocab_size=V,
        n_positions=CONTEXT,
        n_embd=C,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=MLP,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
    )
    ours = ModelConfig(
        **(OURS | {"norm_eps": 1e-5}),
        position="learned",
        norm="layernorm",
        mlp="gelu_tanh",
        bias=True,
    )
    return transformers.GPT2LMHeadModel(config), ours


def from_llama(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under our names, from a Llama or Qwen3 model."""
    renamed = {}
    for name, tensor in tensors.items():
        for theirs, ours in LLAMA_NAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    return renamed


def from_gpt2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under our names, from a GPT-2 model.

    Its matrices are stored the other way round, queries, keys and values in one.
    """
    top = {"wte": "embed", "wpe": "position_embed", "ln_f": "norm"}
    inside = {
        "ln_1": "attn_norm",
        "ln_2": "mlp_norm",
        "attn.c_proj": "attn.o_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    }
    renamed = {}
    for name, tensor in tensors.items():
        parts = name.removeprefix("transformer.").split(".")
        if parts[0] != "h":
            renamed[".".join([top.get(parts[0], parts[0]), *parts[1:]])] = tensor
            continue
        block, module, kind = f"blocks.{parts[1]}", ".".join(parts[2:-1]), parts[-1]
        tensor = tensor.T if tensor.ndim == 2 else tensor
        if module == "attn.c_attn":
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"{block}.attn.{letter}_proj.{kind}"] = part
        else:
            renamed[f"{block}.{inside[module]}.{kind}"] = tensor
    return renamed


PEERS: dict[str, tuple[Callable[[], tuple[nn.Module, ModelConfig]], Callable]] = {
    "gpt2": (gpt2, from_gpt2),
    "llama": (lambda: llama(num_key_value_heads=4, tie_word_embeddings=False), from_llama),
    "llama_gqa": (lambda: llama(num_key_value_heads=2, tie_word_embeddings=False), from_llama),
    "llama_mqa_tied": (lambda: llama(num_key_value_heads=1, tie_word_embeddings=True), from_llama),
    "qwen3": (qwen3, from_llama),
}


def make_pair(name: str) -> tuple[nn.Module, Decoder, Callable]:
    """A peer with random weights, norms and biases included, and our model with the same ones."""
    torch.manual_seed(0)
    build, rename = PEERS[name]
    peer, config = build()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    ours = Decoder(config)
    weights = rename(dict(peer.named_parameters()))
    if config.tie_embeddings:
        weights["lm_head.weight"] = weights["embed.weight"]
    ours.load_state_dict(weights)
    return peer, ours, rename


@pytest.mark.parametrize("name", PEERS)
def test_logits_loss_and_gradients_equal_those_of_transformers(name):
    peer, ours, rename = make_pair(name)
    tokens = torch.randint(V, (3, 13))
    labels = tokens.clone()
    labels[0, 4:7] = IGNORE
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)

    expected = peer(tokens, labels=labels, use_cache=False)
    expected.loss.backward()
    output = ours(tokens, targets)
    output.loss.backward()

    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(output.logits, expected.logits, **close)
    torch.testing.assert_close(output.loss, expected.loss, **close)
    gradients = rename({key: weight.grad for key, weight in peer.named_parameters()})
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for key, weight in ours.named_parameters():
        if not key.endswith("k_proj.bias"):  # adds the same to a whole row of scores: no effect
            assert weight.grad.abs().max() > 1e-3, key
        torch.testing.assert_close(weight.grad, gradients[key], **close, msg=key)


@pytest.mark.parametrize(
    ("ours", "theirs", "length"),
    [
        ({}, {"rope_type": "default"}, 64),
        ({"rope_scaling": "linear"}, {"rope_type": "linear", "factor": 4.0}, 64),
        # Theirs follows the length of the text: at 4 times the context its factor is ours.
        ({"rope_scaling": "ntk"}, {"rope_type": "dynamic", "factor": 1.0}, 256),
        (
            {"rope_scaling": "yarn", "rope_original_context": 4096},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
            64,
        ),
        (
            {"rope_scaling": "yarn", "rope_beta_fast": 16.0, "rope_beta_slow": 2.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
            64,
        ),
    ],
    ids=["plain", "linear", "ntk", "yarn", "yarn_betas"],
)
def test_rotary_tables_equal_those_of_transformers(ours, theirs, length):
    context = 64 if theirs["rope_type"] == "dynamic" else 4096
    cos, sin = llama_rotation(context, 64, 5000.0, theirs, length=length)
    factor = 4.0 if ours else 1.0
    config = tiny_config(
        context_length=4096, head_dim=64, rope_theta=5000.0, rope_scaling_factor=factor, **ours
    )
    rotation = RotaryTable(config).at(None, length)
    # Theirs is a product of float32 numbers, so it loses a little with every position.
    torch.testing.assert_close(rotation.cos[:, 0], cos, atol=3e-5, rtol=0)
    torch.testing.assert_close(rotation.sin[:, 0], sin, atol=3e-5, rtol=0)
