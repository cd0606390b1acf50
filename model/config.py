"""What a model is: one dataclass that fixes every shape and every choice.

The same object is filled in by the command line, stored in every checkpoint and read by the
code that builds the model, so there is no second description to fall out of step with it.
A size that follows from other fields is a property and never a stored field: a default worked
out when the object is made would survive a later change of the field it came from.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

POSITIONS = ("rope", "alibi", "learned", "sinusoidal", "none")
ROPE_SCALINGS = ("none", "linear", "ntk", "yarn")
NORMS = ("rmsnorm", "layernorm")
MLPS = ("swiglu", "gelu", "gelu_tanh", "relu2")
SINK_LOGITS = ("none", "zero", "learned")
MASKS = ("causal", "prefix", "bidirectional")

CHOICES = {
    "position": POSITIONS,
    "rope_scaling": ROPE_SCALINGS,
    "norm": NORMS,
    "mlp": MLPS,
    "sink_logit": SINK_LOGITS,
    "mask": MASKS,
}

SWIGLU_MULTIPLE = 64


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer, described completely.

    Raises ValueError, one line naming the field and its limit, for a value no model can have.
    """

    vocab_size: int = 0  # 0: filled in from the tokenizer before the model is built
    context_length: int = 256  # longest sequence, in tokens
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int | None = None  # None: n_head; 1: multi-query; between: grouped-query
    n_embd: int = 128  # width of the residual stream
    head_dim: int | None = None  # None: n_embd // n_head

    position: str = "rope"  # rope | alibi | learned | sinusoidal | none
    rope_theta: float = 10000.0
    rope_scaling: str = "none"  # none | linear | ntk | yarn
    rope_scaling_factor: float = 1.0  # how many times longer the context has become
    rope_original_context: int | None = None  # yarn; None: context_length / rope_scaling_factor
    rope_beta_fast: float = 32.0  # yarn: pairs turning more often than this are left alone
    rope_beta_slow: float = 1.0  # yarn: pairs turning less often than this are fully stretched

    norm: str = "rmsnorm"  # rmsnorm | layernorm
    norm_eps: float = 1e-5
    mlp: str = "swiglu"  # swiglu | gelu | gelu_tanh | relu2
    mlp_dim: int | None = None  # None: the usual size for the kind, see `mlp_size`
    bias: bool = False  # in linear layers and LayerNorm; the output head never has one
    tie_embeddings: bool = True  # the output head is the embedding matrix
    dropout: float = 0.0  # on embeddings and residual branches, never on attention weights

    qk_norm: bool = False  # RMSNorm of each head's queries and keys, before any rotation
    output_gate: bool = False  # sigmoid gate on every channel of every head's output
    windows: list[int] = field(default_factory=list)  # per layer, repeated; 0: full; []: all full
    window_sinks: int = 0  # first tokens that stay visible beside a window
    sink_logit: str = "none"  # none | zero | learned: the softmax's "attend to nothing" option
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: off
    mask: str = "causal"  # causal | prefix | bidirectional
    prefix: int = 0  # mask=prefix: how many first tokens see each other both ways

    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            _require_choice(name, getattr(self, name), choices)
        self._check_sizes()
        self._check_positions()
        self._check_attention()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout={self.dropout} must be in [0, 1)")

    def _check_sizes(self) -> None:
        if self.vocab_size < 0:
            raise ValueError(
                f"model.vocab_size={self.vocab_size} must be at least 1 (or 0: from the tokenizer)"
            )
        for name in ("context_length", "n_layer", "n_head", "n_kv_head", "n_embd"):
            self._require_at_least(name, 1)
        for name in ("head_dim", "mlp_dim", "rope_original_context"):
            self._require_at_least(name, 1)
        for name, limit in (("norm_eps", 0), ("init_std", 0), ("rope_theta", 1)):
            if getattr(self, name) <= limit:
                raise ValueError(f"model.{name}={getattr(self, name)} must be above {limit}")
        if self.n_head % self.kv_heads:
            raise ValueError(
                f"model.n_head={self.n_head} must be a multiple of "
                f"model.n_kv_head={self.n_kv_head}: every key/value head serves an equal group"
            )
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ValueError(
                f"model.n_embd={self.n_embd} must be a multiple of model.n_head={self.n_head} "
                f"(or set model.head_dim)"
            )

    def _check_positions(self) -> None:
        if self.position == "rope" and self.head_size % 2:
            raise ValueError(
                f"the head size {self.head_size} must be even for model.position=rope, "
                f"which turns pairs of channels (set model.head_dim)"
            )
        if self.position == "sinusoidal" and self.n_embd % 2:
            raise ValueError(
                f"model.n_embd={self.n_embd} must be even for model.position=sinusoidal"
            )
        if self.rope_scaling == "none":
            if self.rope_scaling_factor != 1:
                raise ValueError(
                    f"model.rope_scaling_factor={self.rope_scaling_factor} has no effect with "
                    f"model.rope_scaling=none; choose linear, ntk or yarn"
                )
            return
        if self.position != "rope":
            raise ValueError(
                f"model.rope_scaling={self.rope_scaling} needs model.position=rope, "
                f"not {self.position}"
            )
        if self.rope_scaling_factor < 1:
            raise ValueError(
                f"model.rope_scaling_factor={self.rope_scaling_factor} must be at least 1"
            )
        if self.rope_scaling == "ntk" and self.head_size == 2:
            raise ValueError("model.rope_scaling=ntk needs a head size above 2")
        if self.rope_scaling == "yarn" and not 0 < self.rope_beta_slow < self.rope_beta_fast:
            raise ValueError(
                f"model.rope_beta_slow={self.rope_beta_slow} must be above 0 and below "
                f"model.rope_beta_fast={self.rope_beta_fast}"
            )

    def _check_attention(self) -> None:
        for name in ("window_sinks", "softcap", "prefix"):
            self._require_at_least(name, 0)
        for window in self.windows:
            if window < 0:
                raise ValueError(
                    f"model.windows={list(self.windows)} holds {window}: a window is at least 1, "
                    f"and 0 means full attention"
                )
        has_window = any(self.windows)
        if has_window and self.mask == "bidirectional":
            raise ValueError("model.windows need a causal mask, not model.mask=bidirectional")
        if self.window_sinks and not has_window:
            raise ValueError(
                f"model.window_sinks={self.window_sinks} has no effect without model.windows"
            )
        if self.mask == "prefix" and self.prefix == 0:
            raise ValueError("model.mask=prefix needs model.prefix of at least 1")
        if self.prefix >= self.context_length:
            raise ValueError(
                f"model.prefix={self.prefix} must be below "
                f"model.context_length={self.context_length}: only what follows is predicted"
            )
        if self.mask != "prefix" and self.prefix:
            raise ValueError(f"model.prefix={self.prefix} needs model.mask=prefix, not {self.mask}")

    def _require_at_least(self, name: str, limit: int) -> None:
        value = getattr(self, name)
        if value is not None and value < limit:
            raise ValueError(f"model.{name}={value} must be at least {limit}")

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def group(self) -> int:
        """Query heads that share one key/value head: head h reads key/value head h // group."""
        return self.n_head // self.kv_heads

    @property
    def head_size(self) -> int:
        """Channels of one head."""
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def mlp_size(self) -> int:
        """Hidden channels of an MLP.

        The usual size is 4·n_embd. SwiGLU has three matrices where the others have two, so it
        gets 8/3·n_embd, which costs the same, rounded up to a multiple of 64 (Shazeer 2020,
        arXiv:2002.05202; rounding as in Llama).
        """
        if self.mlp_dim is not None:
            return self.mlp_dim
        if self.mlp == "swiglu":
            return -(-8 * self.n_embd // (3 * SWIGLU_MULTIPLE)) * SWIGLU_MULTIPLE
        return 4 * self.n_embd

    @property
    def yarn_original_context(self) -> float:
        """Context length, in tokens, that YaRN stretches from."""
        if self.rope_original_context is not None:
            return self.rope_original_context
        return self.context_length / self.rope_scaling_factor

    def window_of(self, layer: int) -> int | None:
        """Window of a layer in tokens, None where attention is full."""
        if not self.windows:
            return None
        return self.windows[layer % len(self.windows)] or None

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain Python values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`; missing fields take their defaults.

        Raises ValueError for an unknown field, with the nearest known name.
        """
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"unknown field model.{name}{_nearest(name, known)}")
        return cls(**values)


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        hint = _nearest(value, choices)
        raise ValueError(f"model.{name}={value!r} is not one of {', '.join(choices)}{hint}")


def _nearest(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
