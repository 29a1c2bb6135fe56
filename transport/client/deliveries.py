"""Making of `Payload` objects from read bytes: counts, schemas, acknowledgements.

    mapped      the bytes are in a slot of this host, or were copied out of it
    received    they came over a wire and are verified
    handed_in   they came with their claim
    hand_over   the caller gets the payload now; with ack="on_arrival" it is acknowledged here, not before

One object for each client, on its loop; a payload may be acknowledged from any thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from transport.client.connections.acknowledgements import Ack
from transport.client.connections.links import Links
from transport.client.connections.pool import PortKey
from transport.client.device_reads import DevicePayload
from transport.client.payload import AckMode, Payload, ReadOutcome, ReadPayload
from transport.devices.targets import Target
from transport.errors import ClosedError, SchemaError, StaleSlotError, TransportError, bare
from transport.ring.attached import through
from transport.ring.buffer import SharedRingBuffer
from transport.ring.parts import PayloadPart, part_of
from transport.schema import Schema
from transport.ticket import Ticket
from transport.wires import Wire


class Deliveries:
    """Factory of the payloads of one client.

    Args:
        schemas: of rings whose tickets do not describe their payloads themselves.
        ack: when a payload is acknowledged, see `UCXXClient`.
        find: finds a ticket's ring where it is mapped or can be.

    Attributes:
        mode: when a payload is acknowledged.
        closed: set by the client; from then on no acknowledgement is sent over a wire.
        reads: payloads made.
        bytes_by_wire: of these payloads.
    """

    def __init__(
        self,
        schemas: Sequence[Schema],
        ack: AckMode,
        links: Links,
        find: Callable[[Ticket], SharedRingBuffer | None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._schemas = {schema.fingerprint: schema for schema in schemas}
        self.mode: AckMode = ack
        self._links = links
        self._find = find
        self.closed = False
        self.reads = 0
        self.bytes_by_wire: dict[str, int] = {}

    def schema_of(self, ticket: Ticket) -> Schema | None:
        """Return the payload's schema, by its ticket or as the client was given it; None: neither."""
        return ticket.schema or self._schemas.get(ticket.schema_fingerprint)

    # --- payloads -----------------------------------------------------------------------------------
    def part(self, ticket: Ticket, fields: tuple[str, ...]) -> PayloadPart:
        """Return the part of the payload with these fields. SchemaError: unknown field, or no schema for it here."""
        return part_of(ticket, self.schema_of(ticket), fields)

    def mapped(
        self, ring: SharedRingBuffer, ticket: Ticket, rank: int, data: Any, part: PayloadPart | None = None
    ) -> Payload:
        """Return the payload of a ring of this host: ``data`` is a view of its slot, a copy, or device memory.

        ``part``: its fields that are wanted; in host memory they lie where the whole payload has them.
        """
        acknowledge = partial(self._acknowledge_mapped, ring, ticket, rank)
        return self._made(ticket, rank, "mapped", data, acknowledge, part, inside=type(data) is not Target)

    def received(
        self, ticket: Ticket, rank: int, wire: Wire, via: PortKey, data: Any, part: PayloadPart | None = None
    ) -> Payload:
        """Return the payload that came through port ``via`` into ``data``: a buffer, the caller's `out`, or a `Target`.

        ``part``: its fields that are wanted, which came alone.
        """
        return self._made(ticket, rank, wire, data, partial(self._acknowledge_through, ticket, rank, via), part)

    def handed_in(self, ticket: Ticket, rank: int, wire: Wire, data: Any) -> Payload:
        """Return a payload that was taken with its claim: the holder of the claim acknowledges by ending it."""
        return self._made(ticket, rank, wire, data, lambda: True)

    def _made(
        self,
        ticket: Ticket,
        rank: int,
        wire: Wire,
        data: Any,
        acknowledge: Callable[[], bool],
        part: PayloadPart | None = None,
        *,
        inside: bool = False,
    ) -> Payload:
        schema, layout, size = None, None, ticket.size
        if part is None:
            schema = self.schema_of(ticket)
        else:
            schema, layout = part.schema, part.inside if inside else part.layout
            size = size if wire == "mapped" else part.nbytes
        self.reads += 1
        self.bytes_by_wire[wire] = self.bytes_by_wire.get(wire, 0) + size
        make = DevicePayload if type(data) is Target else ReadPayload
        return make(ticket, rank, wire, data, schema, acknowledge, layout=layout)

    # --- acknowledgements ---------------------------------------------------------------------------
    def hand_over(self, payload: Payload, out: Any = None, ack: AckMode | None = None) -> Payload:
        """Return the payload to the caller; called where nothing can fail between this and the caller.

        With ack="on_arrival" it is acknowledged here: one that was fetched ahead and never returned is not consumed.
        Raises ClosedError when the client is closed; SchemaError where the schema is not known, and ``out`` was not
        given for the bytes; StaleSlotError for a mapped payload that another reader of the rank has consumed meanwhile.
        """
        if (ack or self.mode) == "on_arrival":
            if self.closed:
                raise ClosedError(f"payload {payload.ticket.name} arrived after its client was closed")
            if out is None and (why := payload.undescribed):  # else its bytes are what is wanted
                raise SchemaError(f"{why}, or read its bytes with out= or ack='manual'; it is not consumed")
            if not payload.ack():
                raise StaleSlotError(f"payload {payload.ticket.name} was consumed by another reader while it was read")
        return payload

    def hand_over_all(self, outcomes: list[ReadOutcome]) -> Iterator[ReadOutcome]:
        """`hand_over` of many, which are taken out of the list; a payload that cannot be handed over is an error."""
        outcomes.reverse()
        while outcomes:
            outcome = outcomes.pop()
            if outcome.payload is not None:
                try:
                    self.hand_over(outcome.payload)
                except TransportError as error:
                    outcome = outcome._replace(payload=None, error=bare(error))
            yield outcome

    def _acknowledge_mapped(self, ring: SharedRingBuffer, ticket: Ticket, rank: int) -> bool:
        try:
            return ring.acknowledge(ticket, rank)
        except ClosedError:  # who was attached has closed it; after the client has, nobody looks for it again
            if self.closed:
                raise
            return self.acknowledge(ticket, rank)

    def acknowledge(self, ticket: Ticket, rank: int) -> bool:
        """Acknowledge a payload where it is: in a ring that is mapped or can be, or through the next healthy port.

        Raises ClosedError when the ring is not mapped, and the client is closed.
        """
        accepted = through(self._find, ticket, lambda ring: ring.acknowledge(ticket, rank))
        return self._acknowledge_through(ticket, rank, None) if accepted is None else accepted

    def _acknowledge_through(self, ticket: Ticket, rank: int, via: PortKey | None) -> bool:
        """Send an acknowledgement through port ``via``, or through the next healthy port.

        Raises ClosedError when the client is closed.
        """
        if self.closed:
            raise ClosedError(f"payload {ticket.name} cannot be acknowledged: its client is closed")
        ack = Ack(ticket.ring, ticket.slot, ticket.generation, rank, ticket.key)
        if threading.get_ident() == self._thread:
            self._tell(ticket, ack, via)
        else:  # a payload is acknowledged where it is used, which may be the trainer's thread
            try:
                self._loop.call_soon_threadsafe(self._tell, ticket, ack, via)
            except RuntimeError as error:  # the loop has ended since the check above
                raise ClosedError(f"payload {ticket.name} cannot be acknowledged: its client is closed") from error
        return True

    def _tell(self, ticket: Ticket, ack: Ack, via: PortKey | None) -> None:
        if via is None or self._links.routes.find(ticket.ring) is None:  # never known, or forgotten since it was read
            self._links.ports(ticket)
        self._links.acknowledge(ack, via)
