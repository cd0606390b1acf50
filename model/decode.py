"""One new token per sequence, as fast as the machine reads the weights.

Reading a prompt is arithmetic; producing a token is memory traffic, because every weight is read
to be used once per sequence. What helps is here, and none of it changes what is computed:

- `DecodeStep` compiles the model's own forward pass for this case. Places in the cache come in as
  sizes, so that one compilation serves every length.
- `RowLinear` writes the product of a matrix and a single vector as a sum, which the compiler fuses
  with what surrounds it; the library's product for one row stays well below the memory's speed.
- `Int8Linear` stores a matrix in a quarter of the bytes. It is the one that is not exact.

Modules are replaced in a copy of the model that shares its parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.decoder import Decoder
from model.kv_cache import KVCache

WEIGHTS = ("full", "int8")
INT8_LARGEST = 127


class Memory(KVCache, Protocol):
    """A cache that a compiled step can drive: attention reads places begin .. end of it."""

    @property
    def keys(self) -> list[Tensor]:
        """Keys of every layer, (B, Hkv, places, D)."""

    @property
    def values(self) -> list[Tensor]:
        """Values of every layer, (B, Hkv, places, D)."""

    @property
    def begin(self) -> int:
        """The first place that attention reads."""

    @property
    def end(self) -> int:
        """One past the last place that attention reads: where the newest token is."""


class DecodeStep:
    """Logits (B, V) of the token after `tokens` (B, 1), which continue what a cache holds.

    Args:
        model: the decoder. Its parameters are shared, so that a change of them is seen here.
        compiled: compile the step. The first call then takes as long as that takes.
        weights: "full", or "int8": linear layers in 8 bits, made once from the weights as they are.
        fixed_shapes: let attention read the whole memory, with the lengths beside it, so that no
            shape ever changes: what CUDA graphs need. None: compiled on CUDA. A cache that moves
            through its memory is read by changing views all the same.

    Raises ValueError in one line for weights that this device cannot multiply.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        compiled: bool = False,
        weights: str = "full",
        fixed_shapes: bool | None = None,
    ):
        device = model.embed.weight.device
        check_weights(weights, device)
        self.compiled = compiled
        self.model = model
        if weights == "int8":
            self.model = with_linear_layers(model, Int8Linear)
        elif compiled and device.type == "cpu":
            self.model = with_linear_layers(model, RowLinear)
        on_cuda = device.type == "cuda"
        self.fixed_shapes = compiled and (on_cuda if fixed_shapes is None else fixed_shapes)
        self._passed: set[tuple[object, ...]] = set()
        if compiled:  # nothing is compiled before the first call, but to load the compiler is slow
            self._views_compiled = torch.compile(self._views)
            mode = "reduce-overhead" if on_cuda else None  # CUDA graphs
            self._whole_compiled = torch.compile(self._whole, mode=mode)

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Read one token per sequence, (B, 1), and return the logits that follow, (B, V).

        Compiled, the cache must be a `Memory`: a FullCache or a StreamingCache.
        """
        if not self.compiled:
            return self._logits(tokens, cache)
        return self._compiled_logits(tokens, cast(Memory, cache))

    def _compiled_logits(self, tokens: Tensor, cache: Memory) -> Tensor:
        cache.extend(1)
        if self.fixed_shapes and cache.begin == 0:
            lengths = torch.full((len(tokens),), cache.end, device=tokens.device, dtype=torch.int32)
            for memory in (*cache.keys, *cache.values):
                torch._dynamo.mark_static_address(memory)
            torch.compiler.cudagraph_mark_step_begin()
            return self._whole_compiled(tokens, cache.keys, cache.values, lengths)
        length = cache.end - cache.begin
        places = _sizes(cache.begin, length, tokens.device)
        if length == 1 or cache.end == cache.keys[0].shape[2]:
            # Views of one place and of the whole memory are cases that the compiler keeps apart.
            return self._views(tokens, cache.keys, cache.values, places)
        torch._dynamo.maybe_mark_dynamic(places, 0)
        torch._dynamo.mark_dynamic(places, 1)
        with self._without_guards(tokens, cache):
            return self._views_compiled(tokens, cache.keys, cache.values, places)

    def _without_guards(self, tokens: Tensor, cache: Memory) -> AbstractContextManager[object]:
        """Leave out the compiler's own checks once this very case has passed them.

        Before every call it looks at each parameter and shape that it once relied on, which takes
        as long as a small model's arithmetic. All that can change between calls is named here.
        """
        case = (
            tokens.shape,
            cache.keys[0].shape,
            cache.keys[0].dtype,
            cache.begin == 0,
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(tokens.device.type),
        )
        if case in self._passed:
            return torch.compiler.set_stance(skip_guard_eval_unsafe=True)
        self._passed.add(case)
        return nullcontext()

    def _views(
        self, tokens: Tensor, keys: list[Tensor], values: list[Tensor], places: Tensor
    ) -> Tensor:
        return self._logits(tokens, _Views(keys, values, *_from_sizes(places)))

    def _whole(
        self, tokens: Tensor, keys: list[Tensor], values: list[Tensor], lengths: Tensor
    ) -> Tensor:
        return self._logits(tokens, _Whole(keys, values, lengths))

    def _logits(self, tokens: Tensor, cache: KVCache) -> Tensor:
        return self.model(tokens, cache=cache, only_last=True).logits[:, -1]


def check_weights(weights: str, device: torch.device) -> None:
    """Raise ValueError, one line, for a kind of weights that is unknown or not for this device."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights={weights!r} is not one of {', '.join(WEIGHTS)}")
    if weights == "int8" and device.type != "cpu":
        raise ValueError(f"weights=int8 are multiplied on a CPU only, the model is on {device}")


class _Views:
    """A cache for one step: the new token goes to place `end - 1`, attention reads begin .. end."""

    lengths: Tensor | None = None
    nbytes = 0

    def __init__(self, keys: list[Tensor], values: list[Tensor], begin: int, end: int):
        self._keys = keys
        self._values = values
        self._begin = begin
        self._end = end
        self.capacity = keys[0].shape[2]
        self.length = end - begin - 1  # tokens that are still in view

    def extend(self, n: int) -> Tensor:
        """Return the position of the new token, (B, 1)."""
        position = torch.arange(self._end - 1, self._end, device=self._keys[0].device)
        return position[None].expand(self._keys[0].shape[0], -1)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new token's keys and values, and return all that are in view."""
        keys, values = self._keys[layer], self._values[layer]
        keys.narrow(2, self._end - 1, 1).copy_(k)
        values.narrow(2, self._end - 1, 1).copy_(v)
        length = self._end - self._begin
        return keys.narrow(2, self._begin, length), values.narrow(2, self._begin, length)

    def reset(self) -> None:
        """There is nothing to forget."""


class _Whole:
    """A cache for one step that is read whole; `lengths` (B,), all equal, count the new token."""

    nbytes = 0

    def __init__(self, keys: list[Tensor], values: list[Tensor], lengths: Tensor):
        self._keys = keys
        self._values = values
        self._place = lengths[:1].long() - 1
        self.lengths = lengths
        self.capacity = keys[0].shape[2]
        self.length = self.capacity - 1  # as far as anyone knows who may not read `lengths`

    def extend(self, n: int) -> Tensor:
        """Return the position of the new token, (B, 1)."""
        return self._place[None].expand(self._keys[0].shape[0], -1)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new token's keys and values, and return all there are."""
        keys, values = self._keys[layer], self._values[layer]
        return keys.index_copy_(2, self._place, k), values.index_copy_(2, self._place, v)

    def reset(self) -> None:
        """There is nothing to forget."""


# The compiler takes the sizes of a tensor as symbols, numbers it would take as constants and
# compile anew for. Sizes of 0 and 1 are constants to it as well, hence the offset.
_OFFSET = 2


def _sizes(begin: int, length: int, device: torch.device) -> Tensor:
    return torch.empty(1, 1, device=device).expand(begin + _OFFSET, length + _OFFSET)


def _from_sizes(places: Tensor) -> tuple[int, int]:
    begin = places.shape[0] - _OFFSET
    return begin, begin + places.shape[1] - _OFFSET


# --- Linear layers ------------------------------------------------------------------------------


def with_linear_layers(model: Decoder, make: Callable[[nn.Linear], nn.Module]) -> Decoder:
    """Copy a model, sharing its parameters, with every linear layer replaced by `make(layer)`."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    twin = copy.deepcopy(model, memo=shared)
    for module in list(twin.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, make(child))
    return twin


class RowLinear(nn.Module):
    """x Wᵀ + b, made for inputs of a single row and a compiler that fuses the sum."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., N)."""
        is_row = x.numel() == x.shape[-1]
        if not is_row or not torch.compiler.is_compiling():
            return F.linear(x, self.weight, self.bias)
        y = (x.unsqueeze(-2) * self.weight).sum(-1)
        return y if self.bias is None else y + self.bias


class Int8Linear(nn.Module):
    """x Wᵀ + b with W in 8 bits, one scale per row of W; x is rounded to bfloat16.

    The scale makes the largest weight of a row 127, so that a weight is off by at most half a
    scale.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / INT8_LARGEST
        # The scale is used in bfloat16, so the weights are rounded against it as it is there.
        scale = scale.to(torch.bfloat16)
        steps = (weight / scale.float()[:, None]).round().clamp(-INT8_LARGEST, INT8_LARGEST)
        self.register_buffer("weight", steps.to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., N)."""
        rows = x.flatten(0, -2).to(torch.bfloat16)
        y = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale).to(x.dtype)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias
