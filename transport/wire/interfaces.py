"""The parts of this host's network which UCX can use: addresses of its interfaces, and ports of its RDMA devices.

UCX looks for them once, when a context is made. A context never uses what comes up later, and connects by ports that
have gone down since. A host needs as much as a second from the moment when an interface is brought up until the kernel
calls it running.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

from transport import rdma

_SIOCGIFFLAGS: Final = 0x8913
_SIOCGIFADDR: Final = 0x8915
_UP_AND_RUNNING: Final = 0x1 | 0x40
_PASSING: Final = 0x01 | 0x20  # temporary, for privacy: the host changes it each day; or deprecated
_NOT_YET: Final = 0x08 | 0x40  # duplicate address detection has failed, or is under way: nothing can be bound there
_IPV6: Final = Path("/proc/net/if_inet6")
_NAMES: Final = Path("/sys/class/net")
_ROUTE, _ASK_FOR_ROUTE, _REQUEST = 24, 26, 1  # rtnetlink's names: RTM_NEWROUTE, RTM_GETROUTE, NLM_F_REQUEST
_TO, _THROUGH, _FROM = 1, 4, 7  # RTA_DST, RTA_OIF, RTA_PREFSRC


class Network(NamedTuple):
    """Addresses that are usable, as (interface, address), and ports of RDMA devices which are ACTIVE."""

    addresses: frozenset[tuple[str, str]]
    ports: frozenset[str]

    @classmethod
    def now(cls) -> Self:
        """Look at this host."""
        return cls(frozenset(addresses()), active_ports())

    def changed_since(self, earlier: Network) -> str:
        """Say why a context that was made ``earlier`` should be made anew; empty: nothing has changed for it.

        The last port that goes down says nothing: its link may be back before a transfer is given up.
        """
        gained = sorted(f"{interface} ({address})" for interface, address in self.addresses - earlier.addresses)
        gained = [*sorted(self.ports - earlier.ports), *gained]
        lost = sorted(earlier.ports - self.ports) if self.ports else []
        changes = {"came up": gained, "went down": lost}
        return "; ".join(f"{', '.join(names)} {what}" for what, names in changes.items() if names)


def active_ports() -> frozenset[str]:
    """Return the ports of RDMA devices which are ACTIVE."""
    return frozenset(port for port, state in rdma.ports().items() if state == "ACTIVE")


def addresses() -> Iterator[tuple[str, str]]:
    """Yield (interface, address) as UCX may use them, of interfaces that run."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        running = [name for _, name in socket.if_nameindex() if _runs(probe, name)]
    return ((name, address) for name in running for address in addresses_of(name))


def interface_towards(address: str) -> str | None:
    """Return the interface by which the kernel sends to an IP address; None: UCX cannot use it, or has a choice.

    UCX would take any interface that it has a route by to one of the other host's addresses. Where both hosts have the
    same address on one (behind the NAT of virtual machines, towards a management controller), it would connect a host
    to itself. To an address of this host every interface leads.
    """
    way = _way_to(ipaddress.ip_address(address))
    if way is None or way[0] == "lo" or way not in addresses() or (_NAMES / way[0] / "bridge").exists():
        return None
    return way[0]


def _way_to(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[str, str] | None:
    """Return (interface, own address) of what this host sends there; None: there is no way."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    wanted = struct.pack("=8BI", family, address.max_prefixlen, *[0] * 7)
    wanted += struct.pack("=HH", 4 + len(address.packed), _TO) + address.packed
    found: dict[int, bytes] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.send(struct.pack("=IHHII", 16 + len(wanted), _ASK_FOR_ROUTE, _REQUEST, 1, 0) + wanted)
            answer = kernel.recv(1 << 16)
        at = 16 + 12 if struct.unpack_from("=H", answer, 4) == (_ROUTE,) else len(answer)  # behind two headers
        while at < len(answer):
            length, kind = struct.unpack_from("=HH", answer, at)
            found[kind] = answer[at + 4 : at + length]
            at += length + 3 & ~3
        name = socket.if_indextoname(*struct.unpack("=I", found[_THROUGH]))
        return name, str(ipaddress.ip_address(found[_FROM]))
    except (OSError, KeyError):  # a sandbox, or the interface has gone; KeyError: a route without an address
        return None


def addresses_of(interface: str) -> list[str]:
    """Return the addresses of an interface that are not its link's alone: of IPv4 the first one, then those of IPv6.

    Of IPv6 those that stay come first.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        ipv4 = _ipv4_address(probe, interface)
    found = [*([] if ipv4 is None else [ipv4]), *(address for name, address in _ipv6_addresses() if name == interface)]
    return [address for address in found if not ipaddress.ip_address(address).is_link_local]


def _runs(probe: socket.socket, interface: str) -> bool:
    answer = _asked(probe, interface, _SIOCGIFFLAGS)
    return answer is not None and struct.unpack_from("H", answer, 16)[0] & _UP_AND_RUNNING == _UP_AND_RUNNING


def _ipv4_address(probe: socket.socket, interface: str) -> str | None:
    answer = _asked(probe, interface, _SIOCGIFADDR)
    return None if answer is None else socket.inet_ntoa(answer[20:24])


def _asked(probe: socket.socket, interface: str, what: int) -> bytes | None:
    try:
        return fcntl.ioctl(probe.fileno(), what, struct.pack("256s", interface.encode()[:15]))
    except OSError:  # it has none, or has gone
        return None


def _ipv6_addresses() -> Iterator[tuple[str, str]]:
    try:
        rows = [line.split() for line in _IPV6.read_text().splitlines()]
    except OSError:  # a kernel without IPv6
        return
    for digits, _, _, _, flags, interface in sorted(rows, key=lambda row: bool(int(row[4], 16) & _PASSING)):
        if not int(flags, 16) & _NOT_YET:
            yield interface, str(ipaddress.IPv6Address(bytes.fromhex(digits)))
