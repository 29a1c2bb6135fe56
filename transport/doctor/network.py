"""Checks of the addresses that tickets would advertise, of ports, and of the shared secret."""

from __future__ import annotations

import shlex
import socket
import stat
from collections.abc import Iterator, Sequence
from typing import Final

from transport.config import Configuration
from transport.doctor.finding import Check, fail, ok, warn
from transport.errors import ConfigurationError
from transport.folders import expanded
from transport.wire.addresses import (
    LOOPBACK,
    default_route_interface,
    family_of,
    interface_address,
    rdma_interfaces,
)

_FEWEST_BYTES: Final = 16  # of a secret that is not guessed


def checks(configuration: Configuration, ports: Sequence[int]) -> Iterator[Check]:
    """Check the advertised address, the ports that are to be served, and the secret."""
    yield address(
        configuration.addresses,
        configuration.bind,
        [(name, interface_address(name)) for name in rdma_interfaces()],
        default_route_interface(),
        [found for each in configuration.addresses if (found := _not_of_this_host(each))],
    )
    yield from (_port(port, configuration.bind) for port in ports if port)
    if configuration.metrics_port:
        yield _port(configuration.metrics_port, configuration.metrics_bind, "metrics port")
    if configuration.secret_file:
        yield _secret(configuration)


def address(
    configured: Sequence[str],
    bind: str,
    rdma: Sequence[tuple[str, str | None]],
    route: str | None,
    foreign: Sequence[str] = (),
) -> Check:
    """Check which address tickets advertise, and by what rule; ``foreign``: what is said against those that are set."""
    if foreign:
        return warn(
            "address",
            f"{', '.join(configured)}: the setting addresses; {', '.join(foreign)}",
            "TRANSPORT_ADDRESSES=… with one that ip address lists; as it is where the readers reach this host by it "
            "(NAT, a Kubernetes service)",
        )
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
            f"{out or LOOPBACK}: InfiniBand interfaces without an IP address: {', '.join(no_ip)}",
            f"ip address add 10.0.0.1/24 dev {no_ip[0]}; or TRANSPORT_ADDRESSES=…",
        )
    if out:
        return ok("address", f"{out}: {route} has the default route")
    return warn(
        "address",
        f"{LOOPBACK}: no default route and no RDMA interface; this host is unreachable for other hosts",
        "TRANSPORT_ADDRESSES=… with an address that the readers can reach (ip address lists them)",
    )


def _not_of_this_host(address: str) -> str:
    """Return what is said against a setting; "": it is an address of this host."""
    try:
        family, _, _, _, found = socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)[0]
    except (OSError, ValueError):  # ValueError: a name that cannot be encoded
        return f"{address} does not resolve here"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((found[0], 0))
        except OSError:
            return f"{address} is no address of this host"
    return ""


def _secret(configuration: Configuration) -> Check:
    path = expanded(configuration.secret_file)
    try:
        held = configuration.secret() or b""
        return secret(str(path), len(held), path.stat().st_mode)
    except (ConfigurationError, OSError) as error:
        return fail("secret", str(error), f"head -c 32 /dev/urandom > {shlex.quote(str(path))}")


def secret(path: str, length: int, mode: int) -> Check:
    """Check whether the shared secret is long enough, and this user's alone; a container's group may read it."""
    if length < _FEWEST_BYTES:
        return warn(
            "secret",
            f"{path} has {length} bytes, which can be guessed",
            f"head -c 32 /dev/urandom > {shlex.quote(path)}, the same file on every host",
        )
    if mode & stat.S_IRWXO:
        return warn("secret", f"{path} is open to every user of this host", f"chmod o= {shlex.quote(path)}")
    return ok("secret", f"{path} has {length} bytes")


def _port(port: int, bind: str, name: str = "port") -> Check:
    with socket.socket(family_of(bind) or socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as UCX is configured to do
        try:
            probe.bind((bind, port))
        except OSError as error:
            return fail(f"{name} {port}", f"cannot listen: {error.strerror}", f"ss -ltnp 'sport = :{port}'; or port 0")
    return ok(f"{name} {port}", "free")
