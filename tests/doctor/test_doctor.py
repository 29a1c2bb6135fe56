"""transport doctor: each judgement against made-up hosts, sysfs trees and limits; the whole on this one."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import Child
from made_up_card import card, with_card
from two_hosts import why_not

from transport import config
from transport.cli import run
from transport.doctor import host, infiniband, library, loopback, network, report
from transport.doctor.finding import Check
from transport.doctor.report import settings, ucx_settings
from transport.errors import RingError
from transport.wire import library as ucx
from transport.wire import verbs

GIB = 1 << 30


def statuses(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def every_bad_one_has_a_remedy(checks: list[Check]) -> bool:
    return all(bool(check.remedy) == (check.status != "ok") and "\n" not in check.remedy for check in checks)


# --- the kernel's limits -----------------------------------------------------------------------------------
@pytest.mark.parametrize(("free", "status"), [(GIB // 2, "fail"), (GIB, "warn"), (2 * GIB, "ok")])
def test_shared_memory_is_judged_by_the_rings_that_are_planned(free: int, status: str) -> None:
    check = host.shared_memory(free, 2 * GIB, GIB)
    assert check.status == status
    assert every_bad_one_has_a_remedy([check])
    assert status != "fail" or "--shm-size=1344m" in check.remedy


def test_open_files_are_judged_by_the_connections() -> None:
    assert host.open_files(65536, 65536, 1024).status == "ok"
    few = host.open_files(1024, 65536, 1024)
    assert (few.status, few.remedy.startswith("ulimit -n 4096;")) == ("warn", True)
    assert host.open_files(1024, 1024, 10_000).remedy.startswith("as root: ulimit -Hn 30256")
    assert host.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY, 10**6).status == "ok"


def test_locked_memory_matters_with_rdma_only() -> None:
    assert host.locked_memory(8 << 20, GIB, rdma=False).status == "ok"
    assert host.locked_memory(8 << 20, GIB, rdma=True).status == "fail"
    assert host.locked_memory(resource.RLIM_INFINITY, GIB, rdma=True).status == "ok"


@pytest.mark.parametrize(
    ("scope", "privileged", "status"), [(None, False, "ok"), (0, False, "ok"), (1, False, "warn"), (3, True, "ok")]
)
def test_the_ptrace_scope_tells_whether_cma_can_be(scope: int | None, privileged: bool, status: str) -> None:
    assert host.memory_of_others(scope, privileged=privileged).status == status


def test_one_core_is_few_and_memory_nodes_are_named() -> None:
    assert host.cores(1, 1).status == "warn"
    assert "numactl" in host.cores(64, 2).detail
    assert "within_size" in host.huge_pages("always within_size [never]").detail
    assert host.huge_pages("always [within_size] never").detail == "shared memory: within_size"


# --- InfiniBand --------------------------------------------------------------------------------------------
def test_no_card_is_fine_unless_rdma_is_asked_for(tmp_path: Path) -> None:
    (quiet,) = infiniband.checks(asked=False, root=tmp_path)
    (asked,) = infiniband.checks(asked=True, root=tmp_path)
    assert (quiet.status, asked.status) == ("ok", "fail")
    assert every_bad_one_has_a_remedy([quiet, asked])


def test_ports_are_read_from_sysfs(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_1", 1, state="1: DOWN")
    card(tmp_path, "mlx5_0", 1, sent_words=250)
    first, second = infiniband.ports(tmp_path)
    assert (first.name, first.state, first.rate, first.sent_bytes, first.errors) == (
        "mlx5_0:1",
        "ACTIVE",
        "400 Gb/sec (4X NDR)",
        1000,
        2,
    )
    assert (second.name, second.state) == ("mlx5_1:1", "DOWN")


def test_ports_and_permissions_are_findings_of_their_own(tmp_path: Path) -> None:
    root, devices = tmp_path / "sys", tmp_path / "dev"
    card(root, "mlx5_0", 1)
    down = card(root, "mlx5_1", 1, state="1: DOWN", layer="Ethernet")
    (down / "gid_attrs" / "ndevs").mkdir(parents=True)
    (down / "gid_attrs" / "ndevs" / "0").write_text("bond0\n")
    devices.mkdir()
    found = list(infiniband.checks(asked=True, root=root, devices=devices, provided=lambda: ["mlx5_0"]))
    assert statuses(found) == {
        "infiniband mlx5_0:1": "ok",
        "infiniband mlx5_1:1": "warn",
        "infiniband permissions": "fail",
        "infiniband providers": "fail",
    }
    assert "ip link set dev bond0 up" in found[1].remedy
    assert "mlx5_1" in found[3].detail
    assert every_bad_one_has_a_remedy(found)
    (devices / "uverbs0").touch()
    mended = infiniband.checks(asked=True, root=root, devices=devices, provided=lambda: ["mlx5_0", "mlx5_1"])
    assert set(statuses(list(mended)).values()) == {"ok", "warn"}


def test_rdma_takes_an_active_port_that_ucx_lists_and_no_interface_of_it(tmp_path: Path) -> None:
    def why(*listed: tuple[str, str]) -> str:
        return infiniband.refusal(lambda: listed, tmp_path)

    assert "no InfiniBand or RoCE device" in why(("rc_mlx5", "mlx5_0:1"))
    card(tmp_path, "mlx5_0", 1, state="1: DOWN")
    assert "mlx5_0:1 is DOWN" in why(("rc_mlx5", "mlx5_0:1"))
    card(tmp_path, "mlx5_0", 1)
    assert "does not list mlx5_0:1" in why(("tcp", "eth0"), ("posix", "memory"))
    assert why(("tcp", "eth0"), ("rc_mlx5", "mlx5_0:1")) == ""
    assert not list(tmp_path.glob("*/device/net"))


def there(cards: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command on this host with other cards."""
    command = with_card(cards, [sys.executable, "-m", "transport", *words])
    return subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True)


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.skipif(bool(why_not()), reason="a made-up card needs root and mount namespaces")
def test_where_a_port_is_active_the_lack_of_verbs_in_the_loaded_ucx_comes_first(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_0")
    preferred = {verbs.CHOICE: "false"}  # the wheel's
    doctor = there(tmp_path, "doctor", "--no-transfer", "--ring", "1MiB", "--json", "-", env=preferred)
    first = json.loads(doctor.stdout)["checks"][0]
    assert (doctor.returncode, first["name"], first["status"]) == (1, "infiniband plug-in", "fail")
    assert "mlx5_0:1" in first["detail"]
    assert first["remedy"].startswith(f"unset {verbs.CHOICE}")
    fetch = there(tmp_path, "bench", "fetch", "127.0.0.1:1", "--wire", "rdma", env=preferred)
    assert fetch.returncode == 2
    assert "does not list mlx5_0:1" in fetch.stderr


@pytest.mark.skipif(os.getuid() == 0, reason="root may open everything")
def test_a_device_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "uverbs0").touch(mode=0)
    check = infiniband._permissions(tmp_path)
    assert (check.status, check.remedy) == ("fail", f"chmod 666 {tmp_path / 'uverbs0'}")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ((250_000, 250_000), "ok", "2 of 2"),
        ((500_000, 0), "warn", "1 of 2"),
        ((0, 0), "warn", "not over an InfiniBand port"),
    ],
)
def test_counters_tell_which_rails_carried_a_transfer(
    tmp_path: Path, words: tuple[int, int], status: str, said: str
) -> None:
    for number in (0, 1):
        card(tmp_path, f"mlx5_{number}", sent_words=1000)
    before = infiniband.ports(tmp_path)
    for number, sent in enumerate(words):
        card(tmp_path, f"mlx5_{number}", sent_words=1000 + sent)
    after = infiniband.ports(tmp_path)
    assert infiniband.traffic(before, after) == {"mlx5_0:1": 4 * words[0], "mlx5_1:1": 4 * words[1]}
    check = infiniband.rails(before, after, 2_000_000)
    assert (check.status, said in check.detail) == (status, True)


@pytest.mark.parametrize(("packets", "status"), [(500, "ok"), (10, "warn")])
def test_a_device_that_counts_packets_alone_is_judged_by_them(tmp_path: Path, packets: int, status: str) -> None:
    """soft-RoCE has no folder counters."""
    port = card(tmp_path, "rxe0", layer="Ethernet")
    shutil.rmtree(port / "counters")
    (port / "hw_counters").mkdir()
    before = infiniband.ports(tmp_path)
    (port / "hw_counters" / "sent_pkts").write_text(f"{packets}\n")
    check = infiniband.rails(before, infiniband.ports(tmp_path), 2_000_000)
    assert (check.status, f"rxe0:1 {packets} packets" in check.detail) == (status, True)


# --- UCX ---------------------------------------------------------------------------------------------------
def test_plug_ins_are_the_files_beside_the_library(tmp_path: Path) -> None:
    (tmp_path / "ucx").mkdir()
    for name in ("libuct_ib.so.0", "libuct_cma.so", "libuct_other.so"):
        (tmp_path / "ucx" / name).touch()
    assert library.plugins(tmp_path / "libucp.so.0") == {"verbs", "cma"}
    assert library.plugins(None) == set()
    assert library.build_flags(tmp_path / "libucp.so.0") == ""


def test_transports_without_tcp_or_shared_memory_are_findings() -> None:
    assert library.transports([("tcp", "lo"), ("posix", "memory")]).status == "ok"
    assert library.transports([("tcp", "lo")]).status == "warn"
    assert library.transports([("posix", "memory")]).status == "fail"


# --- addresses, ports, settings ----------------------------------------------------------------------------


def test_a_port_in_use_is_a_failure() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        operator = config.Configuration(bind="127.0.0.1", metrics_port=port)
        checks = [*network.checks(operator, [port, 0])]
    assert statuses(checks)[f"port {port}"] == statuses(checks)[f"metrics port {port}"] == "fail"
    assert every_bad_one_has_a_remedy(checks)


def test_settings_in_force_say_where_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detail = settings(config.load({"TRANSPORT_LINGER_S": "42"}, tmp_path)).detail
    assert detail.startswith("linger_s=42 (TRANSPORT_LINGER_S); ")
    assert "TCP_TX_SEG_SIZE=256k (chosen)" in ucx_settings().detail


@pytest.mark.nightly
# --- the command -------------------------------------------------------------------------------------------
@pytest.mark.ucx
def test_the_command_transfers_by_every_wire(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = run(["doctor", "--ring", "1MiB", "--connections", "4", "--json", "-"])
    checks = json.loads(capfd.readouterr().out)["checks"]
    found = {check["name"]: check["status"] for check in checks}
    for wire in ("mapped", "shm", "tcp"):
        assert found[f"transfer by {wire}"] == "ok"
    assert status == int("fail" in found.values())
    assert all(set(check) == {"name", "status", "detail", "remedy"} for check in checks)


WHICH = """
from transport.wire import library as ucx
from transport.wire import verbs
print(ucx.library_path())
"""


@pytest.mark.nightly
@pytest.mark.ucx
def test_a_library_of_the_system_is_used_when_the_variable_says_so(tmp_path: Path) -> None:
    """A copy of the wheel's UCX elsewhere stands for a UCX of one's own; docs/INFINIBAND.md says what to set."""
    wheel = ucx.library_path()
    assert wheel is not None
    own = tmp_path / "lib"
    shutil.copytree(
        wheel.parent, own, symlinks=True, ignore=shutil.ignore_patterns("*.a", "*.la", "cmake", "pkgconfig")
    )
    with Child(WHICH, env={"LD_LIBRARY_PATH": str(own)}) as plain:
        assert Path(plain.line()).parent == wheel.parent
    with Child(WHICH, env={"LD_LIBRARY_PATH": str(own), "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "1"}) as asked:
        assert Path(asked.line()).parent == own


# --- transfers ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("shm_s", "warned"), [(0.001, False), (0.0014, False), (0.006, True)])
def test_shared_memory_that_is_slower_than_tcp_is_a_warning(shm_s: float, warned: bool) -> None:
    seconds = {"mapped": 0.0001, "shm": shm_s, "tcp": 0.001}
    checks = list(loopback._transfers(("mapped", "shm", "tcp"), lambda wire: [seconds[wire], 1.0]))
    assert ([check.status for check in checks[3:]] == ["warn"]) == warned
    assert every_bad_one_has_a_remedy(checks)
    if warned:
        assert "6.0 times" in checks[3].detail
        assert checks[3].remedy == "export TRANSPORT_WIRES=mapped,tcp"


def test_without_ucx_no_transfer_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_ucx", lambda: (False, None))
    checks = list(report.examine(config.load(), ring_bytes=1, connections=1, ports=(), transfer=True))
    assert not [check.name for check in checks if check.name.startswith(("transfer", "listener", "ring"))]


def test_every_group_of_checks_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, int]] = []
    monkeypatch.setattr(loopback, "_measured", lambda *_: [0.001])
    list(
        report.examine(
            config.load(),
            ring_bytes=1,
            connections=1,
            ports=(),
            transfer=True,
            progress=lambda done, total, size: shown.append((done, total)),
        )
    )
    assert len(dict(shown)) == shown[-1][0] + 1
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)
    assert {total for _, total in shown} == {shown[-1][0]}


def test_one_failure_of_several_wires_is_told_once() -> None:
    def measure(wire: str) -> list[float]:
        if wire == "mapped":
            raise RingError("gone")
        raise RingError("no route to the listener")

    checks = list(loopback._transfers(("mapped", "shm", "tcp"), measure))
    assert [check.detail for check in checks] == [
        "RingError: gone",
        "RingError: no route to the listener",
        "as by shm, above",
    ]
    assert every_bad_one_has_a_remedy(checks)


@pytest.mark.parametrize(
    ("setting", "status"),
    [("127.0.0.1", "ok"), ("localhost", "ok"), ("192.0.2.1", "warn"), ("nobody.invalid", "warn")],
)
def test_an_address_that_is_not_of_this_host_is_a_warning(setting: str, status: str) -> None:
    checks = [*network.checks(config.Configuration(addresses=("127.0.0.1", setting)), [])]
    assert statuses(checks)["address"] == status
    assert every_bad_one_has_a_remedy(checks)


@pytest.mark.parametrize(
    ("length", "mode", "status"),
    [(32, 0o600, "ok"), (32, 0o440, "ok"), (32, 0o644, "warn"), (4, 0o600, "warn"), (0, 0o600, "fail")],
)
def test_a_secret_that_others_can_read_or_guess_is_a_warning(
    length: int, mode: int, status: str, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"s" * length)
    file.chmod(mode)
    checks = [*network.checks(config.Configuration(secret_file=str(file)), [])]
    assert statuses(checks)["secret"] == status
    assert every_bad_one_has_a_remedy(checks)


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.skipif(bool(why_not()), reason="a host without a way out needs network namespaces")
def test_who_has_set_the_addresses_of_a_host_without_a_default_route_is_not_told_to_set_them() -> None:
    command = [sys.executable, "-m", "transport", "doctor", "--ring", "1MiB"]
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "-", *command]
    environment = os.environ | {"TRANSPORT_ADDRESSES": "127.0.0.1"}
    doctor = subprocess.run(alone, capture_output=True, text=True, check=False, env=environment)
    assert "listener: a listener process answers" in doctor.stdout
    assert "TRANSPORT_ADDRESSES" not in doctor.stderr


def test_the_address_is_explained() -> None:
    assert network.address(("10.0.0.7",), "", [], None).detail == "10.0.0.7: the setting addresses"
    assert network.address(("10.0.0.7",), "", [], None, ["it is another's"]).status == "warn"
    assert network.address((), "10.0.0.8", [], None).detail == "10.0.0.8: the setting bind"
    assert network.address((), "", [("ib0", "10.1.0.1")], "lo").detail.startswith("10.1.0.1: ib0 is an InfiniBand")
    assert network.address((), "", [("ib0", None)], "lo").status == "warn"
    assert network.address((), "", [], "lo").detail == "127.0.0.1: lo has the default route"
    assert network.address((), "", [], None).status == "warn"
