"""What one process holds, and what bare UCX leaves behind each time it is started and ended: the control."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transport.wire.library import library
from transport.wires import settings_for

_PATIENCE_S = 10.0


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    )


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _MallInfo


class Held(NamedTuple):
    """At one moment, after the collector has run and the allocator has given back what it can."""

    resident: int  # bytes
    allocated: int  # bytes that malloc has given out, in all arenas that it counts
    descriptors: int
    threads: int  # native ones, too
    mappings: int  # of /dev/shm

    @classmethod
    def now(cls) -> Held:
        """Look."""
        gc.collect()
        _libc.malloc_trim(0)
        info = _libc.mallinfo2()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return cls(
            resident,
            info.uordblks + info.hblkhd,
            len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - a snapshot, not an iterator
            len(os.listdir("/proc/self/task")),  # noqa: PTH208
            Path("/proc/self/maps").read_text().count("/dev/shm/"),
        )


class Growth(NamedTuple):
    """From the end of the warm-up to the end, per cycle where it is bytes."""

    cycles: int
    resident_per_cycle: float
    allocated_per_cycle: float
    descriptors: int
    threads: int
    mappings: int


def growth(run: Callable[[int], object], warm_up: int, cycles: int, say: Callable[[str], None]) -> Growth:
    """Run cycles numbered from 0; what came to stay after the first ``warm_up`` of them."""
    for number in range(warm_up):
        run(number)
    before = Held.now()
    for number in range(warm_up, warm_up + cycles):
        run(number)
        if (number + 1) % 100 == 0:
            held = Held.now()
            say(f"{number + 1} cycles: {held.resident >> 20} MiB resident, {held.allocated >> 10} KiB allocated")
    after = Held.now()
    return Growth(
        cycles,
        (after.resident - before.resident) / cycles,
        (after.allocated - before.allocated) / cycles,
        after.descriptors - before.descriptors,
        after.threads - before.threads,
        after.mappings - before.mappings,
    )


def _context_and_worker(wire: str) -> tuple[object, object]:
    low = library()
    context = low.UCXContext(
        settings_for(frozenset({wire})),  # type: ignore[arg-type]
        (low.Feature.TAG, low.Feature.WAKEUP, low.Feature.STREAM),
    )
    return context, low.UCXWorker(context)


def bare_connection(wire: str) -> None:
    """The same with a listener, one connection and one message of 1 MiB, through ucxx."""
    from ucxx._lib.arr import Array

    low = library()
    _context, server = _context_and_worker(wire)
    _other, client = _context_and_worker(wire)
    accepted: list[int] = []
    listener = low.UCXListener.create(worker=server, port=0, cb_func=accepted.append)
    near = low.UCXEndpoint.create(client, "127.0.0.1", listener.port, endpoint_error_handling=True)
    give_up = time.monotonic() + _PATIENCE_S

    def until(done: Callable[[], object]) -> None:
        while not done():
            server.progress()  # type: ignore[attr-defined]
            client.progress()  # type: ignore[attr-defined]
            if time.monotonic() > give_up:
                raise TimeoutError("timeout: bare UCX does not end")

    until(lambda: accepted)
    far = listener.create_endpoint_from_conn_request(accepted[0], True)
    sent, arrived = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    receiving = client.tag_recv(Array(arrived), low.UCXXTag(7))  # type: ignore[attr-defined]
    sending = far.tag_send(Array(sent), low.UCXXTag(7))
    until(lambda: sending.completed and receiving.completed)
    for endpoint in (near, far):
        endpoint.close_blocking(period=10**9, max_attempts=3)
        until(lambda endpoint=endpoint: not endpoint.alive)  # type: ignore[misc]
