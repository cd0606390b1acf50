"""Seeing every head while it learns: when to look, what is gathered, where it goes.

Two sources, kept apart. The training forward of some steps returns row statistics beside its loss,
which stays what it was; they are summed over micro-steps and ranks (`analysis/row_stats.py`).
And after each evaluation the main rank runs one fixed probe batch (`analysis/probe.py`), whose
numbers can be compared between steps. Each look becomes one record of the run's folder
(`analysis/head_files.py`), a few scalars in ``metrics.jsonl``, and sometimes an event.

Looking costs time. `Telemetry.describe` says how much, writing included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from analysis.event_files import append_events, drop_events_after
from analysis.events import EventDetector, Thresholds
from analysis.head_files import (
    HeadRecord,
    Measure,
    drop_records_after,
    read_records,
    write_patterns,
    write_record,
)
from analysis.head_scalars import scalars
from analysis.probe import Probe, build_probe, run_probe
from analysis.row_stats import (
    RowSums,
    head_sums,
    measures,
    merge,
    row_layouts,
    uniform_sums,
    wanted_stats,
)
from data.tokenizers import Tokenizer
from data.windows import Windows
from kernels.attention import AttentionOutput
from model.config import ModelConfig
from model.decoder import Decoder
from training.choices import check_range
from training.distributed import Ranks
from training.overhead import Overhead

if TYPE_CHECKING:
    from training.records import Records

PROJECTIONS = ("q", "k", "v", "o")


@dataclass(kw_only=True, slots=True)
class TelemetryConfig:
    """When to look at the heads, at which of them, and what counts as an event.

    Raises ValueError, one line naming the setting, for a value out of range.
    """

    enabled: bool = True
    every: int = 10  # steps between two looks; early ones lie closer, on a log scale
    layers: list[int] | None = None  # None: all
    probe_windows: int = 32  # validation windows in the probe batch
    sink_length: int = 64  # alpha_0 is measured over the first rows, since it falls with length
    report: bool = True  # write report.html and pictures of the heads at the end

    sink: float = 0.3  # a sink forms when alpha_0 stays above this
    sink_ratio: float = 3.0  # and above so many times that of a uniform head
    collapse: float = 0.05  # a head has collapsed when its entropy_norm is below
    fall: float = 0.5  # a layer's mean entropy_norm falls to this share within 100 steps
    logit: float = 1000.0  # a logit above has blown up
    dead: float = 1e-3  # a head that writes less than this share of the stream is dead

    def __post_init__(self) -> None:
        check_range("telemetry.every", self.every, 1)
        check_range("telemetry.probe_windows", self.probe_windows, 1)
        check_range("telemetry.sink_length", self.sink_length, 2)
        for name in ("sink", "collapse", "fall", "dead"):
            check_range(f"telemetry.{name}", getattr(self, name), 0, 1)
        for name in ("sink_ratio", "logit"):
            check_range(f"telemetry.{name}", getattr(self, name), 0, open_low=True)
        if self.layers is not None:
            if not self.layers:
                raise ValueError("telemetry.layers=[] looks at nothing: use telemetry=none")
            if len(set(self.layers)) < len(self.layers):
                raise ValueError(f"telemetry.layers={list(self.layers)} names a layer twice")
            self.layers = sorted(self.layers)

    def check(self, n_layer: int) -> None:
        """Raise ValueError unless a model of `n_layer` layers has the chosen ones."""
        for layer in self.layers or ():
            if not 0 <= layer < n_layer:
                raise ValueError(
                    f"telemetry.layers={list(self.layers or ())}: layer {layer} is outside "
                    f"0 .. {n_layer - 1} (model.n_layer={n_layer})"
                )

    def chosen_layers(self, n_layer: int) -> tuple[int, ...]:
        """The numbers of the layers to look at, in order."""
        return tuple(range(n_layer) if self.layers is None else self.layers)

    def thresholds(self) -> Thresholds:
        """What counts as an event."""
        return Thresholds(
            sink=self.sink,
            sink_ratio=self.sink_ratio,
            collapse=self.collapse,
            fall=self.fall,
            logit=self.logit,
            dead=self.dead,
        )


def is_due(step: int, every: int) -> bool:
    """Whether to look at training step 1, 2, ...: a question of its number alone.

    Every `every` steps, and early, when sinks form, at the powers of √2: 1, 2, 3, 4, 6, 8, 11, 16,
    23, 32, ... for as long as these lie closer.
    """
    if step % every == 0:
        return True
    power = round(2 * math.log2(step))
    here, following = round(2 ** (power / 2)), round(2 ** ((power + 1) / 2))
    return here == step and following - here < every


def make_probe(
    config: TelemetryConfig,
    model: ModelConfig,
    val_windows: Windows,
    tokenizer: Tokenizer,
    ranks: Ranks,
) -> Probe | None:
    """The run's probe batch on the main rank; None elsewhere and where telemetry is off."""
    if not (config.enabled and ranks.is_main):
        return None
    return build_probe(
        model,
        val_windows,
        tokenizer,
        n_windows=config.probe_windows,
        sink_length=config.sink_length,
    )


class StepStatistics:
    """What the training forward of one step says about the heads: sums, so far of this rank.

    Attributes:
        step: its number.
        layers: the layers looked at.
        stats: the statistics that the forward pass shall return of them.
    """

    def __init__(self, model: Decoder, step: int, layers: tuple[int, ...]) -> None:
        self.step = step
        self.layers = layers
        self.stats = wanted_stats(model.config)
        self._model = model
        self._heads: list[RowSums] = []
        self._uniform: list[RowSums] = []
        self._gradient_norms: Tensor | None = None

    def add(
        self, attention: Sequence[AttentionOutput], targets: Tensor, documents: Tensor | None
    ) -> None:
        """Add a micro-step: what each layer returned, and the batch's targets, (B, T)."""
        layouts = row_layouts(self._model.config, self.layers, targets, documents)
        heads = [head_sums(result, at) for result, at in zip(attention, layouts, strict=True)]
        self._heads = _merge_layers(self._heads, heads)
        self._uniform = _merge_layers(self._uniform, uniform_sums(layouts))

    def add_gradients(self) -> None:
        """Note the norms of the projections' gradients: reduced, unscaled, not yet clipped."""
        norms = []
        for layer in self.layers:
            attention = self._model.blocks[layer].attn
            for name in PROJECTIONS:
                weight = getattr(attention, f"{name}_proj").weight
                is_frozen = weight.grad is None
                gradient = torch.zeros_like(weight) if is_frozen else weight.grad
                norms.append(torch.linalg.vector_norm(gradient))
        self._gradient_norms = torch.stack(norms).view(len(self.layers), len(PROJECTIONS))

    def record(self, ranks: Ranks) -> HeadRecord:
        """Join what all ranks have added; every rank must call this."""
        heads: list[RowSums] = []
        uniform: list[RowSums] = []
        for others_heads, others_uniform in ranks.gather_objects(
            ([_on_cpu(x) for x in self._heads], [_on_cpu(x) for x in self._uniform])
        ):
            heads = _merge_layers(heads, others_heads)
            uniform = _merge_layers(uniform, others_uniform)
        found = measures(heads, uniform)
        if self._gradient_norms is not None:
            norms = self._gradient_norms.cpu().double().numpy()
            for column, name in enumerate(PROJECTIONS):
                found[f"grad_norm_{name}"] = Measure("layer", norms[:, column])
        return HeadRecord("train", self.step, self.layers, found)


class Telemetry:
    """Looks at the heads of one run, and tells the folder, the log and the tracker.

    Every rank has one: all gather statistics, the main rank alone probes and writes. What another
    future of the run has left after `step` is dropped, and events go on from the records before.

    Args:
        config: when and where to look.
        model: the decoder itself.
        probe: what `make_probe` returned.
        run: the run's folder.
        step: steps taken so far.
        ranks: this process among its peers.
        records: receives scalars; its tracker receives tables and alerts.
        log: receives events, warnings, and what the probe is made of.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        model: Decoder,
        probe: Probe | None,
        *,
        run: Path,
        step: int,
        ranks: Ranks,
        records: Records,
        log: Callable[[str], None],
    ) -> None:
        self._config, self._model, self._probe = config, model, probe
        self._run, self._ranks, self._records, self._log = run, ranks, records, log
        self._layers = config.chosen_layers(model.config.n_layer)
        self._overhead = Overhead()
        self._detector = EventDetector(config.thresholds())
        self._first_probe: HeadRecord | None = None
        self._last_probe_step = -1
        self._has_warned = False
        if probe is not None:
            log(probe.note)
        if ranks.is_main:
            drop_records_after(run, step)
            drop_events_after(run, step)
        if ranks.is_main and config.enabled:
            earlier = [*read_records(run, "train"), *read_records(run, "probe")]
            for record in sorted(earlier, key=lambda r: r.step):  # stable: training comes first
                self._note_probe(record)
                self._detector.see(record)

    def begin_step(self, step: int) -> StepStatistics | None:
        """Begin training step `step`: what shall be gathered in it, None for nothing."""
        is_due_now = self._config.enabled and is_due(step, self._config.every)
        self._overhead.begin_step(is_due_now)
        return StepStatistics(self._model, step, self._layers) if is_due_now else None

    def end_step(self, statistics: StepStatistics | None) -> None:
        """End the step: every rank must call this with what `begin_step` returned."""
        if statistics is not None:
            record = statistics.record(self._ranks)
            if self._ranks.is_main:
                self._keep(record)
        self._overhead.end_step()

    def probe(
        self, step: int, device: torch.device, autocast: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Run the probe batch after `step` steps, on the main rank; once, if asked again."""
        if self._probe is None or step == self._last_probe_step:
            return
        with self._overhead.probing():
            found = run_probe(
                self._model,
                self._probe,
                device=device,
                autocast=autocast,
                layers=self._layers,
                step=step,
            )
            self._keep(HeadRecord("probe", step, self._layers, found.measures))
            self._try_to_write(lambda: write_patterns(self._run, found.patterns))

    def describe(self, training_seconds: float) -> str | None:
        """What looking has cost in this process, in one line; None where nothing was looked at."""
        return self._overhead.describe(training_seconds) if self._config.enabled else None

    def _keep(self, record: HeadRecord) -> None:
        """Write a record down, and what follows from it."""
        self._try_to_write(lambda: write_record(self._run, record))
        self._note_probe(record)
        self._records.add(record.step, scalars(record, self._first_probe))
        tracker = self._records.tracker
        if record.kind == "probe":
            tracker.log_heads(record.step, record)
        events = self._detector.see(record)
        if events:
            self._try_to_write(lambda: append_events(self._run, events))
        for event in events:
            self._log(event.text)
            tracker.alert(event.title, event.text)

    def _note_probe(self, record: HeadRecord) -> None:
        if record.kind == "probe":
            self._first_probe = self._first_probe or record
            self._last_probe_step = record.step

    def _try_to_write(self, write: Callable[[], object]) -> None:
        """A disk that refuses costs what was to be written, and one warning in all."""
        try:
            write()
        except OSError as error:
            if not self._has_warned:
                self._log(f"warning: telemetry could not be written ({error}); training goes on")
            self._has_warned = True


def _merge_layers(some: list[RowSums], others: list[RowSums]) -> list[RowSums]:
    if not some:
        return others
    return [merge(one, other) for one, other in zip(some, others, strict=True)]


def _on_cpu(sums: RowSums) -> RowSums:
    max_logit = None if sums.max_logit is None else sums.max_logit.cpu()
    return RowSums(sums.names, sums.totals.cpu(), sums.counts.cpu(), max_logit)
