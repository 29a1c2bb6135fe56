"""Endpoint pool: which connection to use, which to keep, which to close. Decisions only, no I/O.

A connection is *idle*, *in use* or *being opened*. The limit of a port counts all three.

    begin_open ──► being opened ──opened──► in use ──checkin──► idle ──checkout──► in use
                        └── open_failed                └───── expired, drop, drain ─────► gone

The pool never closes anything: every method that removes connections returns them, and the caller closes them
afterwards, shielded from cancellation. How a caller gets a connection:

    close all of expired(now); checkout(port, now), or if that is None and may_open(port):
    begin_open(port), connect, then opened(port, connection) or open_failed(port)
"""

from __future__ import annotations

from collections.abc import Container, Hashable
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from transport.errors import InternalError, UsageError
from transport.settings import DEFAULTS, Settings

PortKey: TypeAlias = tuple[str, int]  # (address, port)

C = TypeVar("C", bound=Hashable)


def port_of(address: str) -> PortKey:
    """(host, port) of "host:port", with an IPv6 address in brackets. Raises UsageError."""
    host, colon, number = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or bracketed != (":" in host) or not number.isdecimal() or not 0 < int(number) < 1 << 16:
        raise UsageError(f"{address!r} is not host:port, nor [IPv6 address]:port")
    return host, int(number)


class PoolCounts(NamedTuple):
    """Connections of one port, or of all of them."""

    idle: int
    in_use: int
    opening: int

    @property
    def total(self) -> int:
        """All connections that count towards the limit of a port."""
        return self.idle + self.in_use + self.opening


class EndpointPool(Generic[C]):
    """Connections by (address, port), each handed to one user at a time, the freshest first.

    Bounds: ``pool_endpoints_per_port`` connections per port (idle, in use, and being opened together) and
    ``pool_endpoints_idle`` idle connections over all ports, beside those that somebody waits for. An idle
    connection is closed when its last use is longer ago than ``pool_endpoint_max_age_s``, which lies below the
    listener's idle eviction, so that the client closes first. Owned by one thread.
    """

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._max_age_s = settings.pool_endpoint_max_age_s
        self._per_port = settings.pool_endpoints_per_port
        self._most_idle = settings.pool_endpoints_idle
        # Invariant: ordered by last use, the longest ago first.
        self._idle: dict[C, tuple[PortKey, float]] = {}
        # Invariant: the connections of _idle by port, in the same order. Hence the freshest of a port is its last one.
        self._idle_of: dict[PortKey, dict[C, None]] = {}
        # Invariant: shares no connection with _idle.
        self._in_use: dict[C, PortKey] = {}
        # Invariant: no zeros.
        self._opening: dict[PortKey, int] = {}
        self._drained = False

    def __repr__(self) -> str:
        idle, in_use, opening = self.counts()
        state = "drained" if self._drained else "open"
        return f"<EndpointPool {state}, {idle} idle, {in_use} in use, {opening} opening>"

    def counts(self, port: PortKey | None = None) -> PoolCounts:
        """Count the connections that ``port`` has, or all ports together."""
        if port is None:
            return PoolCounts(len(self._idle), len(self._in_use), sum(self._opening.values()))
        idle = len(self._idle_of.get(port, ()))
        in_use = sum(1 for owner in self._in_use.values() if owner == port)
        return PoolCounts(idle, in_use, self._opening.get(port, 0))

    # --- opening -------------------------------------------------------------------------------
    def may_open(self, port: PortKey) -> bool:
        """Return whether one more connection to the port is within the limit. Always False after ``drain``."""
        return not self._drained and self.counts(port).total < self._per_port

    def begin_open(self, port: PortKey) -> None:
        """Reserve a connection of the port, so that concurrent users do not exceed the limit."""
        if not self.may_open(port):
            raise InternalError(f"a connection to {port} exceeds the limit of {self!r}")
        self._opening[port] = self._opening.get(port, 0) + 1

    def opened(self, port: PortKey, connection: C) -> None:
        """Make the reservation ``connection``, which the caller uses."""
        if connection in self._idle or connection in self._in_use:
            raise InternalError(f"{connection!r} is in {self!r} already")
        self._end_reservation(port)
        self._in_use[connection] = port

    def open_failed(self, port: PortKey) -> None:
        """Cancel the reservation."""
        self._end_reservation(port)

    def _end_reservation(self, port: PortKey) -> None:
        reserved = self._opening.get(port, 0)
        if not reserved:
            raise InternalError(f"no connection to {port} is being opened in {self!r}")
        if reserved == 1:
            del self._opening[port]
        else:
            self._opening[port] = reserved - 1

    # --- using ---------------------------------------------------------------------------------
    def checkout(self, port: PortKey, now: float) -> C | None:
        """Return the port's most recently used idle connection, exclusively; None if it has none that is young enough.

        The freshest first, so that those beyond the present need grow old together and are closed.
        """
        of_port = self._idle_of.get(port)
        if not of_port:
            return None
        connection = next(reversed(of_port))
        if now >= self._idle[connection][1] + self._max_age_s:
            return None
        del self._idle[connection], of_port[connection]
        self._in_use[connection] = port
        return connection

    def checkin(self, connection: C, now: float, awaited: Container[PortKey] = ()) -> list[C]:
        """Take a healthy connection back; returns what the caller must close.

        That is the connection itself after ``drain``, or the longest idle ones beyond the bound. ``awaited``: ports
        whose connections somebody waits for, and takes next: they are not idle.
        """
        port = self._in_use.pop(connection, None)
        if port is None:
            raise InternalError(f"{connection!r} was checked in, but is not in use in {self!r}")
        if self._drained:
            return [connection]
        self._idle[connection] = (port, now)
        self._idle_of.setdefault(port, {})[connection] = None
        if len(self._idle) <= self._most_idle:
            return []
        idle = [each for each, (owner, _) in self._idle.items() if owner not in awaited]
        surplus = idle[: max(0, len(idle) - self._most_idle)]
        for each in surplus:
            self._take_out(each)
        return surplus

    def _take_out(self, connection: C) -> None:
        port, _ = self._idle.pop(connection, (None, 0.0))
        if port is None:
            return
        of_port = self._idle_of[port]
        del of_port[connection]
        if not of_port:
            del self._idle_of[port]

    def drop(self, connection: C) -> None:
        """Forget a connection that broke or was retired, in whatever state, if it is here."""
        self._take_out(connection)
        self._in_use.pop(connection, None)

    # --- letting go ----------------------------------------------------------------------------
    def expired(self, now: float) -> list[C]:
        """Take out the idle connections whose last use is as long ago as the maximal age, or longer."""
        expired = []
        for connection, (_, last_use) in self._idle.items():
            if now < last_use + self._max_age_s:  # as `next_expiry` reckons: else who wakes then finds nothing
                break
            expired.append(connection)
        for connection in expired:
            self._take_out(connection)
        return expired

    def next_expiry(self) -> float | None:
        """Time from which on ``expired`` has something to return; None while nothing is idle."""
        for _, last_use in self._idle.values():
            return last_use + self._max_age_s
        return None

    def idle(self) -> list[C]:
        """Return the idle connections, the one used longest ago first."""
        return list(self._idle)

    def drain_port(self, port: PortKey) -> list[C]:
        """Take out the idle connections of a port whose listener is known to be gone."""
        gone = list(self._idle_of.get(port, ()))
        for connection in gone:
            self._take_out(connection)
        return gone

    def take_idle(self) -> list[C]:
        """Take out all idle connections."""
        gone = list(self._idle)
        self._idle.clear()
        self._idle_of.clear()
        return gone

    def drain(self) -> list[C]:
        """Take out all idle connections and admit no more; those in use are to be closed at their check-in."""
        self._drained = True
        return self.take_idle()

    def validate(self) -> None:
        """Assert every invariant."""
        assert not self._idle.keys() & self._in_use.keys(), "a connection is idle and in use"
        last_uses = [last_use for _, last_use in self._idle.values()]
        assert last_uses == sorted(last_uses), "idle connections are out of order"
        for port, connections in self._idle_of.items():
            assert list(connections) == [each for each, (owner, _) in self._idle.items() if owner == port]
        assert sum(map(len, self._idle_of.values())) == len(self._idle), "an idle connection of no port"
        assert all(count > 0 for count in self._opening.values()), "a port without reservation is listed"
        assert not (self._drained and self._idle), "idle connections after drain"
        ports = {port for port, _ in self._idle.values()} | set(self._in_use.values()) | set(self._opening)
        for port in ports:
            assert self.counts(port).total <= self._per_port, f"too many connections to {port}"
