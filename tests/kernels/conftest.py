"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import pytest
import torch

from kernels import chunks


@pytest.fixture(autouse=True, scope="session")
def interpreter(quick_interpreter: None) -> None:
    """Many of these tests run Triton kernels."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are fastest on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short sequences into several chunks, as long ones are."""
    monkeypatch.setattr(chunks, "MAX_ROWS", 24)
    monkeypatch.setattr(chunks, "MIN_ROWS", 4)
    monkeypatch.setattr(chunks, "CPU_LOGITS_PER_THREAD", 2**12)
