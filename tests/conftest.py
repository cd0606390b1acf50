"""Shared settings and fixtures of the test suite."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Set before any library reads them: no hub, no tracker account, no colours in captured output.
# One thread per process: the models are tiny, and tests share the cores among processes instead.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["WANDB_MODE"] = "offline"
os.environ.setdefault("MPLBACKEND", "Agg")
# Triton kernels run on the CPU, in the interpreter. Triton reads this once, when it is imported.
os.environ["TRITON_INTERPRET"] = "1"
# What is kept on disk for later programs is made anew, once for all processes of the tests.
if "GLASSGPT_TESTS_CACHE" not in os.environ:
    os.environ["GLASSGPT_TESTS_CACHE"] = tempfile.mkdtemp(prefix="glassgpt-tests-")
    atexit.register(shutil.rmtree, os.environ["GLASSGPT_TESTS_CACHE"], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = os.environ["GLASSGPT_TESTS_CACHE"]

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session")
def quick_interpreter() -> None:
    """For tests that run Triton kernels; see `tests.interpreter`."""
    if find_spec("triton") is not None:
        from tests.interpreter import quicken

        quicken()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-share",
        type=int,
        default=0,
        metavar="N",
        help="also run every N-th test marked slow (in name order); -m slow runs them all",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless they are asked for by `-m slow` or `--slow-share`."""
    if "slow" in config.getoption("-m"):
        return
    slow = sorted((item for item in items if item.get_closest_marker("slow")), key=_name)
    share = config.getoption("--slow-share")
    left_out = {_name(item) for i, item in enumerate(slow) if not share or i % share}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if _name(item) in left_out])
        items[:] = [item for item in items if _name(item) not in left_out]


def _name(item: pytest.Item) -> str:
    return item.nodeid
