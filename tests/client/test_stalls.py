"""A peer that is stopped, not dead, is left in time: its process keeps its connections, and says nothing."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from helpers import (
    NETWORK,
    Child,
    asynchronous,
    eventually,
    listener_pids,
    noise,
    settings_with,
    state_of,
    states,
    until,
)
from loopback import LOOPBACK
from patience import PATIENCE

from transport import SharedRingBuffer, UCXXClient, UCXXServer
from transport.errors import DeadlineExceededError
from transport.testing import run

pytestmark = pytest.mark.ucx

SIZE = 48 << 20  # by rendezvous, and more than the sockets on the way hold
IMPATIENT = settings_with(
    ack_timeout_s=1.0 * PATIENCE, heartbeat_s=0.1, read_slowest_rate=1e9, watchdog_s=60.0 * PATIENCE
)

# Its first payload stops it as soon as the first byte is there.
READER = f"""
import asyncio, os, signal, sys, threading
from patience import settings
import msgspec, numpy as np, uvloop
from transport import Ticket, UCXXClient
from transport.errors import TransportError
# a slow host may lose some before the first byte, to the listener's impatience
patient = msgspec.structs.replace(settings.DEFAULTS, attempts_per_read=9)
out = np.zeros(int(sys.argv[1]), np.uint8)
def stop():
    while not out[0]:
        pass
    os.kill(os.getpid(), signal.SIGSTOP)
async def main():
    threading.Thread(target=stop, daemon=True).start()
    async with UCXXClient(wire={{"tcp"}}, ack="manual", settings=patient) as client:
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                payload = await client.read(Ticket.parse(line.strip()), out=out, timeout={20 * PATIENCE})
                print("read", payload.ack(), flush=True)
            except TransportError as error:
                print(type(error).__name__, flush=True)
uvloop.run(main())
"""


@pytest.mark.nightly
def test_a_client_that_stops_in_the_middle_of_a_payload_is_left_and_another_one_reads_it() -> None:
    with (
        SharedRingBuffer.create(slots=1, slot_bytes=SIZE) as ring,
        UCXXServer(ring, addresses=(LOOPBACK,), settings=IMPATIENT, log_level="ERROR"),
        Child(READER, SIZE) as stopped,
    ):
        data = noise(SIZE) | 1
        ticket = ring.write_raw(data)
        assert stopped.line() == "ready"
        stopped.tell(ticket.to_text())
        eventually(lambda: state_of(stopped.process.pid) == "T")
        eventually(lambda: states(ring) == (1, 0), "the listener has left it")

        async def reading() -> None:
            async with UCXXClient(wire=NETWORK) as client:
                assert bytes((await client.read(ticket)).data) == data.tobytes()

        run(reading())
        eventually(lambda: ring.statistics().free == 1)
        os.kill(stopped.process.pid, signal.SIGCONT)
        # perhaps it had all of the bytes before it was stopped: then its acknowledgement changes nothing
        assert stopped.line() in ("StaleSlotError", "read True")
        fresh = ring.write_raw(noise(SIZE, 1))
        stopped.tell(fresh.to_text())
        assert stopped.line() == "read True"
        eventually(lambda: ring.statistics().free == 1)
        assert ring.statistics().consumes == 2


@asynchronous
async def test_a_read_from_a_stopped_listener_ends_with_its_deadline_and_its_memory_is_not_written_later() -> None:
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=SIZE) as ring,
        UCXXServer(ring, addresses=(LOOPBACK,), settings=IMPATIENT, log_level="ERROR") as server,
    ):
        pid = listener_pids(ring)[server.ports[0]]
        async with UCXXClient(wire=NETWORK) as client:
            await client.read(ring.write_raw(noise(100)))
            ticket = ring.write_raw(noise(SIZE))
            out = bytearray(SIZE)
            reading = asyncio.create_task(client.read(ticket, out=out, timeout=1.5 * PATIENCE))
            await until(lambda: states(ring)[1] == 1)
            os.kill(pid, signal.SIGSTOP)
            try:
                outcome = (await asyncio.gather(reading, return_exceptions=True))[0]
            finally:
                os.kill(pid, signal.SIGCONT)
            # all of it may have been in the sockets by then
            assert isinstance(outcome, DeadlineExceededError) or bytes(out) == noise(SIZE).tobytes()
            if isinstance(outcome, DeadlineExceededError):
                out[:] = b"\xee" * SIZE
                assert bytes((await client.read(ticket)).data) == noise(SIZE).tobytes()
                assert out.count(0xEE) == SIZE
