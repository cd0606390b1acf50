"""Tiny runs for the tests of training: seconds on a CPU, with every part real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train import train
from training.config import Config, from_dict

TEXT = "".join(
    f"{speaker}:\nWhat say you to number {n}, my lord, and to the {n * n} that follow?\n\n"
    for n, speaker in enumerate(["ROMEO", "JULIET", "NURSE", "FRIAR"] * 40)
)


def settings(folder: Path, **dotted: Any) -> dict[str, Any]:
    """Plain settings of a tiny run under `folder`; keys like ``train__max_steps`` change them."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT, encoding="utf-8")
    plain: dict[str, Any] = {
        "name": "tiny",
        "device": "cpu",
        "runs_dir": str(folder / "runs"),
        "model": {"context_length": 16, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 16},
        "data": {"path": str(text), "cache_dir": str(folder / "cache")},
        "tokenizer": {"kind": "char"},
        "optim": {"warmup_steps": 2},
        "train": {
            "max_steps": 6,
            "batch_size": 4,
            "log_every": 1,
            "eval_every": 3,
            "eval_windows": 4,
            "checkpoint_every": 3,
            "samples": 1,
            "sample_tokens": 5,
        },
        "telemetry": {"probe_windows": 4, "report": False},
        "tracker": {"kind": "none"},
    }
    for key, value in dotted.items():
        *groups, leaf = key.split("__")
        place = plain
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = value
    return plain


def config(folder: Path, **dotted: Any) -> Config:
    """The configuration of `settings`."""
    return from_dict(settings(folder, **dotted))


def run(folder: Path, overrides: list[str] | None = None, **dotted: Any) -> Path:
    """Train a tiny run to its end and return its folder."""
    train(config(folder, **dotted), overrides or [])
    return newest(folder)


def newest(folder: Path) -> Path:
    """The run that ``runs/latest`` names."""
    return Path((folder / "runs" / "latest").read_text(encoding="utf-8").strip())


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics file, without the values that clocks decide."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if "tokens_per_s" not in key}
        for line in lines
    ]
