"""Our side of the benchmarks: whole runs of train.py in a process of their own, and their times."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from data.prepare import Prepared, prepare
from data.sources import DataConfig
from data.tokenizers import TokenizerConfig

ROOT = Path(__file__).resolve().parent.parent
LOG_EVERY = 10
METER_WINDOW = 50  # steps that a logged speed is the mean of


def machine_line() -> str:
    """Say in one line what the numbers were measured on."""
    name = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        models = [line for line in cpu_info.read_text().splitlines() if "model name" in line]
        name = models[0].partition(":")[2].strip() if models else name
    return (
        f"machine: {name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"{platform.system()}, Python {platform.python_version()}, PyTorch {torch.__version__}"
    )


def data_config(text: str | None, cache_dir: str) -> DataConfig:
    """The text of a comparison: a file, or tiny_shakespeare."""
    return DataConfig(source="tiny_shakespeare", path=text, cache_dir=cache_dir)


def prepare_characters(data: DataConfig, context_length: int) -> Prepared:
    """Prepare the characters of a text; both sides train on the resulting ids."""
    return prepare(data, TokenizerConfig(kind="char"), context_length=context_length)


def run_experiment(
    name: str, folder: Path, data: DataConfig, overrides: list[str]
) -> list[dict[str, Any]]:
    """Train `experiment=name` in `folder` and return the rows of its metrics file.

    Raises:
        RuntimeError: the run failed.
    """
    settings = [
        f"experiment={name}",
        f"runs_dir={folder}",
        f"data.cache_dir={data.cache_dir}",
        "tracker=none",
        "train.samples=0",
        f"train.log_every={LOG_EVERY}",
        *([f"data.path={data.path}"] if data.path else []),
        *overrides,
    ]
    command = [sys.executable, str(ROOT / "train.py"), *settings]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"experiment={name} failed:\n{result.stderr[-2000:]}")
    run = Path((folder / "latest").read_text(encoding="utf-8").strip())
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def training_seconds(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Seconds of training up to each logged step, evaluation and saving left out.

    A logged speed is the mean over the last METER_WINDOW steps, or over all of them if there are
    fewer, so the time of a step follows from its speed and the time METER_WINDOW steps earlier.
    """
    seconds = {0: 0.0}
    tokens = {0: 0}
    for row in rows:
        if "train/tokens_per_s" not in row:
            continue
        step = row["step"]
        tokens[step] = row["train/tokens"]
        begin = max(0, step - METER_WINDOW)
        elapsed = (tokens[step] - tokens[begin]) / row["train/tokens_per_s"]
        seconds[step] = seconds[begin] + elapsed
    return seconds
