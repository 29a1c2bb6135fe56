"""The main job from beginning to end: rollouts play, trainers fetch, one of them learns."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

from transport.client import status_socket
from transport.client.trace import merge
from transport.cooldown import EpochRecord
from transport.demo import resuming
from transport.demo.checkpoints import Epoch
from transport.demo.display import Display
from transport.demo.plan import Plan
from transport.demo.summary import Summary, summarise
from transport.demo.worker import RolloutDone, TrainerDone
from transport.demo.workers import Workers
from transport.errors import RingError
from transport.observe.metrics import Exporter, Sample, client_samples, ring_samples
from transport.queue import FoundRings, open_queue
from transport.ring.buffer import SharedRingBuffer
from transport.runtime import interruption
from transport.runtime.blocking_calls import in_thread
from transport.runtime.interruption import segment_prefix
from transport.store.open import open_store


class CheckpointTo(NamedTuple):
    """Where checkpoints go, and the store that keeps the record of epochs; both as URLs."""

    destination: str
    store: str


class InterruptedBySignal(Exception):
    """SIGINT or SIGTERM came; everything has been stopped."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


async def run_demo(
    plan: Plan,
    display: Display,
    checkpoint: CheckpointTo | None = None,
    *,
    resume: str | None = None,
    trace: Path | None = None,
    exporter: Exporter | None = None,
) -> Summary:
    """Run the demo. Whatever happens, no process, segment or temporary file of it is left.

    Args:
        checkpoint: end with a checkpoint there, and begin with the last one; both stay.
        resume: go on from what a killed run has saved at this destination, and save there for the next one.
        trace: file for what every read and write spent its time on, in the Chrome trace format.
        exporter: is to answer with the run's metrics while it lasts.

    Raises:
        InterruptedBySignal: SIGINT or SIGTERM.
        WorkerFailedError: a process of the run failed or was killed.
        DestinationError: the destination cannot be had. CheckpointDamagedError: what lies there is damaged.
    """
    started = time.monotonic()
    ended: EpochRecord | None = None
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(interruption.temporary_folder("transport-demo-"))
        prefix = segment_prefix("demo")
        text = f"rings:{prefix}rollout-"
        with open_queue(text) as queue:
            async with _unless_interrupted():
                epoch = None
                if checkpoint is not None:
                    store = stack.enter_context(open_store(checkpoint.store))
                    epoch = Epoch(store, checkpoint.destination, plan.seed)
                    plan = await epoch.begin(plan, checkpoint.store, directory)
                    if epoch.resumed_from:
                        display.say(f"resumed from epoch {epoch.resumed_from}, version {plan.first_policy().version}")
                if resume is not None:
                    plan = await in_thread(resuming.found, plan, resume)
                    if plan.trained_before:
                        version = plan.first_policy().version
                        display.say(f"resumed at version {version}, trained on {plan.trained_before} episodes")
                workers = Workers(plan, prefix, display.say, lambda workers: _show(workers, display))
                async with (
                    _observed(workers, queue, directory, trace, exporter, display),
                    workers.at_work(directory, text, trace=trace is not None),
                ):
                    await workers.work_done()
                    if epoch is not None:
                        display.say("cooldown: the elected clients upload the policy")
                        ended = await epoch.end(plan, _updates(workers))
                    failures, depth = queue.failures(), queue.depth()  # rings end with their rollouts
            for failure in failures:
                display.say(
                    f"delivery of {failure.ticket_id} to rank {failure.rank} failed: {failure.state}: {failure.reason}"
                )
    await in_thread(resuming.forget, plan)
    reports = [worker.done.result() for worker in workers.all]
    return summarise(
        plan,
        [report for report in reports if isinstance(report, RolloutDone)],
        [report for report in reports if isinstance(report, TrainerDone)],
        depth,
        time.monotonic() - started,
        ended=ended,
        resumed_from=epoch.resumed_from if epoch is not None else 0,
    )


def _updates(workers: Workers) -> int:
    done = workers.trainers[0].done.result()
    return done.updates if isinstance(done, TrainerDone) else 0


@contextlib.asynccontextmanager
async def _observed(
    workers: Workers,
    queue: FoundRings,
    directory: Path,
    trace: Path | None,
    exporter: Exporter | None,
    display: Display,
) -> AsyncIterator[None]:
    """Metrics while it lasts; the workers' traces become one at its end."""
    if exporter is not None:
        exporter.add_queue("demo", queue)
        exporter.add(workers, "workers", lambda _: _samples(workers))
    try:
        yield
    finally:
        if exporter is not None:
            exporter.remove(workers)
            exporter.remove(queue)
        if trace is not None:
            fault = await asyncio.to_thread(_merge_traces, directory, trace)
            if fault:  # the job itself is done, and its summary counts
                display.say(fault)


def _samples(workers: Workers) -> Iterator[Sample]:
    """Metrics of every ring and client of the run that is alive."""
    present = list(workers.all)
    for worker in present:
        try:
            ring = SharedRingBuffer.attach(worker.ring, role="observer")
        except RingError:  # not made yet, gone again, or this worker makes none
            continue
        with ring:
            yield from ring_samples(ring, time.monotonic_ns())
    names = {worker.process.pid: worker.name for worker in present}
    for client in status_socket.clients():
        if client.pid in names:
            yield from client_samples(names[client.pid], client.statistics)


def _merge_traces(directory: Path, target: Path) -> str:
    """Why the target was not written; "": it was."""
    try:
        merge(sorted(directory.glob("*.trace")), target)
    except OSError as error:
        with contextlib.suppress(OSError):  # a part of a document is of no use
            if target.is_file():
                target.unlink()
        return f"--trace {target} was not written: {error.strerror or error}"
    return ""


def _show(workers: Workers, display: Display) -> None:
    reports = [worker.progress for worker in workers.trainers if worker.progress is not None]
    if len(reports) == len(workers.trainers):
        display.show(reports)


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
        interruption.began()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield
    except asyncio.CancelledError:
        if came and task is not None:
            task.uncancel()
            raise InterruptedBySignal(came[0]) from None
        raise
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)  # which removing it does not bring back
