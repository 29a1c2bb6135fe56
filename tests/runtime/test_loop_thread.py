"""A loop in a thread of its own: results and cancellation."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
from sleepers import Sleeper

from transport.errors import UsageError
from transport.runtime.loop_thread import Job, LoopThread

WATCHDOG_S = 30.0  # a bound on a wait that does not happen when the code is right


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    made = LoopThread("test loop")
    yield made
    made.close()


class HookedThread(LoopThread):
    """Runs a hook on each future between submitting and waiting."""

    hook: Callable[[Future[Any]], None]

    def submit(self, coroutine: Coroutine[Any, Any, Any], job: Job[Any] | None = None) -> Job[Any]:
        future = super().submit(coroutine, job)
        self.hook(future)
        return future


# --- running --------------------------------------------------------------------------------------
def test_run_returns_the_result_from_another_thread(loop_thread: LoopThread) -> None:
    async def where() -> str:
        return threading.current_thread().name

    assert loop_thread.run(where()) == "test loop"
    assert threading.current_thread().name != "test loop"


def test_everything_runs_on_one_loop(loop_thread: LoopThread) -> None:
    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert loop_thread.run(loop()) is loop_thread.run(loop())
    assert "uvloop" in type(loop_thread.run(loop())).__module__


def test_run_raises_what_the_coroutine_raises(loop_thread: LoopThread) -> None:
    async def fail() -> None:
        raise LookupError("this one")

    with pytest.raises(LookupError, match="this one"):
        loop_thread.run(fail())
    assert loop_thread.run(asyncio.sleep(0, "works on")) == "works on"


def test_threads_share_the_loop(loop_thread: LoopThread) -> None:
    meeting = asyncio.Barrier(4)
    met: list[int] = []

    async def meet() -> int:
        return await meeting.wait()

    threads = [threading.Thread(target=lambda: met.append(loop_thread.run(meet()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(met) == [0, 1, 2, 3]


# --- cancellation ---------------------------------------------------------------------------------
def test_cancelling_the_future_cancels_the_coroutine(loop_thread: LoopThread) -> None:
    sleeper = Sleeper()
    future = loop_thread.submit(sleeper.sleep())
    assert sleeper.started.wait(WATCHDOG_S)
    assert future.cancel()
    assert sleeper.ended.wait(WATCHDOG_S)
    assert sleeper.how == "cancelled"


def test_a_timeout_cancels_the_coroutine(loop_thread: LoopThread) -> None:
    sleeper = Sleeper()
    with pytest.raises(TimeoutError):
        loop_thread.run(sleeper.sleep(), timeout=0.01)
    # The loop handles in order: after this, the cancellation has arrived.
    loop_thread.run(asyncio.sleep(0))
    assert sleeper.how in ("cancelled", "never started")
    assert loop_thread.run(asyncio.sleep(0, "works on")) == "works on"


def test_an_interrupt_while_waiting_cancels_the_coroutine() -> None:
    sleeper = Sleeper()

    def interrupt(future: Future[Any]) -> None:
        assert sleeper.started.wait(WATCHDOG_S)

        def result(timeout: float | None = None) -> None:
            raise KeyboardInterrupt  # what a Ctrl-C makes of the wait

        future.result = result  # type: ignore[method-assign,assignment]

    loop_thread = HookedThread("test loop")
    loop_thread.hook = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            loop_thread.run(sleeper.sleep())
        assert sleeper.ended.wait(WATCHDOG_S)
        assert sleeper.how == "cancelled"
    finally:
        loop_thread.close()


class Cleaning:
    """A coroutine whose clean-up takes many turns of the loop."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.cleaned = False

    async def work(self) -> None:
        self.begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for _ in range(1000):
                await asyncio.sleep(0)
            self.cleaned = True


def test_an_interrupt_is_raised_when_the_coroutine_has_cleaned_up() -> None:
    cleaning = Cleaning()

    def interrupt(future: Future[Any]) -> None:
        assert cleaning.begun.wait(WATCHDOG_S)

        def result(timeout: float | None = None) -> None:
            raise KeyboardInterrupt

        future.result = result  # type: ignore[method-assign,assignment]

    loop_thread = HookedThread("test loop")
    loop_thread.hook = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            loop_thread.run(cleaning.work())
        assert cleaning.cleaned
    finally:
        loop_thread.close()


def test_a_timeout_is_raised_when_the_coroutine_has_cleaned_up(loop_thread: LoopThread) -> None:
    cleaning = Cleaning()
    with pytest.raises(TimeoutError):
        loop_thread.run(cleaning.work(), timeout=0.05)
    assert cleaning.cleaned or not cleaning.begun.is_set()


def test_waiting_on_the_loops_own_thread_is_refused_instead_of_never_ending(loop_thread: LoopThread) -> None:
    async def wait_for_itself() -> None:
        loop_thread.run(asyncio.sleep(0))  # a coroutine that is never closed warns, and a warning fails the test

    with pytest.raises(UsageError, match="made on it"):
        loop_thread.run(wait_for_itself())
    gc.collect()
    assert loop_thread.run(asyncio.sleep(0, "works on")) == "works on"


def test_a_coroutine_that_cancels_itself_raises_cancelled(loop_thread: LoopThread) -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(CancelledError):
        loop_thread.run(give_up())
