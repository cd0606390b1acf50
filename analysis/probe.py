"""The probe of a run: one fixed batch, measured in full at every evaluation.

Training batches change from step to step; the probe does not, so its numbers can be compared over
a run and between runs on the same data. It has two parts: windows of validation text, evenly spread
and the same every time, and repeated random tokens, `[BOS] r r`, on which induction heads show.
Nothing in it depends on the run's seed, and measuring leaves no trace in the model or in any
random state.

What each measure is stands beside its function in `analysis/detectors.py` and, for the row
statistics, in `analysis/row_stats.py`. A measure that the probe has no rows for is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis import detectors, row_stats
from analysis.detectors import Mean
from analysis.head_files import Measure, Patterns
from analysis.inside import LayerView, inside
from analysis.row_stats import RowLayout, RowSums
from analysis.weights import row_weights
from data.tokenizers import Tokenizer
from data.windows import IGNORE, Batch, Windows, fixed_windows
from kernels.visibility import document_starts
from model.attention import Attention
from model.blocks import Block
from model.config import ModelConfig
from model.decoder import Decoder, counted_targets, next_token_loss

SEED = 2024  # of the repeated tokens; the same for every run
MAX_PERIOD = 64  # distinct tokens that are repeated
SAMPLED_ROWS = 64  # per head, over the whole text
PATTERN_TOKENS = 48  # of the first window, whose weights are kept
PASS_NUMBERS = 2**26  # logits and activations of one forward pass, roughly, to bound memory

# What has one value per key/value head or layer. All else, uniform heads apart, has one per head.
AXES = {
    "sink_vnorm": "kv_head",
    "sink_knorm": "kv_head",
    "sink_hnorm": "layer",
    "massive_count": "layer",
    "massive_max": "layer",
    "massive_max_over_median": "layer",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """The fixed batch.

    text: the windows, (N, T).
    sample: (N, R), rows of each window on which whole rows of weights are made.
    sink_length: alpha_0 and the sink rate are measured on this many first tokens.
    repeats: (n, 2 · period + 1), [BOS] r r; None where context or vocabulary are too small.
    period: number of distinct tokens in r.
    words: the first tokens of the first window as text.
    note: what the probe is made of, in one line.
    """

    text: Batch
    sample: Tensor
    sink_length: int
    repeats: Tensor | None
    period: int
    words: list[str]
    note: str


class ProbeResult(NamedTuple):
    """What one look at the probe gave: values by measure, and the weights over a piece of text."""

    measures: dict[str, Measure]
    patterns: Patterns


def build_probe(
    config: ModelConfig,
    val: Windows,
    tokenizer: Tokenizer,
    *,
    n_windows: int = 32,
    sink_length: int = 64,
    n_repeats: int = 16,
) -> Probe:
    """Choose the probe of a model and a validation split: the same for every run on them.

    Args:
        config: the model's, with its vocabulary size.
        val: the validation split.
        tokenizer: gives the BOS token and the text of tokens.
        n_windows: windows of text, fewer where the split has fewer.
        sink_length: first tokens that alpha_0 is measured on, fewer where the context is shorter.
        n_repeats: sequences of repeated random tokens.
    """
    text = val.batch(fixed_windows(len(val), n_windows))
    bos_id, bos_name = _bos(tokenizer)
    known = min(tokenizer.vocab_size, config.vocab_size)
    marks = {bos_id, tokenizer.bos_id, tokenizer.eos_id}
    candidates = np.array([i for i in range(known) if i not in marks], dtype=np.int64)
    period = min(MAX_PERIOD, (config.context_length - 1) // 2, len(candidates))
    repeats = None
    note = f"probe: {len(text.tokens)} windows of {text.tokens.shape[1]} tokens"
    if period >= 2:
        repeats = _repeats(bos_id, candidates, period, n_repeats)
        note += f"; {n_repeats} sequences [{bos_name}] r r, r of {period} random tokens"
        if tokenizer.bos_id is None:
            note += f" ({bos_name} stands for BOS, which this tokenizer lacks)"
    else:
        note += "; no repeated tokens, for which context or vocabulary is too small"
    shown = text.tokens[0, :PATTERN_TOKENS].tolist()
    return Probe(
        text=text,
        sample=_sample(text),
        sink_length=min(sink_length, text.tokens.shape[1]),
        repeats=repeats,
        period=period,
        words=[word(tokenizer, token_id) for token_id in shown],
        note=note,
    )


@torch.no_grad()
def run_probe(
    model: Decoder,
    probe: Probe,
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    layers: Sequence[int] | None = None,
    step: int = 0,
) -> ProbeResult:
    """Measure `model` on its probe, in eval mode and without gradients, in O(T·D) memory.

    Args:
        model: the decoder itself, not a data-parallel wrapper; it runs uncompiled.
        probe: what `build_probe` made.
        device: where the model is.
        autocast: makes the mixed-precision context of a forward pass; measures are computed
            from its results in at least float32.
        layers: numbers of the layers to measure; None for all.
        step: written into the patterns.
    """
    chosen = list(range(model.config.n_layer) if layers is None else layers)
    was_training = model.training
    model.eval()
    try:
        run = _Runner(model, device, autocast, chosen)
        measures, patterns = _measure_text(run, probe)
        if probe.repeats is not None:
            measures |= _measure_repeats(run, probe.repeats, probe.period)
    finally:
        model.train(was_training)
    return ProbeResult(measures, patterns._replace(step=step))


_READABLE = {" ": "␣", "\n": "↵", "\t": "⇥"}


def word(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as people can read it: ␣ for a space, ↵ for a line end, \\x.. for other bytes."""
    raw = tokenizer.token_bytes[token_id]
    if not raw:
        names = {tokenizer.eos_id: "[EOS]", tokenizer.bos_id: "[BOS]"}
        return names.get(token_id, f"[{token_id}]")
    try:
        text = raw.decode()
    except UnicodeDecodeError:  # a part of a character
        return "".join(f"\\x{byte:02x}" for byte in raw)
    return "".join(_READABLE.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text)


# --- The two parts of the batch -------------------------------------------------------------------


def _bos(tokenizer: Tokenizer) -> tuple[int, str]:
    """What stands at the beginning of repeated tokens, and what to call it."""
    if tokenizer.bos_id is not None:
        return tokenizer.bos_id, "BOS"
    if b"\n" in tokenizer.token_bytes:
        return tokenizer.token_bytes.index(b"\n"), "newline"
    return 0, "id 0"


def _repeats(bos_id: int, candidates: np.ndarray, period: int, n: int) -> Tensor:
    """[BOS] r r with r of `period` distinct candidates: (n, 2 · period + 1) int64."""
    rows = []
    for number in range(n):
        keys = np.random.PCG64([SEED, number]).random_raw(len(candidates))
        r = candidates[np.argsort(keys, kind="stable")[:period]]
        rows.append(np.concatenate([[bos_id], r, r]))
    return torch.from_numpy(np.stack(rows))


def _sample(text: Batch) -> Tensor:
    """Rows of each window, (N, R): evenly spread over its rows of age >= 1, and over windows.

    A window with fewer such rows than R names some twice; one without names its first row.
    """
    N, T = text.tokens.shape
    age = torch.arange(T).expand(N, T)
    if text.documents is not None:
        age = age - document_starts(text.documents)
    R = max(1, SAMPLED_ROWS // N)
    sample = torch.zeros(N, R, dtype=torch.int64)
    for n, usable in enumerate((age >= 1) & (text.targets != IGNORE)):
        (rows,) = usable.nonzero(as_tuple=True)
        if len(rows):
            places = (torch.arange(R) + (n + 0.5) / N) * len(rows) / R
            sample[n] = rows[places.long()]
    return sample


# --- Measuring ------------------------------------------------------------------------------------

Means = dict[str, Mean]  # by measure


class _Seen(NamedTuple):
    """One pass: loss of every token and which count, (B, T); views and layouts by layer."""

    losses: Tensor
    counted: Tensor
    views: list[LayerView]
    layouts: list[RowLayout]


class _Runner(NamedTuple):
    """A model and how it is run."""

    model: Decoder
    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]]
    layers: list[int]

    def passes(self, batch: Batch) -> Iterator[tuple[slice, _Seen]]:
        """Run a batch in parts that bound memory, and say which sequences each part holds."""
        config = self.model.config
        N, T = batch.tokens.shape
        per_token = config.vocab_size + 8 * config.n_embd * config.n_layer
        count = max(1, PASS_NUMBERS // (T * per_token))
        for start in range(0, N, count):
            part = slice(start, start + count)
            documents = None if batch.documents is None else batch.documents[part]
            yield part, self.look(Batch(batch.tokens[part], batch.targets[part], documents))

    def look(self, batch: Batch) -> _Seen:
        """Run one part."""
        config = self.model.config
        tokens, targets = batch.tokens.to(self.device), batch.targets.to(self.device)
        documents = None if batch.documents is None else batch.documents.to(self.device)
        stats = row_stats.wanted_stats(config)
        with self.autocast():
            output, views = inside(self.model, tokens, documents, stats, self.layers)
        counted = counted_targets(config, targets, documents)
        return _Seen(
            losses=next_token_loss(output.logits, counted, "none"),
            counted=counted != IGNORE,
            views=views,
            layouts=row_stats.row_layouts(config, self.layers, targets, documents),
        )


def _measure_text(run: _Runner, probe: Probe) -> tuple[dict[str, Measure], Patterns]:
    by_layer: list[Means] = [{} for _ in run.layers]
    by_model: Means = {}
    heads: list[RowSums] = []
    uniform: list[RowSums] = []
    pieces: list[tuple[np.ndarray, np.ndarray]] = []
    late, early = detectors.icl_tokens(probe.text.tokens.shape[1])
    for part, seen in run.passes(probe.text):
        sample = probe.sample[part].to(run.device)
        layouts = [_to(layout, run.device) for layout in seen.layouts]
        for view, layout, means in zip(seen.views, layouts, by_layer, strict=True):
            attn = _block(run.model, view.layer).attn
            _add(means, _on_text(view, attn, layout, sample, probe.sink_length))
        age = layouts[0].age
        _add(
            by_model,
            {
                "loss": detectors.mean_loss(seen.losses, seen.counted),
                "late": detectors.loss_at(seen.losses, seen.counted, age, late),
                "early": detectors.loss_at(seen.losses, seen.counted, age, early),
            },
        )
        results = zip(seen.views, seen.layouts, strict=True)
        sums = [row_stats.head_sums(view.result, layout) for view, layout in results]
        heads = _merge_rows(heads, sums)
        uniform = _merge_rows(uniform, row_stats.uniform_sums(seen.layouts))
        if not pieces:
            pieces = [_piece(view, len(probe.words)) for view in seen.views]

    measures = row_stats.measures(heads, uniform) | _layer_measures(by_layer)
    norms = [detectors.qk_norm(_block(run.model, layer)) for layer in run.layers]
    measures["qk_norm"] = Measure("head", _numpy(norms))
    measures |= _scalar("loss", by_model["loss"].value())
    measures |= _difference("icl_score", by_model["late"], by_model["early"])
    weights, null_mass = (np.stack(parts) for parts in zip(*pieces, strict=True))
    return measures, Patterns(0, tuple(run.layers), probe.words, weights, null_mass)


def _measure_repeats(run: _Runner, repeats: Tensor, period: int) -> dict[str, Measure]:
    by_layer: list[Means] = [{} for _ in run.layers]
    by_model: Means = {}
    following = torch.full_like(repeats, IGNORE)
    following[:, :-1] = repeats[:, 1:]
    for _, seen in run.passes(Batch(repeats, following, None)):
        for view, layout, means in zip(seen.views, seen.layouts, by_layer, strict=True):
            whole = layout._replace(keep=torch.ones_like(layout.keep))  # the last row looks too
            _add(means, _on_repeats(view, _to(whole, run.device), period))
        first, second = detectors.copy_losses(seen.losses, seen.counted, period)
        _add(by_model, {"first": first, "second": second})
    gain = _difference("repeat_gain", by_model["first"], by_model["second"])
    return _layer_measures(by_layer) | gain


def _on_text(
    view: LayerView, attn: Attention, layout: RowLayout, sample: Tensor, sink_length: int
) -> Means:
    """What one layer did on windows of text."""
    first = detectors.first_token(layout, sink_length)
    previous = detectors.previous_token(layout)
    return {
        "alpha_0": detectors.weight_on(view, first),
        "uniform/alpha_0": detectors.uniform_weight_on(view, layout, first),
        "sink_rate": detectors.sink_rate(view, layout, sink_length),
        "sink_vnorm": detectors.sink_vnorm(view, layout),
        "sink_knorm": detectors.sink_knorm(view, layout),
        "sink_hnorm": detectors.sink_hnorm(view, layout),
        "sink_cos": detectors.sink_cos(view, layout),
        "sink_write": detectors.sink_write(view, attn, layout, sample),
        "logit_std": detectors.logit_std(view, layout, sample),
        "write": detectors.write(view, attn, layout),
        "prev_token_text": detectors.weight_on(view, previous),
        "uniform/prev_token_text": detectors.uniform_weight_on(view, layout, previous),
        **detectors.massive(view, layout),
    }


def _on_repeats(view: LayerView, layout: RowLayout, period: int) -> Means:
    """What one layer did on repeated tokens."""
    looks = {
        "prev_token": detectors.previous_token(layout),
        "duplicate": detectors.duplicate_token(layout, period),
        "induction": detectors.induction(layout, period),
    }
    means = {name: detectors.weight_on(view, look) for name, look in looks.items()}
    for name, look in looks.items():
        means[f"uniform/{name}"] = detectors.uniform_weight_on(view, layout, look)
    return means


def _piece(view: LayerView, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights among the first P tokens of the first sequence, (H, P, P), and null mass (H, P)."""
    documents, result = view.spec.documents, view.result
    assert result.lse is not None
    first = view._replace(
        q=view.q[:1],
        k=view.k[:1],
        spec=replace(view.spec, documents=None if documents is None else documents[:1]),
        result=result._replace(lse=result.lse[:1]),
    )
    rows = torch.arange(length, device=view.q.device).unsqueeze(0)
    weights = row_weights(first, rows)[0, :, :, :length]
    null = result.null_mass
    null_mass = torch.zeros_like(weights[..., 0]) if null is None else null[0, :, :length]
    return weights.float().cpu().numpy(), null_mass.float().cpu().numpy()


def _add(means: Means, more: Means) -> None:
    """Add the means of one more pass."""
    for name, mean in more.items():
        means[name] = means[name] + mean if name in means else mean


def _merge_rows(sums: list[RowSums], more: list[RowSums]) -> list[RowSums]:
    """Add the row statistics of one more pass, layer by layer."""
    if not sums:
        return more
    return [row_stats.merge(one, other) for one, other in zip(sums, more, strict=True)]


def _layer_measures(by_layer: list[Means]) -> dict[str, Measure]:
    """Values of all layers; a measure that a layer has no rows for is left out."""
    found = {}
    for name in by_layer[0]:
        values = [value for means in by_layer if (value := means[name].value()) is not None]
        if len(values) == len(by_layer):
            found[name] = Measure(_axis(name), _numpy(values))
    return found


def _axis(name: str) -> str:
    return "layer" if name.startswith("uniform/") else AXES.get(name, "head")


def _difference(name: str, one: Mean, other: Mean) -> dict[str, Measure]:
    first, second = one.value(), other.value()
    return _scalar(name, None if first is None or second is None else first - second)


def _scalar(name: str, value: Tensor | None) -> dict[str, Measure]:
    return {} if value is None else {name: Measure("scalar", value.cpu().numpy())}


def _numpy(values: list[Tensor]) -> np.ndarray:
    return torch.stack(values).cpu().numpy()


def _to(layout: RowLayout, device: torch.device) -> RowLayout:
    """Put what the detectors read where the views are (on MPS, layouts are on the CPU)."""
    age, visible, keep = (x.to(device) for x in layout[:3])
    return layout._replace(age=age, visible=visible, keep=keep)


def _block(model: Decoder, layer: int) -> Block:
    block = model.blocks[layer]
    assert isinstance(block, Block)
    return block
