"""Benchmarks are scripts beside one another, imported by name from their own folder."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the folder of the benchmarks on the path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
