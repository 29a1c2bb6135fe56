"""Blocking calls in daemon threads."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from transport.runtime.blocking_calls import in_parallel, in_thread, started
from transport.testing import run


class Model:
    """What a framework's call holds."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def save(self) -> str:
        self.go.wait()
        return "saved"


def test_the_thread_of_a_call_holds_nothing_of_it_when_its_result_is_told() -> None:
    model = Model()
    alive, go = weakref.ref(model), model.go
    future: Future[object] = started(model.save)
    del model
    held: list[bool] = []
    future.add_done_callback(lambda _: held.append(alive() is not None))
    go.set()
    assert future.result(10) == "saved"
    assert held == [False]


def test_an_error_keeps_nothing_of_its_call_once_it_is_handled() -> None:
    def fail(model: Model) -> None:
        raise ValueError(repr(model))

    async def handled() -> weakref.ref[Model]:
        model = Model()
        with pytest.raises(ValueError, match="Model"):
            await in_thread(fail, model)
        return weakref.ref(model)

    gc.disable()
    try:
        alive = run(handled())
        for thread in threading.enumerate():
            if thread.name == "transport fail":
                thread.join()
        assert alive() is None
    finally:
        gc.enable()


def test_a_result_is_freed_by_the_loop_that_waited_for_it() -> None:
    freed_by: set[str] = set()

    class Group:
        def __del__(self) -> None:
            freed_by.add(threading.current_thread().name)

    async def calls() -> None:
        for _ in range(500):
            await in_thread(Group)

    run(calls())
    assert freed_by == {threading.current_thread().name}


def test_a_call_whose_future_is_cancelled_goes_on_to_its_end() -> None:
    model = Model()

    async def cancelled() -> None:
        waits = in_thread(model.save)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        model.go.set()
        assert await in_thread(model.save) == "saved"

    run(cancelled())


class Interrupt(BaseException):
    """What a signal's handler raises."""


@pytest.mark.parametrize("begin", [started, lambda call: in_parallel([call], 1, int)], ids=["started", "in parallel"])
def test_an_interrupt_while_the_thread_of_a_call_starts_is_raised_as_it_is(
    begin: Callable[[Callable[[], None]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise Interrupt

    ran = threading.Event()
    switching = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # the thread begins when this one waits for it
    try:
        monkeypatch.setattr(threading.Condition, "_acquire_restore", interrupted)
        with pytest.raises(Interrupt):
            begin(ran.set)
    finally:
        sys.setswitchinterval(switching)
    assert ran.wait(15.0)


AT_EXIT = """
import atexit
from transport.runtime.blocking_calls import started
atexit.register(lambda: print(started(lambda: "made").result(30)))
"""


def test_a_call_is_made_while_the_process_exits() -> None:
    """Python 3.12 starts no thread then."""
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("made\n", "")
