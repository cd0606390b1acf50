"""Devices, precision, compilation, seeds: what a name means on a given machine, or why not."""

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from training import devices
from training.devices import (
    autocast,
    device_name,
    grad_scaler,
    maybe_compile,
    probe_compiler,
    resolve_device,
    resolve_dtype,
    seed_everything,
)
from training.distributed import Ranks

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary GPU")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has no GPU of any kind."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


# --- Device ---------------------------------------------------------------------------------------


def test_a_cpu_run_makes_no_cuda_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **options: object) -> None:
        raise AssertionError("CUDA was called")

    for name in ("is_available", "device_count", "is_bf16_supported", "get_device_name", "init"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    device = resolve_device("cpu")
    dtype = resolve_dtype("auto", device)
    with autocast(device, dtype):
        pass
    assert not grad_scaler(device, dtype).is_enabled()
    assert device_name(device) == "cpu"
    assert not maybe_compile(nn.Linear(2, 2), "auto", device, log=lambda line: None)
    seed_everything(1)
    assert not torch.cuda.is_initialized()


@pytest.mark.usefixtures("no_gpu")
def test_auto_falls_back_to_the_cpu() -> None:
    assert resolve_device("auto") == CPU


def test_auto_prefers_mps_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("mps")


@pytest.mark.usefixtures("two_gpus")
def test_each_rank_takes_its_own_gpu() -> None:
    assert resolve_device("auto") == CUDA
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert resolve_device("cuda", Ranks(3, 4, local_rank=1)) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="needs GPU number 2, this machine has 2"):
        resolve_device("cuda", Ranks(2, 3, local_rank=2))
    with pytest.raises(ValueError, match=r"device=cuda:1 names one GPU for 2 ranks"):
        resolve_device("cuda:1", Ranks(0, 2, 0))


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", r"device=cuda but this PyTorch .*: use device=auto or device=cpu"),
        ("cuda:1", r"device=cuda:1 but this PyTorch"),
        ("mps", r"device=mps but this machine has no usable MPS"),
        ("cdua", r"device=cdua is not one of .*did you mean 'cuda'"),
        ("cuda:x", r"device=cuda:x is not one of .*did you mean 'cuda:N'"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        resolve_device(name)
    assert "\n" not in str(error.value)


# --- Precision ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_gpus")
def test_auto_precision_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("mps")) == torch.float32
    assert resolve_dtype("auto", CUDA) == torch.bfloat16
    assert resolve_dtype("fp16", CUDA) == torch.float16
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    assert resolve_dtype("auto", CUDA) == torch.float32
    with pytest.raises(ValueError, match="dtype=bf16 but Imaginary GPU only emulates it"):
        resolve_dtype("bf16", CUDA)


def test_precision_errors_name_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"dtype=fp16 needs a GPU.*use dtype=fp32 or dtype=bf16"):
        resolve_dtype("fp16", CPU)
    with pytest.raises(ValueError, match=r"dtype=bf61 is not one of .*did you mean 'bf16'"):
        resolve_dtype("bf61", CPU)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_autocast_computes_products_in_the_type(name: str) -> None:
    dtype = resolve_dtype(name, CPU)
    layer = nn.Linear(4, 4)
    with autocast(CPU, dtype):
        assert layer(torch.ones(1, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32


def test_only_float16_scales_its_loss() -> None:
    assert not grad_scaler(CPU, torch.bfloat16).is_enabled()
    assert grad_scaler(CPU, torch.float16).is_enabled()


# --- Compilation ----------------------------------------------------------------------------------


@pytest.fixture
def broken_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that nothing can be compiled here."""

    def fail(function: object) -> None:
        raise RuntimeError("no C++ compiler\nand a long explanation")

    monkeypatch.setattr(torch, "compile", fail)


@pytest.fixture
def working_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the compiler works, without waiting for it."""
    monkeypatch.setattr(devices, "probe_compiler", lambda device: None)


@pytest.mark.usefixtures("broken_compiler")
def test_without_a_compiler_true_fails_and_auto_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, lines = nn.Linear(2, 2), []
    assert probe_compiler(CPU) == "no C++ compiler"
    with pytest.raises(ValueError, match=r"compile=true .*\(no C\+\+ compiler\)") as error:
        maybe_compile(model, "true", CPU)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: None)  # there is no GPU here
    assert not maybe_compile(model, "auto", CUDA, log=lines.append)
    assert lines == ["compile=auto: eager, because compiling fails here (no C++ compiler)"]


@pytest.mark.usefixtures("working_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, on loading the compiler
@pytest.mark.parametrize("mode", ["true", "True"])
def test_compiling_keeps_the_names_of_the_parameters(mode: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    names = list(model.state_dict())
    assert maybe_compile(model, mode, CPU, log=lambda line: None)
    assert model._compiled_call_impl is not None
    assert list(model.state_dict()) == names


@pytest.mark.usefixtures("working_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, on loading the compiler
def test_modes_decide() -> None:
    lines: list[str] = []
    assert not maybe_compile(nn.Linear(2, 2), "false", CUDA, log=lines.append)
    assert not maybe_compile(nn.Linear(2, 2), "auto", CPU, log=lines.append)
    assert lines == ["compile=auto: eager on cpu"]
    assert maybe_compile(nn.Linear(2, 2), "auto", CUDA, log=lines.append)
    with pytest.raises(ValueError, match=r"compile=ture is not one of .*did you mean 'true'"):
        maybe_compile(nn.Linear(2, 2), "ture", CPU)


# --- Reproducibility ------------------------------------------------------------------------------


@pytest.fixture
def restore_determinism(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    seed_everything(0, deterministic=False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_seed_fixes_every_generator_and_ranks_differ() -> None:
    seed_everything(7)
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(7, rank=1)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


@pytest.mark.usefixtures("restore_determinism")
def test_the_deterministic_switch_goes_on_and_off() -> None:
    seed_everything(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    seed_everything(1, deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
