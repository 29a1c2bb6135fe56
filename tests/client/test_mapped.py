"""Same-host views: pins that last as long as arrays do, and attachments that end when they should."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from claimed import claim_each
from helpers import NETWORK, NETWORK_WIRE, Child, asynchronous, free, noise, segment_file, serving, until
from mapped_views import look, states, view

from transport import BlockingClient, SharedRingBuffer, Ticket, UCXXClient
from transport.client.payload import ReadPayload
from transport.errors import ClosedError, RankError, StaleSlotError, WrongKeyError
from transport.ring.attached import AttachedRings

pytestmark = pytest.mark.usefixtures("apart")


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=6, slot_bytes=1000) as made:
        yield made


# --- finding -------------------------------------------------------------------------------------
def test_a_ring_is_attached_once_and_takes_one_owner_place(ring: SharedRingBuffer, mapped: AttachedRings) -> None:
    first = mapped.find(ring.write_raw(b"1"))
    assert first is mapped.find(ring.write_raw(b"2"))
    assert first is not None
    assert sum(owner.alive for owner in ring.native.owners()) == 2
    assert repr(mapped) == "<AttachedRings 1 attached, 0 views>"


@pytest.mark.parametrize(
    "change",
    [{"host": "elsewhere"}, {"segment": ""}, {"segment": "/transport-none-of-this-name"}, {"ring": "ab" * 16}],
    ids=str,
)
def test_a_ring_that_is_not_here_is_read_through_the_network(
    ring: SharedRingBuffer, mapped: AttachedRings, change: Any
) -> None:
    ticket = ring.write_raw(b"1")
    assert mapped.find(msgspec.structs.replace(ticket, **change)) is None
    assert sum(owner.alive for owner in ring.native.owners()) == 1


def test_without_a_free_owner_place_reading_goes_through_the_network(
    ring: SharedRingBuffer, mapped: AttachedRings
) -> None:
    others = [SharedRingBuffer.attach(ring.name, role="reader") for _ in range(15)]
    ticket = ring.write_raw(b"1")
    assert mapped.find(ticket) is None
    for other in others:
        other.close()
    assert mapped.find(ticket) is None  # a refusal is remembered for a while
    assert AttachedRings().find(ticket) is not None
    gc.collect()


@pytest.mark.ucx
@asynchronous
async def test_readers_that_would_take_a_listeners_place_read_over_the_wire() -> None:
    with serving(slots=4) as (ring, server), contextlib.ExitStack() as stack:
        ticket = ring.write_raw(noise(1000), readers=16)
        async with contextlib.AsyncExitStack() as clients:
            wires = []
            for rank in range(16):
                client = await clients.enter_async_context(UCXXClient(wire={"mapped", *NETWORK}))
                with await client.read(ticket, rank=rank) as payload:
                    assert np.array_equal(payload["data"], noise(1000))
                    wires.append(payload.wire)
                del payload
            most = 16 - 2 - len(server.ports)
            assert wires == ["mapped"] * most + [NETWORK_WIRE] * (16 - most)
            # a killed listener's place is found again, also while its predecessor is not yet cleared away
            for _ in range(2):
                stack.enter_context(SharedRingBuffer.attach(ring.name, role="listener"))
            await until(lambda: free(ring))


# --- views ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("consume", "after"), [(True, (6, 0, 0)), (False, (5, 1, 0))])
def test_the_pin_lasts_as_long_as_any_array_into_the_view(
    ring: SharedRingBuffer, mapped: AttachedRings, consume: bool, after: tuple[int, int, int]
) -> None:
    made = view(mapped, ring.write_raw(noise(800)), consume)
    piece = look(made)[8:].view(np.float64)[::3]
    del made
    gc.collect()
    assert states(ring) == (5, 0, 1)
    assert piece.tobytes() == noise(800)[8:].view(np.float64)[::3].tobytes()
    assert not piece.flags.writeable
    del piece
    gc.collect()
    assert states(ring) == after


def test_acknowledging_consumes_at_once_and_keeps_the_memory(ring: SharedRingBuffer, mapped: AttachedRings) -> None:
    ticket = ring.write_raw(noise(100))
    made = view(mapped, ticket)
    assert not ring.acknowledge(ticket)
    assert states(ring) == (5, 0, 1)
    with pytest.raises(StaleSlotError):
        ring.read_raw(ticket)
    assert np.array_equal(look(made), noise(100))
    del made
    assert states(ring) == (6, 0, 0)
    assert ring.statistics().consumes == 1


def test_letting_go_consumes_nothing_and_acknowledging_needs_no_memory(
    ring: SharedRingBuffer, mapped: AttachedRings
) -> None:
    ticket = ring.write_raw(b"x")
    made = view(mapped, ticket, consume=False)
    attached = mapped.find(ticket)
    assert attached is not None
    del made
    assert states(ring) == (5, 1, 0)
    assert attached.acknowledge(ticket)
    assert states(ring) == (6, 0, 0)


@asynchronous
async def test_what_is_acknowledged_on_arrival_is_consumed_and_not_rewritten_while_its_arrays_live() -> None:
    with SharedRingBuffer.create(slots=4, slot_bytes=1000) as ring:
        async with UCXXClient(wire={"mapped"}) as client, UCXXClient(wire={"mapped"}) as other:
            tickets = [ring.write_raw(noise(1000, seed)) for seed in range(2)]
            kept = [(await client.read(ticket))["data"] for ticket in tickets]
            assert (ring.unread(), claim_each(ring)) == ([], [])
            for ticket in tickets:
                with pytest.raises(StaleSlotError):
                    await other.read(ticket)
            for seed in range(2, 12):  # more than there are slots
                assert np.array_equal((await other.read(ring.write_raw(noise(1000, seed))))["data"], noise(1000, seed))
            for seed, array in enumerate(kept):
                assert np.array_equal(array, noise(1000, seed))
            del array, kept
            assert states(ring) == (4, 0, 0)


def test_the_last_array_may_go_on_any_thread(ring: SharedRingBuffer, mapped: AttachedRings) -> None:
    arrays = [look(view(mapped, ring.write_raw(noise(100, seed)))) for seed in range(3)]
    threads = [threading.Thread(target=arrays.pop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states(ring) == (6, 0, 0)
    assert repr(mapped) == "<AttachedRings 1 attached, 0 views>"


def test_views_take_at_most_their_share_of_the_slots(
    ring: SharedRingBuffer, mapped: AttachedRings, caplog: pytest.LogCaptureFixture
) -> None:
    tickets = [ring.write_raw(noise(10, seed)) for seed in range(6)]
    views = [view(mapped, ticket) for ticket in tickets[:3]]
    attached = mapped.find(tickets[3])
    assert attached is not None
    for ticket in tickets[3:5]:
        assert attached.lend(ticket, 0) is None
    assert caplog.text.count("further payloads are copied") == 1
    copy = bytearray(10)
    attached.copy_out(tickets[3], 0, memoryview(copy))
    assert copy == noise(10, 3).tobytes()
    assert states(ring) == (0, 3, 3)
    del views[0]
    views.append(view(mapped, tickets[3]))
    assert states(ring) == (1, 2, 3)


def test_arrays_of_a_view_cannot_be_made_writable(ring: SharedRingBuffer, mapped: AttachedRings) -> None:
    ticket = ring.write_raw(noise(100))
    made = view(mapped, ticket)
    payload = ReadPayload(ticket, 0, "mapped", made, ticket.schema, lambda: True)
    assert memoryview(made).readonly
    for array in (look(made), payload.data, payload["data"], payload["data"][3:].view()):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    with pytest.raises(TypeError, match="not writable"):
        (ctypes.c_char * 100).from_buffer(made)


def test_a_refused_read_leaves_no_pin(ring: SharedRingBuffer, mapped: AttachedRings) -> None:
    ticket = ring.write_raw(b"x")
    attached = mapped.find(ticket)
    assert attached is not None
    for refused, rank, error in (
        (ticket, 1, RankError),
        (msgspec.structs.replace(ticket, key=0), 0, WrongKeyError),
        (msgspec.structs.replace(ticket, slot=5, key=ring.key(5, 1)), 0, StaleSlotError),
    ):
        with pytest.raises(error):
            attached.lend(refused, rank)
    assert states(ring) == (5, 1, 0)
    assert repr(mapped) == "<AttachedRings 1 attached, 0 views>"


def test_a_view_keeps_its_ring_attached_when_nobody_else_does(ring: SharedRingBuffer) -> None:
    mapped = AttachedRings()
    array = look(view(mapped, ring.write_raw(noise(100))))
    del mapped
    gc.collect()
    assert states(ring) == (5, 0, 1)
    assert np.array_equal(array, noise(100))
    del array
    assert states(ring) == (6, 0, 0)
    assert sum(owner.alive for owner in ring.native.owners()) == 1


def test_an_attachment_that_is_closed_under_its_views_keeps_their_slots(
    ring: SharedRingBuffer, mapped: AttachedRings
) -> None:
    ticket = ring.write_raw(noise(100))
    made = view(mapped, ticket, consume=False)
    array = look(made)
    attached = mapped.find(ticket)
    assert attached is not None
    attached.close()
    assert states(ring) == (5, 0, 1)  # the memory is looked at, whoever closes
    assert np.array_equal(array, noise(100))
    with pytest.raises(ClosedError):
        attached.acknowledge(ticket)
    with pytest.raises(ClosedError):
        attached.lend(ticket, 0)
    del made, array
    assert states(ring) == (5, 1, 0)


# --- the end -------------------------------------------------------------------------------------
def test_close_acknowledges_nothing_and_detaches_with_the_last_array(ring: SharedRingBuffer) -> None:
    mapped = AttachedRings()
    consumed, unread = (view(mapped, ring.write_raw(noise(100, seed)), seed == 0) for seed in range(2))
    mapped.close(but_lent=True)
    assert ring.statistics().consumes == 1
    assert states(ring) == (4, 0, 2)
    for seed, made in enumerate((consumed, unread)):
        assert np.array_equal(look(made), noise(100, seed))
    del consumed, made
    assert sum(owner.alive for owner in ring.native.owners()) == 2
    del unread
    assert states(ring) == (5, 1, 0)
    assert sum(owner.alive for owner in ring.native.owners()) == 1


@pytest.mark.parametrize("ack", ["on_arrival", "manual"])
def test_a_closed_clients_acknowledged_payloads_do_not_keep_the_ring_attached(ring: SharedRingBuffer, ack: Any) -> None:
    with BlockingClient(wire={"mapped"}, ack=ack) as client:
        payload = client.read(ring.write_raw(noise(100)))
        assert np.array_equal(payload["data"], noise(100))
    if ack == "manual":
        assert payload.ack()
    payload.release()
    gc.collect()
    assert payload.acknowledged
    assert not payload.ack()
    assert sum(owner.alive for owner in ring.native.owners()) == 1


def test_rings_whose_writers_are_gone_are_let_go_when_another_one_comes(mapped: AttachedRings) -> None:
    first = SharedRingBuffer.create(slots=2, slot_bytes=100)
    made = view(mapped, first.write_raw(b"x"))
    file = segment_file(first)
    first.native.close()  # as the kernel ends a killed one's
    with SharedRingBuffer.create(slots=2, slot_bytes=100) as second:
        view(mapped, second.write_raw(b"x"))
        assert file.exists()  # a view is out
        del made
    with SharedRingBuffer.create(slots=2, slot_bytes=100) as third:
        view(mapped, third.write_raw(b"x"))
        assert not file.exists()
        assert repr(mapped) == "<AttachedRings 1 attached, 0 views>"


# --- processes that end, are killed or fork while they have views of a mapped ring


@asynchronous
async def test_payloads_of_a_killed_writer_without_any_listener_are_read() -> None:
    code = """
import sys
from helpers import noise
from transport import SharedRingBuffer
ring = SharedRingBuffer.create(slots=2, slot_bytes=1000)
print(ring.write_raw(noise(500)).to_text(), flush=True)
sys.stdin.readline()
"""
    with Child(code) as child:
        ticket = Ticket.parse(child.line())
        child.kill()
    async with UCXXClient(wire={"mapped"}) as client:
        payload = await client.read(ticket)
        assert np.array_equal(payload["data"], noise(500))
        del payload


@pytest.mark.parametrize("closed", [False, True])
def test_a_process_that_ends_with_views_in_hand_leaves_what_it_did_not_acknowledge_and_no_pin(closed: bool) -> None:
    code = f"""
import ctypes
import sys
import numpy as np
from transport import Ticket
from transport.ring.attached import AttachedRings
mapped = AttachedRings()
views = []
while line := sys.stdin.readline().strip():
    ticket = Ticket.parse(line)
    ring = mapped.find(ticket)
    view = ring.lend(ticket, 0)
    if ticket.slot > 0:
        ring.acknowledge(ticket)
    views.append(np.frombuffer(view, np.uint8))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(views[-1]))  # so that the interpreter does not free it at its end
    print(views[-1].sum(), flush=True)
if {closed}:
    mapped.close(but_lent=True)
"""
    with SharedRingBuffer.create(slots=6, slot_bytes=1000) as ring, Child(code) as child:
        for seed in range(3):
            child.tell(ring.write_raw(noise(100, seed)).to_text())
            assert int(child.line()) == noise(100, seed).sum()
        assert states(ring) == (3, 0, 3)
        child.tell()
        assert child.wait() == 0
        assert states(ring) == (5, 1, 0)
        assert ring.statistics().consumes == 2


def test_a_forked_child_with_a_view_ends_quietly_and_changes_nothing() -> None:
    body = """
import os, sys
from transport import BlockingClient, SharedRingBuffer
with SharedRingBuffer.create(slots=2, slot_bytes=10) as ring, BlockingClient(wire={"mapped"}) as client:
    held = client.read(ring.write_raw(b"held"))["data"]
    child = os.fork()
    if child == 0:
        del held  # the last array of this copy
        sys.stderr.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(held) == b"held"
    assert ring.statistics().reading == 1
    assert ring.statistics().consumes == 1  # as it arrived
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", body], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
