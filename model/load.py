"""From the name of a run to its model: what `--run runs/latest` and `init_from=...` stand for.

`model/checkpoint.py` reads and writes the folders; here a name typed by a person becomes one of
them, and its weights become a `Decoder`. Every way this can fail is one line that says what
there is instead.
"""

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint import (
    Checkpoint,
    CheckpointError,
    best_checkpoint,
    describe_folder,
    is_checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_valid,
    resolve_run,
    step_of,
)
from model.config import ROPE_SCALINGS, ModelConfig
from model.decoder import Decoder

MAX_STRETCH = 1000  # times the trained context: the table of rotations has a row per position


def load_model(
    name: str | Path,
    *,
    which: str | int = "best",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    change: Callable[[ModelConfig], ModelConfig] | None = None,
    log: Callable[[str], None] = lambda message: print(message, file=sys.stderr),
) -> tuple[Decoder, Checkpoint]:
    """Load the model of a run, ready for inference, and the checkpoint it came from.

    `name` is anything `resolve_run` understands; a checkpoint folder means exactly that one,
    otherwise `which` chooses: "best" (the newest where none is marked), "last" or a step.
    `dtype` None keeps float32. `change` makes the config to build from the one stored, for what
    weights leave open (see `longer_context`). Raises FileNotFoundError or ValueError in one line.
    """
    checkpoint = _choose(Path(name), which, log)
    if "model_config" not in checkpoint.state:
        raise CheckpointError(f"the state of {checkpoint.path} has no model_config")
    config = ModelConfig.from_dict(checkpoint.state["model_config"])
    model = Decoder(config if change is None else change(config), backend=backend)
    weights = _without_wrapper_prefixes(checkpoint.tensors["model"], log)
    _check_names_and_shapes(checkpoint.path, weights, model.state_dict())
    model.load_state_dict(weights)
    return model.to(device=device, dtype=dtype).eval(), checkpoint


def longer_context(config: ModelConfig, scaling: str, factor: float) -> ModelConfig:
    """The config of a RoPE model for `factor` times the context it was trained with.

    RoPE has no weights, so those of the trained model fit. `scaling` is "linear", "ntk" or "yarn"
    (see `model.positions.rope_frequencies`), or "none": more positions, rotated as in training,
    which shows what a scaling is for.

    Raises:
        ValueError: in one line, for another position scheme, a model trained with a scaling, an
            unknown scaling or a factor outside 1 .. MAX_STRETCH.
    """
    if scaling not in ROPE_SCALINGS:
        raise ValueError(f"rope_scaling={scaling!r} is not one of {', '.join(ROPE_SCALINGS)}")
    if config.position != "rope":
        raise ValueError(
            f"rope_scaling={scaling} needs a model with model.position=rope, "
            f"this one has model.position={config.position}"
        )
    if config.rope_scaling != "none":
        raise ValueError(
            f"rope_scaling={scaling}: this model was trained with "
            f"model.rope_scaling={config.rope_scaling} already, and scalings do not add up"
        )
    if not (math.isfinite(factor) and 1 <= factor <= MAX_STRETCH):
        raise ValueError(f"rope_factor={factor} must be from 1 to {MAX_STRETCH}")
    longer = replace(config, context_length=round(factor * config.context_length))
    if scaling == "none":
        return longer
    return replace(
        longer,
        rope_scaling=scaling,
        rope_scaling_factor=factor,
        rope_original_context=config.context_length if scaling == "yarn" else None,
    )


def check_tokenizer(checkpoint: Checkpoint, sha256: str) -> None:
    """Refuse a tokenizer that is not the one a checkpoint was trained with.

    Raises:
        CheckpointError: in one line, with the beginning of both hashes.
    """
    trained_with = checkpoint.state.get("tokenizer_sha256")
    if trained_with is None:
        raise CheckpointError(f"the state of {checkpoint.path} has no tokenizer_sha256")
    if trained_with != sha256:
        raise CheckpointError(
            f"{checkpoint.path} was trained with another tokenizer: its sha256 begins with "
            f"{trained_with[:12]}, that of the tokenizer at hand with {sha256[:12]}"
        )


def _choose(name: Path, which: str | int, log: Callable[[str], None]) -> Checkpoint:
    """Load the model's part of the checkpoint asked for."""
    if isinstance(which, str) and which not in ("best", "last"):
        raise ValueError(f"checkpoint {which!r} is not best, last or a step")
    if is_checkpoint(name):
        return load_checkpoint(name, groups=["model"])
    run = resolve_run(name)
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise FileNotFoundError(f"{run} holds no checkpoint; {describe_folder(run)}")
    best = best_checkpoint(run)
    if which == "best" and best is not None:
        return load_checkpoint(best, groups=["model"])
    if which in ("best", "last"):
        newest = newest_valid(run, log, groups=["model"])
        if newest is None:
            raise CheckpointError(f"every checkpoint of {run} is damaged")
        return newest
    for path in checkpoints:
        if step_of(path) == which:
            return load_checkpoint(path, groups=["model"])
    steps = ", ".join(str(step_of(path)) for path in checkpoints)
    raise FileNotFoundError(f"{run} has no checkpoint of step {which}; it has steps {steps}")


def _without_wrapper_prefixes(
    weights: dict[str, Tensor], log: Callable[[str], None]
) -> dict[str, Tensor]:
    """Accept weights saved from inside a compile or data-parallel wrapper."""
    plain = {re.sub(r"^((_orig_mod|module)\.)+", "", name): weights[name] for name in weights}
    if plain.keys() != weights.keys():
        log("the checkpoint was saved from a wrapped model; its name prefixes are left out")
    return plain


def _check_names_and_shapes(
    path: Path, weights: Mapping[str, Tensor], model: Mapping[str, Tensor]
) -> None:
    missing, unknown = model.keys() - weights.keys(), weights.keys() - model.keys()
    faults = []
    if missing:
        faults.append(f"lacks {', '.join(sorted(missing))}")
    if unknown:
        faults.append(f"has unknown {', '.join(sorted(unknown))}")
    for name in sorted(weights.keys() & model.keys()):
        stored, needed = tuple(weights[name].shape), tuple(model[name].shape)
        if stored != needed:
            faults.append(f"has {name} of shape {stored} instead of {needed}")
    if faults:
        raise CheckpointError(f"{path} does not fit its model_config: it {'; it '.join(faults)}")
