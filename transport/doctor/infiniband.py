"""InfiniBand and RoCE as /sys/class/infiniband shows them: devices, ports, state, rate, permissions, counters.

The root can be another folder, so that all of it is tested on machines without a card.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from transport import rdma
from transport.doctor.finding import Check, fail, ok, warn
from transport.errors import UsageError
from transport.wire.addresses import interfaces_of
from transport.wire.library import all_transports
from transport.wire.verbs import PROVIDERS, Lack, provided_devices

SYSFS: Final = Path("/sys/class/infiniband")
DEVICES: Final = Path("/dev/infiniband")
_WORD: Final = 4  # the ports' data counters count 32-bit words
_PACKET: Final = 4096  # bytes of payload in a packet at most, where a device counts packets alone (soft-RoCE)
_BUSY_SHARE: Final = 0.05  # of a transfer's bytes: a port that carried less took no part in it


class PortView(msgspec.Struct, frozen=True, kw_only=True):
    """One port of one device. Bytes are since the driver was loaded."""

    device: str
    port: int
    state: str  # ACTIVE, DOWN …
    link_layer: str  # InfiniBand, Ethernet (RoCE)
    rate: str
    sent_bytes: int
    received_bytes: int
    packets: int | None  # sent and received, where the device counts no bytes
    errors: int  # link errors, symbols and packets dropped

    @property
    def name(self) -> str:
        """Name that UCX has for it: mlx5_0:1."""
        return f"{self.device}:{self.port}"


def ports(root: Path = SYSFS) -> list[PortView]:
    """Every port of every device."""
    return [_port(path) for path in sorted(root.glob("*/ports/*"), key=lambda path: (path.parts[-3], int(path.name)))]


def _port(path: Path) -> PortView:
    counters, hardware = path / "counters", path / "hw_counters"
    errors = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards")
    return PortView(
        device=path.parts[-3],
        port=int(path.name),
        state=_text(path / "state").rpartition(": ")[2] or "unknown",
        link_layer=_text(path / "link_layer") or "unknown",
        rate=_text(path / "rate") or "unknown",
        sent_bytes=_WORD * _number(counters / "port_xmit_data"),
        received_bytes=_WORD * _number(counters / "port_rcv_data"),
        packets=None if counters.is_dir() else sum(_number(hardware / name) for name in ("sent_pkts", "rcvd_pkts")),
        errors=sum(_number(counters / name) for name in errors),
    )


def refusal(listed: Callable[[], Iterable[tuple[str, str]]], root: Path = SYSFS) -> str:
    """Say why the wire rdma cannot be used on this host; empty where it can. No interface with an IP address is needed.

    Args:
        listed: (transport, device) of all that the loaded UCX can use, as `all_transports` gives them.
    """
    if why := rdma.no_port(root):
        return why
    active = [port.name for port in ports(root) if port.state == "ACTIVE"]
    if not {device for _, device in listed()} & set(active):
        return f"the loaded UCX does not list {', '.join(active)}; transport doctor says what it lacks"
    return ""


def require() -> None:
    """Raise UsageError where `--wire rdma` cannot be had on this host."""
    if why := refusal(all_transports) or rdma.no_memory(0):
        raise UsageError(f"--wire rdma: {why}")


def lacking(lack: Lack | None, root: Path = SYSFS) -> Iterator[Check]:
    """Check for a fault of the installed UCX, on hosts whose ports it could use: before all else: it costs the most.

    Args:
        lack: why the loaded UCX cannot use RDMA devices.
    """
    active = [port.name for port in ports(root) if port.state == "ACTIVE"]
    if active and lack:
        detail = f"ACTIVE: {', '.join(active)}; but {lack.why}: payloads would go over tcp"
        yield fail("infiniband plug-in", detail, lack.remedy)


def checks(
    *,
    asked: bool,
    root: Path = SYSFS,
    devices: Path = DEVICES,
    provided: Callable[[], Collection[str]] = provided_devices,
) -> Iterator[Check]:
    """Yield what can be said before anything is sent.

    Args:
        asked: the configuration names the wire rdma.
        provided: devices for which libibverbs has a provider, as `provided_devices` gives them.
    """
    found = ports(root)
    if not found:
        detail = "no InfiniBand or RoCE device"
        if asked:
            yield fail(
                "infiniband",
                f"{detail}, but rdma is among the configured wires",
                "lspci | grep -i -E 'mellanox|infiniband'; modprobe mlx5_ib; or take rdma out of TRANSPORT_WIRES",
            )
        else:
            yield ok("infiniband", f"{detail}; tcp and shared memory are used")
        return
    for port in found:
        yield _state(port, interfaces_of(root / port.device / "ports" / str(port.port)))
    yield _permissions(devices)
    yield _providers({port.device for port in found} - set(provided()))


def _providers(without: set[str]) -> Check:
    if without:
        detail = f"libibverbs has no provider for {', '.join(sorted(without))}, so UCX does not see it"
        return fail("infiniband providers", detail, PROVIDERS)
    return ok("infiniband providers", "libibverbs has one for each device")


def _state(port: PortView, interfaces: Collection[str]) -> Check:
    name = f"infiniband {port.name}"
    detail = f"{port.state}, {port.link_layer}, {port.rate}, {port.errors} errors"
    if port.state != "ACTIVE":
        remedy = f"ibstat {port.device} {port.port}; check cable and subnet manager (systemctl status opensm)"
        if port.link_layer == "Ethernet":
            remedy = f"ip link set dev {' '.join(sorted(interfaces)) or '…'} up; check cable and switch"
        return warn(name, detail, remedy)
    return ok(name, detail)


def _permissions(devices: Path) -> Check:
    nodes = sorted(devices.glob("uverbs*"))
    if not nodes:
        return fail(
            "infiniband permissions",
            f"no uverbs device in {devices}",
            "modprobe ib_uverbs; in a container: --device=/dev/infiniband (Kubernetes: the RDMA device plug-in)",
        )
    closed = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        return fail("infiniband permissions", f"{', '.join(closed)} cannot be opened", f"chmod 666 {' '.join(closed)}")
    return ok("infiniband permissions", f"{len(nodes)} devices can be opened")


def traffic(before: list[PortView], after: list[PortView]) -> dict[str, int]:
    """Bytes that each port sent and received between two looks."""
    earlier = {port.name: port.sent_bytes + port.received_bytes for port in before}
    return {port.name: port.sent_bytes + port.received_bytes - earlier.get(port.name, 0) for port in after}


def rails(before: list[PortView], after: list[PortView], transfer_bytes: int) -> Check:
    """Check which ports carried a transfer of so many bytes, by their counters."""
    carried = traffic(before, after)
    earlier = {port.name: port.packets or 0 for port in before}
    packets = {port.name: port.packets - earlier.get(port.name, 0) for port in after if port.packets is not None}
    sizes = carried | {name: number * _PACKET for name, number in packets.items()}
    busy = [name for name, size in sizes.items() if size >= _BUSY_SHARE * transfer_bytes]
    active = sum(port.state == "ACTIVE" for port in after)
    shown = ", ".join(
        f"{name} {packets[name]} packets" if name in packets else f"{name} {size / 1e6:.1f} MB"
        for name, size in sorted(carried.items())
    )
    if not busy:
        return warn(
            "rails",
            f"{transfer_bytes / 1e6:.1f} MB were read, but not over an InfiniBand port ({shown or 'no ports'})",
            "transport bench fetch HOST:PORT --wire rdma, from another host; a transfer within one host may stay on it",
        )
    if len(busy) < active:
        return warn(
            "rails",
            f"{len(busy)} of {active} active ports carried the transfer ({shown})",
            "UCX_MAX_RNDV_RAILS=2 transport bench fetch …; UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1 names the ports",
        )
    return ok("rails", f"{len(busy)} of {active} active ports carried the transfer ({shown})")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a driver may leave a file out, or refuse to read it
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else 0
