"""A record that a member keeps in the store for as long as it lives: its seat, the host's lease, a spare's name."""

from __future__ import annotations

from collections.abc import Mapping, Set

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

    def lease(self) -> Mapping[str, int]:
        """The lease to renew, by key."""
        return {self.key: self.version} if self.stands else {}

    def renewed(self, kept: Set[str]) -> None:
        """After a renewal of the leases, of which these keys were kept."""
        if self.key not in kept:
            self.version = ABSENT

    def give_up(self) -> None:
        """Delete the record, if it stands; when that fails its lease ends. Raises StoreError."""
        version, self.version = self.version, ABSENT
        if version != ABSENT:
            self._store.compare_and_set(self.key, None, version)
