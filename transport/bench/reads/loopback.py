"""`bench loopback`: reads by readers' processes from a writer's process tree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from transport.bench.processes import BenchProcess
from transport.bench.reads.content import Tally
from transport.bench.reads.reader import ON_DEVICE, Look, Portion, Reading, Timed
from transport.bench.reads.writer import Writing, WrittenBatch
from transport.bench.result import OURS, Case, Timing
from transport.decoders import convert
from transport.runtime.interruption import segment_prefix

MOST_SLOTS = 1024
_FEWEST_SLOTS = 4
_RING_BYTES = 128 << 20
_SMALL_BATCH = 1000
_SMALL_BYTES = 4 << 10
MANY_SMALL = f"read_many_{_SMALL_BATCH}"


def slots_for(size: int) -> int:
    """Payloads of a batch: enough that its begin does not count, and no more than 128 MiB of them."""
    return max(_FEWEST_SLOTS, min(MOST_SLOTS, _RING_BYTES // size))


def cases(
    sizes: Sequence[int],
    concurrencies: Sequence[int],
    wires: Iterable[str],
    checksums: Sequence[bool],
    readers: int,
    device: bool = False,
) -> list[Case]:
    """Return our cases: `read` into the caller's buffer, mapped views, `read_many`, and many small payloads.

    device: only reads, from device memory to device memory.
    """
    found = []
    for wire in wires:
        # A mapped payload crosses no wire, and nothing is verified on the way.
        for checksum in checksums if wire != "mapped" else (False,):
            for size in sizes:
                for concurrency in concurrencies:
                    slots = slots_for(size)
                    found += [
                        _case(what, wire, size, concurrency, checksum, readers, slots)
                        for what in ([ON_DEVICE] if device else _ways(wire, concurrency))
                    ]
            if not device and max(concurrencies) > 1:
                concurrency = max(concurrencies)
                found.append(_case(MANY_SMALL, wire, _SMALL_BYTES, concurrency, checksum, readers, _SMALL_BATCH))
    return found


def _ways(wire: str, concurrency: int) -> list[str]:
    return ["read", *(["view"] if wire == "mapped" else []), *(["read_many"] if concurrency > 1 else [])]


def _case(what: str, wire: str, size: int, concurrency: int, checksum: bool, readers: int, payloads: int) -> Case:
    return Case(
        case=what,
        peer=OURS,
        wire=wire,
        size_bytes=size,
        concurrency=concurrency,
        checksum=checksum,
        payloads=payloads,
        readers=readers,
    )


def measure(case: Case, seconds: float) -> Timing:
    """Read in fresh processes for ``seconds``: one repetition, whose every batch each reader verifies."""
    listeners = 0 if case.wire == "mapped" else 1
    writing = Writing(
        size_bytes=case.size_bytes,
        payloads=case.payloads,
        readers=case.readers,
        listeners=listeners,
        device=case.case == ON_DEVICE,
        prefix=segment_prefix("bench"),
    )
    with BenchProcess("transport.bench.reads.writer", writing) as writer:
        return measured(case, seconds, writer)


class Writer(Protocol):
    """A writing process that answers with a `WrittenBatch`, or the way to one on another host."""

    def ask(self, message: object) -> Any: ...


def measured(case: Case, seconds: float, writer: Writer) -> Timing:
    """One repetition of reading what ``writer`` offers.

    Raises:
        LinkError: a process failed, or a payload was not what had been written.
    """
    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(BenchProcess("transport.bench.reads.reader", _reading(case, rank)))
            for rank in range(case.readers)
        ]
        tally = Tally(seconds)
        while not tally.enough():
            portion = Portion(tickets=convert(writer.ask({}), WrittenBatch).tickets, concurrency=case.concurrency)
            for reader in readers:
                reader.tell(portion)
            timed = [convert(reader.answer(), Timed) for reader in readers]
            times_s = [time_s for each in timed for time_s in each.times_s]
            tally.add(times_s, max(each.busy_s for each in timed), sum(each.bytes for each in timed))
        look = convert(readers[0].ask(msgspec.structs.replace(portion, look=True)), Look)
    on_device = case.case == ON_DEVICE
    note = "a time ends when the copy to the device is queued, the rate when all have arrived" if on_device else ""
    return convert({**tally.sample(), "verified": True, "transports": look.transports, "note": note}, Timing)


def _reading(case: Case, rank: int) -> Reading:
    return Reading(
        way="read_many" if case.case == MANY_SMALL else case.case,
        wire=case.wire,
        size_bytes=case.size_bytes,
        payloads=case.payloads,
        checksum=case.checksum,
        rank=rank,
    )
