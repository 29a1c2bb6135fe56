"""What a trainer that follows many rings costs: CPU of its decisions, and of a look at all of them in a directory.

python benchmarks/many_rings.py                                    # decisions
python benchmarks/many_rings.py redis://localhost:6379/0?run=bench # and looks, with the server's CPU
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import msgspec

from transport.claims.takers import Open, Takers
from transport.store.base import Change, Store
from transport.store.directory import Directory, Serving
from transport.store.open import open_store

PLACES = (10, 100, 1000, 10_000)
LOOKS = 20


def decision_us(places: int) -> float:
    """Microseconds of CPU of an event and the step after it."""
    takers = Takers(768, 256)
    takers.found(f"{at:05}" for at in range(places))
    while opening := [action for action in takers.step(0.0) if isinstance(action, Open)]:
        for action in opening:
            takers.opened(action.place)
    begun, events = time.process_time(), 0
    for at in range(min(places, 1000)):
        name = f"{at:05}"
        takers.answered(name, 1, full=True)
        takers.used(name, 1)
        for end in (lambda: None, lambda name=name: takers.ended(name, 1)):
            end()
            takers.step(1.0)
            takers.next_due(1.0)
            events += 1
    return (time.process_time() - begun) / events * 1e6


def published(directory: Directory, store: Store, rings: int) -> None:
    changes = [
        Change(
            f"servers/{at:032x}",
            msgspec.msgpack.encode(
                Serving(ring=f"{at:032x}", host=f"host-{at}", addresses=("10.0.0.1",), ports=(7001, 7002), epoch=at + 1)
            ),
            lease_s=600.0,
        )
        for at in range(rings)
    ]
    for begin in range(0, rings, 500):
        store.put_many(changes[begin : begin + 500])
    assert len(directory.all()) == rings


def look_ms(url: str, rings: int) -> tuple[float, float]:
    """Milliseconds of CPU of one look, of the reader and of the server; what else the server does counts as well."""
    import redis

    with open_store(url) as store:
        directory = Directory(store, lease_s=600.0)
        server = redis.Redis.from_url(url.partition("?")[0])
        published(directory, store, rings)

        def used() -> float:
            spent = server.info("cpu")
            return float(spent["used_cpu_user"] + spent["used_cpu_sys"])

        look: Callable[[], object] = directory.all
        there, here = used(), time.process_time()
        for _ in range(LOOKS):
            look()
        here = time.process_time() - here
        there = used() - there
        return here / LOOKS * 1e3, there / LOOKS * 1e3


def main() -> int:
    url = sys.argv[1] if len(sys.argv) > 1 else ""
    for places in PLACES:
        row = f"{places:6} rings: {decision_us(places):.0f} us a decision"
        if url:
            here, there = look_ms(f"{url}-{places}", places)
            row += f", a look {here:.1f} ms of the reader and {there:.1f} ms of the server"
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
