"""From one number per row to one number per head: exact means of attention's row statistics.

A row is a query position. Which rows count depends on the statistic: the first token of a document
sees itself alone, so its entropy says nothing, and a row without a target (padding) says nothing at
all. Every mean is kept as a sum and a count until all micro-steps and ranks are in, so it is the
mean over rows however they were shared out.

Beside each mean stands that of a uniform head, whose logits are all equal, over the same rows. Both
go through the same sums; only the rows differ.

    measure         of each row                                      rows that count
    entropy         entropy over the real keys, in nats              age >= 1
    entropy_norm    the same / log(visible keys)                     two or more visible keys
    max_prob        largest weight                                   age >= 1
    mean_distance   mean distance to what is looked at, in tokens    age >= 1
    distance_norm   the same / age                                   age >= 1
    sink_mass_k     weight on the document's first k tokens          age >= k
    null_mass       weight on "attend to nothing"                    all
    max_logit       largest logit, as a maximum over rows            all

Age is the position inside the document. Rows without a target are out everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.head_files import Measure
from data.windows import IGNORE
from kernels.attention import AttentionOutput, Stats
from kernels.visibility import document_ends, document_starts
from model.config import ModelConfig

SINK_KEYS = (1, 4)  # sink_mass is measured over this many first tokens


def wanted_stats(config: ModelConfig) -> Stats:
    """The row statistics that `head_sums` reads."""
    return Stats(
        entropy_tokens=True,
        max_logit=True,
        max_prob=True,
        mean_distance=True,
        null_mass=config.sink_logit != "none",
        sink_mass=SINK_KEYS,
    )


class RowLayout(NamedTuple):
    """Where the rows of a batch stand in one layer, and what they see: (B, T) each.

    age: position inside the document, of the whole sequence without documents.
    visible: number of visible keys.
    keep: whether the row has a target.
    mean_key_age: mean age of the visible keys, float64.
    first_visible: how many of the document's first k keys are visible, (B, T, len(SINK_KEYS)).
    """

    age: Tensor
    visible: Tensor
    keep: Tensor
    mean_key_age: Tensor
    first_visible: Tensor


def row_layout(
    config: ModelConfig, layer: int, targets: Tensor, documents: Tensor | None
) -> RowLayout:
    """Lay out the rows of one layer in closed form, in O(B T).

    Args:
        config: the model's, which says who sees whom.
        layer: its number; windows differ by layer.
        targets: (B, T), IGNORE where a row does not count.
        documents: (B, T) ids, equal ids contiguous, or None.
    """
    targets = _where_float64_exists(targets)
    position = torch.arange(targets.shape[1], device=targets.device).expand_as(targets)
    if documents is None:
        age, size = position, torch.full_like(position, targets.shape[1])
    else:
        documents = _where_float64_exists(documents)
        starts = document_starts(documents)
        age, size = position - starts, document_ends(documents) - starts

    # Visible are the ages [0, first) and [recent, age]: the window's sinks, the common prefix or,
    # bidirectionally, everything in the first range; the window in the second.
    window = config.window_of(layer)
    first = torch.zeros_like(age)
    recent = torch.zeros_like(age)
    if config.mask == "bidirectional":
        first = size
    if window is not None:
        first = (age + 1).clamp(max=config.window_sinks)
        recent = (age + 1 - window).clamp(min=0)
    if config.prefix:
        first = torch.where(age < config.prefix, size.clamp(max=config.prefix), first)
    recent = torch.maximum(recent, first)
    n_recent = (age + 1 - recent).clamp(min=0)

    visible = first + n_recent
    twice_the_ages = first * (first - 1) + n_recent * (recent + age)
    first_visible = [
        first.clamp(max=k) + ((age + 1).clamp(max=k) - recent).clamp(min=0) for k in SINK_KEYS
    ]
    return RowLayout(
        age=age,
        visible=visible,
        keep=targets != IGNORE,
        mean_key_age=twice_the_ages.double() / (2 * visible),
        first_visible=torch.stack(first_visible, dim=-1),
    )


def row_layouts(
    config: ModelConfig, layers: Sequence[int], targets: Tensor, documents: Tensor | None
) -> list[RowLayout]:
    """Lay out the rows of several layers; layers with equal windows share one layout."""
    by_window: dict[int | None, RowLayout] = {}
    for layer in layers:
        window = config.window_of(layer)
        if window not in by_window:
            by_window[window] = row_layout(config, layer, targets, documents)
    return [by_window[config.window_of(layer)] for layer in layers]


def uniform_head(layout: RowLayout) -> AttentionOutput:
    """The row statistics, (B, 1, T), of a head whose logits are all equal; `out` is empty.

    There is no null option, soft-cap or bias in it.
    """
    share = 1 / layout.visible.double()
    return AttentionOutput(
        out=share.new_empty(0),
        entropy_tokens=-share.log().unsqueeze(1),
        max_prob=share.unsqueeze(1),
        mean_distance=(layout.age - layout.mean_key_age).unsqueeze(1),
        sink_mass=(layout.first_visible * share.unsqueeze(-1)).unsqueeze(1),
    )


def uniform_sums(layouts: Sequence[RowLayout]) -> list[RowSums]:
    """The sums of `uniform_head` in each layer; layers that share a layout share them."""
    by_layout = {id(layout): layout for layout in layouts}
    sums = {key: head_sums(uniform_head(layout), layout) for key, layout in by_layout.items()}
    return [sums[id(layout)] for layout in layouts]


class RowSums(NamedTuple):
    """Sums over the rows of one layer; M means, H heads.

    names: what the means are called.
    totals: (M, H) float64, summed over the rows that count.
    counts: (M,) float64, how many those are.
    max_logit: (H,) float64, a maximum, -inf without rows; None where it was not measured.
    """

    names: tuple[str, ...]
    totals: Tensor
    counts: Tensor
    max_logit: Tensor | None


def head_sums(result: AttentionOutput, layout: RowLayout) -> RowSums:
    """Sum the row statistics of one layer over batch and rows, head by head, in float64.

    Statistics that `result` lacks are left out.
    """
    rows = _rows(result, layout)
    max_logit = None
    if result.max_logit is not None:
        logits = _wide(result.max_logit).masked_fill(~layout.keep.unsqueeze(1), -torch.inf)
        max_logit = logits.amax(dim=(0, 2))
    return RowSums(
        names=tuple(rows),
        totals=torch.stack(
            [x.masked_fill(~kept.unsqueeze(1), 0).sum((0, 2)) for x, kept in rows.values()]
        ),
        counts=torch.stack([kept.sum() for _, kept in rows.values()]).double(),
        max_logit=max_logit,
    )


def merge(one: RowSums, other: RowSums) -> RowSums:
    """The sums over the rows of both."""
    max_logit = None
    if one.max_logit is not None and other.max_logit is not None:
        max_logit = torch.maximum(one.max_logit, other.max_logit)
    return RowSums(
        one.names, one.totals + other.totals, one.counts + other.counts, max_logit=max_logit
    )


def measures(heads: Sequence[RowSums], uniform: Sequence[RowSums]) -> dict[str, Measure]:
    """The means of all layers: those of the heads, and "uniform/..." beside them.

    A measure for which a layer has no row is left out. So is uniform/entropy_norm, which is 1.

    Args:
        heads: the sums of each layer.
        uniform: those of `uniform_head` over the same rows.
    """
    found = {name: Measure("head", means) for name, means in _means(heads).items()}
    for name, means in _means(uniform).items():
        if name != "entropy_norm":
            found[f"uniform/{name}"] = Measure("layer", means[:, 0])
    return found


def _rows(result: AttentionOutput, layout: RowLayout) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each mean the values, (B, H, T) float64, and the rows that count, (B, T)."""
    keep, age = layout.keep, layout.age
    rows = {}
    if result.entropy_tokens is not None:
        entropy = _wide(result.entropy_tokens)
        rows["entropy"] = entropy, keep & (age >= 1)
        several = keep & (layout.visible >= 2)
        rows["entropy_norm"] = entropy / layout.visible.double().log().unsqueeze(1), several
    if result.max_prob is not None:
        rows["max_prob"] = _wide(result.max_prob), keep & (age >= 1)
    if result.mean_distance is not None:
        distance = _wide(result.mean_distance)
        rows["mean_distance"] = distance, keep & (age >= 1)
        rows["distance_norm"] = distance / age.unsqueeze(1), keep & (age >= 1)
    if result.sink_mass is not None:
        for k, mass in zip(SINK_KEYS, _wide(result.sink_mass).unbind(-1), strict=True):
            rows[f"sink_mass_{k}"] = mass, keep & (age >= k)
    if result.null_mass is not None:
        rows["null_mass"] = _wide(result.null_mass), keep
    return rows


def _means(layers: Sequence[RowSums]) -> dict[str, np.ndarray]:
    """Means by name, (layers, H) float64, where every layer has rows."""
    totals = torch.stack([sums.totals for sums in layers]).cpu().numpy()  # (layers, M, H)
    counts = torch.stack([sums.counts for sums in layers]).cpu().numpy()  # (layers, M)
    found = {
        name: totals[:, m] / counts[:, m, None]
        for m, name in enumerate(layers[0].names)
        if counts[:, m].all()
    }
    maxima = [sums.max_logit for sums in layers if sums.max_logit is not None]
    if maxima:
        max_logit = torch.stack(maxima).cpu().numpy()
        if not np.isneginf(max_logit).any():
            found["max_logit"] = max_logit
    return found


def _wide(x: Tensor) -> Tensor:
    return _where_float64_exists(x).double()


def _where_float64_exists(x: Tensor) -> Tensor:
    return x.cpu() if x.device.type == "mps" else x
