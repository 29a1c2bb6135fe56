"""A loop in a thread of its own: results and cancellation."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
from sleepers import Sleeper

from transport.errors import UsageError
from transport.runtime.loop_thread import Job, LoopThread, Waits

WATCHDOG_S = 30.0  # a bound on a wait that does not happen when the code is right


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    made = LoopThread("test loop")
    yield made
    made.close()


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


def test_an_interrupt_while_waiting_cancels_the_coroutine(loop_thread: LoopThread) -> None:
    sleeper = Sleeper()
    sender = interrupt_when(sleeper.started)
    with pytest.raises(Interrupt):
        loop_thread.run(sleeper.sleep())
    sender.join()
    assert sleeper.how == "cancelled"


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


def test_a_coroutine_that_cancels_itself_raises_cancelled(loop_thread: LoopThread) -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(CancelledError):
        loop_thread.run(give_up())


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


def test_waits_that_end_while_others_wake_them_disturb_nothing() -> None:
    waits = Waits()
    calls = [waits.wake] * 2 + [lambda: waits.wait(lambda: False, 1e-5)] * 2
    with ThreadPoolExecutor(len(calls)) as threads:
        for each in [threads.submit(lambda call=call: [call() for _ in range(2000)]) for call in calls]:
            each.result(30)
