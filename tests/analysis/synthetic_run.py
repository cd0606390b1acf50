"""Run folders with the measurements of heads that never were: sinks form, detectors light up.

Values are smooth functions of the step with fixed random numbers per head, so a test knows where
the strongest sink is, and drawing does not wait for training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from analysis.event_files import Event, append_events
from analysis.head_files import (
    HeadRecord,
    Measure,
    Patterns,
    write_patterns,
    write_record,
)
from analysis.metrics_file import encode_row

TEXT = "ROMEO:\nWhat light through yonder window breaks? It is the east, and Juliet is the sun."
CONFIG = """\
name: {name}
model:
  vocab_size: 65
  context_length: 128
  n_layer: {n_layer}
  n_head: {n_head}
  n_kv_head: {n_kv_head}
  n_embd: {n_embd}
train:
  max_steps: {max_steps}
  batch_size: 32
tracker:
  notes: {notes}
"""


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """What a made-up run looks like.

    Attributes:
        steps: steps taken of `max_steps`.
        train_records, probe_records: how many of each, spread over the steps; 0: none.
        tokens: of the patterns; empty: no patterns.
    """

    name: str = "synthetic"
    status: str = "done"
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int = 2
    steps: int = 1000
    max_steps: int = 1000
    train_records: int = 20
    probe_records: int = 6
    tokens: list[str] = field(default_factory=lambda: list(TEXT[:48]))
    null_mass: bool = False
    notes: str = "plain"
    seed: int = 0

    @property
    def strength(self) -> np.ndarray:
        """How much of a sink each head becomes, (n_layer, n_head) in 0..1."""
        return np.random.default_rng(self.seed).beta(0.6, 1.2, (self.n_layer, self.n_head))


def write_run(run: Path, made: Synthetic | None = None) -> Path:
    """Write the folder of a made-up run and return it."""
    made = made or Synthetic()
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(
        CONFIG.format(
            name=made.name,
            n_layer=made.n_layer,
            n_head=made.n_head,
            n_kv_head=made.n_kv_head,
            n_embd=32 * made.n_head,
            max_steps=made.max_steps,
            notes=json.dumps(made.notes),
        ),
        encoding="utf-8",
    )
    (run / "status").write_text(f"{made.status}\n", encoding="utf-8")
    (run / "log.txt").write_text(
        f"{made.name}: a run that never was\ndevice cpu, float32, 1 rank(s); attention sdpa\n",
        encoding="utf-8",
    )
    (run / "metrics.jsonl").write_bytes(b"".join(_metrics(made)))
    for step in spread(made.steps, made.train_records, first=1):
        write_record(run, _train_record(made, step))
    probes = spread(made.steps, made.probe_records, first=0)
    for step in probes:
        write_record(run, _probe_record(made, step))
    if probes and made.tokens:
        write_patterns(run, _patterns(made))
    if probes:
        append_events(run, _events(made))
    return run


def spread(steps: int, count: int, *, first: int) -> list[int]:
    """Steps of records: dense early, then even, as a run measures them."""
    if not count:
        return []
    even = np.linspace(first, steps, count)
    early = np.geomspace(1, steps, count)
    return sorted({first, steps, *np.minimum(even, early).astype(int).tolist()} - {0} | {first})


def sink(made: Synthetic, step: int) -> np.ndarray:
    """Mass on the first token per head: from 0.07 to the head's strength around step 150."""
    late = 1 / (1 + np.exp(-(np.log(max(step, 1)) - np.log(150)) * 3))
    return 0.07 + (made.strength * 0.9 - 0.07).clip(min=0) * late


def _metrics(made: Synthetic) -> list[bytes]:
    lines, noise = [], np.random.default_rng(made.seed)
    for step in range(0, made.steps + 1, 10):
        loss = 1.5 + 2.7 * np.exp(-step / 120)
        if step:
            values = {
                "train/loss": loss + 0.04 * noise.normal(),
                "train/lr": 2e-3 * min(1, step / 50) * (1 - 0.9 * step / made.max_steps),
                "train/tokens_per_s": 22_000 + 500 * noise.normal(),
                "train/tokens": step * 32 * 128,
            }
            lines.append(encode_row(step, values))
        if step % 250 == 0:
            bits = loss / np.log(2)
            values = {"val/loss": loss + 0.05, "val/perplexity": np.exp(loss + 0.05)}
            lines.append(encode_row(step, values | {"val/bits_per_byte": bits}))
    return lines


def _train_record(made: Synthetic, step: int) -> HeadRecord:
    on_sink = sink(made, step) * 0.9
    entropy = (0.95 - 0.8 * on_sink).clip(0.02)
    measures = {
        "entropy_norm": Measure("head", entropy),
        "entropy": Measure("head", entropy * 3.9),
        "sink_mass_1": Measure("head", on_sink),
        "max_logit": Measure("head", 2 + 30 * on_sink + np.log1p(step)),
        "uniform/sink_mass_1": Measure("layer", np.full(made.n_layer, 0.035)),
    }
    if made.null_mass:
        measures["null_mass"] = Measure("head", 0.3 * made.strength[::-1])
    return HeadRecord("train", step, tuple(range(made.n_layer)), measures)


def _probe_record(made: Synthetic, step: int) -> HeadRecord:
    noise, on_sink = np.random.default_rng(1), sink(made, step)
    shape, late = (made.n_layer, made.n_head), step / (step + 300)
    kv_sink = on_sink[:, : made.n_kv_head]
    layer = np.ones(made.n_layer)
    detectors = {name: noise.beta(0.5, 4, shape) * late for name in DETECTORS}
    measures = {name: Measure("head", 0.02 + values) for name, values in detectors.items()}
    measures |= {f"uniform/{name}": Measure("layer", 0.03 * layer) for name in DETECTORS}
    measures |= {
        "alpha_0": Measure("head", on_sink),
        "uniform/alpha_0": Measure("layer", 0.0741 * layer),
        "entropy_norm": Measure("head", 0.95 - 0.8 * on_sink),
        "sink_vnorm": Measure("kv_head", 1 - 0.8 * kv_sink),
        "sink_hnorm": Measure("layer", 1 + 5 * late * np.arange(made.n_layer)),
        "massive_max_over_median": Measure("layer", 5 + 300 * late * np.arange(made.n_layer)),
        "loss": Measure("scalar", np.array(2.0)),
    }
    return HeadRecord("probe", step, tuple(range(made.n_layer)), measures)


DETECTORS = ("prev_token", "prev_token_text", "duplicate", "induction")


def _patterns(made: Synthetic) -> Patterns:
    size, noise = len(made.tokens), np.random.default_rng(2)
    logits = 2 * noise.normal(size=(made.n_layer, made.n_head, size, size))
    logits[..., 0] += 5 * made.strength[..., None]
    logits[..., ~np.tri(size, dtype=bool)] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    null = np.full((made.n_layer, made.n_head, size), 0.25 if made.null_mass else 0.0)
    if made.null_mass:
        weights *= 0.75
    return Patterns(
        step=made.steps,
        layers=tuple(range(made.n_layer)),
        tokens=made.tokens,
        weights=weights.astype(np.float32),
        null_mass=null.astype(np.float32),
    )


def _events(made: Synthetic) -> list[Event]:
    probes = spread(made.steps, made.probe_records, first=0)
    events = []
    for layer, head in np.argwhere(made.strength > 0.5).tolist():
        for step in probes:
            value = float(sink(made, step)[layer, head])
            if value > 0.3:
                text = f"layer {layer}, head {head}: sink formed, alpha_0 {value:.3f} > 0.3"
                events.append(
                    Event(
                        step=step,
                        seen=step,
                        kind="sink_formed",
                        layer=layer,
                        head=head,
                        value=value,
                        limit=0.3,
                        text=text,
                    )
                )
                break
    return events
