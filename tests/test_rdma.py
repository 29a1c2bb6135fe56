"""The wire rdma: what a host and a process must have for it, and which transports a context gets without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from transport import rdma
from transport.errors import WireNotAllowedError
from transport.wires import Wire, admits_rdma, settings_for

MIB = 1 << 20
NO_DEVICE = "this host has no InfiniBand or RoCE device"


def port(root: Path, name: str, state: str) -> None:
    device, _, number = name.partition(":")
    path = root / device / "ports" / number
    path.mkdir(parents=True)
    (path / "state").write_text(state + "\n")


def process(
    own: Path, *, limit: str, pinned_kib: int = 0, capabilities: int = 0, users: str = "0 0 4294967295"
) -> Path:
    """Files of a process as the kernel shows them."""
    own.mkdir()
    (own / "limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max locked memory         {limit:<20} unlimited            bytes     \n"
    )
    (own / "status").write_text(f"VmLck:\t       0 kB\nVmPin:\t{pinned_kib:8} kB\nCapEff:\t{capabilities:016x}\n")
    (own / "uid_map").write_text("         " + "          ".join(users.split()) + "\n")
    return own


# --- ports ----------------------------------------------------------------------------------------------
def test_one_active_port_suffices(tmp_path: Path) -> None:
    assert rdma.no_port(tmp_path) == NO_DEVICE
    port(tmp_path, "rxe1:1", "1: DOWN")
    assert rdma.no_port(tmp_path) == "no port is ACTIVE: rxe1:1 is DOWN"
    port(tmp_path, "rxe0:1", "4: ACTIVE")
    assert rdma.no_port(tmp_path) == ""
    assert rdma.ports(tmp_path) == {"rxe0:1": "ACTIVE", "rxe1:1": "DOWN"}


# --- locked memory --------------------------------------------------------------------------------------
@pytest.mark.parametrize("limit_kib", [64, 1024, 64 * 1024])
def test_less_than_ucxs_own_buffers_is_refused(tmp_path: Path, limit_kib: int) -> None:
    own = process(tmp_path / "own", limit=str(limit_kib << 10))
    assert rdma.lockable_bytes(own) == limit_kib << 10
    assert "ulimit -l unlimited" in rdma.no_memory(0, own)


def test_registered_memory_comes_on_top_and_what_is_locked_already_counts(tmp_path: Path) -> None:
    enough = rdma.UCX_BYTES + 16 * MIB
    own = process(tmp_path / "own", limit=str(enough))
    assert rdma.no_memory(16 * MIB, own) == ""
    assert rdma.no_memory(16 * MIB + 1, own) != ""
    pinned = process(tmp_path / "pinned", limit=str(enough), pinned_kib=1)
    assert rdma.no_memory(16 * MIB, pinned) != ""


def test_without_a_limit_any_amount_may_be_locked(tmp_path: Path) -> None:
    assert rdma.no_memory(1 << 50, process(tmp_path / "unlimited", limit="unlimited")) == ""
    assert rdma.no_memory(1 << 50, process(tmp_path / "capable", limit="65536", capabilities=1 << 14)) == ""


def test_a_capability_of_a_user_namespace_is_none_of_the_hosts(tmp_path: Path) -> None:
    own = process(tmp_path / "own", limit="65536", capabilities=1 << 14, users="0 1000 1")
    assert rdma.lockable_bytes(own) == 65536


def test_the_first_reason_is_the_ports(tmp_path: Path) -> None:
    own = process(tmp_path / "own", limit="65536")
    assert rdma.refusal(root=tmp_path / "sys", own=own) == NO_DEVICE
    port(tmp_path / "sys", "mlx5_0:1", "4: ACTIVE")
    assert "may lock 64 KiB" in rdma.refusal(root=tmp_path / "sys", own=own)


# --- which transports a context gets -----------------------------------------------------------------------
def wires(*names: Wire) -> frozenset[Wire]:
    return frozenset(names)


@pytest.mark.parametrize("allowed", [wires("rdma"), wires("mapped", "rdma"), wires("cuda", "rdma")])
def test_rdma_alone_is_an_error_with_the_reason_where_it_is_refused(allowed: frozenset[Wire]) -> None:
    assert admits_rdma(settings_for(allowed, refused=""))
    with pytest.raises(WireNotAllowedError, match=NO_DEVICE):
        settings_for(allowed, refused=NO_DEVICE)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("allowed", [None, wires("tcp", "rdma"), wires("mapped", "shm", "tcp", "rdma")])
def test_with_other_wires_a_context_does_without_rdma(allowed: frozenset[Wire] | None, shared_memory: bool) -> None:
    with_it = settings_for(allowed, shared_memory=shared_memory, refused="")
    without = settings_for(allowed, shared_memory=shared_memory, refused=NO_DEVICE)
    assert (admits_rdma(with_it), admits_rdma(without)) == (True, False)
    assert (with_it["RNDV_THRESH"], "RC_RETRY_COUNT" in without) == ("8192", False)


@pytest.mark.parametrize("allowed", [None, wires("rdma"), wires("tcp", "rdma")])
def test_no_context_uses_ud(allowed: frozenset[Wire] | None) -> None:
    """It takes 30 s to learn that a host is gone, and ends the process when the device is gone."""
    names = settings_for(allowed, refused="")["TLS"].removeprefix("^").split(",")
    assert ("ud" in names) == (allowed is None)
    assert not {"ib", "rc"} & set(names)


def test_a_context_for_tcp_is_the_same_on_every_host() -> None:
    assert settings_for(wires("tcp"), refused="") == settings_for(wires("tcp"), refused=NO_DEVICE)


def test_the_interface_of_tcp_leaves_the_ports_of_rdma_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.rdma.ports", lambda: {"mlx5_0:1": "ACTIVE", "mlx5_1:1": "DOWN"})
    for allowed in (wires("tcp", "rdma"), None):
        assert settings_for(allowed, refused="", interface="eth0")["NET_DEVICES"] == "eth0,mlx5_0:1,mlx5_1:1"
        assert settings_for(allowed, refused=NO_DEVICE, interface="eth0")["NET_DEVICES"] == "eth0"


@pytest.mark.parametrize(
    ("theirs", "left"),
    [
        ("all", "^ib"),
        ("^sm", "^sm,ib"),
        ("rc_x,ud,dc,tcp", "tcp"),
        ("tcp,self", None),
        ("^ib", None),
        ("^rc", "^rc,ib"),
    ],
)
def test_a_choice_of_transports_in_the_environment_loses_what_the_host_refuses(
    theirs: str, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.wires.user_settings", lambda: frozenset({"TLS"}))
    monkeypatch.setenv("UCX_TLS", theirs)
    assert "TLS" not in settings_for(None, refused="")
    assert settings_for(None, refused=NO_DEVICE).get("TLS") == left


def test_rdma_alone_in_the_environment_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.wires.user_settings", lambda: frozenset({"TLS"}))
    monkeypatch.setenv("UCX_TLS", "rc,ud")
    with pytest.raises(WireNotAllowedError, match=NO_DEVICE):
        settings_for(None, refused=NO_DEVICE)
