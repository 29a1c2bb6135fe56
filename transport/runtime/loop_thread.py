"""An event loop in a thread of its own, for callers without one.

A signal's handler may raise in the main thread between any two of its instructions (Ctrl-C). So nothing here holds a
lock that another thread needs: what a call changes it changes on the loop, which no signal interrupts, and each wait
has a lock of its own. `concurrent.futures` and `threading.Condition` hold a lock while they run Python code; an
interrupt there leaves it locked, and the loop's thread waits for it for ever.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import CancelledError
from typing import Any, Final, Generic, TypeVar

import uvloop

from transport.errors import ClosedError, UsageError
from transport.runtime import threads
from transport.runtime.stacks import Slow
from transport.runtime.waits import Flag

T = TypeVar("T")

_LOOK_S: Final = 0.5  # of the wait at exit
_EXIT_S: Final = 30.0  # for a loop to end at the process's exit: what lives on loops needs a few seconds at most


def gone(pid: int) -> bool:
    """Return whether the threads that process ``pid`` started cannot be waited for here.

    A forked child has none of them. An interpreter that finalises ends or suspends every thread that tries to run.
    """
    return os.getpid() != pid or sys.is_finalizing()


class AtExit:
    """Call of a method when the process exits, while threads still run, if its object still lives by then.

    A thread that returns from native code while the interpreter finalises is killed by the interpreter, and the process
    aborts; so the owner of such a thread ends it here. Does nothing in a forked child.
    """

    def __init__(self, method: Callable[[], object]) -> None:
        self._method = weakref.WeakMethod(method)
        self._pid = os.getpid()
        atexit.register(self)

    def __call__(self) -> None:
        method = self._method()
        if method is not None and not gone(self._pid):
            method()

    def cancel(self) -> None:
        """Do not call the method: its work is done. Idempotent."""
        atexit.unregister(self)


class Job(Generic[T]):
    """A coroutine on the loop of a `LoopThread`, begun once at most. It is done when the coroutine has ended.

    Clean-up included, also where it was cancelled: after cancelling a read and waiting for its job the caller may reuse
    the buffer.

    Args:
        make: makes the coroutine, or begins what its future stands for; called on the loop.
        unused: called in its place where the job is never begun.

    Attributes:
        outcome: what the coroutine returned, and what it raised, None for the one that it did not; None while it runs.
    """

    def __init__(
        self,
        thread: LoopThread,
        make: Callable[[], Coroutine[Any, Any, T] | asyncio.Future[T]],
        unused: Callable[[], object] = lambda: None,
    ) -> None:
        self._thread = thread
        self._make: Callable[[], Coroutine[Any, Any, T] | asyncio.Future[T]] | None = make
        self._unused = unused
        self._task: asyncio.Future[T] | None = None
        self._posted = False
        self._ended = Flag()
        self._callbacks: deque[Callable[[Job[T]], object]] = deque()
        self.outcome: tuple[T | None, BaseException | None] | None = None

    def start(self) -> None:
        """Begin, unless it has begun. ClosedError: the thread is closed. After an interrupt call it again."""
        if self._posted or self.outcome is not None:
            return
        if self._thread.closed or not self._thread.post(self._begin):
            self._never_begun()
            raise ClosedError("it was closed before this call; make a new one")
        self._posted = True

    def _begin(self) -> None:
        if self._make is None:
            return
        if self._thread.ending:
            self._never_begun()
            return
        make, self._make = self._make, None
        try:
            made = make()
        except BaseException as error:  # who waits for the job gets it
            self._end_with(None, error)
            return
        self._task = made if isinstance(made, asyncio.Future) else asyncio.get_running_loop().create_task(made)
        self._thread.running.add(self)
        self._task.add_done_callback(self._over)

    def _never_begun(self) -> None:
        make, self._make = self._make, None
        if make is not None:
            self._unused()
            self._end_with(None, self._cancelled())

    def _cancelled(self) -> Exception:
        if self._thread.closed:
            return ClosedError("it was closed during this call; make a new one")
        return CancelledError()

    def _over(self, task: asyncio.Future[T]) -> None:
        self._task = None
        self._thread.running.discard(self)
        if task.cancelled():
            self._end_with(None, self._cancelled())
        elif (error := task.exception()) is not None:
            self._end_with(None, error)
        else:
            self._end_with(task.result(), None)

    def _end_with(self, result: T | None, error: BaseException | None) -> None:
        self.outcome = result, error
        self._ended.set()
        with contextlib.suppress(IndexError):
            while self._callbacks:
                self._callbacks.popleft()(self)

    def done(self) -> bool:
        """Return whether the coroutine has ended."""
        return self.outcome is not None

    def add_done_callback(self, function: Callable[[Job[T]], object]) -> None:
        """Have ``function`` called with this job when it is done, on the loop, or here and now."""
        self._callbacks.append(function)
        if self.outcome is not None:
            with contextlib.suppress(ValueError):
                self._callbacks.remove(function)  # else the loop has called it
                function(self)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done; False after ``timeout_s``. UsageError on the loop."""
        if self.outcome is None:
            self._thread.may_wait()
        return self._ended.wait(timeout_s)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for it on another loop; cancelled there, it is cancelled here."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: Job[T]) -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed: who waited was cancelled
                loop.call_soon_threadsafe(ended.set)

        self.add_done_callback(tell)
        try:
            yield from ended.wait().__await__()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()

    def result(self, timeout_s: float | None = None) -> T:
        """Return what the coroutine returned or raised.

        TimeoutError: it runs still. CancelledError: it was cancelled; ClosedError: by the end of the thread.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"not done after {timeout_s} s")
        assert self.outcome is not None
        result, error = self.outcome
        if error is not None:
            try:
                raise error
            finally:
                del self, error  # or the error's frames would refer to it
        return result  # type: ignore[return-value]  # None only where the coroutine returned it

    def cancel(self) -> bool:
        """Ask the coroutine to end; `result` then waits until it has. False: it has already."""
        if self.outcome is not None:
            return False
        if not self._thread.post(self._cancel_task):
            self._never_begun()
        return True

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._never_begun()

    def end(self) -> None:
        """Cancel, and wait until the coroutine has ended; whatever it raises is dropped."""
        if self.cancel():
            self.wait()


def _fill_standard_descriptors() -> None:
    """Open those of 0 to 2 that are closed, as of a daemon: libuv aborts the process when one of them is a loop's."""
    while (lowest := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(lowest)


class LoopThread:
    """One loop, one thread, from construction until `close` or the process's exit. Any other thread may submit.

    What lives on the loop is closed by its end (`closes`): who closes the thread cannot leave it open, wherever it is
    interrupted. In a forked child, which does not have the thread, it is closed. One that is dropped ends its thread.

    Attributes:
        running: jobs that run; a loop itself refers to its tasks weakly. Changed on the loop only.
    """

    def __init__(self, name: str) -> None:
        _fill_standard_descriptors()
        self._pid = os.getpid()
        self._name = name
        self._closed = False
        self._given_up = False  # its loop did not end within the limit at the process's exit
        self._own = _Own()
        self.running = self._own.running
        self._thread = threading.Thread(target=_run, args=(self._own,), name=name, daemon=True)
        threads.start(self._thread)
        self._own.made.wait()
        self._at_exit = AtExit(self._close_at_exit)

    def __del__(self) -> None:
        """End the thread where an interrupt ended the constructor: nobody else does."""
        if hasattr(self, "_own") and not self.closed:
            self._own.dropped = True  # before the look: the thread looks after it has made the loop
            if self._own.loop is not None:
                self.post(self._own.end)

    @property
    def closed(self) -> bool:
        """True after `close`, in a forked child, and while the interpreter finalises: the thread does not run then."""
        return self._closed or gone(self._pid)

    @property
    def ending(self) -> bool:
        """True if what runs on the loop is being cancelled. For callers on the loop."""
        return self._own.ending is not None

    def post(self, function: Callable[..., object], *arguments: object) -> bool:
        """Have the loop call ``function``. False: nobody will, or it was too late to be sure."""
        if gone(self._pid):
            return False
        assert self._own.loop is not None
        try:
            self._own.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed
            return False
        return not self._own.stopped.is_set

    def soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the loop call ``function``; nothing after `close`."""
        if not self.closed:
            self.post(function, *arguments)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Job[T]:
        """Start ``coroutine`` on the loop. Raises ClosedError after close."""
        job = Job(self, lambda: coroutine, coroutine.close)  # else it warns that it was never awaited
        job.start()
        return job

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run ``coroutine`` on the loop and wait for it.

        An interrupt (Ctrl-C, timeout) cancels it there, and is raised here once it has ended.
        """
        job = Job(self, lambda: coroutine, coroutine.close)
        try:
            self.may_wait()
        except UsageError:
            coroutine.close()
            raise
        try:
            job.start()
            return job.result(timeout)
        except BaseException:  # an interrupt or a timeout, too: the coroutine ends before it is raised
            job.end()
            raise

    @property
    def is_current(self) -> bool:
        """True if this is the loop's own thread."""
        return threading.current_thread() is self._thread

    def may_wait(self) -> None:
        """UsageError on the loop's own thread, which would wait for itself."""
        if self.is_current:
            raise UsageError("this call waits for the background loop and was made on it, from one of its callbacks")

    def closes(self, closing: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Have `close` await this before it cancels what still runs; the last one given is the first.

        ClosedError: the thread ends without awaiting it.
        """
        if self.closed or self.ending:
            raise ClosedError("it was closed before this call; make a new one")
        self._own.closings.append(closing)

    def close(self) -> None:
        """Close what lives on the loop, cancel what still runs, wait for it, end the thread.

        Idempotent; nothing where the thread does not run. After an interrupt the next call continues. It waits without
        a limit: the caller frees what the loop uses, and may only when the loop has ended. Raises what a closing
        raised, when all is closed; UsageError on the loop.
        """
        self._close(math.inf)

    def _close_at_exit(self) -> None:
        """Close within a limit: a loop that hangs, as in a callback that does not return, must not keep the process."""
        self._close(_EXIT_S)

    def _close(self, most_s: float) -> None:
        if gone(self._pid) or self._given_up:
            return
        self.may_wait()
        self._closed = True
        self.post(self._own.end)
        slow = Slow(f"the thread {self._name!r}", most_s)
        while not self._own.stopped.wait(slow.slice_s(_LOOK_S)):
            if not slow.look("what runs on its loop"):
                self._given_up = True
                return
        self._thread.join()
        self._at_exit.cancel()
        if self._own.errors:
            raise self._own.errors.pop()


class _Own:
    """The state of a thread. It does not refer to its `LoopThread`, which may be dropped."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.made = Flag()
        self.dropped = False
        self.running: set[Job[Any]] = set()
        self.closings: list[Callable[[], Coroutine[Any, Any, object]]] = []
        self.errors: list[Exception] = []  # of the closings
        self.ending: asyncio.Task[None] | None = None
        self.stopped = Flag()  # the loop takes nothing more

    def end(self) -> None:
        """Start the end, on the loop."""
        if self.ending is None:
            self.ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        while self.closings:
            try:
                await self.closings.pop()()
            except asyncio.CancelledError:
                continue  # what it waited for was cancelled
            except Exception as error:  # the others are closed all the same
                self.errors.append(error)
        loop = asyncio.get_running_loop()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # some begin others while they clean up
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await loop.shutdown_asyncgens()
        loop.stop()


def _run(own: _Own) -> None:
    own.loop = loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    own.made.set()
    if own.dropped:
        loop.call_soon(own.end)
    loop.run_forever()
    own.stopped.set()
    loop.call_soon(loop.stop)  # behind what was posted before: those jobs learn that they are not begun
    loop.run_forever()
    loop.close()
