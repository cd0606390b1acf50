"""The root configuration: what it refuses, and in which words."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf

import train  # noqa: F401  (registers the schema)
from tests.training.runs import settings
from training.config import (
    Config,
    UserError,
    check_command_line,
    check_config,
    explain,
    from_dict,
    to_config,
    to_dict,
)
from training.telemetry import TelemetryConfig


def composed(*overrides: str) -> Config:
    with initialize_config_module("configs", version_base="1.3"):
        config = to_config(compose("train", list(overrides)))
    check_config(config)
    return config


def message(*overrides: str) -> str:
    """The one line that a user sees for these overrides."""
    with pytest.raises((UserError, HydraException)) as caught:
        composed(*overrides)
    text = explain(caught.value)
    assert "\n" not in text
    return text


def test_the_default_run_is_the_experiment_of_its_name():
    assert composed() == composed("experiment=shakespeare_char")


def test_overrides_reach_every_group():
    config = composed("experiment=nanogpt_char_cpu", "train.max_steps=200", "model.n_layer=2")
    assert (config.train.max_steps, config.model.n_layer) == (200, 2)
    assert config.model.position == "learned"
    assert composed("optim.lr=1e-4").optim.lr == 1e-4  # not text
    assert composed("model.n_head=8").model.kv_heads == 2
    assert composed("model.n_head=8", "model.n_kv_head=null").model.kv_heads == 8


def test_telemetry_is_a_group_whose_default_is_what_its_code_says():
    assert composed().telemetry == TelemetryConfig()
    assert not composed("telemetry=none").telemetry.enabled
    assert composed("telemetry.layers=[2,0]").telemetry.layers == [0, 2]
    expected = "telemetry.layers=[4]: layer 4 is outside 0 .. 3 (model.n_layer=4)"
    assert message("telemetry.layers=[4]") == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.n_heads=3", "model.n_heads is not a setting (did you mean 'model.n_head'?)"),
        ("+model.n_heads=3", "model.n_heads is not a setting (did you mean 'model.n_head'?)"),
        ("++trian.max_steps=3", "trian.max_steps is not a setting (did you mean 'train.max_steps'"),
        ("+max_steps=3", "max_steps is not a setting (did you mean 'train.max_steps'?)"),
        ("model=nanno", "model=nanno does not exist: choose from"),
        ("experiment=shakespear_char", "(did you mean 'shakespeare_char'?)"),
        ("train.max_steps=many", "train.max_steps=many is not of type integer"),
        ("train.max_steps=null", "train.max_steps=null is not allowed"),
        ("optim.kind=adam", "optim.kind=adam is not one of adamw, muon, sgd (did you mean 'adamw'"),
        ("data.mode=steam", "data.mode=steam"),
        ("attention.backend=flash", "attention.backend=flash is not one of"),
        ("compile=maybe", "compile=maybe is not one of auto, true, false"),
        ("train.batch_size=0", "train.batch_size=0 must be at least 1"),
        ("train.patience=0", "train.patience=0 must be at least 1"),
        ("train.peak_tflops=0", "train.peak_tflops=0.0 must be above 0"),
        ("model.n_head=3", "model.n_head=3 must be a multiple of model.n_kv_head=2"),
        ("optim.lr=-1", "optim.lr=-1.0 must be above 0"),
        ("model.mask=bidirectional", "model.mask=bidirectional lets every token see its own"),
        ("optim.warmup_steps=100000", "optim.warmup_steps=100000 must be at most"),
        ("name=a/b", "name='a/b' becomes a folder name"),
        ("expriment=x", "expriment is not a setting (did you mean 'experiment'?)"),
        ("model.windows=4", "model.windows=4: "),
        ("seed=-1", "seed=-1 must be at least 0"),
        ("optim.lr=inf", "optim.lr=inf must be above 0 and finite"),
        ("foo", "(write key=value, and quote special characters"),
        ("tracker.notes=It's", "(write key=value, and quote special characters"),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_name(override, expected):
    assert expected in message(override)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("train.batch_size=7", "train.micro_batch_size=2"),
            "train.batch_size=7 does not divide over 1 rank(s) into micro-batches",
        ),
        (
            ("model.mask=prefix", "model.prefix=128", "model.context_length=128"),
            "model.prefix=128",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(overrides, expected):
    assert expected in message(*overrides)


def test_a_typo_in_a_file_names_the_nearest_setting():
    store = ConfigStore.instance()
    store.store(group="experiment", name="typo", package="_global_", node={"model": {"n_heads": 3}})
    assert message("experiment=typo") == (
        "model.n_heads is not a setting (did you mean 'model.n_head'?)"
    )


def test_a_typo_in_a_run_folders_file_is_named_too(tmp_path):
    plain = settings(tmp_path, optim__warm_up_steps=3)
    with pytest.raises(UserError, match=r"optim.warm_up_steps is not .*'optim.warmup_steps'"):
        from_dict(plain)


def test_plain_values_round_trip_through_yaml(tmp_path):
    config = from_dict(settings(tmp_path, model__windows=[4, 0], tracker__tags=["a, b", "c"]))
    text = OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))
    assert from_dict(OmegaConf.to_container(OmegaConf.create(text))) == config


def test_the_batch_must_divide_over_the_ranks(tmp_path):
    config = from_dict(settings(tmp_path, train__micro_batch_size=2))
    check_config(config, world=2)
    with pytest.raises(UserError, match=r"batch_size=4 does not divide over 3 rank.* 6"):
        check_config(config, world=3)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--max-steps=3", "written train.max_steps=3, without dashes"),
        ("--lr", "written optim.lr=value, without dashes"),
        ("model=3", "model=3 does not exist: the choices are files in configs/model/"),
        ("experiment=1e3", "the choices are files in configs/experiment/"),
    ],
)
def test_command_lines_of_other_programs_are_corrected(argument, expected):
    with pytest.raises(UserError, match=expected):
        check_command_line([argument], ["job"])


def test_hydras_own_flags_pass():
    arguments = ["--help", "-m", "--cfg", "job", "train.max_steps=3", "hydra.job.num=1"]
    check_command_line(arguments, ["job"])


@pytest.mark.parametrize("argument", ["hydra.jbo.name=x", "+hydra.foo=1"])
def test_settings_of_hydra_are_checked_too(argument):
    with pytest.raises(UserError, match="is not a setting of Hydra"):
        check_command_line([argument], ["job", "sweep"])


@pytest.mark.parametrize(
    ("given", "kept"), [("true", "true"), ("False", "false"), ("auto", "auto")]
)
def test_compile_takes_yamls_words(given, kept):
    assert composed(f"compile={given}").compile == kept
