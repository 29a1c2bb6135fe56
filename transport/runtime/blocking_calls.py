"""Blocking calls from a loop, in daemon threads: a destination or a store may hang for minutes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final, TypeVar

from transport.errors import StoreError
from transport.runtime import threads
from transport.runtime.error_text import error_text

STORE_PATIENCE_S: Final = 60.0
LEAST_ANSWER_S: Final = 0.2  # for an answer of a store that is there, where the caller's time is over
_AGAIN_S: Final = 0.5

T = TypeVar("T")


_Outcome = tuple[T | None, BaseException | None]  # the result, or the error


def _in_daemon(call: Callable[[], T], told: Callable[[list[_Outcome[T]]], object], name: str) -> None:
    """Run the call in a daemon thread, and tell its outcome there, in a list that the receiver empties."""
    try:
        threads.start(threading.Thread(target=_run, args=([call], [told]), name=name, daemon=True))
    except RuntimeError:
        if threading.main_thread().is_alive():  # the system has no more threads
            raise
        _run([call], [told])  # Python 3.12 starts none while the process exits


def _run(calls: list[Callable[[], T]], tolds: list[Callable[[list[_Outcome[T]]], object]]) -> None:
    """Run a call and tell, holding nothing of the call then: an exit does not wait for the thread, and one that then
    frees a framework's object, such as torch's process group, aborts the process.

    Nor does its frame hold the outcome or its receiver afterwards: an error refers to this frame, and in a cycle both
    would stay, with all that the call held.
    """
    outcomes: list[_Outcome[T]] = []
    try:
        outcomes.append((calls.pop()(), None))
    except BaseException as error:
        outcomes.append((None, error))
    tolds.pop()(outcomes)


def started(call: Callable[[], T]) -> Future[T]:
    """Run the call in a daemon thread, for which no exit waits; the future has its result."""
    future: Future[T] = Future()
    _in_daemon(call, lambda outcomes: _settle(future, *outcomes.pop()), "transport call")
    return future


class BoundedCalls:
    """Calls to what may hang: each is waited for no longer than its caller has time, and goes on alone.

    No other one begins meanwhile: there is one thread that hangs, whatever is asked for.
    """

    def __init__(self) -> None:
        self._under_way: Future[Any] | None = None

    def call(self, call: Callable[[], T], most_s: float) -> T:
        """Return what the call returns. TimeoutError: not in ``most_s``, or `LEAST_ANSWER_S` where that is less."""
        give_up = time.monotonic() + max(most_s, LEAST_ANSWER_S)
        before = self._under_way
        if before is not None and wait([before], max(most_s, 0.0)).not_done:
            raise TimeoutError("an earlier call has no answer yet")
        self._under_way = future = started(call)
        if wait([future], max(give_up - time.monotonic(), 0.0)).not_done:
            raise TimeoutError("there was no answer in time")
        return future.result()


def in_thread(function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """Run the call in a daemon thread. Cancelling the future does not stop it; neither loop nor exit wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    waiting = [future]  # taken out on the loop: the future has the result, and the thread may end after its waiter

    def settle(outcomes: list[_Outcome[T]]) -> None:
        future, outcome = waiting.pop(), outcomes.pop()
        if not future.done():
            _settle(future, *outcome)

    def told(outcomes: list[_Outcome[T]]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for the result
            loop.call_soon_threadsafe(settle, outcomes)

    _in_daemon(partial(function, *arguments), told, f"transport {getattr(function, '__name__', 'call')}")
    return future


def _settle(future: Future[T] | asyncio.Future[T], result: T | None, error: BaseException | None) -> None:
    if error is None:
        future.set_result(result)  # type: ignore[arg-type]
    else:
        future.set_exception(error)


def in_parallel(calls: Iterable[Callable[[], T]], at_once: int, stop: Callable[[], object]) -> list[T]:
    """Return the results of calls, in their order, made by up to ``at_once`` daemon threads.

    After an error no further call begins, ``stop`` is called so that the running ones can end, and the error is raised
    once they have.
    """
    works = list(enumerate(calls))
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                if errors or not works:
                    return
                number, call = works.pop(0)
            try:
                result = call()
            except BaseException as error:
                with lock:
                    errors.append(error)
                stop()
                return
            with lock:
                results[number] = result

    most = min(at_once, len(works))
    workers = [threading.Thread(target=run, name="transport files", daemon=True) for _ in range(most)]
    try:
        for worker in workers:
            threads.start(worker)
        for worker in workers:
            worker.join()
    except BaseException as error:  # an interrupt
        with lock:
            errors.append(error)
        stop()
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]


async def settled(future: asyncio.Future[T], most_s: float) -> bool:
    """Wait at most ``most_s`` for a future to end, even if this task is cancelled meanwhile; returns whether it ended.

    A cancellation is raised afterwards."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + most_s
    cancelled = False
    while not future.done() and loop.time() < give_up_at:
        try:
            await asyncio.wait([future], timeout=give_up_at - loop.time())
        except asyncio.CancelledError:
            cancelled = True
    if future.done() and not future.cancelled():
        future.exception()  # retrieved, so that asyncio does not log it; the caller decides whether to raise it
    if cancelled:
        raise asyncio.CancelledError
    return future.done()


async def failure(future: asyncio.Future[T], most_s: float) -> str | None:
    """Say why a future has no result: its error, or that it has not ended within ``most_s``; None: it has one."""
    if not await settled(future, most_s):
        return f"no answer within {most_s:g} s"
    error = future.exception()
    return None if error is None else error_text(error)


async def retry_store(call: Callable[[], T]) -> T:
    """Call the store, and retry while it is unavailable or full. Raises its last error after `STORE_PATIENCE_S`."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + STORE_PATIENCE_S
    while True:
        try:
            return await in_thread(call)
        except StoreError as error:
            if not error.retryable or loop.time() >= give_up_at:
                raise
            await asyncio.sleep(_AGAIN_S)
