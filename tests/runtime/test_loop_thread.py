"""A loop in a thread of its own: results and cancellation."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError

import pytest
from helpers import Child

from transport.errors import ClosedError, UsageError
from transport.runtime.loop_thread import Job, LoopThread
from transport.runtime.waits import Flag, Waits


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


WATCHDOG_S = 30.0  # a bound on a wait that does not happen when the code is right


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    made = LoopThread("test loop")
    yield made
    made.close()


# --- cancellation ---------------------------------------------------------------------------------
class Interrupt(BaseException):
    """What a signal's handler raises here, as Ctrl-C raises KeyboardInterrupt."""


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGUSR1, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt_when(event: threading.Event) -> threading.Thread:
    """A signal to the main thread, once the event has come."""

    def send() -> None:
        assert event.wait(WATCHDOG_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


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


def test_an_interrupt_is_raised_when_the_coroutine_has_cleaned_up(loop_thread: LoopThread) -> None:
    cleaning = Cleaning()
    sender = interrupt_when(cleaning.begun)
    with pytest.raises(Interrupt):
        loop_thread.run(cleaning.work())
    sender.join()
    assert cleaning.cleaned


def test_a_wait_for_a_job_that_is_interrupted_leaves_the_job_to_the_loop(loop_thread: LoopThread) -> None:
    begun, may_end = threading.Event(), asyncio.Event()

    async def work() -> str:
        begun.set()
        await may_end.wait()
        return "the result"

    job = Job(loop_thread, work)
    sender = interrupt_when(begun)
    with pytest.raises(Interrupt):
        job.start()
        job.wait()
    sender.join()
    assert not job.done()
    loop_thread.soon(may_end.set)
    assert job.result(WATCHDOG_S) == "the result"


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # never begun
def test_waits_that_are_interrupted_at_any_instant_hang_nothing(loop_thread: LoopThread) -> None:
    """Real signals, at instants that a timer chooses; the loop and the other waits go on."""
    interrupts = 0

    async def work() -> int:
        await asyncio.sleep(0)
        return 1

    chance = random.Random(1)
    try:
        for _ in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + chance.random() * 2e-4)
                assert loop_thread.run(work()) == 1
                loop_thread.submit(work()).end()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                interrupts += 1
            assert loop_thread.run(work(), WATCHDOG_S) == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert interrupts


def test_a_job_is_begun_once_and_only_when_it_is_started(loop_thread: LoopThread) -> None:
    begun = []

    async def work() -> int:
        begun.append(1)
        return len(begun)

    job = Job(loop_thread, work)
    loop_thread.run(asyncio.sleep(0))
    assert not begun
    job.start()
    job.start()
    assert job.result(WATCHDOG_S) == 1
    job.start()
    loop_thread.run(asyncio.sleep(0))
    assert len(begun) == 1


def test_a_job_that_was_ended_before_it_began_does_not_begin(loop_thread: LoopThread) -> None:
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)

    job = Job(loop_thread, work)
    job.end()
    job.start()
    loop_thread.run(asyncio.sleep(0))
    assert not begun
    with pytest.raises(CancelledError):
        job.result(WATCHDOG_S)


def test_a_job_can_be_awaited_on_another_loop_and_is_cancelled_from_there(loop_thread: LoopThread) -> None:
    sleeper = Sleeper()

    async def elsewhere() -> str:
        assert await loop_thread.submit(asyncio.sleep(0, "the result")) == "the result"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop_thread.submit(sleeper.sleep()), 0.01)
        return "went on"

    assert asyncio.run(elsewhere()) == "went on"
    assert sleeper.ended.wait(WATCHDOG_S) or sleeper.how == "never started"


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


def test_a_wait_looks_again_after_every_wake_and_ends_after_its_time() -> None:
    waits, came = Waits(), []
    assert not waits.wait(lambda: came, 0.01)
    thread = threading.Thread(target=waits.wait, args=(lambda: len(came) == 2,))
    thread.start()
    for _ in range(2):
        came.append(1)
        waits.wake()
    thread.join(30)
    assert not thread.is_alive()


# --- the end --------------------------------------------------------------------------------------
def test_close_cancels_what_runs_and_waits_until_it_has_cleaned_up() -> None:
    loop_thread = LoopThread("test loop")
    works = [Cleaning() for _ in range(3)]
    job = loop_thread.submit(works[0].work())
    for dropped in works[1:]:  # the loop itself would let the collector have these
        loop_thread.submit(dropped.work())
    assert all(each.begun.wait(WATCHDOG_S) for each in works)
    gc.collect()
    loop_thread.close()
    assert [each.cleaned for each in works] == [True] * 3
    with pytest.raises(ClosedError):
        job.result(WATCHDOG_S)


def test_close_closes_what_lives_on_the_loop_before_it_cancels_the_last_first_and_raises_what_failed() -> None:
    loop_thread = LoopThread("test loop")
    order: list[str] = []
    sleeper = Sleeper()

    def closing(name: str, error: Exception | None = None) -> None:
        async def close() -> None:
            await asyncio.sleep(0)
            order.append(f"{name} {sleeper.how}")
            if error is not None:
                raise error

        loop_thread.closes(close)

    closing("first")
    closing("second", LookupError("of the second"))
    loop_thread.submit(sleeper.sleep())
    assert sleeper.started.wait(WATCHDOG_S)
    with pytest.raises(LookupError):
        loop_thread.close()
    assert order == ["second running", "first running"]
    assert sleeper.how == "cancelled"
    loop_thread.close()


def test_a_closing_that_is_cancelled_ends_nothing_but_itself() -> None:
    closed = []

    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def closing() -> None:
        closed.append(True)

    loop_thread = LoopThread("test loop")
    loop_thread.closes(closing)
    loop_thread.closes(cancelled)
    loop_thread.close()
    assert closed == [True]


def test_what_comes_after_the_close_is_refused_as_nobody_would_close_it() -> None:
    async def closing() -> None: ...

    loop_thread = LoopThread("test loop")
    loop_thread.close()
    with pytest.raises(ClosedError):
        loop_thread.closes(closing)


@pytest.mark.parametrize("what", [LoopThread.close, lambda thread: thread.submit(asyncio.sleep(0)).result()])
def test_a_callback_on_the_loop_may_neither_close_it_nor_wait_for_its_jobs(
    loop_thread: LoopThread, what: Callable[[LoopThread], object]
) -> None:
    raised: list[BaseException] = []
    done = Flag()

    def call() -> None:
        try:
            what(loop_thread)
        except BaseException as error:
            raised.append(error)
        done.set()

    loop_thread.post(call)
    assert done.wait(WATCHDOG_S), "it waits for itself"
    assert isinstance(raised[0], UsageError)


def test_a_job_whose_waiters_loop_is_closed_calls_the_others_all_the_same(loop_thread: LoopThread) -> None:
    others: list[bool] = []
    go_on = threading.Event()

    async def slow_to_clean() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(go_on.wait)

    async def wait_for(job: Job[None]) -> None:
        await job

    async def main() -> Job[None]:
        job = loop_thread.submit(slow_to_clean())
        waiting = asyncio.ensure_future(wait_for(job))
        await asyncio.sleep(0)
        job.add_done_callback(lambda _: others.append(True))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return job

    job = asyncio.run(main())
    go_on.set()
    assert job.wait(WATCHDOG_S)
    loop_thread.run(asyncio.sleep(0))
    assert others == [True]


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
            except ClosedError:
                ends.append("cancelled")

    thread = threading.Thread(target=submit)
    thread.start()
    meeting.wait()
    loop_thread.close()
    thread.join()
    assert ends[-1] == "refused"


# --- the end of the process -----------------------------------------------------------------------
def test_a_job_that_comes_when_the_loop_has_just_stopped_ends_without_having_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop_thread = LoopThread("test loop")
    job = Job(loop_thread, Sleeper().sleep)
    set_before = Flag.set

    def set_late(flag: Flag) -> None:
        if flag is loop_thread._own.stopped:  # as another thread would, which saw it open just before
            assert loop_thread.post(job._begin)
        set_before(flag)

    monkeypatch.setattr(Flag, "set", set_late)
    loop_thread.close()
    with pytest.raises(ClosedError):
        job.result(WATCHDOG_S)


def test_the_processes_exit_ends_the_loop_and_what_runs_on_it() -> None:
    code = """
import asyncio, threading
from transport.runtime.loop_thread import LoopThread
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


def test_a_loop_can_be_closed_where_the_standard_descriptors_were() -> None:
    code = """
from transport.runtime.loop_thread import LoopThread
LoopThread("test").close()
"""
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, check=False).returncode == 0


def test_a_loop_that_hangs_does_not_keep_the_process_from_its_exit() -> None:
    code = """
import threading, time
from transport.runtime import loop_thread
loop_thread._EXIT_S = 0.2
hangs = threading.Event()
thread = loop_thread.LoopThread("test loop")
thread.post(lambda: (hangs.set(), time.sleep(1e6)))
hangs.wait()
print("exits", flush=True)
"""
    with Child(code) as child:
        assert child.line() == "exits"
        assert child.wait() == 0


def test_a_forked_child_has_no_loop_and_its_exit_waits_for_none() -> None:
    code = """
import asyncio, os, sys
from transport.runtime.loop_thread import LoopThread
from transport.errors import ClosedError
loop_thread = LoopThread("test loop")
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
from transport.runtime.loop_thread import AtExit
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


def test_a_forked_child_does_not_wait_for_a_job_of_its_parent() -> None:
    async def for_ever() -> None:
        await asyncio.Event().wait()

    thread = LoopThread("parent")
    job = thread.submit(for_ever())
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that waits
        job.end()
        thread.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    job.end()
    thread.close()
