"""The proxy of detour.py: a process of its own, so that its connections are none of the test's.

    python detour_proxy.py PATH      then a line of JSON for each of its methods, answered by a line

PATH.trainer and PATH.listener are sockets at which the two sides ask where to connect to. It imports nothing
of the package.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

_PATIENCE_S = 30.0
WAYS = "to the listener", "to the trainer"
_TAIL = 64  # bytes of what has passed among which the beginning of a mark is looked for


class _Fault(NamedTuple):
    action: str
    direction: str
    marks: list[bytes]  # behind the last byte of one of them, or at it; empty: before the next byte of all


class Proxy:
    """Connections, and at most one fault that waits to happen."""

    def __init__(self, path: str) -> None:
        self._happened = threading.Event()
        self._reachable = True
        self._resumed = threading.Event()
        self._lock = threading.Lock()
        # Invariants: guarded by _lock
        self._fault: _Fault | None = None
        self._connections: list[tuple[socket.socket, socket.socket]] = []
        # UCX connects from either side, as it likes.
        for side, ways in (("trainer", WAYS), ("listener", WAYS[::-1])):
            control = socket.socket(socket.AF_UNIX)
            control.bind(f"{path}.{side}")
            control.listen(64)
            _start(self._serve, control, ways)

    def arm(self, action: str, direction: str, marks: list[str]) -> None:
        """See `Detour.arm`."""
        self._happened.clear()
        self._resumed.clear()
        with self._lock:
            self._fault = _Fault(action, direction, [bytes.fromhex(mark) for mark in marks])

    def wait(self) -> bool:
        """See `Detour.wait`."""
        return self._happened.wait(_PATIENCE_S)

    def resume(self) -> None:
        """What is held goes on."""
        self._resumed.set()

    def reach(self, reachable: bool) -> None:
        """Whether new connections are made."""
        self._reachable = reachable

    def cut(self) -> None:
        """Reset every connection; what is held is lost."""
        with self._lock:
            connections, self._connections = self._connections, []
        for pair in connections:
            _reset(pair)
        self._resumed.set()

    # --- the way ----------------------------------------------------------------------------------------
    def _serve(self, control: socket.socket, ways: tuple[str, str]) -> None:
        while True:
            asking, _ = control.accept()
            with asking, contextlib.suppress(ConnectionError):  # who asked was killed meanwhile
                asked = asking.recv(6)
                if len(asked) < 6 or not self._reachable:
                    continue
                wanted = socket.inet_ntoa(asked[:4]), *struct.unpack("!H", asked[4:])
                here = socket.create_server(("127.0.0.1", 0))
                here.settimeout(_PATIENCE_S)
                _start(self._carry, here, wanted, ways)
                asking.sendall(struct.pack("!H", here.getsockname()[1]))

    def _carry(self, here: socket.socket, wanted: tuple[str, int], ways: tuple[str, str]) -> None:
        with here:
            try:
                near, _ = here.accept()
            except OSError:
                return
        near.settimeout(None)
        try:
            far = socket.create_connection(wanted)
        except OSError:
            _reset((near,))
            return
        with self._lock:
            self._connections.append((near, far))
        _start(self._pass_on, near, far, ways[0])
        self._pass_on(far, near, ways[1])

    def _pass_on(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        before = b""
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                fault, end = self._due(direction, before, chunk)
                before = (before + chunk)[-_TAIL:]
                if fault is None:
                    sink.sendall(chunk)
                elif fault.action == "flip":
                    sink.sendall(chunk[: end - 1] + bytes([chunk[end - 1] ^ 1]) + chunk[end:])
                    self._happened.set()
                else:
                    sink.sendall(chunk[:end])
                    if fault.action == "cut":
                        self.cut()
                        self._happened.set()
                        return
                    self._happened.set()
                    self._resumed.wait()
                    sink.sendall(chunk[end:])
            sink.shutdown(socket.SHUT_WR)
            return
        _reset((source, sink))

    def _due(self, direction: str, before: bytes, chunk: bytes) -> tuple[_Fault | None, int]:
        """The fault, if it is to happen in this chunk, and how much of the chunk comes before it."""
        with self._lock:
            fault = self._fault
            if fault is None or fault.direction != direction:
                return None, 0
            ends = [_end(before, chunk, mark) for mark in fault.marks]
            found = [end for end in ends if end]
            if fault.marks and not found:
                return None, 0
            self._fault = None
            return fault, min(found, default=0)


def _end(before: bytes, chunk: bytes, mark: bytes) -> int:
    """How much of the chunk there is up to the end of the mark, which may begin before it; 0: there is no mark."""
    tail = before[-(len(mark) - 1) :]
    found = (tail + chunk).find(mark)
    return 0 if found < 0 else found + len(mark) - len(tail)


def _reset(sockets: tuple[socket.socket, ...]) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def _start(work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()


def main() -> None:
    """Until its standard input ends."""
    proxy = Proxy(sys.argv[1])
    print("null", flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(proxy, method)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
