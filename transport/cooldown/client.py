"""A client's part in a cooldown: if elected, save, upload and report; cancel when another client is first."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from functools import partial

from transport.cooldown.destinations.masking import masked
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs.records import EpochRecord, Note, Refusal, ReportKind, upload_folder
from transport.cooldown.epochs.stop import Stop
from transport.cooldown.following import (
    AGAIN_FIRST_S,
    AGAIN_MOST_S,
    EpochClient,
    Part,
    local_copy,
    made_durable,
    save_into,
)
from transport.cooldown.upload import upload
from transport.errors import UsageError

log = logging.getLogger(__name__)


class CooldownClient(EpochClient):
    """One client of a run, which can save the whole model alone.

    Takes the arguments of `EpochClient`. ``save`` is called when this client is elected; ``scratch`` is a folder for
    local copies, used by this client only.
    """

    async def _has_files(self, record: EpochRecord) -> bool:
        if record.hosts:
            raise UsageError(f"epoch {record.epoch}: its members save together; use ShardedClient on every one of them")
        return self.name in record.elected

    async def _carry(self, record: EpochRecord) -> None:
        """Upload and report; retry after a failure or a refusal, until the cooldown ends and cancels this task."""
        again_s = AGAIN_FIRST_S
        while True:
            attempt = secrets.token_hex(8)
            try:
                save_and_upload = partial(self._save_and_upload, record, attempt)
                sha256 = await self._cancellable(record, attempt, save_and_upload)
            except Exception as error:  # of the destination, or of the program's own calls
                why = f"{type(error).__name__}: {error}"
                log.warning("epoch %d: upload failed, retrying: %s", record.epoch, masked(why))
                await self._failed(record, why, attempt)
            else:
                self._uploads.add(attempt)
                await self._tell(record, ReportKind.UPLOADED, attempt, sha256)
                await self._refusal(attempt)
                self._refused.add(attempt)
                self._part = Part.FAILED
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, AGAIN_MOST_S)

    async def _refusal(self, attempt: str) -> None:
        """Wait until the coordinator has refused this upload for good."""
        while (note := self._refused_by(self._record, attempt)) is None:
            await asyncio.shield(self._change())
        why = note.refusal.value if note.refusal is not None else ""
        log.warning("the coordinator rejected the upload, retrying: %s: %s", why, note.detail)

    def _refused_by(self, record: EpochRecord | None, attempt: str) -> Note | None:
        """The note that refuses an upload for good."""
        note = record.notes.get(self.name) if record is not None else None
        known = note is not None and note.attempt == attempt and note.refusal not in (None, Refusal.UNREADABLE)
        return note if known else None

    def _save_and_upload(self, record: EpochRecord, attempt: str, stop: Stop) -> str:
        """One complete upload; returns the manifest's checksum."""
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

    async def _used(self, record: EpochRecord) -> set[str]:
        """If the epoch has no checkpoint, an upload that was not refused is kept: it may be complete."""
        if record.checkpoint is not None:
            return self._uploads & {record.checkpoint.attempt}
        refused = {each for each in self._uploads if each in self._refused or self._refused_by(record, each)}
        for attempt in self._uploads - refused:
            place = upload_folder(record.run, record.epoch, self.name, attempt)
            log.warning("epoch %d ended before its upload was verified; %s is kept", record.epoch, place)
        return self._uploads - refused
