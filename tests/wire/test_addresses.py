"""Which addresses go into tickets, by what the kernel says about interfaces and routes."""

from __future__ import annotations

from pathlib import Path

import pytest

from transport.client.connections.pool import port_of
from transport.errors import UsageError
from transport.wire import addresses
from transport.wire.addresses import (
    advertised,
    default_route_interface,
    host_port,
    interface_address,
    is_ipv6,
    listened_on,
    rdma_interfaces,
)
from transport.wires import MAX_ADDRESSES

HEADER = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"


def port(root: Path, device: str, number: int = 1, state: str = "4: ACTIVE") -> Path:
    """A port below a tree like /sys/class/infiniband."""
    path = root / device / "ports" / str(number)
    path.mkdir(parents=True)
    (path / "state").write_text(state + "\n")
    return path


def of_addresses(path: Path, *interfaces: str) -> None:
    """The interfaces of a port's addresses; the kernel refuses to read what stands for none."""
    folder = path / "gid_attrs" / "ndevs"
    folder.mkdir(parents=True)
    for number, name in enumerate(interfaces):
        (folder / str(number)).write_text(name + "\n")
    (folder / str(len(interfaces))).symlink_to("nowhere")


def beside(root: Path, device: str, **ports: int | None) -> None:
    """Interfaces of the same adapter, with the number of their port less one; None: the driver does not say."""
    for name, number in ports.items():
        folder = root / device / "device" / "net" / name
        folder.mkdir(parents=True)
        if number is not None:
            (folder / "dev_port").write_text(f"{number}\n")


def routes(path: Path, *rows: tuple[str, str, int]) -> Path:
    """A table like /proc/net/route, of (interface, destination, metric)."""
    lines = [
        f"{interface}\t{destination}\t0100A8C0\t0003\t0\t0\t{metric}\t00000000\t0\t0\t0\n"
        for interface, destination, metric in rows
    ]
    path.write_text(HEADER + "".join(lines))
    return path


# --- RDMA devices --------------------------------------------------------------------------------


def test_a_host_without_rdma_has_no_such_interface(tmp_path: Path) -> None:
    assert rdma_interfaces(tmp_path / "missing") == []
    assert rdma_interfaces(tmp_path) == []


# --- the default route -------------------------------------------------------------------------------
def test_interface_of_the_default_route_is_found_among_others(tmp_path: Path) -> None:
    table = routes(tmp_path / "route", ("docker0", "000011AC", 0), ("ens5", "00000000", 100), ("ens5", "0000A8C0", 0))
    assert default_route_interface(table) == "ens5"


@pytest.mark.parametrize(
    "text",
    ["", HEADER, HEADER + "\n", HEADER + "ens5\n", HEADER + "ens5\t0000A8C0\t00000000\n"],
    ids=["empty", "no routes", "blank line", "cut off", "local routes only"],
)
def test_without_a_default_route_there_is_no_interface(tmp_path: Path, text: str) -> None:
    table = tmp_path / "route"
    table.write_text(text)
    assert default_route_interface(table, tmp_path / "missing") is None


def test_without_a_route_table_there_is_no_interface(tmp_path: Path) -> None:
    assert default_route_interface(tmp_path / "missing", tmp_path / "missing") is None


IPV6_ROUTES = """\
fd770000000000000000000000000000 40 {0} 00 {0} 00000100 00000001 00000000 00000001   cable0
{0} 00 {0} 00 {0} ffffffff 00000001 00000000 00200200       lo
{0} 00 {0} 00 {0} 00000400 00000001 00000000 00000001   cable0
""".format("0" * 32)


def test_without_a_route_of_ipv4_that_of_ipv6_counts(tmp_path: Path) -> None:
    table = tmp_path / "ipv6_route"
    table.write_text(IPV6_ROUTES)
    assert default_route_interface(tmp_path / "missing", table) == "cable0"
    ipv4 = routes(tmp_path / "route", ("ens5", "00000000", 100))
    assert default_route_interface(ipv4, table) == "ens5"


# --- addresses of interfaces ---------------------------------------------------------------------------
def test_loopback_has_its_address() -> None:
    assert interface_address("lo") == "127.0.0.1"


@pytest.mark.parametrize("name", ["no-such-if0", "", "a" * 40, "ü"])
def test_an_interface_that_does_not_exist_has_no_address(name: str) -> None:
    assert interface_address(name) is None


# --- what is advertised ----------------------------------------------------------------------------------
def host(
    monkeypatch: pytest.MonkeyPatch, *, rdma: tuple[str, ...] = (), route: str | None = None, **known: str
) -> None:
    """A host with these interfaces; ``known`` are the ones that have an address."""
    monkeypatch.setattr(addresses, "rdma_interfaces", lambda: list(rdma))
    monkeypatch.setattr(addresses, "default_route_interface", lambda: route)
    monkeypatch.setattr(addresses, "addresses_of", lambda name: [known[name]] if name in known else [])


def test_rdma_comes_before_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, rdma=("ib0", "ib1"), route="ens5", ens5="192.168.0.7", ib0="10.1.0.7", ib1="10.2.0.7")
    assert advertised() == ("10.1.0.7", "10.2.0.7", "192.168.0.7")


@pytest.mark.parametrize(("rdma", "route"), [((), None), (("ib0",), None), (("ib0",), "ens5")])
def test_loopback_only_where_there_is_nothing_else(
    monkeypatch: pytest.MonkeyPatch, rdma: tuple[str, ...], route: str | None
) -> None:
    host(monkeypatch, rdma=rdma, route=route)
    assert advertised() == ("127.0.0.1",)


def test_a_host_with_ipv6_alone_advertises_that_and_one_with_both_the_family_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host(monkeypatch, rdma=("ib0",), route="ens5", ens5="fd00::7", ib0="fd01::7")
    assert advertised() == ("fd01::7", "fd00::7")
    assert advertised(ipv6=False) == ("127.0.0.1",)
    host(monkeypatch, rdma=("ib0",), route="ens5", ens5="192.168.0.7", ib0="fd01::7")
    assert advertised() == ("192.168.0.7",)
    assert advertised(ipv6=True) == ("fd01::7",)


def test_no_more_addresses_are_advertised_than_a_ticket_has(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"fd00::{at}" for at in range(1, 40)]
    monkeypatch.setattr(addresses, "rdma_interfaces", list)
    monkeypatch.setattr(addresses, "default_route_interface", lambda: "ens5")
    monkeypatch.setattr(addresses, "addresses_of", lambda _: many)
    assert advertised() == tuple(many[:MAX_ADDRESSES])


def test_this_host_advertises_addresses_of_one_family() -> None:
    found = advertised()
    assert found
    assert len({is_ipv6(address) for address in found}) == 1


def test_a_ring_listens_on_the_family_of_its_addresses() -> None:
    assert listened_on("", ("10.0.0.1", "node7")) == ""
    assert listened_on("", ("node7", "fd00::1")) == "::"
    assert listened_on("fd00::1", ("fd00::1",)) == "fd00::1"
    for bind, named in (("", ("10.0.0.1", "fd00::1")), ("::", ("10.0.0.1",)), ("10.0.0.1", ("fd00::1",))):
        with pytest.raises(UsageError, match="IPv4 and of IPv6"):
            listened_on(bind, named)


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "node7"])
def test_host_and_port_are_one_text_that_is_read_again(host: str) -> None:
    assert port_of(host_port(host, 7000)) == (host, 7000)


@pytest.mark.parametrize("text", ["fd00::1:7000", "[fd00::1]", "[10.0.0.1]:7000", "[]:7000", ":7000", "node7:0"])
def test_another_text_is_no_host_and_port(text: str) -> None:
    with pytest.raises(UsageError, match="host:port"):
        port_of(text)


def test_a_virtual_device_a_bond_and_a_vlan_are_found_by_the_ports_addresses(tmp_path: Path) -> None:
    of_addresses(port(tmp_path, "rxe0"), "eth0", "eth0")
    of_addresses(port(tmp_path, "mlx5_bond_0"), "bond0", "bond0.7")
    beside(tmp_path, "mlx5_bond_0", eth4=0, eth5=1)
    assert rdma_interfaces(tmp_path) == ["bond0", "bond0.7", "eth0", "eth4"]


def test_ip_over_infiniband_is_found_beside_its_port(tmp_path: Path) -> None:
    of_addresses(port(tmp_path, "mlx4_0", 1))
    of_addresses(port(tmp_path, "mlx4_0", 2, "1: DOWN"))
    of_addresses(port(tmp_path, "mlx5_0"))
    beside(tmp_path, "mlx4_0", ib0=0, ib1=1)
    beside(tmp_path, "mlx5_0", ib2=None)
    assert rdma_interfaces(tmp_path) == ["ib0", "ib2"]


def test_a_port_that_is_down_has_no_interface_that_tickets_name(tmp_path: Path) -> None:
    of_addresses(port(tmp_path, "rxe0", state="1: DOWN"), "eth0")
    beside(tmp_path, "rxe0", eth0=0)
    assert rdma_interfaces(tmp_path) == []
