"""Ack ledger: what a client still has to acknowledge, and when. Decisions only; the clock is an argument.

    add ──► pending ──sent(connection, number)──► sent ──answered(connection, ≥ number)──► confirmed, forgotten
               ▲                                    │
               └──────────── lost(connection) ──────┘

A listener handles the messages of a connection in order, and an acknowledgement has no answer of its own: any answer to
the same or a later message confirms it. After a lost connection its unconfirmed acknowledgements may or may not have
arrived; they are sent again, which is harmless because they are idempotent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from transport.runtime.hiding import hiding
from transport.settings import DEFAULTS, Settings
from transport.ticket import Delivery, Identity

MOST_ACKS = 65_536


@hiding("key")
class Ack(NamedTuple):
    """One rank's acknowledgement of one payload; ``key`` is the payload's, as its ticket has it."""

    ring: str
    slot: int
    generation: int
    rank: int
    key: int


@dataclass(slots=True)
class _HeldAck:
    ack: Ack
    order: int  # of adding
    added_at: float
    via: Hashable | None  # the port that holds the slot's pin and should get the acknowledgement; None: any
    connection: Hashable | None = None  # None: pending


@dataclass(slots=True)
class _Patience:
    """Back-off of a ring that is unreachable."""

    failures: int = 0
    until: float = float("-inf")


class AckLedger:
    """Acknowledgements by ring, the oldest first.

    The number of tries is not limited, because a lost acknowledgement would keep a slot of a living ring occupied for
    ever. An entry ends when it is confirmed, when the ring is known to be gone (``forget_ring``), or by the bound on
    memory: beyond ``most`` the oldest is dropped and counted. A living ring has no more payloads than slots, so only
    rings that stay unreachable fill the ledger, and their entries are the oldest. The slot of a dropped entry is freed
    by the rollout's reconciliation with the queue or by the payload's deadline; until then ``ConsumedRecord`` instead
    of ``contains`` prevents that the payload is consumed twice.

    Owned by one thread; between ``take`` and ``sent`` there must be no await.
    """

    def __init__(self, settings: Settings = DEFAULTS, most: int = MOST_ACKS) -> None:
        self._delay_s = settings.ack_delay_s
        self._patience_most_s = settings.ack_timeout_s
        self._most = most
        self._next_order = 0
        self._dropped = 0
        # Invariant: len() <= most, in the order of adding.
        self._entries: dict[Delivery, _HeldAck] = {}
        # Invariant: the entries without a connection, by ring, in the order of adding; no ring without any.
        self._pending: dict[str, dict[Delivery, _HeldAck]] = {}
        self._pending_count = 0
        # Invariant: every entry with a connection stands in one message of it, message numbers rising. An entry that
        # was settled meanwhile stays there: a message is confirmed or lost as a whole.
        self._sent: dict[Hashable, deque[tuple[int, list[_HeldAck]]]] = {}
        # Invariant: only rings that have entries.
        self._patience: dict[str, _Patience] = {}

    def __repr__(self) -> str:
        return f"<AckLedger {self.pending_count} pending, {self.sent_count} sent, {self._dropped} dropped>"

    @property
    def pending_count(self) -> int:
        """Acknowledgements that are to be sent."""
        return self._pending_count

    @property
    def sent_count(self) -> int:
        """Acknowledgements that were sent and are not confirmed."""
        return len(self._entries) - self._pending_count

    @property
    def dropped_count(self) -> int:
        """Acknowledgements given up because of the bound on memory."""
        return self._dropped

    def contains(self, identity: Identity, rank: int) -> bool:
        """Return whether this rank consumed the payload, and the acknowledgement is unconfirmed: do not read again."""
        return (*identity, rank) in self._entries

    # --- events --------------------------------------------------------------------------------
    def add(self, ack: Ack, now: float, via: Hashable | None = None) -> None:
        """Add a payload that was consumed, having come through port ``via``. Adding it again changes nothing.

        Any port accepts the acknowledgement, but only the one that sent the payload can free the slot at once.
        """
        delivery = ack[:4]
        entries = self._entries
        if delivery in entries:
            return
        entry = entries[delivery] = _HeldAck(ack, self._next_order, now, via)
        self._next_order += 1
        pending = self._pending.get(ack[0])
        if pending is None:
            pending = self._pending[ack[0]] = {}
        pending[delivery] = entry
        self._pending_count += 1
        if len(entries) > self._most:
            self._forget(next(iter(entries)))
            self._dropped += 1

    def take(self, ring: str, limit: int, via: Hashable | None = None) -> list[Ack]:
        """Take up to ``limit`` acknowledgements for the next message to ``ring``; they are pending until ``sent``.

        With ``via``: only acknowledgements for this port, or for any port.
        """
        taken: list[Ack] = []
        pending = self._pending.get(ring)
        if pending is None:
            return taken
        for entry in pending.values():
            if len(taken) >= limit:
                break
            if via is None or entry.via is None or entry.via == via:
                taken.append(entry.ack)
        return taken

    def vias(self, ring: str) -> list[Hashable | None]:
        """Return the ports to which the pending acknowledgements of ``ring`` go, each once; None: any port."""
        return list(dict.fromkeys(entry.via for entry in self._pending.get(ring, {}).values()))

    def reroute(self, ring: str, via: Hashable) -> None:
        """Send the acknowledgements of a port that is unreachable through any other."""
        for entry in self._pending.get(ring, {}).values():
            if entry.via == via:
                entry.via = None

    def sent(self, connection: Hashable, number: int, acks: list[Ack]) -> None:
        """Message ``number`` of ``connection`` carries ``acks``, as `take` gave them; settled ones are passed over."""
        carried = []
        for ack in acks:
            entry = self._entries.get(ack[:4])
            if entry is not None and entry.connection is None:
                self._no_longer_pending(ack[:4])
                entry.connection = connection
                carried.append(entry)
        if carried:
            messages = self._sent.get(connection)
            if messages is None:
                messages = self._sent[connection] = deque()
            messages.append((number, carried))

    def answered(self, connection: Hashable, number: int) -> int:
        """Confirm what message ``number``, whose answer arrived, and earlier ones carried; return how many."""
        messages = self._sent.get(connection)
        if messages is None:
            return 0
        confirmed = 0
        while messages and messages[0][0] <= number:
            _, carried = messages.popleft()
            for entry in carried:
                if self._entries.get(entry.ack[:4]) is entry:
                    del self._entries[entry.ack[:4]]
                    confirmed += 1
            if self._patience:
                self._patience.pop(carried[0].ack.ring, None)
        if not messages:
            del self._sent[connection]
        return confirmed

    def lost(self, connection: Hashable, now: float) -> int:
        """Make the unconfirmed acknowledgements of a connection that is gone pending again; return how many.

        Also for a connection that was closed gracefully but without a last answer.
        """
        returned = 0
        by_ring: dict[str, dict[Delivery, _HeldAck]] = {}
        for _, carried in self._sent.pop(connection, ()):
            for entry in carried:
                delivery = entry.ack[:4]
                if self._entries.get(delivery) is entry:
                    entry.connection = entry.via = None
                    by_ring.setdefault(delivery[0], {})[delivery] = entry
                    returned += 1
        for ring, entries in by_ring.items():
            merged = [*entries.items(), *self._pending.get(ring, {}).items()]
            self._pending[ring] = dict(sorted(merged, key=lambda item: item[1].order))
            self.unreachable(ring, now)
        self._pending_count += returned
        return returned

    def unreachable(self, ring: str, now: float) -> None:
        """Put off a ring that is unreachable: due again after a pause that doubles up to ``ack_timeout_s``."""
        if ring in self._pending:
            patience = self._patience.setdefault(ring, _Patience())
            pause_s = min(self._delay_s * 2.0 ** min(patience.failures, 60), self._patience_most_s)
            patience.failures += 1
            patience.until = now + pause_s

    def settled(self, identity: Identity, rank: int) -> bool:
        """Note that the ring has the acknowledgement: it answered StaleSlotError for this payload. False: no entry."""
        delivery = (*identity, rank)
        if delivery not in self._entries:
            return False
        self._forget(delivery)
        return True

    def forget_ring(self, ring: str) -> int:
        """Drop the acknowledgements of a ring that is gone with its slots; return how many there were."""
        gone = [delivery for delivery in self._entries if delivery[0] == ring]
        for delivery in gone:
            self._forget(delivery)
        return len(gone)

    # --- decisions -----------------------------------------------------------------------------
    def pending_rings(self) -> list[str]:
        """Rings with something to send, for a flush at the end of a batch or before closing."""
        return list(self._pending)

    def rings(self) -> set[str]:
        """Rings with anything that is not confirmed."""
        return {delivery[0] for delivery in self._entries}

    def due(self, now: float) -> list[str]:
        """Rings whose oldest pending acknowledgement has waited ``ack_delay_s`` for a request that could carry it."""
        return [ring for ring in self._pending if self._due_at(ring) <= now]

    def next_due(self, without: Container[str] = ()) -> float | None:
        """Return when ``due`` next has something, rings ``without`` left aside; None while nothing is pending."""
        return min((self._due_at(ring) for ring in self._pending if ring not in without), default=None)

    def _due_at(self, ring: str) -> float:
        oldest = next(iter(self._pending[ring].values()))
        patience = self._patience.get(ring)
        return max(oldest.added_at + self._delay_s, patience.until if patience else float("-inf"))

    # --- keeping the collections in step -----------------------------------------------------------
    def _forget(self, delivery: Delivery) -> None:
        if self._entries.pop(delivery).connection is None:
            self._no_longer_pending(delivery)
        if self._patience and delivery[0] not in self._pending:
            self._patience.pop(delivery[0], None)

    def _no_longer_pending(self, delivery: Delivery) -> None:
        pending = self._pending[delivery[0]]
        del pending[delivery]
        self._pending_count -= 1
        if not pending:
            del self._pending[delivery[0]]

    def validate(self) -> None:
        """Assert every invariant."""
        assert len(self._entries) <= self._most, "more entries than allowed"
        orders = [entry.order for entry in self._entries.values()]
        assert orders == sorted(orders), "entries are out of order"
        for ring, pending in self._pending.items():
            orders = [entry.order for entry in pending.values()]
            assert orders, f"{ring} has no pending entry"
            assert orders == sorted(orders), f"pending entries of {ring} are out of order"
            assert all(delivery[0] == ring and entry.connection is None for delivery, entry in pending.items())
        carried = {}
        for connection, messages in self._sent.items():
            numbers = [number for number, _ in messages]
            assert numbers, f"{connection!r} carries nothing"
            assert numbers == sorted(numbers), f"message numbers of {connection!r} fall"
            living = [
                entry for _, entries in messages for entry in entries if self._entries.get(entry.ack[:4]) is entry
            ]
            assert all(entry.connection == connection for entry in living)
            carried[connection] = [entry.ack[:4] for entry in living]
        assert self._pending_count == sum(map(len, self._pending.values())), "pending entries are miscounted"
        deliveries = [delivery for group in (*self._pending.values(), *carried.values()) for delivery in group]
        assert sorted(deliveries) == sorted(self._entries), "an entry is in no collection, or in two"
        assert self._patience.keys() <= {delivery[0] for delivery in self._entries}, (
            "back-off of a ring without entries"
        )
