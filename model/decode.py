"""One new token per sequence, as fast as the machine reads the weights.

Reading a prompt is arithmetic; producing a token is memory traffic, because every weight is read
to be used once per sequence. What helps is here, and none of it changes what is computed:

- `DecodeStep` compiles the model's own forward pass for this case. Places in the cache come in as
  sizes, so that one compilation serves every length. For a CPU it is compiled ahead of time and
  kept on disk, and no Python runs between two layers (`model/ahead_of_time.py`).
- On a CPU products and attention are written as sums (`model/decode_linear.py`,
  `kernels/row_attention.py`), so that the whole step becomes one piece of machine code.
- Weights in 8 bits are a quarter of the memory to read. They are what is not exact.

Modules are replaced in a copy of the model that shares its parameters.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from model.ahead_of_time import AheadOfTime
from model.decode_linear import Int8Linear, RowsLinear, with_linear_layers
from model.decoder import Decoder
from model.kv_cache import FullCache, KVCache

Run = Callable[[list[Tensor], int, int], Tensor]

WEIGHTS = ("full", "int8")
# The pieces of a CPU's step are fused for good: what checks them between one another, or keeps a
# product and a sum from being one instruction, only costs.
CPU_OPTIONS = {
    "size_asserts": False,
    "cpp.enable_floating_point_contract_flag": "fast",
    "memory_planning": True,  # one piece of memory for all intermediate results
}


# Tokens in view for which the compiler plans its threads. Measured with 2, 48, 128, 512 and 8,206:
# with few it keeps attention on one thread, with very many it is a third slower at 8,192.
EXAMPLE_LENGTH = 128


class Memory(KVCache, Protocol):
    """A cache that a compiled step can drive: attention reads places begin .. end of it."""

    def reserve(self, n: int) -> None:
        """Reserve the next n places, as `extend` does."""

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
        model: the decoder. Its parameters are shared: what is written into them is seen here.
        compiled: compile the step. The first call then takes as long as that takes, unless the
            machine code of an equal step is on disk (`model.ahead_of_time.code_folder`).
        weights: "full", or "int8": linear layers in 8 bits, made once from the weights as they are.
        fixed_shapes: let attention read the whole memory, with the lengths beside it, so that no
            shape ever changes: what CUDA graphs need. None: compiled, and not on a CPU. A cache
            that moves through its memory is read by changing views all the same.
        log: told in one line before a long compilation.

    Raises ValueError in one line for weights that this device cannot multiply.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        compiled: bool = False,
        weights: str = "full",
        fixed_shapes: bool | None = None,
        log: Callable[[str], None] = lambda line: None,
    ):
        device = model.embed.weight.device
        check_weights(weights, device)
        self.compiled = compiled
        self.model = model
        if weights == "int8":
            self.model = with_linear_layers(model, Int8Linear)
        elif compiled and device.type == "cpu":
            self.model = with_linear_layers(model, RowsLinear)
        on_cpu = device.type == "cpu"
        self.fixed_shapes = compiled and (not on_cpu if fixed_shapes is None else fixed_shapes)
        self._original, self._shared = model, list(model.parameters())
        self._weight = model.embed.weight
        self._ahead_of_time: AheadOfTime | None = None
        # The latest cache, the settings it was used with, and what to call for it with those: to
        # look at all that a case names takes longer than a layer.
        self._recent: tuple[weakref.ref[Memory], tuple[object, ...], Run] | None = None
        # Nothing is compiled before the first call, but to load PyTorch's compiler is slow.
        if compiled and on_cpu and not self.fixed_shapes:
            self._ahead_of_time = AheadOfTime(_views, self.model, CPU_OPTIONS, log)
        elif compiled:
            mode = "reduce-overhead" if device.type == "cuda" else None  # CUDA graphs
            self._whole_compiled = torch.compile(self._whole, mode=mode)
            self._views_compiled = torch.compile(_views)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling ahead of time."""
        return 0.0 if self._ahead_of_time is None else self._ahead_of_time.seconds

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Read one token per sequence, (B, 1), and return the logits that follow, (B, V).

        Compiled, the cache must be a `Memory`: a FullCache or a StreamingCache; and on a CPU the
        logits have no gradient.
        """
        if not self.compiled:
            return _logits(self.model, tokens, cache)
        return self._compiled_logits(tokens, cast(Memory, cache))

    def _compiled_logits(self, tokens: Tensor, cache: Memory) -> Tensor:
        self.model.check_call(tokens, cache=cache)  # machine code checks nothing
        if self.fixed_shapes and isinstance(cache, FullCache):
            cache.reserve(1)
            lengths = torch.full((len(tokens),), cache.end, device=tokens.device, dtype=torch.int32)
            for memory in (*cache.keys, *cache.values):
                torch._dynamo.mark_static_address(memory)
            torch.compiler.cudagraph_mark_step_begin()
            return self._whole_compiled(tokens, cache.keys, cache.values, lengths)
        if tokens.shape != (len(cache.keys[0]), 1):
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)}: the step reads one token of each sequence "
                f"in the cache, ({len(cache.keys[0])}, 1)"
            )
        if tokens.dtype != torch.int64 or not tokens.is_contiguous():
            tokens = tokens.long().contiguous()
        tensors = [tokens, *cache.keys, *cache.values]
        run = self._views_on(cache, tensors)  # first: who stops it finds the cache as it was
        cache.reserve(1)
        return run(tensors, cache.begin, cache.end - cache.begin)

    def _views_on(self, cache: Memory, tensors: list[Tensor]) -> Run:
        """`_views` of this model, in the form that is the fastest for such tensors."""
        if self._ahead_of_time is None:
            return partial(self._views_compiled, self.model)
        settings = (
            self._weight.dtype,
            torch.get_num_threads(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        )
        if self._recent is None or self._recent[0]() is not cache or self._recent[1] != settings:
            self._check_parameters()
            run = self._machine_code(self._ahead_of_time, tensors, settings)
            self._recent = (weakref.ref(cache), settings, run)
        return self._recent[2]

    def _check_parameters(self) -> None:
        """Raise ValueError in one line if the model has come to have other parameters than ours."""
        now = list(self._original.parameters())
        if len(now) != len(self._shared) or any(map(operator.is_not, now, self._shared)):
            raise ValueError(
                "the model's parameters were replaced after its step had been compiled "
                "(load_state_dict(assign=True) does that): make a new Generator"
            )

    def _machine_code(
        self, compiler: AheadOfTime, tensors: list[Tensor], settings: tuple[object, ...]
    ) -> Run:
        keys, values = tensors[1], tensors[-1]
        # Neither from the first place nor to the last: views of those are special to the compiler.
        config = self.model.config
        example = (1, min(keys.shape[2] - 2, config.context_length, EXAMPLE_LENGTH))
        if example[1] <= max(config.prefix, 1):
            return partial(_views, self.model)
        layout = tuple((tensor.dtype, tensor.shape, tensor.stride()) for tensor in self._shared)
        case = (keys.dtype, keys.shape, keys.stride(), values.stride(), layout, *settings)
        return compiler.for_case(case, tensors, example)

    def _whole(
        self, tokens: Tensor, keys: list[Tensor], values: list[Tensor], lengths: Tensor
    ) -> Tensor:
        return _logits(self.model, tokens, _Whole(keys, values, lengths))


def _views(model: Decoder, tensors: list[Tensor], begin: int, length: int) -> Tensor:
    """Read tokens (B, 1), whose keys and values go to place begin + length - 1 of memory."""
    tokens, memory = tensors[0], tensors[1:]
    keys, values = memory[: len(memory) // 2], memory[len(memory) // 2 :]
    return _logits(model, tokens, _Views(keys, values, begin, begin + length))


def _logits(model: Decoder, tokens: Tensor, cache: KVCache) -> Tensor:
    return model(tokens, cache=cache, only_last=True).logits[:, -1]


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
