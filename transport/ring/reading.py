"""Reading from a ring on its own host: payloads by ticket, and the ring as the queue."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from transport import _ring
from transport.errors import (
    LengthMismatchError,
    RankError,
    StaleSlotError,
    TransportError,
    UsageError,
    WrongKeyError,
    WrongRingError,
)
from transport.ring.batches import MAX_DELIVERIES, BatchLayout, PayloadBatch, claim_batch
from transport.ring.claimed import ClaimedPayload
from transport.ring.leases import ReadLease
from transport.ring.life import RingLife
from transport.ring.states import named
from transport.runtime.arguments import expect
from transport.ticket import Ticket

log = logging.getLogger(__name__)

MAX_READERS: Final = _ring.MAX_READERS
_ANY_SIZE: Final = (1 << 64) - 1
_TICKET: Final = "a Ticket, Ticket.parse() makes one of its text"


class RingReading(RingLife):
    """What of `SharedRingBuffer` reads and consumes."""

    # --- reading on this host -------------------------------------------------------------------------
    def check(self, ticket: Ticket, rank: int = 0) -> None:
        """Refuse a ticket of another ring, a wrong key or a rank out of range."""
        expect(ticket, Ticket, "a ring", _TICKET)
        ticket.check_rank(rank)
        if ticket.ring != self.ring_id:
            raise WrongRingError(
                f"ticket {ticket.name} belongs to ring {ticket.ring[:8]}, this is ring {self.ring_id[:8]}"
            )
        if ticket.slot >= self.slot_count:
            raise StaleSlotError(f"ticket {ticket.name}: this ring has {self.slot_count} slots")
        if ticket.key != self.key(ticket.slot, ticket.generation):
            raise WrongKeyError(f"ticket {ticket.name}: key mismatch for this slot and generation")

    def key(self, slot: int, generation: int) -> int:
        """The key that a ticket for this slot and generation carries."""
        return _ring.slot_key(self._secret, slot, generation)

    def read_raw(self, ticket: Ticket, rank: int = 0) -> ReadLease:
        """Pin a payload and lend its bytes, read-only, until the lease is consumed or released.

        Raises:
            StaleSlotError: consumed by this rank, overwritten, discarded or expired.
            WrongRingError, WrongKeyError, RankError, LengthMismatchError: the ticket is not for this payload.
        """
        if type(ticket) is not Ticket:
            expect(ticket, Ticket, "read_raw()", _TICKET)
        ticket.check_rank(rank)
        if ticket.ring != self.ring_id:
            raise WrongRingError(
                f"ticket {ticket.name} belongs to ring {ticket.ring[:8]}, this is ring {self.ring_id[:8]}"
            )
        answer = self._call(self.native.begin_read, ticket.slot, ticket.generation, ticket.key, ticket.size, rank)
        if answer != _ring.READ_OK:
            raise self.refusal(answer, ticket, rank)
        try:
            return ReadLease(self, ticket, rank)
        except _ring.RingFault as fault:  # closed by another thread, which has unpinned it
            raise named(fault) from None

    def refusal(self, answer: int, ticket: Ticket, rank: int) -> TransportError:
        """The error for an answer of the native `begin_read`. Raises it where the ticket alone explains it."""
        self.check(ticket, rank)
        if answer == _ring.READ_OTHER_LENGTH:
            length = self._call(self.native.info, ticket.slot).length
            return LengthMismatchError(
                f"payload {ticket.name}: size mismatch: slot {length} bytes, ticket {ticket.size}"
            )
        if answer == _ring.READ_EXPIRED:
            return StaleSlotError(f"the deadline of payload {ticket.name} has passed")
        what = "was consumed by this rank" if answer == _ring.READ_DONE else "is no longer in its slot"
        return StaleSlotError(f"payload {ticket.name} {what}")

    def mark_consumed(self, ticket: Ticket, rank: int = 0) -> bool:
        """Consume and unpin in one swap, by the reader that holds the pin. False: it was not the owner any more."""
        if type(ticket) is not Ticket:
            expect(ticket, Ticket, "mark_consumed()", _TICKET)
        ticket.check_rank(rank)
        marked = self._call(self.native.mark_consumed, ticket.slot, ticket.generation, rank)
        return marked or self._refused("mark_consumed", ticket)

    def acknowledge(self, ticket: Ticket, rank: int = 0) -> bool:
        """Consume without unpinning: logical consumption and memory are separate. False: consumed before, or gone."""
        if type(ticket) is not Ticket:
            expect(ticket, Ticket, "acknowledge()", _TICKET)
        ticket.check_rank(rank)
        return self._call(self.native.consume, ticket.slot, ticket.generation, rank)

    def release_reading(self, ticket: Ticket) -> bool:
        """Unpin without consuming: the payload is READY again for the next attempt. False: not pinned by this owner."""
        if type(ticket) is not Ticket:
            expect(ticket, Ticket, "release_reading()", _TICKET)
        released = self._call(self.native.unpin, ticket.slot, ticket.generation)
        return released or self._refused("release_reading", ticket)

    def _refused(self, what: str, ticket: Ticket) -> bool:
        if (before := self._refusals.due()) is not None:
            log.warning(
                "%s(%s) had no effect: another call consumed or released the payload before (%d more since the last "
                "line; statistics().late_finalises counts all)",
                what,
                ticket.name,
                before,
                extra={"ticket": ticket.name},
            )
        return False

    def discard(self, ticket: Ticket) -> bool:
        """Free a payload that is not needed, for every rank. False: it was gone."""
        self.check(ticket)
        return self._call(self.native.discard, ticket.slot, ticket.generation)

    # --- the ring as the queue ------------------------------------------------------------------------
    def claim(
        self,
        n: int = 1,
        timeout_s: float = 0.0,
        *,
        rank: int | str = 0,
        most_bytes: int | None = None,
        oldest_version: int | None = None,
        max_deliveries: int = 0,
        consumer: str = "",
    ) -> list[ClaimedPayload]:
        """Up to ``n`` payloads that are unclaimed for this rank, the oldest first; waits for the first one.

        A claim is this attachment's until it is consumed, released or discarded, nothing refers to it any more, or the
        process ends; then, unless it was consumed or discarded, any reader may claim the payload again. `set_lease` has
        it end as well when this attachment is silent.

        Args:
            rank: whose; or the name of a consumer of one rank, see `create` and `rank_of`.
            most_bytes: of all together, unless the first one alone has more.
            oldest_version: what was written under an older policy version is discarded, and counted as aged.
            max_deliveries: what was claimed that often in vain is dead; 0: no limit.
            consumer: names the claimer in reports of failures.
        """
        found = self.rank_of(rank)
        if n < 1:
            raise UsageError(f"n={n}; a claim is of at least one payload")
        if not 0 <= found < MAX_READERS:
            raise RankError(f"rank {rank}; a payload is written for ranks 0..{MAX_READERS - 1}")
        claims = self._call(
            self.native.claim,
            n,
            timeout_s,
            rank=found,
            most_bytes=_ANY_SIZE if most_bytes is None else most_bytes,
            oldest_version=_ring.NO_VERSION if oldest_version is None else oldest_version,
            most_attempts=min(max_deliveries, _ring.MAX_ATTEMPTS),
            consumer=consumer,
        )
        return [ClaimedPayload(self, claim) for claim in claims]

    def set_lease(self, lease_s: float | None) -> None:
        """Let claims of this attachment end when it is silent for so long, as when its process is stopped.

        Every claim, and every end or renewal of one, is a sign of life. None: claims end with the process only, as they
        do without this call. The longest lease that was ever asked for counts.
        """
        if lease_s is not None and not lease_s > 0:
            raise UsageError(f"lease_s={lease_s}; a lease lasts for some time, and None for ever")
        self._call(self.native.set_lease, lease_s)

    def claim_batch(
        self,
        n: int,
        timeout_s: float = 0.0,
        *,
        layout: BatchLayout = "list",
        fill: complex | Mapping[str, complex] = 0,
        pad_to: Literal["longest"] | int = "longest",
        out: Mapping[str, Any] | None = None,
        memory: str = "host",
        most_memory: int | None = None,
        verify: bool | None = None,
        fields: Sequence[str] | None = None,
        rank: int | str = 0,
        most_bytes: int | None = None,
        oldest_version: int | None = None,
        max_deliveries: int = MAX_DELIVERIES,
        consumer: str = "",
    ) -> PayloadBatch:
        """`claim`, as one batch; empty when nothing came in time. Each tensor is written where it belongs in one pass.

        What arrives with wrong bytes is left out and may be claimed again, until ``max_deliveries``. The other
        arguments are those of `claim`. Several rings together: `transport.ring.batches.claim_batch`.

        Args:
            layout: "list", payloads in their slots; "padded", (batch, longest, …); "packed", with `cu_seqlens`.
            fill: behind the rows of a padded tensor; a number for all, or by name (0 where there is none).
            pad_to: entries that a padded tensor has for each payload.
            out: writable contiguous memory by name, larger than needed where you like: numpy, or what speaks DLPack
                on the host, pinned memory included. Tensors without one get pooled memory.
            memory: where the arrays of a padded or packed batch are: "host" (numpy), "pinned" (numpy over page-locked
                memory), "cupy" or "torch" (on the device; "cupy:1" for the second). A stream that is current where
                ``batch[name]`` is looked at waits for their arrival; this call does not.
            most_memory: bytes that these arrays may take together.
            verify: the checksums; default True but for "list", whose bytes are not read here, and with ``fields``.
            fields: names of those that the batch is to have; the bytes of others stay where they are.

        Raises:
            SchemaError: the ring was attached to without its schema, or ``fill`` or ``out`` name no tensor of it.
            UsageError: another argument makes no sense.
            BufferUnsuitableError: ``out`` does not fit, or the device's library lacks a dtype.
            BatchTooLargeError: a payload is longer than ``pad_to``, there are more entries than int32 counts, or the
                arrays need more than ``most_memory``, or more than there is.
            MissingDependencyError: ``memory`` needs a package or a device that is not here. Whatever is raised, no
                payload stays claimed.
        """
        return claim_batch(
            [self],
            n,
            timeout_s,
            layout=layout,
            fill=fill,
            pad_to=pad_to,
            out=out,
            memory=memory,
            most_memory=most_memory,
            verify=verify,
            fields=fields,
            rank=self.rank_of(rank),
            most_bytes=most_bytes,
            oldest_version=oldest_version,
            max_deliveries=max_deliveries,
            consumer=consumer,
        )

    def consume(self, claims: Sequence[ClaimedPayload], *, keep_memory: bool = False) -> list[ClaimedPayload]:
        """Say that these were used; returns those that were still this attachment's, and only those count.

        With ``keep_memory`` what is returned stays in its slot until each is let go (`ClaimedPayload.let_go`).
        """
        return [claim for claim in claims if self._call(claim.native.finish, keep_memory)]
