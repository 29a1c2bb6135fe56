"""The coordinator's I/O: it reads reports from the store, writes records to it, and verifies uploads.

`StoredCoordinator` is the blocking part: one step at a time, no clock. `CooldownHost` runs it on a loop until the epoch
has ended. A coordinator that restarts finds the epoch in the store and resumes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from transport.cooldown.blocking_calls import in_thread, retry_store, settled
from transport.cooldown.destinations.base import Destination, normalise
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs.coordinator import (
    Action,
    Begin,
    Coordinator,
    Event,
    Refuted,
    Reported,
    State,
    Superseded,
    Verified,
    Verify,
    Write,
    Written,
)
from transport.cooldown.epochs.ledger import Ledger
from transport.cooldown.epochs.records import (
    EpochRecord,
    Phase,
    Report,
    check_name,
    decode,
    encode,
    outcomes_folder,
)
from transport.cooldown.epochs.stop import Stop
from transport.cooldown.verify import RefusedUpload, verified
from transport.errors import (
    ConfigurationError,
    RunError,
    UsageError,
)
from transport.runtime.explaining import explained, explained_calls
from transport.store.base import ABSENT, Store

log = logging.getLogger(__name__)

POLL_S: Final = 0.5  # between two looks at the clock
AT_ONCE: Final = 4  # verifications
OUTCOME_COPY_S: Final = 30.0
_MOST_RECORD: Final = 16 << 20


class StoredCoordinator:
    """One epoch's coordinator with its record in the store. Blocks; one call at a time.

    Raises StoreUnavailableError; the same call can then be repeated: nothing is lost or done twice.
    """

    def __init__(self, ledger: Ledger, epoch: int, wall: Callable[[], float] = time.time) -> None:
        record, self._version = ledger.look(epoch)
        if record is None:
            raise UsageError(f"run {ledger.run}: epoch {epoch} is not open; open() it first")
        self.machine = Coordinator(record)
        self._ledger = ledger
        self._epoch = epoch
        self._wall = wall
        self._unwritten: EpochRecord | None = None

    def ended(self) -> bool:
        """Whether the store has the epoch's end."""
        return self.machine.state is State.ENDED

    def step(self, now: float) -> list[Report]:
        """Handle new reports and the time; returns the reports to verify."""
        due = self._flush()
        for report in self._ledger.reports(self._epoch):
            due += self.handle(Reported(report))
        return due + self._perform(self.machine.tick(now))

    def handle(self, event: Event) -> list[Report]:
        """Handle one event; returns the reports to verify."""
        return self._flush() + self._perform(self.machine.handle(event))

    def _perform(self, actions: Iterable[Action]) -> list[Report]:
        due = []
        for action in actions:
            match action:
                case Write(record):
                    self._unwritten = record
                case Verify(report):
                    due.append(report)
        return due + self._flush()

    def _flush(self) -> list[Report]:
        """Write the pending record; a record of another coordinator causes further actions."""
        due: list[Report] = []
        while self._unwritten is not None:
            record = self._unwritten
            if record.phase is Phase.ENDED and not record.ended_at:
                record = self._unwritten = msgspec.structs.replace(record, ended_at=self._wall())
            version = self._ledger.write(record, self._version)
            event: Event = Written()
            if version is None:
                theirs, version = self._ledger.look(self._epoch)
                if theirs is None:
                    raise RunError(
                        f"run {self._ledger.run}: the record of epoch {self._epoch} is no longer in the store"
                    )
                # A write whose answer was lost may have been done: then the record is our own.
                event = Written() if theirs == record else Superseded(theirs)
            self._version = version
            self._unwritten = None
            if isinstance(event, Written):
                self.machine.record = record
            for action in self.machine.handle(event):
                match action:
                    case Write(again):
                        self._unwritten = again
                    case Verify(report):
                        due.append(report)
        return due


@explained_calls
class CooldownHost:
    """The coordinator: opens epochs and runs the cooldown of each. One loop.

    Args:
        destination: folder or URL, for all epochs of the run.
        cooldown_s: seconds after which a cooldown without a checkpoint ends. The coordinator's verification, which
            reads every byte back, counts. A verification that runs at that time is waited for, at most as long again.
        seed: seed of the elections, 0 to 2**64 - 1.
        clock: seconds, for the time limit; `wall`: Unix time, for display.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        destination: str,
        *,
        cooldown_s: float,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if not 0 < cooldown_s <= 7 * 86_400:
            raise ConfigurationError(f"cooldown_s={cooldown_s}: give seconds above 0, at most a week")
        if not 0 <= seed < 2**64:
            raise ConfigurationError(f"seed={seed}: give 0 to 2**64 - 1")
        self.destination = normalise(destination)
        self._ledger = Ledger(store, run)
        self._cooldown_s = cooldown_s
        self._seed = seed
        self._clock = clock
        self._wall = wall

    async def open(self, epoch: int | None = None) -> EpochRecord:
        """Open an epoch, by default the one after the last. Its training begins.

        Raises UsageError if this epoch was already opened.
        """
        while True:
            chosen = epoch if epoch is not None else max(await in_thread(self._ledger.epochs), default=0) + 1
            record = EpochRecord(
                run=self._ledger.run,
                epoch=chosen,
                destination=self.destination,
                cooldown_s=self._cooldown_s,
                seed=self._seed,
                opened_at=self._wall(),
            )
            if await in_thread(self._ledger.write, record, ABSENT) is not None:
                return record
            if epoch is not None:
                raise UsageError(f"run {self._ledger.run}: epoch {epoch} was already opened; an epoch is opened once")

    async def cooldown(self, epoch: int, step: int, clients: Sequence[str]) -> EpochRecord:
        """Run the cooldown of an open epoch, or resume one that has begun; returns the record of its end.

        Args:
            step: training step of the model that the clients upload.
            clients: names of the healthy clients.

        Raises:
            StoreUnavailableError: the store is unavailable for a minute. The cooldown can be resumed.
        """
        for client in clients:
            check_name(client, "client")
        coordinator = await retry_store(lambda: StoredCoordinator(self._ledger, epoch, self._wall))
        destination = await in_thread(open_destination, coordinator.machine.record.destination)
        try:
            await retry_store(lambda: coordinator.handle(Begin(step, tuple(clients))))
            await self._lead(coordinator, destination)
            await self._copy_outcome(coordinator.machine.record, destination)
        finally:
            in_thread(destination.close)
        return coordinator.machine.record

    async def _lead(self, coordinator: StoredCoordinator, destination: Destination) -> None:
        epoch = coordinator.machine.record.epoch
        stop = Stop()
        slots = asyncio.Semaphore(AT_ONCE)
        verdicts: set[asyncio.Task[Event]] = set()
        bell = ABSENT
        try:
            while not coordinator.ended():
                due = await retry_store(lambda: coordinator.step(self._clock()))
                done = {task for task in verdicts if task.done()}
                verdicts -= done
                for task in done:
                    due += await retry_store(partial(coordinator.handle, task.result()))
                for report in due:
                    verdicts.add(
                        asyncio.create_task(self._verdict(coordinator.machine.record, destination, report, stop, slots))
                    )
                if coordinator.ended():
                    return
                ring = in_thread(self._ledger.wait_for_report, epoch, bell, POLL_S)
                awaited: list[asyncio.Future[Any]] = [ring, *verdicts]
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                if ring.done() and ring.exception() is None:
                    bell = ring.result()
                elif not ring.done():
                    ring.cancel()
        finally:
            stop.set()
            for task in verdicts:
                task.cancel()
            await asyncio.gather(*verdicts, return_exceptions=True)

    async def _verdict(
        self, record: EpochRecord, destination: Destination, report: Report, stop: Stop, slots: asyncio.Semaphore
    ) -> Event:
        async with slots:
            try:
                return Verified(report, await in_thread(verified, destination, record, report, stop))
            except RefusedUpload as untrue:
                return Refuted(report, untrue.refusal, str(untrue))

    async def _copy_outcome(self, record: EpochRecord, destination: Destination) -> None:
        """Write the outcome to the destination too, in case the store is lost."""
        written = in_thread(destination.put, outcome_path(record.run, record.epoch), encode(record))
        if not await settled(written, OUTCOME_COPY_S):
            log.warning("epoch %d: the outcome is in the store only: timeout at %s", record.epoch, destination.url)
        elif error := written.exception():
            log.warning("epoch %d: the outcome is in the store only: %s", record.epoch, error)


def outcome_path(run: str, epoch: int) -> str:
    """Path of an epoch's outcome at the destination."""
    return f"{outcomes_folder(run)}/{epoch:012d}.json"


@explained
def recorded_outcomes(destination: Destination, run: str) -> dict[int, EpochRecord]:
    """The ended epochs as recorded at the destination, for use when the store is lost. Blocks.

    Raises DestinationError; StoreUnsuitableError for a file that is not a record.
    """
    found = {}
    for name in destination.names(outcomes_folder(check_name(run, "run"))):
        data = destination.read(f"{outcomes_folder(run)}/{name}", _MOST_RECORD) if name.endswith(".json") else None
        if data is not None:
            record = decode(data, EpochRecord)
            if record.run == run and record.phase is Phase.ENDED:
                found[record.epoch] = record
    return found
