"""Real transfers: a ring, a listener process and a reader here, one wire after the other, every payload compared."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from transport.client.blocking import BlockingClient
from transport.config import Configuration
from transport.doctor import infiniband
from transport.doctor.finding import Check, fail, ok, warn
from transport.errors import TransportError, WireNotAllowedError
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.interruption import segment_prefix
from transport.server.server import UCXXServer
from transport.wire.addresses import advertised
from transport.wires import Wire, user_settings

_BYTES: Final = 4 << 20
_READS: Final = 8
_TIMEOUT_S: Final = 20.0
_SLOWER: Final = 1.5  # below it, one run says little about which is faster
_WAYS: Final[tuple[Wire, ...]] = ("mapped", "shm", "tcp")
_REMEDIES: Final = {
    "mapped": "ls -l /dev/shm/transport-*; transport reclaim --dry-run",
    "shm": "unset UCX_TLS; df /dev/shm",
    "tcp": "ip link set dev lo up; unset UCX_NET_DEVICES; iptables -L",
    "rdma": "ibstat; unset UCX_TLS UCX_NET_DEVICES",
}


def wires(*, rdma: bool) -> tuple[Wire, ...]:
    """Return what is tried on this host. ``rdma``: over InfiniBand, too, with a look at the ports' counters."""
    return (*_WAYS, "rdma") if rdma else _WAYS


def checks(configuration: Configuration, over: Sequence[Wire], step: Callable[[int], None]) -> Iterator[Check]:
    """Check a listener, and a transfer over each wire. ``step`` is called with the number of these that are done."""
    content = np.frombuffer(os.urandom(_BYTES), np.uint8)
    secret = configuration.secret()
    try:
        ring = SharedRingBuffer.create(slots=2, slot_bytes=_BYTES, prefix=segment_prefix("doctor"))
    except TransportError as error:
        yield fail("ring", str(error), "df /dev/shm; transport reclaim")
        return
    with ring:
        # named here, since the server would warn of them, and the check of the address says what others reach
        addresses = None if configuration.bind else advertised()
        server = UCXXServer(
            ring, bind=configuration.bind, addresses=addresses, secret=secret, settings=configuration.settings
        )
        try:
            server.start()
        except TransportError as error:
            yield fail("listener", str(error), "transport serve --slot-bytes 1MiB, which prints the error")
            return
        try:
            ports = ", ".join(map(str, server.ports))
            yield ok(
                "listener", f"a listener process answers on port {ports} of {configuration.bind or 'all addresses'}"
            )
            step(1)
            yield from _transfers(
                over, lambda wire: _measured(ring, wire, content, configuration, secret), lambda done: step(1 + done)
            )
        finally:
            server.close()


def _transfers(
    wires: Sequence[Wire], measure: Callable[[Wire], list[float]], step: Callable[[int], None] = lambda done: None
) -> Iterator[Check]:
    """One finding for each wire. ``measure`` gives the seconds of each read, ``step`` gets the wires that are done."""
    best: dict[str, float] = {}
    failed: dict[str, Wire] = {}
    for done, wire in enumerate(wires):
        step(done)
        before = infiniband.ports()
        try:
            seconds = measure(wire)
        except TransportError as error:
            said = f"{type(error).__name__}: {error}"
            first = failed.setdefault(said, wire)
            overruled = isinstance(error, WireNotAllowedError) and "TLS" in user_settings()
            remedy = "unset UCX_TLS" if overruled else _REMEDIES[wire]
            yield fail(f"transfer by {wire}", said if first == wire else f"as by {first}, above", remedy)
            continue
        best[wire] = min(seconds)
        yield ok(
            f"transfer by {wire}",
            f"{len(seconds)} × {_BYTES >> 20} MiB compared; the fastest in {best[wire] * 1e6:.0f} µs"
            + (" (a view, nothing is copied)" if wire == "mapped" else f", {_BYTES / best[wire] / 1e9:.2f} GB/s"),
        )
        if wire == "rdma":
            yield infiniband.rails(before, infiniband.ports(), len(seconds) * _BYTES)
    if best.get("shm", 0.0) > _SLOWER * best.get("tcp", math.inf):
        yield warn(
            "shm against tcp",
            f"on this host UCX's shared memory takes {best['shm'] / best['tcp']:.1f} times as long as tcp",
            f"export TRANSPORT_WIRES={','.join(wire for wire in ('mapped', 'tcp', 'rdma') if wire in best)}",
        )


def _measured(
    ring: SharedRingBuffer, wire: Wire, content: np.ndarray, configuration: Configuration, secret: bytes | None
) -> list[float]:
    """Seconds of each read. Raises what reading raises."""
    # the wire's own connection is made here, under its own transports; tcp makes it for the others
    allowed: Iterable[Wire] = {wire}
    seconds = []
    with BlockingClient(wire=allowed, settings=configuration.settings, secret=secret) as client:
        for _ in range(_READS):
            ticket = ring.write_raw(content, timeout_s=_TIMEOUT_S)
            begun = time.perf_counter()
            payload = client.read(ticket, timeout=_TIMEOUT_S)
            seconds.append(time.perf_counter() - begun)
            if not np.array_equal(payload["data"], content):
                raise TransportError(f"content mismatch: bytes read by {wire} differ from those written")
            payload.release()
            del payload
    return seconds
