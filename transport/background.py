"""An event loop in a thread of its own, for callers without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from transport.errors import ClosedError, UsageError

T = TypeVar("T")


class Job(Future[T]):
    """A coroutine on the loop of a `LoopThread`. Done means that it has ended there, its clean-up included.

    That is what `concurrent.futures` does not promise of a cancelled future, and what the memory rule needs: whoever
    has cancelled a read and waited for its job may reuse the buffer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._task: asyncio.Task[T] | None = None

    def start(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """Runs on the loop."""
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
        """Ask the coroutine to end; `result` then waits until it has."""
        if self.done():
            return False
        self._loop.call_soon_threadsafe(self._cancel_task)
        return True

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def end(self) -> None:
        """Cancel, and wait until the coroutine has ended; whatever it raises is dropped."""
        self.cancel()
        ended = threading.Event()
        self.add_done_callback(lambda _: ended.set())
        ended.wait()


class LoopThread:
    """One loop, one thread, from construction until `close`. Any other thread may submit."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False
        self._ending = threading.RLock()  # nothing is submitted behind what ends everything
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @property
    def closed(self) -> bool:
        """After `close`."""
        return self._closed

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Job[T]:
        """Start ``coroutine`` on the loop. Raises ClosedError after close."""
        with self._ending:
            if not self._closed:
                job: Job[T] = Job(self._loop)
                self._loop.call_soon_threadsafe(job.start, coroutine)
                return job
        coroutine.close()
        raise ClosedError("the background loop is closed")

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run ``coroutine`` on the loop and wait for it.

        An interrupt (Ctrl-C, timeout) cancels it there, and is raised here once it has ended.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise UsageError("this call waits for the background loop and was made on it, from one of its callbacks")
        job = self.submit(coroutine)
        try:
            return job.result(timeout)
        except BaseException:
            job.end()
            raise

    def close(self) -> None:
        """Cancel what still runs, wait for it, end the thread. Idempotent."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
            ended = asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # some begin others while they clean up
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
