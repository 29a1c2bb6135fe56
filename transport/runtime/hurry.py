"""Limits how long calls to a server that does not answer may delay the end of this process.

    the end begins  calls wait for a silent server at most `MOST_S` more
    MOST_S later    calls that hang in a connection are cut; a server that failed once is not asked again afterwards

A server that answers is used as before, as long as the end takes. `begin` is for a process that ends: a signal handler
calls it (signals.py). `while_ending` is for the end of one object: what its threads wait for ends, too. Behind a signal
it counts from its own beginning, since a rollout drains in between; several have that time together.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Final, Protocol

from transport.runtime.waits import Flag

MOST_S: Final = 1.0
LEAST_S: Final = 0.2  # for one answer, once that is over

ends: dict[object, tuple[float, float]] = {}  # of each who has begun: monotonic times, see `until` and `since`
_SIGNAL: Final = "signal"
_spent: dict[object, float] = {}  # seconds of the ends of objects behind a signal, which are over


class Cuttable(Protocol):
    """A connection to a server, in which calls may hang."""

    def cut(self) -> None:
        """End the calls that are in progress, and bound those to come. From any thread."""


_connections: weakref.WeakSet[Cuttable] = weakref.WeakSet()


def watch(connection: Cuttable) -> None:
    """Have `cut` called for this connection, as long as it lives."""
    _connections.add(connection)


def until() -> float:
    """Monotonic time from which on no call waits for a server that does not answer; inf: no end has begun."""
    return _first()[0]


def since() -> float:
    """Monotonic time at which that end began; inf: none has."""
    return _first()[1]


def bounded(timeout_s: float) -> float:
    """``timeout_s`` of a call that a living server answers at once, cut to what the end leaves: `LEAST_S` at least."""
    return min(timeout_s, max(until() - time.monotonic(), LEAST_S)) if ends else timeout_s


def signalled_at() -> float:
    """Monotonic time of the first signal to stop; inf: there was none."""
    return ends.get(_SIGNAL, (0.0, float("inf")))[1]


def stop_requested() -> bool:
    """Return whether a signal has asked the program to stop."""
    return signalled_at() < float("inf")


def _first() -> tuple[float, float]:
    objects = ends.copy()
    process = objects.pop(_SIGNAL, (float("inf"), float("inf")))
    return min(objects.values(), default=process)


def begin(most_s: float = MOST_S) -> None:
    """Begin the process's end. For signal handlers: it takes no lock that the interrupted code may hold."""
    now = time.monotonic()
    at = now + most_s, now
    if ends.setdefault(_SIGNAL, at) is at and _connections:
        with contextlib.suppress(RuntimeError):  # no more threads: calls end at their own limit
            _thread.start_new_thread(_cut_at, (_SIGNAL, at))


def over() -> None:
    """End what `begin` has begun: the process goes on."""
    ends.pop(_SIGNAL, None)
    _spent.clear()


@contextlib.contextmanager
def while_ending(most_s: float = MOST_S) -> Iterator[None]:
    """Let calls of all threads wait for a silent server at most ``most_s`` seconds from now, while the block runs.

    Less by what such blocks have taken since a signal: a server that failed in them is not asked for that long again.
    """
    key = object()
    ended = Flag()
    now = time.monotonic()
    most_s = max(0.0, most_s - sum(_spent.copy().values()))
    cutting = threading.Thread(target=_cut_unless, args=(ended, most_s), name="transport hurry", daemon=True)
    try:
        ends[key] = now + most_s, min(now, signalled_at())
        if _connections:
            with contextlib.suppress(RuntimeError):  # no more threads: calls end at their own limit
                cutting.start()
        yield
    finally:
        ended.set()
        ends.pop(key, None)
        if stop_requested():
            _spent[key] = time.monotonic() - now
        if cutting.ident is not None:
            cutting.join()


def _cut_at(key: object, at: tuple[float, float]) -> None:
    time.sleep(max(0.0, at[0] - time.monotonic()))
    if ends.get(key) is at:
        _cut()


def _cut_unless(ended: Flag, most_s: float) -> None:
    if not ended.wait(most_s):
        _cut()


def _cut() -> None:
    for connection in list(_connections):
        connection.cut()


def _after_fork() -> None:
    ends.clear()
    _spent.clear()


os.register_at_fork(after_in_child=_after_fork)  # a child does not end because its parent does
