"""Processes that end, are killed or fork while they have views of a mapped ring."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import Child, asynchronous, noise, segment_file
from mapped_views import look, states, view

from transport import SharedRingBuffer, Ticket, UCXXClient
from transport.client.mapped import MappedRings


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=6, slot_bytes=1000) as made:
        yield made


def test_a_reader_that_ends_last_removes_the_segment() -> None:
    mapped = MappedRings()
    writer = SharedRingBuffer.create(slots=2, slot_bytes=100)
    made = view(mapped, writer.write_raw(noise(100)))
    file = segment_file(writer)
    writer.native.close()  # as the kernel ends a killed one's
    assert np.array_equal(look(made), noise(100))
    mapped.close()
    assert file.exists()
    del made
    assert not file.exists()


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
def test_a_process_that_ends_with_views_in_hand_has_consumed_them_and_leaves_nothing(closed: bool) -> None:
    code = f"""
import sys
import numpy as np
from transport import Ticket
from transport.client.mapped import MappedRings
from transport.client.payload import ReceivedPayload
mapped = MappedRings()
views = []
while line := sys.stdin.readline().strip():
    ticket = Ticket.parse(line)
    views.append(np.frombuffer(mapped.read(mapped.find(ticket), ticket, 0, consume=ticket.slot > 0), np.uint8))
    print(views[-1].sum(), flush=True)
if {closed}:
    mapped.close()
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


def test_a_process_that_ends_last_with_a_view_in_hand_removes_the_segment() -> None:
    code = """
import sys
from transport import Ticket
from transport.client.mapped import MappedRings
from transport.client.payload import ReceivedPayload
mapped = MappedRings()
ticket = Ticket.parse(sys.stdin.readline())
view = mapped.read(mapped.find(ticket), ticket, 0, consume=True)
print(bytes(view).hex(), flush=True)
sys.stdin.readline()
"""
    with Child(code) as child:
        ring = SharedRingBuffer.create(slots=2, slot_bytes=100)
        file = segment_file(ring)
        child.tell(ring.write_raw(noise(100)).to_text())
        assert child.line() == noise(100).tobytes().hex()
        ring.native.close()  # as the kernel ends a killed one's
        assert file.exists()
        child.tell()
        assert child.wait() == 0
        assert not file.exists()


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
    assert ring.statistics().consumes == 0
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", body], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
