"""What every client of a cooldown does: follow the epoch's record, report, stop its tasks, prune local copies."""

from __future__ import annotations

import asyncio
import enum
import logging
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from transport.cooldown.destinations.base import check_permissions
from transport.cooldown.destinations.masking import masked
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs.ledger import Ledger
from transport.cooldown.epochs.records import EpochRecord, Phase, Report, ReportKind, check_name
from transport.cooldown.upload import remove
from transport.errors import CoordinatorLostError, InternalError, RunError
from transport.runtime.blocking_calls import in_thread, retry_store, settled
from transport.runtime.durable import flush
from transport.store.base import ABSENT

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
STOP_WAIT_S: Final = 30.0  # for the uploading thread to end after a cancellation
REPORT_S: Final = 5.0
AGAIN_FIRST_S: Final = 1.0  # between two uploads, doubled after each
AGAIN_MOST_S: Final = 30.0
_LOCAL: Final = re.compile(r"(epoch-\d{12})(\.[0-9a-f]{16})?")  # the latter: a save that is not complete

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


class Follower:
    """The newest record of one epoch at a time. One loop."""

    def __init__(self, ledger: Ledger, name: str, patience_s: float) -> None:
        self.name = check_name(name, "client")
        self._part = Part.NOT_ELECTED
        self._ledger = ledger
        self._patience_s = patience_s
        self._record: EpochRecord | None = None
        self._changed: asyncio.Future[None] | None = None  # done, and replaced, when the record changes

    def _follow(self, epoch: int) -> asyncio.Task[None]:
        """Begin to follow an epoch; cancel the task to end it."""
        self._record = None
        self._changed = asyncio.get_running_loop().create_future()
        return asyncio.create_task(self._watch(epoch))

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

    async def _until(
        self,
        watcher: asyncio.Task[None],
        holds: Callable[[EpochRecord], bool],
        uploader: asyncio.Task[None] | None = None,
    ) -> EpochRecord:
        """The record as soon as this holds; an error of a task that ends before is raised."""
        tasks = {task for task in (watcher, uploader) if task is not None}
        while self._record is None or not holds(self._record):
            await asyncio.wait([*tasks, self._change()], return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in tasks if task.done()]:
                task.result()
                tasks.discard(task)
        return self._record

    def _change(self) -> asyncio.Future[None]:
        """Done at the record's next change."""
        if self._changed is None:
            raise InternalError("no epoch is being watched")
        return self._changed

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

    async def _stopped(self, tasks: list[asyncio.Task[None]]) -> None:
        """Cancel the tasks; log their errors, so that they do not hide the first one."""
        for task in tasks:
            task.cancel()
        await settled(asyncio.gather(*tasks, return_exceptions=True), 2 * STOP_WAIT_S + 2 * REPORT_S)
        for task in tasks[1:]:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self._part = Part.FAILED
                log.warning("upload failed: %s: %s", type(error).__name__, masked(str(error)))


def check_destination(url: str) -> None:
    """As `check_permissions`, for a URL."""
    with open_destination(url) as destination:
        check_permissions(destination)


def remove_upload(url: str, place: str) -> None:
    """As `remove`, for a URL."""
    with open_destination(url) as destination:
        remove(destination, place)


async def removed(url: str, place: str) -> None:
    """Remove an upload that is not the checkpoint; a destination that fails or hangs is only logged."""
    call = in_thread(remove_upload, url, place)
    if not await settled(call, STOP_WAIT_S):
        log.warning("%s, which is not the checkpoint, is not yet removed: the destination does not answer", place)
    elif error := call.exception():
        log.warning("%s, which is not the checkpoint, was not removed: %s", place, masked(str(error)))


def local_copy(scratch: Path, epoch: int) -> Path:
    """The folder of an epoch's local copy."""
    return scratch / f"epoch-{epoch:012d}"


def save_into(save: Save, folder: Path, step: int) -> None:
    """Save into the new folder. Raises RunError if ``save`` fails."""
    folder.mkdir(parents=True)
    try:
        save(folder, step)
    except Exception as error:
        raise RunError(f"save() of step {step} failed: {type(error).__name__}: {error}") from error


def made_durable(folder: Path, *, below: bool = True) -> None:
    """Flush a folder to disk, with all that is ``below``, so that a power loss leaves it as it is."""
    for path in [*(folder.rglob("*") if below else ()), folder]:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            continue
        flush(path)


def prune(scratch: Path, keep: int) -> list[str]:
    """Remove the oldest local copies, and what saves that were not completed have left; returns their names."""
    if not scratch.is_dir():
        return []
    found = [match for path in scratch.iterdir() if (match := _LOCAL.fullmatch(path.name))]
    copies = sorted(match[0] for match in found if not match[2])
    surplus = copies[: max(0, len(copies) - keep)] + [match[0] for match in found if match[2]]
    for name in surplus:
        shutil.rmtree(scratch / name, ignore_errors=True)
    return surplus
