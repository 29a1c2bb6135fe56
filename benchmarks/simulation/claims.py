"""A model of what listeners do with claims: demands that wait, payloads that are claimed, finished, given back.

The rules are those of native/ring and native/ucp/serving.hpp, which have models of their own: a claim belongs to the
connection it was made through; a FINISH of another one, or of an earlier attempt, is refused; what a connection has
finished is remembered by the ring; and the question for an outcome ends what was not finished by then.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np
from accounts import Violation

from transport import _ring
from transport.claims.batch import JOINED, TAKEN, Rows
from transport.ticket import Ticket
from transport.wire import frames
from transport.wire.frames import Kind
from transport.wire.library import engine

ACCEPTED, REFUSED = 0, 1
_HEADER: Final = 24  # bytes, of an answer
_KILLED: Final = 0.005  # of listeners, between a FINISH and its answer
Where = tuple[int, int]  # slot, generation


class Demand(NamedTuple):
    """One TAKE that waits for something to be ready."""

    link: Any
    number: int
    n: int


class Claims:
    """Of one ring, as its segment has them: they survive the listeners, and end with the host."""

    def __init__(self, host: Any) -> None:
        self.host = host
        self.demands = deque[Demand]()
        self.finished: dict[int, set[tuple[int, int, int]]] = {}  # by connection: slot, generation, attempt and kind
        self._ready: list[tuple[int, Where]] = []  # by the order of writing
        self._sequence: dict[Where, int] = {}
        self._attempts: dict[Where, int] = {}
        self._held: dict[Where, int] = {}  # by connection
        self._of: dict[int, set[Where]] = {}
        self._ended = set[int]()  # connections whose outcome was asked for

    def written(self, ticket: Ticket) -> None:
        """A payload is ready."""
        where = ticket.slot, ticket.generation
        self.host.writes += 1
        self._sequence[where] = self.host.writes
        self._attempts[where] = 0
        self._offer(where)

    def _offer(self, where: Where) -> None:
        if where in self._sequence and where not in self._held:
            heapq.heappush(self._ready, (self._sequence[where], where))
            self._serve()

    def _serve(self) -> None:
        while self.demands and self._ready:
            demand = self.demands.popleft()
            if demand.link in self.host.links:
                demand.link.answer_later(demand.number, self._taken(demand))

    def _taken(self, demand: Demand) -> Rows:
        token = demand.link.number
        rows: list[Any] = []
        while self._ready and len(rows) < demand.n and token not in self._ended:
            _, where = heapq.heappop(self._ready)
            if where not in self._sequence or where in self._held:
                continue  # another entry of it
            self._held[where] = token
            self._of.setdefault(token, set()).add(where)
            self._attempts[where] += 1
            attempts = self._attempts[where] & 0xFFFF
            rows.append((*where, attempts, self._sequence[where]))
        taken = np.zeros(len(rows), TAKEN)
        for name, column in zip(("slot", "generation", "attempts", "sequence"), zip(*rows, strict=True), strict=False):
            taken[name] = column
        taken["flags"], taken["length"], taken["policy_version"] = JOINED, 8, _ring.NO_VERSION
        return taken

    # --- messages -------------------------------------------------------------------------------------------
    def ask(self, demand: Demand, wait_s: float) -> None:
        """A TAKE has arrived."""
        self.demands.append(demand)
        self._serve()
        if wait_s:
            self.host.world.loop.call_later(wait_s, self.give_up, demand)
        else:
            self.give_up(demand)

    def give_up(self, demand: Demand) -> None:
        """It has waited long enough, or is taken back: the answer is empty."""
        if demand in self.demands:
            self.demands.remove(demand)
            demand.link.answer_later(demand.number, np.empty(0, TAKEN))

    def take_back(self, link: Any, number: int) -> None:
        """CANCEL_TAKE: by the number of the demand."""
        for demand in list(self.demands):
            if demand.link is link and demand.number == number:
                self.give_up(demand)

    def end(self, kind: Kind, token: int, rows: Rows, delay_s: float) -> list[int]:
        """FINISH, GIVE_BACK, END: a code for each."""
        return [self._end(kind, token, row, delay_s) for row in rows]

    def _end(self, kind: Kind, token: int, row: Any, delay_s: float) -> int:
        where, attempts = (int(row["slot"]), int(row["generation"])), int(row["attempts"])
        if self._held.get(where) != token or self._attempts[where] & 0xFFFF != attempts:
            return REFUSED
        if kind is Kind.GIVE_BACK:
            self._release(where, token)
            self.host.world.loop.call_later(delay_s, self._offer, where)
            return ACCEPTED
        del self._held[where], self._sequence[where], self._attempts[where]
        self._of[token].discard(where)
        asking = 0 if kind is Kind.FINISH else frames.END_ASKED
        self.finished.setdefault(token, set()).add((*where, attempts | asking))
        self.host.claim_ended(where, trained=kind is Kind.FINISH)
        return ACCEPTED

    def outcomes(self, token: int, rows: Rows) -> list[int]:
        """OUTCOME: what became of FINISHes of a connection; the others of it are refused from now on."""
        self._ended.add(token)
        self.connection_ended(token)
        finished = self.finished.get(token, set())
        return [
            ACCEPTED if (int(row["slot"]), int(row["generation"]), int(row["attempts"])) in finished else REFUSED
            for row in rows
        ]

    def connection_ended(self, token: int) -> None:
        """Its claims are anybody's."""
        for where in sorted(self._of.pop(token, ())):
            self._release(where, token)
            self._offer(where)

    def silent(self, link: Any) -> None:
        """Its holder was not heard for its lease: claims and demands end, the connection stays."""
        self.connection_ended(link.number)
        for demand in list(self.demands):
            if demand.link is link:
                self.give_up(demand)

    def _release(self, where: Where, token: int) -> None:
        if self._held.pop(where, None) != token:
            raise Violation(f"the model has two holders of {where}")
        self._of.get(token, set()).discard(where)

    @property
    def holds(self) -> bool:
        """Whether anybody has a claim."""
        return bool(self._held)

    def held_by(self, token: int) -> int:
        """How many claims a connection has."""
        return len(self._of.get(token, ()))


class SimNative:
    """In the place of the native side of a connection, for what `TakeLink` and `Outcomes` ask of it."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self.token = link.number

    @property
    def alive(self) -> bool:
        return bool(self._link.usable)

    @property
    def next_number(self) -> int:
        return int(self._link.next_number)

    @property
    def under_way(self) -> int:
        return int(self._link.under_way)

    def take(self, token: Any, buffer: Any, *, most: int, wait_ms: int, **_: Any) -> int:
        """The answer is written as the wire has it."""

        def put(rows: Rows) -> list[int]:
            view = memoryview(buffer).cast("B")
            view[_HEADER : _HEADER + rows.nbytes] = rows.tobytes()
            return [0, len(rows), engine().MORE_TO_COME]

        return int(self._link.demand(token, min(most, engine().MOST_TAKEN), wait_ms / 1000, put))

    def settle(
        self, token: Any, rows: Any, kind: Kind, delay_ms: int = 0, *, key: int = 0, unread: bool = False
    ) -> None:
        claims = np.frombuffer(bytes(rows), TAKEN)
        host = self._link.host
        if kind is Kind.OUTCOME:
            self._link.forward(token, lambda: host.claims.outcomes(key, claims))
        else:
            self._link.forward(token, lambda: self._ended(kind, claims, delay_ms / 1000))

    def _ended(self, kind: Kind, claims: Rows, delay_s: float) -> list[int]:
        host = self._link.host
        codes: list[int] = host.claims.end(kind, self.token, claims, delay_s)
        if kind in (Kind.FINISH, Kind.END) and host.world.rng.random() < _KILLED:
            host.world.accounts.note(f"killed_listener {host.number}")
            host.world.loop.call_soon(host.break_links, self._link.port[1])
        return codes

    def end(self, token: Any, row: Any, how: Any, reason: str, consumer: str) -> None:
        claims = np.frombuffer(bytes(row), TAKEN)
        self._link.forward(token, lambda: self._ended(Kind.END, claims, 0.0))
