"""A client's part in a cooldown: if elected, save, upload and report; cancel when another client is first."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from pathlib import Path

from transport.cooldown.destinations.masking import masked
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs.ledger import Ledger
from transport.cooldown.epochs.records import EpochRecord, Phase, Refusal, ReportKind, upload_folder
from transport.cooldown.epochs.stop import Stop
from transport.cooldown.following import (
    AGAIN_FIRST_S,
    AGAIN_MOST_S,
    REPORT_S,
    STOP_WAIT_S,
    Follower,
    Part,
    Save,
    Taken,
    check_destination,
    local_copy,
    made_durable,
    prune,
    remove_upload,
    removed,
    save_into,
)
from transport.cooldown.upload import upload
from transport.errors import ConfigurationError, UsageError
from transport.runtime.blocking_calls import in_thread, settled
from transport.runtime.progress import Progress, silent
from transport.store.base import Store

log = logging.getLogger(__name__)


class CooldownClient(Follower):
    """One client of a run. One loop; one cooldown at a time.

    Args:
        name: unique among the clients of the run; letters, digits, dot, dash, underscore.
        save: see `Save`.
        scratch: folder for local copies, used by this client only.
        keep_steps: number of epochs whose local copies are kept after a cooldown.
        skip_upload: for tests: report "skipped" instead of uploading. It completes nothing.
        patience_s: timeout for the coordinator, in seconds, also in training; it writes at least every 10 s of a
            cooldown.
        progress: called with files and bytes, in the uploading thread.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        name: str,
        *,
        save: Save,
        scratch: Path,
        keep_steps: int = 2,
        skip_upload: bool = False,
        patience_s: float = 300.0,
        progress: Progress = silent,
    ) -> None:
        if keep_steps < 0:
            raise ConfigurationError(f"keep_steps={keep_steps}: give the number of local copies to keep, 0 or more")
        super().__init__(Ledger(store, run), name, patience_s)
        self._save = save
        self._scratch = scratch
        self._keep_steps = keep_steps
        self._skip_upload = skip_upload
        self._progress = progress
        self._reported: set[str] = set()  # complete uploads
        self._refused: set[str] = set()  # of these, by the coordinator

    async def join(self, destination: str) -> None:
        """Prove that this process can upload. Call it before its name is among the clients of an epoch.

        Raises DestinationDeniedError naming the denied operation, DestinationError if the destination is unreachable.
        """
        await in_thread(check_destination, destination)

    async def cooldown(self, epoch: int) -> Taken:
        """Take part in an epoch's cooldown; returns when it has ended.

        Cancelling this call cancels the upload, reports that to the coordinator, and leaves no manifest unless the
        upload is already the checkpoint.

        Raises:
            CoordinatorLostError: the coordinator has not changed the record for ``patience_s``.
            StoreUnavailableError: the store is unavailable for a minute.
            UsageError: the coordinator named members with hosts, who save together.
        """
        self._part = Part.NOT_ELECTED
        self._reported.clear()
        self._refused.clear()
        watcher = self._follow(epoch)
        uploader: asyncio.Task[None] | None = None
        try:
            record = await self._until(watcher, lambda record: record.phase is not Phase.TRAINING)
            if record.hosts:
                raise UsageError(f"epoch {epoch}: its members save together; use ShardedClient on every one of them")
            if record.phase is Phase.COOLDOWN and self.name in record.elected:
                uploader = asyncio.create_task(self._upload(record))
            record = await self._until(watcher, lambda record: record.phase is Phase.ENDED, uploader)
        finally:
            await self._stopped([task for task in (watcher, uploader) if task is not None])
        await self._tidy(record)
        won = record.checkpoint is not None and record.checkpoint.attempt in self._reported
        return Taken(Part.WON if won else self._part, record)

    # --- the upload -----------------------------------------------------------------------------------
    async def _upload(self, record: EpochRecord) -> None:
        """Upload and report; retry after a failure or a refusal, until the cooldown ends and cancels this task."""
        if self._skip_upload:
            self._part = Part.SKIPPED
            await self._tell(record, ReportKind.SKIPPED)
            return
        again_s = AGAIN_FIRST_S
        while True:
            self._part = Part.CANCELLED
            attempt = secrets.token_hex(8)
            try:
                sha256 = await self._attempt(record, attempt)
            except Exception as error:  # of the destination, or of the program's own calls
                why = masked(f"{type(error).__name__}: {error}")
                log.warning("epoch %d: upload failed, retrying: %s", record.epoch, why)
                self._part = Part.FAILED
                await self._tell(record, ReportKind.FAILED, attempt, detail=why)
            else:
                self._reported.add(attempt)
                await self._tell(record, ReportKind.UPLOADED, attempt, sha256)
                await self._refusal(attempt)
                self._refused.add(attempt)
                self._part = Part.FAILED
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, AGAIN_MOST_S)

    def _is_refused(self, attempt: str, record: EpochRecord) -> bool:
        note = record.notes.get(self.name)
        noted = note is not None and note.attempt == attempt and note.refusal not in (None, Refusal.UNREADABLE)
        return noted or attempt in self._refused

    async def _refusal(self, attempt: str) -> None:
        """Wait until the coordinator has refused this upload for good."""
        while True:
            note = self._record.notes.get(self.name) if self._record else None
            if note is not None and note.attempt == attempt and note.refusal not in (None, Refusal.UNREADABLE):
                log.warning("the coordinator rejected the upload, retrying: %s: %s", note.refusal.value, note.detail)
                return
            await asyncio.shield(self._change())

    async def _attempt(self, record: EpochRecord, attempt: str) -> str:
        """One complete upload; returns the manifest's checksum."""
        stop = Stop()
        call = in_thread(self._save_and_upload, record, attempt, stop)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            stop.set()
            if not await settled(call, STOP_WAIT_S):
                log.warning(
                    "epoch %d: the cancelled upload does not stop within %.0f s; it writes no manifest",
                    record.epoch,
                    STOP_WAIT_S,
                )
            elif call.exception() is None:  # it completed before the stop, and was not reported
                place = upload_folder(record.run, record.epoch, self.name, attempt)
                await settled(in_thread(remove_upload, record.destination, place), STOP_WAIT_S)
            report = self._report(record, ReportKind.CANCELLED, attempt)
            await settled(in_thread(self._ledger.report, report), REPORT_S)
            raise

    def _save_and_upload(self, record: EpochRecord, attempt: str, stop: Stop) -> str:
        folder = local_copy(self._scratch, record.epoch)
        # A folder of another run, or of one with the same name and a new store, has another model.
        whose = f"{record.run}\n{record.epoch}\n{record.step}\n{record.seed}\n{record.opened_at!r}\n"
        marker = folder / "saved"
        if not marker.exists() or marker.read_text("utf-8", "replace") != whose:
            # Each save has a folder of its own: an earlier one that still runs must not write into what is uploaded.
            own = folder.with_name(f"{folder.name}.{attempt}")
            try:
                save_into(self._save, own / "model", record.step)
                (own / marker.name).write_text(whose, "utf-8")
                made_durable(own)
                stop.check()
                shutil.rmtree(folder, ignore_errors=True)
                own.rename(folder)
                made_durable(self._scratch, below=False)
            finally:
                shutil.rmtree(own, ignore_errors=True)
        stop.check()
        with open_destination(record.destination) as destination:
            done = upload(folder / "model", destination, record, self.name, attempt, stop=stop, progress=self._progress)
        return done.sha256

    # --- the end --------------------------------------------------------------------------------------
    async def _tidy(self, record: EpochRecord) -> None:
        """Remove uploads that did not become the checkpoint, and local copies beyond ``keep_steps``.

        If the epoch has no checkpoint, an upload that was not refused is kept: it may be complete.
        """
        won = record.checkpoint.attempt if record.checkpoint else ""
        for attempt in self._reported - {won}:
            place = upload_folder(record.run, record.epoch, self.name, attempt)
            if not won and not self._is_refused(attempt, record):
                log.warning("epoch %d ended before its upload was verified; %s is kept", record.epoch, place)
                continue
            await removed(record.destination, place)
        await in_thread(prune, self._scratch, self._keep_steps)
