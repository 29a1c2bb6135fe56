"""What a writer and a trainer of benchmarks/job do, whatever carries the payloads: the same for us and for every peer.

Needs the standard library and xxhash only, since the peers run it in environments that do not have this package.

A payload is a header of 32 bytes (writer, number, time of the call that wrote it, hash of the body) and a body of
random bytes. The trainer hashes every body that it consumed. Lost and duplicated payloads are counted by the driver
from the numbers of all trainers.

One JSON line in, one out:

    (configuration)       →  {"address", "helpers"}         set up; addresses of the writers go to the trainers
    {"write": n}          →  {"began_ns"}                   of a writer, when n more payloads are handed over
    {"cpu": true}         →  {"cpu_s"}                      processor time until now
    {"mark": true}        →  {"cpu_s"}                      of a trainer: and what it consumes from here on is measured
    {"stop": true}        →  {"ended_ns"}                   of a trainer, which takes what is left and writes its result
    (end of input)                                          the process ends
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import random
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import xxhash

HEADER = struct.Struct("<QQqQ")
_CELL = struct.Struct("<q")
_WRITER_SHIFT = 48  # a record names a payload by its writer and its number in one word
_BODIES = 8
_BODY_BYTES = 32 << 20  # of all bodies together, but for a body that is larger
_POLL_S = 0.05  # how long a trainer waits for payloads before it looks whether it is to stop
_END_S = 10.0
IDLE_PAUSE_S = 0.002  # long enough that the trainer sleeps again
_IDLE_LOOK_S = 0.0001


class WrongPayloadError(Exception):
    """A body is not what its writer hashed."""


class StoppedError(Exception):
    """The driver has ended this process while it waited for room."""


class Job(SimpleNamespace):
    """A process's part: the fields of its configuration (see `driver`), and whether it is to end."""

    index: int
    size_bytes: int
    batch: int
    window: int
    writers: int
    trainers: int
    place: str
    addresses: list[str]
    wire: str
    layout: str
    cells: str
    rings: str
    result: str
    idle: bool
    ended: threading.Event

    def check(self) -> None:
        """To be called at least every second while waiting for room."""
        if self.ended.is_set():
            raise StoppedError


class Writing(Protocol):
    """Hands payloads over. At most ``job.window`` of a writer are unread at any time; beyond that it waits."""

    address: str
    helpers: Sequence[int]

    def prepare(self, body: bytes) -> Any: ...
    def write_many(self, payloads: Sequence[tuple[bytes, Any]]) -> None: ...
    def close(self) -> None: ...


class Training(Protocol):
    """Takes payloads: claims up to n of them (None: nothing came in time), then consumes what it claimed."""

    def claim(self, n: int, timeout_s: float) -> Any: ...
    def consume(self, batch: Any) -> Sequence[tuple[Any, Any]]: ...
    def close(self) -> None: ...


class Bodies:
    """Random bodies with their hashes, made before the clock runs; header and body together have ``size`` bytes."""

    def __init__(self, size: int, seed: int) -> None:
        length = size - HEADER.size
        number = max(1, min(_BODIES, _BODY_BYTES // max(1, length)))
        self.bodies = [random.Random(seed * _BODIES + at).randbytes(length) for at in range(number)]
        self.hashes = [xxhash.xxh3_64_intdigest(body) for body in self.bodies]


class Cells:
    """How many payloads each trainer has consumed, in a file that all processes map."""

    def __init__(self, path: str, trainers: int) -> None:
        with open(path, "r+b") as file:  # noqa: PTH123  # a path as text, also where numpy and pathlib are not loaded
            self._map = mmap.mmap(file.fileno(), _CELL.size * trainers)
        self._sum = struct.Struct(f"<{trainers}q")

    @staticmethod
    def make(path: str, trainers: int) -> None:
        """The file, with nothing consumed."""
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(bytes(_CELL.size * trainers))

    def put(self, trainer: int, consumed: int) -> None:
        """Of one trainer, which is the only one to write its cell."""
        _CELL.pack_into(self._map, _CELL.size * trainer, consumed)

    def total(self) -> int:
        """Of all trainers."""
        return sum(self._sum.unpack_from(self._map))

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


class Lines:
    """Standard input as messages; its end sets ``ended``, and ends a process that does not end by itself."""

    def __init__(self) -> None:
        # What libraries print must not stand between our lines.
        self._output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.ended = threading.Event()
        self.messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.on_message: Callable[[dict[str, Any]], bool] = lambda _: False
        threading.Thread(target=self._read, name="lines", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if not self.on_message(message):
                self.messages.put(message)
        self.ended.set()
        self.messages.put(None)
        time.sleep(_END_S)
        os._exit(1)

    def say(self, **answer: Any) -> None:
        """One line of output."""
        print(json.dumps(answer), file=self._output, flush=True)


def cpu_s() -> float:
    """Processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def write(job: Job, lines: Lines, writer: Writing) -> None:
    """Write as many payloads as each message says."""
    made = Bodies(job.size_bytes, job.index)
    bodies = [writer.prepare(body) for body in made.bodies]
    kinds = len(bodies)
    cells = Cells(job.cells, job.trainers)
    number = 0
    lines.say(address=writer.address, helpers=list(writer.helpers))
    while (message := lines.messages.get()) is not None:
        if "write" not in message:
            lines.say(cpu_s=cpu_s())
            continue
        end = number + message["write"]
        step = 1 if job.idle else job.batch
        began_ns = time.monotonic_ns()
        while number < end:
            if job.idle:
                time.sleep(IDLE_PAUSE_S)
                before = cells.total()
            upto = min(number + step, end)
            now = time.monotonic_ns()
            writer.write_many(
                [
                    (HEADER.pack(job.index, at, now, made.hashes[at % kinds]), bodies[at % kinds])
                    for at in range(number, upto)
                ]
            )
            number = upto
            while job.idle and cells.total() == before:
                job.check()
                time.sleep(_IDLE_LOOK_S)
        lines.say(began_ns=began_ns)


class Records:
    """What a trainer has consumed: which payload, and how long after the call that wrote it."""

    def __init__(self) -> None:
        self.names = array("Q")
        self.taken_ns = array("q")
        self.first = 0  # of those that are measured
        self.ended_ns = 0

    def add(self, payloads: Sequence[tuple[Any, Any]], consumed_ns: int) -> None:
        """Verify payloads that were consumed at that time, and count them."""
        for header, body in payloads:
            writer, number, written_ns, expected = HEADER.unpack(header)
            if xxhash.xxh3_64_intdigest(body) != expected:
                raise WrongPayloadError(
                    f"content mismatch: payload {number} of writer {writer} differs from what was written"
                )
            self.names.append(writer << _WRITER_SHIFT | number)
            self.taken_ns.append(consumed_ns - written_ns)
        self.ended_ns = time.monotonic_ns()

    def save(self, path: str) -> None:
        """Names, then times, of what is measured."""
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(self.names[self.first :].tobytes() + self.taken_ns[self.first :].tobytes())


def load_records(path: str) -> tuple[array[int], array[int]]:
    """What `Records.save` wrote."""
    with open(path, "rb") as file:  # noqa: PTH123
        data = file.read()
    half = len(data) // 2
    return array("Q", data[:half]), array("q", data[half:])


def train(job: Job, lines: Lines, trainer: Training) -> None:
    """Consume until a stop is requested, and then until nothing is left."""
    records = Records()
    stopping = threading.Event()

    def hear(message: dict[str, Any]) -> bool:
        if "stop" in message:
            stopping.set()
        else:
            if "mark" in message:
                records.first = len(records.names)
            lines.say(cpu_s=cpu_s())
        return True

    lines.on_message = hear
    cells = Cells(job.cells, job.trainers)
    lines.say(address="", helpers=[])
    while not lines.ended.is_set():
        last = stopping.is_set()
        batch = trainer.claim(job.batch, _POLL_S)
        if batch is None:
            if last:
                break
            continue
        payloads = trainer.consume(batch)
        records.add(payloads, time.monotonic_ns())
        del batch, payloads  # views of slots, which their writer waits for
        cells.put(job.index, len(records.names))
    if stopping.is_set():
        records.save(job.result)
        lines.say(ended_ns=records.ended_ns)
    lines.messages.get()  # the end of the input


def main(role: str, make: Callable[[Job], Any]) -> int:
    """A process of this role, with what ``make`` makes of its configuration: `Writing`, `Training`, or a service.

    A service is a context whose value is the place that writers and trainers are given.
    """
    lines = Lines()
    configuration = lines.messages.get()
    if configuration is None:
        return 0
    job = Job(**configuration, ended=lines.ended)
    made = make(job)
    if role == "service":
        with made as place:
            lines.say(place=place)
            lines.messages.get()
        return 0
    try:
        (write if role == "writer" else train)(job, lines, made)
    except StoppedError:
        pass
    finally:
        made.close()
    return 0
