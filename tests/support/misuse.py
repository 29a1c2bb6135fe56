"""The misuse of one call: other arguments, and what is left of it. See tests/misuse."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from misuse_scenes import Arguments, Scene

from transport import SharedRingBuffer
from transport.errors import InternalError, TransportError

WRONG: dict[str, Any] = {
    "None": None, "True": True, "-1": -1, "0": 0, "2**80": 1 << 80, "1.5": 1.5, "nan": math.nan, "inf": math.inf,
    "''": "", "'x'": "x", "'\\ud800'": "\ud800", "b'x'": b"x", "[]": [], "[None]": [None], "{}": {}, "{1: 1}": {1: 1},
    "object": object(), "int": int, "lambda": lambda *_: None,
}  # fmt: skip
"""By how it reads: what is given instead of each argument."""

_OF_THE_SIGNATURE = re.compile(r"\w+\(\) (got|missing|takes)|unexpected keyword|keywords must be", re.IGNORECASE)


def call(scene: Scene, name: str, arguments: Arguments, kept: list[Any] | None = None) -> Any:
    """Call and wait for its end, as its own kind of function wants it.

    What it returned is given back to its owner, or put into ``kept``.
    """
    scene.room()
    function = getattr(scene.thing, name)
    positional, named = [], dict(arguments)
    for parameter in _parameters(function):
        if f"*{parameter.name}" in named:
            given = named.pop(f"*{parameter.name}")
            positional += given if isinstance(given, tuple) else [given]
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name in named:
            positional.append(named.pop(parameter.name))
        elif f"**{parameter.name}" in named:
            given = named.pop(f"**{parameter.name}")
            named.update(
                given if isinstance(given, dict) and all(isinstance(key, str) for key in given) else {"x": given}
            )
    returned = function(*positional, **named)
    if inspect.isasyncgen(returned):
        returned = _all_of(returned)
    if inspect.isawaitable(returned):
        assert scene.wait is not None
        returned = scene.wait(returned)
    if inspect.isgenerator(returned):
        returned = list(returned)
    if kept is not None:
        kept.append(returned)
    elif returned is not scene.thing:
        give_back(returned)
    return returned


def give_back(value: Any) -> None:
    """End whatever a call returned, so that only what misuse left behind is left."""
    if isinstance(value, list | tuple):
        for each in value:
            if not isinstance(each, SharedRingBuffer):  # a place names the ring that it is in
                give_back(each)
    for ending in ("release", "abort", "close", "cancel"):
        end = getattr(value, ending, None)
        if callable(end) and not inspect.iscoroutinefunction(end) and not isinstance(value, memoryview | type):
            with contextlib.suppress(TransportError):
                end()
            return


async def _all_of(outcomes: Any) -> list[Any]:
    return [each async for each in outcomes]


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return []


def verdict(error: BaseException) -> str:
    """What is wrong with what was raised; nothing if empty.

    Of the error tree, with words; or Python's own TypeError for a call that does not fit the signature.
    """
    if isinstance(error, InternalError):
        return f"a defect of the package is reported: {error!r}"
    if isinstance(error, OSError) and error.filename is not None and not isinstance(error, TransportError):
        return ""  # of a path that cannot be used, with its name
    if isinstance(error, TimeoutError):
        return ""  # what was not there in time
    if isinstance(error, TransportError):
        return "" if len(str(error).split()) >= 3 else f"says nothing: {error!r}"
    if isinstance(error, TypeError) and _OF_THE_SIGNATURE.search(str(error)):
        return ""  # Python's own words for a call that does not fit a signature
    return f"{type(error).__name__}: {str(error)[:150]}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Objects that are dropped without their end say so; here they are dropped on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
        gc.collect()


def each_wrong(scene: Scene, name: str) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Parameter, what it is given, and the call. Its other arguments are made anew for each."""
    for parameter in scene.calls[name]():
        for reads, value in WRONG.items():

            def misused(parameter: str = parameter, value: Any = value) -> Any:
                scene.room()  # before the arguments: what they wrote must be there when it is called
                given = (value,) if parameter.startswith("*") and not parameter.startswith("**") else value
                return call(scene, name, {**scene.calls[name](), parameter: given})

            yield parameter, reads, misused
