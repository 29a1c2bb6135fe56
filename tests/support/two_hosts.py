"""Two hosts on one machine: a network namespace each, on one bridge, with nothing else in common.

Each has a /dev/shm of its own, its own identity where a host has the boot id, and one way out: the interface to the
other. What they share is the disk, as two hosts with a network file system do; only programs are read from it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from helpers import Child, eventually
from links import INTERFACE, address_of, namespaces, refusal

__all__ = ["INTERFACE", "NOBODY", "Host", "redis_at", "second_interface", "two_hosts", "why_not"]

NOBODY = address_of(98)  # an address of their network that neither has
_REDIS_PORT = 16379
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_ROOT = Path(__file__).resolve().parents[2]
_OWN_MOUNTS = ["unshare", "--mount", "--propagation", "private"]  # which end with its last process
_SHARED_MEMORY = "mount -t tmpfs -o size=256m tmpfs /dev/shm"
_ENTER = f'{_SHARED_MEMORY} && mount --bind "$1" {_BOOT_ID} && shift && exec "$@"'


class Host:
    """One of the two. Without an identity it is a container that shares everything with others but the network."""

    def __init__(self, name: str, address: str, identity: Path | None) -> None:
        self.name = name
        self.address = address
        self._identity = identity

    def command(self, *words: str) -> list[str]:
        """The command that runs ``words`` there."""
        own = [] if self._identity is None else [*_OWN_MOUNTS, "sh", "-c", _ENTER, "sh", str(self._identity)]
        return ["ip", "netns", "exec", self.name, *own, *words]

    def ip(self, *words: str) -> list[str]:
        """The command `ip` there."""
        return ["ip", "-n", self.name, *words]

    @contextlib.contextmanager
    def kept(self) -> Iterator[KeptHost]:
        """The host with one /dev/shm for all of its processes, until the block ends."""
        with subprocess.Popen(
            self.command("sh", "-c", "echo kept && exec cat"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as keeper:
            assert keeper.stdout is not None and keeper.stdout.readline() == b"kept\n"
            try:
                yield KeptHost(keeper.pid, self.address)
            finally:
                keeper.kill()

    def python(self, code: str, *arguments: object) -> Child:
        """A Python process there, that reports by lines."""
        path = os.pathsep.join([str(_ROOT), str(_ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
        return Child(code, *arguments, env={"PYTHONPATH": path}, host=self)


class KeptHost:
    """A host whose first process lasts, and with it the memory that its processes share."""

    def __init__(self, keeper: int, address: str) -> None:
        self._keeper = keeper
        self.address = address

    def command(self, *words: str) -> list[str]:
        """The command that runs ``words`` there, as the process that it begins with."""
        return ["nsenter", "--target", str(self._keeper), "--mount", "--net", *words]


@functools.cache
def why_not() -> str:
    """Why there can be no two hosts here; empty if there can."""
    return refusal("ip", "unshare", "mount", within=[*_OWN_MOUNTS, "sh", "-c", _SHARED_MEMORY])


@contextlib.contextmanager
def two_hosts(folder: Path, *, one_machine: bool = False, ipv6: bool = False) -> Iterator[tuple[Host, Host]]:
    """Make them, and remove them again; on one machine: containers that share its memory (`docker run --ipc=host`).

    ``ipv6``: beside loopback they have IPv6 alone.
    """
    with namespaces(2, ipv6=ipv6) as names:
        hosts = []
        for number, name in enumerate(names):
            identity = folder / f"{name}.boot_id"
            identity.write_text(f"{uuid.uuid4()}\n")
            hosts.append(Host(name, address_of(number, ipv6=ipv6), None if one_machine else identity))
        yield hosts[0], hosts[1]


@contextlib.contextmanager
def second_interface(address: str, ip: Callable[..., list[str]]) -> Iterator[None]:
    """Give a host an interface that leads nowhere, while the block runs; ``ip``: the command of `ip` there."""
    subprocess.run(ip("link", "add", "second0", "type", "veth", "peer", "name", "nowhere0"), check=True)
    try:
        subprocess.run(ip("address", "add", address, "dev", "second0"), check=True)
        for name in ("second0", "nowhere0"):
            subprocess.run(ip("link", "set", name, "up"), check=True)
        yield
    finally:
        subprocess.run(ip("link", "delete", "second0"), check=True)


@contextlib.contextmanager
def redis_at(host: Host | KeptHost, folder: Path) -> Iterator[str]:
    """A Redis server on a host, as ``host:port`` by which both reach it."""
    options = {"bind": host.address, "port": str(_REDIS_PORT), "protected-mode": "no", "save": "", "dir": str(folder)}
    options["appendonly"] = "yes"
    command = host.command("redis-server", *(word for name, value in options.items() for word in (f"--{name}", value)))
    ask = host.command("redis-cli", "-h", host.address, "-p", str(_REDIS_PORT), "ping")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            eventually(
                lambda: server.poll() is not None or subprocess.run(ask, capture_output=True).stdout == b"PONG\n",
                "redis-server answers",
            )
            assert server.poll() is None, "redis-server did not start"
            yield f"[{host.address}]:{_REDIS_PORT}" if ":" in host.address else f"{host.address}:{_REDIS_PORT}"
        finally:
            server.kill()
