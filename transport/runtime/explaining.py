"""Errors of calls with a wrong argument: UsageError names the argument and what to give, whatever failed because of it.

For calls whose time does not matter to a payload; those of a payload check their arguments themselves (`arguments`).
Nothing is checked before the call: where it fails with one of Python's own errors, its arguments are compared with its
annotations, and where all of them fit, the error goes on as it is, for then it is a defect of the callee.
"""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

from transport.errors import TransportError, UsageError
from transport.runtime.arguments import named_kind

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

_OWN: Final = (TypeError, AttributeError, ValueError, KeyError, IndexError, OverflowError)
_LARGEST: Final = 2**63
_CHECKED: Final[set[Any]] = set()


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function, or the function of a coroutine."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*arguments: P.args, **named: P.kwargs) -> Any:
            try:
                return await function(*arguments, **named)
            except _OWN as error:
                explain(function, arguments, named, error)
                raise

        return typing.cast("Callable[P, R]", awaited)

    @functools.wraps(function)
    def called(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return function(*arguments, **named)
        except _OWN as error:
            explain(function, arguments, named, error)
            raise

    return called


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a method that checks its arguments itself; `explained_calls` leaves it as it is.

    For what returns claims or answers: before Python 3.12 an interrupt between such a call and the return of its
    decorator would lose them, and no code of the method could know.
    """
    _CHECKED.add(function)
    return function


def explained_calls(kind: C) -> C:
    """Decorates a class: `explained` for what makes it and for all of its own public methods."""
    for name, member in list(vars(kind).items()):
        if name != "__init__" and (name.startswith("_") or inspect.isgeneratorfunction(member)):
            continue
        if isinstance(member, types.FunctionType) and member in _CHECKED:
            continue
        if isinstance(member, classmethod | staticmethod):
            setattr(kind, name, type(member)(explained(member.__func__)))
        elif isinstance(member, types.FunctionType) and not inspect.isasyncgenfunction(member):
            setattr(kind, name, explained(member))
    return kind


def explain(function: Callable[..., Any], arguments: Any, named: Any, error: BaseException) -> None:
    """Raise UsageError for the first argument that does not fit; return where all do, or where the error is ours."""
    if isinstance(error, TransportError) or not isinstance(error, _OWN):
        return
    signature = inspect.signature(function)
    try:
        given = signature.bind(*arguments, **named).arguments
    except TypeError:
        return  # Python's own words about the call as a whole are good ones
    hints = _hints(function)
    for name, value in given.items():
        parameter = signature.parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name not in hints:
            continue
        wanted = hints[name]
        call = f"{name} of {getattr(function, '__qualname__', '').removesuffix('.__init__')}()"
        if not _fits(value, wanted):
            raise UsageError(f"{call} got {named_kind(value)}: give {_words(wanted)}") from error
        if (fault := _fault(value, wanted)) is not None and not isinstance(error, AttributeError):
            raise UsageError(f"{call} got {fault}: give {_words(wanted)}") from error


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Annotations of the arguments, without those that are imported for type checkers only."""
    found = {}
    for name, text in inspect.get_annotations(inspect.unwrap(function)).items():
        with contextlib.suppress(Exception):
            if isinstance(text, str):
                alone = types.SimpleNamespace(__annotations__={name: text})
                text = typing.get_type_hints(alone, vars(sys.modules[function.__module__]), include_extras=True)[name]
            found[name] = text
    return found


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value may be meant by an annotation; True where that cannot be told."""
    origin = typing.get_origin(wanted)
    if wanted is Any or isinstance(wanted, TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in typing.get_args(wanted))
    if origin is typing.Literal:
        return any(value is each or (type(value) is type(each) and value == each) for each in typing.get_args(wanted))
    if origin is typing.Annotated:
        return _fits(value, typing.get_args(wanted)[0])
    if wanted is None or wanted is type(None):
        return value is None
    if origin is collections.abc.Callable or wanted is Callable:
        return callable(value)
    kind = origin or wanted
    if not isinstance(kind, type) or kind is object:
        return True
    if isinstance(value, type) and kind is not type:
        return False
    if kind is int:
        return hasattr(value, "__index__") and not isinstance(value, bool)
    if kind is float:
        return hasattr(value, "__float__") and not isinstance(value, bool)
    if isinstance(value, str | bytes) and kind in (collections.abc.Iterable, collections.abc.Sequence):
        return False
    try:
        if not isinstance(value, kind):
            return False
    except TypeError:  # a Protocol says nothing at run time
        return all(hasattr(value, name) for name in getattr(kind, "__annotations__", {}))
    inner = typing.get_args(wanted)
    if inner and isinstance(value, list | tuple):
        return all(_fits(each, inner[0]) for each in value) if kind is not tuple or inner[-1] is Ellipsis else True
    if len(inner) == 1 and isinstance(value, dict):
        return all(_fits(each, inner[0]) for each in value)
    if len(inner) == 2 and isinstance(value, dict):
        return all(_fits(key, inner[0]) and _fits(each, inner[1]) for key, each in value.items())
    return True


def _fault(value: Any, wanted: Any) -> str | None:
    """What is wrong with a value of the right kind."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which is no such number"
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return "a number that 64 bits do not hold"
    if isinstance(value, int | float) and value < 0:
        return f"{value}, which is below 0"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{value!a}, which UTF-8 cannot hold"
    return None


def _words(wanted: Any) -> str:
    """An annotation as the caller reads it in the documentation."""
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(each) for each in typing.get_args(wanted))
    if origin is typing.Literal:
        return " or ".join(map(repr, typing.get_args(wanted)))
    if wanted is type(None):
        return "None"
    if origin is collections.abc.Callable:
        return "what can be called"
    inner = [each for each in typing.get_args(wanted) if each is not Ellipsis]
    name = getattr(origin or wanted, "__name__", str(wanted))
    plain = {"int": "a whole number", "float": "a number", "str": "text", "bytes": "bytes"}.get(name, f"{name}")
    return f"{plain} of {' and '.join(_words(each) for each in inner)}" if inner else plain
