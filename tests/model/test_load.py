"""From a run's name to its model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from model.checkpoint import CheckpointError, load_checkpoint, mark_best, save_checkpoint
from model.config import ModelConfig
from model.decoder import Decoder
from model.generate import Generator
from model.load import load_model, longer_context
from model.positions import RotaryTable
from model.sampling import SamplingOptions
from model.scoring import score_windows
from tests.model.peers import llama_rotation

CONFIG = ModelConfig(vocab_size=13, context_length=8, n_layer=1, n_head=2, n_embd=8)
TOKENS = torch.arange(8)[None]


def save(run: Path, step: int, config: ModelConfig = CONFIG, **changes) -> Decoder:
    """Save a model whose weights follow from the step."""
    torch.manual_seed(step)
    model = Decoder(config).eval()
    weights = {**model.state_dict(), **changes}
    save_checkpoint(run, step, {"model": weights}, {"model_config": config.to_dict()})
    return model


def logits(model: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, tie_embeddings=False, position="learned", bias=True, norm="layernorm"),
        replace(CONFIG, n_kv_head=1, sink_logit="learned", qk_norm=True, output_gate=True),
    ],
)
def test_a_model_comes_back_with_the_same_logits(tmp_path: Path, config: ModelConfig) -> None:
    model = save(tmp_path, 3, config)
    loaded, checkpoint = load_model(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.config == config
    assert checkpoint.step == 3
    assert not loaded.training
    if config.tie_embeddings:
        assert loaded.lm_head.weight is loaded.embed.weight


def test_the_checkpoint_is_chosen_by_name_step_or_path(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert load_model(tmp_path)[1].step == 3  # none is marked as best
    mark_best(tmp_path, 2)
    assert load_model(tmp_path)[1].step == 2
    assert load_model(tmp_path, which="last")[1].step == 3
    assert load_model(tmp_path, which=1)[1].step == 1
    assert load_model(tmp_path / "checkpoints" / "step-00000001")[1].step == 1
    (tmp_path / "latest").write_text(str(tmp_path))
    assert load_model(tmp_path / "latest", which="last")[1].step == 3


def test_only_the_weights_are_read(tmp_path: Path) -> None:
    model = Decoder(CONFIG)
    groups = {"model": model.state_dict(), "optimizer": {"m": torch.ones(3)}}
    path = save_checkpoint(tmp_path, 1, groups, {"model_config": CONFIG.to_dict()})
    (path / "optimizer.safetensors").unlink()
    assert load_model(tmp_path)[1].tensors.keys() == {"model"}


def test_a_type_can_be_chosen(tmp_path: Path) -> None:
    save(tmp_path, 1)
    model, _ = load_model(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_names_from_a_wrapped_model_are_accepted_and_said_once(tmp_path: Path, prefix: str) -> None:
    torch.manual_seed(0)
    model = Decoder(CONFIG).eval()
    wrapped = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    save_checkpoint(tmp_path, 1, {"model": wrapped}, {"model_config": CONFIG.to_dict()})
    said: list[str] = []
    loaded, _ = load_model(tmp_path, log=said.append)
    assert torch.equal(logits(loaded), logits(model))
    assert len(said) == 1
    assert "wrapped" in said[0]


def test_last_falls_back_and_says_why_on_standard_error(tmp_path: Path, capsys) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    file = tmp_path / "checkpoints" / "step-00000002" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert load_model(tmp_path, which="last")[1].step == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "step-00000002/model.safetensors is damaged" in err
    with pytest.raises(CheckpointError, match="is damaged"):
        load_model(tmp_path, which=2)


def test_names_and_shapes_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    save(tmp_path, 1, **{"norm.weight": torch.ones(9), "extra": torch.ones(1)})
    with pytest.raises(
        CheckpointError,
        match=r"it has unknown extra; it has norm.weight of shape \(9,\) instead of \(8,\)$",
    ):
        load_model(tmp_path)
    model = Decoder(CONFIG).state_dict()
    del model["norm.weight"]
    save_checkpoint(tmp_path, 2, {"model": model}, {"model_config": CONFIG.to_dict()})
    with pytest.raises(CheckpointError, match=r"it lacks norm.weight$"):
        load_model(tmp_path)


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint; .* holds nothing$"):
        load_model(tmp_path)
    save(tmp_path, 10)
    save(tmp_path, 20)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 15; it has steps 10, 20$"):
        load_model(tmp_path, which=15)
    with pytest.raises(ValueError, match="'newest' is not best, last or a step"):
        load_model(tmp_path, which="newest")
    with pytest.raises(FileNotFoundError, match=r"no run at .*nowhere"):
        load_model(tmp_path / "nowhere")


def test_a_checkpoint_without_a_model_says_what_it_lacks(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"model": {}}, {})
    with pytest.raises(CheckpointError, match="has no model_config"):
        load_model(tmp_path)
    save_checkpoint(tmp_path, 2, {"weights": {}}, {})
    with pytest.raises(CheckpointError, match="has no model: it holds only weights"):
        load_model(tmp_path / "checkpoints" / "step-00000002")


def test_every_checkpoint_damaged_is_one_line(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"every checkpoint of .* is damaged"):
        load_model(tmp_path, log=lambda line: None)


def test_a_loaded_checkpoint_keeps_both_names_of_a_tied_matrix(tmp_path: Path) -> None:
    save(tmp_path, 1)
    tensors = load_checkpoint(tmp_path / "checkpoints" / "step-00000001").tensors["model"]
    assert tensors["lm_head.weight"] is tensors["embed.weight"]


# A longer context than trained with

TRAINED = replace(CONFIG, n_embd=32, context_length=16, init_std=0.3, rope_theta=500.0)
Loader = Callable[[str, float], Decoder]


@pytest.fixture
def stretched(tmp_path: Path) -> Loader:
    save(tmp_path, 1, TRAINED)

    def load(scaling: str, factor: float) -> Decoder:
        change = partial(longer_context, scaling=scaling, factor=factor)
        return load_model(tmp_path, change=change)[0]

    return load


@pytest.mark.parametrize(
    ("scaling", "theirs"),
    [
        ("none", {"rope_type": "default"}),
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        # Theirs follows the length of the text: at 4 times the context its factor is ours.
        ("ntk", {"rope_type": "dynamic", "factor": 1.0}),
        ("yarn", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    ],
)
def test_a_stretched_model_has_the_tables_of_transformers(
    stretched: Loader, scaling: str, theirs: dict
) -> None:
    model = stretched(scaling, 4.0)
    assert model.config.context_length == 64
    assert isinstance(model.rope, RotaryTable)
    cos, sin = llama_rotation(16, 16, 500.0, theirs, length=64)
    rotation = model.rope.at(None, 64)
    torch.testing.assert_close(rotation.cos[:, 0], cos, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotation.sin[:, 0], sin, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scaling", ["none", "linear", "ntk", "yarn"])
def test_a_stretched_model_generates_and_scores_past_the_trained_length(
    stretched: Loader, scaling: str
) -> None:
    model = stretched(scaling, 2.5)
    texts = [
        Generator(model, use_cache=use_cache)
        .generate([3, 1, 4], max_new_tokens=100, options=SamplingOptions(temperature=0))
        .run()
        for use_cache in (True, False)
    ]
    assert texts[0].tokens == texts[1].tokens
    assert [len(text.tokens[0]) for text in texts] == [38, 38]  # 40 positions and the last token
    ids = torch.tensor([3, 1, 4, *texts[0].tokens[0]])
    (losses,) = score_windows(model, ids, stride=40)
    with torch.no_grad():
        logits = model(ids[None, :-1]).logits[0].log_softmax(-1)
    expected = -logits.gather(1, ids[1:, None])[:, 0].double()
    torch.testing.assert_close(losses.nats, expected, atol=1e-5, rtol=0)


def test_yarn_stretches_from_the_trained_context_whatever_the_rounding(stretched: Loader) -> None:
    config = stretched("yarn", 1.3).config
    assert (config.context_length, config.rope_original_context) == (21, 16)
    assert config.yarn_original_context == 16


@pytest.mark.parametrize(
    ("config", "scaling", "factor", "message"),
    [
        (TRAINED, "cubic", 2.0, "rope_scaling='cubic' is not one of none, linear, ntk, yarn"),
        (TRAINED, "ntk", 0.5, "rope_factor=0.5 must be from 1 to 1000"),
        (TRAINED, "ntk", 1e9, "rope_factor=1000000000.0 must be from 1 to 1000"),
        (TRAINED, "ntk", float("nan"), "rope_factor=nan must be from 1 to 1000"),
        (
            replace(TRAINED, position="alibi"),
            "linear",
            2.0,
            "rope_scaling=linear needs a model with model.position=rope, this one has "
            "model.position=alibi",
        ),
        (
            replace(TRAINED, rope_scaling="linear", rope_scaling_factor=2.0),
            "yarn",
            2.0,
            "rope_scaling=yarn: this model was trained with model.rope_scaling=linear already, "
            "and scalings do not add up",
        ),
        (
            replace(TRAINED, head_dim=2),
            "ntk",
            2.0,
            "model.rope_scaling=ntk needs a head size above 2",
        ),
    ],
)
def test_what_cannot_be_stretched_is_one_line(
    tmp_path: Path, config: ModelConfig, scaling: str, factor: float, message: str
) -> None:
    save(tmp_path, 1, config)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load_model(tmp_path, change=partial(longer_context, scaling=scaling, factor=factor))
    assert str(error.value) == message
