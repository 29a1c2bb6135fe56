"""A member's part in the cooldown of a model whose save is collective: all save, the elected of each host upload.

The members of one launch of a job decide together whether they save: the first one writes the decision to the store,
and all obey it. A member that came late, found the epoch ended, or was started again can therefore never leave others
alone in a collective call. A save is waited for, however long it takes: its collectives must not meet those of the
training that follows.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from functools import partial
from pathlib import Path
from typing import Final, Unpack

from transport.cooldown.client import (
    AGAIN_FIRST_S,
    AGAIN_MOST_S,
    POLL_S,
    STOP_WAIT_S,
    EpochClient,
    EpochClientOptions,
    Save,
    local_copy,
    made_durable,
    save_into,
)
from transport.cooldown.destinations.masking import masked
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs.manifest import Blocks, File
from transport.cooldown.epochs.records import EpochRecord, Outcome, Phase
from transport.cooldown.epochs.shares import NO_SAVE, Local, SavedShare, Share, complete, divided, shares_of, turns
from transport.cooldown.restoring import checkpoint_manifest
from transport.cooldown.upload import Stop, copied, plain_files, removed_on_failure
from transport.errors import ConfigurationError, CoordinatorLostError, TransportError, UsageError
from transport.runtime.blocking_calls import failure, in_thread, retry_store, settled
from transport.runtime.error_text import error_text, reportable
from transport.runtime.logs import LoggedErrors
from transport.runtime.progress import Progress
from transport.store.base import ABSENT, Store

log = logging.getLogger(__name__)

SAVE_LOG_S: Final = 60.0  # between two warnings that a save outlasts its cooldown
BEATS: Final = 6  # in ``takeover_s``


class ShardedClient(EpochClient):
    """One member of a job that saves its model together. Takes the arguments of `EpochClient`; of these and others:

    Args:
        save: writes this member's files of a step into an empty folder. It is called on every member, in a thread, and
            may call collectives; the caller runs no other collectives on the same group meanwhile. Names are unique
            among the members, unless the files are the same.
        scratch: folder for local copies, the same path for all members of a host, and readable by them. It may serve
            several runs.
        launch: the same text for all members of one launch of the job, and another one after a restart, such as a
            random text that rank 0 broadcasts.
        takeover_s: seconds without progress after which another member of the host uploads an elected one's share.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        name: str,
        *,
        save: Save,
        scratch: Path,
        launch: str,
        takeover_s: float = 60.0,
        **options: Unpack[EpochClientOptions],
    ) -> None:
        super().__init__(store, run, name, save=save, scratch=scratch.absolute() / run / name, **options)
        if takeover_s <= 0:
            raise ConfigurationError(f"takeover_s={takeover_s}: give seconds above 0")
        if not launch or launch != reportable(launch):
            raise ConfigurationError(
                "launch is missing, or not UTF-8: give the same text to all members of one launch of the job, and "
                "another one after each restart, such as a random text that rank 0 broadcasts; torchrun's count of "
                "restarts is not one, since it differs between its agents"
            )
        self._launch = launch
        self._takeover_s = takeover_s
        self._process = secrets.token_hex(8)
        # The last epoch in which save() was called, and what it has saved, in case the store could not be told.
        self._last: tuple[int, SavedShare | None] = (-1, None)

    # --- the save -------------------------------------------------------------------------------------
    async def _begun(self, watcher: asyncio.Task[None], epoch: int) -> EpochRecord:
        """Return the record of the cooldown that has begun, in which this member may have to save."""
        try:
            record = await super()._begun(watcher, epoch)
        except CoordinatorLostError:
            await retry_store(partial(self._ledger.decide, epoch, NO_SAVE))
            found, _ = await retry_store(partial(self._ledger.look, epoch))
            if found is not None and self.name in found.hosts:  # it began after all, and others may save
                await self._has_files(found)
            raise
        if self.name not in record.hosts:
            raise UsageError(
                f"epoch {epoch}: {self.name} is not among the members that the coordinator named "
                f"({len(record.hosts)} members with hosts, {len(record.clients)} clients); name every member"
            )
        return record

    async def _has_files(self, record: EpochRecord) -> bool:
        """Save if the members of this launch do; returns whether this member's files are there."""
        wish = self._launch if record.phase is Phase.COOLDOWN else NO_SAVE
        decision = await retry_store(partial(self._ledger.decide, record.epoch, wish))
        host = record.hosts[self.name]
        if self.name in await retry_store(partial(self._ledger.saved, record.epoch, host)):
            return True  # by this member before it was started again; its files are where they were
        if decision != self._launch:
            if decision != NO_SAVE:
                await self._failed(record, "another launch of the job saved in this epoch, and did not complete it")
            return False
        epoch, saved = self._last
        if epoch != record.epoch or saved is None:
            saved = await self._save_once(record)
        if saved is None:
            return False
        await retry_store(partial(self._ledger.put_saved, record.epoch, saved))
        return True

    async def _save_once(self, record: EpochRecord) -> SavedShare | None:
        """Save, unless an earlier process or call has begun to: the other members would not join a second save."""
        begin = partial(self._ledger.begin_save, record.epoch, self.name, self._process)
        if self._last[0] == record.epoch or await retry_store(begin) != self._process:
            await self._failed(record, "this member began to save in this epoch before, and did not complete it")
            return None
        self._last = (record.epoch, None)
        call = in_thread(self._save_files, record)
        try:
            saved = await self._outlasting(call, record)
        except asyncio.CancelledError:
            if not await settled(call, STOP_WAIT_S):
                log.warning("epoch %d: cancelled in save(), which goes on in its thread", record.epoch)
            await self._tell_cancelled(record, "")
            raise
        except (TransportError, OSError) as error:
            await self._failed(record, error_text(error))
            return None
        self._last = (record.epoch, saved)
        return saved

    async def _outlasting(self, call: asyncio.Future[SavedShare], record: EpochRecord) -> SavedShare:
        """Return the save's result, even if the cooldown ends before."""
        while not call.done():
            await asyncio.wait([call], timeout=SAVE_LOG_S)
            if not call.done() and self._record is not None and self._record.phase is Phase.ENDED:
                log.warning("epoch %d has ended, but save() of step %d has not", record.epoch, record.step)
        return call.result()

    def _save_files(self, record: EpochRecord) -> SavedShare:
        folder = local_copy(self._scratch, record.epoch)
        shutil.rmtree(folder, ignore_errors=True)
        save_into(self._save, folder, record.step)
        made_durable(folder)
        files = tuple((name, path.stat().st_size) for name, path in plain_files(folder))
        return SavedShare(member=self.name, host=record.hosts[self.name], folder=str(folder), files=files)

    # --- the upload -----------------------------------------------------------------------------------
    async def _carry(self, record: EpochRecord) -> None:
        """Upload the shares that are this member's, until the cooldown ends and cancels this task."""
        loop = asyncio.get_running_loop()
        host = record.hosts[self.name]
        elected = self.name in record.elected_of(host)
        recheck_s = POLL_S if elected else min(5 * POLL_S, self._takeover_s / 4)
        heard: dict[int, tuple[int, float]] = {}  # of each share its last beat, and when it was heard
        version, again_s = ABSENT, AGAIN_FIRST_S
        while True:
            missing, beats = await retry_store(partial(self._missing, record, host))
            now = loop.time()
            for number in missing:
                beat = beats.get(number, ABSENT)
                if heard.setdefault(number, (beat, now))[0] != beat:
                    heard[number] = (beat, now)
            silent_s = {number: now - heard[number][1] for number in missing}
            mine = [number for number in missing if self._is_due(record, host, number, silent_s[number])]
            if not mine:
                version = await in_thread(self._ledger.wait_for_host, record.epoch, host, version, recheck_s)
                continue
            attempts = len(self._uploads)
            await self._upload(record, host, mine[0], missing[mine[0]])
            if len(self._uploads) > attempts and not self._were_refused():
                again_s = AGAIN_FIRST_S
                continue
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, AGAIN_MOST_S)

    def _missing(self, record: EpochRecord, host: str) -> tuple[dict[int, list[Local]], dict[int, int]]:
        """Return the files of the host's shares that were not uploaded, or were refused.

        With them come the beats of all shares.
        """
        saved = self._ledger.saved(record.epoch, host)
        if not set(record.members_of(host)) <= set(saved):
            return {}, {}
        parts = divided(list(saved.values()), shares_of(record, host))
        refused = self._record.refused if self._record is not None else {}
        done = {share.number for share in self._ledger.shares(record.epoch, host) if share.upload not in refused}
        missing = {number: files for number, files in enumerate(parts) if number not in done}
        return missing, self._ledger.beats(record.epoch, host) if missing else {}

    def _is_due(self, record: EpochRecord, host: str, number: int, silent_s: float) -> bool:
        turn = turns(record, host, number).index(self.name)
        return turn == 0 or silent_s >= turn * self._takeover_s

    def _were_refused(self) -> bool:
        return self._record is not None and not self._uploads.isdisjoint(self._record.refused)

    async def _upload(self, record: EpochRecord, host: str, number: int, files: list[Local]) -> None:
        """Upload one share and report it; a failure is reported, not raised."""
        attempt = secrets.token_hex(8)
        mine = f"{self.name}/{attempt}"
        moved = _Moved(self._progress)
        beating = asyncio.create_task(self._beat(record, host, number, moved))
        try:
            upload = partial(self._upload_files, record, record.folder(mine), files, moved)
            sent = await self._attempted(record, attempt, upload, f"share {number} of {host}")
        finally:
            beating.cancel()
        if sent is None:
            return
        self._uploads.add(mine)  # from here on it may become part of the checkpoint
        share = Share(host=host, number=number, client=self.name, attempt=attempt, files=sent)
        await retry_store(partial(self._ledger.put_share, record.epoch, share))

    def _upload_files(
        self, record: EpochRecord, place: str, files: list[Local], moved: _Moved, stop: Stop
    ) -> tuple[File, ...]:
        sources = [(file.name, Path(file.folders[0]) / file.name) for file in files]
        with open_destination(record.destination) as destination, removed_on_failure(destination, place):
            sent = copied(sources, destination, place, stop, moved)
            for file, copy in zip(files, sent, strict=True):
                if copy.size != file.size:
                    raise UsageError(f"{file.name} has changed since it was saved: {file.size} bytes, now {copy.size}")
                for folder in file.folders[1:]:
                    _check_same(Path(folder) / file.name, Path(file.folders[0]) / file.name, copy, stop)
            stop.check()
        return sent

    async def _beat(self, record: EpochRecord, host: str, number: int, moved: _Moved) -> None:
        """Tell the host's other members that this upload moves, as long as it does."""
        told = -1
        failures = LoggedErrors(log, f"telling that share {number} of {host} moves")
        while True:
            if (now := moved.bytes) != told:
                with failures:
                    await retry_store(partial(self._ledger.beat, record.epoch, host, number, now))
                    told = now
            await asyncio.sleep(self._takeover_s / BEATS)

    # --- the end --------------------------------------------------------------------------------------
    async def _used(self, record: EpochRecord) -> set[str] | None:
        call = in_thread(self._in_checkpoint, record)
        if why := await failure(call, STOP_WAIT_S):
            log.warning("epoch %d: what was not used of its uploads is kept: %s", record.epoch, masked(why))
            return None
        return call.result()

    def _in_checkpoint(self, record: EpochRecord) -> set[str]:
        """Return the checkpoint's uploads; without one all that was not refused of a complete set: it may be good."""
        if record.outcome is Outcome.CHECKPOINTED:
            with open_destination(record.destination) as destination:
                return self._uploads & checkpoint_manifest(record, destination).uploads
        if not complete(record, self._ledger.shares(record.epoch)):
            return set()
        log.warning("epoch %d ended before its complete upload was verified; it is kept", record.epoch)
        return self._uploads - set(record.refused)


class _Moved:
    """Progress that is passed on, and remembered."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.bytes = 0

    def __call__(self, done: int, files: int, size: int) -> None:
        self.bytes = size
        self._progress(done, files, size)


def _check_same(copy: Path, first: Path, sent: File, stop: Stop) -> None:
    """Raise UsageError unless both members saved the same under one name."""
    found = Blocks()
    with copy.open("rb") as file:
        while piece := file.read(1 << 20):
            stop.check()
            found.update(piece)
    if found.checksums() != sent.blocks:
        raise UsageError(f"two members saved different files under one name: {first} and {copy}; give each its own")
