"""The recipes in configs/experiment: all compose, and those to compare keep the same limits."""

from __future__ import annotations

from importlib.resources import files

import pytest
from hydra import compose, initialize_config_module

from analysis.event_files import read_events
from analysis.head_files import read_records, stack
from data.back_copy import LENGTH, N_TRAIN
from model.size import parameter_count
from train import train
from training.config import Config, to_config

EXPERIMENTS = sorted(
    path.name.removesuffix(".yaml") for path in files("configs").joinpath("experiment").iterdir()
)
NANOGPT_PARAMETERS = 804_096  # of its character model for a CPU, every tensor once
CHARACTERS = 65  # of tiny_shakespeare


def composed(*overrides: str) -> Config:
    with initialize_config_module("configs", version_base="1.3"):
        return to_config(compose("train", list(overrides)))


def parameters(config: Config) -> int:
    config.model.vocab_size = CHARACTERS
    return parameter_count(config.model)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_can_be_composed_and_bears_its_name(name):
    assert composed(f"experiment={name}").name == name


def test_the_nanogpt_experiment_is_nanogpts_own_recipe():
    config = composed("experiment=nanogpt_char_cpu")
    assert parameters(config) == NANOGPT_PARAMETERS
    model, optim = config.model, config.optim
    shape = (model.n_layer, model.n_head, model.kv_heads, model.n_embd, model.context_length)
    assert shape == (4, 4, 4, 128, 64)
    assert (model.position, model.norm, model.mlp) == ("learned", "layernorm", "gelu")
    assert (model.bias, model.tie_embeddings, model.dropout) == (False, True, 0.0)
    assert (optim.kind, optim.lr, optim.lr * optim.min_lr_ratio) == ("adamw", 1e-3, 1e-4)
    assert (optim.beta1, optim.beta2, optim.weight_decay) == (0.9, 0.99, 0.1)
    assert (optim.schedule, optim.warmup_steps, optim.grad_clip) == ("cosine", 100, 1.0)
    assert (config.train.max_steps, config.train.batch_size) == (2000, 12)


@pytest.mark.parametrize("name", ["nano_char_cpu", "speedrun_cpu"])
def test_our_own_shapes_keep_the_limits_of_the_comparison(name):
    ours, theirs = composed(f"experiment={name}"), composed("experiment=nanogpt_char_cpu")
    assert parameters(ours) <= NANOGPT_PARAMETERS
    assert (ours.data, ours.tokenizer) == (theirs.data, theirs.tokenizer)
    assert ours.model.context_length == theirs.model.context_length
    assert ours.train.eval_windows is theirs.train.eval_windows is None  # the whole split
    tokens = [c.train.max_steps * c.train.batch_size for c in (ours, theirs)]
    assert tokens[0] <= tokens[1]


def test_sink_formation_is_one_head_on_windows_of_bos_and_one_sequence():
    config = composed("experiment=sink_formation")
    model = config.model
    shape = (model.n_layer, model.n_head, model.kv_heads, model.n_embd, model.context_length)
    assert shape == (1, 1, 1, 64, LENGTH)
    assert (config.data.mode, config.tokenizer.kind) == ("bos_aligned", "identity")
    seen = config.train.max_steps * config.train.batch_size
    assert seen <= N_TRAIN  # no sequence comes twice


@pytest.mark.slow
def test_a_sink_forms_and_is_reported(tmp_path):
    """The first 700 of 1,500 steps; a head that looks everywhere has alpha_0 = 0.074."""
    config = composed(
        "experiment=sink_formation",
        "seed=1",
        f"runs_dir={tmp_path}",
        f"data.cache_dir={tmp_path}",
        "tracker=none",
        "telemetry.report=false",
        "optim.decay_steps=1500",
        "train.max_steps=700",
        "train.samples=0",
    )
    train(config, [])
    (run,) = (path.parent for path in tmp_path.glob("*/config.yaml"))
    sinks = [event for event in read_events(run) if event.kind == "sink_formed"]
    assert {(event.layer, event.head) for event in sinks} == {(0, 0)}
    steps, alpha = stack(read_records(run, "probe"), "alpha_0")
    assert alpha[0] == pytest.approx(0.074, abs=0.005)
    assert alpha[steps == sinks[0].step] > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_nanogpt_experiment_starts_as_it_should(tmp_path, seed):
    """The first 300 of its 2,000 steps: 2.42 and 2.43 were measured on tinyshakespeare."""
    config = composed(
        "experiment=nanogpt_char_cpu",
        f"seed={seed}",
        f"runs_dir={tmp_path}",
        "tracker=none",
        "optim.decay_steps=2000",
        "train.max_steps=300",
        "train.eval_every=300",
        "train.samples=0",
    )
    assert 2.35 < train(config, []) < 2.49
