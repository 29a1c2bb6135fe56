"""A Redis server and its replica on two hosts, with an address that moves from one to the other."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from hosts import REDIS_ADDRESS, REDIS_PORT, Host, announce
from redis_server import command

from transport.storage.redis_connection import require_redis

_PATIENCE_S = 30.0
_LOOK_S = 0.05
_TIMEOUT_S = 1.0


class RedisPair:
    """The primary is on one host, the replica on the other. All answered writes are in the primary's file."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path, environment: Callable[[Host], dict[str, str]]) -> None:
        self._redis = require_redis()
        self._primary, self._spare = hosts
        self._folder = folder
        self._environment = environment
        self._servers: dict[Host, subprocess.Popen[bytes]] = {}
        self._files: dict[Host, Path] = {}
        self._made = 0

    @property
    def primary(self) -> Host:
        """Where the address is."""
        return self._primary

    def start(self) -> None:
        """Both servers."""
        self._serve(self._primary, self._new_files())
        self._take_address(self._primary)
        self._wait_for(self._primary)
        self.replicate()

    def replicate(self) -> None:
        """A new replica on the spare host, until it has everything."""
        self._serve(self._spare, self._new_files(), "--replicaof", REDIS_ADDRESS, str(REDIS_PORT))
        self._until(lambda: self._info(self._spare, "master_link_status") == "up", "the replica follows")

    def promote(self) -> None:
        """The primary's host is removed without a word; the replica is the primary, at the same address."""
        gone, self._primary = self._primary, self._spare
        self._spare = gone
        gone.remove()
        self._servers.pop(gone).wait()
        self._ask(self._primary, "REPLICAOF", "NO", "ONE")
        self._take_address(self._primary)

    def return_spare(self) -> None:
        """The host that `promote` removed is back, with a replica."""
        self._spare.start()
        self.replicate()

    def move(self) -> None:
        """The primary is killed, and started again from its files on the other host, with its address."""
        before, self._primary = self._primary, self._spare
        self._spare = before
        for host in (before, self._primary):
            self._kill(host)
        with contextlib.suppress(RuntimeError):
            before.network("ip", "address", "del", f"{REDIS_ADDRESS}/16", "dev", "cable0")
        self._serve(self._primary, self._files[before])
        self._take_address(self._primary)
        self._wait_for(self._primary)

    def _new_files(self) -> Path:
        self._made += 1
        files = self._folder / f"redis-{self._made}"
        files.mkdir()
        return files

    def _serve(self, host: Host, files: Path, *options: str) -> None:
        self._files[host] = files
        environment = {"PATH": os.environ["PATH"], **self._environment(host)}
        own = {"bind": "0.0.0.0", "protected-mode": "no", "repl-diskless-sync-delay": "0"}
        words = command(files, files / "log", REDIS_PORT, **own)
        self._servers[host] = host.popen([*words, *options], files / "errors", environment)

    def _kill(self, host: Host) -> None:
        # The process of `popen` is not the server's own: that one is the only other process of its host.
        for pid in host.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._servers.pop(host).wait()

    def _take_address(self, host: Host) -> None:
        host.network("ip", "address", "add", f"{REDIS_ADDRESS}/16", "dev", "cable0")
        announce(REDIS_ADDRESS, host.mac)

    def _wait_for(self, host: Host) -> None:
        self._until(lambda: self._ask(host, "PING") is not None, f"redis-server answers on {host.name}")

    def _info(self, host: Host, field: str) -> str:
        with self._client(host) as client, contextlib.suppress(self._redis.exceptions.RedisError, OSError):
            return str(client.info("replication").get(field, ""))
        return ""

    def _ask(self, host: Host, *words: str) -> object:
        with self._client(host) as client, contextlib.suppress(self._redis.exceptions.RedisError, OSError):
            return client.execute_command(*words)
        return None

    def _client(self, host: Host):  # type: ignore[no-untyped-def]
        return self._redis.Redis(
            host=host.address, port=REDIS_PORT, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
        )

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        give_up = time.monotonic() + _PATIENCE_S
        while not holds():
            if time.monotonic() > give_up:
                raise TimeoutError(f"not within {_PATIENCE_S:g} s: {what}")
            time.sleep(_LOOK_S)  # the pace of questions: a server tells nobody that it is ready, or has everything
