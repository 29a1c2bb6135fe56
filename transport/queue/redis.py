"""Ticket queue on a Redis server, for the processes of a cluster. See base.py for the contract of a queue.

Tickets stand in a stream, and each rank is a consumer group of it: what a rank has not been given yet is where its
group stands, so publishing costs the same for one reader and for sixteen, and ``XINFO`` and ``XPENDING`` show who has
what. Around that, all in scripts, stands what streams lack:

* Leases are a sorted set by their end, not the idle time that XAUTOCLAIM judges by, which says nothing of a claimant
  that renews; the clock is the server's, and a claim may outlive any number of commands.
* XACK asks for no proof. A claim's token is compared first; it has a random part, so that a claim made again after the
  append-only file lost its end is another one.
* What comes back (a retry, the end of a lease) stands in a sorted set by its place in the stream, which is before all
  that was never claimed. A group has no way back.
* The stream is never trimmed, since MAXLEN would take unread entries: a ticket leaves it when its last rank is done.
  ``max_tickets`` is the bound, and publishing beyond it raises QueueFullError.

While the server is unreachable, leases cannot be renewed: those that end meanwhile have ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transport.errors import (
    QueueError,
    QueueFullError,
    QueueUnavailableError,
    QueueUnsuitableError,
)
from transport.queue import arguments
from transport.queue.base import (
    KEEP_FINISHED,
    MAX_DELIVERIES,
    Claim,
    DeliveryState,
    Failure,
    FirstAnnouncements,
    Notice,
    QueueAddress,
    QueueDepth,
    QueuedTicket,
    TicketQueue,
)
from transport.queue.redis_scripts import (
    ANNOUNCE,
    CLAIM,
    DEPTH,
    FAILURES,
    KEYS,
    KNOWN,
    LATEST,
    MOVE,
    NEXT_DUE,
    PUBLISH,
    RENEW,
    REQUEUE,
    UNFINISHED,
)
from transport.runtime.arguments import at_least, several
from transport.storage.notify import wait_for
from transport.storage.redis_connection import RedisConnection, Script, Words
from transport.storage.urls import RedisURL

RECHECK_S = 1.0  # a wake-up may be lost with a connection, and the end of a lease causes no wake-up
_IDS_PER_QUERY = 1000

_LOST = "acknowledgements, and payloads are trained on twice"
_WORDS = Words("queue", _LOST, QueueError, QueueFullError, QueueUnavailableError, QueueUnsuitableError)


class RedisQueue(TicketQueue):
    """The queue of one run on a server.

    Args:
        url: server and run, see `parse_url`.
        lease_s: how long a claim is its claimant's without renewal; None: what the operator configured
            (``claim_lease_s``).
        max_deliveries: claims in vain after which a delivery is dead.
        max_tickets: unfinished tickets beyond which publishing raises QueueFullError. None: the server's memory.
        keep_finished: how many finished tickets are remembered (about 200 bytes each), and with each how its claims
            ended. A program that repeats `ack_many` behind so many others is refused.
        patience_s: how long to wait for a server that is away before QueueUnavailableError.
        clock: seconds that leases are measured with; None: the server's own.
    """

    def __init__(
        self,
        url: RedisURL,
        *,
        lease_s: float | None = None,
        max_deliveries: int = MAX_DELIVERIES,
        max_tickets: int | None = None,
        keep_finished: int = KEEP_FINISHED,
        patience_s: float = 10.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.lease_s = arguments.lease(lease_s)
        self._max_deliveries, self._keep_finished = arguments.bounds(max_deliveries, keep_finished)
        self._max_tickets = None if max_tickets is None else at_least(1, max_tickets, "max_tickets")
        self._clock = clock
        self._url = url
        self._options: dict[str, int | float | None] = {
            "max_deliveries": self._max_deliveries,
            "max_tickets": self._max_tickets,
            "keep_finished": self._keep_finished,
            "patience_s": patience_s,
        }
        self._connection = RedisConnection(url, "queue", _WORDS, patience_s=patience_s)
        self._announced = FirstAnnouncements()

    def __repr__(self) -> str:
        return f"<RedisQueue {self._connection.name} {'closed' if self._connection.closed else 'open'}>"

    @property
    def name(self) -> str:
        return f"{type(self).__name__} {self._url.run}"

    @property
    def address(self) -> QueueAddress | None:
        """How another process opens the same queue; None for a subclass, or with a clock of its own."""
        if type(self) is not RedisQueue or self._clock is not None:
            return None
        return QueueAddress(url=self._url, options=self._options)

    def close(self) -> None:
        """Close the connections and end waits in other threads with ClosedError. The tickets stay."""
        self._connection.close()

    def remove(self) -> None:
        """Delete the queue with all its tickets from the server. It must not be in use."""
        self._connection.remove_all()

    def _run(self, script: Script, *arguments: str | bytes | int) -> list[bytes | int]:
        now_ms = None if self._clock is None else round(self._clock() * 1000)
        common = (self._connection.channel, self._max_deliveries, self._keep_finished)
        answer = self._connection.run(script, KEYS, (*common, *arguments), now_ms)
        return answer if isinstance(answer, list) else [answer]

    # --- publishing ----------------------------------------------------------------------------
    def publish(
        self,
        tickets: QueuedTicket | Iterable[QueuedTicket],
        *,
        readers: int = 1,
        policy_version: int | None = None,
    ) -> int:
        """Store tickets for ranks 0..readers-1, all or none. Known ids are skipped; returns how many were new."""
        batch, readers, policy_version = arguments.published(tickets, readers, policy_version)
        words: list[str | bytes] = [word for ticket in batch for word in (ticket.id, ticket.data)]
        version = "" if policy_version is None else str(policy_version)
        bound = "" if self._max_tickets is None else str(self._max_tickets)
        new = int(self._run(PUBLISH, readers, version, bound, *words)[0])
        if new < 0:
            raise QueueFullError(
                f"the queue at {self._connection.name} takes {self._max_tickets} unfinished tickets, and these "
                f"{len(batch)} do not fit: publish fewer in one call, or again when trainers have finished some"
            )
        return new

    def known(self, ticket_ids: Iterable[str]) -> dict[str, tuple[DeliveryState, ...]]:
        """State per rank of each ticket that the queue knows; ids it does not know are absent (publish them again)."""
        wanted = several(ticket_ids, "known()")
        states: dict[str, tuple[DeliveryState, ...]] = {}
        for start in range(0, max(1, len(wanted)), _IDS_PER_QUERY):
            part = wanted[start : start + _IDS_PER_QUERY]
            for ticket_id, names in zip(part, self._run(KNOWN, *part), strict=True):
                if isinstance(names, bytes) and names:
                    states[ticket_id] = tuple(DeliveryState(name) for name in names.decode().split())
        return states

    # --- claiming ------------------------------------------------------------------------------
    def claim(
        self, n: int, timeout_s: float = 0.0, *, rank: int | str = 0, consumer: str, oldest_version: int | None = None
    ) -> list[Claim]:
        """Up to ``n`` deliveries of ``rank``, the oldest first; waits for the first one up to ``timeout_s``."""
        n, timeout_s, rank, oldest_version = arguments.claimed(n, timeout_s, rank, oldest_version)

        def recheck_s() -> float:
            due_ms = int(self._run(NEXT_DUE, rank)[0])
            return RECHECK_S if due_ms < 0 else min(RECHECK_S, due_ms / 1000)

        return (
            wait_for(
                self._connection,
                lambda: self._try_claim(n, rank, consumer, oldest_version) or None,
                timeout_s,
                recheck_s,
            )
            or []
        )

    def _try_claim(self, n: int, rank: int, consumer: str, oldest_version: int | None) -> list[Claim]:
        lease_ms, random = round(self.lease_s * 1000), secrets.token_hex(8)
        oldest = "" if oldest_version is None else str(oldest_version)
        flat = self._run(CLAIM, rank, n, consumer, lease_ms, random, oldest)
        rows = zip(*(iter(flat),) * 5, strict=True)
        return [
            Claim(_text(ticket_id), _bytes(data), rank, int(attempts), _text(token), int(version) if version else None)
            for ticket_id, data, attempts, token, version in rows
        ]

    def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        """Restart the lease; returns the claims that the caller still owns."""
        claims = arguments.held(claims, "renew")
        return self._accepted(claims, self._run(RENEW, round(self.lease_s * 1000), *_tokens(claims)))

    # --- finishing -----------------------------------------------------------------------------
    def ack_many(self, claims: Sequence[Claim]) -> list[Claim]:
        """Consume; returns the claims that the caller still owned. Train only on the returned ones."""
        return self._move(arguments.held(claims, "ack"), "done")

    def discard(self, claim: Claim, reason: str) -> bool:
        """Discard the delivery: its payload cannot or should not be read. False if not owned."""
        return bool(self._move([claim], "discarded", reason))

    def retry_many(self, claims: Sequence[Claim], delay_s: float = 0.0, reason: str = "") -> list[Claim]:
        listed, delay_s = arguments.held(claims, "retry"), arguments.delayed(delay_s, "retry")
        return self._move(listed, "ready", reason, delay_s) if listed else []

    def _move(self, claims: Sequence[Claim], to: str, reason: str = "", delay_s: float = 0.0) -> list[Claim]:
        """End claims so; returns those that were the caller's."""
        arguments = (to, reason, round(delay_s * 1000), *_tokens(claims))
        return self._accepted(claims, self._run(MOVE, *arguments))

    @staticmethod
    def _accepted(claims: Sequence[Claim], flags: Sequence[bytes | int]) -> list[Claim]:
        return [claim for claim, flag in zip(claims, flags, strict=True) if flag]

    # --- looking -------------------------------------------------------------------------------
    def depth(self, rank: int | None = None) -> QueueDepth:
        """Counts of one rank, or of all."""
        rank = arguments.number_or_none(rank, "rank of depth()")
        flat = self._run(DEPTH)
        counts: dict[str, int] = {}
        for field, amount in zip(flat[::2], flat[1::2], strict=True):
            of_rank, _, name = _text(field).partition("/")
            if rank is None or int(of_rank) == rank:
                counts[name] = counts.get(name, 0) + int(amount)
        return QueueDepth(**counts)

    def failures(self, limit: int = 100) -> list[Failure]:
        """The last deliveries that were discarded or died, the latest published first."""
        limit = arguments.most(limit, "limit of failures()")
        rows = zip(*(iter(self._run(FAILURES, limit)),) * 6, strict=True)
        return [
            Failure(
                _text(ticket_id), int(rank), DeliveryState(_text(state)), int(attempts), _text(consumer), _text(reason)
            )
            for ticket_id, rank, state, attempts, consumer, reason in rows
        ]

    def requeue(self, limit: int = 100) -> int:
        """Have up to ``limit`` dead deliveries claimed once more, the first published first; returns how many."""
        return int(self._run(REQUEUE, arguments.most(limit, "limit of requeue()"))[0])

    def unfinished(self, n: int) -> list[bytes]:
        return [_bytes(data) for data in self._run(UNFINISHED, arguments.most(n, "n of unfinished()"))]

    # --- notices -------------------------------------------------------------------------------
    def announce(self, topic: str, version: int, payload: bytes = b"") -> bool:
        """Replace the topic's notice, unless it has this version or a later one (then False)."""
        version = arguments.number(version, "version of announce()")
        accepted = bool(self._run(ANNOUNCE, topic, version, payload)[0])
        return self._announced.answer(topic, version, accepted, lambda: self.latest(topic, version))

    def latest(self, topic: str, newer_than: int | None = None, timeout_s: float = 0.0) -> Notice | None:
        """The topic's notice if later than ``newer_than``; waits for one up to ``timeout_s``."""
        newer_than, timeout_s = arguments.waited_for(newer_than, timeout_s)

        def look() -> Notice | None:
            version, payload = self._run(LATEST, topic)
            if not isinstance(payload, bytes) or (newer_than is not None and int(version) <= newer_than):
                return None
            return Notice(topic, int(version), payload)

        return wait_for(self._connection, look, timeout_s, lambda: RECHECK_S)


def open_address(address: QueueAddress) -> RedisQueue:
    """Open the queue whose `TicketQueue.address` this is. Raises what `open_queue` raises."""
    options: dict[str, Any] = dict(address.options)
    return RedisQueue(address.url, **options)


def _tokens(claims: Sequence[Claim]) -> list[str | int]:
    return [word for claim in claims for word in (claim.token, claim.rank)]


def _text(word: bytes | int) -> str:
    return _bytes(word).decode()


def _bytes(word: bytes | int) -> bytes:
    assert isinstance(word, bytes)
    return word
