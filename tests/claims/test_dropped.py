"""`DroppedClaims`: what owners leave behind without an end is noted once, whichever thread drops them."""

from __future__ import annotations

import os
import select
import threading

from transport import _ring


def readable(dropped: _ring.DroppedClaims) -> bool:
    return bool(select.select([dropped.fileno()], [], [], 0.0)[0])


def test_what_an_owner_leaves_is_noted_once_and_wakes_the_loop() -> None:
    dropped = _ring.DroppedClaims()
    owner = dropped.owned(7, 3)
    assert (owner.begin, len(owner), readable(dropped)) == (0, 3, False)
    del owner
    assert readable(dropped)
    assert dropped.take() == [(7, 0, 3)]
    assert not readable(dropped)
    assert dropped.take() == []


def test_parts_of_an_owner_are_noted_apart_and_what_has_ended_is_not() -> None:
    dropped = _ring.DroppedClaims()
    rest = dropped.owned(7, 5)
    first, second = rest.take(2), rest.take(1)
    assert [(each.begin, len(each)) for each in (first, second, rest)] == [(0, 2), (2, 1), (3, 2)]
    first.settled()
    del first
    assert not readable(dropped)
    del second
    assert dropped.take() == [(7, 2, 3)]
    everything = rest.take(9)
    del rest
    assert dropped.take() == []
    del everything
    assert dropped.take() == [(7, 3, 5)]


def test_owners_that_threads_drop_at_once_are_all_noted() -> None:
    dropped = _ring.DroppedClaims()
    owners = [[dropped.owned(thread, 1) for _ in range(500)] for thread in range(4)]
    threads = [threading.Thread(target=each.clear) for each in owners]
    for thread in threads:
        thread.start()
    noted = []
    while len(noted) < 2000:
        select.select([dropped.fileno()], [], [])
        noted += dropped.take()
    for thread in threads:
        thread.join()
    assert sorted(number for number, *_ in noted) == sorted(list(range(4)) * 500)


def test_after_the_end_nothing_is_noted_and_owners_may_live_on() -> None:
    dropped = _ring.DroppedClaims()
    early, late = dropped.owned(1, 1), dropped.owned(2, 1)
    del early
    dropped.close()
    dropped.close()
    assert dropped.take() == []
    assert dropped.fileno() < 0
    del dropped, late


def test_a_forked_child_notes_nothing() -> None:
    dropped = _ring.DroppedClaims()
    owners = [dropped.owned(1, 1)]
    pid = os.fork()
    if pid == 0:
        owners.clear()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not readable(dropped)
    owners.clear()
    assert dropped.take() == [(1, 0, 1)]
