"""The end of the loop in a thread: closed, with the process, in a forked child."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from helpers import Child
from sleepers import Sleeper

from transport.errors import ClosedError, UsageError
from transport.runtime.loop_thread import Flag, Job, LoopThread

WATCHDOG_S = 30.0  # a bound on a wait that does not happen when the code is right


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    made = LoopThread("test loop")
    yield made
    made.close()


# --- the end --------------------------------------------------------------------------------------
def test_close_cancels_what_runs_and_waits_for_it() -> None:
    loop_thread = LoopThread("test loop")
    sleepers = [Sleeper() for _ in range(3)]
    futures = [loop_thread.submit(sleeper.sleep()) for sleeper in sleepers]
    assert all(sleeper.started.wait(WATCHDOG_S) for sleeper in sleepers)
    loop_thread.close()
    assert [sleeper.how for sleeper in sleepers] == ["cancelled"] * 3
    for future in futures:
        with pytest.raises(ClosedError):
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


def test_a_job_whose_caller_has_dropped_it_is_not_collected(loop_thread: LoopThread) -> None:
    started, ended = threading.Event(), threading.Event()

    async def waits() -> None:
        try:
            started.set()
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            ended.set()
            raise

    loop_thread.submit(waits())
    assert started.wait(WATCHDOG_S)
    gc.collect()
    loop_thread.close()
    assert ended.is_set()


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


def test_a_loop_that_is_dropped_ends_its_thread() -> None:
    before = set(threading.enumerate())
    loop_thread = LoopThread("test loop")
    (thread,) = set(threading.enumerate()) - before
    del loop_thread
    gc.collect()
    thread.join(WATCHDOG_S)
    assert not thread.is_alive()


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
