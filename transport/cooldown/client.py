"""A client's part in a cooldown: if elected, save, upload and report; cancel when another client is first."""

from __future__ import annotations

import asyncio
import enum
import logging
import re
import secrets
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from transport.cooldown.blocking_calls import in_thread, retry_store, settled
from transport.cooldown.destinations.base import check_permissions
from transport.cooldown.destinations.masking import masked
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs.ledger import Ledger
from transport.cooldown.epochs.records import EpochRecord, Phase, Refusal, Report, ReportKind, check_name, upload_folder
from transport.cooldown.epochs.stop import Stop
from transport.cooldown.upload import remove, upload
from transport.errors import (
    ConfigurationError,
    CoordinatorLostError,
    DestinationError,
    InternalError,
    RunError,
    TransportError,
)
from transport.runtime.explaining import explained_calls
from transport.runtime.progress import Progress, silent
from transport.store.base import ABSENT, Store

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
STOP_WAIT_S: Final = 30.0  # for the uploading thread to end after a cancellation
_REPORT_S: Final = 5.0
_AGAIN_FIRST_S: Final = 1.0
_AGAIN_MOST_S: Final = 30.0
_LOCAL: Final = re.compile(r"epoch-\d{12}")

Save = Callable[[Path, int], None]
"""Writes the model of a step as plain files into an empty folder. Blocks; runs in a thread of its own."""


class Part(enum.Enum):
    """What a client did in a cooldown."""

    NOT_ELECTED = "not_elected"
    WON = "won"  # its upload is the epoch's checkpoint
    CANCELLED = "cancelled"  # another client was first, or the time limit was reached
    SKIPPED = "skipped"
    FAILED = "failed"


class Taken(NamedTuple):
    """The result of a cooldown for one client."""

    part: Part
    record: EpochRecord


@explained_calls
class CooldownClient:
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
        self.name = check_name(name, "client")
        self._ledger = Ledger(store, run)
        self._save = save
        self._scratch = scratch
        self._keep_steps = keep_steps
        self._skip_upload = skip_upload
        self._patience_s = patience_s
        self._progress = progress
        self._record: EpochRecord | None = None
        self._changed: asyncio.Future[None] | None = None  # done, and replaced, when the record changes
        self._part = Part.NOT_ELECTED
        self._reported: set[str] = set()  # complete uploads
        self._refused: set[str] = set()  # of these, by the coordinator

    async def join(self, destination: str) -> None:
        """Prove that this process can upload. Call it before its name is among the clients of an epoch.

        Raises DestinationDeniedError naming the denied operation, DestinationError if the destination is unreachable.
        """
        await in_thread(_check, destination)

    async def cooldown(self, epoch: int) -> Taken:
        """Take part in an epoch's cooldown; returns when it has ended.

        Cancelling this call cancels the upload, reports that to the coordinator, and leaves no manifest unless the
        upload is already the checkpoint.

        Raises:
            CoordinatorLostError: the coordinator has not changed the record for ``patience_s``.
            StoreUnavailableError: the store is unavailable for a minute.
        """
        self._record = None
        self._part = Part.NOT_ELECTED
        self._reported.clear()
        self._refused.clear()
        self._changed = asyncio.get_running_loop().create_future()
        watcher = asyncio.create_task(self._watch(epoch))
        uploader: asyncio.Task[None] | None = None
        try:
            record = await self._until(watcher, lambda record: record.phase is not Phase.TRAINING)
            if record.phase is Phase.COOLDOWN and self.name in record.elected:
                uploader = asyncio.create_task(self._upload(record))
            record = await self._until(watcher, lambda record: record.phase is Phase.ENDED)
        finally:
            await self._stopped([task for task in (watcher, uploader) if task is not None])
        await self._tidy(record)
        won = record.checkpoint is not None and record.checkpoint.attempt in self._reported
        return Taken(Part.WON if won else self._part, record)

    # --- the record -----------------------------------------------------------------------------------
    async def _watch(self, epoch: int) -> None:
        """Follow the epoch's record to its end."""
        loop = asyncio.get_running_loop()
        version = ABSENT
        heard_at = loop.time()
        while self._record is None or self._record.phase is not Phase.ENDED:
            record, seen = await retry_store(partial(self._ledger.watch, epoch, version, POLL_S))
            if seen != version:
                version, heard_at, self._record = seen, loop.time(), record
                changed, self._changed = self._changed, loop.create_future()
                if changed is not None:
                    changed.set_result(None)
            elif loop.time() - heard_at > self._patience_s:
                raise CoordinatorLostError(
                    f"epoch {epoch}: coordinator timeout, its record is unchanged for {self._patience_s:g} s; "
                    "a new coordinator can resume the epoch"
                )

    async def _until(self, watcher: asyncio.Task[None], holds: Callable[[EpochRecord], bool]) -> EpochRecord:
        while self._record is None or not holds(self._record):
            await asyncio.wait([watcher, self._change()], return_when=asyncio.FIRST_COMPLETED)
            if watcher.done():
                watcher.result()
        return self._record

    def _change(self) -> asyncio.Future[None]:
        """Done at the record's next change."""
        if self._changed is None:
            raise InternalError("no epoch is being watched")
        return self._changed

    # --- the upload -----------------------------------------------------------------------------------
    async def _upload(self, record: EpochRecord) -> None:
        """Upload and report; retry after a failure or a refusal, until the cooldown ends and cancels this task."""
        if self._skip_upload:
            self._part = Part.SKIPPED
            await self._tell(record, ReportKind.SKIPPED)
            return
        again_s = _AGAIN_FIRST_S
        while True:
            self._part = Part.CANCELLED
            attempt = secrets.token_hex(8)
            try:
                sha256 = await self._attempt(record, attempt)
            except (TransportError, OSError) as error:
                log.warning("epoch %d: upload failed, retrying: %s", record.epoch, masked(str(error)))
                self._part = Part.FAILED
                await self._tell(record, ReportKind.FAILED, attempt, detail=masked(str(error)))
            else:
                self._reported.add(attempt)
                await self._tell(record, ReportKind.UPLOADED, attempt, sha256)
                await self._refusal(attempt)
                self._refused.add(attempt)
                self._part = Part.FAILED
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, _AGAIN_MOST_S)

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
                await settled(in_thread(_remove, record.destination, place), STOP_WAIT_S)
            report = self._report(record, ReportKind.CANCELLED, attempt)
            await settled(in_thread(self._ledger.report, report), _REPORT_S)
            raise

    def _save_and_upload(self, record: EpochRecord, attempt: str, stop: Stop) -> str:
        folder = self._scratch / f"epoch-{record.epoch:012d}"
        if not (folder / "saved").exists():
            shutil.rmtree(folder, ignore_errors=True)
            model = folder / "model"
            model.mkdir(parents=True)
            try:
                self._save(model, record.step)
            except Exception as error:
                raise RunError(f"save() of step {record.step} failed: {type(error).__name__}: {error}") from error
            (folder / "saved").touch()
        stop.check()
        with open_destination(record.destination) as destination:
            done = upload(folder / "model", destination, record, self.name, attempt, stop=stop, progress=self._progress)
        return done.sha256

    async def _tell(
        self, record: EpochRecord, kind: ReportKind, attempt: str = "", sha256: str = "", detail: str = ""
    ) -> None:
        await retry_store(partial(self._ledger.report, self._report(record, kind, attempt, sha256, detail)))

    def _report(
        self, record: EpochRecord, kind: ReportKind, attempt: str, sha256: str = "", detail: str = ""
    ) -> Report:
        return Report(
            run=record.run,
            epoch=record.epoch,
            client=self.name,
            kind=kind,
            attempt=attempt,
            manifest_sha256=sha256,
            detail=detail[:500],
        )

    # --- the end --------------------------------------------------------------------------------------
    async def _stopped(self, tasks: list[asyncio.Task[None]]) -> None:
        """Cancel the tasks; log their errors, so that they do not hide the first one."""
        for task in tasks:
            task.cancel()
        await settled(asyncio.gather(*tasks, return_exceptions=True), 2 * STOP_WAIT_S + 2 * _REPORT_S)
        for task in tasks[1:]:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self._part = Part.FAILED
                log.warning("upload failed: %s: %s", type(error).__name__, masked(str(error)))

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
            try:
                await in_thread(_remove, record.destination, place)
            except DestinationError as error:
                log.warning("%s, which is not the checkpoint, was not removed from the destination: %s", place, error)
        await in_thread(prune, self._scratch, self._keep_steps)


def _check(url: str) -> None:
    with open_destination(url) as destination:
        check_permissions(destination)


def _remove(url: str, place: str) -> None:
    with open_destination(url) as destination:
        remove(destination, place)


def prune(scratch: Path, keep: int) -> list[str]:
    """Remove the oldest local copies; returns their names."""
    if not scratch.is_dir():
        return []
    copies = sorted(path.name for path in scratch.iterdir() if _LOCAL.fullmatch(path.name))
    surplus = copies[: max(0, len(copies) - keep)]
    for name in surplus:
        shutil.rmtree(scratch / name, ignore_errors=True)
    return surplus
