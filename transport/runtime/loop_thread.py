"""An event loop in a thread of its own, for callers without one."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from transport.errors import ClosedError, UsageError

T = TypeVar("T")

_EXIT_WAIT_S = 10.0  # for a loop that another thread is closing when the process exits


def gone(pid: int) -> bool:
    """Whether the threads that process ``pid`` started cannot be waited for here.

    A forked child has none of them. An interpreter that finalises ends or suspends every thread that tries to run.
    """
    return os.getpid() != pid or sys.is_finalizing()


class AtExit:
    """Calls a method when the process exits, while threads still run, if its object still lives by then.

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


class Job(Future[T]):
    """A coroutine on the loop of a `LoopThread`. It is done when the coroutine has ended, clean-up included.

    `concurrent.futures` does not guarantee this for a cancelled future, and the memory rule needs it: after cancelling
    a read and waiting for its job the caller may reuse the buffer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        self._pid = os.getpid()
        self.submitted = False  # it may be on its way to the loop

    def start(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """Start the coroutine. Called on the loop."""
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())

    def cancel(self) -> bool:
        """Ask the coroutine to end; `result` then waits until it has. Nothing in a forked child."""
        if gone(self._pid) or self.done():  # in this order: another thread may have held the future's lock at the fork
            return False
        self._loop.call_soon_threadsafe(self._cancel_task)
        return True

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.done():  # an interrupt came before it was given to the loop, which has what came before this
            super().cancel()
            self.set_running_or_notify_cancel()

    def end(self) -> None:
        """Cancel, and wait until the coroutine has ended; whatever it raises is dropped. Nothing in a forked child."""
        if gone(self._pid):
            return
        self.cancel()
        ended = threading.Event()
        self.add_done_callback(lambda _: ended.set())
        ended.wait()


class LoopThread:
    """One loop, one thread, from construction until `close` or the process's exit. Any other thread may submit.

    In a forked child, which does not have the thread, it is closed.
    """

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False
        self._cancelling: Future[None] | None = None  # by `close`
        self._ending = threading.RLock()  # nothing is submitted after the cancellation of all tasks
        self._joining = threading.RLock()  # a lock of its own, because the thread may still need `_ending`
        self._pid = os.getpid()
        try:
            self._loop = uvloop.new_event_loop()
            self._thread.start()
            self._at_exit = AtExit(self._end)
        except BaseException:  # an interrupt, too: the caller gets no object through which to end the thread
            if hasattr(self, "_loop"):
                self._loop.call_soon_threadsafe(self._loop.stop)
                if self._thread.ident is not None:  # else it has not begun; if it still does, it ends at once
                    self._thread.join()
                if not self._thread.is_alive():
                    self._loop.close()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @property
    def closed(self) -> bool:
        """True after `close`, in a forked child, and while the interpreter finalises: the thread does not run then."""
        return self._closed or gone(self._pid)

    def soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the loop call ``function``; nothing after `close`."""
        if not gone(self._pid):
            with self._ending:
                if not self._closed:
                    self._loop.call_soon_threadsafe(function, *arguments)

    def submit(self, coroutine: Coroutine[Any, Any, T], job: Job[T] | None = None) -> Job[T]:
        """Start ``coroutine`` on the loop, as ``job`` if one is given. Raises ClosedError after close."""
        if not gone(self._pid):  # asked before the lock, which another thread may have held at the fork
            with self._ending:
                if not self._closed:
                    job = job or Job(self._loop)
                    job.submitted = True
                    self._loop.call_soon_threadsafe(job.start, coroutine)
                    return job
        coroutine.close()
        raise ClosedError("it was closed before this call; make a new one")

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run ``coroutine`` on the loop and wait for it.

        An interrupt (Ctrl-C, timeout) cancels it there, and is raised here once it has ended.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise UsageError("this call waits for the background loop and was made on it, from one of its callbacks")
        job: Job[T] = Job(self._loop)
        try:
            self.submit(coroutine, job)
            return job.result(timeout)
        except BaseException:  # an interrupt or a timeout, too: the coroutine ends before it is raised
            if job.submitted:
                job.end()
            coroutine.close()
            raise

    def close(self) -> None:
        """Cancel what still runs, wait for it, end the thread. Idempotent; nothing where the thread does not run.

        After an interrupt the next call continues.
        """
        if gone(self._pid):
            return
        with self._ending:
            self._closed = True
            if self._cancelling is None:
                self._cancelling = asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
        concurrent.futures.wait([self._cancelling])
        with self._joining:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()
        self._at_exit.cancel()

    def _end(self) -> None:
        self.close()
        self._thread.join(_EXIT_WAIT_S)  # another thread may be in the middle of closing it


async def _cancel_all() -> None:
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # some begin others while they clean up
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
