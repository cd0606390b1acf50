"""Compile a function to machine code ahead of time, keep the code on disk, and call it directly.

`torch.compile` compares each parameter and each size with what it compiled for before every call,
and allocates the results of every step in Python. For a small model that takes longer than the
arithmetic. What PyTorch compiles ahead of time (AOTInductor) has no Python in it, and a program
that finds it on disk need not load the compiler at all.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterable
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[[Any, list[Tensor], int, int], Tensor]
MachineCode = Callable[[list[Tensor]], list[Tensor]]

KEPT_FOR = 30 * 24 * 3600  # seconds that code stays on disk after it was last used


class CompileError(OSError):
    """This machine cannot compile; what it said is in one line."""


class AheadOfTime:
    """`function(module, tensors, begin, length)` as machine code for the CPU.

    `function` takes a list of tensors, which it may write to, and two whole numbers, and returns a
    tensor. One compilation serves all numbers and whatever stands in the tensors and in the
    parameters and buffers of `module`. Every case is compiled for by itself, so a case must name
    what else can change between two calls: types, shapes and strides of the tensors above all, in
    parts whose `repr` says what they are. The result has no gradient.

    Args:
        function: what to compile; it must read no module but the one it is given.
        module: owns the parameters and buffers.
        options: the compiler's own (`torch._inductor.list_options()`).
        log: told in one line when it has to compile, which takes tens of seconds.

    `seconds` counts the time spent on compiling.
    """

    def __init__(
        self,
        function: Function,
        module: nn.Module,
        options: dict[str, Any],
        log: Callable[[str], None] = lambda line: None,
    ):
        self._function = function
        self._module = module
        self._options = options
        self.seconds = 0.0
        self._log = log
        self._weights = list(_weights(module).values())
        self._lock = threading.Lock()
        self._ready: dict[Hashable, Callable[[list[Tensor], int, int], Tensor]] = {}

    def for_case(
        self, case: Hashable, tensors: list[Tensor], example: tuple[int, int]
    ) -> Callable[[list[Tensor], int, int], Tensor]:
        """Return a function of tensors like these and of two numbers, compiled if need be.

        `example` are numbers to trace the function with: possible ones, neither of them 0 or 1 in a
        way that others are not, and as large as will be usual, since by them the compiler decides
        what is worth more than one thread. The case determines them.

        Raises CompileError where compiling fails.
        """
        run = self._ready.get(case)
        if run is None:
            with self._lock:
                if case not in self._ready:
                    code = self._machine_code(case, tensors, example)
                    self._ready[case] = self._direct(code)
                run = self._ready[case]
        return run

    def _direct(self, code: MachineCode) -> Callable[[list[Tensor], int, int], Tensor]:
        def run(tensors: list[Tensor], begin: int, length: int) -> Tensor:
            return code([*tensors, _sizes(begin, length), *self._weights])[0]

        return run

    def _machine_code(
        self, case: Hashable, tensors: list[Tensor], example: tuple[int, int]
    ) -> MachineCode:
        key = self._key(case)
        code = None if key is None else _find(key)
        if code is None:
            self._log("compiling for this model and number of texts: once, some tens of seconds")
            started = time.perf_counter()
            code = self._compile(tensors, example, key)
            self.seconds += time.perf_counter() - started
        return code

    def _compile(
        self, tensors: list[Tensor], example: tuple[int, int], key: str | None
    ) -> MachineCode:
        try:
            with tempfile.TemporaryDirectory() as scratch:
                package = Path(scratch) / "step.pt2"
                self._build(tensors, example, package)
                if key is not None:
                    with contextlib.suppress(OSError):  # full, or not ours: it is compiled again
                        _keep(package, key)
                return _load(package)
        except Exception as error:  # the compiler raises errors of every class
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = lines[0] if lines else type(error).__name__
            raise CompileError(f"compiling fails here: {reason}") from error

    def _build(self, tensors: list[Tensor], example: tuple[int, int], package: Path) -> None:
        from torch._inductor import aoti_compile_and_package
        from torch.export import Dim, export

        sizes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own affairs
            # Others may be using the module, and tracing puts stand-ins in place of parameters.
            module = copy.deepcopy(self._module, memo={id(t): t for t in self._weights})
            weights = {name: tensor.detach() for name, tensor in _weights(module).items()}
            examples = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors]
            program = export(
                _Explicit(self._function, module, list(weights)),
                (examples, _sizes(*example), list(weights.values())),
                dynamic_shapes=([None] * len(tensors), sizes, [None] * len(weights)),
            )
            aoti_compile_and_package(
                program, package_path=str(package), inductor_configs=dict(self._options)
            )

    def _key(self, case: Hashable) -> str | None:
        """A name for the machine code of a case: the same only if all it depends on is.

        None where that cannot be told.
        """
        told = hashlib.sha256()
        own = (case, torch.get_default_dtype(), sorted(self._options.items()))
        try:
            for part in (*own, _plain(self._function), *_description(self._module)):
                told.update(f"{part}\n".encode())
            for path in _sources(self._module):
                told.update(path.read_bytes())
        except (_Unclear, OSError):
            return None
        return told.hexdigest()[:32]


# The compiler takes the sizes of a tensor as symbols, but numbers as constants, to compile anew
# for. The offset keeps sizes from being 0 and 1, which are constants to it as well.
OFFSET = 1 << 30
_ONE = torch.empty(1, 1)


def _sizes(begin: int, length: int) -> Tensor:
    """A tensor whose sizes stand for two numbers."""
    return _ONE.expand(begin + OFFSET, length + OFFSET)


class _Bound(nn.Module):
    """The function of its own module."""

    def __init__(self, function: Function, module: nn.Module):
        super().__init__()
        self.function = function
        self.module = module

    def forward(self, tensors: list[Tensor], begin: int, length: int) -> Tensor:
        return self.function(self.module, tensors, begin, length)


class _Explicit(nn.Module):
    """The function with every tensor it reads as an argument, for PyTorch to trace.

    Parameters as constants of the machine code would be kept alive by it for good.
    """

    def __init__(self, function: Function, module: nn.Module, names: list[str]):
        super().__init__()
        self._names = [f"module.{name}" for name in names]
        self._hidden = [_Bound(function, module)]  # in a list: not a part whose weights are ours

    def forward(self, tensors: list[Tensor], sizes: Tensor, weights: list[Tensor]) -> Any:
        named = dict(zip(self._names, weights, strict=True))
        numbers = (sizes.shape[0] - OFFSET, sizes.shape[1] - OFFSET)
        return torch.func.functional_call(self._hidden[0], named, (tensors, *numbers))


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# --- On disk ------------------------------------------------------------------------------------

_loaded: dict[str, MachineCode] = {}  # by key: PyTorch never unloads what it has loaded


def code_folder() -> Path:
    """Where machine code for this machine and this PyTorch is kept, in the user's cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        try:
            root = Path.home() / ".cache"
        except RuntimeError:  # a user without a home
            root = Path(tempfile.gettempdir())
    return root / "glassgpt" / "compiled" / f"torch-{torch.__version__}-{_processor()}"


def has_compiled() -> bool:
    """Whether compiling has worked on this machine, as far as the disk knows."""
    return any(code_folder().glob("*.pt2"))


@cache
def _processor() -> str:
    """Tells processors apart that do not run each other's machine code."""
    told = [platform.system(), platform.machine(), torch.backends.cpu.get_cpu_capability()]
    with contextlib.suppress(OSError):  # there on Linux
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told += [line for line in lines if line.startswith(("flags", "Features"))][:1]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:12]


def _find(key: str) -> MachineCode | None:
    """The machine code of that name, if it is there and whole."""
    if key not in _loaded:
        for path in code_folder().glob(f"{key}-*.pt2"):
            with contextlib.suppress(OSError, RuntimeError):
                if path.stem == f"{key}-{_digest(path)}":
                    _loaded[key] = _load(path)
                    os.utime(path)
    return _loaded.get(key)


def _keep(package: Path, key: str) -> None:
    """Put machine code where it is looked for, and remove what has not been used for long."""
    folder = code_folder()
    folder.mkdir(parents=True, exist_ok=True)
    # In one step, so that no other program finds half of it.
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        copied = shutil.copyfile(package, Path(beside) / package.name)
        os.replace(copied, folder / f"{key}-{_digest(package)}.pt2")
    for kept in folder.parent.glob("*/*.pt2"):
        if time.time() - kept.stat().st_mtime > KEPT_FOR:
            kept.unlink(missing_ok=True)


def _load(path: Path) -> MachineCode:
    # Its public wrapper, torch._inductor.aoti_load_package, imports the whole compiler.
    from torch._C._aoti import AOTIModelPackageLoader

    code: MachineCode = AOTIModelPackageLoader(str(path), "model", False, 1, -1).boxed_run
    return code


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


# --- What machine code depends on -----------------------------------------------------------------

STATE = frozenset(vars(nn.Module()))  # what every module has; of these only hooks matter


class _Unclear(Exception):
    """Something has no description by which it could be known again."""


def _description(module: nn.Module) -> Iterable[str]:
    """What a module is, but for the numbers in its parameters and buffers."""
    for name, part in module.named_modules():
        yield f"{name} {type(part).__module__}.{type(part).__qualname__}"
        for key, value in sorted(vars(part).items()):
            if key not in STATE or key == "training":
                yield f"{key} {_plain(value)}"
            elif "hooks" in key and value:
                raise _Unclear(f"{name} has {key}")
    for name, tensor in _weights(module).items():
        yield f"{name} {tensor.dtype} {tensor.shape} {tensor.stride()}"


def _plain(value: object) -> str:
    """A `repr` that is the same in another process and tells any two values apart."""
    if isinstance(value, partial):
        return f"{_plain(value.func)} {value.args!r} {value.keywords!r}"
    if isinstance(value, FunctionType):
        if "<" in value.__qualname__ or value.__closure__:
            raise _Unclear(f"{value} may be one of several")
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    if isinstance(value, Tensor) or " at 0x" in text:
        raise _Unclear(text)
    return text


def _sources(module: nn.Module) -> list[Path]:
    """The source files of this package, of `kernels` and of whatever the module is made of."""
    folders = [Path(__file__).parent, Path(__file__).parents[1] / "kernels"]
    files = {path for folder in folders for path in folder.glob("*.py")}
    for part in module.modules():
        values = [getattr(value, "func", value) for value in vars(part).values()]  # of a partial
        functions = [value for value in values if isinstance(value, FunctionType)]
        for kind in (*type(part).__mro__, *functions):
            if kind.__module__.split(".")[0] not in ("torch", "builtins"):
                files.add(_source(kind.__module__))
    return sorted(files)


def _source(module: str) -> Path:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or module == "__main__":  # typed in somewhere, or easily so
        raise _Unclear(f"{module} has no file of its own")
    return Path(file)
