"""Optimizers: which parameter is updated by what, and with which decay.

The model may need two optimizers at once (Muon for the hidden matrices, AdamW for the rest), so the
trainer sees one `Optimizers` object that clips, steps, saves and loads them together. Its state is
stored under parameter names, so a checkpoint can be read by a person and does not depend on the
order in which parameters happen to be listed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from training.choices import check_choice, check_range
from training.muon import BatchedMuon
from training.schedule import ScheduleConfig

KINDS = ("adamw", "muon", "sgd")
MUON_LR_SCALINGS = ("original", "match_rms_adamw")
STATE_VERSION = 1

# Devices whose AdamW and SGD kernels update all parameters in one pass (PyTorch 2.4 and later).
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")

# What each optimizer remembers about a parameter; SGD only does so with momentum.
_STATE_NAMES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    BatchedMuon: ("momentum_buffer",),
    torch.optim.SGD: ("momentum_buffer",),
}


@dataclass(kw_only=True, slots=True)
class OptimConfig(ScheduleConfig):
    """One optimizer and its schedule (`ScheduleConfig` holds the learning rate's course).

    `lr`, `weight_decay`, the betas and `eps` belong to AdamW, which under `muon` updates the
    embeddings, the output head and every vector. `momentum` and `nesterov` belong to SGD. Weight
    decay is decoupled from the gradient and multiplied by the learning rate, for AdamW and Muon;
    SGD adds it to the gradient, as `torch.optim.SGD` does.
    """

    kind: str = "adamw"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9
    nesterov: bool = True
    muon_lr: float = 0.02
    muon_weight_decay: float = 0.0
    muon_momentum: float = 0.95
    muon_ns_steps: int = 5
    muon_lr_scaling: str = "original"
    grad_clip: float = 1.0  # largest global gradient norm; 0: measured, never clipped

    def __post_init__(self) -> None:
        """Raise ValueError on a value out of range or an unknown name."""
        ScheduleConfig.__post_init__(self)
        check_choice("optim.kind", self.kind, KINDS)
        check_choice("optim.muon_lr_scaling", self.muon_lr_scaling, MUON_LR_SCALINGS)
        check_range("optim.muon_lr", self.muon_lr, 0, open_low=True, open_high=True)
        check_range("optim.muon_ns_steps", self.muon_ns_steps, 1, 99)
        for name in ("weight_decay", "muon_weight_decay", "eps", "grad_clip"):
            check_range(f"optim.{name}", getattr(self, name), 0, open_high=True)
        for name in ("beta1", "beta2", "momentum", "muon_momentum"):
            check_range(f"optim.{name}", getattr(self, name), 0, 1, open_high=True)
        if self.kind == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("optim.nesterov=true needs optim.momentum above 0: turn it off")


class Optimizers:
    """All optimizers of one model, behind one set of calls.

    Every step follows the same order: `set_lr`, backward passes, `unscale`, `clip_grad_norm`,
    `step`, `zero_grad`. `step` refuses to run until `set_lr` has been called, so neither the first
    step of a run nor the first after a resume can use a stale learning rate.
    """

    def __init__(
        self, optimizers: list[torch.optim.Optimizer], names: dict[Tensor, str], config: OptimConfig
    ) -> None:
        self.optimizers = optimizers
        self._names = names
        self._config = config
        self._lr_is_set = False

    @property
    def param_groups(self) -> Iterator[dict[str, Any]]:
        """Every parameter group; `peak_lr` is its learning rate at multiplier 1."""
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def set_lr(self, multiplier: float) -> float:
        """Set every group to `multiplier` times its peak; return the main learning rate."""
        for group in self.param_groups:
            group["lr"] = group["peak_lr"] * multiplier
        self._lr_is_set = True
        return self._config.lr * multiplier

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Remove a float16 scaler's factor: from here on the gradients are the true ones.

        Call it once per step, after all micro-steps and the reduction over ranks.
        """
        for optimizer in self.optimizers:
            scaler.unscale_(optimizer)

    def clip_grad_norm(self) -> Tensor:
        """Clip the true gradients by their global norm and return the norm they had before.

        The norm, of all parameters together, stays on the device: reading it is the caller's
        choice of moment.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self._config.grad_clip > 0:
            clip_grads_with_norm_(parameters, self._config.grad_clip, norm)
        return norm

    def step(self) -> None:
        """Update the parameters from their gradients."""
        assert self._lr_is_set, "set_lr must be called before step"
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients (set to None, which also frees their memory)."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def describe(self) -> str:
        """Return one line per parameter group: who updates how many tensors, and how."""
        return "\n".join(
            f"{type(optimizer).__name__}: {len(group['params'])} tensors, "
            f"{sum(p.numel() for p in group['params']):,} parameters, "
            f"peak lr {group['peak_lr']:g}, weight decay {group['weight_decay']:g}"
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        )

    def state_values(self) -> int:
        """Return how many float32 values of state training will need, known before the first."""
        return sum(
            parameter.numel() * sum(name != "step" for name in _state_names(optimizer))
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    # --- State ------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live state tensors, keyed "<parameter name>/<state name>"."""
        return {
            f"{self._names[parameter]}/{key}": value
            for optimizer in self.optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def state_json(self) -> dict[str, Any]:
        """Return what `load` needs beside the tensors, as plain values.

        `without_state` names the parameters that have not been updated yet (all of them before the
        first step), so that an entry missing from a damaged checkpoint can be told from one that
        never existed.
        """
        with_state = {p for optimizer in self.optimizers for p in optimizer.state}
        return {
            "version": STATE_VERSION,
            "kind": self._config.kind,
            "without_state": sorted(n for p, n in self._names.items() if p not in with_state),
        }

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore what `state_tensors` and `state_json` returned.

        Learning rates and other settings come from the present configuration, not from the state.

        Raises:
            ValueError: when the state is of another kind of optimizer or version, or an entry is
                missing, unexpected, or of another shape than its parameter.
        """
        self._check_state(tensors, state)
        for optimizer in self.optimizers:
            current = optimizer.state_dict()
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            current["state"] = {
                index: {
                    key: tensors[f"{self._names[parameter]}/{key}"].clone()
                    for key in _state_names(optimizer)
                }
                for index, parameter in enumerate(parameters)
                if self._names[parameter] not in state["without_state"]
            }
            optimizer.load_state_dict(current)
        self._lr_is_set = False

    def _check_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        if state["version"] != STATE_VERSION:
            raise ValueError(
                f"optimizer state has version {state['version']}, this code reads {STATE_VERSION}"
            )
        if state["kind"] != self._config.kind:
            raise ValueError(
                f"optimizer state is of kind {state['kind']}, but optim.kind={self._config.kind}: "
                "resume with the same optimizer, or start from the weights with init_from"
            )
        shapes = {
            f"{self._names[parameter]}/{key}": () if key == "step" else tuple(parameter.shape)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if self._names[parameter] not in state["without_state"]
            for key in _state_names(optimizer)
        }
        missing, unexpected = sorted(shapes.keys() - tensors), sorted(tensors.keys() - shapes)
        if missing or unexpected:
            raise ValueError(
                f"optimizer state does not fit the model: missing {_shorten(missing)}; "
                f"unexpected {_shorten(unexpected)}"
            )
        for name, shape in shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise ValueError(
                    f"optimizer state {name} has shape {tuple(tensors[name].shape)}, "
                    f"its parameter needs {shape}"
                )


def build_optimizers(model: nn.Module, config: OptimConfig) -> Optimizers:
    """Build the optimizers of `model`: the plain module, not one wrapped for several ranks.

    Weight decay applies to tensors of two and more dimensions (matrices, embeddings, learned
    positions), not to norms, biases and other vectors, as in nanoGPT. Muon takes the
    two-dimensional parameters under ``blocks.``; frozen parameters are left out.

    Raises:
        ValueError: when nothing can be trained, or Muon finds no matrix to work on.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("the model has no trainable parameters: every one is frozen")
    optimizers: list[torch.optim.Optimizer] = []
    rest = trainable
    if config.kind == "muon":
        hidden = {n: p for n, p in trainable.items() if _is_hidden_matrix(n, p)}
        if not hidden:
            raise ValueError("optim.kind=muon found no trainable matrices under 'blocks.'")
        rest = {n: p for n, p in trainable.items() if n not in hidden}
        optimizers.append(_build_muon(hidden.values(), config))
    if rest:
        build = _build_sgd if config.kind == "sgd" else _build_adamw
        optimizers.append(build(_decay_groups(rest.values(), config), config))
    return Optimizers(optimizers, {p: name for name, p in trainable.items()}, config)


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return name.startswith("blocks.") and parameter.ndim == 2


def _decay_groups(parameters: Iterable[Tensor], config: OptimConfig) -> list[dict[str, Any]]:
    """Split into decayed matrices and undecayed vectors, leaving out an empty group."""
    parameters = list(parameters)
    groups = [
        ([p for p in parameters if p.ndim >= 2], config.weight_decay),
        ([p for p in parameters if p.ndim < 2], 0.0),
    ]
    return [
        {"params": members, "weight_decay": decay, "peak_lr": config.lr}
        for members, decay in groups
        if members
    ]


def _build_adamw(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=_fused(groups),
    )


def _build_sgd(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        fused=_fused(groups),
    )


def _build_muon(parameters: Iterable[Tensor], config: OptimConfig) -> torch.optim.Optimizer:
    return BatchedMuon(
        [{"params": list(parameters), "peak_lr": config.muon_lr}],
        lr=config.muon_lr,
        weight_decay=config.muon_weight_decay,
        momentum=config.muon_momentum,
        ns_steps=config.muon_ns_steps,
        adjust_lr_fn=config.muon_lr_scaling,
    )


def _fused(groups: list[dict[str, Any]]) -> bool | None:
    """Choose the one-pass kernel where there is one; None leaves the choice to PyTorch."""
    devices = {p.device.type for group in groups for p in group["params"]}
    return True if devices <= set(_FUSED_DEVICES) else None


def _state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["momentum"] == 0:
        return ()
    return _STATE_NAMES[type(optimizer)]


def _shorten(names: list[str], limit: int = 5) -> str:
    """Join `names`, or the first `limit` of them and how many there are beyond."""
    text = ", ".join(names[:limit]) or "none"
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"
