"""Addresses of this host that tickets name: of an RDMA interface first, then of the default route, then loopback.

A ring is served by addresses of one family, since a UCX listener has one: IPv4 where the host has it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from transport.errors import UsageError
from transport.wire.interfaces import addresses_of
from transport.wires import MAX_ADDRESSES

LOOPBACK = "127.0.0.1"
LOOPBACK_IPV6 = "::1"
_RTF_REJECT: Final = 0x200
RDMA_DEVICES = Path("/sys/class/infiniband")


def interface_address(interface: str) -> str | None:
    """Return an address of a network interface, of IPv4 if it has one; None: it has none that others reach."""
    return next(iter(addresses_of(interface)), None)


def family_of(address: str) -> socket.AddressFamily | None:
    """Return the family of an IP address; None: it is none, but perhaps a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, address)
        except (OSError, ValueError, TypeError):  # ValueError: a zero in the text; TypeError: no text
            continue
        return family
    return None


def is_ipv6(address: str) -> bool:
    """Return whether this is an IPv6 address."""
    return family_of(address) is socket.AF_INET6


def host_port(host: str, port: int) -> str:
    """Return host and port as one text: ``10.0.0.1:7000``, ``[fd00::1]:7000``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Return whether the address leads to the host that uses it."""
    return address.startswith("127.") or address in ("localhost", "::1")


def listened_on(bind: str, addresses: Sequence[str]) -> str:
    """Return the address to listen on: ``bind``, or all of the family that the addresses of tickets have.

    UsageError for addresses of both.
    """
    literal = [each for each in (bind, *addresses) if family_of(each) is not None]
    if len({is_ipv6(each) for each in literal}) > 1:
        raise UsageError(
            f"{', '.join(literal)} are of IPv4 and of IPv6; a ring is served by one of them: leave some out"
        )
    return bind or ("::" if any(map(is_ipv6, literal)) else "")


def loopback_of(addresses: Iterable[str]) -> str:
    """Return the address of loopback of the family by which a ring with these addresses is served."""
    return LOOPBACK_IPV6 if any(map(is_ipv6, addresses)) else LOOPBACK


def address_towards(host: str, port: int) -> str | None:
    """Return the address from which this host reaches another one. None: it is this host, or there is no way to it."""
    try:
        ways = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, _, _, place in sorted(ways, key=lambda way: way[0] != socket.AF_INET):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(place)  # nothing is sent
            own, other = probe.getsockname()[0], probe.getpeername()[0]
            return None if own == other or is_loopback(other) else str(own)
    return None


def active_ports(root: Path = RDMA_DEVICES) -> list[Path]:
    """Return the folder of each InfiniBand or RoCE port that is up."""
    return [path for path in sorted(root.glob("*/ports/*")) if _read(path / "state").endswith(": ACTIVE")]


def rdma_interfaces(root: Path = RDMA_DEVICES) -> list[str]:
    """Return the network interfaces of the ports that are up."""
    return sorted({name for port in active_ports(root) for name in interfaces_of(port)})


def interfaces_of(port: Path) -> set[str]:
    """Return the network interfaces of a port, given its folder in sysfs.

    A RoCE port's addresses name theirs, also where these are bonds, VLANs, or the device is virtual. Those of IPoIB are
    beside the device, with the number of their port less one.
    """
    named = {_read(path) for path in (port / "gid_attrs" / "ndevs").glob("*")}
    beside = (port.parents[1] / "device" / "net").glob("*")
    return named - {""} | {path.name for path in beside if (_read(path / "dev_port") or "0") == str(int(port.name) - 1)}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the kernel refuses to read what is not set
        return ""


def default_route_interface(
    table: Path = Path("/proc/net/route"), table_ipv6: Path = Path("/proc/net/ipv6_route")
) -> str | None:
    """Return the interface of the default route, of IPv4 if there is one; None: there is none."""
    ipv4 = (fields[0] for fields in _rows(table) if len(fields) > 7 and fields[1] == fields[7] == "00000000")
    ipv6 = (
        fields[9]
        for fields in _rows(table_ipv6)
        if len(fields) > 9 and fields[0] == "0" * 32 and fields[1] == "00" and not int(fields[8], 16) & _RTF_REJECT
    )
    return next((name for name in (*ipv4, *ipv6) if name != "lo"), None)


def _rows(table: Path) -> Iterator[list[str]]:
    try:
        return map(str.split, table.read_text().splitlines())
    except OSError:  # a kernel without it
        return iter(())


def advertised(ipv6: bool | None = None) -> tuple[str, ...]:
    """Return the addresses to advertise, best first, as many as a ticket has; loopback where there is nothing else.

    Args:
        ipv6: whether they are to be of this family; None: of IPv4, or of IPv6 where the host has no address of IPv4.
    """
    interfaces = rdma_interfaces()
    if route := default_route_interface():
        interfaces.append(route)
    found = [address for interface in interfaces for address in addresses_of(interface)]
    if ipv6 is None:
        ipv6 = bool(found) and all(map(is_ipv6, found))
    kept = tuple(dict.fromkeys(address for address in found if is_ipv6(address) is ipv6))
    return kept[:MAX_ADDRESSES] or (LOOPBACK_IPV6 if ipv6 else LOOPBACK,)
