"""A record that a member keeps in the store for as long as it lives: its seat, the host's lease, a spare's name."""

from __future__ import annotations

import contextlib
from collections.abc import Set

from transport.errors import StoreError
from transport.rendezvous.records import Seat
from transport.store.base import ABSENT, Store


class Leased:
    """One record under a lease. Owned by its session, under its lock.

    Attributes:
        key: of the record.
        version: of the record while it stands, as far as this member knows; else ABSENT.
    """

    def __init__(self, store: Store, key: str, version: int = ABSENT) -> None:
        self.key = key
        self.version = version
        self._store = store

    @property
    def stands(self) -> bool:
        """True if the record stands, as far as this member knows."""
        return self.version != ABSENT

    def renewed(self, kept: Set[str]) -> None:
        """Note a renewal of leases that kept these keys."""
        if self.key not in kept:
            self.version = ABSENT

    def give_up(self) -> None:
        """Delete the record, if it stands. Where the store fails it stays until its lease ends."""
        version, self.version = self.version, ABSENT
        if version != ABSENT:
            with contextlib.suppress(StoreError):
                self._store.compare_and_set(self.key, None, version)


class SeatLease(Leased):
    """The record of one seat, and the one value by which its member has a rank: `runs`. False once is false for good.

    Attributes:
        seat: as it stands in the store.
        until: end of the lease by the member's own clock, read before the store's, so never later than the lease's end.
    """

    def __init__(self, store: Store, key: str, version: int, seat: Seat, until: float) -> None:
        super().__init__(store, key, version)
        self.seat = seat
        self.until = until
        self._over = False

    def runs(self, now: float) -> bool:
        """Return whether the lease runs. Never waits; for any thread.

        A thread may have seen the lease late while another renews it: its work has stopped, so the seat is given up.
        """
        if now >= self.until:
            self._over = True
        return not self._over

    def end(self) -> None:
        """End the member's rank, at once; the record is given up at the next step."""
        self._over = True
