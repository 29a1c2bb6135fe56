"""Attachments that the clients and runs of a process share, and rings that are closed while others read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import Child, noise

from transport import BlockingClient, SharedRingBuffer, Ticket
from transport.claims.open import given_rings
from transport.errors import ClosedError, NoOwnerError
from transport.ring.attached import AttachedRings, through
from transport.ring.buffer import attached_reader

WRITER = """
import sys
from helpers import noise
from transport import SharedRingBuffer
with SharedRingBuffer.create(slots=4, slot_bytes=1000) as ring:
    print(ring.write_raw(noise(500)).to_text(), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def written() -> Iterator[Ticket]:
    """The ticket of a payload that another process has written."""
    with Child(WRITER) as child:
        yield Ticket.parse(child.line())
        child.tell()
        assert child.wait() == 0


def owners(name: str) -> int:
    with SharedRingBuffer.attach(name, role="observer") as seen:
        return sum(owner.alive for owner in seen.native.owners())


def test_what_this_process_writes_is_read_through_its_writers_attachment(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(noise(500))
    first, second = AttachedRings(), AttachedRings()
    assert first.find(ticket) is ring
    assert second.find(ticket) is ring
    first.close()
    assert second.find(ticket) is ring
    with BlockingClient(wire={"mapped"}) as client:
        assert np.array_equal(client.read(ticket)["data"], noise(500))
    assert owners(ring.name) == 1


def test_two_clients_of_a_process_have_one_attachment_until_who_attached_it_leaves(written: Ticket) -> None:
    first, second = AttachedRings(), AttachedRings()
    shared = first.find(written)
    assert shared is not None
    assert second.find(written) is shared
    assert owners(written.segment) == 2
    first.close()
    own = second.find(written)
    assert own is not None
    assert not own.native.closed
    assert owners(written.segment) == 2
    second.close()
    assert owners(written.segment) == 1


def test_a_payload_is_acknowledged_though_the_client_that_was_attached_has_closed(written: Ticket) -> None:
    with BlockingClient(wire={"mapped"}, ack="manual") as second:
        with BlockingClient(wire={"mapped"}, ack="manual") as first:
            first.read(written)
            payload = second.read(written, out=bytearray(500))  # a copy: no view keeps the attachment
        assert payload.ack()
        with SharedRingBuffer.attach(written.segment, role="observer") as seen:
            assert seen.native.unread == 0


def test_a_ring_that_is_closed_while_it_is_used_is_found_anew(written: Ticket) -> None:
    rings = AttachedRings()
    used = []

    def use(ring: SharedRingBuffer) -> bool:
        used.append(ring)
        if len(used) == 1:
            ring.close()  # as another thread, whose attachment it is
        return ring.acknowledge(written)

    assert through(rings.find, written, use)
    assert used[0] is not used[1]
    rings.close()


def test_an_error_of_a_ring_that_is_open_is_no_reason_to_look_again(ring: SharedRingBuffer) -> None:
    def fails(_: SharedRingBuffer) -> None:
        raise ClosedError("another thing is closed")

    with pytest.raises(ClosedError, match="another thing"):
        through(AttachedRings().find, ring.write_raw(b"x"), fails)


def test_a_run_claims_through_the_attachment_that_its_clients_reads_have_made(written: Ticket) -> None:
    with SharedRingBuffer.attach(written.segment, role="reader") as given, given_rings() as rings:
        read = rings._here.attached.find(written)
        rings.hand_out(given)
        [claimed] = rings._here.rings(frozenset())
        assert claimed is read


@pytest.mark.parametrize("listeners", [1, 3])
def test_readers_leave_owner_numbers_to_every_listener_and_a_snapshot(ring: SharedRingBuffer, listeners: int) -> None:
    ring.native.set_ports([1 + number for number in range(listeners)])
    with contextlib.ExitStack() as attachments:
        with pytest.raises(NoOwnerError):
            while True:
                attachments.enter_context(attached_reader(ring.name))
        for _ in range(listeners):
            attachments.enter_context(SharedRingBuffer.attach(ring.name, role="listener"))
        attachments.enter_context(SharedRingBuffer.attach(ring.name, role="reader"))  # as a snapshot does
