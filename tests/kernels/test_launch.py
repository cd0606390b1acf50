"""Launches as Triton makes them for a GPU, up to the moment when the kernel would run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def launched(arch: str, form: str, *cases: str) -> list[dict[str, Any]]:
    """The launches of `tests.kernels.launches`, made in a process where Triton compiles."""
    command = [sys.executable, "-m", "tests.kernels.launches", arch, form, *cases]
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_compiled_once(launches: list[dict[str, Any]]) -> None:
    """Only the first call of a case compiles, and every launch fits its kernel."""
    first = {}
    for launch in launches:
        assert not launch["wrong"], launch
        kernel = launch["kernel"], launch["case"], launch["arguments"].get("BLOCK_SPLITS")
        call = first.setdefault(kernel, launch["call"])
        assert launch["call"] == call or not launch["new"], (*kernel, launch["call"])


@pytest.fixture(scope="module")
def launches() -> list[dict[str, Any]]:
    """All cases on sm_90, compiled to Triton's first form."""
    return launched("sm_90", "first")


def test_a_kernel_is_compiled_once_for_all_lengths(launches: list[dict[str, Any]]) -> None:
    assert len({(launch["case"], launch["call"]) for launch in launches}) > 20
    assert_compiled_once(launches)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_machine_code_fits_its_launches(arch: str) -> None:
    launches = launched(arch, "code", "plain", "everything", "decoding, everything", "rotation")
    assert {launch["new"] for launch in launches} == {True, False}
    assert_compiled_once(launches)


def test_arguments_and_grids_are_those_of_the_call(launches: list[dict[str, Any]]) -> None:
    called = ("everything", "301")
    found = [launch for launch in launches if (launch["case"], launch["call"]) == called]
    by_name = {launch["kernel"]: launch for launch in found}
    grids = {name: launch["grid"] for name, launch in by_name.items()}
    assert grids == {
        "forward_kernel": [3, 8, 1],  # 128 rows in a tile; 2 sequences of 4 heads
        "delta_kernel": [5, 8, 1],  # 64 rows
        "backward_keys_kernel": [3, 4, 1],  # 128 keys; 2 sequences of 2 key heads
        "backward_queries_kernel": [3, 8, 1],
        "column_mass_kernel": [3, 8, 1],
    }
    rows, keys, tokens = [2, 4, 301], [2, 2, 301, 64], [2, 301]
    shared = {
        "Q": [2, 4, 301, 64],
        "K": keys,
        "KvLengths": [2],
        "DocStarts": tokens,
        "DocEnds": tokens,
        "Slopes": [4],
        "stride_qb": 301 * 4 * 64,
        "stride_qh": 64,
        "stride_qt": 4 * 64,
        "stride_kb": 301 * 2 * 64,
        "stride_kt": 2 * 64,
        "T": 301,
        "S": 301,
        "scale": 0.125,
        "softcap": 30.0,
        "window": 16,
        "sinks": 16,
        "prefix": 16,
        "GROUP": 2,
    }
    forward = shared | {
        "V": keys,
        "Out": [2, 4, 301, 64],
        "Entropy": rows,
        "NullMass": rows,
        "SinkMass": [*rows, 3],
        "SinkLogit": [4],
        "COUNTS": [1, 4, 16],
    }
    backward = shared | {"V": keys, "DOut": [2, 4, 301, 64], "Delta": rows, "DEntropy": rows}
    expected = {
        "forward_kernel": forward,
        "backward_keys_kernel": backward | {"DKeys": [1, *keys], "B": 2, "SPLITS": 1},
        "backward_queries_kernel": backward | {"DSlopes": [2, 4, 3], "stride_dqt": 4 * 64},
        "column_mass_kernel": shared | {"Lse": rows, "Mass": rows},
        "delta_kernel": {"Entropy": rows, "DLse": rows, "DSinkLogit": [2, 4, 5], "T": 301},
    }
    for name, values in expected.items():
        arguments = by_name[name]["arguments"]
        assert {key: arguments[key] for key in values} == values, name
