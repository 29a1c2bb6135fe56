"""What a host's read of all members of a rendezvous costs on Redis, step by step, beside the floor of the same bytes.

    python benchmarks/rendezvous_read.py                      # starts a redis-server of its own
    python benchmarks/rendezvous_read.py --members 10000 --rounds 15 --json build/rendezvous_read.json

Every round does each step once, so that other work on the machine falls on all of them; the ratio to the floor is of
the same round. The floor is HGETALL of one hash that has the same keys and values; its answer is parsed and left alone.
CPU of the server is from INFO cpu, CPU of the reader is this process's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from transport.rendezvous.hosting import seats_of
from transport.rendezvous.records import Keys, Seat, encode
from transport.storage.redis_script import require_redis
from transport.store.base import Change
from transport.store.open import open_store

_CHUNK = 500
_PATIENCE_S = 10.0


@contextlib.contextmanager
def redis_server() -> Iterator[int]:
    """A server with an append-only file; its port."""
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is missing: apt-get install redis-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        words = ("--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--appendonly", "yes", "--save", "")
        server = subprocess.Popen(["redis-server", *words, "--logfile", str(Path(folder) / "log")])
        try:
            client = require_redis().Redis(port=port)
            give_up = time.monotonic() + _PATIENCE_S
            while True:
                with contextlib.suppress(Exception):
                    client.ping()
                    break
                if server.poll() is not None or time.monotonic() > give_up:
                    raise SystemExit("redis-server does not answer")
                time.sleep(0.02)  # it says nothing when it is ready
            yield port
        finally:
            server.terminate()
            server.wait()


def measured(members: int, rounds: int, port: int) -> dict[str, dict[str, float]]:
    """By step: best and median elapsed ms, CPU ms of reader and server, and the ratio of its time to the floor's."""
    keys = Keys("bench")
    seats = {
        keys.seat(1, slot): encode(Seat(round=1, slot=slot, member=f"member-{slot}", address="192.0.2.1:12345"))
        for slot in range(members)
    }
    client = require_redis().Redis(port=port, protocol=2)
    with open_store(f"redis://127.0.0.1:{port}/0?run=bench") as store:
        changes = [Change(key, value, None, 3600.0) for key, value in seats.items()]
        for begin in range(0, members, _CHUNK):
            store.put_many(changes[begin : begin + _CHUNK])
            client.hset("floor", mapping=dict(list(seats.items())[begin : begin + _CHUNK]))
        names = list(seats)
        entries = store.get_many(names)
        steps: dict[str, Callable[[], object]] = {
            "floor: HGETALL, not decoded": lambda: client.execute_command("HGETALL", "floor"),
            "store.get_many": lambda: store.get_many(names),
            "records of the entries": lambda: seats_of(entries),
            "a host's read: both": lambda: seats_of(store.get_many(names)),
            "store.scan": lambda: store.scan("bench/1/"),
        }
        assert len(seats_of(entries)) == len(store.scan("bench/1/")) == members
        taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}

        def used() -> float:
            spent = client.info("cpu")
            return float(spent["used_cpu_user"] + spent["used_cpu_sys"])

        for _ in range(rounds):
            for name, step in steps.items():
                there, here, begun = used(), time.process_time(), time.perf_counter()
                step()
                lasted = time.perf_counter() - begun
                taken[name].append((lasted * 1e3, (time.process_time() - here) * 1e3, (used() - there) * 1e3))
    floor = [each[0] for each in taken["floor: HGETALL, not decoded"]]
    return {
        name: {
            "best_ms": round(min(each[0] for each in rows), 2),
            "median_ms": round(statistics.median(each[0] for each in rows), 2),
            "reader_cpu_ms": round(statistics.median(each[1] for each in rows), 2),
            "server_cpu_ms": round(statistics.median(each[2] for each in rows), 2),
            "to_floor": round(statistics.median(each[0] / low for each, low in zip(rows, floor, strict=True)), 2),
        }
        for name, rows in taken.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with redis_server() as port:
        rows = measured(options.members, options.rounds, port)
    print(f"{options.members} members, {options.rounds} rounds")
    for name, row in rows.items():
        print(f"  {name:28}", *(f"{what} {value:g}" for what, value in row.items()), sep="  ")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"members": options.members, "steps": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
