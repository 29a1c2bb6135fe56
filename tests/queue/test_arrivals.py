"""Payloads from rings elsewhere that have arrived: each ring hears once of their use, whatever another one does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers import asynchronous, until

from transport.queue.arrivals import Arrivals
from transport.queue.base import Claim


class Link:
    """A connection; ``answered``: set when it may answer."""

    def __init__(self, ring: str, error: Exception | None = None) -> None:
        self.ring = ring
        self.error = error
        self.asked = 0
        self.answered = asyncio.Event()

    async def used(self, rank: int, count: int) -> bool:
        self.asked += count
        await self.answered.wait()
        if self.error is not None:
            raise self.error
        return True


def arrived(arrivals: Arrivals, link: Any) -> Claim:
    claim = Claim(f"{link.ring}/0/1", b"", 0, 1, f"token of {link.ring}", None)
    arrivals.add(claim, link)
    return claim


@asynchronous
async def test_a_ring_that_does_not_answer_keeps_calls_about_others_waiting_for_nothing() -> None:
    arrivals, stopped, live = Arrivals(lambda _: []), Link("stopped"), Link("live")
    first, second = arrived(arrivals, stopped), arrived(arrivals, live)
    waiting = asyncio.create_task(arrivals.tell(arrivals.of([first])))
    await until(lambda: stopped.asked == 1, "it is asked")
    live.answered.set()
    async with asyncio.timeout(5.0):
        await arrivals.tell(arrivals.of([second]))
    assert not waiting.done()
    stopped.answered.set()
    await waiting


@asynchronous
async def test_an_error_at_one_ring_is_no_error_at_another_and_it_is_told_later() -> None:
    arrivals, broken, live = Arrivals(lambda _: []), Link("broken", OSError("no thread")), Link("live")
    first, second = arrived(arrivals, broken), arrived(arrivals, live)
    broken.answered.set()
    live.answered.set()
    await arrivals.tell(arrivals.of([first, second]))
    assert (broken.asked, live.asked) == (1, 1)
    again: Any = Link("broken")
    again.answered.set()
    await arrivals.tell_late(again)
    assert again.asked == 1


@asynchronous
async def test_a_connection_that_fails_while_it_hears_what_was_late_leaves_it_to_the_next() -> None:
    arrivals, lost = Arrivals(lambda _: []), Link("ring", OSError("gone"))
    lost.answered.set()
    await arrivals.tell(arrivals.of([arrived(arrivals, lost)]))
    failing: Any = Link("ring", OSError("gone again"))
    failing.answered.set()
    await arrivals.tell_late(failing)
    last: Any = Link("ring")
    last.answered.set()
    await arrivals.tell_late(last)
    assert last.asked == 1


@asynchronous
@pytest.mark.parametrize("late", [False, True])
async def test_a_connection_that_opened_while_another_was_asked_in_vain_says_it(late: bool) -> None:
    links: list[Any] = []
    arrivals, lost = Arrivals(lambda _: links), Link("ring", OSError("gone"))
    if late:
        lost.answered.set()
        await arrivals.tell(arrivals.of([arrived(arrivals, lost)]))
        lost = Link("ring", OSError("gone again"))
        asking = asyncio.create_task(arrivals.tell_late(lost))  # type: ignore[arg-type]
    else:
        asking = asyncio.create_task(arrivals.tell(arrivals.of([arrived(arrivals, lost)])))
    await until(lambda: lost.asked == 1, "it is asked")
    opened: Any = Link("ring")
    opened.answered.set()
    links.append(opened)
    await arrivals.tell_late(opened)
    assert opened.asked == 0  # the other one may say it
    lost.answered.set()
    await asking
    assert opened.asked == 1


@asynchronous
async def test_two_calls_that_have_found_the_same_claim_tell_its_ring_once() -> None:
    arrivals, link = Arrivals(lambda _: []), Link("ring")
    link.answered.set()
    claim = arrived(arrivals, link)
    one, two = arrivals.of([claim]), arrivals.of([claim])
    await arrivals.tell(one)
    arrivals.end(one, {})
    await arrivals.tell(two)
    assert link.asked == 1


class Broken(Link):
    """A connection that was lost before it said whether it had counted; ``faults``: of the next questions."""

    def __init__(self, ring: str, *, counted: bool, faults: int = 0) -> None:
        super().__init__(ring)
        self.counted = counted
        self.faults = faults
        self.lost = True
        self.uses_in_question: dict[int, tuple[int, int]] = {}

    async def used(self, rank: int, count: int) -> Any:
        self.asked += 1
        self.uses_in_question[self.asked] = rank, count
        await self.answered.wait()

    async def not_counted(self) -> list[tuple[int, int]]:
        if self.faults:
            self.faults -= 1
            raise OSError("no thread")
        asked = list(self.uses_in_question.values())
        self.uses_in_question.clear()
        return [] if self.counted else asked


@asynchronous
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("how", ["before", "meanwhile", "cancelled"])
async def test_a_use_that_may_have_been_counted_is_asked_about_before_it_is_told_anew(counted: bool, how: str) -> None:
    links: list[Any] = []
    arrivals, broken = Arrivals(lambda _: links), Broken("ring", counted=counted)
    used = arrivals.of([arrived(arrivals, broken)])
    asking = asyncio.create_task(arrivals.tell(used))
    await until(lambda: broken.asked == 1, "it is asked")
    opened: Any = Link("ring")
    opened.lost = False
    opened.answered.set()
    if how == "meanwhile":
        links.append(opened)
        await arrivals.tell_late(opened)
        assert opened.asked == 0
    if how == "cancelled":
        [telling] = [each.telling for each in used.values()]
        assert telling is not None
        telling.cancel()
    broken.answered.set()
    await asking
    if how != "meanwhile":
        await arrivals.tell_late(opened)
    assert opened.asked == (0 if counted else 1)
    await arrivals.tell_late(opened)
    assert opened.asked == (0 if counted else 1)


@asynchronous
async def test_an_error_while_a_ring_is_asked_what_it_has_counted_keeps_nothing_else_from_it() -> None:
    links: list[Any] = []
    arrivals, broken = Arrivals(lambda _: links), Broken("ring", counted=False, faults=1)
    broken.answered.set()
    await arrivals.tell(arrivals.of([arrived(arrivals, broken)]))
    failing = Link("ring", OSError("gone"))
    failing.answered.set()
    arrivals._arrived.clear()
    await arrivals.tell(arrivals.of([arrived(arrivals, failing)]))
    opened: Any = Link("ring")
    opened.answered.set()
    await arrivals.tell_late(opened)
    assert opened.asked == 1  # what was late
    await arrivals.tell_late(opened)
    assert opened.asked == 2  # and what was in question
