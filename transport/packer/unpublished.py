"""Tickets as a queue takes them, and which payloads of a ring the queue does not have."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

import msgspec

from transport.packer.publisher import Waiting
from transport.queue.base import QueuedTicket, TicketQueue, finished
from transport.ring.buffer import SharedRingBuffer
from transport.ring.writes import Tickets
from transport.runtime.decoders import ready
from transport.ticket import Ticket

_PREFIX_BYTES = 3


class _Place(msgspec.Struct, array_like=True):
    """How an encoded ticket begins; what follows is not looked at."""

    ring: str
    segment: msgspec.Raw
    host: msgspec.Raw
    addresses: msgspec.Raw
    ports: msgspec.Raw
    slot: int
    generation: int


ready(_Place)
_place = msgspec.msgpack.Decoder(_Place).decode


def ticket_id(ticket: Ticket) -> str:
    """The name under which a queue knows a ticket: ring/slot/generation."""
    return "/".join(map(str, ticket.identity))


def queued(ticket: Ticket) -> QueuedTicket:
    """A ticket as a queue takes it."""
    return QueuedTicket(ticket_id(ticket), ticket.encode())


def queued_many(tickets: Tickets) -> Iterable[QueuedTicket]:
    """As `queued`, of tickets that are encoded already."""
    for data in tickets.encoded:
        place = _place(memoryview(data)[_PREFIX_BYTES:])
        yield QueuedTicket(f"{place.ring}/{place.slot}/{place.generation}", data)


class Finished:
    """Frees slots whose payloads the queue has as finished, because their trainer was killed before it told the ring.

    A queue remembers a limited number of finished tickets, and one that it has forgotten would be published again. So
    this is done long before that many have finished. What is finished at two looks is freed: at the first one, its
    trainer may be about to tell the ring.
    """

    def __init__(self, ring: SharedRingBuffer, queue: TicketQueue) -> None:
        self._ring = ring
        self._queue = queue
        self._before: set[str] = set()

    def look(self) -> int:
        """How many slots were freed."""
        unread = {ticket_id(payload.ticket): payload.ticket for payload in self._ring.unread()}
        done = {name for name, states in self._queue.known(unread).items() if finished(states)}
        freed = sum(self._ring.discard(unread[name]) for name in done & self._before)
        self._before = done
        return freed


class Compared(NamedTuple):
    """What a look at a ring and its queue found."""

    missing: list[Waiting]  # unread payloads that the queue does not have, to be given to a Publisher
    freed: int


def compared(
    ring: SharedRingBuffer, queue: TicketQueue, *, grouped: bool, waiting: Container[str] = (), free: bool = True
) -> Compared:
    """Find the unread payloads that the queue does not have; with ``free``, free those that it has as finished.

    Args:
        grouped: all ranks of a payload are one delivery.
        waiting: ids that a Publisher has already.
    """
    unread = [(queued(payload.ticket), payload) for payload in ring.unread()]
    known = queue.known(name.id for name, _ in unread)
    missing: list[Waiting] = []
    freed = 0
    for name, payload in unread:
        states = known.get(name.id)
        if states is None:
            if name.id not in waiting:
                missing.append(Waiting(name, 1 if grouped else payload.ticket.readers, payload.policy_version))
        elif free and finished(states[:1] if grouped else states):
            freed += ring.discard(payload.ticket)
    return Compared(missing, freed)
