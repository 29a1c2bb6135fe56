"""The ring against a plain model of the protocol's table, with several attachments, in any order of operations."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from helpers import noise, segment_file
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from properties import examples

from transport import Schema, SharedRingBuffer, SlotState, Ticket, _ring
from transport.errors import ClosedError, RingFullError, StaleSlotError
from transport.ring.leases import ReadLease, WriteLease

SLOTS, ATTACHMENTS, RANKS = 3, 4, 3


@dataclass
class Slot:
    """What one slot of the model is."""

    state: SlotState = SlotState.FREE
    generation: int = 0
    readers: int = 0
    done: set[int] = field(default_factory=set)
    pins: dict[SharedRingBuffer, int] = field(default_factory=dict)  # how often
    content: bytes = b""
    sequence: int = 0

    def settle(self) -> None:
        """READING or READY by pins; FREE when every rank is done and nobody pins."""
        if self.pins:
            self.state = SlotState.READING
        else:
            self.state = SlotState.FREE if len(self.done) == self.readers else SlotState.READY

    def published(self, generation: int) -> bool:
        return self.generation == generation and self.state in (SlotState.READY, SlotState.READING)


class RingMachine(RuleBasedStateMachine):
    """Attachment 0 is the creator, 1 another writer, the others readers; all but 0 come and go.

    One that goes with leases in hand keeps their slots, and its place, until they end. A pin is an owner's, so the
    model keeps them by attachment and not by its index, which the next one has.
    """

    writes = Bundle("writes")
    tickets = Bundle("tickets")
    reads = Bundle("reads")

    @initialize()
    def create(self) -> None:
        self.rings: dict[int, SharedRingBuffer] = {0: SharedRingBuffer.create(slots=SLOTS, slot_bytes=64)}
        self.leases: list[WriteLease | ReadLease] = []
        for index in range(1, ATTACHMENTS):
            self.attach(index)
        self.model = [Slot() for _ in range(SLOTS)]
        self.counts = dict.fromkeys(("takes", "overwrites", "publishes", "aborts", "pins", "consumes", "discards"), 0)
        self.sequence = 0

    def attach(self, index: int) -> None:
        self.rings[index] = SharedRingBuffer.attach(self.rings[0].name, role="writer" if index == 1 else "reader")

    def teardown(self) -> None:
        if not hasattr(self, "rings"):
            return
        for ring in reversed(self.rings.values()):
            ring.close()
        for lease in self.leases:
            lease.abort() if isinstance(lease, WriteLease) else lease.release()
        assert not segment_file(self.rings[0]).exists()

    # --- writing -----------------------------------------------------------------------------------
    @rule(target=writes, writer=st.integers(0, 1), readers=st.integers(1, RANKS), overwrite=st.booleans())
    def take(self, writer: int, readers: int, overwrite: bool) -> object:
        ring = self.rings[writer]
        ring.overflow = "overwrite" if overwrite else "error"
        free = [slot for slot in self.model if slot.state is SlotState.FREE]
        unread = [slot for slot in self.model if slot.state is SlotState.READY]
        try:
            lease = ring.reserve(Schema.of(x=("uint8", 40)), readers=readers, timeout_s=0.0)
        except RingFullError:
            assert not free
            assert not (overwrite and unread)
            return multiple()
        slot = self.model[lease.slot]
        if free:
            assert slot.state is SlotState.FREE
            self.counts["takes"] += 1
        else:
            assert overwrite
            assert slot is min(unread, key=lambda each: each.sequence)
            self.counts["overwrites"] += 1
        assert lease._loan.generation == slot.generation + 1
        slot.state, slot.generation, slot.readers = SlotState.WRITING, lease._loan.generation, readers
        slot.done, slot.pins = set(), {ring: 1}
        self.leases.append(lease)
        return ring, lease

    @rule(target=tickets, write=consumes(writes))
    def publish(self, write: tuple[SharedRingBuffer, WriteLease]) -> object:
        ring, lease = write
        slot = self.model[lease.slot]
        if ring.native.closed:
            with pytest.raises(ClosedError):
                lease.publish()
            self.aborted(slot)
            return multiple()
        self.sequence += 1
        slot.content = noise(40, self.sequence).tobytes()
        lease["x"][:] = noise(40, self.sequence)
        slot.sequence, slot.pins = self.sequence, {}
        slot.settle()
        self.counts["publishes"] += 1
        return lease.publish()

    @rule(write=consumes(writes))
    def abort(self, write: tuple[SharedRingBuffer, WriteLease]) -> None:
        lease = write[1]
        lease.abort()
        self.aborted(self.model[lease.slot])

    def aborted(self, slot: Slot) -> None:
        slot.state, slot.pins = SlotState.FREE, {}
        self.counts["aborts"] += 1

    # --- reading -----------------------------------------------------------------------------------
    @rule(target=reads, reader=st.integers(0, ATTACHMENTS - 1), ticket=tickets, rank=st.integers(0, RANKS - 1))
    def pin(self, reader: int, ticket: Ticket, rank: int) -> object:
        rank %= ticket.readers
        slot = self.model[ticket.slot]
        readable = slot.published(ticket.generation) and rank not in slot.done
        try:
            lease = self.rings[reader].read_raw(ticket, rank)
        except StaleSlotError:
            assert not readable
            return multiple()
        assert readable
        assert bytes(lease.view) == slot.content
        ring = self.rings[reader]
        slot.pins[ring] = slot.pins.get(ring, 0) + 1
        slot.settle()
        self.counts["pins"] += 1
        self.leases.append(lease)
        return ring, lease

    def unpinned(self, slot: Slot, ring: SharedRingBuffer) -> None:
        slot.pins[ring] -= 1
        if not slot.pins[ring]:
            del slot.pins[ring]
        slot.settle()

    def holds(self, ring: SharedRingBuffer, ticket: Ticket) -> bool:
        slot = self.model[ticket.slot]
        return slot.published(ticket.generation) and ring in slot.pins

    @rule(read=consumes(reads))
    def release(self, read: tuple[SharedRingBuffer, ReadLease]) -> None:
        ring, lease = read
        assert self.holds(ring, lease.ticket)
        assert bytes(lease.view) == self.model[lease.ticket.slot].content
        assert lease.release()
        assert not lease.release()
        self.unpinned(self.model[lease.ticket.slot], ring)

    @rule(read=consumes(reads))
    def consume_and_unpin(self, read: tuple[SharedRingBuffer, ReadLease]) -> None:
        ring, lease = read
        slot = self.model[lease.ticket.slot]
        assert self.holds(ring, lease.ticket)
        if ring.native.closed:
            with pytest.raises(ClosedError):
                lease.consume()
        else:
            accepted = lease.rank not in slot.done
            assert lease.consume() == accepted
            if accepted:
                slot.done.add(lease.rank)
                self.counts["consumes"] += 1
        self.unpinned(slot, ring)

    @rule(reader=st.integers(0, ATTACHMENTS - 1), ticket=tickets, rank=st.integers(0, RANKS - 1))
    def acknowledge(self, reader: int, ticket: Ticket, rank: int) -> None:
        rank %= ticket.readers
        slot = self.model[ticket.slot]
        accepted = slot.published(ticket.generation) and rank not in slot.done
        assert self.rings[reader].acknowledge(ticket, rank) == accepted
        if accepted:
            slot.done.add(rank)
            slot.settle()
            self.counts["consumes"] += 1

    @rule(reader=st.integers(0, ATTACHMENTS - 1), ticket=tickets)
    def discard(self, reader: int, ticket: Ticket) -> None:
        slot = self.model[ticket.slot]
        accepted = slot.published(ticket.generation) and len(slot.done) < slot.readers
        assert self.rings[reader].discard(ticket) == accepted
        if accepted:
            slot.done = set(range(slot.readers))
            slot.settle()
            self.counts["discards"] += 1

    # --- coming and going ----------------------------------------------------------------------------
    @rule(index=st.integers(1, ATTACHMENTS - 1))
    def close_and_attach_again(self, index: int) -> None:
        places = {*self.rings.values(), *(ring for slot in self.model for ring in slot.pins)}
        if len(places) < _ring.MAX_OWNERS:
            self.rings[index].close()
            self.attach(index)

    # --- what must hold after every step ---------------------------------------------------------------
    @invariant()
    def the_ring_is_as_the_model_says(self) -> None:
        if not hasattr(self, "model"):
            return
        for ring in self.rings.values():
            for index, slot in enumerate(self.model):
                info = ring.native.info(index)
                assert (info.state, info.generation) == (slot.state, slot.generation), index
                assert info.pins.bit_count() == len(slot.pins)
                if slot.state in (SlotState.READY, SlotState.READING):
                    assert info.done == sum(1 << rank for rank in slot.done) | 0xFFFF & -1 << slot.readers
        look = self.rings[0].statistics()
        states = [slot.state for slot in self.model]
        assert (look.free, look.writing, look.ready, look.reading) == tuple(map(states.count, SlotState))
        assert {name: getattr(look, name) for name in self.counts} == self.counts
        published = [slot for slot in self.model if slot.state in (SlotState.READY, SlotState.READING)]
        unread = [slot for slot in published if len(slot.done) < slot.readers]  # not only pinned by who looks on
        expected = [slot.sequence for slot in sorted(unread, key=lambda each: each.sequence)]
        assert [self.model[ticket.slot].sequence for ticket in self.rings[0].tickets()] == expected


TestRing = RingMachine.TestCase
TestRing.settings = examples(30, stateful_step_count=40)
