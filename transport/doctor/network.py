"""Addresses and ports: what tickets would advertise and why, and whether ports can be had."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from transport.config import Configuration
from transport.doctor.finding import Check, fail, ok, warn
from transport.wire.addresses import LOOPBACK, default_route_interface, interface_address, rdma_interfaces


def checks(configuration: Configuration, ports: Sequence[int]) -> Iterator[Check]:
    """The advertised address, and the ports that are to be served."""
    yield address(
        configuration.addresses,
        configuration.bind,
        [(name, interface_address(name)) for name in rdma_interfaces()],
        default_route_interface(),
    )
    yield from (_port(port, configuration.bind) for port in ports if port)
    if configuration.metrics_port:
        yield _port(configuration.metrics_port, configuration.metrics_bind, "metrics port")


def address(configured: Sequence[str], bind: str, rdma: Sequence[tuple[str, str | None]], route: str | None) -> Check:
    """Which address tickets advertise, and by what rule."""
    if configured:
        return ok("address", f"{', '.join(configured)}: the setting addresses")
    if bind:
        return ok("address", f"{bind}: the setting bind")
    for name, found in rdma:
        if found:
            return ok("address", f"{found}: {name} is an InfiniBand or RoCE interface, which comes first")
    no_ip = [name for name, found in rdma if not found]
    out = interface_address(route) if route else None
    if no_ip:
        return warn(
            "address",
            f"{out or LOOPBACK}: InfiniBand interfaces without an IPv4 address: {', '.join(no_ip)}",
            f"ip address add 10.0.0.1/24 dev {no_ip[0]}; or TRANSPORT_ADDRESSES=…",
        )
    if out:
        return ok("address", f"{out}: {route} has the default route")
    return warn(
        "address",
        f"{LOOPBACK}: no default route and no RDMA interface; this host is unreachable for other hosts",
        "TRANSPORT_ADDRESSES=… with an address that the readers can reach (ip -4 address lists them)",
    )


def _port(port: int, bind: str, name: str = "port") -> Check:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as UCX is configured to do
        try:
            probe.bind((bind, port))
        except OSError as error:
            return fail(f"{name} {port}", f"cannot listen: {error.strerror}", f"ss -ltnp 'sport = :{port}'; or port 0")
    return ok(f"{name} {port}", "free")
