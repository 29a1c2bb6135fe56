"""Two hosts on one machine: a network namespace each, joined by a pair of interfaces, with nothing else in common.

Each has a /dev/shm of its own, its own identity where a host has the boot id, and one way out: the interface to the
other. What they share is the disk, as two hosts with a network file system do; only programs are read from it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from helpers import Child

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_ROOT = Path(__file__).resolve().parents[2]

# A mount namespace of its own; what is mounted there ends with its last process.
_ENTER = f"""
mount -t tmpfs -o size=256m tmpfs /dev/shm &&
mount --bind "$1" {_BOOT_ID} &&
shift && exec "$@"
"""


class Host:
    """One of the two. Without an identity it is a container that shares everything with others but the network."""

    def __init__(self, name: str, address: str, identity: Path | None) -> None:
        self.name = name
        self.address = address
        self._identity = identity

    def command(self, *words: str) -> list[str]:
        """The command that runs ``words`` there."""
        if self._identity is None:
            return ["ip", "netns", "exec", self.name, *words]
        within = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _ENTER, "sh", str(self._identity)]
        return ["ip", "netns", "exec", self.name, *within, *words]

    def python(self, code: str, *arguments: object) -> Child:
        """A Python process there, that reports by lines."""
        return _ChildThere(self, code, arguments)


class _ChildThere(Child):
    def __init__(self, host: Host, code: str, arguments: tuple[object, ...]) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
        path = os.pathsep.join([str(_ROOT), str(_ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            host.command(sys.executable, "-c", code, *map(str, arguments)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, "PYTHONPATH": path},
        )


def why_not() -> str:
    """Why there can be no two hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare", "mount"):
        if shutil.which(program) is None:
            return f"{program} is missing (apt-get install iproute2 util-linux)"
    name = f"tr{os.getpid()}p"
    try:
        with _namespace(name):
            _ip("-n", name, "link", "add", "probe", "type", "veth", "peer", "name", "probe2")
            subprocess.run(
                ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
                check=True,
                capture_output=True,
            )
    except subprocess.CalledProcessError as error:
        return f"this kernel or container allows no namespaces: {error.stderr.decode().strip()}"
    return ""


@contextlib.contextmanager
def two_hosts(folder: Path, *, one_machine: bool = False) -> Iterator[tuple[Host, Host]]:
    """Make them, and remove them again; on one machine: containers that share its memory (`docker run --ipc=host`)."""
    names = f"tr{os.getpid()}a", f"tr{os.getpid()}b"
    addresses = "10.203.77.1", "10.203.77.2"
    with contextlib.ExitStack() as stack:
        hosts = []
        for name, address in zip(names, addresses, strict=True):
            stack.enter_context(_namespace(name))
            identity = folder / f"{name}.boot_id"
            identity.write_text(f"{uuid.uuid4()}\n")
            hosts.append(Host(name, address, None if one_machine else identity))
        _ip("-n", names[0], "link", "add", "cable0", "type", "veth", "peer", "name", "cable0", "netns", names[1])
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "cable0")
            for interface in ("lo", "cable0"):
                _ip("-n", host.name, "link", "set", interface, "up")
            _ip("-n", host.name, "route", "add", "default", "dev", "cable0")
        yield hosts[0], hosts[1]


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[None]:
    _ip("netns", "add", name)
    try:
        yield
    finally:
        _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
