"""A record that a member keeps in the store for as long as it lives: its seat, the host's lease, a spare's name."""

from __future__ import annotations

import contextlib
from collections.abc import Set

from transport.errors import StoreError
from transport.store.base import ABSENT, Store


class Leased:
    """One record under a lease. Owned by its session, under its lock.

    Attributes:
        key: of the record.
        version: of the record while it stands, as far as this member knows; else ABSENT.
    """

    def __init__(self, store: Store, key: str = "") -> None:
        self.key = key
        self.version = ABSENT
        self._store = store

    @property
    def stands(self) -> bool:
        """Whether the record stands, as far as this member knows."""
        return self.version != ABSENT

    def renewed(self, kept: Set[str]) -> None:
        """After a renewal of the leases, of which these keys were kept."""
        if self.key not in kept:
            self.version = ABSENT

    def give_up(self) -> None:
        """Delete the record, if it stands. Where the store fails it stays until its lease ends."""
        version, self.version = self.version, ABSENT
        if version != ABSENT:
            with contextlib.suppress(StoreError):
                self._store.compare_and_set(self.key, None, version)
