"""Sizes worked out from a config equal those of the model that is built from it."""

from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from kernels.attention import AttentionSpec
from kernels.visibility import make_layout
from model.config import ModelConfig
from model.decoder import Decoder
from model.kv_cache import FullCache
from model.size import (
    flops_per_token,
    kv_cache_bytes,
    mean_visible_keys,
    parameter_count,
    parameter_counts,
    training_flops_per_token,
)
from tests.model.tiny import OPTIONS, tiny_config, tiny_tokens

FOLDER = Path(__file__).parents[2] / "configs" / "model"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def preset(name: str, vocab_size: int) -> ModelConfig:
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return ModelConfig.from_dict({"vocab_size": vocab_size} | values)


def assert_equal_to_built(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Decoder(config)
    counts = parameter_counts(config)
    built = dict.fromkeys(counts, 0)
    for name, parameter in model.named_parameters():  # a tied matrix appears once
        assert parameter.requires_grad
        built[part_of(name)] += parameter.numel()
    assert counts == built
    assert parameter_count(config) == sum(built.values())


def part_of(name: str) -> str:
    if ".attn." in name:
        return "attention"
    if ".mlp." in name:
        return "mlp"
    if "norm" in name:
        return "norms"
    return name.split(".")[0]


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_every_preset(name):
    assert_equal_to_built(preset(name, vocab_size=65))


@pytest.mark.parametrize("option", OPTIONS)
def test_parameters_of_every_option(option):
    assert_equal_to_built(tiny_config(**OPTIONS[option]))


@pytest.mark.parametrize(
    ("name", "vocab_size", "parameters"),
    [
        ("nanogpt_char_cpu", 65, 804_096),  # nanoGPT's own count, position embeddings included
        ("nanogpt_char", 65, 10_745_088),
        ("gpt2", 50257, 124_439_808),
        ("nano", 65, 730_624),
        ("small", 16_384, 31_991_296),
        ("base", 32_768, 125_856_512),
    ],
)
def test_presets_have_the_size_they_say(name, vocab_size, parameters):
    assert parameter_count(preset(name, vocab_size)) == parameters


def test_presets_set_fields_of_a_model_and_nothing_else():
    assert {"nanogpt_char_cpu", "nanogpt_char", "gpt2", "nano", "small", "base"} <= set(PRESETS)
    for name in PRESETS:
        text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        assert text.startswith("# ")
        ModelConfig.from_dict(yaml.safe_load(text))


def counted_flops(config: ModelConfig, batch: int, length: int, *, backward: bool) -> int:
    """What PyTorch counts for a step of the built model, which computes the whole square."""
    model = Decoder(config, backend="eager")
    tokens = tiny_tokens(batch, length)
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens, tokens).loss
        if backward:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("option", ["plain", "head_dim", "gelu", "untied", "output_gate"])
def test_flops_equal_those_counted_while_the_model_runs(option):
    config = tiny_config(mask="bidirectional", **OPTIONS[option])  # every key visible
    assert flops_per_token(config, 10) * 30 == counted_flops(config, 3, 10, backward=False)
    assert training_flops_per_token(config, 10) * 30 == counted_flops(config, 3, 10, backward=True)


def test_flops_count_visible_logits_only():
    config = tiny_config()
    per_key = 4 * config.n_layer * config.n_head * config.head_size
    causal, both_ways = (
        flops_per_token(config, 32),
        flops_per_token(tiny_config(mask="bidirectional")),
    )
    assert both_ways - causal == per_key * (32 - 33 / 2)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("prefix", [0, 4])
def test_visible_keys_equal_the_mask(window, sinks, prefix):
    changes = {"mask": "prefix", "prefix": prefix} if prefix else {}
    config = tiny_config(windows=[3], window_sinks=sinks, **changes)
    spec = AttentionSpec(window=window, sinks=sinks, prefix=prefix)
    layout = make_layout(spec, 20, 20, None, torch.device("cpu"))
    mask = layout.visible(slice(None), torch.arange(20))
    assert mean_visible_keys(config, window, 20) == mask.sum().item() / 20


def test_cache_bytes_equal_those_of_a_cache():
    config = tiny_config()
    cache = FullCache(config, batch=3, capacity=11, dtype=torch.bfloat16)
    assert kv_cache_bytes(config, batch_size=3, length=11, bytes_per_value=2) == cache.nbytes
