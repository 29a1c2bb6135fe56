"""The rings of this host as a ticket queue: no second ledger beside the slots. See base.py for what a queue promises.

A payload that a writer publishes in its ring is published; `publish` only looks whether it is there. What differs from
a queue of its own:

* A claim needs no lease. It ends with its holder: the attachment that claimed it, whose death any other notices; then
  the payload can be claimed again at once. With a ``lease_s`` a claim ends, too, when it was not renewed for so long
  because its trainer is stopped or stuck; the next process that claims with a lease ends it, within a second.
* A payload that a dead holder had claimed for the last time is dead when the next one asks for it.
* What ended is remembered as counts, and as the last failures of each ring; ids of payloads whose slot has been written
  anew since are done, unless the failures say otherwise.
* There are no notices.
* Rings end with their host, and with them what they held.

A client reads these tickets with ``ack="manual"``: here the queue's ack is the slot's acknowledgement.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NoReturn

from transport import _ring as _native
from transport.errors import (
    ClosedError,
    QueueUnsuitableError,
    RingNotFoundError,
    TransportError,
    UsageError,
)
from transport.queue import arguments, looks
from transport.queue.base import (
    MAX_DELIVERIES,
    Claim,
    DeliveryState,
    Failure,
    Notice,
    QueueDepth,
    QueuedTicket,
    TicketQueue,
)
from transport.queue.ends import Unsaid
from transport.ring.buffer import SharedRingBuffer
from transport.ring.claimed import ClaimedPayload
from transport.runtime.arguments import expect
from transport.runtime.explaining import checked, explained_calls
from transport.settings import DEFAULTS

_How = Callable[[_native.Claim], bool]  # ends a claim
_SLICE_S: Final = 0.1  # interval of checks for a closed queue, and for changes without a wake-up


@explained_calls
class RingQueue(TicketQueue):
    """A queue over rings that this process is attached to, as their writer or as a reader. They stay the caller's.

    Args:
        rings: may be changed later with `add` and `remove`.
        max_deliveries: claims in vain after which a delivery is dead.
        lease_s: how long claims are their claimants' without renewal; None: as long as these live.

    Attributes:
        bell: ends waits of `claim_or_wake`.
    """

    def __init__(
        self,
        rings: Iterable[SharedRingBuffer] = (),
        *,
        max_deliveries: int = MAX_DELIVERIES,
        lease_s: float | None = None,
    ) -> None:
        if not 1 <= max_deliveries <= _native.MAX_ATTEMPTS:
            raise UsageError(f"max_deliveries={max_deliveries}; 1 to {_native.MAX_ATTEMPTS} are counted")
        if lease_s is not None and not lease_s > 0:
            raise UsageError(f"lease_s={lease_s}; a lease lasts for some time, and None for ever")
        self.lease_s = DEFAULTS.claim_lease_s if lease_s is None else lease_s
        self._lease_s = lease_s
        self._claimed: dict[tuple[str, int, int], ClaimedPayload] = {}
        self._max_deliveries = max_deliveries
        self._lock = threading.Lock()
        self._rings: dict[str, SharedRingBuffer] = {}  # replaced, never changed
        self.bell = _native.Bell()
        self._turn = 0
        self._unsaid = Unsaid()
        self._closed = False
        for ring in rings:
            self.add(ring)

    def __repr__(self) -> str:
        return f"<RingQueue of {len(self._rings)} rings {'closed' if self._closed else 'open'}>"

    def add(self, ring: SharedRingBuffer) -> None:
        """Hand out this ring's payloads, too."""
        if ring.native.owner < 0:
            raise UsageError(f"ring {ring.ring_id[:8]} is attached as an observer, which claims nothing")
        with self._lock:
            if len(self._rings) == _native.MAX_WAITED:
                raise UsageError(f"a queue is of at most {_native.MAX_WAITED} rings")
            ring.set_lease(self._lease_s)
            self._rings = {**self._rings, ring.ring_id: ring}

    def remove(self, ring: SharedRingBuffer) -> None:
        """Leave this ring alone from now on. What is claimed of it stays claimed until the ring is closed."""
        with self._lock:
            self._rings = {ring_id: each for ring_id, each in self._rings.items() if each is not ring}

    # --- publish and claim -----------------------------------------------------------------------
    def publish(
        self,
        tickets: QueuedTicket | Iterable[QueuedTicket],
        *,
        readers: int = 1,
        policy_version: int | None = None,
    ) -> int:
        """Nothing is stored: the ring has it. How many of these payloads are in their slots, not yet consumed by all.

        RingNotFoundError for the ticket of a ring that is not one of this queue's.
        """
        self._check_open()
        batch, _, _ = arguments.published(tickets, readers, policy_version)
        found = 0
        for ticket in batch:
            place = self.place(ticket.id)
            if place is None:
                raise RingNotFoundError(
                    f"ticket {ticket.id:.80} is of no ring of this queue; write it into one of them"
                )
            ring, slot, generation = place
            info = ring.native.info(slot)
            found += info.generation == generation and info.state in (_native.READY, _native.READING)
        return found

    @checked
    def claim(
        self, n: int, timeout_s: float = 0.0, *, rank: int | str = 0, consumer: str, oldest_version: int | None = None
    ) -> list[Claim]:
        """See `TicketQueue.claim`. Of several rings each is the first in turn; in each the oldest come first."""
        claims: list[Claim] = []
        try:
            self.claim_or_wake(
                n, timeout_s, None, rank=rank, consumer=consumer, oldest_version=oldest_version, into=claims
            )
            return claims
        except BaseException:  # an interrupt: no caller has these claims
            for claim in claims:
                with contextlib.suppress(TransportError):
                    self.retry(claim)
            raise

    def claim_or_wake(
        self,
        n: int,
        timeout_s: float,
        rung: int | None,
        *,
        rank: int | str,
        consumer: str,
        oldest_version: int | None,
        into: list[Claim],
    ) -> None:
        """`claim`, which also ends when `bell` has rung since ``rung`` (None: it does not).

        ``into`` grows as they are claimed, to ``n`` with what it has already. Where this raises, what it has is the
        caller's all the same.
        """
        n, timeout_s, rank, oldest_version = arguments.claimed_by_name(n, timeout_s, rank, consumer, oldest_version)
        expect(into, list, "into of claim_or_wake()", "a list, which grows")
        give_up = time.monotonic() + timeout_s
        while True:
            self._check_open()
            rings = list(self._rings.values())
            seen = [ring.native.published_event() for ring in rings if not ring.native.closed]
            self._try_claim(into, rings, n, rank, consumer, oldest_version)
            left_s = give_up - time.monotonic()
            if into or left_s <= 0 or rung not in (None, self.bell.rung):
                return
            self._wait(rings, seen, min(left_s, self._due_s(rings, rank), _SLICE_S), rung)

    def check_name(self, consumer: str) -> None:
        """RankError: a ring has no consumer of this name."""
        for ring in self._rings.values():
            if not ring.native.closed:
                ring.rank_of(consumer)

    def _try_claim(
        self,
        claims: list[Claim],
        rings: list[SharedRingBuffer],
        n: int,
        rank: int | str,
        consumer: str,
        oldest_version: int | None,
    ) -> None:
        ranks = {ring.ring_id: ring.rank_of(rank) for ring in rings if not ring.native.closed}  # before any is claimed
        self._turn += 1  # of no consequence if two threads read the same
        for at in range(len(rings)):
            if len(claims) == n:
                break
            ring = rings[(self._turn + at) % len(rings)]
            if ring.native.closed:
                self.remove(ring)
                continue
            taken: list[ClaimedPayload] = []
            try:
                taken += ring.claim(
                    n - len(claims),
                    rank=ranks.get(ring.ring_id, 0),
                    oldest_version=oldest_version,
                    max_deliveries=self._max_deliveries,
                    consumer=consumer,
                )
                made = [looks.claim_of(each, consumer) for each in taken]
                self._claimed.update(zip(map(looks.delivery_of, made), taken, strict=True))
                claims += made
                taken = []
            except TransportError:
                if not claims:
                    raise
                break  # the next call meets it again: what was claimed of other rings is the caller's
            except BaseException:  # an interrupt: no caller has these claims
                known = {claim.ticket_id for claim in claims}
                for each in taken:
                    if each.name not in known and not ring.native.closed:
                        each.native.give_back(in_vain=False)
                raise

    @staticmethod
    def _due_s(rings: list[SharedRingBuffer], rank: int | str) -> float:
        open_rings = (ring for ring in rings if not ring.native.closed)
        return min((ring.native.due_s(ring.rank_of(rank)) for ring in open_rings), default=_SLICE_S)

    def _wait(self, rings: list[SharedRingBuffer], seen: list[int], timeout_s: float, rung: int | None) -> None:
        natives = [ring.native for ring in rings if not ring.native.closed]
        if natives and len(natives) == len(seen):
            bell = None if rung is None else self.bell
            _native.Ring.wait_any(natives, seen, timeout_s, bell, rung or 0)
        else:
            time.sleep(min(timeout_s, _SLICE_S))  # no ring, or one of them is just gone

    # --- ends of a claim -------------------------------------------------------------------------
    @checked
    def ack_many(self, claims: Sequence[Claim]) -> list[Claim]:
        """See `TicketQueue.ack_many`."""
        self._check_open()
        claims = arguments.held(claims, "ack")

        def end(claims: list[Claim], accepted: list[Claim]) -> None:
            self._each(claims, accepted, _native.Claim.finish)

        return self._unsaid.ended(claims, "done", end)

    @checked
    def retry(self, claim: Claim, delay_s: float = 0.0, reason: str = "") -> bool:
        """See `TicketQueue.retry`."""
        delay_s = arguments.given_back(claim, delay_s, reason, "retry")
        consumer = looks.consumer_of(claim)
        if claim.attempts >= self._max_deliveries:
            return self._end(claim, "dead", lambda held: held.end("dead", reason, consumer))
        return self._end(claim, "retried", lambda held: held.give_back(delay_s))

    @checked
    def discard(self, claim: Claim, reason: str) -> bool:
        """See `TicketQueue.discard`."""
        arguments.given_back(claim, 0.0, reason, "discard")
        consumer = looks.consumer_of(claim)
        return self._end(claim, "discarded", lambda held: held.end("discarded", reason, consumer))

    def _end(self, claim: Claim, what: str, how: _How) -> bool:
        self._check_open()

        def end(claims: list[Claim], accepted: list[Claim]) -> None:
            self._each(claims, accepted, how)

        return self._unsaid.ended([claim], what, end) != []  # bool() would be a call, after which an interrupt may come

    def _each(self, claims: list[Claim], accepted: list[Claim], how: _How) -> None:
        """Have their rings end them. All are looked at before one ends, and those that fit no ring are not owned."""
        for claim in claims:
            if (held := self._claimed.get(looks.delivery_of(claim))) is None:
                continue
            try:
                accepted.extend(itertools.compress((claim,), map(how, (held.native,))))
            except _native.RingFault as fault:
                looks.failed(self._rings[looks.ring_of(claim)], fault)
            if held.native.verdict != _native.OPEN:
                self._claimed.pop(looks.delivery_of(claim), None)

    def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        """See `TicketQueue.renew`."""
        self._check_open()
        return [claim for claim in claims if self._renew(claim)]

    def _renew(self, claim: Claim) -> bool:
        held = self._claimed.get(looks.delivery_of(claim))
        try:
            return held is not None and held.renew()
        except ClosedError:
            return False

    # --- looking -----------------------------------------------------------------------------------
    def depth(self, rank: int | None = None) -> QueueDepth:
        """Counts of one rank, or of all; the finished ones from the beginning of each ring."""
        self._check_open()
        return looks.depth_of(self._open_rings(), rank)

    def failures(self, limit: int = 100) -> list[Failure]:
        """See `TicketQueue.failures`. Each ring keeps its last 256."""
        self._check_open()
        return looks.failures_of(self._open_rings(), limit)

    def known(self, ticket_ids: Iterable[str]) -> dict[str, tuple[DeliveryState, ...]]:
        """See `TicketQueue.known`. For a payload whose slot was reused, only rank 0's state is returned."""
        self._check_open()
        return looks.known_of(self._open_rings(), ticket_ids)

    def unfinished(self, n: int) -> list[bytes]:
        """See `TicketQueue.unfinished`. Of several rings one after the other."""
        self._check_open()
        return looks.unfinished_of(self._open_rings(), n)

    # --- notices -----------------------------------------------------------------------------------
    def announce(self, topic: str, version: int, payload: bytes = b"") -> bool:
        """Rings have no notices: QueueUnsuitableError."""
        self._no_notices()

    def latest(self, topic: str, newer_than: int | None = None, timeout_s: float = 0.0) -> Notice | None:
        """Rings have no notices: QueueUnsuitableError."""
        self._no_notices()

    def _no_notices(self) -> NoReturn:
        self._check_open()
        raise QueueUnsuitableError("rings have no notices; announce them in a store, or in a Redis queue")

    def close(self) -> None:
        """End waits in other threads with ClosedError. The rings stay open, and their claims held."""
        self._closed = True

    # --- helpers -----------------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the queue is closed")

    def _open_rings(self) -> list[SharedRingBuffer]:
        return [ring for ring in self._rings.values() if not ring.native.closed]

    def place(self, ticket_id: str) -> looks.Place | None:
        """(ring, slot, generation) of a ticket; None: it is of no ring of this queue."""
        return looks.place_of(self._rings, ticket_id)
