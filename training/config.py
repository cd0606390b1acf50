"""The root of the configuration: every value a run depends on, checked before any work starts.

Each part's dataclass sits beside the code that uses it; this file joins them, checks what no
single part can see, and turns configuration mistakes into one line that names the nearest
valid spelling.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.sources import DataConfig
from data.tokenizers import TokenizerConfig
from kernels.attention import BACKENDS
from kernels.spec import PRECISIONS
from model.config import ModelConfig
from training.choices import check_choice, check_range, nearest
from training.devices import COMPILE_MODES
from training.optim import OptimConfig
from training.telemetry import TelemetryConfig
from training.tracking import TrackerConfig


class UserError(ValueError):
    """Something a user can set right; the message is one line for them, and no traceback helps."""


P = ParamSpec("P")
R = TypeVar("R")


def setting_up(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function as set-up: its ValueErrors and OSErrors are the user's to mend.

    The checks of all parts raise those before work starts, each with a one-line message. Once
    training runs, the same classes are bugs and keep their traceback.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (ValueError, OSError) as error:
            raise UserError(" ".join(str(error).split())) from error

    return wrapped


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    """How attention is computed; what it means belongs to the model."""

    backend: str = "auto"
    precision: str = "tf32x3"

    def __post_init__(self) -> None:
        """Raise on a name that is not a backend or a precision."""
        check_choice("attention.backend", self.backend, BACKENDS)
        check_choice("attention.precision", self.precision, PRECISIONS)


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The loop: how long, how much per step, and how often to look, save and stop.

    A step is an optimizer step. `batch_size` counts the sequences of one step over all ranks and
    micro-steps, so it fixes the arithmetic of a run; `micro_batch_size` (sequences per rank in one
    forward pass, None for as many as there are) only decides how it fits into memory.
    """

    max_steps: int = 1000
    batch_size: int = 32
    micro_batch_size: int | None = None
    log_every: int = 10
    eval_every: int = 250
    eval_windows: int | None = None  # None: the whole validation split
    eval_batch_size: int | None = None  # None: the micro-batch size
    checkpoint_every: int = 250
    keep_last_n: int = 2
    patience: int | None = None  # evaluations without a new best before stopping early
    max_skipped_steps: int = 0  # consecutive non-finite steps to skip before stopping
    samples: int = 3
    sample_tokens: int = 300
    peak_tflops: float | None = None  # per device, for MFU where the device is not in our table

    def __post_init__(self) -> None:
        """Raise on a count that is out of range."""
        for name in ("max_steps", "batch_size", "log_every", "eval_every", "checkpoint_every"):
            check_range(f"train.{name}", getattr(self, name), 1)
        for name in ("micro_batch_size", "eval_windows", "eval_batch_size", "patience"):
            if getattr(self, name) is not None:
                check_range(f"train.{name}", getattr(self, name), 1)
        check_range("train.keep_last_n", self.keep_last_n, 1)
        for name in ("max_skipped_steps", "samples", "sample_tokens"):
            check_range(f"train.{name}", getattr(self, name), 0)
        if self.peak_tflops is not None:
            check_range("train.peak_tflops", self.peak_tflops, 0, open_low=True)


@dataclass(kw_only=True, slots=True)
class Config:
    """Everything a run depends on."""

    name: str = "shakespeare_char"
    seed: int = 1337
    device: str = "auto"
    dtype: str = "auto"
    compile: str = "auto"
    deterministic: bool = False
    resume: str | None = None
    init_from: str | None = None
    dry_run: bool = False
    runs_dir: str = "runs"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        """Raise on a name that is none of its choices, or that cannot be a folder's."""
        self.compile = self.compile.lower()  # an unquoted true arrives as "True"
        check_choice("compile", self.compile, COMPILE_MODES)
        check_range("seed", self.seed, 0, 2**32 - 1)
        if not re.fullmatch(r"[A-Za-z0-9._=,+-]+", self.name):
            raise UserError(
                f"name={self.name!r} becomes a folder name: use letters, digits and . _ = , + -"
            )


# ---------------------------------------------------------------------------------------------
# From Hydra's composition to a checked Config
# ---------------------------------------------------------------------------------------------


@setting_up
def to_config(composed: DictConfig) -> Config:
    """Turn what Hydra composed into a `Config`, each value checked alone.

    Raises:
        UserError: on an unknown key (``+key=value`` is how Hydra lets one through) or a value
            that a part of the configuration refuses.
    """
    return from_dict(as_plain(composed))


def as_plain(settings: Any) -> dict[str, Any]:
    """Return an OmegaConf object as plain dicts, lists and scalars, interpolations resolved."""
    plain = OmegaConf.to_container(settings, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@setting_up
def from_dict(plain: dict[str, Any]) -> Config:
    """Build a `Config` from plain values, like those of a run folder, each checked alone."""
    unknown = next(_unknown_keys(plain, Config), None)
    if unknown is not None:
        raise UserError(unknown_key_message(unknown))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(plain))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    assert isinstance(config, Config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values (what ``config.yaml`` and the tracker hold)."""
    return dataclasses.asdict(config)


@setting_up
def check_config(config: Config, world: int = 1) -> None:
    """Check what no single part of the configuration can see, for a run on `world` ranks.

    Raises:
        UserError: naming the values that contradict each other and the knob that mends it.
    """
    model, train = config.model, config.train
    if model.mask == "bidirectional":
        raise UserError(
            "model.mask=bidirectional lets every token see its own target: train with "
            "model.mask=causal or model.mask=prefix"
        )
    micro = train.micro_batch_size or 1
    if train.batch_size % (world * micro):
        raise UserError(
            f"train.batch_size={train.batch_size} does not divide over {world} rank(s) into "
            f"micro-batches of train.micro_batch_size={micro}: make it a multiple of "
            f"{world * micro}"
        )
    config.optim.check(train.max_steps)
    config.telemetry.check(model.n_layer)


# ---------------------------------------------------------------------------------------------
# Mistakes, explained in one line
# ---------------------------------------------------------------------------------------------


def _unknown_keys(plain: dict[str, Any], schema: type, path: str = "") -> Iterator[str]:
    fields = {f.name: f for f in dataclasses.fields(schema)}
    defaults = schema()
    for key, value in plain.items():
        known = key in fields
        if not known and not (isinstance(value, dict) and value):
            yield path + key
        elif not known:
            yield f"{path}{key}.{next(iter(value))}"
        elif dataclasses.is_dataclass(getattr(defaults, key)) and isinstance(value, dict):
            yield from _unknown_keys(value, type(getattr(defaults, key)), f"{path}{key}.")


def _all_keys(schema: type, path: str = "") -> Iterator[str]:
    defaults = schema()
    for f in dataclasses.fields(schema):
        yield path + f.name
        value = getattr(defaults, f.name)
        if dataclasses.is_dataclass(value):
            yield from _all_keys(type(value), f"{path}{f.name}.")


def unknown_key_message(key: str) -> str:
    """Say that `key` is no setting, and which setting is spelled most like it."""
    keys = [*_all_keys(Config), "experiment"]
    parent, _, leaf = key.rpartition(".")
    siblings = [k for k in keys if k.rpartition(".")[0] == parent]
    hint = nearest(key, siblings) if parent else ""
    if not hint:
        same_leaf = [k for k in keys if k.rpartition(".")[2] == leaf]
        hint = f" (did you mean '{same_leaf[0]}'?)" if same_leaf else nearest(key, keys)
    return f"{key} is not a setting{hint}"


def explain(error: BaseException) -> str:
    """Put an error of the configuration library into one line, with the nearest valid name."""
    missing = getattr(error, "missing_cfg_file", None)
    if missing is not None:
        group, _, option = str(missing).rpartition("/")
        options = list(getattr(error, "options", None) or [])
        known = ", ".join(options) + nearest(option, options)
        return f"{group}={option} does not exist: choose from {known}"
    text = f"{error}\n{error.__cause__ or ''}"
    key = re.search(r"full_key: (\S+)", text)
    if re.search(r"[Kk]ey '.*' (is )?not in", text) and key:
        return unknown_key_message(key.group(1))
    value = re.search(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", text)
    if value and key:
        return f"{key.group(1)}={value.group(1)} is not of type {value.group(2).lower()}"
    if "is not Optional" in text and key:
        return f"{key.group(1)}=null is not allowed: it needs a value"
    if text.startswith("Error merging override") and error.__cause__ is not None:
        override = text.splitlines()[0].removeprefix("Error merging override ")
        return f"{override}: {str(error.__cause__).splitlines()[0]}"
    first = text.splitlines()[0].strip()
    if "parsing override" in text or "viable" in text.lower() or "mismatched input" in text:
        return f"{first} (write key=value, and quote special characters twice: 'key=\"a, b\"')"
    return first


_HYDRA_FLAGS = (
    "-h",
    "-c",
    "-p",
    "-r",
    "-m",
    "-sc",
    "-cp",
    "-cn",
    "-cd",
    "-i",
    "--help",
    "--hydra-help",
    "--version",
    "--cfg",
    "--resolve",
    "--package",
    "--run",
    "--multirun",
    "--shell-completion",
    "--config-path",
    "--config-name",
    "--config-dir",
    "--experimental-rerun",
    "--info",
)


def check_command_line(arguments: list[str], hydra_settings: Iterable[str]) -> None:
    """Refuse what Hydra would accept in silence or explain badly.

    That is ``--flag value``, a number as a group's choice, and a setting under ``hydra.`` that is
    not one of `hydra_settings`.

    Raises:
        UserError: naming the ``key=value`` that was probably meant.
    """
    settings = Config()
    parts = [f.name for f in dataclasses.fields(Config)]
    groups = ["experiment", *(n for n in parts if dataclasses.is_dataclass(getattr(settings, n)))]
    known = list(hydra_settings)
    for argument in arguments:
        flag, _, value = argument.partition("=")
        parent, _, child = flag.lstrip("+~").partition(".")
        if parent == "hydra" and child.partition(".")[0] not in known:
            raise UserError(f"{flag} is not a setting of Hydra{nearest(child, known)}")
        if flag in groups and re.fullmatch(r"[+-]?(\d[\d.e+-]*|nan|inf)|true|false", value):
            raise UserError(f"{argument} does not exist: the choices are files in configs/{flag}/")
        if not flag.startswith("-") or flag in _HYDRA_FLAGS:
            continue
        name = flag.lstrip("-").replace("-", "_")
        keys = [key for key in _all_keys(Config) if key.rpartition(".")[2] == name]
        example = f"{keys[0] if keys else 'key'}={value or 'value'}"
        raise UserError(f"{flag} is not a flag: settings are written {example}, without dashes")


def keep_hydra_working() -> None:
    """Let Hydra 1.3 start on Python 3.14, whose argparse refuses its lazily made help texts.

    argparse now formats every help text when an argument is added; Hydra's is an object that only
    knows how to print itself. Leaving that early check out changes nothing else.
    """
    if sys.version_info >= (3, 14):
        argparse.ArgumentParser._check_help = lambda self, action: None
