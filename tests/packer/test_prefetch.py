"""The double-buffering state machine: every event in every state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import ClosedError, UsageError
from transport.packer.prefetch import FetchedBatch, FetchedItem, Prefetch, PrefetchState
from transport.testing import a_ticket


def test_a_batch_goes_through_fetching_and_ready_back_to_idle() -> None:
    prefetch: Prefetch[str] = Prefetch()
    assert prefetch.start("a") == "a"
    assert prefetch.state is PrefetchState.FETCHING
    prefetch.finished()
    assert prefetch.state is PrefetchState.READY
    assert prefetch.collected() is None
    assert prefetch.state is PrefetchState.IDLE


def test_a_second_start_is_refused_until_the_first_is_collected() -> None:
    prefetch: Prefetch[str] = Prefetch()
    prefetch.start("a")
    with pytest.raises(UsageError, match="fetching"):
        prefetch.start("b")
    prefetch.finished()
    with pytest.raises(UsageError, match="ready"):
        prefetch.start("b")


def test_a_deferred_batch_starts_when_the_one_before_is_collected() -> None:
    prefetch: Prefetch[str] = Prefetch()
    prefetch.start("a")
    assert prefetch.defer("b") is None
    prefetch.finished()
    assert prefetch.collected() == "b"
    assert prefetch.state is PrefetchState.FETCHING


def test_a_deferral_with_nothing_before_it_starts_at_once() -> None:
    prefetch: Prefetch[str] = Prefetch()
    assert prefetch.defer("a") == "a"
    assert prefetch.state is PrefetchState.FETCHING


def test_a_second_deferral_is_refused_and_the_first_is_kept() -> None:
    prefetch: Prefetch[str] = Prefetch()
    prefetch.start("a")
    prefetch.defer("b")
    with pytest.raises(UsageError, match="already deferred"):
        prefetch.defer("c")
    assert prefetch.collected() == "b"


def test_cancelling_gives_the_deferred_batch_back() -> None:
    prefetch: Prefetch[str] = Prefetch()
    prefetch.start("a")
    prefetch.defer("b")
    assert prefetch.cancelled() == "b"
    assert prefetch.state is PrefetchState.IDLE
    assert prefetch.start("c") == "c"


def test_after_close_every_event_is_refused() -> None:
    prefetch: Prefetch[str] = Prefetch()
    prefetch.start("a")
    prefetch.close()
    for event in (lambda: prefetch.start("b"), lambda: prefetch.defer("b"), prefetch.collected):
        with pytest.raises(ClosedError, match="setup_ucxx_packer"):
            event()
    assert prefetch.cancelled() is None
    assert prefetch.state is PrefetchState.CLOSED


@given(st.lists(st.sampled_from(["start", "defer", "finished", "collected", "cancelled"]), max_size=40))
def test_every_batch_is_started_once_or_given_back_or_refused(events: list[str]) -> None:
    prefetch: Prefetch[int] = Prefetch()
    offered = started = given_back = refused = 0
    for event in events:
        before = started
        if event in ("start", "defer"):
            offered += 1
            try:
                batch = prefetch.start(offered) if event == "start" else prefetch.defer(offered)
            except UsageError:
                refused += 1
                continue
            started += batch is not None
        elif event == "collected":
            started += prefetch.collected() is not None
        elif event == "cancelled":
            given_back += prefetch.cancelled() is not None
        else:
            prefetch.finished()
        assert (prefetch.state is PrefetchState.FETCHING) or started == before
    waiting = prefetch.close() is not None
    assert offered == started + given_back + refused + waiting


def test_a_fetched_batch_is_a_sequence_of_its_items() -> None:
    items = [FetchedItem(a_ticket(slot=slot)) for slot in range(3)]
    batch = FetchedBatch(items)
    assert len(batch) == 3
    assert list(batch) == items
    assert (batch[0], batch[-1], batch[1:]) == (items[0], items[2], items[1:])
    assert items[1] in batch
    with pytest.raises(IndexError):
        batch[3]
