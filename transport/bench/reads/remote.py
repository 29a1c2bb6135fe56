"""The benchmark over two hosts: `bench serve` writes what is asked for, `bench fetch` reads it, verifies and times it.

    fetch ── TCP ──► serve     one line: `WantedRead`                      serve answers with its machine
          ──────────────────►  an empty line for each batch            and the tickets of the batch
          ◄─── UCX: payloads   from listeners of a writing process, over the wire that is measured

The control connection is plain JSON lines without a secret, for trusted networks like everything here. A client
that reaches the port can make this host create a ring of at most ``MOST_BYTES`` while it stays connected.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import socketserver
import threading
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

import msgspec

from transport.bench.machine import machine
from transport.bench.processes import BenchProcess
from transport.bench.reads import loopback
from transport.bench.reads.reader import ON_DEVICE
from transport.bench.reads.writer import Writing
from transport.bench.result import Case, Timing
from transport.decoders import convert, json_decoder
from transport.errors import BusyPortError, LinkError, ProtocolError, TransportError, UnreachableError
from transport.runtime.interruption import segment_prefix
from transport.wire.addresses import family_of, host_port

MOST_BYTES: Final = 4 << 30
_MOST_LINE: Final = 1 << 24  # tickets of a batch
_CONNECT_S: Final = 10.0
_END_S: Final = 30.0
_ANSWER_S: Final = 150.0  # the writing process has two minutes itself


class WantedRead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Request of the fetching side."""

    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=MOST_BYTES)]
    payloads: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    listeners: Annotated[int, msgspec.Meta(ge=1, le=15)]
    device: bool = False


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """First message of the serving side, or why it cannot serve."""

    machine: dict[str, Any] = {}
    error: str = ""


class BenchServer(socketserver.ThreadingTCPServer):
    """Server of `bench fetch`, each connection with a writing process of its own. Call `stop` from another thread.

    Args:
        addresses: what tickets advertise; empty: ``bind``, else as any server chooses.

    Raises BusyPortError.
    """

    allow_reuse_address = True
    daemon_threads = False
    block_on_close = True

    def __init__(self, bind: str, port: int, addresses: Sequence[str] = ()) -> None:
        self.addresses = tuple(addresses) or ((bind,) if bind else ())
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.address_family = family_of(bind) or socket.AF_INET
        try:
            super().__init__((bind, port), _Handler)
        except OSError as error:
            other = "a --bind of this host" if error.errno == errno.EADDRNOTAVAIL else "another --port"
            raise BusyPortError(
                f"cannot listen on {host_port(bind or '0.0.0.0', port)}: {error.strerror}; give {other}"
            ) from error
        self.port: int = self.server_address[1]

    @contextlib.contextmanager
    def connected(self, connection: socket.socket) -> Any:
        """Let `stop` end the connection while the block runs."""
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def stop(self) -> None:
        """Accept no more, end what is under way, wait for it."""
        self.shutdown()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


class _Handler(socketserver.StreamRequestHandler):
    server: BenchServer

    def handle(self) -> None:
        with self.server.connected(self.connection), contextlib.suppress(OSError):
            try:
                self._serve()
            except (TransportError, msgspec.MsgspecError) as error:
                self._say(Greeting(error=f"{type(error).__name__}: {error}"))

    def _serve(self) -> None:
        line = self.rfile.readline(4096)
        if not line.strip():
            return
        wanted = json_decoder(WantedRead)(line)
        if wanted.size_bytes * wanted.payloads > MOST_BYTES:
            raise ProtocolError(f"{wanted.payloads} payloads of {wanted.size_bytes} bytes are more than {MOST_BYTES}")
        writing = Writing(
            size_bytes=wanted.size_bytes,
            payloads=wanted.payloads,
            listeners=wanted.listeners,
            device=wanted.device,
            prefix=segment_prefix("bench"),
            addresses=self.server.addresses,
            reachable=True,
        )
        with BenchProcess("transport.bench.reads.writer", writing) as writer:
            self._say(Greeting(machine=machine()))
            while self.rfile.readline(4096):  # not before it is asked for: a full ring would hold up the end
                self._say(writer.ask({}))

    def _say(self, message: object) -> None:
        self.wfile.write(msgspec.json.encode(message) + b"\n")


class RemoteWriter:
    """The fetching side's end of a control connection; answers like the writing process of this host would.

    Raises:
        UnreachableError: no answer from that address.
        LinkError: the other side refused, or ended.
    """

    def __init__(self, host: str, port: int, wanted: WantedRead) -> None:
        try:
            self._socket = socket.create_connection((host, port), _CONNECT_S)
        except OSError as error:
            raise UnreachableError(
                f"benchmark server unreachable at {host_port(host, port)} ({error}); "
                f"start it there: transport bench serve --port {port}"
            ) from error
        self._socket.settimeout(_ANSWER_S)
        self._lines = self._socket.makefile("rb")
        self._where = host_port(host, port)
        try:
            self._send(msgspec.json.encode(wanted))
            greeting = convert(self._answer(), Greeting)
            if greeting.error:
                raise LinkError(f"{self._where}: {greeting.error}")
        except BaseException:  # any error: the caller gets no object through which to close the connection
            self.close()
            raise
        self.machine = greeting.machine

    def ask(self, _: object) -> Any:
        """Return the tickets of the next batch."""
        self._send(b"")
        answer = self._answer()
        if isinstance(answer, dict) and answer.get("error"):
            raise LinkError(f"{self._where}: {answer['error']}")
        return answer

    def _send(self, line: bytes) -> None:
        try:
            self._socket.sendall(line + b"\n")
        except OSError as error:
            raise LinkError(f"{self._where}: {error}") from error

    def _answer(self) -> Any:
        try:
            line = self._lines.readline(_MOST_LINE)
            if not line:
                raise LinkError(f"{self._where} disconnected before the benchmark was complete")
            return json_decoder(object)(line)
        except (OSError, msgspec.MsgspecError) as error:
            raise LinkError(f"{self._where}: {error}") from error

    def close(self, *, wait: bool = True) -> None:
        """``wait`` until the other side's writing process has ended, too, within a bound."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(_END_S)
            while wait and self._lines.readline(_MOST_LINE):
                pass
        self._lines.close()
        self._socket.close()

    def __enter__(self) -> RemoteWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)


def cases(
    sizes: Iterable[int], concurrencies: Sequence[int], wire: str, checksums: Iterable[bool], *, device: bool
) -> list[Case]:
    """Return what is measured: reads into the caller's own buffer, or onto a device."""
    found = loopback.cases(list(sizes), concurrencies, [wire], list(checksums), 1, device)
    return [each for each in found if each.case in ("read", ON_DEVICE)]


def measure(host: str, port: int, case: Case, seconds: float, listeners: int) -> tuple[Timing, dict[str, Any]]:
    """One repetition, and what the other machine is.

    Raises:
        LinkError: a process failed, a payload was not what had been written, or another wire carried it than was asked
            for: then there is no figure.
    """
    wanted = WantedRead(
        size_bytes=case.size_bytes, payloads=case.payloads, listeners=listeners, device=case.case == ON_DEVICE
    )
    with RemoteWriter(host, port, wanted) as writer:
        return loopback.measured(case, seconds, writer), writer.machine
