"""An endpoint without UCX, for tests of what is said on it: it records what is sent and receives what a test says."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from transport.errors import ClosedError, ConnectionLostError, InternalError
from transport.testing import run
from transport.wire import frames as wire


def scenario(body: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine function; fixtures are passed on."""

    @functools.wraps(body)
    def test(*arguments: Any, **fixtures: Any) -> None:
        run(body(*arguments, **fixtures))

    return test


class ScriptedEndpoint:
    """Has the face of `transport.wire.ucx.Endpoint`, and its rules: a future per operation, matching by tag, messages
    that come before their receive are kept, `abort` fails all that is pending, afterwards nothing can be started.

    Attributes:
        log: what was done, in order: ("receive", tag), ("send", tag), ("abort",), …
        sent: data sent, by tag.
        withdrawn: tags of the receives that were taken back.
        hold: sends for which this is true stay under way until `release`.
        on_send, on_stream: called with what is sent, as a script of the other side.
        on_abort: called when the endpoint is aborted, before anything pending fails.
    """

    def __init__(self, name: str = "peer") -> None:
        self.name = name
        self.alive = True
        self.log: list[tuple[Any, ...]] = []
        self.sent: dict[int, Any] = {}
        self.withdrawn: list[int] = []
        self.hold: Callable[[int], bool] = lambda _: False
        self.on_send: Callable[[int, Any], None] = lambda tag, data: None
        self.on_stream: Callable[[bytes], None] = lambda data: None
        self.on_abort: Callable[[], None] = lambda: None
        self.lanes = [("tcp", "lo")]
        self._aborted = False
        self._lost = False
        self._receives: dict[int, tuple[Any, asyncio.Future[None]]] = {}
        self._early: dict[int, bytes] = {}
        self._held: list[asyncio.Future[None]] = []
        self._arrivals: dict[int, asyncio.Future[Any]] = {}
        self._stream_in = bytearray()
        self._stream_receives: list[tuple[Any, asyncio.Future[None]]] = []
        self._stream_out: asyncio.Queue[bytes] = asyncio.Queue()

    # --- what the code under test sees ------------------------------------------------------------
    def _future(self) -> asyncio.Future[None]:
        if self._aborted:
            raise ClosedError("the endpoint was closed by this side")
        if self._lost:
            raise ConnectionLostError("the peer disconnected")
        return asyncio.get_running_loop().create_future()

    def send(self, buffer: Any, tag: int) -> asyncio.Future[None]:
        future = self._future()
        assert tag not in self.sent, f"tag {tag:#x} is used twice"
        self.log.append(("send", tag))
        self.sent[tag] = buffer
        if self.hold(tag):
            self._held.append(future)
        else:
            future.set_result(None)
        if (arrival := self._arrivals.pop(tag, None)) is not None:
            arrival.set_result(buffer)
        self.on_send(tag, buffer)
        return future

    def receive(self, buffer: Any, tag: int) -> asyncio.Future[None]:
        future = self._future()
        assert tag not in self._receives, f"tag {tag:#x} is posted twice"
        self.log.append(("receive", tag))
        self._receives[tag] = (buffer, future)
        if tag in self._early:
            self.deliver(tag, self._early.pop(tag))
        return future

    def joined(self) -> asyncio.Future[None]:
        future = self._future()
        future.set_result(None)
        return future

    def send_stream(self, buffer: Any) -> asyncio.Future[None]:
        future = self._future()
        future.set_result(None)
        self.log.append(("send_stream",))
        self._stream_out.put_nowait(bytes(buffer))
        self.on_stream(bytes(buffer))
        return future

    def receive_stream(self, buffer: Any) -> asyncio.Future[None]:
        future = self._future()
        self._stream_receives.append((buffer, future))
        self.feed(b"")
        return future

    def withdraw(self, future: asyncio.Future[None]) -> None:
        for tag, (_, posted) in list(self._receives.items()):
            if posted is future:
                self.log.append(("withdraw", tag))
                self.withdrawn.append(tag)
                del self._receives[tag]
                future.cancel()

    def abort(self) -> None:
        if self._aborted:
            return
        self.on_abort()
        self._aborted = True
        self.log.append(("abort",))
        self.lose()

    def transports(self) -> list[tuple[str, str]]:
        return self.lanes

    def wire(self) -> str:
        return "tcp"

    # --- what the test does ---------------------------------------------------------------------------
    @property
    def aborted(self) -> bool:
        return self._aborted

    @property
    def posted(self) -> set[int]:
        """Tags with a receive that waits."""
        return set(self._receives)

    def deliver(self, tag: int, data: Any) -> None:
        """A message of the peer."""
        if tag not in self._receives:
            self._early[tag] = bytes(data)
            return
        buffer, future = self._receives.pop(tag)
        view = memoryview(buffer).cast("B")
        if len(data) > len(view):
            future.set_exception(InternalError("message truncated"))
        elif not future.done():
            view[: len(data)] = data
            future.set_result(None)

    def feed(self, data: bytes) -> None:
        """Bytes of the peer on the stream."""
        self._stream_in += data
        while self._stream_receives:
            buffer, future = self._stream_receives[0]
            if not future.done():
                if len(self._stream_in) < len(buffer):
                    return
                buffer[:] = self._stream_in[: len(buffer)]
                del self._stream_in[: len(buffer)]
                future.set_result(None)
            self._stream_receives.pop(0)

    def say(self, message: Any) -> None:
        """A handshake message of the peer."""
        self.feed(wire.encode_handshake(message))

    async def heard(self, expected: Any) -> Any:
        """The next handshake message sent to the peer."""
        data = await self._stream_out.get()
        kind, length = wire.decode_prefix(data[:8])
        assert kind.name == expected.__name__.upper(), kind
        assert length == len(data) - 8
        return wire.decode_handshake(expected, data[8:])

    async def arrival(self, tag: int) -> Any:
        """What is sent with this tag, as soon as it is."""
        if tag in self.sent:
            return self.sent[tag]
        return await self._arrivals.setdefault(tag, asyncio.get_running_loop().create_future())

    def release(self) -> None:
        """All sends that were held are complete."""
        while self._held:
            self._held.pop(0).set_result(None)

    def lose(self) -> None:
        """The peer is gone: everything that is pending fails."""
        self.alive = False
        self._lost = True
        pending = [
            *(future for _, future in self._receives.values()),
            *(future for _, future in self._stream_receives),
            *self._held,
        ]
        self._receives.clear()
        self._stream_receives.clear()
        self._held.clear()
        for future in pending:
            if not future.done():
                future.set_exception(ConnectionLostError("Endpoint timeout"))
                future.exception()
        for arrival in self._arrivals.values():
            arrival.cancel()
        self._arrivals.clear()


class ScriptedWorker:
    """Connects to endpoints that the test has prepared."""

    def __init__(self, *endpoints: ScriptedEndpoint) -> None:
        self._endpoints = list(endpoints)
        self.asked: list[tuple[str, int]] = []

    async def connect(self, host: str, port: int) -> ScriptedEndpoint:
        self.asked.append((host, port))
        return self._endpoints.pop(0)
