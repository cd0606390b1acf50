"""Every number of a training record, against whole matrices of weights from the same q and k."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import model.attention as attention_module
import train as train_module
from analysis.head_files import read_records
from data.windows import IGNORE
from tests.training import runs
from training.optim import Optimizers

STEP = 8
VARIANTS = {
    "grouped queries": {},
    "windows": {"model__windows": [4, 0]},
    "windows with sinks": {"model__windows": [4, 0], "model__window_sinks": 2},
    "documents": {"data__mode": "document", "model__windows": [5, 0]},
    "documents, prefix": {"data__mode": "document", "model__mask": "prefix", "model__prefix": 3},
    "bos_aligned": {"data__mode": "bos_aligned", "tokenizer": {"kind": "bpe", "vocab_size": 280}},
    "learned sink logit": {"model__sink_logit": "learned"},
    "zero sink logit": {"model__sink_logit": "zero", "model__qk_norm": True},
    "alibi, soft-cap": {"model__position": "alibi", "model__softcap": 2.0},
    "one layer": {"telemetry__layers": [1]},
}


class Seen:
    """What went through attention in one training step, in the order of the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []  # q, k and spec of each layer of each micro-step
        self.batches: list = []
        self.gradients: dict[str, torch.Tensor] = {}


def observed_step(folder: Path, monkeypatch: pytest.MonkeyPatch, **options) -> tuple[Seen, Path]:
    """Train a tiny model for `STEP` steps and note what the last one computed with."""
    seen = Seen()
    taken, watching = 0, False
    attention, take_step = attention_module.attention, train_module.take_step
    clip = Optimizers.clip_grad_norm

    def watched_attention(q, k, v, spec, **rest):
        if watching:
            now = spec
            if spec.sink_logit is not None:  # the step will change it
                now = replace(spec, sink_logit=spec.sink_logit.detach().clone())
            seen.calls.append((q.detach().double().numpy(), k.detach().double().numpy(), now))
        return attention(q, k, v, spec, **rest)

    def watched_step(model, optimizers, scaler, batches, **rest):
        nonlocal taken, watching
        taken += 1
        watching = taken == STEP
        if watching:
            seen.batches = list(batches)
        result = take_step(model, optimizers, scaler, batches, **rest)
        watching = False
        return result

    def watched_clip(optimizers):
        if watching:
            seen.gradients = {
                name: p.grad.double().clone() for p, name in optimizers._names.items()
            }
        return clip(optimizers)

    monkeypatch.setattr(attention_module, "attention", watched_attention)
    monkeypatch.setattr(train_module, "take_step", watched_step)
    monkeypatch.setattr(Optimizers, "clip_grad_norm", watched_clip)
    documents = [runs.TEXT[n : n + 3 + n % 23] for n in range(0, 3000, 11)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "texts.jsonl").write_text(lines, encoding="utf-8")
    shape = {"model__n_head": 4, "model__n_kv_head": 2, "model__init_std": 0.5}
    run = runs.run(
        folder,
        data__path=str(folder / "texts.jsonl"),
        train__max_steps=STEP,
        train__micro_batch_size=2,
        train__eval_every=STEP,
        **shape | options,
    )
    return seen, run


def sees(spec, documents: list[int], i: int, j: int) -> bool:
    """The rule, with positions counted from the beginning of the document."""
    if documents[i] != documents[j]:
        return False
    start = documents.index(documents[i])
    if i - start < spec.prefix and j - start < spec.prefix:
        return True
    if j > i:
        return False
    return spec.window is None or i - j < spec.window or j - start < spec.sinks


def measured_by_hand(seen: Seen, layers: list[int], n_layer: int) -> dict[str, np.ndarray]:
    """Means over rows, one row at a time, in float64: (layers, H) or (layers,)."""
    rows: dict[tuple[str, int], list] = defaultdict(list)
    for number, (q, k, spec) in enumerate(seen.calls):
        layer, batch = number % n_layer, seen.batches[number // n_layer]
        B, H, T, D = q.shape
        for b in range(B):
            documents = [0] * T if batch.documents is None else batch.documents[b].tolist()
            for i in range(T):
                if batch.targets[b, i] == IGNORE:
                    continue
                keys = [j for j in range(T) if sees(spec, documents, i, j)]
                start = documents.index(documents[i])
                values = defaultdict(list)
                for h in range(H):
                    products = k[b, h * k.shape[1] // H, keys] @ q[b, h, i] / math.sqrt(D)
                    for name, value in row_of(products, h, keys, i, start, spec).items():
                        values[name].append(value)
                n = len(keys)
                values["uniform/entropy"] = math.log(n)
                values["uniform/max_prob"] = 1 / n
                values["uniform/mean_distance"] = sum(i - j for j in keys) / n
                for count in (1, 4):
                    inside = sum(j - start < count for j in keys)
                    values[f"uniform/sink_mass_{count}"] = inside / n
                age = i - start
                if age >= 1:
                    values["distance_norm"] = np.array(values["mean_distance"]) / age
                    values["uniform/distance_norm"] = values["uniform/mean_distance"] / age
                if n >= 2:
                    values["entropy_norm"] = np.array(values["entropy"]) / math.log(n)
                for name, value in values.items():
                    if counts(name.removeprefix("uniform/"), age):
                        rows[name, layer].append(value)
    return {
        name: np.array(
            [
                (np.max if name == "max_logit" else np.mean)(rows[name, layer], axis=0)
                for layer in layers
            ]
        )
        for name in {name for name, _ in rows}
    }


def row_of(products, h: int, keys: list[int], i: int, start: int, spec) -> dict[str, float]:
    """The statistics of one row of one head, from its scaled products with the visible keys."""
    logits = products
    if spec.softcap is not None:
        logits = spec.softcap * np.tanh(logits / spec.softcap)
    if spec.alibi_slopes is not None:
        logits = logits - float(spec.alibi_slopes[h]) * np.abs(i - np.array(keys))
    weights = np.exp(logits)
    null = 0.0 if spec.sink_logit is None else math.exp(float(spec.sink_logit[h]))
    real = weights / weights.sum()
    full = weights / (weights.sum() + null)
    first = np.array(keys) - start
    found = {
        "entropy": -(real * np.log(real)).sum(),
        "max_prob": full.max(),
        "mean_distance": (real * (i - np.array(keys))).sum(),
        "sink_mass_1": full[first < 1].sum(),
        "sink_mass_4": full[first < 4].sum(),
        "max_logit": products.max(),
    }
    if spec.sink_logit is not None:
        found["null_mass"] = null / (weights.sum() + null)
    return found


def counts(name: str, age: int) -> bool:
    if name in ("max_logit", "null_mass", "entropy_norm"):  # the last has its own condition
        return True
    return age >= (4 if name == "sink_mass_4" else 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_number_is_what_whole_matrices_give(tmp_path, monkeypatch, variant):
    seen, run = observed_step(tmp_path, monkeypatch, **VARIANTS[variant])
    record = read_records(run, "train")[-1]
    layers = VARIANTS[variant].get("telemetry__layers", [0, 1])
    assert record.step == STEP
    assert record.layers == tuple(layers)
    assert len(seen.calls) == 2 * len(seen.batches) == 4

    expected = measured_by_hand(seen, layers, n_layer=2)
    for projection in "qkvo":
        expected[f"grad_norm_{projection}"] = np.array(
            [
                seen.gradients[f"blocks.{layer}.attn.{projection}_proj.weight"].norm().item()
                for layer in layers
            ]
        )
    assert set(record.measures) == set(expected)
    for name, measure in record.measures.items():
        np.testing.assert_allclose(
            measure.values, expected[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    entropy = record.measures["entropy_norm"].values
    assert entropy.max() < 0.99  # the heads do look somewhere
