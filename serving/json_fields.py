"""Checking JSON objects that people write: known names, right types, one line for what is wrong."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

SHOWN = 60  # characters of a wrong value in a message

WHOLE = "a whole number"
NUMBER = "a number"
TEXT = "a text"
TEXTS = "a text or a list of texts"
FLAG = "true or false"
OBJECT = "an object"
NAME = "a text or a whole number"
ANYTHING = "anything"


class FieldError(ValueError):
    """One field of an object is wrong; the message is one line."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


def read_object(raw: str | bytes, name: str) -> dict[str, Any]:
    """Return a JSON object without its null fields; ValueError in one line if it is none."""
    try:
        value = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, a number too long, lists too deep
        raise ValueError(f"{name} is not JSON that can be read: {shown(str(error))}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return {field: inside for field, inside in value.items() if inside is not None}


def check_fields(values: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """Raise FieldError for an unknown field, with the nearest name, or a value of a wrong type."""
    for name, value in values.items():
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(kinds)}"
            raise FieldError(name, f"unknown field {shown(name)}{hint}")
        if not _is(value, kinds[name]):
            raise FieldError(name, f"{name}={shown(value)} must be {kinds[name]}")


def read_bias(value: Mapping[str, Any]) -> dict[int, float]:
    """Return `logit_bias`, whose names are ids, as numbers; FieldError where they are not."""
    bias = {}
    for name, number in value.items():
        if not (name.isascii() and name.isdecimal() and len(name) < 20):
            raise FieldError("logit_bias", f"logit_bias names {shown(name)}, which is no id")
        if not _is(number, NUMBER):
            raise FieldError("logit_bias", f"logit_bias={shown(number)} must be a number")
        bias[int(name)] = float(number)
    return bias


def shown(value: Any) -> str:
    """A value on one line, with its middle left out if it is long."""
    try:
        text = ascii(value)
    except RecursionError:
        return "something nested deeply"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 13]}...{text[-10:]}"


def is_unicode(text: str) -> bool:
    """Whether a text is whole characters; JSON can also write half of one (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is(value: Any, kind: str) -> bool:
    if kind == ANYTHING:
        return True
    if isinstance(value, bool):
        return kind == FLAG
    if isinstance(value, int):
        # An integer may be larger than any float, which the model computes with.
        return kind in (WHOLE, NAME) or (kind == NUMBER and abs(value) < 2**1023)
    if isinstance(value, float):
        return kind == NUMBER
    if isinstance(value, str):
        return kind in (TEXT, TEXTS, NAME) and is_unicode(value)
    if isinstance(value, list):
        return kind == TEXTS and all(isinstance(text, str) and _is(text, TEXT) for text in value)
    return kind == OBJECT and isinstance(value, dict)
