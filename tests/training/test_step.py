"""One optimizer step: exact accumulation, and what a value that is no number means."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch

from data.windows import IGNORE, Batch
from model.config import ModelConfig
from model.decoder import Decoder
from training.devices import autocast, grad_scaler
from training.distributed import Ranks
from training.optim import OptimConfig, build_optimizers
from training.step import NonFiniteError, StepGuard, StepResult, take_step
from training.telemetry import StepStatistics

CPU = torch.device("cpu")
SIZE = {"vocab_size": 11, "context_length": 7, "n_layer": 2, "n_head": 2, "n_embd": 8}


def rows(first: int = 0, last: int = 8) -> Batch:
    """Eight sequences whose numbers of counted targets differ; the fourth counts none."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (8, 7), generator=generator)
    targets = torch.randint(0, 11, (8, 7), generator=generator)
    for row, counted in enumerate((7, 1, 5, 0, 2, 2, 1, 3)):
        targets[row, counted:] = IGNORE
    return Batch(tokens[first:last], targets[first:last], None)


class Lesson:
    """A model, its optimizer, and the gradients of the steps it takes."""

    def __init__(self, dtype: torch.dtype = torch.float32, clip: float = 0.0, **model) -> None:
        torch.manual_seed(0)
        self.dtype = dtype
        self.model = Decoder(ModelConfig(**SIZE | model))
        self.optimizers = build_optimizers(
            self.model, OptimConfig(kind="sgd", grad_clip=clip, weight_decay=0)
        )
        self.optimizers.set_lr(1.0)
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self, *batches: Batch) -> StepResult:
        self.gradients = {}
        for name, p in self.model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: self.gradients.update({name: p.grad.clone()})
            )
        return take_step(
            self.model,
            self.optimizers,
            grad_scaler(CPU, self.dtype),
            batches,
            config=self.model.config,
            device=CPU,
            autocast=partial(autocast, CPU, self.dtype),
            ranks=Ranks(),
        )


@pytest.mark.parametrize("edges", [(0, 4, 8), (0, 2, 4, 6, 8), (0, 3, 4, 8)])
def test_accumulation_gives_the_gradient_of_the_whole_batch(edges):
    whole, pieces = Lesson(), Lesson()
    expected = whole.step(rows())
    found = pieces.step(*(rows(a, b) for a, b in itertools.pairwise(edges)))
    assert found.tokens == expected.tokens == 21
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    for name, gradient in whole.gradients.items():
        assert torch.allclose(pieces.gradients[name], gradient, rtol=1e-5, atol=1e-8), name


def test_the_loss_is_the_mean_over_counted_tokens_of_the_step():
    lesson = Lesson()
    batch = rows()
    expected = lesson.model(batch.tokens, batch.targets).loss.item()
    assert lesson.step(rows(0, 3), rows(3, 8)).loss == pytest.approx(expected, rel=1e-6)


def test_the_prefix_is_not_counted():
    lesson = Lesson(mask="prefix", prefix=3)
    batch = rows()._replace(targets=rows().tokens)
    expected = lesson.model(batch.tokens, batch.targets).loss.item()
    result = lesson.step(batch)
    assert result.tokens == 8 * 5  # positions 2 to 6: the targets of 0 and 1 are in plain sight
    assert result.loss == pytest.approx(expected, rel=1e-6)


def test_a_step_without_any_counted_target_is_a_step_of_zero():
    lesson = Lesson()
    before = {name: p.clone() for name, p in lesson.model.named_parameters()}
    result = lesson.step(rows(3, 4))
    assert (result.loss, result.tokens, result.grad_norm, result.taken) == (0.0, 0, 0.0, True)
    for name, p in lesson.model.named_parameters():
        assert p.equal(before[name]), name


def test_clipping_happens_once_on_the_whole_gradient():
    free, clipped = Lesson(), Lesson(clip=0.01)
    norm = free.step(rows(0, 4), rows(4, 8)).grad_norm
    before = {name: p.clone() for name, p in clipped.model.named_parameters()}
    assert clipped.step(rows(0, 4), rows(4, 8)).grad_norm == pytest.approx(norm, rel=1e-5)
    moved = math.sqrt(
        sum((p - before[n]).square().sum().item() for n, p in clipped.model.named_parameters())
    )
    # SGD with Nesterov momentum 0.9 moves 1.9 times the gradient on its first step.
    lr = OptimConfig(kind="sgd").lr
    assert moved == pytest.approx(lr * 1.9 * 0.01, rel=0.02)


def test_bfloat16_steps_have_float32_gradients():
    lesson = Lesson(torch.bfloat16)
    result = lesson.step(rows())
    assert result.loss == pytest.approx(Lesson().step(rows()).loss, rel=2e-2)
    assert {g.dtype for g in lesson.gradients.values()} == {torch.float32}


def test_a_non_finite_step_leaves_the_weights_alone():
    lesson = Lesson()
    with torch.no_grad():
        lesson.model.blocks[0].attn.q_proj.weight[0, 0] = math.inf
    before = {name: p.clone() for name, p in lesson.model.named_parameters()}
    result = lesson.step(rows())
    assert not result.taken
    assert not math.isfinite(result.loss)
    for name, p in lesson.model.named_parameters():
        assert p.equal(before[name]), name


BAD = StepResult(loss=math.nan, tokens=5, grad_norm=math.nan, taken=False)
GOOD = StepResult(loss=1.25, tokens=5, grad_norm=1.0, taken=True)


def check(guard: StepGuard, result: StepResult, step: int, log: list[str], dtype=torch.float32):
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    guard.check(result, step=step, lr=0.5, windows=np.arange(4), scaler=scaler, log=log.append)


def test_the_guard_stops_at_once_and_says_where():
    guard, log = StepGuard(0), []
    check(guard, GOOD, 6, log)
    with pytest.raises(NonFiniteError) as stopped:
        check(guard, BAD, 7, log)
    text = str(stopped.value)
    assert "step 7: loss nan, gradient norm nan (lr 0.5, last finite loss 1.2500" in text
    assert "windows 0, 1, 2, 3" in text
    assert "train.max_skipped_steps=1" in text
    assert log == []


def test_the_guard_skips_so_many_in_a_row():
    guard, log = StepGuard(2), []
    for step in (1, 2):
        check(guard, BAD, step, log)
    check(guard, GOOD, 3, log)  # the row is broken
    for step in (4, 5):
        check(guard, BAD, step, log)
    assert len(log) == 4
    with pytest.raises(NonFiniteError):
        check(guard, BAD, 6, log)


def test_a_float16_overflow_is_normal():
    overflow = StepResult(loss=2.0, tokens=5, grad_norm=math.inf, taken=False)
    guard, log = StepGuard(0), []
    check(guard, overflow, 1, log, torch.float16)
    assert "float16 overflow" in log[0]
    with pytest.raises(NonFiniteError):
        check(guard, overflow, 1, log)


def test_gradient_norms_are_taken_unscaled_and_before_clipping():
    lesson = Lesson(clip=0.001)
    statistics = StepStatistics(lesson.model, 1, (1,))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    options = {"config": lesson.model.config, "device": CPU, "autocast": nullcontext}
    twin = Lesson(clip=0.001)
    twin.step(rows())  # its hooks see gradients before anything is done to them
    take_step(
        lesson.model,
        lesson.optimizers,
        scaler,
        [rows(0, 4), rows(4, 8)],
        ranks=Ranks(),
        statistics=statistics,
        **options,
    )
    found = statistics.record(Ranks()).measures
    for name in "qkvo":
        expected = twin.gradients[f"blocks.1.attn.{name}_proj.weight"].norm().item()
        measure = found[f"grad_norm_{name}"]
        assert measure.axis == "layer"
        assert measure.values.tolist() == [pytest.approx(expected, rel=1e-5)]
