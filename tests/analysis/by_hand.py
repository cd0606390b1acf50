"""The measures of one layer by loops over float64 matrices: slow and obviously right.

Everything is numpy; of the project's code only the reference of attention is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from analysis.inside import LayerView
from model.blocks import Block
from tests.reference.attention import Problem, rows

Array = NDArray[np.float64]


def array(x: torch.Tensor) -> Array:
    return x.detach().double().numpy()


def problem_of(view: LayerView) -> Problem:
    """A view's call to attention, in the reference's words."""
    spec = view.spec
    return Problem(
        q=array(view.q),
        k=array(view.k),
        v=array(view.v),
        causal=spec.causal,
        window=spec.window,
        sinks=spec.sinks,
        prefix=spec.prefix,
        documents=None if spec.documents is None else spec.documents.numpy(),
        alibi_slopes=None if spec.alibi_slopes is None else array(spec.alibi_slopes),
        softcap=spec.softcap,
        scale=spec.scale,
        sink_logit=None if spec.sink_logit is None else array(spec.sink_logit),
    )


class Layer:
    """A view as whole matrices: weights (B, H, T, T), logits likewise with NaN where invisible."""

    def __init__(self, view: LayerView, keep: torch.Tensor):
        self.view = view
        self.keep = keep.numpy()
        problem = problem_of(view)
        B, H, T, _ = problem.q.shape
        self.B, self.H, self.T = B, H, T
        self.Hkv = problem.k.shape[1]
        self.weights = np.zeros((B, H, T, T))
        self.logits = np.full((B, H, T, T), np.nan)
        for row in rows(problem):
            self.weights[row.b, row.h, row.i, row.keys] = row.weights
            self.logits[row.b, row.h, row.i, row.keys] = row.logits
        self.start = np.array([[problem.document_start(b, i) for i in range(T)] for b in range(B)])
        self.age = np.arange(T) - self.start
        self.visible = (~np.isnan(self.logits[:, 0])).sum(-1)  # (B, T)

    def kept(self, age: int = 0) -> list[tuple[int, int]]:
        """Sequence and row of every row that counts and is at least so old."""
        return [
            (b, i)
            for b in range(self.B)
            for i in range(self.T)
            if self.keep[b, i] and self.age[b, i] >= age
        ]

    def documents(self) -> list[tuple[int, int, list[int]]]:
        """Sequence, first position and kept rows of every document."""
        return [
            (b, s, [i for i in range(self.T) if self.start[b, i] == s and self.keep[b, i]])
            for b in range(self.B)
            for s in sorted(set(self.start[b]))
        ]


def mean(values: list[Any]) -> Any:
    return np.mean(values, axis=0) if values else None


def on_text(
    layer: Layer, block: Block, sample: torch.Tensor, sink_length: int
) -> dict[str, Array | None]:
    """Everything measured on text but the row statistics; None where there are no rows."""
    view, P, start = layer.view, layer.weights, layer.start
    q, k, v = array(view.q), array(view.k), array(view.v)
    group = layer.H // layer.Hkv
    W = array(block.attn.o_proj.weight).T.reshape(layer.H, -1, view.stream_in.shape[2])
    stream_in, stream_out = array(view.stream_in), array(view.stream_out)
    heads = array(view.heads)

    found: dict[str, Any] = {}
    young = [(b, i) for b, i in layer.kept() if layer.age[b, i] < sink_length]
    found["alpha_0"] = mean([P[b, :, i, start[b, i]] for b, i in young])
    found["uniform/alpha_0"] = mean(
        [(P[b, 0, i, start[b, i]] > 0) / layer.visible[b, i] for b, i in young]
    )
    found["sink_rate"] = mean(
        [
            mean([P[b, :, i, s] for i in inside[:sink_length]]) > 0.3
            for b, s, inside in layer.documents()
            if inside[:sink_length] == list(range(s, s + sink_length))
        ]
    )
    for name, x in (("sink_vnorm", v), ("sink_knorm", k)):
        found[name] = mean(
            [
                np.linalg.norm(x[b, :, s], axis=-1)
                / mean([np.linalg.norm(x[b, :, j], axis=-1) for j in inside if j > s])
                for b, s, inside in layer.documents()
                if any(j > s for j in inside)
            ]
        )
    found["sink_hnorm"] = mean(
        [
            np.linalg.norm(stream_out[b, s])
            / mean([np.linalg.norm(stream_out[b, j]) for j in inside if j > s])
            for b, s, inside in layer.documents()
            if any(j > s for j in inside)
        ]
    )

    def cosine(b: int, h: int, i: int, j: int) -> float:
        a, c = q[b, h, i], k[b, h // group, j]
        return a @ c / (np.linalg.norm(a) * np.linalg.norm(c))

    found["sink_cos"] = mean(
        [
            [
                cosine(b, h, i, start[b, i])
                - mean([cosine(b, h, i, j) for j in range(start[b, i] + 1, i + 1)])
                for h in range(layer.H)
            ]
            for b, i in layer.kept(age=1)
        ]
    )
    sampled = [(b, int(i)) for b, chosen in enumerate(sample) for i in chosen]
    counted = [(b, i) for b, i in sampled if layer.keep[b, i]]

    def written(b: int, h: int, i: int) -> list[float]:
        return [P[b, h, i, j] * np.linalg.norm(v[b, h // group, j] @ W[h]) for j in range(layer.T)]

    found["sink_write"] = mean(
        [
            [written(b, h, i)[start[b, i]] / sum(written(b, h, i)) for h in range(layer.H)]
            for b, i in counted
            if layer.age[b, i] >= 1
        ]
    )
    found["logit_std"] = mean(
        [np.nanstd(layer.logits[b, :, i], axis=-1) for b, i in counted if layer.age[b, i] >= 8]
    )
    found["write"] = mean(
        [[np.linalg.norm(heads[b, h, i] @ W[h]) for h in range(layer.H)] for b, i in layer.kept()]
    ) / mean([np.linalg.norm(stream_in[b, i]) for b, i in layer.kept()])
    found["prev_token_text"] = mean([P[b, :, i, i - 1] for b, i in layer.kept(age=1)])
    found["uniform/prev_token_text"] = mean(
        [(P[b, 0, i, i - 1] > 0) / layer.visible[b, i] for b, i in layer.kept(age=1)]
    )
    sizes = [np.abs(stream_out[b, layer.keep[b]]) for b in range(layer.B) if layer.keep[b].any()]
    found["massive_count"] = mean([((x > 100) & (x >= 1000 * np.median(x))).sum() for x in sizes])
    found["massive_max"] = mean([x.max() for x in sizes])
    found["massive_max_over_median"] = mean([x.max() / np.median(x) for x in sizes])
    return found


def on_repeats(layer: Layer, period: int) -> dict[str, Array]:
    """The head detectors on [BOS] r r."""
    P, found = layer.weights, {}
    second = range(period + 1, 2 * period + 1)
    targets = {
        "prev_token": [(i, i - 1) for i in range(1, 2 * period + 1)],
        "duplicate": [(i, i - period) for i in second],
        "induction": [(i, i - period + 1) for i in second],
    }
    for name, pairs in targets.items():
        found[name] = mean([P[b, :, i, j] for b in range(layer.B) for i, j in pairs])
        found[f"uniform/{name}"] = mean(
            [(P[b, 0, i, j] > 0) / layer.visible[b, i] for b in range(layer.B) for i, j in pairs]
        )
    return found
