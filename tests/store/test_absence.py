"""A ring's absence from the directory counts from its beginning, not from an earlier one that ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helpers import until

from transport.errors import PayloadLostError, UnreachableError
from transport.store.directory import Directory, Finder, Found, Serving
from transport.store.memory import MemoryStore
from transport.store.sqlite import SQLiteStore
from transport.testing import a_ticket

NOWHERE = Found(None, lives=False)


def a_finder() -> Finder:
    return Finder(Directory(MemoryStore(), lease_s=30.0), grace_s=20.0)


@pytest.mark.parametrize(("ends", "again"), [("nobody looks", 1000.0), ("a read", 125.0), ("a look", 125.0)])
def test_an_absence_that_ended_is_not_part_of_the_next_one(ends: str, again: float) -> None:
    ticket, places = a_ticket(), a_finder()
    assert places.found(ticket, NOWHERE, 100.0) is None
    if ends == "a read":
        places.reached(ticket)  # the server lives: it was away for a moment, and its ports answer again
        places.looked([ticket.ring], {ticket.ring}, 101.0)  # a look that had begun before brings nothing back
    if ends == "a look":
        places.looked([ticket.ring], set(), 101.0)
    # Others may read the ring while nobody looks. This reader cannot know: it counts anew.
    assert places.watched(101.0) == ([ticket.ring] if ends == "nobody looks" else [])
    assert places.found(ticket, NOWHERE, again) is None
    with pytest.raises(PayloadLostError):
        places.found(ticket, NOWHERE, again + 20)


def test_an_absence_goes_on_between_reads_while_the_ring_is_looked_for_but_not_for_ever() -> None:
    ticket, places = a_ticket(), a_finder()
    assert places.found(ticket, NOWHERE, 100.0) is None
    for now in (120.0, 140.0):
        assert places.watched(now) == [ticket.ring]
        places.looked([ticket.ring], {ticket.ring}, now)
    with pytest.raises(PayloadLostError):
        places.found(ticket, NOWHERE, 160.0)
    places.looked([ticket.ring], {ticket.ring}, 459.0)
    assert places.watched(459.0) == [ticket.ring]
    assert places.watched(460.0) == []  # nobody reads from it any more


def test_a_ring_that_is_there_again_ends_no_absence_but_its_own() -> None:
    gone, back, places = a_ticket(), a_ticket(), a_finder()
    for ticket in (gone, back):
        assert places.found(ticket, NOWHERE, 100.0) is None
    places.looked([gone.ring, back.ring], {gone.ring}, 110.0)
    assert places.watched(110.0) == [gone.ring]
    with pytest.raises(PayloadLostError):
        places.found(gone, NOWHERE, 120.0)


def test_of_more_absent_rings_than_are_remembered_the_longest_known_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transport.store.directory._MOST_RINGS", 2)
    tickets, places = [a_ticket() for _ in range(3)], a_finder()
    for ticket in tickets:
        assert places.found(ticket, NOWHERE, 100.0) is None
    assert places.watched(100.0) == [ticket.ring for ticket in tickets[1:]]


def test_a_finder_looks_for_absent_rings_until_they_are_there_or_it_ends() -> None:
    async def run() -> None:
        ticket, store = a_ticket(), MemoryStore()
        directory = Directory(store, lease_s=0.03)
        finder = Finder(directory, grace_s=1e6, clock=lambda: 0.0)  # however late it looks, nothing is forgotten
        assert await finder.after(ticket, UnreachableError("away")) is None
        looking = [task for task in asyncio.all_tasks() if task.get_name() == "transport directory"]
        assert len(looking) == 1
        Directory(store).publish(Serving(ring=ticket.ring, host="h", addresses=("10.0.0.1",), ports=(7001,)))
        await asyncio.wait_for(looking[0], 60)  # it ends by itself, since no ring is absent
        Directory(store).withdraw(ticket.ring, None)
        assert await finder.after(ticket, UnreachableError("away")) is None
        looking = [task for task in asyncio.all_tasks() if task.get_name() == "transport directory"]
        finder.end()
        await asyncio.gather(*looking, return_exceptions=True)
        assert [task.cancelled() for task in looking] == [True]
        assert await finder.after(ticket, UnreachableError("away")) is None
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "transport directory"]

    asyncio.run(run())


def test_an_absent_ring_is_looked_for_more_often_than_its_record_lasts() -> None:
    async def run() -> None:
        ticket = a_ticket()
        finder = Finder(Directory(MemoryStore(), lease_s=0.15), grace_s=0.4)
        assert await finder.after(ticket, UnreachableError("away")) is None
        absence = finder._absent[ticket.ring]
        await until(lambda: absence.seen >= absence.since + 0.4, "one absence, as long as the grace")
        with pytest.raises(PayloadLostError):
            await finder.after(ticket, UnreachableError("away"))
        finder.end()

    asyncio.run(run())


def test_a_finder_whose_store_is_closed_looks_no_more_and_hides_no_error(tmp_path: Path) -> None:
    async def run() -> None:
        store = SQLiteStore(tmp_path / "store.sqlite3")
        finder = Finder(Directory(store, lease_s=0.03), grace_s=1e6, clock=lambda: 0.0)
        assert await finder.after(a_ticket(), UnreachableError("away")) is None
        [looking] = [task for task in asyncio.all_tasks() if task.get_name() == "transport directory"]
        store.close()
        await asyncio.wait((looking,), timeout=60)
        assert looking.exception() is None
        assert await finder.after(a_ticket(), UnreachableError("away")) is None
        finder.end()

    asyncio.run(run())
