"""A spare's record in the store, which tells the host that a newcomer waits. Only where the rules let a newcomer end a
round; elsewhere spares write nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Set

from transport.errors import StoreError
from transport.rendezvous.records import Keys
from transport.rendezvous.rules import Rules
from transport.store.base import ABSENT, Store


class Waiting:
    """A member's side of it. Owned by its session, under its lock."""

    def __init__(self, store: Store, keys: Keys, member: str, rules: Rules) -> None:
        self._store = store
        self._key = keys.waiting + member
        self._rules = rules
        self._value = member.encode()
        self._version = ABSENT  # Invariant: of the record, while it stands as far as this member knows

    def show(self, waits: bool) -> None:
        """Write or delete the record if that changes something. Raises StoreError."""
        if waits and self._rules.grow and self._version == ABSENT:
            self._version = self._store.put(self._key, self._value, lease_s=self._rules.lease_s)
        elif not waits:
            self.gone()

    def gone(self) -> None:
        """The member does not wait any more. Otherwise the lease ends."""
        version, self._version = self._version, ABSENT
        if version != ABSENT:
            with contextlib.suppress(StoreError):
                self._store.compare_and_set(self._key, None, version)

    def lease(self) -> Mapping[str, int]:
        """The lease to renew, by key."""
        return {self._key: self._version} if self._version != ABSENT else {}

    def renewed(self, kept: Set[str]) -> None:
        """After a renewal; a record whose lease has ended is written again."""
        if self._key not in kept:
            self._version = ABSENT
