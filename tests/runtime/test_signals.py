"""A rollout worker that a scheduler takes away: SIGTERM, a grace budget, and what becomes of unread payloads."""

from __future__ import annotations

import signal

import pytest
from helpers import Child

from transport import BlockingClient, Settings, Ticket, _ring
from transport.errors import TransportError

WORKER = """
import sys
from transport import RingOptions, UCXXRolloutMixin
from transport.runtime.signals import until_stopped

class Worker(UCXXRolloutMixin): ...

with until_stopped() as stopped:
    worker = Worker()
    worker.setup_ucxx(slots=4, ring=RingOptions(slot_bytes=64))
    for step in range(3):
        print(worker.write_to_buffer({"step": step}).to_text(), flush=True)
    print(worker.ring.name, flush=True)
    stopped.wait()
    worker.cleanup_ucxx(drain_s=float(sys.argv[1]))
"""

pytestmark = pytest.mark.ucx


def test_within_its_budget_everything_unread_is_still_read() -> None:
    with Child(WORKER, 60) as worker:
        tickets = [Ticket.parse(worker.line()) for _ in range(3)]
        segment = worker.line()
        worker.process.send_signal(signal.SIGTERM)
        with BlockingClient(wire={"tcp"}) as client:
            for step, ticket in enumerate(tickets):
                assert int(client.read(ticket)["step"]) == step
        assert worker.wait() == 0  # long before the budget is over
    assert segment not in _ring.segments()


def test_without_a_budget_it_goes_at_once_and_leaves_nothing() -> None:
    with Child(WORKER, 0) as worker:
        tickets = [Ticket.parse(worker.line()) for _ in range(3)]
        segment = worker.line()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
    assert segment not in _ring.segments()
    impatient = Settings(attempts_per_read=1, backoff_first_s=0.01, backoff_most_s=0.01)
    with BlockingClient(wire={"tcp"}, settings=impatient) as client, pytest.raises(TransportError):
        client.read(tickets[0])
