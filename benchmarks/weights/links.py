"""Hosts of a measurement: a network namespace each, on one bridge, every link shaped to a rate in both directions.

    with Links.made(12, rate=50e6) as links:
        links.within(3)     # what stands before a command so that it runs on host 3
        links.address(3)

Needs root and a kernel with token buckets (tc tbf). Where these are not, `Links.made` gives hosts that are none: all on
loopback, with the rate kept by the sender. `namespaces` are the hosts alone; tests/support/two_hosts.py has them, too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from transport.errors import InternalError
from transport.wire.addresses import LOOPBACK

INTERFACE = "cable0"  # of each host
_STREAM_BYTES_S = 2.0  # how long a plain stream runs
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "util-linux"}
_numbers = itertools.count()


class Links:
    """The hosts of one measurement. Attribute ``shaped``: whether the kernel keeps the rate."""

    def __init__(self, names: Sequence[str], rate: float) -> None:
        self._names = names
        self.rate = rate
        self.shaped = bool(names)

    @classmethod
    @contextlib.contextmanager
    def made(cls, hosts: int, rate: float) -> Iterator[Links]:
        """So many hosts; ``rate`` in bytes per second. They are gone afterwards, with whatever runs on them.

        0: none, everything is on loopback.
        """
        if not hosts or why_not():
            yield cls([], rate)
            return
        with namespaces(hosts, rate) as names:
            yield cls(names, rate)

    def within(self, number: int) -> tuple[str, ...]:
        """What stands before a command that is to run on this host."""
        return ("ip", "netns", "exec", self._names[number]) if self.shaped else ()

    def address(self, number: int) -> str:
        """The host's address."""
        return address_of(number) if self.shaped else LOOPBACK

    def stream(self) -> float:
        """Bytes per second that one plain TCP stream carries from host 1 to host 0, measured at the receiver."""
        size = int(max(1 << 20, (self.rate or 1e9) * _STREAM_BYTES_S))
        module = [sys.executable, "-P", str(Path(__file__).with_name("stream.py"))]
        with subprocess.Popen(
            [*self.within(0), *module, self.address(0)], stdout=subprocess.PIPE, text=True
        ) as receiver:
            try:
                assert receiver.stdout is not None
                port = receiver.stdout.readline().strip()
                if not port:
                    raise InternalError("the receiver of the plain stream did not start")
                subprocess.run(
                    [*self.within(1), *module, self.address(0), port, str(size)], check=True, capture_output=True
                )
                return float(receiver.stdout.readline())
            finally:
                receiver.kill()


def address_of(number: int, *, ipv6: bool = False) -> str:
    """Of a host of `namespaces`."""
    return f"fd77::{number + 1:x}" if ipv6 else f"10.77.{number // 250}.{number % 250 + 1}"


@contextlib.contextmanager
def namespaces(count: int, rate: float = 0.0, *, ipv6: bool = False) -> Iterator[list[str]]:
    """The names of so many network namespaces on one bridge; with a ``rate`` their links are shaped.

    Each has one way out, INTERFACE, with one address, of IPv4 or IPv6. They are gone afterwards.
    """
    prefix = f"t{os.getpid()}x{next(_numbers)}"
    bridge = f"{prefix}b"
    names = [f"{prefix}h{number}" for number in range(count)]
    with contextlib.ExitStack() as stack:
        for name in (bridge, *names):
            _ip("netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False, capture_output=True)
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            port = f"p{number}"
            _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", bridge)
            own = [f"{address_of(number, ipv6=True)}/64", "nodad"] if ipv6 else [f"{address_of(number)}/16"]
            _ip("-n", name, "address", "add", *own, "dev", INTERFACE)
            for where, device in ((name, INTERFACE), (name, "lo"), (bridge, port)):
                _ip("-n", where, "link", "set", device, "up")
            _ip("-n", bridge, "link", "set", port, "master", "br0")
            _ip("-n", name, *(["-6"] if ipv6 else []), "route", "add", "default", "dev", INTERFACE)
            for where, device in ((name, INTERFACE), (bridge, port)):
                _shape(where, device, rate)
        yield names


def why_not() -> str:
    """Why hosts cannot be namespaces with shaped links here; empty if they can."""
    return refusal("ip", "tc", rate=1e8)


def refusal(*programs: str, rate: float = 0.0, within: Sequence[str] = ("true",)) -> str:
    """Why there can be no `namespaces` with this rate, or not the command in one of them; empty if there can.

    ``programs``: that are needed.
    """
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in programs:
        if shutil.which(program) is None:
            return f"{program} is missing (apt-get install {_PACKAGES[program]})"
    try:
        with namespaces(1, rate) as [name]:
            _ip("netns", "exec", name, *within)
    except subprocess.CalledProcessError as error:
        return f"this kernel or container allows none: {error.stderr.decode().strip()}"
    return ""


def _shape(namespace: str, device: str, rate: float) -> None:
    if not rate:
        return
    # The burst is a hundredth of a second; the queue holds a tenth, so that TCP sees delay before it sees loss.
    burst = max(int(rate / 100), 128 << 10)
    limit = max(int(rate / 10), 2 * burst)
    options = ("rate", f"{int(rate * 8)}bit", "burst", str(burst), "limit", str(limit))
    subprocess.run(
        ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *options], check=True, capture_output=True
    )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
