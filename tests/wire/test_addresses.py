"""Which addresses go into tickets, by what the kernel says about interfaces and routes."""

from __future__ import annotations

from pathlib import Path

import pytest

from transport.wire import addresses
from transport.wire.addresses import advertised, default_route_interface, interface_address, rdma_interfaces

HEADER = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"


def devices(root: Path, **interfaces: list[str]) -> Path:
    """A tree like /sys/class/infiniband."""
    root.mkdir(exist_ok=True)
    for device, names in interfaces.items():
        (root / device / "ports" / "1").mkdir(parents=True)
        for name in names:
            (root / device / "device" / "net" / name).mkdir(parents=True)
    return root


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
    assert rdma_interfaces(devices(tmp_path / "empty")) == []


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
    assert default_route_interface(table) is None


def test_without_a_route_table_there_is_no_interface(tmp_path: Path) -> None:
    assert default_route_interface(tmp_path / "missing") is None


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
    monkeypatch.setattr(addresses, "interface_address", known.get)


def test_rdma_comes_before_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, rdma=("ib0", "ib1"), route="ens5", ens5="192.168.0.7", ib0="10.1.0.7", ib1="10.2.0.7")
    assert advertised() == ("10.1.0.7", "10.2.0.7", "192.168.0.7")


@pytest.mark.parametrize(("rdma", "route"), [((), None), (("ib0",), None), (("ib0",), "ens5")])
def test_loopback_only_where_there_is_nothing_else(
    monkeypatch: pytest.MonkeyPatch, rdma: tuple[str, ...], route: str | None
) -> None:
    host(monkeypatch, rdma=rdma, route=route)
    assert advertised() == ("127.0.0.1",)


def test_this_host_advertises_at_least_one_ipv4_address() -> None:
    found = advertised()
    assert found
    assert all(len(address.split(".")) == 4 for address in found)


def test_rdma_interfaces_of_all_devices_are_found_sorted(tmp_path: Path) -> None:
    root = devices(tmp_path / "infiniband", mlx5_1=["ib1"], mlx5_0=["ib0", "eth4"])
    assert rdma_interfaces(root) == ["eth4", "ib0", "ib1"]
