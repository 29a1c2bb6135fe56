"""Checks of arguments, made before a call does anything."""

from __future__ import annotations

from typing import Any

from transport.errors import UsageError

_FOR_EVER_S = 1e8  # three years; the standard library refuses to wait for centuries


def expect(value: object, kinds: type | tuple[type, ...], what: str, give: str) -> None:
    """Raise UsageError unless ``value`` is one of ``kinds``. It names the type only: values may be secret.

    Args:
        what: the call and its argument, "consume(batch)".
        give: what to pass instead.
    """
    if not isinstance(value, kinds):
        raise UsageError(f"{what} got {named_kind(value)}: give {give}")


def named_kind(value: object) -> str:
    """What a value is, in words that give nothing of it away: "a str", "None", "the class Ticket"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def whole(value: Any, what: str) -> int:
    """``value`` as an int, without bools. UsageError for anything else.

    What a caller goes on with is the int: numpy's numbers are none to a database, or to a record.
    """
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        number: int = value.__index__()
    except (AttributeError, TypeError):
        raise UsageError(f"{what} got {named_kind(value)}: give a whole number") from None
    return number


def at_least(least: int, value: Any, what: str) -> int:
    """`whole`, with a lower bound."""
    number = whole(value, what)
    if number < least:
        raise UsageError(f"{what}={number}; give a whole number of at least {least}")
    return number


def seconds(value: Any, what: str, *, none: bool = False) -> None:
    """UsageError unless ``value`` is a number of seconds, or None where that has a meaning. Not a NaN."""
    if none and value is None:
        return
    if isinstance(value, bool | type) or not hasattr(value, "__float__"):
        raise UsageError(f"{what} got {named_kind(value)}: give seconds{', or None' if none else ''}")
    if value != value:
        raise UsageError(f"{what} is not a number: give seconds{', or None' if none else ''}")


def waiting(timeout: Any, what: str) -> float | None:
    """A longest wait as the standard library takes it: None for one without an end. UsageError for no number."""
    seconds(timeout, what, none=True)
    return None if timeout is None or timeout > _FOR_EVER_S else float(timeout)


def several(values: Any, kinds: type | tuple[type, ...], what: str, give: str) -> list[Any]:
    """``values`` as a list of ``kinds``. Text is not taken for its letters. UsageError for anything else."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise UsageError(f"{what} got {named_kind(values)}: give {give}")
    listed = list(values)
    for value in listed:
        expect(value, kinds, what, give)
    return listed


def text(value: Any, what: str) -> str:
    """``value`` as text that can be stored. UsageError for anything else."""
    expect(value, str, what, "text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is {value!a:.80}: give text that UTF-8 can hold") from error
    return str(value)
