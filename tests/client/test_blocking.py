"""BlockingClient: the client for code without a loop, against a real listener."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from helpers import NETWORK, Child, eventually, free, noise, serving

from transport import SharedRingBuffer, UCXXServer
from transport.client.blocking import BlockingClient
from transport.errors import ClosedError, TicketError, UsageError
from transport.wire.frames import SlotFate

pytestmark = pytest.mark.ucx


@pytest.fixture
def served() -> Iterator[tuple[SharedRingBuffer, UCXXServer]]:
    with serving(slots=32, slot_bytes=70_000) as both:
        yield both


@pytest.fixture
def ring(served: tuple[SharedRingBuffer, UCXXServer]) -> SharedRingBuffer:
    return served[0]


@pytest.fixture
def client(ring: SharedRingBuffer) -> Iterator[BlockingClient]:
    with BlockingClient(wire=NETWORK, ack="manual") as made:
        yield made


def test_read_waits_for_the_payload_and_fills_what_it_is_given(ring: SharedRingBuffer, client: BlockingClient) -> None:
    ticket, out = ring.write_raw(noise(20_000), readers=2), bytearray(20_000)
    assert np.array_equal(client.read(ticket)["data"], noise(20_000))
    assert client.read(ticket, out, rank=1).data is out
    assert out == noise(20_000).tobytes()
    assert client.statistics().reads == 2


def test_a_tickets_text_is_as_good_as_the_ticket(ring: SharedRingBuffer, client: BlockingClient) -> None:
    tickets = [ring.write_raw(noise(100, seed)) for seed in range(4)]
    out = bytearray(100)
    assert bytes(client.read(tickets[0].to_text(), out).data) == noise(100, 0).tobytes()
    forms = [tickets[1].to_text(), tickets[2].encode(), tickets[3]]
    outcomes = list(client.read_many(forms))
    assert sorted(outcome.ticket.slot for outcome in outcomes) == sorted(ticket.slot for ticket in tickets[1:])
    assert all(outcome.payload for outcome in outcomes)
    assert client.state(tickets[1].to_text()) is SlotFate.READABLE
    assert client.ack(tickets[1].to_text())
    assert client.discard(ring.write_raw(b"x").to_text(), timeout=15.0)
    for use in (client.read, client.ack, client.discard, client.state, lambda wrong: list(client.read_many([wrong]))):
        with pytest.raises(TicketError, match="a int is not a ticket"):
            use(3)  # type: ignore[arg-type]


def test_payloads_of_one_message_are_handed_over_in_one_turn_of_the_loop(
    ring: SharedRingBuffer, client: BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets, turns = [ring.write_raw(noise(1000, seed)) for seed in range(24)], 0
    run = client._thread.run

    def counted(*arguments: Any) -> Any:
        nonlocal turns
        turns += 1
        return run(*arguments)

    monkeypatch.setattr(client._thread, "run", counted)
    assert sorted(outcome.index for outcome in client.read_many(tickets)) == list(range(24))
    assert turns < 12


def test_what_is_wrong_in_the_client_itself_is_raised_after_what_has_come(
    ring: SharedRingBuffer, client: BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = ring.write_raw(noise(10)), ring.write_raw(noise(69_000))  # a message each
    reads = client._client._reads
    read_group = reads._read_group

    async def fails(group: Any, *arguments: Any) -> Any:
        if group[0][1] == large:
            raise ZeroDivisionError
        return await read_group(group, *arguments)

    monkeypatch.setattr(reads, "_read_group", fails)
    outcomes = client.read_many([small, large], concurrency=1)
    assert next(outcomes).ticket == small
    with pytest.raises(ZeroDivisionError):
        next(outcomes)


def test_payloads_are_acknowledged_discarded_and_asked_about(ring: SharedRingBuffer, client: BlockingClient) -> None:
    acked, discarded = (ring.write_raw(noise(100, seed)) for seed in range(2))
    client.read(acked)
    assert client.ack(acked)
    assert client.state(discarded) is SlotFate.READABLE
    assert client.discard(discarded, timeout=15.0)
    assert not client.discard(discarded)
    assert client.state(discarded, timeout=15.0) is SlotFate.GONE
    eventually(lambda: free(ring))
    assert client.state(acked) is SlotFate.GONE


def test_threads_share_a_client(ring: SharedRingBuffer, client: BlockingClient) -> None:
    tickets = [ring.write_raw(noise(70_000, seed)) for seed in range(32)]
    together = threading.Barrier(4)

    def read(start: int) -> list[bool]:
        together.wait()
        return [np.array_equal(client.read(tickets[seed])["data"], noise(70_000, seed)) for seed in range(start, 32, 4)]

    with ThreadPoolExecutor(4) as pool:
        assert all(all(found) for found in pool.map(read, range(4)))
    assert client.statistics().reads == 32


def test_close_ends_the_thread_may_be_repeated_and_nothing_is_read_afterwards(ring: SharedRingBuffer) -> None:
    before = threading.active_count()
    client = BlockingClient(wire=NETWORK)
    ticket = ring.write_raw(b"x")
    kept = client.read(ticket)["data"]
    unfinished = client.read_many([ring.write_raw(noise(10, seed)) for seed in range(3)])
    next(unfinished)
    assert threading.active_count() > before
    client.close()
    client.close()
    assert threading.active_count() == before
    for use in (lambda: client.read(ticket), lambda: client.ack(ticket)):
        with pytest.raises(ClosedError):
            use()
    assert client.statistics().reads >= 2  # as at its end
    unfinished.close()
    assert bytes(kept) == b"x"


def test_arguments_that_the_client_refuses_leave_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(UsageError):
        BlockingClient(wire={"pigeon"})
    assert threading.active_count() == before


# --- the end of the process --------------------------------------------------------------------------
LEFT_OPEN = """
import os, sys, threading
from transport import Ticket
from transport.client.blocking import BlockingClient
from transport.errors import ClosedError
ticket, how = Ticket.parse(sys.argv[1]), sys.argv[2]
client = BlockingClient(wire={"tcp"}, ack="manual")
client.read(ticket)
reading = threading.Semaphore(0)
def read_on():
    try:
        while True:
            client.read(ticket)
            reading.release()
    except ClosedError:
        pass
"""


def test_a_client_left_open_does_not_disturb_the_processes_exit(ring: SharedRingBuffer) -> None:
    code = f"""{LEFT_OPEN}
for _ in range(2):
    threading.Thread(target=read_on, daemon=True).start()
for _ in range(20):
    reading.acquire()
print("main done", flush=True)
"""
    ticket = ring.write_raw(noise(1000))
    with Child(code, ticket.to_text(), "") as child:
        assert child.line() == "main done"
        assert child.wait() == 0


def test_an_acknowledgement_of_a_client_left_open_is_sent_at_the_processes_exit(ring: SharedRingBuffer) -> None:
    code = f"""{LEFT_OPEN}
client.ack(ticket)
print("main done", flush=True)
"""
    ticket = ring.write_raw(noise(1000))
    with Child(code, ticket.to_text(), "") as child:
        assert child.line() == "main done"
        assert child.wait() == 0
    eventually(lambda: free(ring))


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("how", ["close", "del"])
def test_a_forked_child_has_no_client_and_leaves_its_parents_alone(ring: SharedRingBuffer, how: str) -> None:
    code = f"""{LEFT_OPEN}
pid = os.fork()
if pid == 0:
    if how == "close":
        client.close()
    elif how == "del":
        del client
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(client.read(ticket, timeout=10.0).data), flush=True)
"""
    ticket = ring.write_raw(noise(1000))
    with Child(code, ticket.to_text(), how) as child:
        assert child.line() == "7 1000"
        assert child.wait() == 0
