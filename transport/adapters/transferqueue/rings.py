"""The rings of a process that puts: made when they are needed, one for each size of slots, and served.

A payload goes to the smallest slot that is free and holds it. Where none is, a ring is made with slots of its size,
rounded up by a quarter of a power of two at most: a small one for a size that is new, and then as much as the size has.
Rings that are empty make room for it.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, Final

import msgspec

from transport.adapters.transferqueue.packing import PREFIX, Packed
from transport.config import configuration
from transport.errors import ClosedError, RingFullError, SharedMemoryError
from transport.ring.buffer import SharedRingBuffer
from transport.schema import Schema, UpTo
from transport.server.server import UCXXServer
from transport.ticket import Ticket

log = logging.getLogger(__name__)

_SMALLEST: Final = 1 << 12
_MOST_WASTE: Final = 4  # a slot may be so many times larger than its payload
_FIRST: Final = 16  # the first ring for a size has this part of ring_bytes


class StorageOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of the backend, ``backend.PayloadTransport`` of TransferQueue's.

    Attributes:
        ring_bytes: of a ring at most, unless a single put needs more. The first ring for a size of payloads has a
            sixteenth of it, each further one as much as those for that size have together.
        most_bytes: of all rings of a process; None: as much as /dev/shm has.
        samples: in one slot, 1 to 16.
        timeout_s: longest wait for the values of one get.
        linger_s: how long what a killed process has put stays readable.
        serve: False: values are read on the host where they were put only, and no listener is started.
        secret_file: path to the run's shared secret, the same on every host.
    """

    ring_bytes: int = 256 << 20
    most_bytes: int | None = None
    samples: int = 16
    timeout_s: float = 60.0
    linger_s: float = 300.0
    serve: bool = True
    secret_file: str = ""


class _Served:
    """A ring, and what serves it, once it is started."""

    def __init__(self, slots: int, slot_bytes: int, options: StorageOptions, secret: bytes | None) -> None:
        schema = Schema.of(data=("uint8", UpTo(slot_bytes)))
        self.slot_bytes = slot_bytes
        self.total = slots * slot_bytes
        self.ring = SharedRingBuffer.create(schema, slots=slots, prefix=PREFIX, overflow="error")
        self._options = options
        self._secret = secret
        self._server: UCXXServer | None = None

    def start(self) -> None:
        if self._options.serve:
            operator = configuration()
            self._server = UCXXServer(
                self.ring,
                addresses=operator.addresses or None,
                bind=operator.bind,
                settings=msgspec.structs.replace(operator.settings, linger_s=self._options.linger_s),
                secret=self._secret,
                wires=operator.server_wires,
            )
            self._server.start()

    def write(self, packed: Packed) -> Ticket:
        """RingFullError when no slot is free."""
        with self.ring.reserve({"data": packed.size}, readers=packed.rows) as lease:
            lease.checksum = packed.into(lease.memory)
        return lease.ticket

    def empty(self) -> bool:
        return self.ring.native.closed or self.ring.statistics().free == self.ring.slot_count

    def close(self) -> None:
        try:
            if self._server is not None:
                self._server.close()
        finally:
            self.ring.close()


class Rings:
    """The values that this process has put. Any thread may call."""

    def __init__(self, options: StorageOptions, secret: bytes | None) -> None:
        self._options = options
        self._secret = secret
        self._rings: list[_Served] = []
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def write(self, payloads: list[Packed]) -> list[Ticket]:
        """All of them, or none.

        Raises:
            RingFullError: too much is put and not cleared.
        """
        written: list[tuple[_Served, Ticket]] = []
        try:
            for done, packed in enumerate(payloads):
                written.append(self._write(packed, payloads[done:]))
        except BaseException:  # an interrupt, too: no caller has the tickets
            for served, ticket in written:
                served.ring.discard(ticket)
            raise
        return [ticket for _, ticket in written]

    def _write(self, packed: Packed, rest: list[Packed]) -> tuple[_Served, Ticket]:
        with self._lock:
            fitting = [
                served for served in self._rings if packed.size <= served.slot_bytes <= _MOST_WASTE * _slot(packed.size)
            ]
        for served in fitting:
            try:
                return served, served.write(packed)
            except (RingFullError, ClosedError):  # closed: it was empty, and made room
                continue
        with self._lock:
            served = self._make(packed, rest, sum(served.total for served in fitting))
            return served, served.write(packed)

    def _make(self, packed: Packed, rest: list[Packed], held_for_size: int) -> _Served:
        slot_bytes = _slot(packed.size)
        needed = sum(each.size <= slot_bytes <= _MOST_WASTE * _slot(each.size) for each in rest)
        total = min(max(held_for_size, self._options.ring_bytes // _FIRST), self._options.ring_bytes)
        slots = max(needed, min(total // slot_bytes, 1 << 14), 1)
        limit = self._options.most_bytes
        for some in (slots, needed, 1):
            for _ in range(2):
                held = sum(served.total for served in self._rings)
                if limit is None or held + some * slot_bytes <= limit:
                    try:
                        return self._started(_Served(some, slot_bytes, self._options, self._secret))
                    except SharedMemoryError as error:
                        log.info("no ring of %d slots of %d bytes: %s", some, slot_bytes, error)
                if not self._drop_empty():
                    break
        held = sum(served.total for served in self._rings)
        where = "the rest of /dev/shm" if limit is None else f"most_bytes={limit}"
        raise RingFullError(
            f"{packed.size} bytes cannot be put: this process keeps rings of {held} bytes, and {where} has no room for "
            "more; clear samples that are not needed, or allow more"
        )

    def _started(self, made: _Served) -> _Served:
        self._rings.append(made)
        try:
            made.start()
        except BaseException:  # an interrupt, too: the segment would stay
            self._drop(made)
            raise
        self._rings.sort(key=lambda each: each.slot_bytes)
        return made

    def _drop_empty(self) -> bool:
        """Return whether there was a ring without a value, which is closed now."""
        for served in [each for each in self._rings if each.empty()]:
            self._drop(served)
            return True
        return False

    def _drop(self, served: _Served) -> None:
        served.close()
        self._rings.remove(served)  # last, so that after an interrupt the next call finishes

    def leave(self) -> None:
        """Close what is empty. What is not stays as long as this process: others may get it."""
        if os.getpid() != self._pid:
            return  # they are the parent's
        with self._lock:
            while self._drop_empty():
                pass


def _slot(size: int) -> int:
    """Bytes of the slots that a payload of this size is for: four sizes for each power of two."""
    size = max(size, _SMALLEST)
    step = 1 << (size.bit_length() - 3)
    return -(-size // step) * step


def place_for(rings: dict[Any, Rings], key: Any, options: StorageOptions, secret: bytes | None) -> Rings:
    """Return the rings of this process: one object for each configuration, which outlives the managers."""
    found = rings.get((os.getpid(), key))
    if found is None:
        found = rings[os.getpid(), key] = Rings(options, secret)
    return found
