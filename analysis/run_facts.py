"""The headline of a run: what was trained, how far, how well, how fast."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Any

import numpy as np

from analysis.metrics_file import Row
from analysis.plots import series
from analysis.run_record import RunRecord
from model.config import ModelConfig
from model.size import parameter_count


def describe(run: RunRecord) -> dict[str, str]:
    """Return the facts that can be told from a run's folder, by their name for people.

    What the folder does not say is left out.
    """
    facts = {
        "status": run.status,
        "steps": _steps(run),
        "tokens": _count(_last(run.rows, "train/tokens")),
        "parameters": _count(parameters(run)),
        **_best(run.rows),
        "speed": _speed(run),
        "training time": training_time(run),
        "started": _started(run),
        "last measured": _last_measured(run),
        "computed on": _device(run),
    }
    return {name: value for name, value in facts.items() if value}


def parameters(run: RunRecord) -> int | None:
    """Return the number of parameters, worked out from the configuration; None if it cannot be."""
    try:
        return parameter_count(ModelConfig.from_dict(run.setting("model")))
    except (TypeError, ValueError, AttributeError):  # of another version, or not there
        return None


def training_time(run: RunRecord) -> str:
    """Return the time spent on training steps, without evaluation and saving; "" if unknown.

    Each stretch between two logged steps is taken to have had the speed logged at its end.
    """
    speed = series(run.rows, "train/tokens_per_s")
    tokens = _tokens_per_step(run)
    if tokens is None or not len(speed.steps) or not (speed.values > 0).all():
        return ""
    seconds = float((np.diff(speed.steps, prepend=0) * tokens / speed.values).sum())
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    words = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
    return f"about {words}"


def _steps(run: RunRecord) -> str:
    step = max((row["step"] for row in run.rows), default=0)
    planned = run.setting("train.max_steps")
    return f"{step:,} of {planned:,}" if isinstance(planned, int) else f"{step:,}"


def _best(rows: list[Row]) -> dict[str, str]:
    evaluated = [row for row in rows if math.isfinite(row.get("val/loss", math.nan))]
    if not evaluated:
        return {}
    best = min(evaluated, key=lambda row: row["val/loss"])
    facts = {"best validation loss": f"{best['val/loss']:.4f} at step {best['step']:,}"}
    if "val/perplexity" in best:
        facts["perplexity there"] = f"{best['val/perplexity']:.2f}"
    if "val/bits_per_byte" in best:
        facts["bits per byte there"] = f"{best['val/bits_per_byte']:.4f}"
    return facts


def _speed(run: RunRecord) -> str:
    speed = series(run.rows, "train/tokens_per_s").values
    return f"{np.median(speed):,.0f} tokens/s (median)" if len(speed) else ""


def _tokens_per_step(run: RunRecord) -> int | None:
    batch, context = run.setting("train.batch_size"), run.setting("model.context_length")
    return batch * context if isinstance(batch, int) and isinstance(context, int) else None


def _started(run: RunRecord) -> str:
    found = re.match(r"(\d{4}-\d\d-\d\d)_(\d\d)-(\d\d)-\d\d", run.path.resolve().name)
    return f"{found[1]} {found[2]}:{found[3]}" if found else ""


def _last_measured(run: RunRecord) -> str:
    path = run.path / "metrics.jsonl"
    if not path.is_file():
        return ""
    return datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")


def _device(run: RunRecord) -> str:
    found = re.findall(r"^device (.+)$", run.log, flags=re.MULTILINE)
    return found[-1].strip() if found else ""


def _last(rows: list[Row], key: str) -> Any:
    return next((row[key] for row in reversed(rows) if key in row), None)


def _count(number: float | None) -> str:
    return f"{number:,.0f}" if number else ""
