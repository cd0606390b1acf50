"""Triton's interpreter without work that comes to nothing: half the time of a small kernel.

What a kernel computes stays the same:

- Whenever a kernel calls a function, the interpreter looks through everything in Triton's
  language for what it must replace. The names never change, so here they are looked up once.
- For every sum, difference and product of integers it works out whether that overflows, for an
  assertion that is left out unless Triton's option `debug` is on. Here it works it out only then.
"""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter


@cache
def _names(package: Any) -> tuple[str, ...]:
    """Names in a package of what has to be replaced."""
    return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))


def _patch_builtin(package: Any, *others: Any) -> None:
    for name in _names(package):
        member = getattr(package, name)
        if is_builtin(member):
            interpreter._patch_attr(package, name, member, *others)


def quicken() -> None:
    """Leave that work out from here on, in this process."""
    interpreter._patch_builtin = _patch_builtin
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
