"""Hosts that are namespaces, on one bridge: network, PIDs, mounts, IPC, names and, where the kernel has them, clocks.

A host has its own /dev/shm, host name, boot id, process numbers, monotonic clock, and one interface, ``cable0``, whose
other end is a port of the bridge in the namespace of this process. Both ends are shaped (tc tbf). A host is its init;
with that every process of it ends, and its namespaces with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

BRIDGE, NETWORK = "br0", "10.88"
OWN_ADDRESS = f"{NETWORK}.255.254"  # of this process, at the bridge
REDIS_ADDRESS = f"{NETWORK}.255.1"  # moves from host to host
REDIS_PORT = 6379
RATE_BYTES_S = 25e6
_BIT = 8
_PATIENCE_S = 20.0
_HERE = Path(__file__).parent
_RTMGRP_LINK = 1
_NETLINK_BYTES = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)

# $1 host name, $2 boot id, $3 … init. UCX looks for interfaces in /sys.
_ENTER = """
mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t tmpfs -o size=256m tmpfs /dev/shm && hostname "$1" &&
mount --bind "$2" /proc/sys/kernel/random/boot_id && shift 2 && exec "$@"
"""
_INIT = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
print("ready", flush=True)
while True:
    signal.sigwait([signal.SIGCHLD])
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


def run(*words: object) -> None:
    """A command. RuntimeError with what it said if it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")


def make_bridge() -> None:
    """The switch between all hosts; this process has an address there."""
    _no_ipv6(os.getpid())
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{OWN_ADDRESS}/16", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


def _no_ipv6(pid: int) -> None:
    """Fewer packets that have nothing to do with a run."""
    files = "for each in all default; do echo 1 >/proc/sys/net/ipv6/conf/$each/disable_ipv6; done"
    subprocess.run(["nsenter", "--target", str(pid), "--net", "sh", "-c", files], capture_output=True)


def why_not() -> str:
    """Why there can be no hosts; empty if there can. Call it inside (isolation.py)."""
    try:
        make_bridge()
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.closing(Host(0, Path(folder), random.Random(0))) as one,
        ):
            one.start()
    except (RuntimeError, OSError, TimeoutError) as error:
        return str(error)
    finally:
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)
    return ""


def _has_time_namespaces() -> bool:
    return Path("/proc/self/ns/time").exists()


class Host:
    """One host; `start` makes it, again after `remove` with the same address and another identity."""

    def __init__(self, number: int, folder: Path, choose: random.Random) -> None:
        self.number = number
        self.name = f"host{number}"
        self.address = f"{NETWORK}.{number // 250}.{number % 250 + 1}"
        self.mac = f"02:00:00:00:{number // 256:02x}:{number % 256:02x}"
        self.port = f"p{number}"
        self.lives = 0
        self._folder = folder
        self._choose = choose
        self._holder: subprocess.Popen[str] | None = None
        self._pid = 0
        self._carrier: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Make it, with its link."""
        self.lives += 1
        self._pid = 0
        identity = self._folder / f"{self.name}.{self.lives}.boot_id"
        identity.write_text(f"{uuid.UUID(int=self._choose.getrandbits(128), version=4)}\n")
        kinds = ["--net", "--mount", "--ipc", "--uts", "--pid"]
        if _has_time_namespaces():
            since_boot = self._choose.randrange(0, 10_000_000)
            kinds += ["--time", "--monotonic", str(since_boot), "--boottime", str(since_boot)]
        self._holder = subprocess.Popen(
            [
                *("unshare", *kinds, "--fork", "--kill-child", "--propagation", "private"),
                *("sh", "-c", _ENTER, "sh", self.name, str(identity)),
                *(sys.executable, "-P", "-I", "-S", "-c", _INIT),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"{self.name} was not made: {self._holder.stderr.read().strip()}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self._pid = int(children.read_text().split()[0])
        _no_ipv6(self._pid)
        self._connect()

    def _connect(self) -> None:
        within = ("nsenter", "--target", str(self._pid), "--net")
        here = ("type", "veth", "peer", "name", self.port)
        run("ip", "link", "add", "cable0", "netns", self._pid, "address", self.mac, *here)
        run(*within, "ip", "address", "add", f"{self.address}/16", "dev", "cable0")
        for interface in ("lo", "cable0"):
            run(*within, "ip", "link", "set", interface, "up")
        run(*within, "ip", "route", "add", "default", "dev", "cable0")
        run("ip", "link", "set", self.port, "master", BRIDGE, "up")
        burst = max(int(RATE_BYTES_S / 100), 128 << 10)
        shape = ("root", "tbf", "rate", f"{int(RATE_BYTES_S * _BIT)}bit", "burst", burst, "limit", 8 * burst)
        run("tc", "qdisc", "add", "dev", self.port, *shape)
        run(*within, "tc", "qdisc", "add", "dev", "cable0", *shape)

    # --- processes ------------------------------------------------------------------------------------
    def popen(self, command: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A process there; its standard input is a pipe, and what it says goes into ``log``."""
        kinds = ["--net", "--mount", "--ipc", "--uts", "--pid"] + ["--time"] * _has_time_namespaces()
        with log.open("ab") as file:
            return subprocess.Popen(
                ["nsenter", "--target", str(self._pid), *kinds, "--", *command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=dict(environment),
                start_new_session=True,
            )

    def enter(self) -> None:
        """Have the processes that this one forks from now on be the host's. It has one thread."""
        kinds = ["net", "ipc", "uts", "pid"] + ["time"] * _has_time_namespaces() + ["mnt"]
        files = [os.open(f"/proc/{self._pid}/ns/{kind}", os.O_RDONLY) for kind in kinds]
        for kind, file in zip(kinds, files, strict=True):
            if _libc.setns(file, 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns to the {kind} of {self.name}")
            os.close(file)

    def network(self, *words: object) -> None:
        """A command in its network."""
        run("nsenter", "--target", self._pid, "--net", *words)

    def processes(self) -> list[int]:
        """As this process numbers them, without its init. Zombies are left out."""
        found = []
        own = Path(f"/proc/{self._pid}/ns/pid").readlink()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (entry / "ns/pid").readlink() == own and int(entry.name) != self._pid:
                    found.append(int(entry.name))
        return found

    def segments(self) -> list[str]:
        """What is in its /dev/shm of this package."""
        return sorted(path.name for path in Path(f"/proc/{self._pid}/root/dev/shm").glob("transport-*"))

    # --- what goes wrong ------------------------------------------------------------------------------
    def pull_cable(self) -> None:
        """The link is down at both ends."""
        run("ip", "link", "set", self.port, "down")

    def plug_in(self) -> None:
        """The link is up again."""
        run("ip", "link", "set", self.port, "up")

    def swallow(self) -> None:
        """Every frame is lost, and the link looks well."""
        run("ip", "link", "set", self.port, "nomaster")

    def carry(self) -> None:
        """As before `swallow` or `spoil`."""
        if self._carrier is not None:
            self._carrier.kill()
            self._carrier.wait()
            self._carrier = None
            run("ip", "link", "delete", f"{self.port}o")
        run("ip", "link", "set", self.port, "master", BRIDGE)

    def spoil(self, loss: float, loss_back: float, delay_s: float) -> None:
        """Its frames pass through bad_link.py."""
        outside, port = f"{self.port}o", f"{self.port}q"
        run("ip", "link", "set", self.port, "nomaster")
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", port)
        run("ip", "link", "set", port, "master", BRIDGE, "up")
        run("ip", "link", "set", outside, "up")
        words = [self.port, outside, str(loss), str(loss_back), str(delay_s), str(self._choose.randrange(1 << 30))]
        self._carrier = subprocess.Popen(
            [sys.executable, "-I", str(_HERE / "bad_link.py"), *words], stdout=subprocess.PIPE, text=True
        )
        assert self._carrier.stdout is not None
        if self._carrier.stdout.readline() != "ready\n":
            raise RuntimeError(f"the bad link of {self.name} does not start")

    def remove(self) -> None:
        """Without a word to anybody: first its link is dead, then every process, then the namespaces."""
        self.swallow()
        self.close()

    def kill(self) -> None:
        """End every process of it; `close` removes what is left."""
        if self._holder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid or self._holder.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, and wait until its link is gone. Idempotent."""
        if self._holder is None:
            return
        if self._carrier is not None:
            self.carry()
        self.kill()
        self._holder.wait()
        for pipe in (self._holder.stdout, self._holder.stderr):
            if pipe is not None:
                pipe.close()
        self._holder = None
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as changes:
            changes.bind((0, _RTMGRP_LINK))  # says when a link is made, changed or gone
            subprocess.run(["ip", "link", "delete", self.port], capture_output=True)  # its namespace may last a moment
            give_up = time.monotonic() + _PATIENCE_S
            while self.port in (name for _, name in socket.if_nameindex()):
                if not select.select([changes], [], [], max(0.0, give_up - time.monotonic()))[0]:
                    raise TimeoutError(f"the link of {self.name} is not gone after {_PATIENCE_S:g} s")
                with contextlib.suppress(OSError):  # more changes than it has room for: the look above counts
                    changes.recv(_NETLINK_BYTES)


def announce(address: str, mac: str) -> None:
    """Tell every host that ``address`` is at ``mac`` from now on, as who takes an address over does (ARP)."""
    there, everybody = bytes.fromhex(mac.replace(":", "")), b"\xff" * 6
    at = socket.inet_aton(address)
    frame = everybody + there + b"\x08\x06" + struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2)
    frame += there + at + everybody + at
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as packets:
        packets.bind((BRIDGE, 0))
        packets.send(frame)
