"""What the conformance suite of ticket queues works with: a harness with a clock, and how mechanisms differ.

The harness opens queues on one store (``open``) and moves their clock (``advance``), so that no test sleeps. A
mechanism that keeps the contract in another way by design says so by a property of the suite, and the tests compare
accordingly.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import pytest
from queue_waits import QueueWaits, ticket

from transport.queue import Claim, DeliveryState, QueueDepth, QueuedTicket, TicketQueue

READY, CLAIMED = DeliveryState.READY, DeliveryState.CLAIMED
DONE, DISCARDED, DEAD = DeliveryState.DONE, DeliveryState.DISCARDED, DeliveryState.DEAD

LEASE_S = 60.0


class Harness(Protocol):
    """One store, its clock, and the queues opened on it."""

    def open(self, *, max_deliveries: int = 20) -> TicketQueue: ...
    def advance(self, seconds: float) -> None: ...
    def close(self) -> None: ...


def tickets(count: int) -> list[QueuedTicket]:
    return [ticket(number) for number in range(count)]


def ids(claims: list[Claim]) -> list[str]:
    return [claim.ticket_id for claim in claims]


class QueueSuite(QueueWaits):
    keeps_dead = True  # what died can be had again
    stores_tickets = True  # any ticket can be put in; else a payload is in its ring, and another ring's is refused
    has_leases = True  # a claim ends with its lease; else with its holder, whatever the time
    takes_ahead = False  # payloads come before they are claimed: they count as claimed, and come in the next claims

    @pytest.fixture
    def queue(self, harness: Harness) -> TicketQueue:
        return harness.open()

    def end_claims(self, harness: Harness) -> None:
        if self.has_leases:
            harness.advance(LEASE_S)
        else:
            harness.lose_the_holder()  # type: ignore[attr-defined]

    def same_depth(self, found: QueueDepth, **counts: int) -> bool:
        wanted = QueueDepth(**counts)
        if self.takes_ahead:
            found, wanted = (
                msgspec.structs.replace(each, ready=0, claimed=each.ready + each.claimed) for each in (found, wanted)
            )
        return found == wanted

    def ready(self, state: DeliveryState) -> bool:
        return state is READY or (self.takes_ahead and state is CLAIMED)
