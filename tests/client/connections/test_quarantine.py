"""Ports and routes: a table of what happens to a port, which port is tried, when by RDMA, and when a ring has gone."""

from __future__ import annotations

import pytest

from transport.client.connections.acknowledgements import AckLedger
from transport.client.connections.routes import PortQuarantine, Routes, WithoutRdma
from transport.settings import DEFAULTS
from transport.ticket import Ticket

A, B, C = ("h", 1), ("h", 2), ("h", 3)
Q = DEFAULTS.port_quarantine_s


def test_healthy_ports_rotate() -> None:
    quarantine = PortQuarantine()
    assert [quarantine.best([A, B, C], 0.0, turn) for turn in range(4)] == [A, B, C, A]


def test_when_all_are_quarantined_the_soonest_to_heal_is_tried_first() -> None:
    quarantine = PortQuarantine()
    for at, port in enumerate([C, A, B]):
        quarantine.failed(port, float(at))
    assert [quarantine.best(ports, 3.0, 1) for ports in ([A, B, C], [A, B])] == [C, A]
    assert quarantine.quarantined(3.0) == [C, A, B]


def test_success_heals_in_any_state() -> None:
    quarantine = PortQuarantine()
    quarantine.succeeded(A)
    quarantine.failed(A, 0.0)
    quarantine.succeeded(A)
    assert not quarantine.is_quarantined(A, 1.0)
    assert repr(quarantine) == "<PortQuarantine empty>"
    quarantine.failed(A, 2.0)
    assert repr(quarantine) == "<PortQuarantine h:1>"
    assert not quarantine.is_quarantined(A, 2.0 + Q)  # from the beginning again, not doubled


def test_a_failed_probe_doubles_the_time_up_to_the_cap() -> None:
    quarantine = PortQuarantine()
    now = 0.0
    lengths = []
    quarantine.failed(A, now)
    for _ in range(6):
        begun = now
        while quarantine.is_quarantined(A, now):
            now += 1.0
        lengths.append(now - begun)
        assert quarantine.begin(A, now)
        quarantine.failed(A, now)
    assert lengths == [30.0, 60.0, 120.0, 240.0, 240.0, 240.0]
    assert lengths[-1] == DEFAULTS.port_quarantine_most_s < DEFAULTS.linger_s


def test_failures_during_the_quarantine_renew_it_and_double_nothing() -> None:
    quarantine = PortQuarantine()
    for at in (0.0, 0.1, 0.2, 10.0):
        assert not quarantine.begin(A, at)
        quarantine.failed(A, at)
    assert quarantine.is_quarantined(A, 10.0 + Q - 0.1)
    assert not quarantine.is_quarantined(A, 10.0 + Q)


def test_a_failure_after_the_quarantine_doubles_also_if_the_use_was_not_announced() -> None:
    quarantine = PortQuarantine()
    quarantine.failed(A, 0.0)
    quarantine.failed(A, Q)
    assert quarantine.is_quarantined(A, Q + 2 * Q - 0.1)


def test_one_use_is_the_probe_and_others_avoid_the_port_meanwhile() -> None:
    quarantine = PortQuarantine()
    quarantine.failed(A, 0.0)
    assert quarantine.begin(A, Q)
    assert not quarantine.begin(A, Q)
    assert [quarantine.best([A, B], Q, turn) for turn in range(2)] == [B, B]
    quarantine.succeeded(A)
    assert quarantine.best([A, B], Q) == A


def test_a_probe_that_never_ends_makes_way_for_another() -> None:
    quarantine = PortQuarantine()
    quarantine.failed(A, 0.0)
    assert quarantine.begin(A, Q)
    longest = DEFAULTS.connect_timeout_s + DEFAULTS.handshake_timeout_s + DEFAULTS.read_timeout(0)
    assert not quarantine.begin(A, Q + longest - 0.1)
    assert quarantine.begin(A, Q + longest)


@pytest.mark.parametrize(("idle_s", "remembered"), [(Q, True), (Q + DEFAULTS.port_quarantine_most_s + 1, False)])
def test_ports_of_servers_that_are_gone_are_forgotten(idle_s: float, remembered: bool) -> None:
    quarantine = PortQuarantine()
    quarantine.failed(A, 0.0)
    quarantine.failed(B, idle_s)
    assert ("h:1" in repr(quarantine)) is remembered


def test_rdma_is_tried_again_after_a_minute_and_at_once_where_the_network_has_changed() -> None:
    without = WithoutRdma()
    without.add("h", 0.0)
    assert [without.holds("h", now) for now in (0.0, 59.0, 61.0)] == [True, True, False]
    assert not without.holds("another", 0.0)
    without.add("h", 61.0)
    assert without.holds("h", 120.0)
    without.clear()
    assert not without.holds("h", 61.0)


def test_a_ring_has_gone_whichever_of_its_tickets_was_read_last() -> None:
    routes = Routes(PortQuarantine(), AckLedger())
    before, behind = (  # a restart of its listener
        Ticket(ring="a" * 32, host="h", addresses=("h",), ports=(n,), slot=0, generation=1, key=1, size=1, created=0.0)
        for n in (1, 2)
    )
    for ticket in (before, behind):
        ports = routes.ports(ticket)
        assert not routes.gone(ticket.ring, 0.0)
        for port in ports:
            routes.serves_another(ticket.ring, port)
    for ticket in (before, behind):
        assert routes.ports(ticket)
        assert routes.gone(ticket.ring, 0.0)
