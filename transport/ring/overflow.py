"""Ways in which a writer gets a slot when the ring is full.

    "block"      waits for a reader to free one, within a time limit (back-pressure; the default)
    "error"      raises RingFullError at once
    "overwrite"  takes the slot of the oldest payload that nobody reads or has claimed, whoever has consumed it; counted

Before any of these, slots of dead processes and of expired payloads are reclaimed. A writer that waits for long says
who keeps the slots.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Final, Literal

from transport import _ring
from transport.errors import RingFullError
from transport.runtime import logs
from transport.runtime.suspended import suspended

log = logging.getLogger(__name__)

Overflow = Literal["block", "error", "overwrite"]

_FOR_EVER_S: Final = 1e9
_LOOK_S: Final = 0.05  # polling interval for changes without wake-up: an unpinned payload to overwrite, an expired one


class Overflowing:
    """The overflow policy of one attachment.

    Attributes:
        policy: may be changed at any time.
        may_expire: False as long as no payload of this writer has a deadline, so that no search for expired ones runs.
    """

    def __init__(self, native: _ring.Ring, overflow: Overflow) -> None:
        self._native = native
        self.policy: Overflow = overflow
        self.may_expire = native.taken_over
        self._overdue = logs.Overdue()  # a slot, since this writer's last payload
        self._published = 0
        self._said = logs.LogLimit(logs.SAY_AGAIN_S)

    def take(self, timeout_s: float | None) -> _ring.Loan:
        """Return a slot to write. Raises RingFullError if none becomes free in time; None: no limit."""
        native = self._native
        taken = native.try_take()
        if taken is None and self.policy == "overwrite":
            taken = native.try_overwrite()
        if taken is None and (self._tidy() or self.policy == "error"):
            taken = native.try_take()
        if taken is None and self.policy != "error":
            taken = self._wait(_FOR_EVER_S if timeout_s is None else timeout_s)
        if taken is None:
            raise RingFullError(
                f"no slot of {native.slot_count} became free: {self._kept()}; the readers are slower than the writer, "
                "or have ended; make a larger ring, or use overflow='overwrite'"
            )
        return taken

    def _kept(self) -> str:
        """Say why no slot is free: which processes hold how many that are being read, claims included."""
        _, writing, ready, reading = self._native.state_counts()
        held: Counter[int] = Counter()
        for slot in range(self._native.slot_count):
            info = self._native.info(slot)
            if info.state == _ring.READING:
                held.update(index for index in range(_ring.MAX_OWNERS) if info.pins >> index & 1)
        names = {_ring.ROLE_LISTENER: "listener", _ring.ROLE_READER: "reader"}
        owners = [owner for owner in self._native.owners() if held[owner.index]]
        each = (
            f"{names.get(owner.role, 'writer')} {owner.pid} holds {held[owner.index]}"
            f"{' and is stopped: let it go on, or end it' if suspended(owner.pid) else ''}"
            for owner in owners
        )
        text = f"{writing} being written, {ready} unread, {reading} being read"
        return f"{text} ({', '.join(each)})" if owners else text

    def _tidy(self) -> bool:
        """Reclaim slots of dead processes and expired payloads; True if there were any."""
        # With "block" the wait itself reclaims at its re-checks: the system calls that prove owners dead are costly.
        reclaimed = self._native.reclaim() if self.policy != "block" else 0
        return bool(reclaimed + (self.discard_expired(time.time()) if self.may_expire else 0))

    def _wait(self, timeout_s: float) -> _ring.Loan | None:
        """Wait until a slot is freed, expires, or (with "overwrite") is unpinned by its readers."""
        give_up = time.monotonic() + timeout_s
        while True:
            self._tell()
            left = give_up - time.monotonic()
            patience_s = min(self._patience_s(), logs.LOOK_S)
            taken = self._native.take(max(min(left, patience_s), 0.0))
            if taken is None and self.policy == "overwrite":
                taken = self._native.try_overwrite()
            if taken is not None or left <= patience_s:
                return taken
            if self.may_expire:
                self.discard_expired(time.time())

    def _tell(self) -> None:
        """Say of a ring that has been full for long who keeps its slots."""
        published = self._native.own_count("publishes")  # a batch takes slots that are free by itself
        if published != self._published:
            self._published = published
            self._overdue.came()
        if self._overdue.due() and self._said.due() is not None:
            log.warning(
                "ring %s has been full for %.0f s, and its writer waits: %s; %s",
                self._native.ring_id.hex()[:8],
                self._overdue.waited_s,
                self._kept(),
                "the readers are slower than the writer"
                if self._native.state_counts()[_ring.READING]
                else "no trainer claims them",
            )

    def _patience_s(self) -> float:
        """Return the time to wait for a freed slot before polling for changes without wake-up: see `_wait`."""
        if self.policy == "overwrite":
            return _LOOK_S
        if not self.may_expire:
            return _FOR_EVER_S
        infos = [self._native.info(slot) for slot in range(self._native.slot_count)]
        deadlines = [info.deadline_ns for info in infos if info.deadline_ns and info.state != _ring.FREE]
        return max(min(deadlines) / 1e9 - time.time(), _LOOK_S) if deadlines else _FOR_EVER_S

    def discard_expired(self, now: float) -> int:
        """Discard READY payloads whose deadline (Unix seconds) has passed; how many."""
        limit = int(now * 1e9)
        expired = 0
        for slot in range(self._native.slot_count):
            info = self._native.info(slot)
            if info.state == _ring.READY and 0 < info.deadline_ns <= limit:
                expired += self._native.discard(slot, info.generation)
        return expired
