"""A client's part in a cooldown: it follows the epoch's record, and, if elected, saves, uploads and reports.

`EpochClient` is what every client does; `CooldownClient` is one that can save the whole model alone, and cancels its
upload when another client is first. `sharded.py` has those that save together.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import logging
import re
import secrets
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypedDict, TypeVar

from transport.cooldown.destinations.base import check_permissions
from transport.cooldown.destinations.masking import masked
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs.coordinator import MOST_DETAIL
from transport.cooldown.epochs.ledger import Ledger
from transport.cooldown.epochs.records import (
    EpochRecord,
    Note,
    Outcome,
    Phase,
    ReportKind,
    UploadReport,
    check_name,
)
from transport.cooldown.upload import Stop, remove, upload
from transport.errors import ConfigurationError, CoordinatorLostError, RunError, UsageError
from transport.runtime.blocking_calls import failure, in_thread, retry_store, settled
from transport.runtime.durable import flush
from transport.runtime.error_text import error_text, reportable
from transport.runtime.progress import Progress, silent
from transport.store.base import ABSENT, Store

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
STOP_WAIT_S: Final = 30.0  # for the uploading thread to end after a cancellation
REPORT_S: Final = 5.0
AGAIN_FIRST_S: Final = 1.0  # between two uploads, doubled after each
AGAIN_MOST_S: Final = 30.0
_LOCAL: Final = re.compile(r"(epoch-\d{12})(\.[0-9a-f]{16})?")  # the latter: a save that is not complete

Save = Callable[[Path, int], None]
"""Writes the model of a step as plain files into an empty folder. Blocks; runs in a thread of its own."""


T = TypeVar("T")


class Part(enum.Enum):
    """A client's part in a cooldown."""

    NOT_ELECTED = "not_elected"
    WON = "won"  # its upload is the epoch's checkpoint
    CANCELLED = "cancelled"  # another client was first, or the time limit was reached
    SKIPPED = "skipped"
    FAILED = "failed"


class Taken(NamedTuple):
    """The result of a cooldown for one client."""

    part: Part
    record: EpochRecord


class EpochClientOptions(TypedDict, total=False):
    """Options of every client, see `EpochClient`."""

    keep_steps: int
    skip_upload: bool
    patience_s: float
    progress: Progress


class EpochClient(abc.ABC):
    """A client of an epoch: follow the epoch's record, upload, report, tidy up. One loop; one cooldown at a time.

    Args:
        name: unique among the clients of the run; letters, digits, dot, dash, underscore.
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
        self._part = Part.NOT_ELECTED
        self._uploads: set[str] = set()  # complete ones of this epoch
        self._record: EpochRecord | None = None
        self._changed: asyncio.Future[None]  # done, and replaced, when the record changes

    async def join(self, destination: str) -> None:
        """Prove that this process can upload. Call it before its name is among the clients of an epoch.

        Raises DestinationDeniedError naming the denied operation, DestinationError if the destination is unreachable.
        """
        await in_thread(check_destination, destination)

    async def cooldown(self, epoch: int) -> Taken:
        """Take part in an epoch's cooldown; returns when it has ended, and a collective save of this member has.

        Cancelling this call cancels the upload, or withdraws one that is complete, reports that to the coordinator, and
        leaves no manifest unless the upload is already the checkpoint. What still waits for the destination is removed
        by its thread when that answers. A save that runs then goes on in its thread.

        Raises:
            CoordinatorLostError: the coordinator has not changed the record for ``patience_s``. If no member had begun
                a collective save by then, none does in this epoch any more.
            StoreUnavailableError: the store is unavailable for a minute.
            UsageError: the coordinator named clients for the other kind of save, or not this member. Nothing was saved.
        """
        self._part, self._record = Part.NOT_ELECTED, None
        self._uploads.clear()
        self._changed = asyncio.get_running_loop().create_future()
        try:
            record = await self._to_the_end(epoch)
        except asyncio.CancelledError:
            await self._withdraw()
            raise
        await self._tidy(record)
        return Taken(self._part, record)

    async def _to_the_end(self, epoch: int) -> EpochRecord:
        """Follow the epoch to its end, and upload meanwhile."""
        watcher = asyncio.create_task(self._watch(epoch))
        uploader: asyncio.Task[None] | None = None
        try:
            record = await self._begun(watcher, epoch)
            if await self._has_files(record) and record.phase is Phase.COOLDOWN:
                uploader = asyncio.create_task(self._skip(record) if self._skip_upload else self._carry(record))
            return await self._until(watcher, lambda record: record.phase is Phase.ENDED, uploader)
        finally:
            await self._stopped([task for task in (watcher, uploader) if task is not None])

    async def _withdraw(self) -> None:
        """Take back complete uploads but the checkpoint: no call of this client removes them any more.

        A share stays: it belongs to the set of all members.
        """
        record = self._record
        if record is None or record.hosts:
            return
        for mine in sorted(self._uploads):
            report = self._report(record, ReportKind.CANCELLED, mine.partition("/")[2])
            call = in_thread(self._ledger.withdraw, report)
            if why := await failure(call, REPORT_S):
                log.warning("epoch %d: upload %s is not withdrawn, and stays: %s", record.epoch, mine, masked(why))
            elif call.result():
                await removed(record.destination, record.folder(mine))

    async def _begun(self, watcher: asyncio.Task[None], epoch: int) -> EpochRecord:
        """Return the record of the cooldown that has begun."""
        return await self._until(watcher, lambda record: record.phase is not Phase.TRAINING)

    @abc.abstractmethod
    async def _has_files(self, record: EpochRecord) -> bool:
        """Return whether this client has anything to upload."""

    @abc.abstractmethod
    async def _carry(self, record: EpochRecord) -> None:
        """Upload, until the cooldown ends and cancels this task."""

    @abc.abstractmethod
    async def _used(self, record: EpochRecord) -> set[str] | None:
        """Return the complete uploads that are in the checkpoint, or may be good; None if unknown."""

    async def _skip(self, record: EpochRecord) -> None:
        self._part = Part.SKIPPED
        await self._tell(record, ReportKind.SKIPPED)

    async def _attempted(self, record: EpochRecord, attempt: str, work: Callable[[Stop], T], what: str) -> T | None:
        """Return the result of an upload from a thread; None: it failed, which is reported.

        Cancelled, it stops, removes what was complete by then, and reports that.
        """
        self._part = Part.CANCELLED
        stop = Stop()
        call = in_thread(work, stop)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            stop.set()
            place = record.folder(f"{self.name}/{attempt}")
            if not await settled(call, STOP_WAIT_S):
                call.cancel()  # the thread goes on
                log.warning(
                    "epoch %d: the cancelled upload to %s waits for the destination; its thread removes it then",
                    record.epoch,
                    place,
                )
            elif call.exception() is None:  # it completed before the stop, and was not reported
                await removed(record.destination, place)
            await self._tell_cancelled(record, attempt)
            raise
        except Exception as error:  # of the destination, or of the program's own calls
            why = error_text(error)
            log.warning("epoch %d: %s failed, retrying: %s", record.epoch, what, masked(why))
            await self._failed(record, why, attempt)
            return None

    async def _tell_cancelled(self, record: EpochRecord, attempt: str) -> None:
        report = self._report(record, ReportKind.CANCELLED, attempt)
        await settled(in_thread(self._ledger.report, report), REPORT_S)

    async def _failed(self, record: EpochRecord, why: str, attempt: str = "") -> None:
        self._part = Part.FAILED
        await self._tell(record, ReportKind.FAILED, attempt, detail=masked(why))

    async def _tidy(self, record: EpochRecord) -> None:
        """Remove uploads that are not in the checkpoint nor may be good, and local copies beyond ``keep_steps``."""
        used = await self._used(record) if self._uploads else set()
        for each in self._uploads - used if used is not None else ():
            await removed(record.destination, record.folder(each))
        if used and record.outcome is Outcome.CHECKPOINTED:
            self._part = Part.WON
        await in_thread(prune, self._scratch, self._keep_steps, record.epoch)

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
                changed.set_result(None)
            elif loop.time() - heard_at > self._patience_s:
                raise CoordinatorLostError(
                    f"epoch {epoch}: coordinator timeout, its record is unchanged for {self._patience_s:g} s; "
                    "a new coordinator can resume the epoch"
                    if record is not None
                    else f"run {self._ledger.run} has no epoch {epoch} in the store {self._ledger.place} after "
                    f"{self._patience_s:g} s: give this client the store and the run of the coordinator that opens it"
                )

    async def _until(
        self,
        watcher: asyncio.Task[None],
        holds: Callable[[EpochRecord], bool],
        uploader: asyncio.Task[None] | None = None,
    ) -> EpochRecord:
        """Return the record as soon as this holds; an error of a task that ends before is raised."""
        tasks = {task for task in (watcher, uploader) if task is not None}
        while self._record is None or not holds(self._record):
            await asyncio.wait([*tasks, self._changed], return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in tasks if task.done()]:
                task.result()
                tasks.discard(task)
        return self._record

    async def _tell(
        self, record: EpochRecord, kind: ReportKind, attempt: str = "", sha256: str = "", detail: str = ""
    ) -> None:
        await retry_store(partial(self._ledger.report, self._report(record, kind, attempt, sha256, detail)))

    def _report(
        self, record: EpochRecord, kind: ReportKind, attempt: str, sha256: str = "", detail: str = ""
    ) -> UploadReport:
        return UploadReport(
            run=record.run,
            epoch=record.epoch,
            client=self.name,
            kind=kind,
            attempt=attempt,
            manifest_sha256=sha256,
            detail=reportable(detail, MOST_DETAIL),
        )

    async def _stopped(self, tasks: list[asyncio.Task[None]]) -> None:
        """Cancel the tasks; log their errors, so that they do not hide the first one."""
        for task in tasks:
            task.cancel()
        await settled(asyncio.gather(*tasks, return_exceptions=True), 2 * STOP_WAIT_S + 2 * REPORT_S)
        for task in tasks[1:]:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self._part = Part.FAILED
                log.warning("upload failed: %s", masked(error_text(error)))


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
            save_and_upload = partial(self._save_and_upload, record, attempt)
            sha256 = await self._attempted(record, attempt, save_and_upload, "upload")
            if sha256 is not None:
                mine = f"{self.name}/{attempt}"
                self._uploads.add(mine)
                await self._tell(record, ReportKind.UPLOADED, attempt, sha256)
                await self._refusal(mine)
                self._part = Part.FAILED
                await removed(record.destination, record.folder(mine))
                self._uploads.discard(mine)
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, AGAIN_MOST_S)

    async def _refusal(self, mine: str) -> None:
        """Wait until the coordinator has refused this upload for good."""
        while (note := self._refused_by(self._record, mine)) is None:
            await asyncio.shield(self._changed)
        why = note.refusal.value if note.refusal is not None else ""
        log.warning("the coordinator rejected the upload, retrying: %s: %s", why, note.detail)

    def _refused_by(self, record: EpochRecord | None, mine: str) -> Note | None:
        """Return the note that refuses an upload for good."""
        note = record.notes.get(self.name) if record is not None else None
        refuses = note is not None and note.refused and f"{self.name}/{note.attempt}" == mine
        return note if refuses else None

    def _save_and_upload(self, record: EpochRecord, attempt: str, stop: Stop) -> str:
        """Return one complete upload; returns the manifest's checksum."""
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
        """Return the checkpoint's upload; without a checkpoint those that were not refused: one may be complete."""
        if record.checkpoint is not None:
            return self._uploads & {record.checkpoint.upload}
        unverified = {each for each in self._uploads if self._refused_by(record, each) is None}
        for each in unverified:
            log.warning("epoch %d ended before its upload was verified; %s is kept", record.epoch, record.folder(each))
        return unverified


def check_destination(url: str) -> None:
    """Check permissions as `check_permissions`, for a URL."""
    with open_destination(url) as destination:
        check_permissions(destination)


def remove_upload(url: str, place: str) -> None:
    """Remove an upload as `remove`, for a URL."""
    with open_destination(url) as destination:
        remove(destination, place)


async def removed(url: str, place: str) -> None:
    """Remove an upload that is not the checkpoint; a destination that fails or hangs is only logged."""
    if why := await failure(in_thread(remove_upload, url, place), STOP_WAIT_S):
        log.warning("%s, which is not the checkpoint, was not removed: %s", place, masked(why))


def local_copy(scratch: Path, epoch: int) -> Path:
    """Return the folder of an epoch's local copy."""
    return scratch / f"epoch-{epoch:012d}"


def save_into(save: Save, folder: Path, step: int) -> None:
    """Save into the new folder. Raises RunError if ``save`` fails."""
    folder.mkdir(parents=True)
    try:
        save(folder, step)
    except Exception as error:
        raise RunError(f"save() of step {step} failed: {error_text(error)}") from error


def made_durable(folder: Path, *, below: bool = True) -> None:
    """Flush a folder to disk, with all that is ``below``, so that a power loss leaves it as it is."""
    for path in [*(folder.rglob("*") if below else ()), folder]:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            continue
        flush(path)


def prune(scratch: Path, keep: int, epoch: int) -> list[str]:
    """Remove the oldest local copies, and what saves that were not completed have left; returns their names.

    ``epoch``: which has just ended. Copies of later ones are older: a former run made them, whose store is gone.
    """
    if not scratch.is_dir():
        return []
    found = [match for path in scratch.iterdir() if (match := _LOCAL.fullmatch(path.name))]
    newest = local_copy(scratch, epoch).name
    copies = sorted((match[0] for match in found if not match[2]), key=lambda name: (name <= newest, name))
    surplus = copies[: max(0, len(copies) - keep)] + [match[0] for match in found if match[2]]
    for name in surplus:
        shutil.rmtree(scratch / name, ignore_errors=True)
    return surplus
