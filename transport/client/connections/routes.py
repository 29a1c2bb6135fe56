"""Routes: the ports at which each ring may be served, which of them to avoid, and which to try next. No I/O.

A listener names the ports of its ring in WELCOME; one that is started anew may get another port. The ports that were
named last are newer than those of a ticket. A port that now serves another ring is skipped, and one that failed is in
quarantine for a while.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from transport.client.connections.acknowledgements import AckLedger
from transport.client.connections.pool import PortKey
from transport.errors import UnreachableError
from transport.settings import DEFAULTS, Settings
from transport.ticket import Ticket, host_identity
from transport.wire.addresses import host_port, loopback_of

_MOST_ROUTES = 4096
_WITHOUT_RDMA_S = 60.0


@dataclass(slots=True)
class _Quarantined:
    until: float
    length_s: float
    probing: bool = False


class PortQuarantine:
    """Memory of ports that produced a transport error (reset, truncated, unreachable, timeout).

        healthy ──failed──► quarantined ──time runs out──► on probation ──begin──► probed
           ▲                    ▲    (a failure meanwhile renews)                    │ │
           │                    └──────────── failed: twice as long ─────────────────┘ │
           └────────────────────────────── succeeded (from any state) ────────────────┘

    A quarantined port is still used as a last resort: if no healthy port remains, the one whose quarantine ends
    soonest.

    The first failure costs ``port_quarantine_s``. When that has run out, the next use is the probe: success
    heals, failure doubles the time, up to ``port_quarantine_most_s`` (below the default ``linger_s``, so that a port
    that comes back is found while payloads are still served). A failure *during* the quarantine renews it but doubles
    nothing, because it says only that the port was used for want of a better one, or that several reads
    were under way when it broke.

    Memory: a port is forgotten when it was not used for ``port_quarantine_most_s`` after its quarantine ran
    out, so that ports of long-gone servers do not accumulate. Owned by one thread.
    """

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._first_s = settings.port_quarantine_s
        self._most_s = settings.port_quarantine_most_s
        # A probe that is neither succeeded nor failed (cancelled) is over after the longest time that an attempt
        # at a small payload takes; then another use may be the probe.
        self._probe_s = settings.connect_timeout_s + settings.handshake_timeout_s + settings.read_timeout(0)
        # Invariant: a port that is not in here is healthy.
        self._entries: dict[PortKey, _Quarantined] = {}

    def __repr__(self) -> str:
        ports = ", ".join(host_port(address, port) for address, port in self._entries)
        return f"<PortQuarantine {ports or 'empty'}>"

    def __bool__(self) -> bool:
        """Return whether any port is remembered; where none is, there is nothing to ask."""
        return bool(self._entries)

    def is_quarantined(self, port: PortKey, now: float) -> bool:
        """Return whether the port is to be avoided now. A port on probation is not."""
        entry = self._entries.get(port)
        return entry is not None and now < entry.until

    def quarantined(self, now: float) -> list[PortKey]:
        """Return the ports to be avoided now."""
        return [port for port, entry in self._entries.items() if now < entry.until]

    def best(self, ports: Sequence[PortKey], now: float, turn: int = 0) -> PortKey:
        """Return the port to try: healthy ones and those on probation in turn, else whose quarantine ends soonest.

        ``turn``: any number; callers increment it to spread load.
        """
        good = [port for port in ports if not self.is_quarantined(port, now)]
        return good[turn % len(good)] if good else min(ports, key=lambda port: self._entries[port].until)

    def begin(self, port: PortKey, now: float) -> bool:
        """Call before using a port. True if this use is the probe; others then avoid the port until it is decided."""
        entry = self._entries.get(port)
        if entry is None or now < entry.until:
            return False
        entry.probing = True
        entry.until = now + self._probe_s
        return True

    def failed(self, port: PortKey, now: float) -> bool:
        """Note a transport error of the port; False if that only renews its quarantine."""
        entry = self._entries.get(port)
        if entry is None:
            self._forget_old(now)
            self._entries[port] = _Quarantined(now + self._first_s, self._first_s)
            return True
        decided = entry.probing or now >= entry.until
        if decided:
            entry.length_s = min(2 * entry.length_s, self._most_s)
            entry.probing = False
        entry.until = now + entry.length_s
        return decided

    def succeeded(self, port: PortKey) -> None:
        """Note that the port answered; a refusal is an answer, too."""
        self._entries.pop(port, None)

    def _forget_old(self, now: float) -> None:
        old = [port for port, entry in self._entries.items() if now - entry.until > self._most_s]
        for port in old:
            del self._entries[port]


class WithoutRdma:
    """Addresses to which there is no way by RDMA, each for a minute: a link may have been away for a moment."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def add(self, address: str, now: float) -> None:
        """Try no RDMA there for a minute."""
        self._until[address] = now + _WITHOUT_RDMA_S

    def holds(self, address: str, now: float) -> bool:
        """Return whether RDMA is not to be tried there now."""
        return now < self._until.get(address, 0.0)

    def clear(self) -> None:
        """Try RDMA everywhere: this host's network has changed."""
        self._until.clear()


class Route(msgspec.Struct):
    """Route to a ring by its tickets, also for acknowledgements that go out later."""

    hosts: tuple[str, ...] = ()  # best first
    hosts_named: tuple[str, ...] = ()  # by the last ticket
    ports_named: tuple[int, ...] = ()
    segment: str | None = None  # of a ring of this host; None: of another one
    pairs: list[PortKey] = msgspec.field(default_factory=list)  # (host, port) of every listener, best host first
    wrong: set[PortKey] = msgspec.field(default_factory=set)  # those that serve another ring now
    all_wrong_since: float | None = None  # None: not all ports do
    used: bool = False  # since routes were last forgotten


class Routes:
    """The routes of one client, where listeners said that rings are served, and the next port to try by their health.

    Belongs to the client's loop; other threads may ask for what listeners said.

    Args:
        quarantine: knows which ports are healthy.
        ledger: rings with unconfirmed acknowledgements in it are not forgotten.
    """

    def __init__(self, quarantine: PortQuarantine, ledger: AckLedger) -> None:
        self._forget_at = _MOST_ROUTES
        self._quarantine = quarantine
        self._ledger = ledger
        self._of_ring: dict[str, Route] = {}
        self._ports_said: dict[str, tuple[int, ...]] = {}  # by ring, by the last listener of it that named any
        self._ring_at: dict[PortKey, str] = {}
        self._rotation = random.randrange(1 << 16)

    # --- what listeners said --------------------------------------------------------------------------
    def listener_said(self, port: PortKey, ring: str, numbers: tuple[int, ...]) -> None:
        """Note the ring that the listener at ``port`` named, and the ports (empty: none) at which that is served."""
        host, _ = port
        self._ring_at[port] = ring
        for number in numbers:
            self._ring_at.setdefault((host, number), ring)
        if numbers and numbers != self._ports_said.get(ring):
            self._ports_said[ring] = numbers
            if (route := self._of_ring.get(ring)) is not None:
                self._lead(ring, route)

    def ports_said(self, ring: str) -> tuple[int, ...]:
        """Return the ports of this ring, as a listener of it last named them; none: none did."""
        return self._ports_said.get(ring, ())

    def ways(self, ring: str, hosts: Iterable[str], named: Iterable[int] = (), turn: int = 0) -> list[PortKey]:
        """Return (host, port) of every listener that may serve the ring, best host first.

        Of each host first the ports that listeners of the ring named last, then the others that are ``named``;
        ``turn``: at which of all these the order begins.
        """
        ports = list(dict.fromkeys((*self.ports_said(ring), *named)))
        begin = turn % len(ports) if ports else 0
        return [(host, port) for host in hosts for port in (*ports[begin:], *ports[:begin])]

    def ring_at(self, port: PortKey) -> str:
        """Return the ring that answered there last; where none has, one said to be served there. "": unknown."""
        return self._ring_at.get(port, "")

    # --- the way to a ring ----------------------------------------------------------------------------
    def find(self, ring: str) -> Route | None:
        """Return the ring's route; None: no ticket has named it, or it is forgotten."""
        return self._of_ring.get(ring)

    def ports(self, ticket: Ticket) -> list[PortKey]:
        """(address, port) of every listener that may serve the ticket's ring, best address first."""
        ring = ticket.ring
        route = self._of_ring.get(ring)
        if route is not None and route.ports_named == ticket.ports and route.hosts_named == ticket.addresses:
            route.used = True
            return route.pairs
        here = ticket.host == host_identity()
        hosts = tuple(dict.fromkeys((loopback_of(ticket.addresses), *ticket.addresses) if here else ticket.addresses))
        if not hosts or not (ticket.ports or self.ports_said(ring)):
            raise UnreachableError(f"ticket {ticket.name} names no address and port; start a UCXXServer for its ring")
        if route is None:
            route = self._of_ring[ring] = Route()
            if len(self._of_ring) > self._forget_at:
                self._forget_some(ring)
        else:
            route.used = True
        route.hosts, route.hosts_named, route.ports_named = hosts, ticket.addresses, ticket.ports
        route.segment = ticket.segment if here else None
        self._lead(ring, route)
        return route.pairs

    def _lead(self, ring: str, route: Route) -> None:
        pairs = self.ways(ring, route.hosts, route.ports_named)
        if pairs != route.pairs:
            route.pairs = pairs
            if not route.wrong.issuperset(pairs):
                route.all_wrong_since = None

    def _forget_some(self, ring: str) -> None:
        """Forget a quarter of the limit, never ``ring``; first the routes that were not used since the last time."""
        kept = self._ledger.rings() | {ring}
        for used in (False, True):
            free = [each for each, route in self._of_ring.items() if each not in kept and route.used is used]
            for each in free[: max(0, len(self._of_ring) - _MOST_ROUTES * 3 // 4)]:
                del self._of_ring[each]
                self._ports_said.pop(each, None)
        for route in self._of_ring.values():
            route.used = False
        self._forget_at = max(_MOST_ROUTES, len(self._of_ring) + _MOST_ROUTES // 4)  # not again at the next new route

    def next_port(self, ring: str, ports: list[PortKey]) -> PortKey:
        """Return the healthiest port, rotating to spread load. Addresses are tried in their order."""
        self._rotation += 1
        route = self._of_ring.get(ring)  # None: forgotten, because many other rings were read since
        wrong = route.wrong if route is not None else frozenset()
        if not wrong and not self._quarantine:
            if len(ports) == 1:
                return ports[0]
            best = sum(port[0] == ports[0][0] for port in ports)  # ports of the best address come first
            return ports[self._rotation % best]
        now = time.monotonic()
        candidates = [port for port in ports if port not in wrong] or ports
        preferred = [port for port in candidates if port[0] == candidates[0][0]]
        healthy = [port for port in preferred if not self._quarantine.is_quarantined(port, now)]
        return self._quarantine.best(healthy or candidates, now, self._rotation)

    def healthy(self, port: PortKey) -> bool:
        """Return whether the port is not quarantined."""
        return not self._quarantine.is_quarantined(port, time.monotonic())

    def all_wrong(self, ring: str, ports: list[PortKey]) -> bool:
        """Return whether every port has said that it serves another ring."""
        route = self._of_ring.get(ring)
        return route is not None and route.wrong >= set(ports)

    def succeeded(self, ring: str, port: PortKey) -> None:
        """Note that the port answered for its ring."""
        if self._quarantine:
            self._quarantine.succeeded(port)
        if (route := self._of_ring.get(ring)) is not None and route.wrong:
            route.wrong.discard(port)
            route.all_wrong_since = None

    def serves_another(self, ring: str, port: PortKey) -> None:
        """Note that the port serves another ring now."""
        route = self._of_ring.get(ring)
        if route is not None:
            route.wrong.add(port)
            if route.all_wrong_since is None and route.wrong >= set(route.pairs):
                route.all_wrong_since = time.monotonic()

    def gone(self, ring: str, after_s: float) -> bool:
        """Return whether every known port has been serving other rings for ``after_s``.

        Not at once: a later ticket, or a listener of the ring, may name other ports.
        """
        route = self._of_ring.get(ring)
        since = None if route is None else route.all_wrong_since
        return since is not None and time.monotonic() - since >= after_s
