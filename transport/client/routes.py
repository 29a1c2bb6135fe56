"""Routes: the ports at which each ring may be served, and which of them to try next. No I/O.

The ports that a listener last named are newer than those of a ticket. A port that now serves another ring is skipped.
"""

from __future__ import annotations

import random
import time

import msgspec

from transport.client.acknowledgements import AckLedger
from transport.client.pool import PortKey
from transport.client.quarantine import PortQuarantine
from transport.errors import UnreachableError
from transport.ticket import Ticket, host_identity
from transport.wire.addresses import LOOPBACK

_MOST_ROUTES = 4096


class Route(msgspec.Struct):
    """How a ring was last reached, for acknowledgements that go out later."""

    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    pairs: list[PortKey]  # (host, port) of every listener, best host first
    hosts_named: tuple[str, ...]  # by the last ticket
    ports_named: tuple[int, ...]
    wrong: set[PortKey] = msgspec.field(default_factory=set)  # those that serve another ring now
    all_wrong_since: float | None = None  # None: not all ports do
    used: bool = False  # since routes were last forgotten
    segment: str | None = None  # of a ring of this host; None: of another one


class Routes:
    """The routes of one client, and the next port to try by their health.

    Args:
        quarantine: knows which ports are healthy.
        ledger: rings with unconfirmed acknowledgements in it are not forgotten.
    """

    def __init__(self, quarantine: PortQuarantine, ledger: AckLedger) -> None:
        self._forget_at = _MOST_ROUTES
        self._quarantine = quarantine
        self._ledger = ledger
        self._of_ring: dict[str, Route] = {}
        self._rotation = random.randrange(1 << 16)

    def find(self, ring: str) -> Route | None:
        """The ring's route; None: no ticket has named it, or it is forgotten."""
        return self._of_ring.get(ring)

    def ports(self, ticket: Ticket) -> list[PortKey]:
        """(address, port) of every listener that may serve the ticket's ring, best address first."""
        route = self._of_ring.get(ticket.ring)
        if route is not None and route.ports_named == ticket.ports and route.hosts_named == ticket.addresses:
            route.used = True
            return route.pairs
        hosts = tuple(
            dict.fromkeys((LOOPBACK, *ticket.addresses) if ticket.host == host_identity() else ticket.addresses)
        )
        # the ports that a listener last named are newer than the ticket
        numbers = tuple(dict.fromkeys((*(route.ports if route else ()), *ticket.ports)))
        if not hosts or not numbers:
            raise UnreachableError(f"ticket {ticket.name} names no address and port; start a UCXXServer for its ring")
        pairs = [(host, number) for host in hosts for number in numbers]
        if route is not None and route.pairs == pairs:
            route.hosts_named, route.ports_named = ticket.addresses, ticket.ports
        else:
            segment = ticket.segment if ticket.host == host_identity() else None
            made = Route(hosts, numbers, pairs, ticket.addresses, ticket.ports, used=route is not None, segment=segment)
            made.wrong = route.wrong if route else made.wrong
            self._of_ring[ticket.ring] = made
            if len(self._of_ring) > self._forget_at:
                self._forget_some(ticket.ring)
        return pairs

    def _forget_some(self, ring: str) -> None:
        """Forget a quarter of the limit, never ``ring``; first the routes that were not used since the last time."""
        kept = self._ledger.rings() | {ring}
        for used in (False, True):
            free = [each for each, route in self._of_ring.items() if each not in kept and route.used is used]
            for each in free[: max(0, len(self._of_ring) - _MOST_ROUTES * 3 // 4)]:
                del self._of_ring[each]
        for route in self._of_ring.values():
            route.used = False
        self._forget_at = max(_MOST_ROUTES, len(self._of_ring) + _MOST_ROUTES // 4)  # not again at the next new route

    def next_port(self, ring: str, ports: list[PortKey]) -> PortKey:
        """The healthiest port, rotating to spread load. Addresses are tried in their order."""
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
        return self._quarantine.order(healthy or candidates, now, self._rotation)[0]

    def healthy(self, port: PortKey) -> bool:
        """Whether the port is not quarantined."""
        return not self._quarantine.is_quarantined(port, time.monotonic())

    def all_wrong(self, ring: str, ports: list[PortKey]) -> bool:
        """Whether every port has said that it serves another ring."""
        route = self._of_ring.get(ring)
        return route is not None and route.wrong >= set(ports)

    def succeeded(self, ring: str, port: PortKey) -> None:
        """The port answered for its ring."""
        if self._quarantine:
            self._quarantine.succeeded(port)
        if (route := self._of_ring.get(ring)) is not None and route.wrong:
            route.wrong.discard(port)
            route.all_wrong_since = None

    def serves_another(self, ring: str, port: PortKey) -> None:
        """The port said that it serves another ring now."""
        route = self._of_ring.get(ring)
        if route is not None:
            route.wrong.add(port)
            if route.all_wrong_since is None and route.wrong >= set(route.pairs):
                route.all_wrong_since = time.monotonic()

    def gone(self, ring: str, after_s: float) -> bool:
        """Whether every known port has been serving other rings for ``after_s``.

        Not at once: a later ticket, or a listener of the ring, may name other ports.
        """
        route = self._of_ring.get(ring)
        since = None if route is None else route.all_wrong_since
        return since is not None and time.monotonic() - since >= after_s

    def listeners_said(self, ring: str, numbers: tuple[int, ...]) -> None:
        """A listener named the ports (empty: none) at which the ring is served."""
        route = self._of_ring.get(ring)
        if route is not None and numbers and numbers != route.ports:
            pairs = [(host, number) for host in route.hosts for number in numbers]
            self._of_ring[ring] = Route(
                route.hosts, numbers, pairs, (), (), route.wrong, used=True, segment=route.segment
            )
