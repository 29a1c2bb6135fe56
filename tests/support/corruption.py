"""Changes bytes of a segment's file, and uses a ring in every way that may meet them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from transport import SharedRingBuffer
from transport.errors import TransportError

CONTROL_BYTES = 4096 + 17 * 192 + 9 * 64 + 64 + 9 * 2048  # header, owners, controls, hints and notes of up to 9 slots
_EXTREMES = (b"\x00" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x01" + b"\x00" * 7)


def changes(size: int, chance: random.Random) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes): a few of them, wild, small or plausible, anywhere before the payloads."""
    for _ in range(chance.randrange(1, 30)):
        # many of them among the sizes of the header, and among header, owners and controls
        offset = chance.randrange(min(size, chance.choice((64, 256, 8192, CONTROL_BYTES))))
        kind = chance.randrange(4)
        if kind == 0:
            yield offset, bytes([1 << chance.randrange(8)])
        elif kind == 1:
            yield offset, chance.randbytes(chance.randrange(1, 64))
        elif kind == 2:
            yield offset // 8 * 8, chance.randrange(1 << chance.choice((6, 15))).to_bytes(8, "little")
        else:
            yield offset // 8 * 8, chance.choice(_EXTREMES)


def corrupt(path: str, chance: random.Random) -> None:
    """Change bytes of the file in place; its length stays."""
    with Path(path).open("r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for offset, data in changes(size, chance):
            file.seek(offset)
            file.write(data[: size - offset])


def use(ring: SharedRingBuffer, chance: random.Random) -> tuple[int, int]:
    """Every operation once, in any order, with numbers right and wrong: how many were done, and how many refused."""
    native = ring.native
    slot, rank = chance.randrange(ring.slot_count), chance.randrange(16)
    generation = chance.choice((0, 1, 2, 1 << 29, native.info(slot).generation))

    def look() -> None:
        for each in range(ring.slot_count):
            assert native.info(each).length <= ring.slot_capacity, "a length leaves its slot"

    def read() -> None:
        for ticket in ring.tickets():
            with ring.read_raw(ticket) as lease:
                bytes(lease.view)

    def write() -> None:
        ring.write_raw(chance.randbytes(chance.randrange(ring.slot_capacity + 1)), timeout_s=0.0)

    def publish() -> None:
        loan = native.try_take()
        if loan is not None:
            loan.publish(1, 0, 1, 0, b"note")

    ways: list[Callable[[], object]] = [
        look,
        read,
        write,
        ring.statistics,
        ring.reclaim,
        ring.tickets,
        native.try_take,
        native.try_overwrite,
        native.owners,
        native.counters,
        native.ports,
        native.state_counts,
        lambda: native.addresses,
        lambda: repr(native),
        lambda: repr(native.owners()),
        lambda: native.pin(slot, generation, rank),
        lambda: native.consume(slot, generation, rank),
        lambda: native.discard(slot, generation),
        publish,
        lambda: native.begin_read(slot, generation, native.info(slot).checksum, native.info(slot).length, rank),
        lambda: bytes(native.payload(slot)[: native.info(slot).length]),
        lambda: native.note(slot, generation),
        lambda: native.set_ports((1, 2)),
        lambda: native.heartbeat(),
        lambda: native.wait_freed(native.freed_event(), 0.0),
        lambda: ring.discard_expired(),
    ]
    chance.shuffle(ways)
    done = refused = 0
    for way in ways:
        try:
            way()
            done += 1
        except TransportError:
            refused += 1
    return done, refused
