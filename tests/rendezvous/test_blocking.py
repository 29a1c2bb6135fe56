"""The member for programs without an event loop, over the embedded store: threads of this process are its members."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import eventually

from transport.errors import UsageError
from transport.rendezvous import Place, Reason, Role, Rules
from transport.rendezvous.blocking import BlockingRendezvous
from transport.store import SQLiteStore

RULES = Rules(
    least=1, most=2, lease_s=2.0, poll_s=0.1, last_call_s=2.0, grow=True,
    store_patience_s=1.0, done_stays=True,
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        yield store


def a_member(store: SQLiteStore, rules: Rules = RULES) -> BlockingRendezvous:
    member = BlockingRendezvous(store, "run", rules)
    member.start()
    return member


def joined(member: BlockingRendezvous, address: str = "here:1") -> tuple[threading.Thread, list[object]]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(member.join(address)))
    thread.start()
    return thread, found


def test_a_run_from_the_first_rank_to_the_end(store: SQLiteStore) -> None:
    member = a_member(store)
    assert not member.in_round
    place = member.join("one:1")
    assert isinstance(place, Place)
    assert (place.rank, place.size, place.leader) == (0, 1, "one:1")
    assert member.in_round
    member.restart("its worker failed")
    place = member.join("one:2")
    assert isinstance(place, Place)
    assert (place.round, place.leader) == (2, "one:2")
    assert "its worker failed" in member.view.why
    member.done()
    assert member.wait_closed().reason is Reason.SUCCESS
    member.leave()


def test_a_member_that_is_started_twice_can_leave(store: SQLiteStore) -> None:
    member = a_member(store)
    with pytest.raises(UsageError):
        member.start()
    member.leave()


def test_work_that_is_done_after_its_round_gives_the_seat_up(store: SQLiteStore) -> None:
    first = a_member(store)
    first.join("one:1")
    second = a_member(store)
    thread, _ = joined(second, "two:1")
    eventually(lambda: not first.in_round)
    first.done()  # too late for the round that it was done in
    thread.join()
    assert (second.view.place.role, second.view.place.size) == (Role.ACTIVE, 1)
    second.done()
    assert first.wait_closed().reason is Reason.SUCCESS
    first.leave()
    second.leave()


def test_a_forked_child_does_not_give_up_the_seat_of_its_parent(store: SQLiteStore) -> None:
    member = a_member(store)
    assert isinstance(member.join("one:1"), Place)
    child = os.fork()
    if child == 0:
        try:
            with contextlib.suppress(UsageError):
                member.done()
                os._exit(1)
            member.leave()
            os._exit(2 if member.in_round else 0)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.scan("rendezvous/run/1/seat/")
    assert member.in_round
    member.leave()
    assert not store.scan("rendezvous/run/1/seat/")
