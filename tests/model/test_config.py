"""The model description: what it refuses, what it derives, and how it travels."""

import json

import pytest
from omegaconf import OmegaConf

from model.config import CHOICES, ModelConfig
from tests.model.tiny import OPTIONS, tiny_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": -1}, r"model\.vocab_size=-1 must be at least 1"),
        ({"context_length": 0}, r"model\.context_length=0 must be at least 1"),
        ({"n_layer": 0}, r"model\.n_layer=0 must be at least 1"),
        ({"n_head": 0}, r"model\.n_head=0 must be at least 1"),
        ({"n_kv_head": 0}, r"model\.n_kv_head=0 must be at least 1"),
        ({"n_embd": -4}, r"model\.n_embd=-4 must be at least 1"),
        ({"head_dim": 0}, r"model\.head_dim=0 must be at least 1"),
        ({"mlp_dim": 0}, r"model\.mlp_dim=0 must be at least 1"),
        ({"norm_eps": 0.0}, r"model\.norm_eps=0\.0 must be above 0"),
        ({"init_std": 0.0}, r"model\.init_std=0\.0 must be above 0"),
        ({"rope_theta": 1.0}, r"model\.rope_theta=1\.0 must be above 1"),
        ({"n_kv_head": 3}, r"model\.n_head=4 must be a multiple of model\.n_kv_head=3"),
        ({"n_kv_head": 8}, r"model\.n_head=4 must be a multiple of model\.n_kv_head=8"),
        ({"n_embd": 30, "n_kv_head": None}, r"n_embd=30 must be a multiple of model\.n_head=4"),
        ({"head_dim": 7}, r"head size 7 must be even for model\.position=rope"),
        ({"n_embd": 33, "head_dim": 8, "position": "sinusoidal"}, r"n_embd=33 must be even"),
        ({"rope_scaling_factor": 2.0}, r"rope_scaling_factor=2\.0 has no effect"),
        ({"position": "alibi", "rope_scaling": "yarn"}, r"yarn needs model\.position=rope"),
        ({"rope_scaling": "linear", "rope_scaling_factor": 0.5}, r"factor=0\.5 must be at least 1"),
        ({"rope_scaling": "ntk", "head_dim": 2}, r"ntk needs a head size above 2"),
        ({"rope_scaling": "yarn", "rope_beta_slow": 40.0}, r"beta_slow=40\.0 must be .* below"),
        ({"dropout": 1.0}, r"model\.dropout=1\.0 must be in \[0, 1\)"),
        ({"dropout": -0.1}, r"model\.dropout=-0\.1 must be in \[0, 1\)"),
        ({"windows": [4, -1]}, r"model\.windows=\[4, -1\] holds -1"),
        ({"windows": [4], "mask": "bidirectional"}, r"model\.windows need a causal mask"),
        ({"window_sinks": 2}, r"window_sinks=2 has no effect without model\.windows"),
        ({"window_sinks": -1, "windows": [4]}, r"model\.window_sinks=-1 must be at least 0"),
        ({"softcap": -1.0}, r"model\.softcap=-1\.0 must be at least 0"),
        ({"mask": "prefix"}, r"model\.mask=prefix needs model\.prefix"),
        ({"mask": "prefix", "prefix": 32}, r"prefix=32 must be below model\.context_length=32"),
        ({"prefix": 3}, r"model\.prefix=3 needs model\.mask=prefix"),
        ({"position": "rop"}, r"'rop' is not one of rope, .*; did you mean 'rope'\?"),
        ({"norm": "rms_norm"}, r"did you mean 'rmsnorm'\?"),
        ({"mlp": "swiglue"}, r"did you mean 'swiglu'\?"),
        ({"sink_logit": "learnt"}, r"did you mean 'learned'\?"),
        ({"mask": "casual"}, r"did you mean 'causal'\?"),
        ({"rope_scaling": "yarm"}, r"did you mean 'yarn'\?"),
    ],
)
def test_impossible_values_fail_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        tiny_config(**changes)
    assert "\n" not in str(error.value)


def test_every_choice_is_accepted():
    needs = {
        "linear": {"rope_scaling_factor": 2.0},
        "prefix": {"prefix": 2},
    }
    for name, choices in CHOICES.items():
        for choice in choices:
            tiny_config(**{name: choice}, **needs.get(choice, {}))


def test_derived_sizes():
    config = ModelConfig(n_head=6, n_kv_head=2, n_embd=96, windows=[4, 0])
    assert (config.kv_heads, config.group, config.head_size) == (2, 3, 16)
    assert [config.window_of(layer) for layer in range(3)] == [4, None, 4]
    assert ModelConfig(windows=[]).window_of(5) is None
    assert ModelConfig(n_head=6, n_embd=96, head_dim=20).head_size == 20


@pytest.mark.parametrize(
    ("mlp", "n_embd", "size"),
    [("swiglu", 768, 2048), ("swiglu", 128, 384), ("gelu", 768, 3072), ("relu2", 128, 512)],
)
def test_usual_mlp_size(mlp, n_embd, size):
    assert ModelConfig(mlp=mlp, n_embd=n_embd).mlp_size == size
    assert ModelConfig(mlp=mlp, n_embd=n_embd, mlp_dim=7).mlp_size == 7


@pytest.mark.parametrize("option", OPTIONS)
def test_dictionaries_and_json_give_the_config_back(option):
    config = tiny_config(**OPTIONS[option])
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_field_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown field model\.n_heads; did you mean 'n_head'\?"):
        ModelConfig.from_dict({"n_heads": 4})


def merged(*overrides: str) -> ModelConfig:
    schema = OmegaConf.structured(ModelConfig)
    return OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.from_dotlist(list(overrides))))


def test_an_override_leaves_no_stale_size_behind():
    config = merged("n_head=8", "n_embd=256")
    assert (config.kv_heads, config.group, config.head_size) == (8, 1, 32)
    assert config.mlp_size == 704


def test_omegaconf_round_trip_keeps_every_field():
    config = merged("windows=[4,0]", "n_kv_head=2", "dropout=1e-1", "mlp=gelu", "softcap=30")
    assert config == ModelConfig(windows=[4, 0], n_kv_head=2, dropout=0.1, mlp="gelu", softcap=30.0)
    assert OmegaConf.to_object(OmegaConf.structured(config)) == config


def test_omegaconf_runs_the_checks_after_the_overrides():
    with pytest.raises(ValueError, match=r"must be a multiple of model\.n_kv_head=3"):
        merged("n_kv_head=3")
