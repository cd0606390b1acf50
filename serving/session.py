"""A run made ready to generate from: what every way of using `sample.py` begins with."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.tokenizers import Tokenizer
from model.ahead_of_time import has_compiled
from model.caches import CacheOptions
from model.checkpoint import Checkpoint, is_checkpoint, resolve_run
from model.config import ModelConfig
from model.decoder import Decoder
from model.generate import Generator
from model.load import check_tokenizer, load_model, longer_context
from model.sampling import SamplingOptions
from serving.command_line import COMPILING_PAYS, SINKS
from serving.printing import say
from training.devices import probe_compiler, resolve_device, resolve_dtype

SMALL_MODEL = 20_000_000  # parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A model, its tokenizer, and where they came from."""

    model: Decoder
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    device: torch.device
    generators: dict[frozenset[tuple[str, Any]], Generator] = field(default_factory=dict)

    def generator(self, args: argparse.Namespace, **changes: Any) -> Generator:
        """Return the generator that the command line asks for, one for all equal wishes.

        What it has compiled then serves every text. Raises ValueError in one line for options
        that cannot work, or have no part in what was asked for.
        """
        if args.sinks != SINKS and args.cache == "full" and args.at_limit != "stream":
            raise ValueError(
                f"--sinks {args.sinks} has no meaning with --cache full, unless --at-limit stream"
            )
        options: dict[str, Any] = {
            "use_cache": not args.no_cache,
            "at_limit": args.at_limit,
            "cache": CacheOptions(kind=args.cache, sinks=args.sinks, budget=args.budget),
            "vocab_size": self.tokenizer.vocab_size,
            "compiled": compiles(args, self.device),
            "weights": args.weights,
        }
        options |= changes
        key = frozenset(options.items())
        if key not in self.generators:
            self.generators[key] = Generator(self.model, log=say, **options)
        return self.generators[key]


def open_run(args: argparse.Namespace) -> Session:
    """Load what `--run` and `--checkpoint` name; ValueError or OSError in one line if it fails."""
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    if is_checkpoint(Path(args.run)) and args.checkpoint is not None:
        raise ValueError(f"--run {args.run} names a checkpoint already: leave out --checkpoint")
    which = "best" if args.checkpoint is None else args.checkpoint
    model, checkpoint = load_model(
        args.run, which=which, device=device, dtype=dtype, change=config_change(args)
    )
    use_one_core_if_small(model)
    tokenizer = load_tokenizer(resolve_run(args.run), checkpoint)
    return Session(model=model, tokenizer=tokenizer, checkpoint=checkpoint, device=device)


def config_change(args: argparse.Namespace) -> Callable[[ModelConfig], ModelConfig] | None:
    """What the command line changes about the model it loads, if anything."""
    if args.rope_scaling is None:
        return None
    return partial(longer_context, scaling=args.rope_scaling, factor=args.rope_factor)


def load_tokenizer(run: Path, checkpoint: Checkpoint) -> Tokenizer:
    """Load the run's tokenizer; refuse another one than the model was trained with."""
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    check_tokenizer(checkpoint, tokenizer.sha256)
    return tokenizer


def use_one_core_if_small(model: Decoder) -> None:
    """Compute a small model on one core, unless OMP_NUM_THREADS says otherwise.

    One token is too little work to share out, and cores that wait for each other on a busy
    machine make it far slower.
    """
    is_small = sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL
    if is_small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def compiles(args: argparse.Namespace, device: torch.device) -> bool:
    """Whether to compile; ValueError in one line where it is asked for and does not work."""
    if args.compile == "false":
        return False
    takes_steps = args.beams is None and args.draft is None and args.lookup is None
    can = takes_steps and args.cache == "full" and not args.no_cache
    if args.compile == "auto" and (not can or args.max_new_tokens < COMPILING_PAYS):
        return False
    # To ask the compiler takes seconds: it has worked here before, and is still there.
    if device.type == "cpu" and has_compiled() and shutil.which(os.environ.get("CXX", "g++")):
        return True
    problem = probe_compiler(device)
    if problem is None:
        return True
    if args.compile == "true":
        raise ValueError(f"--compile true, but compiling fails here: {problem}")
    say(f"compiling fails here ({problem}): generating without")
    return False


def sampling_options(args: argparse.Namespace) -> SamplingOptions:
    """How tokens are drawn; ValueError in one line for values out of range."""
    return SamplingOptions(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        typical_p=args.typical_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=dict(args.logit_bias) or None,
    )
