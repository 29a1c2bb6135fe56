"""What the tests of ring, server and client share: conditions to wait for, faults to inject, other processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import pytest
from loopback import EVERYWHERE, FAMILY, LOOPBACK, lasting_port
from patience import ENVIRONMENT, PATIENCE
from prepared import PreparedPython

from transport import SharedRingBuffer, SlotState, Ticket, UCXXServer
from transport.schema import Schema
from transport.settings import DEFAULTS, Settings
from transport.testing import run
from transport.wire import authentication, frames
from transport.wires import Wire, named_wires

PATIENCE_S = 100.0 * PATIENCE  # a watchdog, shorter than that of the whole test, so that it can say what it waited for
SHM = Path("/dev/shm")

# What clients of the tests may use, and what carries their payloads then. `make verbs` gives "rdma" and "rdma,tcp".
NETWORK: frozenset[Wire] = named_wires(os.environ.get("TEST_WIRES", "tcp").split(","))  # type: ignore[arg-type]
NETWORK_WIRE: Wire = "rdma" if "rdma" in NETWORK else "tcp"

every_wire = pytest.mark.parametrize("wire", [NETWORK_WIRE, "shm", "mapped"])
over_ucx = pytest.mark.parametrize("wire", [NETWORK_WIRE, "shm"])


def settings_with(**changed: Any) -> Settings:
    """The defaults, but for some."""
    return msgspec.structs.replace(DEFAULTS, **changed)


def proven(secret: bytes, side: Any, hello: frames.Hello, listener_nonce: bytes) -> bytes:
    """The proof of a side that has said or heard this HELLO."""
    body = frames.encode_handshake(hello)[frames.PREFIX_BYTES :]
    return authentication.proof(secret, side, hello.nonce, listener_nonce, body)


# --- leaving ---------------------------------------------------------------------------------------
class _Leaving:
    """A native ring that detaches when the others do: each has looked for the others before any of them is gone."""

    def __init__(self, native: Any, together: threading.Barrier) -> None:
        self._native = native
        self._together = together

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def leave(self, **how: bool) -> int:
        self._together.wait(PATIENCE_S)
        given_up: int = self._native.leave(**how)
        return given_up


@contextlib.contextmanager
def leaving_at_once(rings: list[SharedRingBuffer]) -> Iterator[ThreadPoolExecutor]:
    """Threads, one for each ring to be closed in, in the worst order."""
    together = threading.Barrier(len(rings))
    for ring in rings:
        ring.native = _Leaving(ring.native, together)  # type: ignore[assignment]
    with ThreadPoolExecutor(len(rings)) as threads:
        yield threads


# --- waiting -------------------------------------------------------------------------------------
async def until(condition: Callable[[], object], what: str = "") -> None:
    """Return once the condition holds; it is asked again and again, since it is somebody else's state."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at, f"this never came true: {what or condition}"
        await asyncio.sleep(0.002)


def eventually(condition: Callable[[], object], what: str = "") -> None:
    """`until`, for tests without a loop."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at, f"this never came true: {what or condition}"
        threading.Event().wait(0.005)


def in_thread(call: Callable[[], object]) -> tuple[list[Any], threading.Thread]:
    """Results of ``call`` in a thread that has begun."""
    results: list[Any] = []
    begun = threading.Event()

    def work() -> None:
        begun.set()
        results.append(call())

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    return results, thread


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine as a test, on uvloop, watching for tasks that it leaves behind."""

    @functools.wraps(test)
    def body(*arguments: Any, **named: Any) -> None:
        run(test(*arguments, **named), PATIENCE_S)

    return body


# --- payloads ------------------------------------------------------------------------------------
def noise(size: int, seed: int = 0) -> np.ndarray:
    """Bytes that are different for each seed, and nowhere a repetition of others."""
    return np.random.default_rng((size, seed)).integers(0, 256, size, dtype=np.uint8)


class OnlyDLPack:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, values: np.ndarray, device: int = 1) -> None:
        self._values = values
        self._device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self._values.__dlpack__(**options)


# --- rings -----------------------------------------------------------------------------------------
def free(ring: SharedRingBuffer) -> bool:
    """Whether every slot is; what only waits for the collector is not held."""
    gc.collect()
    return ring.statistics().free == ring.slot_count


def descriptors(pid: int) -> int:
    """How many files the process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def states(ring: SharedRingBuffer) -> tuple[int, int]:
    """How many slots are READY and READING."""
    look = ring.statistics()
    return look.ready, look.reading


def slot_state(ring: SharedRingBuffer, ticket: Ticket) -> SlotState:
    """What the payload's slot is now."""
    return SlotState(ring.native.info(ticket.slot).state)


def read_bytes(ring: SharedRingBuffer, ticket: Ticket, rank: int = 0) -> bytes:
    """The payload; it stays unread."""
    with ring.read_raw(ticket, rank) as lease:
        return bytes(lease.view)


def segment_file(ring: SharedRingBuffer) -> Path:
    """The ring's segment in the file system."""
    return SHM / ring.name.removeprefix("/")


# --- a server on a loop in this process, and what can happen to it ---------------------------------
@contextlib.contextmanager
def serving(
    schema: Schema | None = None,
    *,
    slots: int = 4,
    slot_bytes: int | None = None,
    overflow: Any = "block",
    ports: tuple[int, ...] = (0,),
    settings: Settings = DEFAULTS,
    secret: bytes | None = None,
    wires: Any = None,
) -> Iterator[tuple[SharedRingBuffer, UCXXServer]]:
    """A ring and its server in thread mode."""
    if schema is None and slot_bytes is None:
        slot_bytes = 1 << 20
    with (
        SharedRingBuffer.create(schema, slots=slots, slot_bytes=slot_bytes, overflow=overflow) as ring,
        UCXXServer(
            ring, ports, addresses=(LOOPBACK,), settings=settings, secret=secret, wires=wires, mode="thread"
        ) as server,
    ):
        yield ring, server


def on_loop(server: UCXXServer, action: Callable[[], Any]) -> Any:
    """Call ``action`` on the loop of a server in thread mode."""

    async def call() -> Any:
        return action()

    return server._run._thread.run(call(), PATIENCE_S)


def cut_connections(server: UCXXServer) -> None:
    """Close every connection, as a listener that is killed does. To be called on the server's loop."""
    for listener in server._run._listeners:
        for connection in list(listener._connections):
            connection.close()


@contextlib.contextmanager
def stalled(server: UCXXServer, then: Callable[[], object] = lambda: None) -> Iterator[None]:
    """While the block runs the server's loop does nothing, like a stopped process; ``then`` is the first it does."""
    begun, over = threading.Event(), threading.Event()

    def stall() -> None:
        begun.set()
        over.wait(PATIENCE_S)
        then()

    server._run._thread.post(stall)
    assert begun.wait(PATIENCE_S)
    try:
        yield
    finally:
        over.set()


@contextlib.contextmanager
def dead_port() -> Iterator[int]:
    """A port that nobody listens on, and that nobody else gets, meanwhile or afterwards."""
    with socket.socket(FAMILY) as bound:
        bound.bind((EVERYWHERE, lasting_port()))
        yield bound.getsockname()[1]


# --- other processes -------------------------------------------------------------------------------
class Elsewhere(Protocol):
    """A host on which processes of the tests run."""

    def command(self, *words: str) -> list[str]:
        """The command that runs ``words`` there."""
        ...


class Child:
    """A Python process that runs ``code``; it reports and is told things by lines of text."""

    def __init__(
        self,
        code: str,
        *arguments: object,
        env: dict[str, str] | None = None,
        stderr: int | None = None,
        host: Elsewhere | None = None,
    ) -> None:
        # what importing ucxx did to this process's environment is not meant for others
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, **ENVIRONMENT, **(env or {})}
        environment = {**inherited, **own}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
        self.process: subprocess.Popen[str]
        if host is None and not any(name.startswith(("LD_", "PYTHON")) for name in env or ()):  # read at a start
            self.process = PreparedPython(code, *map(str, arguments), env=environment, **pipes)
        else:
            words = [sys.executable, "-c", code, *map(str, arguments)]
            if host is not None:
                words = host.command("env", *(f"{name}={value}" for name, value in own.items()), *words)
            self.process = subprocess.Popen(words, text=True, env=environment, **pipes)

    def line(self) -> str:
        """The next line that it prints; the test's watchdog bounds the wait. Fails when it ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait(PATIENCE_S)} before it reported"
        return line.rstrip("\n")

    def tell(self, line: str = "") -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken everything back."""
        self.process.send_signal(signal.SIGKILL)
        self.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


def ended(stranger: socket.socket) -> bool:
    """Whether the other side has ended the connection."""
    stranger.setblocking(False)
    try:
        return stranger.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def listener_pids(ring: SharedRingBuffer) -> dict[int, int]:
    """Process of each living listener, by its port."""
    return {owner.port: owner.pid for owner in ring.native.owners() if owner.alive and owner.port}


def _status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent_of(pid: int) -> int:
    """Parent of a process that exists."""
    return int(_status(pid)[1])


def state_of(pid: int) -> str:
    """State of a process that exists; T: it is stopped."""
    return _status(pid)[0]


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it does not run."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: state_of(pid) == "T", "it has stopped")


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended; one that has ended may still wait for its parent."""
    try:
        return state_of(pid) not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
