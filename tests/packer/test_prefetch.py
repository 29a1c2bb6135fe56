"""Double buffering: what is fetched, what is deferred, and what an interrupted call leaves for the repeated one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from transport.errors import UsageError
from transport.packer.prefetch import FetchedBatch, FetchedItem, Prefetch
from transport.runtime.loop_thread import Job, LoopThread
from transport.testing import a_ticket

WATCHDOG_S = 30.0


class Fetches:
    """Batches of one word each, that come when a test says so."""

    def __init__(self) -> None:
        self.thread = LoopThread("test loop")
        self.begun: list[str] = []
        self.may_come = asyncio.Event()
        self.prefetch: Prefetch[str] = Prefetch(self.job)
        self.kept: list[FetchedBatch] = []

    def job(self, word: str) -> Job[FetchedBatch]:
        async def fetch() -> FetchedBatch:
            self.begun.append(word)
            await self.may_come.wait()
            if word == "bad":
                raise LookupError(word)
            return FetchedBatch([], rounds=len(word))

        return Job(self.thread, fetch)

    def collect(self) -> FetchedBatch:
        self.thread.soon(self.may_come.set)
        assert self.prefetch.wait(WATCHDOG_S)
        return self.prefetch.collect(self.kept.append)


@pytest.fixture
def fetches() -> Iterator[Fetches]:
    made = Fetches()
    yield made
    made.thread.close()


def test_a_batch_is_fetched_collected_and_forgotten(fetches: Fetches) -> None:
    assert not fetches.prefetch.wait(0.0)
    fetches.prefetch.start("a")
    assert not fetches.prefetch.wait(0.0)
    assert fetches.collect().rounds == 1
    assert fetches.prefetch.items == []
    assert len(fetches.kept) == 1


def test_a_second_start_is_refused_until_the_first_is_collected(fetches: Fetches) -> None:
    fetches.prefetch.start("a")
    with pytest.raises(UsageError, match="collect_prefetch"):
        fetches.prefetch.start("b")
    fetches.collect()
    fetches.prefetch.start("b")
    assert fetches.prefetch.items == ["b"]


def test_a_deferred_batch_starts_when_the_one_before_is_collected(fetches: Fetches) -> None:
    fetches.prefetch.start("a")
    fetches.prefetch.defer("bb")
    with pytest.raises(UsageError, match="already deferred"):
        fetches.prefetch.defer("c")
    assert fetches.prefetch.items == ["a", "bb"]
    assert fetches.collect().rounds == 1
    assert fetches.collect().rounds == 2
    assert fetches.begun == ["a", "bb"]


def test_what_fetching_raised_is_raised_once_and_the_next_batch_comes(fetches: Fetches) -> None:
    fetches.prefetch.start("bad")
    fetches.prefetch.defer("a")
    with pytest.raises(LookupError):
        fetches.collect()
    assert fetches.collect().rounds == 1


def test_stopping_ends_what_runs_and_what_has_not_begun(fetches: Fetches) -> None:
    fetches.prefetch.start("a")
    fetches.prefetch.defer("b")
    fetches.prefetch.stop()
    assert fetches.prefetch.items == ["a", "b"]
    fetches.prefetch.clear()
    assert fetches.prefetch.items == []
    assert "b" not in fetches.begun


def test_a_fetched_batch_is_a_sequence_of_its_items() -> None:
    items = [FetchedItem(a_ticket(slot=slot)) for slot in range(3)]
    batch = FetchedBatch(items)
    assert len(batch) == 3
    assert list(batch) == items
    assert (batch[0], batch[-1], batch[1:]) == (items[0], items[2], items[1:])
    assert items[1] in batch
    with pytest.raises(IndexError):
        batch[3]


def test_a_deferral_with_nothing_before_it_starts_at_once(fetches: Fetches) -> None:
    fetches.prefetch.defer("a")
    assert fetches.collect().rounds == 1
