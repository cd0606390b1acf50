"""Machine code made once: for all numbers and weights, for every case apart, kept on disk."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import tempfile
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from model.ahead_of_time import KEPT_FOR, AheadOfTime, CompileError, _loaded, code_folder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # on loading the compiler


class Scale(nn.Module):
    """A weight, and a table of the kind that is not in a state dict."""

    def __init__(self, value: float = 2.0, note: str = ""):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), value))
        self.register_buffer("shift", torch.zeros(1), persistent=False)
        self.note = note
        self.build = partial(tensors, 3)
        self.activation = scaled_sum


def scaled_sum(module: Scale, tensors: list[Tensor], begin: int, length: int) -> Tensor:
    """Count how often memory has been read, and sum up a part of it."""
    memory, count = tensors
    count.add_(1)
    return memory.narrow(0, begin, length).sum()[None] * module.weight + module.shift


def make(module: Scale) -> AheadOfTime:
    return AheadOfTime(scaled_sum, module, {})


def tensors(size: int = 40, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(size).to(dtype), torch.zeros(1)]


def key(code: AheadOfTime, case: object = "case") -> str | None:
    return code._key(case)


@pytest.fixture
def compilations(monkeypatch) -> list[int]:
    """Grows with every compilation."""
    counted: list[int] = []
    build = AheadOfTime._build

    def counting(self, *arguments):
        counted.append(1)
        build(self, *arguments)

    monkeypatch.setattr(AheadOfTime, "_build", counting)
    return counted


@pytest.fixture
def empty_disk(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return code_folder()


def test_one_compilation_serves_all_numbers_memories_and_changed_weights(empty_disk, compilations):
    module = Scale()
    code = make(module)
    for size, begin, length in [(40, 0, 3), (40, 5, 7), (40, 39, 1), (40, 0, 40), (40, 0, 1)]:
        memory, count = tensors(size)
        run = code.for_case("case", [memory, count], (1, 5))
        for calls in (1, 2):
            expected = 2 * memory[begin : begin + length].sum()[None]
            torch.testing.assert_close(run([memory, count], begin, length), expected)
            assert count.item() == calls  # what it writes to is written to
    with torch.no_grad():
        module.weight.mul_(3)
        module.shift.add_(1)
    result = run([memory, count], 1, 30)
    torch.testing.assert_close(result, 6 * memory[1:31].sum()[None] + 1)
    assert not result.requires_grad
    assert len(compilations) == 1
    assert [path.suffix for path in empty_disk.iterdir()] == [".pt2"]

    assert code.seconds > 0

    # The next object finds it, in this process or, as if it were another, on disk.
    for forget in (False, True):
        if forget:
            _loaded.clear()
        other = make(Scale(value=5.0))
        result = other.for_case("case", [memory, count], (1, 5))([memory, count], 0, 4)
        torch.testing.assert_close(result, 5 * memory[:4].sum()[None])
        assert len(compilations) == 1
        assert other.seconds == 0

    # A damaged file is no file, even where the damage lies within its code.
    _loaded.clear()
    (path,) = empty_disk.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:300_000] + bytes(200_000) + content[500_000:])
    other = make(Scale(value=7.0))
    result = other.for_case("case", [memory, count], (1, 5))([memory, count], 0, 4)
    torch.testing.assert_close(result, 7 * memory[:4].sum()[None])
    assert len(compilations) == 2
    assert len(list(empty_disk.iterdir())) <= 2


def test_machine_code_keeps_no_module_alive(compilations):
    """Under inference mode, too, as where text is generated."""
    module = Scale()
    code = make(module)
    with torch.inference_mode():
        memory, count = tensors(9)
        assert code.for_case("nine", [memory, count], (1, 5))([memory, count], 0, 9).is_inference()
    weight = weakref.ref(module.weight)
    del code, module
    gc.collect()
    assert weight() is None


def test_a_key_is_the_same_in_another_process_and_for_other_weights():
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.model.test_ahead_of_time import Scale, key, make\n"
        "print(key(make(Scale(value=9.0))))"
    )
    root = Path(__file__).parents[2]
    found = {
        subprocess.run(
            [sys.executable, "-c", program, str(root)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {key(make(Scale()))}


def test_keys_differ_wherever_machine_code_may():
    other = Scale()
    other.activation = tensors
    codes = [make(Scale()), make(other), make(Scale(note="other")), make(Scale().double())]
    strided = Scale()
    strided.weight.data = torch.ones(1, 2)[:, 0]
    codes.append(make(strided))
    private = Scale()
    private._factor = 3.0
    codes.append(make(private))
    codes.append(AheadOfTime(scaled_sum, Scale(), {"size_asserts": False}))
    codes.append(AheadOfTime(tensors, Scale(), {}))
    nested = nn.Sequential(Scale())
    codes.append(AheadOfTime(scaled_sum, nested, {}))
    tied = nn.ModuleList([Scale(), Scale()])
    untied = copy.deepcopy(tied)
    tied[1].weight = tied[0].weight
    codes += [AheadOfTime(scaled_sum, pair, {}) for pair in (tied, untied)]
    keys = [key(code) for code in codes] + [key(codes[0], "other case")]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_what_cannot_be_told_apart_has_no_key():
    """Two of a kind would find each other's machine code on disk."""
    hooked, closed, odd, held = (Scale() for _ in range(4))
    hooked.register_forward_hook(lambda *_: None)
    factor = 3
    closed.activation = lambda x: x * factor
    odd.note = object()
    held.table = torch.ones(2)
    typed = type("Typed", (Scale,), {"__module__": "__main__"})()
    for module in (hooked, closed, odd, held, typed):
        assert key(make(module)) is None


def test_compiling_leaves_the_key_as_it_was(empty_disk, monkeypatch):
    """PyTorch writes into the options that it is given."""
    options = {"size_asserts": False}
    before = AheadOfTime(scaled_sum, Scale(), options)
    name = key(before)
    before.for_case("case", tensors(), (1, 5))
    assert key(before) == key(AheadOfTime(scaled_sum, Scale(), options)) == name
    assert [path.name.split("-")[0] for path in empty_disk.iterdir()] == [name]


def test_a_key_depends_on_the_source_files(monkeypatch):
    before = key(make(Scale()))
    read = Path.read_bytes

    def changed(path: Path) -> bytes:
        return read(path) + b"#" if path.name == "row_attention.py" else read(path)

    monkeypatch.setattr(Path, "read_bytes", changed)
    assert key(make(Scale())) != before


def test_what_has_not_been_used_for_long_is_removed(empty_disk, monkeypatch):
    old, recent = empty_disk.parent / "torch-1" / "old.pt2", empty_disk / "recent.pt2"
    for path in (old, recent):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    month_ago = time.time() - KEPT_FOR - 10
    os.utime(old, (month_ago, month_ago))
    monkeypatch.setattr(
        AheadOfTime, "_build", lambda self, tensors, example, package: package.touch()
    )
    monkeypatch.setattr("model.ahead_of_time._load", load_anything)
    monkeypatch.setattr("model.ahead_of_time._loaded", {})
    make(Scale()).for_case("case", tensors(), (1, 5))
    assert not old.exists()
    assert recent.exists()


def load_anything(path: Path):
    path.stat()
    return lambda inputs: inputs


def test_a_disk_that_keeps_nothing_does_not_stop_it(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(
        AheadOfTime, "_build", lambda self, tensors, example, package: package.touch()
    )
    monkeypatch.setattr("model.ahead_of_time._load", load_anything)
    monkeypatch.setattr("model.ahead_of_time._loaded", {})
    assert make(Scale()).for_case("case", tensors(), (1, 5))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    monkeypatch.setattr(Path, "home", no_home)
    assert code_folder().is_relative_to(tempfile.gettempdir())


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_compiler_that_fails_is_told_in_one_line():
    def broken(module: nn.Module, tensors: list[Tensor], begin: int, length: int) -> Tensor:
        raise TypeError("first line\nsecond line")

    code = AheadOfTime(broken, Scale(), {})
    with pytest.raises(CompileError) as raised:
        code.for_case("case", tensors(), (1, 5))
    assert str(raised.value) == "compiling fails here: first line"
