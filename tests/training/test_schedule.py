"""The learning rate: a pure function of the step, never zero at first, never outside its limits."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from training.schedule import (
    DECAY_SHAPES,
    SCHEDULES,
    ScheduleConfig,
    describe_schedule,
    lr_multiplier,
)


def nanogpt_lr(step: int, lr: float, min_lr: float, warmup: int, horizon: int) -> float:
    """The published rule, written out."""
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    if step > horizon:
        return min_lr
    ratio = (step - warmup) / (horizon - warmup)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (lr - min_lr)


@pytest.mark.parametrize("step", [0, 1, 99, 100, 101, 1000, 1999, 2000, 2001, 9999])
def test_cosine_is_nanogpts(step: int) -> None:
    config = ScheduleConfig(lr=1e-3, min_lr_ratio=0.1, warmup_steps=100)
    expected = nanogpt_lr(step, 1e-3, 1e-4, 100, 2000)
    assert 1e-3 * lr_multiplier(step, config, 2000) == pytest.approx(expected, rel=1e-12)


schedules = st.builds(
    ScheduleConfig,
    schedule=st.sampled_from(SCHEDULES),
    decay_shape=st.sampled_from(DECAY_SHAPES),
    warmup_steps=st.integers(0, 20),
    decay_steps=st.none() | st.integers(50, 200),
    decay_fraction=st.floats(0.01, 0.5),
    min_lr_ratio=st.floats(0, 1),
)


@settings(max_examples=200, deadline=None)
@given(config=schedules, max_steps=st.integers(50, 300), step=st.integers(0, 1000))
def test_every_multiplier_is_within_its_limits(
    config: ScheduleConfig, max_steps: int, step: int
) -> None:
    config.check(max_steps)
    multiplier = lr_multiplier(step, config, max_steps)
    assert 0 < lr_multiplier(0, config, max_steps) <= 1
    assert multiplier <= 1
    if step >= config.warmup_steps:
        assert multiplier >= config.min_lr_ratio
        # After the warm-up it never rises again.
        assert lr_multiplier(step + 1, config, max_steps) <= multiplier
    else:
        assert lr_multiplier(step + 1, config, max_steps) > multiplier


def test_beyond_the_horizon_the_floor_holds() -> None:
    for schedule in ("cosine", "wsd"):
        config = ScheduleConfig(schedule=schedule, decay_steps=50, warmup_steps=5, min_lr_ratio=0.2)
        assert [lr_multiplier(s, config, 1000) for s in (50, 51, 5000)] == [0.2, 0.2, 0.2]


def test_a_shorter_run_keeps_the_schedule_of_a_fixed_horizon() -> None:
    config = ScheduleConfig(decay_steps=2000, warmup_steps=10)
    config.check(max_steps=5)
    assert lr_multiplier(700, config, 2000) == lr_multiplier(700, config, 20)


@pytest.mark.parametrize(
    ("shape", "halfway"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))]
)
def test_wsd_keeps_the_peak_then_decays_in_its_shape(shape: str, halfway: float) -> None:
    config = ScheduleConfig(
        schedule="wsd", decay_shape=shape, warmup_steps=10, decay_fraction=0.2, min_lr_ratio=0.0
    )
    values = [lr_multiplier(step, config, 1000) for step in (10, 500, 800, 900, 1000)]
    assert values == pytest.approx([1, 1, 1, halfway, 0])


def test_constant_stays_at_the_peak() -> None:
    config = ScheduleConfig(schedule="constant", warmup_steps=3)
    values = [lr_multiplier(step, config, 10) for step in (0, 1, 2, 3, 9, 99)]
    assert values == [0.25, 0.5, 0.75, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "warmup_steps=100 must be at most 49 .*train.max_steps=50"),
        ({"decay_steps": 40}, "warmup_steps=100 must be at most 39 .*optim.decay_steps=40"),
        ({"schedule": "wsd", "warmup_steps": 41}, "warmup_steps=41 must be at most 40 .*wsd"),
        ({"schedule": "constant"}, "warmup_steps=100 must be at most 49"),
    ],
)
def test_a_warm_up_that_does_not_fit_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**options).check(max_steps=50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosin"}, r"optim.schedule=cosin is not one of .*did you mean 'cosine'\?"),
        ({"decay_shape": "line"}, "did you mean 'linear'"),
        ({"lr": 0.0}, "optim.lr=0.0 must be above 0"),
        ({"lr": float("nan")}, "optim.lr=nan must be above 0"),
        ({"min_lr_ratio": 1.5}, "optim.min_lr_ratio=1.5 must be at least 0 and at most 1"),
        ({"warmup_steps": -1}, "optim.warmup_steps=-1 must be at least 0"),
        ({"decay_fraction": 0.0}, "optim.decay_fraction=0.0 must be above 0"),
        ({"decay_steps": 0}, "optim.decay_steps=0 must be at least 1"),
    ],
)
def test_bad_values_fail_in_one_line(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        ScheduleConfig(**options)
    assert "\n" not in str(error.value)


def test_description_shows_first_peak_and_last_step() -> None:
    config = ScheduleConfig(lr=2e-3, schedule="wsd", warmup_steps=9, min_lr_ratio=0.0)
    text = describe_schedule(config, 100)
    rows = {int(line.split()[0]): line.split()[1:] for line in text.splitlines()[2:]}
    assert "wsd" in text
    assert rows[0] == ["0.1000", "0.0002"]
    assert rows[9] == ["1.0000", "0.002"]
    assert rows[80] == ["1.0000", "0.002"]
    assert rows[99] == ["0.0500", "0.0001"]
    assert max(rows) == 99


def test_it_survives_omegaconf() -> None:
    merged = OmegaConf.merge(OmegaConf.structured(ScheduleConfig), {"decay_steps": 7})
    assert OmegaConf.to_object(merged) == ScheduleConfig(decay_steps=7)
