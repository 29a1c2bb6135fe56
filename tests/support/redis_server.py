"""A real redis-server for tests: on a free port of loopback, with an append-only file, killed and started again."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import LOOPBACK, at, lasting_port

WHY_NOT = (
    "\033[31mSKIPPED: Redis is not tested: redis-server is missing (apt-get install redis-server)\033[0m"
    if shutil.which("redis-server") is None
    else "\033[31mSKIPPED: Redis is not tested: the redis package is missing (pip install redis)\033[0m"
    if importlib.util.find_spec("redis") is None
    else ""
)
needs_redis = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test run that is aborted leaves no server


class RedisServer:
    """A server whose every answered write is in its append-only file."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self.options = options
        self.port = lasting_port()
        self.process: subprocess.Popen[bytes] | None = None
        while not self._starts():
            self.port = lasting_port()  # somebody took it meanwhile

    def place(self, run: str = "test", database: int = 0) -> str:
        return f"redis://{at(self.port)}/{database}?run={run}"

    def start(self) -> None:
        """Start it again, and wait until it answers. With the same files and port as before."""
        assert self._starts(), "redis-server did not start"

    def _starts(self) -> bool:
        """Start it, and wait until it answers; False if it ended instead."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        arguments = {
            "bind": LOOPBACK, "port": str(self.port), "dir": str(self.directory), "save": "",
            "appendonly": "yes", "appendfsync": "always",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [
                "redis-server",
                *(word for name, value in arguments.items() for word in (f"--{name}", value)),
                *self.options,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
            start_new_session=True,
        )
        never = Retry(NoBackoff(), 0)  # the package's own pauses are long
        with redis.Redis(host=LOOPBACK, port=self.port, retry=never) as client:
            while self.process.poll() is None:
                try:
                    if client.info("server")["process_id"] == self.process.pid:
                        return True
                except redis.exceptions.AuthenticationError:
                    return True  # an answer, too
                except redis.exceptions.ConnectionError:
                    continue
        return False

    def kill(self) -> None:
        """SIGKILL, as a crash; the child that rewrites the append-only file goes, too."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def keep(self) -> None:
        """Copy its files, for `go_back`; nobody writes meanwhile."""
        shutil.copytree(self.directory, self.directory / "kept", ignore=shutil.ignore_patterns("kept"))

    def go_back(self) -> None:
        """Start it again with the files that were copied, as from a backup."""
        self.kill()
        shutil.rmtree(self.directory / "appendonlydir", ignore_errors=True)
        shutil.copytree(self.directory / "kept", self.directory, dirs_exist_ok=True)
        self.start()

    def flush(self) -> None:
        """Forget everything."""
        import redis

        with redis.Redis(host=LOOPBACK, port=self.port) as client:
            client.flushall()


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="redis-test-") as directory:
        server = RedisServer(Path(directory), *options)
        try:
            yield server
        finally:
            server.kill()


def lose_answers(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The first answer to come is lost after the server gave it; returns what was lost, and loses again when empty."""
    import redis

    evalsha = redis.Redis.evalsha
    lost: list[object] = []

    def lose_the_first_answer(self: redis.Redis, *arguments: object) -> object:
        answer = evalsha(self, *arguments)
        if not lost:
            lost.append(answer)
            raise redis.exceptions.ConnectionError("cut after the server had done it")
        return answer

    monkeypatch.setattr(redis.Redis, "evalsha", lose_the_first_answer)
    return lost
