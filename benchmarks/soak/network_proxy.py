"""A proxy that every TCP connection of a job passes, and that cuts, stalls, slows down and changes what passes.

Processes that are preloaded with tests/support/detoured.c ask here, at a Unix socket, for a port of the loopback that
leads to the address that they want. What happens, to one direction of one connection:

    cut     in the middle of what passes, by RST or by FIN
    stall   nothing passes for 0.1 to 20 s; the other direction goes on
    slow    half of the bytes per second from now on, never less than SLOWEST
    flip    one bit of the next payload, or message of this package, on any connection

Messages are recognised by their checksums, payloads by their bytes (payloads.py), in what arrives at the proxy in one
piece. Nothing else is changed: UCX has no checksums, and aborts the process on headers of its own that make no sense.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import payloads

from transport._ring import WIRE_VERSION, checksum

_FASTEST = 64 << 20  # bytes per second and direction
SLOWEST = 2 << 20
_CHUNK = 64 << 10
_PATIENCE_S = 30.0  # until a connection is used
_BETWEEN_FLIPS = 8  # messages: a busy machine that only shakes hands gets through a handshake now and then
_SURE = 12  # consecutive bytes of a payload: that they are so by chance is out of the question
_NOISE = payloads.NOISE.tobytes()
_FRAME = re.compile(re.escape(bytes((WIRE_VERSION,))) + rb"[\x10\x11]")  # version and kind, behind the checksum
_HANDSHAKE = re.compile(re.escape(bytes((WIRE_VERSION,))) + rb"[\x01-\x04]\0\0..\0\0", re.DOTALL)
_RESET = struct.pack("ii", 1, 0)


def messages(data: bytes) -> Iterator[tuple[int, int]]:
    """Begin and end of each message of this package that lies in ``data`` as a whole, without payloads behind it."""
    for found in _FRAME.finditer(data):
        begin = found.start() - 8
        if begin < 0 or len(data) < begin + 24:
            continue
        count = int.from_bytes(data[begin + 10 : begin + 12], "little")
        taken = begin + 24 + 48 * count  # the rows of the answer to a TAKE, of which each says how long its note is
        notes = sum(
            struct.unpack_from("<12xH", data, at)[0] for at in range(begin + 24, taken, 48) if at + 14 <= len(data)
        )
        texts = sum(struct.unpack_from("<II", data, begin + 40)) if len(data) >= begin + 48 else 0  # of an END
        for end in (begin + 24 + 32 * count, taken + notes, begin + 56 + texts):
            if end <= len(data) and checksum(data[begin + 8 : end]) == struct.unpack_from("<Q", data, begin)[0]:
                yield begin, end
                break
    for found in _HANDSHAKE.finditer(data):
        begin, end = found.end(), found.end() + int.from_bytes(found[0][4:8], "little")
        if end <= len(data) and data[end - 8 : end] == struct.pack("<Q", checksum(data[begin : end - 8])):
            yield begin, end


class _Way:
    """One direction of a connection."""

    def __init__(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        self.source, self.sink = source, sink
        self.rate = _FASTEST
        self.held_until = 0.0
        self.cut = ""  # how, after so many bytes more
        self.after = 0


class Proxy:
    """Runs in one event loop.

    Args:
        path: of the Unix socket.
        seed: of what happens; when bytes pass is no part of it.
        every_s: mean time between faults.
        kinds: of faults, by weight (`network.KINDS`).

    Attributes:
        counts: of faults, by kind, of connections, and of bytes that passed.
    """

    def __init__(self, path: Path, seed: int, every_s: float, kinds: Mapping[str, int]) -> None:
        self._path = path
        self._rng = random.Random(seed)
        self._every_s = every_s
        self._kinds = kinds
        self._flips: set[str] = set()  # kinds that wait for bytes
        self._unchanged = 0  # messages since the last that was changed
        self._ways: set[_Way] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._calm = asyncio.Event()
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Without end."""
        async with await asyncio.start_unix_server(self._asked, self._path):
            while True:
                await asyncio.sleep(self._rng.expovariate(1 / self._every_s))
                if self._ways and not self._calm.is_set():
                    self._begin(self._rng.choice(list(self._ways)))

    def calm(self) -> None:
        """No more faults; those that last end."""
        self._calm.set()
        self._flips.clear()
        for way in self._ways:
            way.cut, way.rate = "", _FASTEST

    def _begin(self, way: _Way) -> None:
        [kind] = self._rng.choices(list(self._kinds), list(self._kinds.values()))
        if kind == "stall":
            way.held_until = time.monotonic() + 0.1 * math.exp(self._rng.random() * math.log(200))
            self.counts[kind] += 1
        elif kind == "slow":
            way.rate = max(SLOWEST, way.rate // 2)
            self.counts[kind] += 1
        elif kind.startswith("cut"):
            way.cut, way.after = kind, int(math.exp(self._rng.random() * math.log(2 << 20)))
        else:
            self._flips.add(kind)

    # --- connections ------------------------------------------------------------------------------------
    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError), contextlib.closing(writer):
            asked = await reader.readexactly(6)
            far = await asyncio.open_connection(socket.inet_ntoa(asked[:4]), *struct.unpack("!H", asked[4:]))
            here = socket.create_server(("127.0.0.1", 0))
            here.setblocking(False)
            task = asyncio.create_task(self._carry(here, *far))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            writer.write(struct.pack("!H", here.getsockname()[1]))
            await writer.drain()

    async def _carry(self, here: socket.socket, far_in: asyncio.StreamReader, far_out: asyncio.StreamWriter) -> None:
        try:
            with here:
                accepted, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(here), _PATIENCE_S)
            near_in, near_out = await asyncio.open_connection(sock=accepted)
        except (TimeoutError, OSError):
            far_out.close()
            return
        self.counts["connections"] += 1
        both = _Way(near_in, far_out), _Way(far_in, near_out)
        self._ways.update(both)
        reset = True
        try:
            reset = any(await asyncio.gather(*(self._pass_on(way) for way in both)))
        except OSError:  # one side has reset it
            pass
        finally:
            self._ways.difference_update(both)
            for way in both:
                if reset:
                    with contextlib.suppress(OSError):
                        way.sink.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    way.sink.transport.abort()
                else:
                    way.sink.close()

    async def _pass_on(self, way: _Way) -> bool:
        """Until the end of the source; whether the connection is to be reset then."""
        while chunk := await way.source.read(_CHUNK):
            if (wait_s := way.held_until - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._calm.wait(), wait_s)
            self.counts["bytes"] += len(chunk)
            for kind in sorted(self._flips):
                chunk = self._flipped(kind, chunk)
            if way.cut and len(chunk) > way.after:
                way.sink.write(chunk[: way.after])
                await way.sink.drain()
                self.counts[way.cut] += 1
                if way.cut == "cut by RST":
                    raise ConnectionResetError
                break  # a FIN; what the other side still sends passes
            way.after -= len(chunk)
            way.sink.write(chunk)
            await way.sink.drain()
            if way.rate < _FASTEST:
                await asyncio.sleep(len(chunk) / way.rate)
        with contextlib.suppress(OSError):
            way.sink.write_eof()
        return False

    def _flipped(self, kind: str, chunk: bytes) -> bytes:
        at = None
        if kind == "flip in a message":
            found = list(messages(chunk))
            self._unchanged += len(found)
            if found and self._unchanged > _BETWEEN_FLIPS:
                self._unchanged = 0
                at = self._rng.randrange(*self._rng.choice(found))
        else:
            middle = self._rng.randrange(len(chunk))
            around = chunk[max(0, middle - _SURE // 2) : middle + _SURE // 2]
            if len(around) == _SURE and around in _NOISE:
                at = middle
        if at is None:
            return chunk
        self.counts[kind] += 1
        self._flips.discard(kind)
        return chunk[:at] + bytes([chunk[at] ^ 1 << self._rng.randrange(8)]) + chunk[at + 1 :]
