"""What UCX can use of a host's network, and what has changed since."""

from __future__ import annotations

from pathlib import Path

import pytest

from transport.wire import interfaces
from transport.wire.interfaces import Network, addresses, interface_towards

# addresses of lo, which runs; of one that does not; of the link alone; one that another host may have; and two that
# pass: one that the host changes each day, and one that is not to be used anew
TABLE = """\
fd000000000000000000000000000006 01 40 00 01       lo
fd000000000000000000000000000007 01 40 00 20       lo
00000000000000000000000000000001 01 80 10 80       lo
fd000000000000000000000000000002 02 40 00 80       no-such-if0
fe800000000000000000000000000003 01 40 20 80       lo
fd000000000000000000000000000004 01 40 00 40       lo
fd000000000000000000000000000005 01 40 00 80       lo
"""


def test_addresses_are_those_that_can_be_bound_here_and_reached_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(TABLE)
    monkeypatch.setattr(interfaces, "_IPV6", table)
    assert [address for name, address in addresses() if name == "lo"] == [
        "127.0.0.1",
        "::1",
        "fd00::5",
        "fd00::6",
        "fd00::7",
    ]


def test_a_kernel_without_ipv6_has_ipv4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_IPV6", tmp_path / "missing")
    assert ("lo", "127.0.0.1") in addresses()


def test_what_a_host_has_gained_is_named_and_of_what_it_has_lost_ports_beside_others() -> None:
    before = Network(frozenset({("lo", "127.0.0.1"), ("eth0", "10.0.0.1")}), frozenset({"mlx5_0:1"}))
    after = Network(frozenset({("lo", "127.0.0.1"), ("eth0", "10.0.0.2")}), frozenset({"mlx5_1:1"}))
    assert after.changed_since(before) == "mlx5_1:1, eth0 (10.0.0.2) came up; mlx5_0:1 went down"
    assert Network(before.addresses, frozenset()).changed_since(before) == ""
    assert before.changed_since(before) == ""
    assert Network.now().changed_since(Network.now()) == ""


@pytest.mark.parametrize("address", sorted({address for _, address in addresses()} | {"127.0.0.9"}))
def test_every_interface_leads_to_an_address_of_this_host(address: str) -> None:
    assert interface_towards(address) is None
