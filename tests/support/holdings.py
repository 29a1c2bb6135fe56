"""A planner's holding over the rings of a prefix, mapped or over the network, as a process of its own has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from found_rings import LONG_S
from helpers import eventually

from transport import Schema, UCXXClient
from transport.claims.open import open_rings
from transport.claims.places import OnThisHost
from transport.claims.rings import FoundRings
from transport.runtime.loop_thread import LoopThread
from transport.ticket import Identity
from transport.training.holding import HeldSample, Holding

# Holds so many, says how many, and waits.
HOLDER = """
import sys
from holdings import held_by, holding_of
with holding_of(sys.argv[1], sys.argv[2]) as holding:
    print(len(held_by(holding, int(sys.argv[3]))), flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def holding_of(
    rings: str | FoundRings,
    wire: str,
    schemas: Sequence[Schema] = (),
    *,
    rank: int | str = 0,
    consumer: str = "planner",
    lease_s: float | None = None,
) -> Iterator[Holding]:
    """``rings``: a prefix of names, what `open_rings` takes, or an open queue. Nobody says that this process lives."""
    with contextlib.ExitStack() as stack:
        thread = LoopThread("holding")
        stack.callback(thread.close)

        async def client() -> UCXXClient:
            made = UCXXClient(schemas=schemas, wire=set(wire.split(",")), ack="manual")  # type: ignore[arg-type]
            thread.closes(made.close)
            return made

        made = thread.run(client())
        if isinstance(rings, str):
            rings = open_rings(rings) if ":" in rings else FoundRings(OnThisHost(rings), lease_s=lease_s)
            stack.callback(rings.close)
        stack.callback(rings.disconnect, made)
        holding = Holding(rings.connect(thread, made, schemas, contents=False), rank, consumer)
        stack.callback(holding.close)
        yield holding


def held_by(holding: Holding, n: int, **arguments: Any) -> list[HeldSample]:
    """So many samples, however many calls it takes."""
    samples: list[HeldSample] = []
    while len(samples) < n:
        came = holding.take(n - len(samples), LONG_S, **arguments)
        assert came, f"{len(samples)} of {n} came"
        samples += came
    return samples


def identities(samples: Sequence[HeldSample]) -> list[Identity]:
    return [each.identity for each in samples]


def answers_of(holding: Holding) -> dict[Identity, bool | None]:
    """The answers that have come."""
    found: dict[Identity, bool | None] = {}
    holding.settle(found.update)
    return found


def settled(holding: Holding, n: int) -> dict[Identity, bool | None]:
    """The answers about so many deliveries."""
    found: dict[Identity, bool | None] = {}

    def all_came() -> bool:
        holding.settle(found.update)
        return len(found) >= n

    eventually(all_came, f"{n} answers")
    return found
