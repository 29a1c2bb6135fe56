"""One payload in the hands of one reader of its host: claimed from the ring itself, without a ticket from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transport import _ring
from transport.errors import ChecksumError, StaleSlotError
from transport.ring.packing import decoded_views
from transport.schema import Layout
from transport.ticket import Ticket

if TYPE_CHECKING:
    from transport.ring.writes import Slots


class ClaimedPayload:
    """A claim: no other consumer of this rank gets the payload until the claim ends. See `SharedRingBuffer.claim`.

    It owns its delivery: what was not ended may be claimed again when nothing refers to the claim, or to arrays in its
    slot, any more. Its end is asked for once; the same call answers the same when it is made again, and another end is
    refused.

    Attributes:
        native: the claim, its verdict, and what the slot says of its payload (length, checksum, sequence …).
    """

    __slots__ = ("_ring", "native")

    def __init__(self, ring: Slots, native: _ring.Claim) -> None:
        self._ring = ring
        self.native = native

    def __repr__(self) -> str:
        native = self.native
        return (
            f"<ClaimedPayload {self._ring.ring_id[:4]}…/{native.slot}@{native.generation} rank {native.rank}, "
            f"attempt {native.attempts}, {native.length} bytes>"
        )

    @property
    def name(self) -> str:
        """``ring/slot/generation``: the id that queues give the payload's ticket."""
        return f"{self._ring.ring_id}/{self.native.slot}/{self.native.generation}"

    @property
    def rank(self) -> int:
        """Whose delivery this is."""
        return self.native.rank

    @property
    def attempts(self) -> int:
        """How often this delivery was claimed, this time included."""
        return self.native.attempts

    @property
    def policy_version(self) -> int | None:
        """Of the policy that made the payload, where the writer said so."""
        return self.native.policy_version

    @property
    def encoded(self) -> bytes:
        """The payload's ticket, encoded. StaleSlotError when the payload is gone."""
        note = self._ring.native.note(self.native.slot, self.native.generation)
        if note is None:
            raise StaleSlotError(f"the payload of {self!r} is not in its slot any more")
        return note

    @property
    def ticket(self) -> Ticket:
        """The payload's ticket. StaleSlotError when the payload is gone."""
        return Ticket.decode(self.encoded)

    @property
    def view(self) -> memoryview:
        """The payload's bytes in its slot, read-only. They stay what they are until the claim ends."""
        return self.native.payload()

    def layout(self) -> Layout:
        """Where the tensors stand, by the ticket's own schema or the ring's."""
        return self.ticket.layout(self._ring.schema)

    def arrays(self) -> Mapping[str, Any]:
        """The tensors by name, read-only, in the slot's memory; as `view`. Text, bytes and values are decoded."""
        ticket, schema = self.ticket, self._ring.schema
        described = ticket.schema or schema
        return decoded_views(ticket.layout(schema), self.view, described.kinds if described else {})

    def verify(self) -> None:
        """ChecksumError unless the bytes are those that were written."""
        if _ring.checksum(self.view) != self.native.checksum:
            raise ChecksumError(f"the bytes of {self!r} are not those that were written")

    @property
    def held(self) -> bool:
        """Whether the claim has not ended, in whatever way."""
        return self.native.held

    def renew(self) -> bool:
        """Say that this attachment lives, see `SharedRingBuffer.set_lease`. False: the claim is not held any more."""
        self._ring.native.heard()
        return self.held

    def consume(self) -> bool:
        """Say that the payload was used: True if the claim was held. False: drop what was made of it."""
        return self.native.finish()

    def release_memory(self) -> None:
        """Release the memory that `SharedRingBuffer.consume` kept (``keep_memory``)."""
        self.native.release_memory()

    def release(self, delay_s: float = 0.0) -> bool:
        """Give the claim back: any reader may claim the payload, after the delay. False: it was not held any more."""
        return self.native.give_back(delay_s)

    def discard(self, reason: str, *, consumer: str = "") -> bool:
        """End this rank's delivery unread; the ring's log keeps the reason. False: it was not held any more."""
        return self.native.end("discarded", reason, consumer)
