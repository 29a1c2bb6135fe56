"""Hosts of a measurement: a network namespace each, on one bridge, every link shaped to a rate in both directions.

    with Links.made(12, rate=50e6) as links:
        links.within(3)     # what stands before a command so that it runs on host 3
        links.address(3)

Needs root and a kernel with token buckets (tc tbf). Where these are not, `Links.made` gives hosts that are none: all on
loopback, with the rate kept by the sender.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from transport.errors import InternalError
from transport.wire.addresses import LOOPBACK

_STREAM_BYTES_S = 2.0  # how long a plain stream runs


class Links:
    """The hosts of one measurement. Attribute ``shaped``: whether the kernel keeps the rate."""

    def __init__(self, prefix: str, rate: float, shaped: bool) -> None:
        self._prefix = prefix
        self.rate = rate
        self.shaped = shaped

    @classmethod
    @contextlib.contextmanager
    def made(cls, hosts: int, rate: float) -> Iterator[Links]:
        """So many hosts; ``rate`` in bytes per second. They are gone afterwards, with whatever runs on them.

        0: none, everything is on loopback.
        """
        prefix = f"tw{os.getpid() % 100000}"
        if not hosts or why_not():
            yield cls(prefix, rate, False)
            return
        bridge = f"{prefix}b"
        made: list[str] = []
        try:
            _ip("netns", "add", bridge)
            made.append(bridge)
            _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
            _ip("-n", bridge, "link", "set", "br0", "up")
            links = cls(prefix, rate, True)
            for number in range(hosts):
                name = links._name(number)
                _ip("netns", "add", name)
                made.append(name)
                port = f"p{number}"
                _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", bridge)
                _ip("-n", name, "address", "add", f"{links.address(number)}/16", "dev", "eth0")
                for where, device in ((name, "eth0"), (name, "lo"), (bridge, port)):
                    _ip("-n", where, "link", "set", device, "up")
                _ip("-n", bridge, "link", "set", port, "master", "br0")
                for where, device in ((name, "eth0"), (bridge, port)):
                    _shape(where, device, rate)
            yield links
        finally:
            for name in reversed(made):
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def _name(self, number: int) -> str:
        return f"{self._prefix}h{number}"

    def within(self, number: int) -> tuple[str, ...]:
        """What stands before a command that is to run on this host."""
        return ("ip", "netns", "exec", self._name(number)) if self.shaped else ()

    def address(self, number: int) -> str:
        """The host's address."""
        return f"10.77.{number // 250}.{number % 250 + 1}" if self.shaped else LOOPBACK

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


def why_not() -> str:
    """Why hosts cannot be namespaces with shaped links here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} is missing (apt-get install iproute2)"
    name = f"tw{os.getpid() % 100000}x"
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
            _shape(name, "eth0", 1e8)
        finally:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
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
