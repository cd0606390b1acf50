"""Calls on a GPU that is not there: `python -m tests.kernels.launches sm_90 first [CASE...]`

Triton binds the arguments of a launch, decides whether it needs a new kernel, compiles it, and
hands it the arguments, all as on a GPU; only there they are looked at and nothing runs. "first"
compiles to Triton's first form, which is quick, "code" down to machine code. It must run in a
process without TRITON_INTERPRET. Prints one JSON object per launch.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends import backends
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import flash_backend, flash_launch
from kernels.attention import AttentionSpec, Stats, attention, column_mass
from kernels.triton_compile import SHARED_MEMORY, TARGETS, PretendedDriver
from kernels.triton_rope import rotate_queries_and_keys
from tests.kernels.cases import ALL_STATS

H, HKV, D = 4, 2, 64

# A parameter in the first form: "%T: i32" or "%Q: !tt.ptr<bf16> {tt.divisibility = 16 : i32}".
PARAMETER = re.compile(r"%(\w+): ([\w!.<>]+)(?: \{tt\.divisibility = (\d+))?")
TYPES = {
    torch.bfloat16: "!tt.ptr<bf16>",
    torch.float32: "!tt.ptr<f32>",
    torch.int32: "!tt.ptr<i32>",
    float: "f32",
    int: "i32",
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch.

    Attributes:
        case, call: the calls it came from, and the one of them.
        new: whether a kernel was compiled for it.
        arguments: what was given to the kernel, constants included; of tensors the shape.
        wrong: what of that does not fit the kernel.
    """

    case: str
    call: str
    kernel: str
    grid: tuple[int, int, int]
    new: bool
    arguments: dict[str, Any]
    wrong: list[str]


class Device(PretendedDriver):
    """A driver that loads kernels and starts them, or seems to.

    Attributes:
        launches: what was started: fields of `Launch`.
    """

    def __init__(self, arch: str):
        super().__init__(arch)
        self.shared_memory = SHARED_MEMORY[arch]
        self.launches: list[dict[str, Any]] = []
        self.launcher_cls = partial(Launcher, self.launches)
        self.utils = self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared_memory}

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, and most threads of a program."""
        return 1, 1, 255, 0, 1024

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Launcher:
    """What Triton makes of a compiled kernel, to start it."""

    def __init__(self, launches: list[dict[str, Any]], source: Any, metadata: Any):
        self.launches, self.source, self.parameters = launches, source, metadata.parameters
        self.new = True

    def __call__(self, x: int, y: int, z: int, *others: Any) -> None:
        """Take the grid, six things of Triton's own, and the arguments of the kernel in order."""
        kernel = self.source.fn
        arguments = dict(zip(kernel.arg_names, others[6:], strict=True))
        launch = {
            "kernel": kernel.__name__,
            "grid": (x, y, z),
            "new": self.new,
            "arguments": {
                name: list(a.shape) if isinstance(a, Tensor | TensorDescriptor) else a
                for name, a in arguments.items()
            },
            "wrong": list(self._misfits(arguments)),
        }
        self.launches.append(launch)
        self.new = False

    def _misfits(self, arguments: dict[str, Any]) -> Iterator[str]:
        """What the kernel was compiled for and is not given."""
        names = list(arguments)
        constants = {names[path[0]]: value for path, value in self.source.constants.items()}
        for name, value in constants.items():
            if type(arguments[name]) is not type(value) or arguments[name] != value:
                yield f"{name} is {arguments[name]}, not {value}"
        given = [
            (name, value, kind)
            for name in names
            if name not in constants
            for value, kind in _parts(arguments[name])
        ]
        # The sizes and strides of a descriptor are called after it, with a number behind.
        takes = [(re.sub(r"_\d+$", "", name), kind) for name, kind, _ in self.parameters]
        if [(name, kind) for name, _, kind in given] != takes:
            yield f"given {given}, takes {self.parameters}"
            return
        for (name, number, _), (_, _, divisor) in zip(given, self.parameters, strict=True):
            if divisor and number % int(divisor):
                yield f"{name} is {number}, not divisible by {divisor}"


def _parts(argument: Any) -> list[tuple[Any, str]]:
    """The numbers that a kernel receives for an argument, and what it should take them for."""
    if isinstance(argument, Tensor):
        return [(argument.data_ptr(), TYPES[argument.dtype])]
    if isinstance(argument, TensorDescriptor):
        tile = "x".join(map(str, argument.block_shape))
        element = TYPES[argument.base.dtype].removeprefix("!tt.ptr<").removesuffix(">")
        kind = f"!tt.tensordesc<tensor<{tile}x{element}>>"
        sizes = [(size, "i32") for size in argument.shape]
        strides = [(stride, "i64") for stride in argument.strides]
        return [(argument.base.data_ptr(), kind), *sizes, *strides]
    return [(argument, TYPES[type(argument)])]


@contextmanager
def pretended(arch: str, first_form: bool) -> Iterator[Device]:
    """Let Triton and PyTorch believe in a device, and compile into a cache of its own."""
    target = TARGETS[arch]
    amd = target.backend == "hip"
    backend = backends["amd" if amd else "nvidia"].compiler
    add_stages = backend.add_stages

    def add_stages_and_look(self: Any, stages: dict[str, Any], *others: Any) -> None:
        add_stages(self, stages, *others)
        lower = stages["ttir"]

        def look(module: Any, metadata: dict[str, Any]) -> Any:
            head = re.search(r"tt\.func public @(\w+)(.*)", str(module))
            metadata |= {"name": head[1], "parameters": PARAMETER.findall(head[2]), "shared": 0}
            return module if first_form else lower(module, metadata)

        stages["ttir"] = look
        if first_form:
            binary = list(stages)[-1]
            stages.clear()
            stages |= {"ttir": look, binary: lambda *_: b""}

    device = Device(arch)
    triton.runtime.driver.set_active(device)
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.object(triton.knobs.cache, "dir", cache),
        mock.patch.object(backend, "add_stages", add_stages_and_look),
        mock.patch.object(torch.version, "hip", "pretended" if amd else None),
        mock.patch.object(
            torch.cuda,
            "get_device_capability",
            return_value=(0, 0) if amd else divmod(target.arch, 10),
        ),
        mock.patch.object(flash_backend, "check_device"),
    ):
        yield device


def attend(
    length: int,
    keys: int | None = None,
    *,
    batch: int = 2,
    stats: Stats | None = None,
    everything: bool = False,
    numbers: tuple[int, int, int] = (50, 4, 7),
) -> None:
    """Attention, its gradients and, with statistics, column mass.

    `numbers` are window, sinks and prefix, if everything is on.
    """
    keys = keys or length
    q, k, v = (
        torch.empty(batch, n, heads, D, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for n, heads in ((length, H), (keys, HKV), (keys, HKV))
    )
    spec, kv_lengths = AttentionSpec(), None
    if everything:
        window, sinks, prefix = numbers
        spec = AttentionSpec(
            window=window,
            sinks=sinks,
            prefix=prefix,
            documents=(torch.arange(keys) // 20).expand(batch, -1),
            alibi_slopes=torch.ones(H, requires_grad=True),
            softcap=30.0,
            sink_logit=torch.zeros(H, requires_grad=True),
        )
        kv_lengths = torch.full((batch,), keys, dtype=torch.int32)
    output = attention(q, k, v, spec, kv_lengths=kv_lengths, stats=stats, backend="triton")
    loss = output.out.sum()
    if stats is not None:
        loss = loss + output.lse.sum() + output.entropy.sum()
        column_mass(q, k, output.lse, spec, kv_lengths=kv_lengths, backend="triton")
    loss.backward()


def rotate(length: int) -> None:
    """RoPE and its gradients."""
    q, k = (torch.empty(2, length, n, D, requires_grad=True) for n in (H, HKV))
    table = torch.empty(length, 1, D)
    turned_q, turned_k = rotate_queries_and_keys(q, k, table, table)
    (turned_q.sum() + turned_k.sum()).backward()


def attend_in_split_groups(length: int) -> None:
    """As on a device that few key heads do not fill."""
    with mock.patch.object(flash_launch, "_group_splits", return_value=2):
        attend(length)


everything = partial(attend, stats=ALL_STATS, everything=True)
CASES: dict[str, dict[str, Callable[[], None]]] = {
    "plain": {
        "300": partial(attend, 300),
        "301": partial(attend, 301),
        "304": partial(attend, 304, batch=1),
        "1": partial(attend, 1),
        "100 of 304": partial(attend, 100, 304, batch=16),
    },
    "statistics": {
        "300": partial(attend, 300, stats=ALL_STATS),
        "16": partial(attend, 16, stats=ALL_STATS, batch=1),
    },
    "everything": {
        "300": partial(everything, 300),
        "301": partial(everything, 301, numbers=(16, 16, 16)),
        "1 of 40": partial(everything, 1, 40, numbers=(1, 1, 1)),
    },
    "split groups": {
        "300": partial(attend_in_split_groups, 300),
        "16": partial(attend_in_split_groups, 16),
    },
    "decoding": {
        "300": partial(attend, 1, 300),
        "512": partial(attend, 1, 512, batch=1),
        "1000": partial(attend, 1, 1000),
        "1024": partial(attend, 1, 1024, batch=16),
        "4096": partial(attend, 1, 4096),
        "4200": partial(attend, 1, 4200),
    },
    "decoding, everything": {
        "300": partial(everything, 1, 300),
        "301": partial(everything, 1, 301, numbers=(16, 16, 16)),
        "512": partial(everything, 1, 512, batch=1, numbers=(1, 1, 1)),
    },
    "rotation": {
        "300": partial(rotate, 300),
        "1": partial(rotate, 1),
        "16": partial(rotate, 16),
    },
}


def main(arch: str, form: str, *cases: str) -> None:
    """Make the calls of the cases and print their launches."""
    with pretended(arch, form == "first") as device:
        for case in cases or CASES:
            for call, make in CASES[case].items():
                device.launches.clear()
                make()
                for launch in device.launches:
                    print(json.dumps(asdict(Launch(case=case, call=call, **launch))))


if __name__ == "__main__":
    main(*sys.argv[1:])
