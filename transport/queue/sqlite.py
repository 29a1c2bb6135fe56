"""Ticket queue in one SQLite file, for the processes of one host. See base.py for the contract of a queue.

Every operation is one transaction that first ends the expired leases, so what an operation sees
never depends on whether another process called before. Survives the death of any process at any instruction; a power
loss may cost the last transactions unless ``synchronous="FULL"``.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from transport.errors import QueueBusyError, QueueError, QueueFullError, QueueUnsuitableError
from transport.queue import arguments
from transport.queue.base import (
    KEEP_FINISHED,
    MAX_DELIVERIES,
    Claim,
    DeliveryState,
    Failure,
    Notice,
    QueueAddress,
    QueueDepth,
    QueuedTicket,
    TicketQueue,
    too_old,
)
from transport.queue.statements import sqlite as sql
from transport.runtime.explaining import explained_calls
from transport.storage.notify import wait_for
from transport.storage.shared_file import SharedFile
from transport.storage.sqlite_file import Synchronous, Words

APPLICATION_ID = 0x5452_5051  # "TRPQ"
SCHEMA_VERSION = 2
_WORDS = Words("queue", QueueError, QueueFullError, QueueBusyError, QueueUnsuitableError)

RECHECK_S = 1.0  # a wake-up may be lost with the process that sends it, and the end of a lease causes no wake-up
_MOST_ROWS = 64  # of one INSERT, with four parameters each
_PURGE_EVERY = 1000  # tickets published
_IDS_PER_QUERY = 500  # below the number of parameters that any SQLite takes


@explained_calls
class SQLiteQueue(SharedFile, TicketQueue):
    """A queue in the file ``path`` (with ``-wal``, ``-shm`` and ``.wake`` beside it), made where it does not exist.

    Args:
        path: on a local file system; its directory exists.
        lease_s: how long a claim is its claimant's without renewal; None: what the operator configured
            (``claim_lease_s``).
        max_deliveries: claims in vain after which a delivery is dead.
        synchronous: "FULL" survives a power loss and costs a disk flush per operation.
        max_bytes: bound on the file; beyond it publishing raises QueueFullError. None: the disk is the bound.
        keep_finished: how many finished tickets are remembered (about 200 bytes each).
        busy_timeout_s: how long to wait for other processes' transactions.
        clock: seconds of a clock that all processes of the host share.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        lease_s: float | None = None,
        max_deliveries: int = MAX_DELIVERIES,
        synchronous: Synchronous = "NORMAL",
        max_bytes: int | None = None,
        keep_finished: int = KEEP_FINISHED,
        busy_timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease_s = arguments.lease(lease_s)
        self._max_deliveries, self._keep_finished = arguments.bounds(max_deliveries, keep_finished)
        self._clock = clock
        self._published_since_purge = 0
        self._options: dict[str, int | float | str | None] = {
            "max_deliveries": self._max_deliveries,
            "synchronous": synchronous,
            "max_bytes": max_bytes,
            "keep_finished": self._keep_finished,
            "busy_timeout_s": busy_timeout_s,
        }
        self._open(
            path,
            schema=sql.SCHEMA,
            application_id=APPLICATION_ID,
            version=SCHEMA_VERSION,
            on_reboot=sql.ON_REBOOT,
            words=_WORDS,
            synchronous=synchronous,
            max_bytes=max_bytes,
            busy_timeout_s=busy_timeout_s,
        )

    @property
    def address(self) -> QueueAddress | None:
        """How another process opens the same queue; None for a subclass, or with a clock of its own."""
        if type(self) is not SQLiteQueue or self._clock is not time.monotonic:
            return None
        place = str(self.path)
        return QueueAddress(kind="sqlite", place=place, options=self._options) if place.isprintable() else None

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
        new = 0
        with self._database.transaction() as connection:
            ((last,),) = connection.execute(sql.LAST_SEQ)
            for part in _parts(batch):
                rows = ",".join(["(?, ?, ?, ?)"] * len(part))
                words = [word for ticket in part for word in (*ticket, policy_version, readers)]
                new += connection.execute(sql.PUBLISH.format(rows), words).rowcount
            for rank in range(readers if new else 0):
                connection.execute(sql.DELIVER, (rank, last))
            self._count(connection, {(rank, "ready"): new for rank in range(readers)})
            self._purge_sometimes(connection, new)
        self._bell.ring()
        return new

    def _purge_sometimes(self, connection: sqlite3.Connection, published: int) -> None:
        self._published_since_purge += published
        if self._published_since_purge >= min(_PURGE_EVERY, self._keep_finished):
            self._published_since_purge = 0
            connection.execute(sql.PURGE, (self._keep_finished,))

    def known(self, ticket_ids: Iterable[str]) -> dict[str, tuple[DeliveryState, ...]]:
        """State per rank of each ticket that the queue knows; ids it does not know are absent (publish them again)."""
        wanted = arguments.asked(ticket_ids)
        states: dict[str, tuple[DeliveryState, ...]] = {}
        with self._database.transaction() as connection:
            self._end_leases(connection)
            for start in range(0, len(wanted), _IDS_PER_QUERY):
                part = wanted[start : start + _IDS_PER_QUERY]
                places = ",".join("?" * len(part))
                query = (
                    f"SELECT id, state FROM tickets JOIN deliveries USING (seq) WHERE id IN ({places}) ORDER BY rank"
                )
                for ticket_id, state in connection.execute(query, part):
                    states[ticket_id] = (*states.get(ticket_id, ()), DeliveryState(state))
        return states

    def unfinished(self, n: int) -> list[bytes]:
        """See `TicketQueue.unfinished`."""
        n = arguments.number(n, "n of unfinished()")
        with self._database.reading() as connection:
            return [data for (data,) in connection.execute(sql.UNFINISHED, (n,))]

    # --- claiming ------------------------------------------------------------------------------
    def claim(
        self, n: int, timeout_s: float = 0.0, *, rank: int | str = 0, consumer: str, oldest_version: int | None = None
    ) -> list[Claim]:
        """Up to ``n`` deliveries of ``rank``, the oldest first; waits for the first one up to ``timeout_s``."""
        n, timeout_s, rank, oldest_version = arguments.claimed(n, timeout_s, rank, consumer, oldest_version)

        def recheck_s() -> float:
            with self._database.reading() as connection:
                (due_at,) = connection.execute(sql.NEXT_DUE, (rank,)).fetchone()
            return RECHECK_S if due_at is None else min(RECHECK_S, due_at - self._clock())

        return (
            wait_for(
                self._bell, lambda: self._try_claim(n, rank, consumer, oldest_version) or None, timeout_s, recheck_s
            )
            or []
        )

    def _try_claim(self, n: int, rank: int, consumer: str, oldest_version: int | None) -> list[Claim]:
        # Read before taking the write lock: many waiters wake for one ticket, and all but one find nothing.
        with self._database.reading() as connection:
            (due,) = connection.execute(sql.ANYTHING_DUE, {"rank": rank, "now": self._clock()}).fetchone()
        if not due:
            return []
        with self._database.transaction() as connection:
            now = self._end_leases(connection)
            rows: list[tuple[int, str, bytes, int, int | None]] = []
            while len(rows) < n:
                found = connection.execute(sql.OLDEST_READY, (rank, now, n - len(rows))).fetchall()
                if not found:
                    break
                aged = [row for row in found if None not in (row[4], oldest_version) and row[4] < oldest_version]
                kept = [row for row in found if row not in aged] if aged else found
                connection.execute(sql.CLAIM, (now + self.lease_s, consumer, rank, _json([row[0] for row in kept])))
                if aged:
                    reasons = [(consumer, too_old(row[4], oldest_version or 0), row[0], rank) for row in aged]
                    connection.executemany(sql.DISCARD_AGED, reasons)
                    connection.execute(sql.CLOSE, (_json([row[0] for row in aged]),))
                    self._count(connection, {(rank, "aged"): len(aged), (rank, "discarded"): len(aged)})
                self._count(connection, {(rank, "ready"): -len(found), (rank, "claimed"): len(kept)})
                rows += kept
        return [
            Claim(ticket_id, data, rank, attempts + 1, f"{seq}:{attempts + 1}", policy_version)
            for seq, ticket_id, data, attempts, policy_version in rows
        ]

    def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        """Restart the lease; returns the claims that the caller still owns, claimed or arrived."""
        claims = arguments.held(claims, "renew")
        with self._database.transaction() as connection:
            until = self._end_leases(connection) + self.lease_s
            return _owned(claims, connection.execute(sql.RENEW, (until, _keys(claims))))

    # --- finishing -----------------------------------------------------------------------------
    def ack_many(self, claims: Sequence[Claim], *, trained: bool = True) -> list[Claim]:
        """Consume; returns the claims that the caller still owned. Train only on the returned ones."""
        claims = arguments.held(claims, "ack")
        if trained:
            return self._move(claims, "claimed", "done")
        with self._database.transaction() as connection:
            self._end_leases(connection)
            arrived = _owned(claims, connection.execute(sql.ARRIVE, (_keys(claims),)))
            self._count_moved(connection, arrived, "claimed", "arrived")
        return arrived

    def finish(self, claims: Sequence[Claim]) -> list[Claim]:
        """Record that arrived deliveries were trained on; returns those that the caller still owned (not lost)."""
        claims = arguments.held(claims, "finish")
        return self._move(claims, "arrived", "done")

    def discard(self, claim: Claim, reason: str) -> bool:
        """Discard the delivery: its payload cannot or should not be read. False if not owned."""
        arguments.given_back(claim, 0.0, reason, "discard")
        return bool(self._move([claim], "claimed", "discarded", reason))

    def retry(self, claim: Claim, delay_s: float = 0.0, reason: str = "") -> bool:
        """Return a claim, to be claimed again after ``delay_s``; dead at the last delivery. False if not owned."""
        delay_s = arguments.given_back(claim, delay_s, reason, "retry")
        to = "ready" if claim.attempts < self._max_deliveries else "dead"
        given_back = self._move([claim], "claimed", to, reason, delay_s, count_as="retried")
        if given_back:
            self._bell.ring()
        return bool(given_back)

    def _move(
        self, claims: Sequence[Claim], held: str, to: str, reason: str = "", delay_s: float = 0.0, count_as: str = ""
    ) -> list[Claim]:
        """Bring claims from state ``held`` to ``to`` and end their leases; returns those that were the caller's."""
        with self._database.transaction() as connection:
            not_before = self._end_leases(connection) + delay_s
            moved = _owned(claims, connection.execute(sql.MOVE, (to, reason, not_before, _keys(claims), held)))
            if to != "ready" and moved:
                connection.execute(sql.CLOSE, (_json([_key(claim)[0] for claim in moved]),))
            self._count_moved(connection, moved, held, to, count_as)
        return moved

    def _count_moved(
        self, connection: sqlite3.Connection, moved: Sequence[Claim], held: str, to: str, count_as: str = ""
    ) -> None:
        counts: dict[tuple[int, str], int] = {}
        for rank, amount in Counter(claim.rank for claim in moved).items():
            counts |= {(rank, held): -amount, (rank, to): amount}
            if count_as:
                counts[rank, count_as] = amount
        self._count(connection, counts)

    @staticmethod
    def _count(connection: sqlite3.Connection, counts: Mapping[tuple[int, str], int]) -> None:
        connection.executemany(sql.COUNT, [(rank, name, amount) for (rank, name), amount in counts.items() if amount])

    def _end_leases(self, connection: sqlite3.Connection) -> float:
        """Inside every transaction: end the claims whose lease is over. Returns the time used."""
        now = self._clock()
        ended = connection.execute(sql.ENDED, (now,)).fetchall()
        if ended:
            counts: Counter[tuple[int, str]] = Counter()
            closed: list[int] = []
            for seq, rank, attempts, state in ended:
                to = "lost" if state == "arrived" else "dead" if attempts >= self._max_deliveries else "ready"
                connection.execute(sql.END_LEASE, (to, seq, rank))
                counts.update({(rank, "expired"): 1, (rank, to): 1})
                counts[rank, state] -= 1
                if to != "ready":
                    closed.append(seq)
            connection.execute(sql.CLOSE, (_json(closed),))
            self._count(connection, counts)
        return now

    # --- looking -------------------------------------------------------------------------------
    def depth(self, rank: int | None = None) -> QueueDepth:
        """Counts of one rank, or of all."""
        rank = arguments.number_or_none(rank, "rank of depth()")
        with self._database.transaction() as connection:
            self._end_leases(connection)
            rows = connection.execute(
                "SELECT name, SUM(amount) FROM counts WHERE ?1 IS NULL OR rank = ?1 GROUP BY name", (rank,)
            ).fetchall()
        return QueueDepth(**dict(rows))

    def failures(self, limit: int = 100) -> list[Failure]:
        """The last deliveries that were discarded, died or were lost, the latest published first."""
        limit = arguments.number(limit, "limit of failures()")
        with self._database.transaction() as connection:
            self._end_leases(connection)
            rows = connection.execute(
                "SELECT id, rank, state, attempts, consumer, reason FROM deliveries JOIN tickets USING (seq) "
                "WHERE state IN ('discarded', 'dead', 'lost') ORDER BY seq DESC, rank LIMIT ?",
                (limit,),
            ).fetchall()
        return [
            Failure(ticket_id, rank, DeliveryState(state), attempts, consumer, reason)
            for ticket_id, rank, state, attempts, consumer, reason in rows
        ]

    def requeue(self, limit: int = 100) -> int:
        """Have up to ``limit`` dead deliveries claimed once more, the first published first; returns how many."""
        limit = arguments.number(limit, "limit of requeue()")
        with self._database.transaction() as connection:
            self._end_leases(connection)
            dead = connection.execute(sql.DEAD, (limit,)).fetchall()
            connection.executemany(sql.REQUEUE, dead)
            connection.executemany("UPDATE tickets SET open = open + 1 WHERE seq = ?", [(seq,) for seq, _ in dead])
            ranks = Counter(rank for _, rank in dead)
            self._count(connection, {(rank, "ready"): amount for rank, amount in ranks.items()})
            self._count(connection, {(rank, "dead"): -amount for rank, amount in ranks.items()})
        if dead:
            self._bell.ring()
        return len(dead)

    # --- notices -------------------------------------------------------------------------------
    def announce(self, topic: str, version: int, payload: bytes = b"") -> bool:
        """Replace the topic's notice, unless it has this version or a later one (then False)."""
        version = arguments.announced(topic, version, payload)
        with self._database.transaction() as connection:
            replaced = connection.execute(
                "INSERT INTO notices VALUES (?, ?, ?) ON CONFLICT (topic) DO UPDATE "
                "SET version = excluded.version, payload = excluded.payload WHERE excluded.version > version",
                (topic, version, payload),
            ).rowcount
        if replaced:
            self._bell.ring()
        return bool(replaced)

    def latest(self, topic: str, newer_than: int | None = None, timeout_s: float = 0.0) -> Notice | None:
        """The topic's notice if later than ``newer_than``; waits for one up to ``timeout_s``."""
        newer_than, timeout_s = arguments.waited_for(topic, newer_than, timeout_s)

        def look() -> Notice | None:
            with self._database.reading() as connection:
                row = connection.execute(
                    "SELECT topic, version, payload FROM notices WHERE topic = ?1 AND (?2 IS NULL OR version > ?2)",
                    (topic, newer_than),
                ).fetchone()
            return Notice(*row) if row else None

        return wait_for(self._bell, look, timeout_s, lambda: RECHECK_S)


def _parts(batch: Sequence[QueuedTicket]) -> Iterator[Sequence[QueuedTicket]]:
    """The batch in parts of sizes that are powers of two: as many statements are prepared once and kept."""
    start = 0
    while start < len(batch):
        size = min(_MOST_ROWS, 1 << (len(batch) - start).bit_length() - 1)
        yield batch[start : start + size]
        start += size


def _owned(claims: Sequence[Claim], rows: Iterable[tuple[int, int, int]]) -> list[Claim]:
    """The claims whose deliveries a statement changed, each once."""
    changed = set(rows)
    owned = []
    for claim in claims:
        key = _key(claim)
        if key in changed:
            changed.remove(key)
            owned.append(claim)
    return owned


def _keys(claims: Sequence[Claim]) -> str:
    return _json([_key(claim) for claim in claims])


def _json(value: object) -> str:
    return _encode(value).decode()


_encode = msgspec.json.Encoder().encode


def _key(claim: Claim) -> tuple[int, int, int]:
    """(seq, rank, attempts): what the row of a delivery says while the claim is the one that holds it."""
    seq, _, attempts = claim.token.partition(":")
    return int(seq), claim.rank, int(attempts)
