"""`transport bench rendezvous`: what a round costs the store, counted; no time is compared with another."""

from __future__ import annotations

import json
from pathlib import Path

from memory_store import MemoryStore

from transport.bench.rendezvous import one_round
from transport.cli import run


def test_calls_and_records_grow_with_the_members_and_not_faster() -> None:
    with MemoryStore() as store:
        rows = {members: one_round(store, members) for members in (100, 200, 400)}
        assert not store.scan("")  # what a round wrote is removed again
    assert all(row["verified"] for row in rows.values())
    for what in ("calls", "records_read", "records_written"):
        first, second = rows[200][what] - rows[100][what], rows[400][what] - rows[200][what]
        assert second == 2 * first, what
    assert rows[400]["calls_per_member"] < 5


def test_the_command_measures_over_the_embedded_store(tmp_path: Path) -> None:
    report = tmp_path / "rows.json"
    assert run(["bench", "rendezvous", "--members", "20,40", "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [(row["members"], row["store"], row["verified"]) for row in rows] == [
        (20, "sqlite", True),
        (40, "sqlite", True),
    ]


def test_numbers_that_are_none_are_refused() -> None:
    assert run(["bench", "rendezvous", "--members", "0"]) == 2
    assert run(["bench", "rendezvous", "--members", "10", "--store", "nowhere"]) == 2
