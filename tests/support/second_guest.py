"""The second guest of `make verbs`, as the tests in the first one have it: processes there, and the link between both.

Commands go over a link of their own by a connection of ssh that stands since the first guest started, so that the link
of the payloads may fail.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from helpers import PATIENCE_S, eventually

HERE, THERE = "10.77.0.1", "10.77.0.2"
HERE_TOO, THERE_TOO = "10.78.0.1", "10.78.0.2"  # on the link of commands
LINK, DEVICE = "eth0", "rxe0"
_COUNTERS = Path(f"/sys/class/infiniband/{DEVICE}/ports/1/hw_counters")
# What a process there has of this one's environment.
_INHERITED = ("PATH", "LANG", "TEST_PATIENCE", "TEST_WIRES")


class SecondGuest:
    """A host on which processes of the tests run."""

    def command(self, *words: str) -> list[str]:
        """The command that runs ``words`` there, in the checkout."""
        inherited = [f"{name}={os.environ[name]}" for name in _INHERITED if name in os.environ]
        line = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(['env', *inherited, *words])}"
        return ["ssh", "-o", "ControlPath=/run/guest2.ssh", "guest2", line]

    def run(self, *words: str) -> str:
        """Run a command there to its end; its output."""
        return subprocess.run(self.command(*words), stdout=subprocess.PIPE, text=True, check=True).stdout


def packets() -> int:
    """How many packets of RoCE this guest has sent and received."""
    devices = Path("/sys/class/infiniband").glob("*/ports/1/hw_counters")
    return sum(int((each / name).read_text()) for each in devices for name in ("sent_pkts", "rcvd_pkts"))


def after_packets(count: int) -> None:
    """Return once so many packets more have passed: a transfer is under way."""
    begun = packets()
    eventually(lambda: packets() - begun >= count, f"{count} packets pass")


@contextlib.contextmanager
def link_down() -> Iterator[None]:
    """The link of the payloads is down while the block runs."""
    subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", LINK, "up"], check=True)
        with contextlib.suppress(subprocess.CalledProcessError):  # the route went with the link
            subprocess.run(["ip", "route", "replace", "default", "dev", LINK], check=True)


class Dying:
    """The second guest, dead to others from the packet on that it is to die at, until the block ends.

    Packets to and from it are dropped there. Its link stays up: the virtual machine of the other guest waits, as a
    whole, for one that takes no packets.
    """

    _SCRIPT = """
    count() { read -r sent <$0/sent_pkts && read -r received <$0/rcvd_pkts && echo $((sent + received)); }
    end=$(($(count) + $2)); echo armed
    until [ "$(count)" -ge "$end" ]; do sleep 0.02; done
    tc qdisc add dev $1 clsact
    for way in ingress egress; do tc filter add dev $1 $way matchall action drop; done
    echo dead; read -r _; tc qdisc del dev $1 clsact
    """

    def __init__(self, host: SecondGuest, after: int) -> None:
        words = host.command("sh", "-c", self._SCRIPT, str(_COUNTERS), LINK, str(after))
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _told(self, word: str) -> None:
        assert self._process.stdout is not None
        ready, *_ = select.select([self._process.stdout], [], [], PATIENCE_S)
        assert ready, f"it is not {word}: less was sent than it was to die after"
        assert self._process.stdout.readline().strip() == word

    def wait(self) -> None:
        """Return once it is dead."""
        self._told("dead")

    def __enter__(self) -> Dying:
        self._told("armed")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("alive\n")


class Removal:
    """The removal of the device, of ``host`` or of this guest, which the block's processes use; it is back after them.

    The kernel tells them of it, and waits until the last of them has closed the device.
    """

    def __init__(self, host: SecondGuest | None) -> None:
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None

    def _link(self, *words: str) -> subprocess.Popen[bytes]:
        line = ["rdma", "link", *words]
        return subprocess.Popen(line if self._host is None else self._host.command(*line))

    def begin(self) -> None:
        """Ask the kernel for it."""
        self._process = self._link("delete", DEVICE)

    def __enter__(self) -> Removal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            assert self._process.wait() == 0
            assert self._link("add", DEVICE, "type", "rxe", "netdev", LINK).wait() == 0
