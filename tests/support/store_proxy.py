"""A way to another store: one that is counted, and one that fails when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transport.errors import StoreUnavailableError
from transport.store.base import Change, Entry, Store


class Killed(BaseException):
    """The process is no more."""


class StoreProxy(Store):
    """Passes every call on, through `call`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def call(self, call: Callable[[], Any], changes: Sequence[Change] | None = None) -> Any:
        """Make this call; ``changes``: what it writes, empty of counters and leases; None: it reads."""
        return call()

    def _get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        return self.call(lambda: self.inner.get_many(keys))  # type: ignore[no-any-return]

    def _scan(self, prefix: str) -> Mapping[str, Entry]:
        return self.call(lambda: self.inner.scan(prefix))  # type: ignore[no-any-return]

    def _put_many(self, changes: Sequence[Change]) -> list[int] | None:
        return self.call(lambda: self.inner.put_many(changes), changes)  # type: ignore[no-any-return]

    def _add(self, key: str, amount: int) -> int:
        return self.call(lambda: self.inner.add(key, amount), ())  # type: ignore[no-any-return]

    def _renew(self, leases: Mapping[str, int], lease_s: float) -> set[str]:
        return self.call(lambda: self.inner.renew(leases, lease_s), ())  # type: ignore[no-any-return]

    def _watch(self, key: str, version: int, timeout_s: float) -> Entry | None:
        return self.call(lambda: self.inner.watch(key, version, timeout_s))  # type: ignore[no-any-return]

    def close(self) -> None:
        """The inner store is its owner's."""


class HangingStore(StoreProxy):
    """Answers no more once it hangs, until it is closed, as a server that is suspended does.

    Attributes:
        gave_up: whether a call has returned without an answer before that.
    """

    patience_s = 20.0

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.hangs = self.gave_up = False
        self._closed = threading.Event()

    def call(self, call: Callable[[], Any], changes: Sequence[Change] | None = None) -> Any:
        """Make the call, or hang."""
        if self.hangs:
            self.gave_up |= not self._closed.wait(self.patience_s)
            raise StoreUnavailableError("it hangs")
        return call()

    def close(self) -> None:
        """Return from every call."""
        self._closed.set()


class FailingStore(StoreProxy):
    """One member's way to the store: it may be away, forget answers, or be the last thing that the member does.

    Attributes:
        die_after: calls from now; the last one takes place, or does not.
    """

    die_after: int | None = None
    die_before_the_write = True
    down = False  # unavailable
    forgets_answers = False  # writes take place, and their answers are lost

    def before_write(self, changes: Sequence[Change]) -> None:
        """A write is about to take place."""

    def wrote(self, change: Change) -> None:
        """A write has taken place."""

    def call(self, call: Callable[[], Any], changes: Sequence[Change] | None = None) -> Any:
        """See `StoreProxy`."""
        if self.down:
            raise StoreUnavailableError("the store is away")
        dying = False
        if self.die_after is not None:
            self.die_after -= 1
            dying = self.die_after < 0
        if dying and self.die_before_the_write:
            raise Killed
        if changes is not None:
            self.before_write(changes)
        result = call()
        if changes is not None and result is not None:
            for change in changes:
                self.wrote(change)
        if dying:
            raise Killed
        if changes is not None and self.forgets_answers:
            raise StoreUnavailableError("the answer was lost")
        return result
