"""Which addresses of this host tickets name: of an RDMA interface first, then of the default route, then loopback."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
RDMA_DEVICES = Path("/sys/class/infiniband")


def interface_address(interface: str) -> str | None:
    """IPv4 address of a network interface, or None."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def is_loopback(address: str) -> bool:
    """Whether the address leads to the host that uses it."""
    return address.startswith("127.") or address in ("localhost", "::1")


def address_towards(host: str, port: int) -> str | None:
    """The IPv4 address from which this host reaches another one. None: it is this host, or there is no way to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # nothing is sent
        except OSError:
            return None
        own, other = probe.getsockname()[0], probe.getpeername()[0]
    return None if own == other or is_loopback(other) else str(own)


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


def default_route_interface(table: Path = Path("/proc/net/route")) -> str | None:
    """Interface of the IPv4 default route, or None."""
    try:
        rows = table.read_text().splitlines()[1:]
    except OSError:
        return None
    return next(
        (fields[0] for fields in map(str.split, rows) if len(fields) > 7 and fields[1] == fields[7] == "00000000"), None
    )


def advertised() -> tuple[str, ...]:
    """Addresses to advertise, best first; loopback only where there is nothing else."""
    interfaces = rdma_interfaces()
    if route := default_route_interface():
        interfaces.append(route)
    found = [address for interface in interfaces if (address := interface_address(interface))]
    return tuple(dict.fromkeys(found)) or (LOOPBACK,)
