"""The records of a run's epochs in the store: their keys, and which process writes which. Blocks; thread-safe.

cooldown/RUN/epoch/000000000007           EpochRecord; its coordinator, by compare-and-set
cooldown/RUN/report/000000000007/CLIENT   Report; that client
cooldown/RUN/bell/000000000007            changes with every report, so that the coordinator wakes
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from transport.cooldown.epochs.records import (
    EpochRecord,
    Outcome,
    Phase,
    Report,
    check_epoch,
    check_name,
    decode,
    encode,
)
from transport.errors import NoCheckpointError, StoreUnavailableError, StoreUnsuitableError
from transport.runtime.explaining import explained_calls
from transport.store.base import ABSENT, Change, Store

log = logging.getLogger(__name__)

PREFIX: Final = "cooldown/"


@explained_calls
class Ledger:
    """One run's epochs. Raises the store's errors, and StoreUnsuitableError for values that are not these records."""

    def __init__(self, store: Store, run: str) -> None:
        self.run = check_name(run, "run")
        self._store = store
        self._prefix = f"{PREFIX}{run}/"

    # --- epochs ---------------------------------------------------------------------------------------
    def epochs(self) -> dict[int, EpochRecord]:
        """All epochs that were ever opened, in order."""
        found = self._store.scan(f"{self._prefix}epoch/")
        records = [decode(entry.value, EpochRecord) for entry in found.values()]
        return {record.epoch: record for record in records}

    def look(self, epoch: int) -> tuple[EpochRecord | None, int]:
        """The epoch's record and its version; (None, ABSENT) if it was not opened."""
        entry = self._store.get(self._epoch_key(epoch))
        return (None, ABSENT) if entry is None else (decode(entry.value, EpochRecord), entry.version)

    def watch(self, epoch: int, version: int, timeout_s: float) -> tuple[EpochRecord | None, int]:
        """As `look`, after the version differs from ``version`` or ``timeout_s`` seconds have passed."""
        entry = self._store.watch(self._epoch_key(epoch), version, timeout_s)
        return (None, ABSENT) if entry is None else (decode(entry.value, EpochRecord), entry.version)

    def write(self, record: EpochRecord, expected: int) -> int | None:
        """Write the epoch in place of version ``expected`` (ABSENT: open it); the new version, or None on a mismatch.

        If the store's answer is lost, the record is read to find out whether it was written; raises
        StoreUnavailableError if that fails too.
        """
        key, value = self._epoch_key(record.epoch), encode(record)
        try:
            return self._store.compare_and_set(key, value, expected)
        except StoreUnavailableError:
            entry = self._store.get(key)
            if entry is not None and entry.value == value:
                return entry.version
            raise

    def newest_checkpoint(self) -> EpochRecord:
        """The last epoch with a checkpoint. Raises NoCheckpointError if there is none."""
        return newest_checkpoint(self.epochs(), self.run)

    # --- reports --------------------------------------------------------------------------------------
    def report(self, report: Report) -> None:
        """Report to the coordinator; a later report of the same client replaces this one."""
        self._store.put_many(
            [
                Change(f"{self._report_prefix(report.epoch)}{check_name(report.client, 'client')}", encode(report)),
                Change(self._bell_key(report.epoch), report.client.encode()),
            ]
        )

    def reports(self, epoch: int) -> list[Report]:
        """All reports of an epoch. A report that cannot be decoded is logged and left out."""
        found = []
        prefix = self._report_prefix(epoch)
        for key, entry in self._store.scan(prefix).items():
            try:
                report = decode(entry.value, Report)
            except StoreUnsuitableError as error:
                log.warning("report %s is ignored: %s", key, error)
                continue
            if report.client == key.removeprefix(prefix):
                found.append(report)
        return found

    def wait_for_report(self, epoch: int, version: int, timeout_s: float) -> int:
        """The version of the bell key, after it differs from ``version`` or ``timeout_s`` seconds have passed."""
        entry = self._store.watch(self._bell_key(epoch), version, timeout_s)
        return ABSENT if entry is None else entry.version

    def _epoch_key(self, epoch: int) -> str:
        return f"{self._prefix}epoch/{check_epoch(epoch):012d}"

    def _report_prefix(self, epoch: int) -> str:
        return f"{self._prefix}report/{check_epoch(epoch):012d}/"

    def _bell_key(self, epoch: int) -> str:
        return f"{self._prefix}bell/{check_epoch(epoch):012d}"


def newest_checkpoint(epochs: Mapping[int, EpochRecord], run: str) -> EpochRecord:
    """The last of these that has a checkpoint. Raises NoCheckpointError if none has."""
    for epoch in sorted(epochs, reverse=True):
        if epochs[epoch].phase is Phase.ENDED and epochs[epoch].outcome is Outcome.CHECKPOINTED:
            return epochs[epoch]
    raise NoCheckpointError(f"run {run}: none of its {len(epochs)} epochs has a checkpoint")


def runs(store: Store) -> list[str]:
    """Names of the runs that have epochs in the store."""
    return sorted({key.split("/")[1] for key in store.scan(PREFIX) if key.split("/")[2:3] == ["epoch"]})
