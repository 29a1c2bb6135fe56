"""What the tests of `FoundRings` share: rings with a server, places of rings here and elsewhere, payloads that come."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from loopback import LOOPBACK

from transport import FoundRings, SharedRingBuffer, UCXXServer, open_rings
from transport.claims.places import OnThisHost, RingAddress
from transport.ring.batch_shape import Shape
from transport.training.batch import Claimed
from transport.training.payloads import Payloads

LONG_S = 30.0
# Takes as many as it is told to, says how many, and consumes what it holds when it is told to.
TRAINER = """
import sys
from found_rings import consume, some
from transport import open_rings
with open_rings(sys.argv[1]) as rings:
    parts = some(rings, int(sys.argv[2]))
    print(sum(map(len, parts)), flush=True)
    sys.stdin.readline()
    print(sum(consume(parts)), flush=True)
"""


@contextlib.contextmanager
def ring_of(
    prefix: str,
    *,
    mode: Literal["thread", "process"] = "thread",
    ports: tuple[int, ...] = (0,),
    secret: bytes | None = None,
    **arguments: Any,
) -> Iterator[SharedRingBuffer]:
    """A ring whose name begins with ``prefix``, and its server; ``arguments``: of the ring."""
    arguments = {"slots": 32, "slot_bytes": 4096, **arguments}
    with (
        SharedRingBuffer.create(prefix=prefix, **arguments) as ring,
        UCXXServer(ring, ports, mode=mode, addresses=(LOOPBACK,), secret=secret),
    ):
        yield ring


def fill(ring: SharedRingBuffer, count: int) -> None:
    """Write so many payloads, whatever they are."""
    for _ in range(count):
        ring.write_raw(b"any", timeout_s=LONG_S)


def opened(prefix: str) -> FoundRings:
    """The rings of this host that belong to the prefix."""
    return open_rings(f"rings:{prefix}")


class HereAndElsewhere(OnThisHost):
    """Rings of one prefix are mapped, those of another one are asked over the network."""

    def __init__(self, here: str, elsewhere: str) -> None:
        super().__init__(here)
        self._others = OnThisHost(elsewhere)

    def served(self, mapped: Collection[str], names: Collection[str] = ()) -> Mapping[str, RingAddress]:
        """The others."""
        return {name: place._replace(segment="") for name, place in self._others.served(mapped).items()}

    def close(self) -> None:
        self._others.close()
        super().close()


@contextlib.contextmanager
def here_and_elsewhere() -> Iterator[tuple[SharedRingBuffer, SharedRingBuffer, FoundRings]]:
    """A mapped ring, one that is asked over the network, and both together."""
    here, there = (f"{where}-{secrets.token_hex(4)}-" for where in ("here", "there"))
    with (
        SharedRingBuffer.create(prefix=here, slots=16, slot_bytes=4096) as mapped,
        ring_of(there, slots=16) as other,
        FoundRings(HereAndElsewhere(here, there)) as rings,
    ):
        yield mapped, other, rings


# --- what was taken ---------------------------------------------------------------------------------------
def take(rings: FoundRings, n: int, timeout_s: float = 0.0, **arguments: Any) -> list[Claimed]:
    """One call."""
    return [*rings.take_parts(n, timeout_s, **{"consumer": "test", **arguments})]


def some(rings: FoundRings, n: int, **arguments: Any) -> list[Claimed]:
    """So many payloads, however many calls it takes."""
    parts: list[Claimed] = []
    while (left := n - sum(map(len, parts))) > 0:
        came = take(rings, left, LONG_S, **arguments)
        assert came, f"{n - left} of {n} came"
        parts += came
    return parts


def seen(parts: Sequence[Claimed]) -> Payloads:
    """What can be looked at."""
    return Payloads(parts, None, Shape(), {})


def contents(parts: Sequence[Claimed]) -> list[bytes]:
    return [bytes(payload.data) for payload in seen(parts)]


def names(parts: Sequence[Claimed]) -> list[str]:
    return [payload.name for payload in seen(parts)]


def consume(parts: Sequence[Claimed]) -> list[bool]:
    """Which payloads count as consumed; asked again, the answer is the same. Those of mapped rings keep their slots."""
    for part in parts:
        part.finish(True)
    return [bool(each) for part in parts for each in part.consumption()]
