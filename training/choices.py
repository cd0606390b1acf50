"""Checks of single values, with the one-line messages every named option shares."""

import difflib
from collections.abc import Iterable


def check_choice(knob: str, value: str, choices: Iterable[str]) -> None:
    """Raise unless `value` is one of `choices`.

    Raises:
        ValueError: naming the knob, the choices and the one spelled most like `value`.
    """
    choices = list(choices)
    if value in choices:
        return
    raise ValueError(f"{knob}={value} is not one of {', '.join(choices)}{nearest(value, choices)}")


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the choice spelled most like `name`, or nothing."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


def check_range(
    knob: str,
    value: float,
    low: float,
    high: float = float("inf"),
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise unless `value` lies between `low` and `high`; an open end is itself excluded.

    Raises:
        ValueError: naming the knob, the value and the limits; NaN is never in range.
    """
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if above and below:
        return
    limit = f"{'above' if open_low else 'at least'} {low:g}"
    if high != float("inf"):
        limit += f" and {'below' if open_high else 'at most'} {high:g}"
    elif open_high:
        limit += " and finite"
    raise ValueError(f"{knob}={value} must be {limit}")
