"""The process that coordinates: it opens epochs, runs the coordinator of each until its end, and verifies uploads.

One that restarts finds the epoch in the store and resumes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from transport.cooldown.destinations.base import Destination, normalise
from transport.cooldown.destinations.masking import masked
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs import manifest as manifests
from transport.cooldown.epochs.coordinator import StoredCoordinator
from transport.cooldown.epochs.ledger import Ledger
from transport.cooldown.epochs.records import (
    SET,
    Checkpoint,
    EpochRecord,
    Refusal,
    UploadReport,
    check_name,
)
from transport.cooldown.restoring import epochs_at, publish, put_outcome
from transport.cooldown.upload import Stop
from transport.cooldown.verify import CheckpointProof, RefusedUpload, verified
from transport.errors import ConfigurationError, DestinationError, StoreError, UsageError
from transport.runtime.arguments import at_least, several
from transport.runtime.blocking_calls import failure, in_thread, retry_store, settled
from transport.store.base import ABSENT, Store

log = logging.getLogger(__name__)

POLL_S: Final = 0.5  # between two looks at the clock
AT_ONCE: Final = 4  # verifications
OUTCOME_COPY_S: Final = 30.0
PUBLISH_S: Final = 600.0


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
        proof: CheckpointProof = CheckpointProof.STORED,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        for name, value in (("cooldown_s", cooldown_s), ("verify_s", verify_s)):
            if value is not None and not 0 < value <= 7 * 86_400:
                raise ConfigurationError(f"{name}={value}: give seconds above 0, at most a week")
        if not 0 <= seed < 2**64:
            raise ConfigurationError(f"seed={seed}: give 0 to 2**64 - 1")
        self.destination = normalise(destination)
        self._ledger = Ledger(store, run)
        self._cooldown_s = cooldown_s
        self._verify_s = verify_s or 0.0
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
        if epoch in there and epoch not in await in_thread(self._ledger.numbers):
            raise UsageError(
                f"epoch {epoch} of run {self._ledger.run} is at {self.destination}, and not in this store: a run of "
                f"this name had another store; open epoch {max(there) + 1}, or give the run another name"
            )
        while True:
            known = {*await in_thread(self._ledger.numbers), *there}
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
        """Return the epochs of the run of which something is at the destination; none if it cannot be listed now.

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
        step = at_least(0, step, "step")
        hosts = dict(clients) if isinstance(clients, Mapping) else {}
        names = several(clients, "clients of cooldown()")
        for client in names:
            check_name(client, "client")
        for host in hosts.values():
            check_name(host, "host")
        if SET in hosts:
            raise UsageError(f"a member cannot be named {SET!r}, which stands for all of them; give it another name")
        coordinator = await retry_store(lambda: StoredCoordinator(self._ledger, epoch, self._wall))
        destination = await in_thread(open_destination, coordinator.machine.record.destination)
        try:
            coordinator.machine.begin(step, names, hosts)
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
        verdicts: set[asyncio.Task[tuple[UploadReport, Checkpoint | RefusedUpload]]] = set()
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
                    verify = partial(self._verify, coordinator.machine.record, destination, report, made, stop)
                    verdicts.add(asyncio.create_task(self._verdict(report, verify, slots)))
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
        self, report: UploadReport, verify: Callable[[], Checkpoint], slots: asyncio.Semaphore
    ) -> tuple[UploadReport, Checkpoint | RefusedUpload]:
        async with slots:
            try:
                return report, await in_thread(verify)
            except RefusedUpload as untrue:
                return report, untrue

    def _verify(
        self, record: EpochRecord, destination: Destination, report: UploadReport, made: bytes | None, stop: Stop
    ) -> Checkpoint:
        """Return the upload as a checkpoint. ``made``: the manifest of a set, which is written first."""
        if made is None:
            return verified(destination, record, report, stop, self._proof)
        try:
            stop.check()
            destination.put(f"{record.folder(report.upload)}/{manifests.NAME}", made)
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
