"""A loop in a thread of its own: results, cancellation, and its end."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
from support import Child

from transport.background import LoopThread
from transport.errors import ClosedError, UsageError

WATCHDOG_S = 30.0  # a bound on a wait that does not happen when the code is right


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    made = LoopThread("test loop")
    yield made
    made.close()


class Sleeper:
    """A coroutine that waits until it is cancelled, and says how it ended."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.ended = threading.Event()
        self.how = "never started"

    async def sleep(self) -> None:
        self.how = "running"
        self.started.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.how = "cancelled"
            raise
        finally:
            self.ended.set()


class HookedThread(LoopThread):
    """Runs a hook on each future between submitting and waiting."""

    hook: Callable[[Future[Any]], None]

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        future = super().submit(coroutine)
        self.hook(future)
        return future


# --- running ---------------------------------------------------------------------------------------
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


# --- cancellation ------------------------------------------------------------------------------------
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


# --- the end -------------------------------------------------------------------------------------------
def test_close_cancels_what_runs_and_waits_for_it() -> None:
    loop_thread = LoopThread("test loop")
    sleepers = [Sleeper() for _ in range(3)]
    futures = [loop_thread.submit(sleeper.sleep()) for sleeper in sleepers]
    assert all(sleeper.started.wait(WATCHDOG_S) for sleeper in sleepers)
    loop_thread.close()
    assert [sleeper.how for sleeper in sleepers] == ["cancelled"] * 3
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(WATCHDOG_S)


def test_close_waits_for_cleaning_up() -> None:
    loop_thread = LoopThread("test loop")
    started = threading.Event()
    cleaned = []

    async def slow_to_clean() -> None:
        try:
            started.set()
            await asyncio.get_running_loop().create_future()
        finally:
            for step in range(5):
                await asyncio.sleep(0)
                cleaned.append(step)

    loop_thread.submit(slow_to_clean())
    assert started.wait(WATCHDOG_S)
    loop_thread.close()
    assert cleaned == [0, 1, 2, 3, 4]


def test_close_cancels_what_begins_while_it_cleans_up() -> None:
    loop_thread = LoopThread("test loop")
    started = threading.Event()
    late = Sleeper()
    tasks = []

    async def starts_another() -> None:
        try:
            started.set()
            await asyncio.get_running_loop().create_future()
        finally:
            tasks.append(asyncio.get_running_loop().create_task(late.sleep()))
            await asyncio.sleep(0)

    loop_thread.submit(starts_another())
    assert started.wait(WATCHDOG_S)
    loop_thread.close()
    assert late.how == "cancelled"


def test_close_finishes_abandoned_iterators() -> None:
    loop_thread = LoopThread("test loop")
    finished = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            finished.append(True)

    iterator = numbers()

    async def first() -> int:
        return await anext(iterator)

    assert loop_thread.run(first()) == 1
    loop_thread.close()
    assert finished == [True]


def test_close_goes_on_when_a_coroutine_fails_on_cancellation() -> None:
    loop_thread = LoopThread("test loop")
    started = threading.Event()

    async def fails_on_cancellation() -> None:
        try:
            started.set()
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise LookupError("while cleaning up") from None

    future = loop_thread.submit(fails_on_cancellation())
    assert started.wait(WATCHDOG_S)
    loop_thread.close()
    with pytest.raises(LookupError):
        future.result(WATCHDOG_S)


def test_close_ends_the_thread_and_may_be_called_again() -> None:
    before = set(threading.enumerate())
    loop_thread = LoopThread("test loop")
    assert len(set(threading.enumerate()) - before) == 1
    assert not loop_thread.closed
    loop_thread.close()
    assert set(threading.enumerate()) - before == set()
    assert loop_thread.closed
    loop_thread.close()


def test_after_close_nothing_is_accepted_and_no_coroutine_is_left_unawaited() -> None:
    loop_thread = LoopThread("test loop")
    loop_thread.close()
    for call in (loop_thread.submit, loop_thread.run):
        with pytest.raises(ClosedError):
            call(asyncio.sleep(0))  # a coroutine that is never closed warns, and a warning fails the test
    gc.collect()


def test_a_submit_that_races_with_close_is_refused_or_ends(loop_thread: LoopThread) -> None:
    meeting = threading.Barrier(2)
    ends: list[str] = []

    def submit() -> None:
        meeting.wait()
        while True:
            try:
                future = loop_thread.submit(asyncio.sleep(0))
            except ClosedError:
                ends.append("refused")
                return
            try:
                future.result(WATCHDOG_S)
            except CancelledError:
                ends.append("cancelled")

    thread = threading.Thread(target=submit)
    thread.start()
    meeting.wait()
    loop_thread.close()
    thread.join()
    assert ends[-1] == "refused"


# --- the end of the process --------------------------------------------------------------------------
def test_the_processes_exit_ends_the_loop_and_what_runs_on_it() -> None:
    code = """
import asyncio, threading
from transport.background import LoopThread
started = threading.Event()
async def forever():
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        print("ended", flush=True)
loop_thread = LoopThread("test loop")
loop_thread.submit(forever())
started.wait()
"""
    with Child(code) as child:
        assert child.line() == "ended"
        assert child.wait() == 0


def test_a_forked_child_has_no_loop_and_its_exit_waits_for_none() -> None:
    code = """
import asyncio, os, sys
from transport.background import LoopThread
from transport.errors import ClosedError
loop_thread = LoopThread("test loop")
with loop_thread._ending:  # as another thread may hold it at the fork
    pid = os.fork()
if pid == 0:
    loop_thread.close()
    try:
        loop_thread.run(asyncio.sleep(0))
    except ClosedError:
        sys.exit(7 if loop_thread.closed else 1)
    sys.exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), loop_thread.run(asyncio.sleep(0, "runs")), flush=True)
"""
    with Child(code) as child:
        assert child.line() == "7 runs"
        assert child.wait() == 0


def test_what_is_called_at_exit_is_not_kept_alive_nor_called_after_it_was_cancelled() -> None:
    code = """
import atexit
from transport.background import AtExit
class Named:
    def __init__(self, name):
        self.name = name
    def tell(self):
        print(self.name, flush=True)
kept, let_go, cancelled = Named("kept"), Named("let go"), Named("cancelled")
for each in (kept, let_go):
    AtExit(each.tell)
AtExit(cancelled.tell).cancel()
del let_go, each
atexit.register(print, "first", flush=True)
"""
    with Child(code) as child:
        assert child.line() == "first"
        assert child.line() == "kept"
        assert child.wait() == 0
        assert child.process.stdout is not None
        assert child.process.stdout.read() == ""
