"""The learning rate as a pure function of the step.

Nothing is remembered between steps, so a resumed run cannot disagree with an uninterrupted one.
A step is an optimizer step, counted from 0. Every schedule is a multiplier of the peak learning
rate: a linear warm-up, then the chosen shape up to a horizon, then the floor for good. The horizon
is `decay_steps`; left at None it is the length of the run, and set, it lets a run be cut short for
a trial without bending the schedule.
"""

import math
from dataclasses import dataclass

from training.choices import check_choice, check_range

SCHEDULES = ("cosine", "wsd", "constant")
DECAY_SHAPES = ("linear", "cosine", "sqrt")


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """The peak learning rate and its course over the steps.

    `warmup_steps` rise from above zero to the peak. `cosine` falls from there to the horizon; `wsd`
    (warm-up, stable, decay) keeps the peak until the last `decay_fraction` of the horizon and falls
    in the `decay_shape`; `constant` stays at the peak. The floor is `lr * min_lr_ratio`.
    """

    lr: float = 1e-3
    min_lr_ratio: float = 0.1
    schedule: str = "cosine"
    warmup_steps: int = 100
    decay_steps: int | None = None  # the horizon; None: the length of the run
    decay_fraction: float = 0.2
    decay_shape: str = "linear"

    def __post_init__(self) -> None:
        """Raise ValueError on a value out of range or an unknown name."""
        check_choice("optim.schedule", self.schedule, SCHEDULES)
        check_choice("optim.decay_shape", self.decay_shape, DECAY_SHAPES)
        check_range("optim.lr", self.lr, 0, open_low=True, open_high=True)
        check_range("optim.min_lr_ratio", self.min_lr_ratio, 0, 1)
        check_range("optim.warmup_steps", self.warmup_steps, 0)
        check_range("optim.decay_fraction", self.decay_fraction, 0, 1, open_low=True)
        if self.decay_steps is not None:
            check_range("optim.decay_steps", self.decay_steps, 1)

    def check(self, max_steps: int) -> None:
        """Check the schedule against the length of the run.

        Raises:
            ValueError: when the warm-up does not end before the decay begins.
        """
        horizon = _horizon(self, max_steps)
        latest = _decay_start(self, max_steps) if self.schedule == "wsd" else horizon - 1
        if self.warmup_steps > latest:
            knob = "train.max_steps" if self.decay_steps is None else "optim.decay_steps"
            raise ValueError(
                f"optim.warmup_steps={self.warmup_steps} must be at most {latest} with "
                f"optim.schedule={self.schedule} and {knob}={horizon}: lower it or raise {knob}"
            )


def lr_multiplier(step: int, config: ScheduleConfig, max_steps: int) -> float:
    """Return the factor of the peak learning rate at `step`, for a run of `max_steps`.

    The first step of a warm-up of w steps is 1 / (w + 1), above zero. From the end of the warm-up
    on the value lies between `min_lr_ratio` and 1, also beyond the horizon.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    start, horizon = _decay_start(config, max_steps), _horizon(config, max_steps)
    progress = min(max((step - start) / (horizon - start), 0.0), 1.0)
    shape = "cosine" if config.schedule == "cosine" else config.decay_shape
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * _remaining(shape, progress)


def describe_schedule(config: ScheduleConfig, max_steps: int) -> str:
    """Return the schedule as a small text table: a dry run prints it before anything is spent."""
    start, horizon = _decay_start(config, max_steps), _horizon(config, max_steps)
    steps = {0, config.warmup_steps, start, max_steps - 1}
    steps |= {round(quarter * (max_steps - 1) / 4) for quarter in range(1, 4)}
    lines = [
        f"schedule {config.schedule}: warm-up {config.warmup_steps} steps, horizon {horizon}, "
        f"run of {max_steps} steps",
        f"{'step':>10}  {'multiplier':>10}  {'lr':>10}",
    ]
    for step in sorted(step for step in steps if 0 <= step < max_steps):
        multiplier = lr_multiplier(step, config, max_steps)
        lines.append(f"{step:>10}  {multiplier:>10.4f}  {config.lr * multiplier:>10.3g}")
    return "\n".join(lines)


def _horizon(config: ScheduleConfig, max_steps: int) -> int:
    """Return the step at which the floor is reached."""
    return max_steps if config.decay_steps is None else config.decay_steps


def _decay_start(config: ScheduleConfig, max_steps: int) -> int:
    """Return the last step at the peak."""
    horizon = _horizon(config, max_steps)
    if config.schedule == "cosine":
        return config.warmup_steps
    if config.schedule == "constant":
        return horizon
    return horizon - max(1, round(horizon * config.decay_fraction))


def _remaining(shape: str, progress: float) -> float:
    """Return the share of the way down that is left: 1 at progress 0, 0 at progress 1.

    "sqrt" is the 1 - sqrt cool-down of Hägele et al. 2024 (arXiv 2405.18392), section 3.
    """
    if shape == "linear":
        return 1.0 - progress
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - math.sqrt(progress)
