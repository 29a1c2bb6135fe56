"""What the conformance suite of queues works with: a harness, and how mechanisms differ.

The harness opens queues on the same rings (``open``). A mechanism that keeps the contract in another way by design says
so by a property of the suite, and the tests compare accordingly.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import pytest
from queue_waits import QueuedTicket, QueueWaits, ticket

from transport.queue import Claim, DeliveryState, QueueDepth

READY, CLAIMED = DeliveryState.READY, DeliveryState.CLAIMED
DONE, DISCARDED, DEAD = DeliveryState.DONE, DeliveryState.DISCARDED, DeliveryState.DEAD


class Harness(Protocol):
    """Rings, and the queues opened on them."""

    def open(self, *, max_deliveries: int = 20) -> Any: ...
    def lose_the_holder(self) -> None: ...
    def close(self) -> None: ...


def tickets(count: int) -> list[QueuedTicket]:
    return [ticket(number) for number in range(count)]


def ids(claims: list[Claim]) -> list[str]:
    return [claim.ticket_id for claim in claims]


class QueueSuite(QueueWaits):
    takes_ahead = False  # payloads come before they are claimed: they count as claimed, and come in the next claims

    @pytest.fixture
    def queue(self, harness: Harness) -> Any:
        return harness.open()

    def same_depth(self, found: QueueDepth, **counts: int) -> bool:
        wanted = QueueDepth(**counts)
        if self.takes_ahead:
            found, wanted = (
                msgspec.structs.replace(each, ready=0, claimed=each.ready + each.claimed) for each in (found, wanted)
            )
        return found == wanted

    def ready(self, state: DeliveryState) -> bool:
        return state is READY or (self.takes_ahead and state is CLAIMED)
