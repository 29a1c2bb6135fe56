"""Decoders of types, which several threads may use first, at the same time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

_examining = threading.RLock()  # what is freed in the middle of it may decode for its end
# A child process that another thread forks while this lock is held would wait for the lock for ever.
os.register_at_fork(before=_examining.acquire, after_in_parent=_examining.release, after_in_child=_examining.release)


def json_decoder(kind: type[T]) -> Callable[[Any], T]:
    """Return what decodes JSON to ``kind``, and raises msgspec.MsgspecError, UnicodeError or RecursionError.

    Every decoder of a type is made here, or by the next: msgspec examines a type at its first use, and stores what it
    knows before the types of the fields are examined. A second thread that used it meanwhile would use an incomplete
    type, and the process would crash (msgspec 0.22).
    """
    return _made(msgspec.json.Decoder, kind)


def msgpack_decoder(kind: type[T]) -> Callable[[Any], T]:
    """Return what decodes MessagePack to ``kind``, and raises as the decoder of JSON does."""
    return _made(msgspec.msgpack.Decoder, kind)


def convert(value: Any, kind: type[T], *, strict: bool = True) -> T:
    """Return a value of plain types as ``kind``. Raises msgspec.ValidationError."""
    _made(msgspec.json.Decoder, kind)
    return msgspec.convert(value, kind, strict=strict)


def _make(form: Any, kind: Any) -> Callable[[Any], Any]:
    with _examining:
        return cast(Callable[[Any], Any], form(kind).decode)


_made: Callable[[Any, Any], Callable[[Any], Any]] = cache(_make)
