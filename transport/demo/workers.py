"""The processes of a demo run as their parent sees them: started, watched, and stopped so that nothing is left.

A rollout's supervisor holds a lock on the ring's segment until its listeners have ended. That says whether the tree
below a worker is gone, however its root ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from transport import _ring
from transport.demo.plan import SETTINGS, Plan, WorkerConfig
from transport.demo.worker import Done, Failed, Message, Progress
from transport.errors import RingError, TransportError
from transport.ring.attachment import attached

_STOP_S: Final = 15.0  # longer than a worker's own bounds: its server may take ten seconds to stop
_ENVIRONMENT: Final = {
    "OPENBLAS_NUM_THREADS": "1",  # small matrices: more threads would only take the cores from the other processes
    "UCXX_LOG_LEVEL": "FATAL",  # it logs every lost connection as an error; those that matter are raised as well
}
_LOOK_S: Final = 0.05
_reports: Final = msgspec.json.Decoder(Message)
_TREE_GONE_S: Final = SETTINGS.linger_s + 10.0  # the listeners of a killed worker linger, then drain


class WorkerFailedError(TransportError):
    """A process of the demo gave up, crashed or was killed."""


class Worker:
    """One rollout or trainer process."""

    def __init__(self, kind: str, config: WorkerConfig, process: asyncio.subprocess.Process) -> None:
        self.name = f"{kind} {config.index}"
        self.ring = config.ring
        self.process = process
        self.progress: Progress | None = None
        self.done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Worker {self.name} process {self.process.pid} {'done' if self.done.done() else 'at work'}>"


class Workers:
    """All workers of one run. Owned by the parent's loop.

    Args:
        prefix: begins the names of all segments.
        say: is given each line that a worker, or a process below it, writes to standard error.
        progressed: is called after each message of progress.
    """

    def __init__(
        self, plan: Plan, prefix: str, say: Callable[[str], None], progressed: Callable[[Workers], None]
    ) -> None:
        self.rollouts: list[Worker] = []
        self.trainers: list[Worker] = []
        self._plan = plan
        self._say = say
        self._progressed = progressed
        self._watchers: list[asyncio.Task[None]] = []
        self._relays: list[asyncio.Task[None]] = []
        self._trace = False
        self._prefix = prefix

    @property
    def all(self) -> list[Worker]:
        """All workers, trainers first."""
        return [*self.trainers, *self.rollouts]

    @contextlib.asynccontextmanager
    async def at_work(self, directory: Path, queue: str, *, trace: bool = False) -> AsyncIterator[None]:
        """Start all workers; at the end of the ``with`` all have stopped.

        ``trace``: each writes a file ``*.trace`` into the directory.
        """
        self._trace = trace
        try:
            for rank in range(self._plan.trainers):
                self.trainers.append(await self._start("trainer", rank, directory, queue))
            for index in range(self._plan.rollouts):
                self.rollouts.append(await self._start("rollout", index, directory, queue))
            yield
        finally:
            await asyncio.shield(self._stop())

    async def work_done(self) -> None:
        """Wait until each worker has reported the end of its work. Raises WorkerFailedError as soon as one cannot."""
        everybody = asyncio.gather(*(worker.done for worker in self.all))
        awaited: list[asyncio.Future[Any]] = [everybody, *self._watchers]
        finished, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        for each in finished:
            each.result()

    # --- one worker -------------------------------------------------------------------------------------
    async def _start(self, kind: str, index: int, directory: Path, queue: str) -> Worker:
        config = WorkerConfig(
            plan=self._plan,
            index=index,
            queue=queue,
            ring=f"/transport-{self._prefix}{kind}-{index}",
            directory=str(directory),
            parent=os.getpid(),
            trace=str(directory / f"{kind}-{index}.trace") if self._trace else "",
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # without the current directory, which may hold anything
            "-m",
            f"transport.demo.{kind}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, which stops all workers in order
            env={**_ENVIRONMENT, **os.environ},
        )
        worker = Worker(kind, config, process)
        self._watchers.append(asyncio.create_task(self._watch(worker)))
        self._relays.append(asyncio.create_task(self._relay(worker)))
        if process.stdin is not None:
            process.stdin.write(msgspec.json.encode(config) + b"\n")
        return worker

    async def _watch(self, worker: Worker) -> None:
        """Process a worker's reports. Ends only by raising WorkerFailedError: no worker may end before `_stop`."""
        if worker.process.stdout is None:
            raise WorkerFailedError(f"{worker.name} has no standard output")
        async for line in worker.process.stdout:
            match _reports.decode(line):
                case Progress() as progress:
                    worker.progress = progress
                    self._progressed(self)
                case Failed(kind=kind, message=message):
                    raise WorkerFailedError(f"{worker.name}: {kind}: {message}")
                case done:
                    worker.done.set_result(done)
        raise WorkerFailedError(f"{worker.name} {_how_it_ended(await worker.process.wait())} before its work was done")

    async def _relay(self, worker: Worker) -> None:
        if worker.process.stderr is not None:
            async for line in worker.process.stderr:
                self._say(line.decode(errors="replace").rstrip())

    # --- the end ----------------------------------------------------------------------------------------
    async def _stop(self) -> None:
        """Stop all workers; kill those that do not stop; wait for their child processes; remove what is left."""
        for watcher in self._watchers:
            watcher.cancel()
        for worker in self.all:
            if worker.process.stdin is not None:
                worker.process.stdin.close()
        await asyncio.gather(*map(self._stopped, self.all), *self._watchers, return_exceptions=True)
        if self._relays:
            _, running = await asyncio.wait(self._relays, timeout=_TREE_GONE_S)
            for relay in running:
                relay.cancel()
        give_up = time.monotonic() + _TREE_GONE_S
        # The supervisor of a killed rollout ends after its listeners. It closed its end of the pipe before that.
        while (left := [each for each in self.all if _served(each.ring)]) and time.monotonic() < give_up:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        if left:
            self._say(
                f"child processes of {len(left)} workers still run after {_TREE_GONE_S:g} s; run: transport reclaim"
            )
        for worker in self.all:
            with contextlib.suppress(RingError):  # mostly: it is gone already
                _ring.Ring.unlink_if_dead(worker.ring)

    async def _stopped(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(_STOP_S):
                await worker.process.wait()
        except TimeoutError:
            self._say(f"{worker.name} did not stop within {_STOP_S:g} s; killing it")
            worker.process.kill()
            await worker.process.wait()


def _served(segment: str) -> bool:
    """Whether a supervisor serves the ring. False as well where the ring is gone."""
    try:
        with attached(segment, "observer") as ring:
            return ring.native.supervised
    except RingError:
        return False


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
