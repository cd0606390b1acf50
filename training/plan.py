"""What a run is going to do, in words: the dry run's page and the first lines of every log."""

from __future__ import annotations

import torch

from kernels.attention import pick_backend
from model.decoder import Decoder
from model.size import (
    flops_per_token,
    kv_cache_bytes,
    parameter_count,
    training_flops_per_token,
)
from training.config import Config
from training.devices import device_name
from training.optim import Optimizers, build_optimizers
from training.schedule import describe_schedule


def describe_plan(config: Config, *, dtype: torch.dtype, world: int) -> str:
    """Return the dry run's page: shapes, parameters, memory, schedule, and what would be written.

    Args:
        config: with ``model.vocab_size`` filled in.
        dtype: the type it would compute in.
        world: how many ranks there are.
    """
    with torch.device("meta"):
        model = Decoder(config.model)
    train, context = config.train, config.model.context_length
    micro = train.micro_batch_size or train.batch_size // world
    micro_steps = train.batch_size // world // micro
    optimizers = build_optimizers(model, config.optim)
    shapes = [f"{name:<40} {tuple(p.shape)}" for name, p in model.named_parameters()]
    validation = "all" if train.eval_windows is None else f"{train.eval_windows}"
    sections = [
        "parameters\n" + _indent("\n".join(shapes)),
        "optimizer\n" + _indent(optimizers.describe()),
        f"one step: {train.batch_size} sequences of {context} tokens, as {world} rank(s) x "
        f"{micro_steps} micro-step(s) x {micro}",
        describe_memory(config, optimizers, micro, dtype),
        describe_schedule(config.optim, train.max_steps),
        f"every {train.eval_every} steps: evaluate on {validation} validation windows\n"
        f"every {train.checkpoint_every} steps, and at each new best: a checkpoint (the best and "
        f"the last {train.keep_last_n} are kept)\n"
        f"would write {config.runs_dir}/<time>-{config.name}/: config.yaml, tokenizer.json, "
        "metrics.jsonl, log.txt, checkpoints/, plots/",
        "dry run: the text is prepared, nothing was trained and no run folder was made",
    ]
    return "\n\n".join(sections)


def describe_start(config: Config, *, device: torch.device, dtype: torch.dtype, world: int) -> str:
    """Return the lines that say what is about to be trained, and how."""
    model, train = config.model, config.train
    tokens_per_step = train.batch_size * model.context_length
    backend = pick_backend(device, config.attention.backend)
    name = str(dtype).removeprefix("torch.")
    return (
        f"{config.name}: {parameter_count(model):,} parameters, "
        f"{flops_per_token(model):,.0f} FLOPs per token forward and "
        f"{training_flops_per_token(model):,.0f} in training\n"
        f"{train.max_steps:,} steps of {tokens_per_step:,} tokens = "
        f"{train.max_steps * tokens_per_step:,} tokens; seed {config.seed}\n"
        f"device {device_name(device)}, {name}, {world} rank(s); attention {backend}"
    )


def describe_memory(
    config: Config, optimizers: Optimizers, micro_batch: int, dtype: torch.dtype
) -> str:
    """Return an estimate of the training memory of one rank, by cause.

    Weights, gradients and optimizer state are exact. Activations are what the backward pass keeps,
    estimated from the shapes without recomputation, logits included.
    """
    model = config.model
    parameters = parameter_count(model)
    tokens = micro_batch * model.context_length
    width = torch.finfo(dtype).bits // 8
    heads = (2 * model.n_head + 2 * model.kv_heads) * model.head_size
    mlp = (3 if model.mlp == "swiglu" else 2) * model.mlp_size
    per_layer = 6 * model.n_embd + heads + mlp
    activations = tokens * width * (model.n_layer * per_layer + 2 * model.n_embd)
    logits = tokens * model.vocab_size * (width + 2 * 4)
    parts = {
        "weights": parameters * 4,
        "gradients": parameters * 4,
        "optimizer state": optimizers.state_values() * 4,
        "activations (estimate)": activations,
        "logits (estimate)": logits,
    }
    lines = [f"  {name:<24} {_size(n)}" for name, n in parts.items()]
    cache = kv_cache_bytes(model, batch_size=1, length=model.context_length, bytes_per_value=width)
    return "\n".join(
        [
            f"memory per rank, about {_size(sum(parts.values()))}",
            *lines,
            f"and when sampling, the key/value cache of a full context: {_size(cache)}",
        ]
    )


def _size(n_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:,.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:,.1f} TiB"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
