"""The main job from beginning to end: rollouts play, tickets are queued, trainers fetch, one of them learns."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from transport.demo.crew import Crew
from transport.demo.display import Display
from transport.demo.messages import RolloutDone, TrainerDone
from transport.demo.plan import POLICY_TOPIC, Plan
from transport.demo.summary import Summary, summarise
from transport.errors import UsageError
from transport.places import SQLitePlace
from transport.queue import QueueDepth, TicketQueue, open_queue


class InterruptedBySignal(Exception):
    """SIGINT or SIGTERM came; everything has been stopped."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


async def run_demo(plan: Plan, display: Display, queue_text: str | None = None) -> Summary:
    """Run the demo. Whatever happens, no process, segment or temporary file of it is left.

    Args:
        queue_text: place of a ticket queue that is new, and stays; None: a file in the temporary directory.

    Raises:
        InterruptedBySignal: SIGINT or SIGTERM.
        WorkerFailedError: a process of the run failed or was killed.
    """
    started = time.monotonic()
    crew = Crew(plan, display.say, lambda crew: _show(crew, display))
    with tempfile.TemporaryDirectory(prefix="transport-demo-", ignore_cleanup_errors=True) as directory:
        text = queue_text or SQLitePlace(Path(directory) / "tickets.sqlite").text
        with open_queue(text) as queue:
            _refuse_used(queue)
            async with _unless_interrupted(), crew.at_work(Path(directory), text):
                await crew.work_done()
            for failure in queue.failures():
                display.say(
                    f"delivery of {failure.ticket_id} to rank {failure.rank}: {failure.state}: {failure.reason}"
                )
            depth = queue.depth()
    reports = [worker.done.result() for worker in crew.workers]
    return summarise(
        plan,
        [report for report in reports if isinstance(report, RolloutDone)],
        [report for report in reports if isinstance(report, TrainerDone)],
        depth,
        time.monotonic() - started,
    )


def _refuse_used(queue: TicketQueue) -> None:
    if queue.depth() != QueueDepth() or queue.latest(POLICY_TOPIC) is not None:
        raise UsageError(f"--queue: {queue!r} was used before, and its tickets would be mixed with the demo's")


def _show(crew: Crew, display: Display) -> None:
    """The slowest rank's progress, and the return that rank 0 learns from."""
    reports = [worker.progress for worker in crew.trainers if worker.progress is not None]
    if len(reports) == len(crew.trainers):
        slowest = min(reports, key=lambda progress: progress.consumed)
        wires = sorted({wire for progress in reports for wire in progress.wires})
        display.show(slowest.consumed, sum(progress.bytes for progress in reports), wires, reports[0].mean_return)


@contextlib.asynccontextmanager
async def _unless_interrupted() -> AsyncIterator[None]:
    """Cancel what the ``with`` does when SIGINT or SIGTERM comes; then raise InterruptedBySignal."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    came: list[signal.Signals] = []

    def interrupt(number: signal.Signals) -> None:
        if task is not None and not came:  # a second one must not cut the clean-up short; that is bounded anyway
            task.cancel()
        came.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield
    except asyncio.CancelledError:
        if came and task is not None:
            task.uncancel()
            raise InterruptedBySignal(came[0]) from None
        raise
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
