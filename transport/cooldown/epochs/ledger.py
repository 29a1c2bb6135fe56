"""The records of a run's epochs in the store: their keys, and which process writes which. Blocks; thread-safe.

cooldown/RUN/epoch/000000000007           EpochRecord; a coordinator; final when the epoch has ended; stays
cooldown/RUN/report/000000000007/CLIENT   UploadReport; that client
cooldown/RUN/bell/000000000007            changes with every report, so that the coordinator wakes

Of epochs whose save is collective:

cooldown/RUN/save/EPOCH                   whether the members save; a final decision
cooldown/RUN/saving/EPOCH/MEMBER          the process that saves for it; a final decision
cooldown/RUN/saved/EPOCH/HOST/MEMBER      SavedShare; a final decision
cooldown/RUN/share/EPOCH/HOST/N/CLIENT    Share; the client that uploaded it
cooldown/RUN/beat/EPOCH/HOST/N            changes while a share is being uploaded
cooldown/RUN/host/EPOCH/HOST              changes with each of these three, so that the host's members wake

Decisions and the epochs' records are written by store/decision.py. When an epoch has ended, earlier ones that are still
open end as timed out, and all but their own records is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from transport.cooldown.epochs.records import (
    EpochRecord,
    Note,
    Outcome,
    Phase,
    Refusal,
    UploadReport,
    check_epoch,
    check_name,
)
from transport.cooldown.epochs.shares import SavedShare, Share
from transport.errors import NoCheckpointError
from transport.store.base import ABSENT, Change, Entry, Store
from transport.store.decision import Next, advance, decide
from transport.store.stored import Record, decode, decode_each, encode

PREFIX: Final = "cooldown/"


class Ledger:
    """One run's epochs. Raises the store's errors. Of several records, one that cannot be read is left out."""

    def __init__(self, store: Store, run: str) -> None:
        self.run = check_name(run, "run")
        self._store = store
        self._prefix = f"{PREFIX}{run}/"

    @property
    def place(self) -> str:
        """Return where the store's records are, for messages."""
        return self._store.place

    # --- epochs ---------------------------------------------------------------------------------------
    def epochs(self) -> dict[int, EpochRecord]:
        """Return all epochs that were ever opened and can be read, in order."""
        records = decode_each(EpochRecord, self._store.scan(f"{self._prefix}epoch/"))
        return {record.epoch: record for record in records.values()}

    def numbers(self) -> set[int]:
        """Return the numbers of all epochs that were ever opened, of those that cannot be read as well."""
        names = (key.rpartition("/")[2] for key in self._store.scan(f"{self._prefix}epoch/"))
        return {int(name) for name in names if name.isdecimal()}

    def look(self, epoch: int) -> tuple[EpochRecord | None, int]:
        """Return the epoch's record and its version; (None, ABSENT) if it was not opened."""
        return self._read(epoch, self._store.get(self._key("epoch", epoch)))

    def watch(self, epoch: int, version: int, timeout_s: float) -> tuple[EpochRecord | None, int]:
        """Return as `look`, after the version differs from ``version`` or ``timeout_s`` seconds have passed."""
        return self._read(epoch, self._store.watch(self._key("epoch", epoch), version, timeout_s))

    def _read(self, epoch: int, entry: Entry | None) -> tuple[EpochRecord | None, int]:
        if entry is None:
            return None, ABSENT
        return decode(EpochRecord, self._key("epoch", epoch), entry.value), entry.version

    def open(self, record: EpochRecord) -> bool:
        """Write the first record of an epoch; False if it has another one. May be repeated after a lost answer."""
        return decide(self._store, self._key("epoch", record.epoch), record) == record

    def advance(self, epoch: int, step: Callable[[EpochRecord | None], EpochRecord | None]) -> None:
        """Replace the epoch's record by what ``step`` makes of it, see `transport.store.decision.advance`."""

        def following(standing: EpochRecord | None) -> Next[EpochRecord] | None:
            record = step(standing)
            return None if record is None else Next(record)

        advance(self._store, self._key("epoch", epoch), EpochRecord, following)

    def end_before(self, epoch: int, ended_at: float) -> list[EpochRecord]:
        """End the earlier epochs that are still open as timed out, and remove what the members of all have written.

        An epoch whose coordinator was killed has no other end. Returns the records of those that were open.
        """

        def end(standing: EpochRecord | None) -> EpochRecord | None:
            if standing is None or standing.phase is Phase.ENDED:
                return None
            return msgspec.structs.replace(standing, phase=Phase.ENDED, outcome=Outcome.TIMED_OUT, ended_at=ended_at)

        still_open = [
            each for each, record in self.epochs().items() if each < epoch and record.phase is not Phase.ENDED
        ]
        for each in still_open:
            self.advance(each, end)
        for kind in ("report", "bell", "save", "saving", "saved", "share", "beat", "host"):
            prefix = f"{self._prefix}{kind}/"
            earlier = [key for key in self._store.scan(prefix) if key < f"{prefix}{check_epoch(epoch):012d}"]
            self._store.delete_all(earlier)
        found = self.epochs()
        return [found[each] for each in still_open if each in found]

    def newest_checkpoint(self) -> EpochRecord:
        """Return the last epoch with a checkpoint. Raises NoCheckpointError if there is none."""
        return newest_checkpoint(self.epochs(), self.run)

    # --- reports --------------------------------------------------------------------------------------
    def report(self, report: UploadReport) -> None:
        """Report to the coordinator; a later report of the same client replaces this one."""
        self._store.put_many(
            [
                Change(self._key("report", report.epoch, check_name(report.client, "client")), encode(report)),
                Change(self._key("bell", report.epoch), encode(report.client)),
            ]
        )

    def withdraw(self, report: UploadReport) -> bool:
        """Take an upload back: report so, and refuse the upload in the epoch's record, for good.

        Returns False if the upload is the checkpoint. Otherwise no coordinator makes it the checkpoint any more, not
        even one that is verifying it, and its client removes it.
        """
        kept = False
        note = Note(kind=report.kind, attempt=report.attempt, refusal=Refusal.WITHDRAWN)

        def refuse(standing: EpochRecord | None) -> EpochRecord | None:
            nonlocal kept
            if standing is None or standing.phase is Phase.ENDED:
                checkpoint = None if standing is None else standing.checkpoint
                kept = checkpoint is not None and checkpoint.upload == report.upload
                return None
            return msgspec.structs.replace(standing, notes={**standing.notes, report.client: note})

        self.report(report)
        self.advance(report.epoch, refuse)
        return not kept

    def reports(self, epoch: int) -> list[UploadReport]:
        """Return all reports of an epoch."""
        prefix = self._key("report", epoch, "")
        reports = decode_each(UploadReport, self._store.scan(prefix))
        return [report for key, report in reports.items() if report.client == key.removeprefix(prefix)]

    def wait_for_report(self, epoch: int, version: int, timeout_s: float) -> int:
        """Return the bell's version, after it differs from ``version`` or ``timeout_s`` seconds have passed."""
        entry = self._store.watch(self._key("bell", epoch), version, timeout_s)
        return ABSENT if entry is None else entry.version

    # --- epochs whose save is collective --------------------------------------------------------------
    def decide(self, epoch: int, launch: str) -> str:
        """Decide that the members of this launch save (`NO_SAVE`: none); returns what was decided first."""
        return decide(self._store, self._key("save", epoch), launch)

    def begin_save(self, epoch: int, member: str, process: str) -> str:
        """Record that this process saves for a member, once; returns the process that was recorded first."""
        key = self._key("saving", epoch, check_name(member, "client"))
        return decide(self._store, key, process)

    def put_saved(self, epoch: int, saved: SavedShare) -> None:
        """Record the files that a member has saved, once; a second record of the same member changes nothing."""
        decide(self._store, self._key("saved", epoch, saved.host, saved.member), saved)
        self._store.put_many([self._ring_host(epoch, saved.host), Change(self._key("bell", epoch), encode(""))])

    def saved(self, epoch: int, host: str | None = None) -> dict[str, SavedShare]:
        """Return the saved files of the members, of one host or of all, by member."""
        return {each.member: each for each in self._of_host("saved", SavedShare, epoch, host)}

    def put_share(self, epoch: int, share: Share) -> None:
        """Report an uploaded share; a later one of the same client replaces it."""
        key = self._key("share", epoch, share.host, str(share.number), check_name(share.client, "client"))
        changes = [Change(key, encode(share)), self._ring_host(epoch, share.host)]
        self._store.put_many([*changes, Change(self._key("bell", epoch), encode(share.client))])

    def shares(self, epoch: int, host: str | None = None) -> list[Share]:
        """Return the uploaded shares, of one host or of all."""
        return self._of_host("share", Share, epoch, host)

    def beat(self, epoch: int, host: str, number: int, moved: int) -> None:
        """Tell the host's members that this share is being uploaded: ``moved`` bytes so far."""
        key = self._key("beat", epoch, host, str(number))
        self._store.put_many([Change(key, encode(moved)), self._ring_host(epoch, host)])

    def beats(self, epoch: int, host: str) -> dict[int, int]:
        """Return the versions of the beats of a host's shares."""
        prefix = self._key("beat", epoch, host, "")
        beats = {key.removeprefix(prefix): entry.version for key, entry in self._store.scan(prefix).items()}
        return {int(number): version for number, version in beats.items() if number.isdecimal()}  # others are not ours

    def wait_for_host(self, epoch: int, host: str, version: int, timeout_s: float) -> int:
        """Wait as `wait_for_report`, for the records of one host's members."""
        entry = self._store.watch(self._ring_host(epoch, host).key, version, timeout_s)
        return ABSENT if entry is None else entry.version

    def _ring_host(self, epoch: int, host: str) -> Change:
        return Change(self._key("host", epoch, host), encode(""))

    def _of_host(self, kind: str, record: type[Record], epoch: int, host: str | None) -> list[Record]:
        """Return the records of a kind, of one host or of all."""
        prefix = self._key(kind, epoch, "") if host is None else self._key(kind, epoch, host, "")
        return list(decode_each(record, self._store.scan(prefix)).values())

    def _key(self, kind: str, epoch: int, *parts: str) -> str:
        """Return the key of a record of an epoch; with "" for the last part, the prefix of the keys below it."""
        return "/".join([f"{self._prefix}{kind}", f"{check_epoch(epoch):012d}", *parts])


def newest_checkpoint(epochs: Mapping[int, EpochRecord], run: str) -> EpochRecord:
    """Return the last of these that has a checkpoint. Raises NoCheckpointError if none has."""
    for epoch in sorted(epochs, reverse=True):
        if epochs[epoch].phase is Phase.ENDED and epochs[epoch].outcome is Outcome.CHECKPOINTED:
            return epochs[epoch]
    raise NoCheckpointError(f"run {run}: none of its {len(epochs)} epochs has a checkpoint")


def runs(store: Store) -> list[str]:
    """Return the names of the runs that have epochs in the store."""
    return sorted({key.split("/")[1] for key in store.scan(PREFIX) if key.split("/")[2:3] == ["epoch"]})
