"""Checks of arguments, made before a call does anything. A wrong type is Python's own error."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

from transport.errors import UsageError

T = TypeVar("T")

_FOR_EVER_S = 1e8  # three years; the standard library refuses to wait for centuries


def at_least(least: int, value: Any, what: str) -> int:
    """``value`` as an int: numpy's numbers are none to a database, or to a record. UsageError if it is smaller."""
    number = operator.index(value)
    if number < least:
        raise UsageError(f"{what}={number}; give a whole number of at least {least}")
    return number


def number(value: Any, what: str) -> int:
    """Return ``value``, also one of numpy's, as an int. UsageError where 64 bits do not hold it."""
    found = operator.index(value)
    if not -(2**63) <= found < 2**63:
        raise UsageError(f"{what} is {found}: give a whole number that 64 bits hold")
    return found


def number_or_none(value: Any, what: str) -> int | None:
    """Return a `number` that may be left out."""
    return None if value is None else number(value, what)


def one_of(choices: Sequence[T], value: object, what: str) -> T:
    """Return ``value``, one of the choices. UsageError for anything else."""
    for choice in choices:
        if value == choice:
            return choice
    raise UsageError(f"{what}={value!r:.80}; give one of {', '.join(map(repr, choices))}")


def seconds(value: Any, what: str) -> None:
    """UsageError for a NaN, whose time never comes. None is left to the caller."""
    if value is not None and math.isnan(value):
        raise UsageError(f"{what} is not a number: give seconds")


def waiting(timeout: Any, what: str) -> float | None:
    """Return a longest wait as the standard library takes it: None for one without an end."""
    if timeout is None:
        return None
    seconds(timeout, what)
    return None if timeout > _FOR_EVER_S else float(timeout)


def several(values: Any, what: str) -> list[Any]:
    """``values`` as a list. UsageError for text, which would be taken for its letters."""
    if isinstance(values, str | bytes):
        raise UsageError(f"{what} got a {type(values).__name__}: give several, in a list")
    return list(values)
