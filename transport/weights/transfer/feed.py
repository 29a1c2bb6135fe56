"""The feed: messages from a member to the members that pull from it, over TCP. It carries no bytes of weights.

Each side detects the other's end by the broken connection, and a peer that is only stopped by a timeout. The parent's
side (`Feed`) and the child's (`Upstream`) belong to one group of one update.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import logging
import secrets
import socket
import termios
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from transport.errors import ParentLostError, ProtocolError, TransportError
from transport.runtime.error_text import error_text
from transport.runtime.logs import LoggedErrors
from transport.runtime.timeouts import Limit
from transport.weights.transfer.messages import (
    MAX_FRAME_BYTES,
    Alive,
    FeedFailed,
    FeedHello,
    FeedWelcome,
    Frame,
    decode,
    encode,
    length_of,
)
from transport.weights.transfer.threads import ended, settled
from transport.wire.addresses import host_port

log = logging.getLogger(__name__)

_HEAD = 4
_HELLO_S = 10.0  # timeout for the first message of a connection
# Connections that are not authenticated yet. A group that comes at once, while the loop is busy, is counted among them.
# So many strangers cost about 5 MiB, of which 2 MiB are what they may say (measured with asyncio and uvloop).
_MOST_STRANGERS = 512
_BACKLOG = 512  # connections that the kernel holds for a busy loop; one that finds it full tries again after a second
_MOST_HELLO = 4 << 10  # bytes of the first message; what strangers announce is read into memory
_RECEIVE_BYTES = _MOST_HELLO  # of the kernel's buffer, and so of one read; children say nothing after that message
_MOST_AHEAD = MAX_FRAME_BYTES  # bytes of a parent's messages that wait here for who takes them


class Feed:
    """The parent's side. Belongs to one loop.

    Args:
        lost: called with the name of a child that has left: its connection has ended, or it was dropped.
        stall_s: a child that takes no byte for so long is dropped; children hear something four times as often.

    Attributes:
        left: names of children that were connected and are not any more; what the end of the feed parts is not in it.
    """

    def __init__(self, lost: Callable[[str], None], stall_s: float = 60.0) -> None:
        self._stall_s = stall_s
        self._beating: asyncio.Task[None] | None = None
        self.token = secrets.token_hex(16)
        self.port = 0
        self._lost = lost
        self._server: asyncio.Server | None = None
        self._children: dict[str, asyncio.StreamWriter] = {}
        self._written: dict[str, int] = {}  # bytes for each child, sent or still in its buffer
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: set[asyncio.StreamWriter] = set()
        self._joined = asyncio.Event()  # a child came or left
        self.left: set[str] = set()
        self._expected: frozenset[str] | None = None
        self._closing = False

    async def open(self, address: str) -> None:
        """Listen on a port of ``address``; `port` is which."""
        self._server = await asyncio.start_server(self._accept, address, 0, backlog=_BACKLOG, start_serving=False)
        for each in self._server.sockets:  # what they accept inherits it
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        await self._server.start_serving()
        self._beating = asyncio.get_running_loop().create_task(self._beat())
        self.port = self._server.sockets[0].getsockname()[1]

    async def joined(self, names: Iterable[str], parents: Iterable[Upstream] = ()) -> None:
        """Wait until each of these is connected, or was and has left. No other child is accepted from now on.

        Raises ParentLostError when one of ``parents`` fails meanwhile.
        """
        self._expected = frozenset(names)
        coming = asyncio.ensure_future(self._complete(self._expected))
        waiting: set[asyncio.Future[Any]] = {coming, *(parent.reading for parent in parents)}
        try:
            while not coming.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    if each.cancelled():
                        raise ParentLostError("the connection to a parent was closed here while the group formed")
                    each.result()
        finally:
            await ended(coming)

    async def _complete(self, names: frozenset[str]) -> None:
        while self.missing(names):
            self._joined.clear()
            await self._joined.wait()

    def missing(self, names: Iterable[str]) -> set[str]:
        """Return those of these that have not come."""
        return set(names) - self._children.keys() - self.left

    @property
    def children(self) -> frozenset[str]:
        """Names of the connected children."""
        return frozenset(self._children)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing or len(self._strangers) >= _MOST_STRANGERS:
            writer.close()
            return
        self._strangers.add(writer)  # here, since a loop may accept many before it begins their tasks
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))

        def over(_: asyncio.Task[None]) -> None:  # also of a task that was cancelled before it began
            self._tasks.discard(task)
            self._strangers.discard(writer)
            writer.close()

        self._tasks.add(task)
        task.add_done_callback(over)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = None
        try:
            with contextlib.suppress(OSError, EOFError, TimeoutError, TransportError):
                async with Limit(_HELLO_S):
                    hello, _ = await _next(reader, _HELLO_S, _MOST_HELLO)
                self._strangers.discard(writer)
                try:
                    name = self._admitted(hello)
                    _say(writer, FeedWelcome())
                except TransportError as error:
                    _say(writer, FeedFailed(error_text(error)))
                    await writer.drain()
                    raise
                self._children[name] = writer
                self._joined.set()
                while await reader.read(1024):
                    raise ProtocolError(f"unexpected message from child {name}")
        finally:
            if name is not None:
                self._leave(name)

    def _leave(self, name: str) -> None:
        if self._children.pop(name, None) is not None and not self._closing:
            self.left.add(name)
            self._joined.set()
            self._lost(name)

    def _admitted(self, hello: Frame) -> str:
        if not isinstance(hello, FeedHello) or not secrets.compare_digest(hello.token.encode(), self.token.encode()):
            raise ProtocolError(
                "authentication failed: the first message on a feed must be Hello with the group's token"
            )
        if hello.name in self._children:
            raise ProtocolError(f"{hello.name} is already connected")
        if hello.name in self.left:
            raise ProtocolError(f"{hello.name} has left this group; it joins with the next update")
        if self._expected is not None and hello.name not in self._expected:
            raise ProtocolError(f"{hello.name} is not in this group; it joins with the next update")
        return hello.name

    async def _beat(self) -> None:
        """Give signs of life, by which a child tells a parent with nothing to say from one that is stopped or gone."""
        failures = LoggedErrors(log, "a sign of life to a child")
        while True:
            await asyncio.sleep(self._stall_s / 4)
            for writer in self._standing(list(self._children)).values():
                with failures:
                    if not writer.transport.get_write_buffer_size():  # else it has something to read
                        writer.write(_ALIVE)

    def _standing(self, names: Iterable[str]) -> dict[str, asyncio.StreamWriter]:
        """Those of these children whose connection stands; that another one is gone `_serve` hears a moment later."""
        found = {name: self._children.get(name) for name in names}
        return {name: writer for name, writer in found.items() if writer is not None and not writer.is_closing()}

    async def tell(self, frame: Frame, names: Iterable[str]) -> None:
        """Send to these children, except disconnected ones. A child that takes no byte for ``stall_s`` is dropped."""
        data = encode(frame)
        told = self._standing(names)
        for name, writer in told.items():
            writer.write(data)
            self._written[name] = self._written.get(name, 0) + len(data)
        if any(writer.transport.get_write_buffer_size() for writer in told.values()):
            await asyncio.gather(*(self._taken(name, writer) for name, writer in told.items()))

    async def _taken(self, name: str, writer: asyncio.StreamWriter) -> None:
        while True:
            before = self._sent(name, writer)
            try:
                async with Limit(self._stall_s):
                    await writer.drain()
            except TimeoutError:
                if self._sent(name, writer) > before:
                    continue
                self.drop(name)
            except OSError:
                pass  # `_serve` detects the disconnect
            return

    def _sent(self, name: str, writer: asyncio.StreamWriter) -> int:
        """Return how many bytes of messages the child's host has taken."""
        queued = array.array("i", [0])
        with contextlib.suppress(OSError):  # it was closed
            fcntl.ioctl(writer.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)  # by this host's kernel
        return self._written.get(name, 0) - writer.transport.get_write_buffer_size() - queued[0]

    def drop(self, name: str) -> None:
        """Abort the connection of a child that is too slow: it has left."""
        writer = self._children.get(name)
        if writer is not None:
            writer.transport.abort()
            self._leave(name)

    async def close(self) -> None:
        """Close all connections, and stop listening. Idempotent."""
        self._closing = True
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._children.values():
            writer.close()
        self._children.clear()
        await ended(self._beating, *self._tasks)


_ALIVE = encode(Alive())
_TELL_S = 1.0  # a child that does not receive the message detects the disconnect instead


async def announce_failure(feed: Feed, error: BaseException) -> None:
    """Send every child the failure, even if the caller is cancelled meanwhile; takes at most `_TELL_S`."""
    frame = FeedFailed(error_text(error))

    async def tell() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TELL_S):
                await feed.tell(frame, feed.children)

    await settled(asyncio.ensure_future(tell()))


class Upstream:
    """The child's side: receives the parent's messages. One task at a time may wait for `next`.

    Messages are read before `next` asks for them; at most `_MOST_AHEAD` bytes and one message more.

    Attributes:
        reading: ends when the parent disconnects or reports a failure, with the error of `next`.
        ahead: bytes of the messages that were read and not asked for.
    """

    def __init__(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stall_s: float = 60.0
    ) -> None:
        self._stall_s = stall_s
        self._parent = name
        self._reader = reader
        self._writer = writer
        self._frames: deque[tuple[Frame, int]] = deque()  # and their bytes
        self.ahead = 0
        self._changed = asyncio.Event()  # a frame came, or was taken, or no more come
        self.reading = asyncio.get_running_loop().create_task(self._read_on())
        self.reading.add_done_callback(self._over)

    @classmethod
    async def connect(
        cls, parent: str, address: str, port: int, token: str, name: str, stall_s: float = 60.0
    ) -> Upstream:
        """Join a parent's feed. ParentLostError if it is unreachable or refuses.

        stall_s: a parent that says nothing at all for so long is lost.
        """
        try:
            reader, writer = await asyncio.open_connection(address, port)
        except OSError as error:
            raise ParentLostError(f"{parent} is unreachable at {host_port(address, port)}: {error}") from error
        upstream = cls(parent, reader, writer, stall_s)
        try:
            writer.write(encode(FeedHello(token, name)))
            answer = await upstream.next()
            if not isinstance(answer, FeedWelcome):
                raise ProtocolError(f"unexpected answer from {parent}: {type(answer).__name__}, expected Welcome")
        except BaseException:
            upstream.close()
            raise
        return upstream

    async def _read_on(self) -> None:
        while True:
            while self.ahead >= _MOST_AHEAD:
                self._changed.clear()
                await self._changed.wait()
            frame, size = await self._read()
            self._frames.append((frame, size))
            self.ahead += size
            self._changed.set()

    def _over(self, reading: asyncio.Task[None]) -> None:
        self._changed.set()
        if not reading.cancelled():
            reading.exception()  # retrieved, so that asyncio does not log it

    async def next(self) -> Frame:
        """Return the next frame. ParentLostError if the parent disconnects or reports a failure."""
        while not self._frames:
            if self.reading.cancelled():
                raise ParentLostError(f"the connection to {self._parent} was closed here")
            if self.reading.done():
                self.reading.result()
            self._changed.clear()
            await self._changed.wait()
        frame, size = self._frames.popleft()
        self.ahead -= size
        self._changed.set()
        return frame

    async def _read(self) -> tuple[Frame, int]:
        try:
            while True:
                frame, size = await _next(self._reader, self._stall_s)
                if not isinstance(frame, Alive):
                    break
        except TimeoutError as error:
            raise ParentLostError(f"{self._parent} has said nothing for {self._stall_s:g} s (stall_s)") from error
        except (OSError, EOFError) as error:
            raise ParentLostError(f"{self._parent} disconnected during the update") from error
        if isinstance(frame, FeedFailed):
            raise ParentLostError(f"{self._parent}: {frame.why}")
        return frame, size

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._writer.close()
        self.reading.cancel()


def _say(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Write a message. ConnectionResetError: the connection is gone, for which uvloop raises RuntimeError."""
    if writer.is_closing():
        raise ConnectionResetError("the connection is gone")
    writer.write(encode(frame))


async def _next(reader: asyncio.StreamReader, stall_s: float, most: int = MAX_FRAME_BYTES) -> tuple[Frame, int]:
    """Return a frame, and its bytes. TimeoutError when no byte of it comes for ``stall_s``."""
    size = length_of(await _exactly(reader, _HEAD, stall_s), most)
    return decode(await _exactly(reader, size, stall_s)), _HEAD + size


async def _exactly(reader: asyncio.StreamReader, size: int, stall_s: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        async with Limit(stall_s):
            piece = await reader.read(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
