"""One round of a run with many simulated members: what it costs the store, and how long the host's read takes.

    python benchmarks/rendezvous.py --members 10000 --store redis://localhost/0?run=bench

Every member is a real `Session`, stepped by one thread; the store is a real one. So the counts are those of a real run,
and the times are those of one client that does all members' work in turn. Between rounds a real member makes one call
per poll, and one per beat.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from transport.bench.machine import machine
from transport.bench.result import BenchReport, aligned
from transport.bench.units import parse_numbers
from transport.cli import run_program
from transport.cli.output import JsonTarget, about, emit
from transport.rendezvous.member_states import State
from transport.rendezvous.records import Keys
from transport.rendezvous.rules import Rules
from transport.rendezvous.session import Session
from transport.runtime.interruption import temporary_folder
from transport.runtime.progress import Progress, bar_with_time_left
from transport.store.base import Change, Store
from transport.store.open import open_store

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from store_proxy import StoreProxy

Row = dict[str, Any]

_LEASE_S = 3600.0  # no member beats while a round is measured: beats depend on time, not on the round
_LOOKS = 7  # of the host at all members, once the round runs


class CountingStore(StoreProxy):
    """Another store, with counts of calls and records, and the times of large reads."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls = self.records_read = self.records_written = 0
        self.large_reads: list[tuple[int, float]] = []  # records, seconds

    def call(self, call: Callable[[], Any], changes: Sequence[Change] | None = None) -> Any:
        """See `StoreProxy`."""
        self.calls += 1
        begun = time.perf_counter()
        result = call()
        if changes is not None:
            self.records_written += max(1, len(changes))
        else:
            self.records_read += len(result)
            if len(result) > 10:
                self.large_reads.append((len(result), time.perf_counter() - begun))
        return result


def measure(counts: Sequence[int], url: str | None, progress: Progress) -> list[Row]:
    """A row for each number of members. What a round wrote is removed again."""
    rows = []
    progress(0, len(counts), 0)
    with _store(url) as (name, store):
        for done, members in enumerate(counts, 1):
            rows.append({"case": "round", "store": name, **one_round(store, members)})
            progress(done, len(counts), 0)
    return rows


def one_round(inner: Store, members: int) -> Row:
    """Join, complete, learn the places, and let the host look at all members some more."""
    store = CountingStore(inner)
    now = 0.0
    run = f"bench-{secrets.token_hex(6)}"
    rules = Rules(least=members, lease_s=_LEASE_S)
    sessions = [
        Session(store, run, f"member-{number}", rules, address="192.0.2.1:12345", clock=lambda: now)
        for number in range(members)
    ]
    host = sessions[0]
    try:
        begun = time.perf_counter()
        for session in sessions:
            session.join()
        joined = time.perf_counter()
        now += rules.host_poll_s(1 << 20)
        host.step()  # looks at all members and completes the round
        completed = time.perf_counter()
        for session in sessions:
            session.step()
        placed = time.perf_counter()
        calls, read, written = store.calls, store.records_read, store.records_written
        ranks = sorted(place.rank for each in sessions if (place := each.view.place) is not None)
        verified = ranks == list(range(members)) and all(each.view.state is State.ACTIVE for each in sessions)
        looks = []
        for _ in range(_LOOKS):
            now += rules.host_poll_s(1 << 20)
            looking = time.perf_counter()
            host.step()
            looks.append(time.perf_counter() - looking)
        reads = [seconds for records, seconds in store.large_reads if records >= members]
        return {
            "members": members,
            "calls": calls,
            "calls_per_member": round(calls / members, 2),
            "records_read": read,
            "records_written": written,
            "join_s": round(joined - begun, 3),
            "complete_ms": round((completed - joined) * 1e3, 2),
            "places_s": round(placed - completed, 3),
            "host_read_ms": round(statistics.median(reads) * 1e3, 2) if reads else 0.0,
            "host_read_ms_best": round(min(reads) * 1e3, 2) if reads else 0.0,
            "host_look_ms": round(statistics.median(looks) * 1e3, 2),
            "verified": verified,
        }
    finally:
        inner.delete_all(list(inner.scan(Keys(run).all)))


@contextlib.contextmanager
def _store(url: str | None) -> Iterator[tuple[str, Store]]:
    with contextlib.ExitStack() as stack:
        if url is None:
            folder = stack.enter_context(temporary_folder("transport-bench-"))
            url = f"sqlite://{folder / 'store.sqlite3'}"
        yield url.partition(":")[0], stack.enter_context(open_store(url))


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    names = [name for name in rows[0] if name != "case"] if rows else []
    cells = [[name.replace("_", " ") for name in names], *([str(row[name]) for name in names] for row in rows)]
    return "\n".join(aligned(cells, right=frozenset(range(1, len(names)))))


def rendezvous(
    members: Annotated[str, typer.Option(metavar="N,…", help="Numbers of members of a round.")] = "1000,3000,10000",
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Store to use: sqlite:///… or redis://…. Default: a temporary SQLite file."),
    ] = None,
    json_target: JsonTarget = None,
) -> int:
    """Measure one round with simulated members: store operations, and the host's read of all members.

    Exit status 1 when the members did not get the ranks 0 to N-1, each once.
    """
    numbers = sorted(set(parse_numbers("--members", members, 1, 100_000)))
    where = machine()
    with bar_with_time_left("measuring") as progress:
        rows = measure(numbers, store, progress)
    report = BenchReport(machine=where, settings={}, rows=rows)
    emit(report, "\n".join([about(report), "", table(rows)]), json_target)
    return 0 if all(row["verified"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(run_program("benchmarks/rendezvous.py", rendezvous))
