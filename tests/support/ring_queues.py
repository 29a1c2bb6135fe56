"""The conformance suite over rings: what it publishes becomes payloads, and claims show the suite's names.

The suite publishes tickets with ids and bytes of its own. Here each becomes a payload that carries the bytes in its
metadata. A claim of the suite is for what there is at the moment; where payloads come over the network, it waits until
nothing more is on its way.
"""

from __future__ import annotations

import base64
import secrets
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from helpers import eventually
from queue_conformance import QueueConformance
from queue_waits import QueuedTicket

from transport import SharedRingBuffer, UCXXServer
from transport.claims.looks import known_of
from transport.claims.places import Discovery, OnThisHost
from transport.queue import Claim, DeliveryState, Failure, FoundRings
from transport.settings import Settings
from transport.ticket import Ticket


class Names:
    """The suite's id of each payload, and back."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}
        self.own: dict[str, str] = {}
        self.lock = threading.Lock()  # a payload may be claimed before its name is written down


class Named(FoundRings):
    """In front of a queue of rings: writes what it is told to publish, under the names of whoever published it."""

    ring: SharedRingBuffer
    names: Names

    def publish(
        self,
        tickets: QueuedTicket | Iterable[QueuedTicket],
        *,
        readers: int = 1,
        policy_version: int | None = None,
    ) -> int:
        self._check_open()
        new = 0
        for item in [tickets] if isinstance(tickets, QueuedTicket) else tickets:
            with self.names.lock:
                new += self._publish(item, readers, policy_version)
        return new

    def _publish(self, item: QueuedTicket, readers: int, policy_version: int | None) -> bool:
        if item.id in self.names.own:
            return False
        [written] = self.ring.write_many(
            [{"data": np.zeros(1, np.uint8)}],
            readers=readers,
            metadata={"data": base64.b64encode(item.data).decode()},
            policy_version=policy_version,
        )
        name = f"{written.ring}/{written.slot}/{written.generation}"
        self.names.given[name], self.names.own[item.id] = item.id, name
        return True

    def _shown(self, claim: Claim) -> Claim:
        data = base64.b64decode(str(Ticket.decode(claim.data).metadata["data"]))
        with self.names.lock:
            return msgspec.structs.replace(claim, ticket_id=self.names.given[claim.ticket_id], data=data)

    def claim(self, *arguments: Any, **keywords: Any) -> list[Claim]:
        return [self._shown(claim) for claim in super().claim(*arguments, **keywords)]

    def _own(self, claim: Claim) -> Claim:
        return msgspec.structs.replace(claim, ticket_id=self.names.own[claim.ticket_id])

    def _translated(self, claims: Sequence[Claim], kept: list[Claim]) -> list[Claim]:
        left = [(one.ticket_id, one.rank, one.attempts) for one in kept]
        translated = []
        for claim in claims:
            own = (self.names.own[claim.ticket_id], claim.rank, claim.attempts)
            if own in left:
                left.remove(own)
                translated.append(claim)
        return translated

    def ack_many(self, claims: Sequence[Claim]) -> list[Claim]:
        return self._translated(claims, super().ack_many([self._own(one) for one in claims]))

    def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        return self._translated(claims, super().renew([self._own(one) for one in claims]))

    def retry_many(self, claims: Sequence[Claim], delay_s: float = 0.0, reason: str = "") -> list[Claim]:
        return self._translated(claims, super().retry_many([self._own(one) for one in claims], delay_s, reason))

    def discard(self, claim: Claim, reason: str) -> bool:
        return super().discard(self._own(claim), reason)

    def failures(self, limit: int = 100) -> list[Failure]:
        found = super().failures(limit)
        return [msgspec.structs.replace(one, ticket_id=self.names.given.get(one.ticket_id, "")) for one in found]

    def known(self, ticket_ids: Iterable[str]) -> dict[str, tuple[DeliveryState, ...]]:
        names = {self.names.own[each]: each for each in ticket_ids if each in self.names.own}
        endings = {(self.names.own.get(one.ticket_id, ""), one.rank): one.state for one in self.failures(1 << 30)}
        found = known_of([self.ring], names)
        return {
            names[each]: tuple(endings.get((each, rank), state) for rank, state in enumerate(states))
            for each, states in found.items()
        }


class NamedRings(Named):
    def __init__(self, ring: SharedRingBuffer, names: Names, max_deliveries: int) -> None:
        super().__init__(Discovery(), max_deliveries=max_deliveries)
        self.hand_out(ring)
        self.ring = ring
        self.names = names


class NamedFound(Named):
    def __init__(self, ring: SharedRingBuffer, names: Names, prefix: str, max_deliveries: int) -> None:
        super().__init__(OnThisHost(prefix), max_deliveries=max_deliveries)
        self.ring = ring
        self.names = names

    def claim(self, n: int, timeout_s: float = 0.0, *, rank: int = 0, **keywords: Any) -> list[Claim]:  # type: ignore[override]
        claims = super().claim(n, timeout_s, rank=rank, **keywords)
        while len(claims) < n and not (claims and timeout_s) and self._coming(rank):
            claims += super().claim(n - len(claims), 0.01, rank=rank, **keywords)
        return claims

    def _coming(self, rank: int) -> bool:
        """Whether more than what has been claimed is ready, or on its way."""
        depth = self.ring.native.depth(rank)
        held = self._network.depth(rank, set())["claimed"]
        here = sum(
            holder >= 0
            for each in self._here._attached.values()
            for holder in [each.native.claim_word(slot, rank)[0] for slot in range(each.slot_count)]
        )
        return bool(depth["ready"] or depth["claimed"] > held + here)


class RingHarness:
    """One ring, its writer, and one reader that all queues of a test share, as threads of one process do."""

    def __init__(self) -> None:
        self.names = Names()
        self.ring = SharedRingBuffer.create(slots=2048, slot_bytes=64)
        self.reader = SharedRingBuffer.attach(self.ring.name, role="writer")
        self.queues: list[Any] = []

    def open(self, *, max_deliveries: int = 20) -> NamedRings:
        queue = NamedRings(self.reader, self.names, max_deliveries)
        self.queues.append(queue)
        return queue

    def lose_the_holder(self) -> None:
        self.reader.close()
        self.reader = SharedRingBuffer.attach(self.ring.name, role="writer")

    def close(self) -> None:
        for queue in self.queues:
            queue.close()
        self.reader.close()
        self.ring.close()


class FoundHarness:
    """One ring with a listener, and queues that find it; ``wires`` as TRANSPORT_WIRES has them."""

    def __init__(self) -> None:
        self.names = Names()
        self.prefix = f"conformance-{secrets.token_hex(4)}-"
        self.ring = SharedRingBuffer.create(prefix=self.prefix, slots=2048, slot_bytes=64)
        self.server = UCXXServer(self.ring, mode="thread", settings=Settings(), addresses=("127.0.0.1",))
        self.server.__enter__()
        self.queues: list[NamedFound] = []

    def open(self, *, max_deliveries: int = 20) -> NamedFound:
        queue = NamedFound(self.ring, self.names, self.prefix, max_deliveries)
        self.queues.append(queue)
        return queue

    def lose_the_holder(self) -> None:
        """Every attachment and every connection so far is gone; the queues stay open, and find the ring again."""
        for queue in self.queues:
            for ring in list(queue._here._attached.values()):
                ring.close()
            for rank in queue._network._ranks.values():
                rank.wanted = None
                rank.demands._loop.call_soon_threadsafe(_cut, rank.demands)
        eventually(self._nothing_is_held, "what was held is anybody's")

    def _nothing_is_held(self) -> bool:
        depths = [self.ring.native.depth(rank) for rank in range(3)]
        return not any(depth["claimed"] for depth in depths)

    def close(self) -> None:
        for queue in self.queues:
            queue.close()
        self.server.close()
        self.ring.close()


def _cut(demands: Any) -> None:
    demands.want(0, 1, None)  # nothing is asked for until somebody claims again
    for link in demands.connections:
        link.abort()


class RingConformance(QueueConformance):
    """What is different with rings: see the properties of the suite."""

    has_notices = False
