"""What a supervisor runs when the writer of its ring has ended without stopping it: a process that finishes its work.

IDLE ──the writer ended──► RUNNING ──exit status 0──► DONE
  ▲                          └──another status: again after a pause──┘
  └────────────another writer came──────────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys

import msgspec

from transport.runtime.decoders import hiding

log = logging.getLogger(__name__)

_PAUSE_FIRST_S, _PAUSE_MOST_S = 0.5, 10.0
_END_S = 1.0  # from SIGTERM to SIGKILL


@hiding("message")
class AfterWriter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A module that runs as a process of its own, and what it reads from standard input."""

    module: str
    message: bytes


class AfterWriterProcess:
    """Starts the process, again if it fails. Belongs to the supervisor's loop."""

    def __init__(self, what: AfterWriter | None) -> None:
        self._what = what
        self._task: asyncio.Task[None] | None = None

    def look(self, *, writer_alive: bool) -> None:
        """Called at every look at the ring."""
        if self._what is None:
            return
        if writer_alive:
            # A process that runs notices it as well, and one that is between two starts does nothing more.
            self._task = None if self._task is None or self._task.done() else self._task
        elif self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(self._what))

    async def stop(self) -> None:
        """End the process."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self, what: AfterWriter) -> None:
        pause_s = _PAUSE_FIRST_S
        while True:
            try:
                status = await self._once(what)
                if status == 0:
                    return
                log.warning("%s ended with status %d; starting it again", what.module, status)
            except OSError as error:  # no process can be started now
                log.warning("%s did not start, trying again: %s", what.module, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MOST_S)

    async def _once(self, what: AfterWriter) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # as the supervisor itself
            "-m",
            what.module,
            stdin=asyncio.subprocess.PIPE,
        )
        try:
            if process.stdin is not None:
                with contextlib.suppress(RuntimeError, OSError):  # it has ended
                    process.stdin.write(what.message)
                    process.stdin.close()
            return await process.wait()
        finally:
            if process.returncode is None:
                await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, with which a stopped process continues, and SIGKILL after `_END_S`."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        process.send_signal(signal.SIGCONT)
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
