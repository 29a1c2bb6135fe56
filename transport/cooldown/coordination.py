"""The coordinator's I/O: it reads reports from the store, writes records to it, and verifies uploads.

`StoredCoordinator` is the blocking part: one step at a time, no clock. `CooldownHost` runs it on a loop until the epoch
has ended. A coordinator that restarts finds the epoch in the store and resumes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from transport.cooldown.destinations.base import Destination, normalise
from transport.cooldown.destinations.masking import masked
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs import manifest as manifests
from transport.cooldown.epochs.coordinator import Coordinator
from transport.cooldown.epochs.ledger import Ledger
from transport.cooldown.epochs.records import (
    SET,
    Checkpoint,
    EpochRecord,
    Phase,
    Refusal,
    Report,
    ReportKind,
    check_name,
    upload_folder,
)
from transport.cooldown.epochs.shares import NameConflict, complete, composed, set_name
from transport.cooldown.epochs.stop import Stop
from transport.cooldown.restoring import epochs_at, publish, put_outcome
from transport.cooldown.verify import Proof, RefusedUpload, verified
from transport.errors import (
    ConfigurationError,
    DestinationError,
    RunError,
    StoreError,
    UsageError,
)
from transport.runtime.blocking_calls import failure, in_thread, retry_store, settled
from transport.store.base import ABSENT, Store

log = logging.getLogger(__name__)

POLL_S: Final = 0.5  # between two looks at the clock
AT_ONCE: Final = 4  # verifications
OUTCOME_COPY_S: Final = 30.0
PUBLISH_S: Final = 600.0


class StoredCoordinator:
    """One epoch's coordinator with its record in the store. Blocks; one call at a time.

    What `machine` is told is in the store when the next call of `write` or `step` has returned. Both raise StoreError;
    after a retryable one the same call can be repeated: nothing is lost or done twice.
    """

    def __init__(self, ledger: Ledger, epoch: int, wall: Callable[[], float] = time.time) -> None:
        record, _ = ledger.look(epoch)
        if record is None:
            raise UsageError(f"run {ledger.run}: epoch {epoch} is not open; open() it first")
        self.machine = Coordinator(record)
        self._ledger = ledger
        self._epoch = epoch
        self._wall = wall
        self._known = record  # as it stood in the store when it was last read or written
        self._heard = (ABSENT, 0)  # the bell's version, and the shares refused, when the shares were read
        self.sets: dict[str, bytes | NameConflict] = {}  # manifests of complete sets, by attempt

    def ended(self) -> bool:
        """Whether the store has the epoch's end."""
        return self._known.phase is Phase.ENDED

    def step(self, now: float) -> list[Report]:
        """Handle new reports and the time; returns the reports to verify."""
        for report in self._ledger.reports(self._epoch):
            if not (self.machine.record.hosts and report.kind is ReportKind.UPLOADED):
                self.machine.report(report)
        self._look_for_a_set()
        self.machine.tick(now)
        return self.write()

    def write(self) -> list[Report]:
        """Write the record where it has changed; returns the reports to verify."""
        if self.machine.record != self._known:
            self._ledger.advance(self._epoch, self._next)
            self._known = self.machine.record
        due = self.machine.due[:]
        self.machine.due.clear()
        return due

    def _next(self, standing: EpochRecord | None) -> EpochRecord | None:
        """What is to be written in place of the record that stands; None: nothing, or it stands there already."""
        if standing is None:
            raise RunError(f"run {self._ledger.run}: the record of epoch {self._epoch} is no longer in the store")
        machine = self.machine
        if standing not in (self._known, machine.record):
            machine.superseded(standing)
            self._known = standing
        if standing == machine.record:
            return None
        if machine.record.phase is Phase.ENDED and not machine.record.ended_at:
            machine.record = msgspec.structs.replace(machine.record, ended_at=self._wall())
        return machine.record

    def _look_for_a_set(self) -> None:
        """Handle a set that has become complete as a report; its manifest is written when it is verified."""
        record = self.machine.record
        if not record.hosts or record.phase is not Phase.COOLDOWN:
            return
        heard = (self._ledger.wait_for_report(self._epoch, ABSENT, 0.0), len(record.refused))
        if heard == self._heard:
            return
        shares = complete(record, self._ledger.shares(self._epoch))
        if shares is not None:
            name, data = set_name(shares), b""
            try:
                data = composed(record, shares, self._ledger.saved(self._epoch)).encode()
                self.sets[name] = data
            except NameConflict as error:
                self.sets[name] = error
            report = Report(
                run=record.run,
                epoch=record.epoch,
                client=SET,
                kind=ReportKind.UPLOADED,
                attempt=name,
                manifest_sha256=hashlib.sha256(data).hexdigest(),
            )
            self.machine.report(report)
        self._heard = heard


class CooldownHost:
    """The coordinator: opens epochs and runs the cooldown of each. One loop.

    Args:
        destination: folder or URL, for all epochs of the run.
        cooldown_s: seconds after which a cooldown ends, if no upload is complete by then.
        verify_s: seconds that verification may take beyond that, for an upload that is complete; by default as long
            again.
        proof: STORED: by checksums that the destination computes itself, where it has them, else by reading every byte
            back. READ: always by reading back.
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
        verify_s: float | None = None,
        proof: Proof = Proof.STORED,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if not 0 < cooldown_s <= 7 * 86_400:
            raise ConfigurationError(f"cooldown_s={cooldown_s}: give seconds above 0, at most a week")
        if verify_s is not None and not 0 < verify_s <= 7 * 86_400:
            raise ConfigurationError(f"verify_s={verify_s}: give seconds above 0, at most a week")
        if not 0 <= seed < 2**64:
            raise ConfigurationError(f"seed={seed}: give 0 to 2**64 - 1")
        self.destination = normalise(destination)
        self._ledger = Ledger(store, run)
        self._cooldown_s = cooldown_s
        self._verify_s = verify_s or cooldown_s
        self._proof = proof
        self._seed = seed
        self._clock = clock
        self._wall = wall

    async def open(self, epoch: int | None = None) -> EpochRecord:
        """Open an epoch, by default the one after the last, in the store and at the destination. Its training begins.

        Raises:
            UsageError: this epoch was already opened, here or by a run of the same name with another store.
            DestinationError: the run's newest checkpoint there is not listed: the share is not mounted, or was emptied.
        """
        there = await self._epochs_there()
        if epoch in there and (await in_thread(self._ledger.look, epoch))[0] is None:
            raise UsageError(
                f"epoch {epoch} of run {self._ledger.run} is at {self.destination}, and not in this store: a run of "
                f"this name had another store; open epoch {max(there) + 1}, or give the run another name"
            )
        while True:
            known = {*await in_thread(self._ledger.epochs), *there}
            chosen = epoch if epoch is not None else max(known, default=0) + 1
            record = EpochRecord(
                run=self._ledger.run,
                epoch=chosen,
                destination=self.destination,
                cooldown_s=self._cooldown_s,
                verify_s=self._verify_s,
                seed=self._seed,
                opened_at=self._wall(),
            )
            if await retry_store(partial(self._ledger.open, record)):
                return record
            if epoch is not None:
                raise UsageError(f"run {self._ledger.run}: epoch {epoch} was already opened; an epoch is opened once")

    async def _epochs_there(self) -> set[int]:
        """Epochs of the run of which something is at the destination; none if it cannot be listed now.

        DestinationError where those that are listed lack the newest checkpoint that the store has there.
        """
        call = in_thread(epochs_at, self.destination, self._ledger.run)
        if not await settled(call, OUTCOME_COPY_S):
            log.warning("run %s: timeout at %s; the epochs there are not known", self._ledger.run, self.destination)
        elif isinstance(error := call.exception(), DestinationError):
            log.warning("run %s: the epochs there are not known: %s", self._ledger.run, error)
        else:
            there = call.result()
            epochs = (await in_thread(self._ledger.epochs)).values()
            checkpoints = [each.epoch for each in epochs if each.checkpoint and each.destination == self.destination]
            if checkpoints and checkpoints[-1] not in there:
                raise DestinationError(
                    f"run {self._ledger.run} has its newest checkpoint at {self.destination}, and its epoch "
                    f"{checkpoints[-1]} is not there: mount the share; if the files were removed, give the run another "
                    "name"
                )
            return there
        return set()

    async def cooldown(self, epoch: int, step: int, clients: Sequence[str] | Mapping[str, str]) -> EpochRecord:
        """Run the cooldown of an open epoch, or resume one that has begun; returns the record of its end.

        Earlier epochs that are still open then end as timed out: their coordinators are gone.

        Args:
            step: training step of the model that the clients upload.
            clients: names of the healthy clients, each of which can save the whole model alone; or, for a model whose
                saving is collective, its members with the host of each, who use `ShardedClient`.

        Raises:
            UsageError: the cooldown has begun with another ``step`` or other ``clients``, which its members act on.
            StoreUnavailableError: the store is unavailable for a minute. The cooldown can be resumed.
        """
        hosts = dict(clients) if isinstance(clients, Mapping) else {}
        for client in clients:
            check_name(client, "client")
        for host in hosts.values():
            check_name(host, "host")
        if SET in hosts:
            raise UsageError(f"a member cannot be named {SET!r}, which stands for all of them; give it another name")
        coordinator = await retry_store(lambda: StoredCoordinator(self._ledger, epoch, self._wall))
        destination = await in_thread(open_destination, coordinator.machine.record.destination)
        try:
            coordinator.machine.begin(step, tuple(clients), hosts)
            await retry_store(coordinator.write)
            await self._lead(coordinator, destination)
            await self._copy_outcome(coordinator.machine.record, destination)
            for earlier in await self._end_earlier(epoch):
                if earlier.destination == coordinator.machine.record.destination:
                    await self._copy_outcome(earlier, destination)
            if destination.publishes:
                await self._publish(coordinator.machine.record, destination)
        finally:
            in_thread(destination.close)
        return coordinator.machine.record

    async def _lead(self, coordinator: StoredCoordinator, destination: Destination) -> None:
        epoch = coordinator.machine.record.epoch
        stop = Stop()
        slots = asyncio.Semaphore(AT_ONCE)
        verdicts: set[asyncio.Task[tuple[Report, Checkpoint | RefusedUpload]]] = set()
        bell = ABSENT
        try:
            while True:
                done = {task for task in verdicts if task.done()}
                verdicts -= done
                for task in done:
                    match task.result():
                        case report, RefusedUpload() as untrue:
                            coordinator.machine.refuted(report, untrue.refusal, str(untrue), untrue.upload)
                        case report, Checkpoint() as checkpoint:
                            coordinator.machine.verified(report, checkpoint)
                for report in await retry_store(lambda: coordinator.step(self._clock())):
                    made = coordinator.sets.get(report.attempt) if report.client == SET else None
                    verdict = self._verdict(coordinator.machine.record, destination, report, made, stop, slots)
                    verdicts.add(asyncio.create_task(verdict))
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
        self,
        record: EpochRecord,
        destination: Destination,
        report: Report,
        made: bytes | NameConflict | None,
        stop: Stop,
        slots: asyncio.Semaphore,
    ) -> tuple[Report, Checkpoint | RefusedUpload]:
        async with slots:
            try:
                return report, await in_thread(self._verify, record, destination, report, made, stop)
            except RefusedUpload as untrue:
                return report, untrue

    def _verify(
        self,
        record: EpochRecord,
        destination: Destination,
        report: Report,
        made: bytes | NameConflict | None,
        stop: Stop,
    ) -> Checkpoint:
        if isinstance(made, NameConflict):
            raise RefusedUpload(Refusal.NAME_CONFLICT, str(made))
        if made is None:
            return verified(destination, record, report, stop, self._proof)
        place = upload_folder(record.run, record.epoch, report.client, report.attempt)
        try:
            stop.check()
            destination.put(f"{place}/{manifests.NAME}", made)
            return verified(destination, record, report, stop, self._proof)
        except DestinationError as error:
            raise RefusedUpload(Refusal.UNREADABLE, str(error)) from error
        except RefusedUpload as error:
            if error.upload:
                raise
            raise RefusedUpload(Refusal.UNREADABLE, str(error)) from error  # the manifest, which was just written

    async def _end_earlier(self, epoch: int) -> list[EpochRecord]:
        """Members of earlier epochs have all come to this one, or are gone, and so have their coordinators."""
        try:
            return await in_thread(self._ledger.end_before, epoch, self._wall())
        except StoreError as error:
            log.warning("epoch %d: what earlier epochs left in the store stays until the next one: %s", epoch, error)
            return []

    async def _copy_outcome(self, record: EpochRecord, destination: Destination) -> None:
        """Write the outcome to the destination too, in case the store is lost."""
        if why := await failure(in_thread(put_outcome, record, destination), OUTCOME_COPY_S):
            log.warning("epoch %d: the outcome is not at %s: %s", record.epoch, destination.url, masked(why))

    async def _publish(self, record: EpochRecord, destination: Destination) -> None:
        """Offer the checkpoint as the service's own tools expect it. A further `cooldown` of this epoch repeats it."""
        call = in_thread(publish, record, destination)
        if why := await failure(call, PUBLISH_S):
            log.warning("epoch %d: its checkpoint is not published: %s", record.epoch, masked(why))
        else:
            log.info("epoch %d: %s", record.epoch, call.result())
