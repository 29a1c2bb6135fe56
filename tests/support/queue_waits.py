"""What every ticket queue must do about notices, waits and its end; a part of queue_conformance.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from transport.errors import ClosedError, UsageError
from transport.queue import TicketQueue


class QueuedTicket(NamedTuple):
    """What a test writes, by a name of its own."""

    id: str
    data: bytes


def ticket(number: int) -> QueuedTicket:
    return QueuedTicket(f"ring/{number}/1", b"ticket %d" % number)


class QueueWaits:
    has_notices = True  # else they are refused

    # --- notices -----------------------------------------------------------------------------------
    def test_only_a_later_notice_replaces_one(self, queue: TicketQueue) -> None:
        if not self.has_notices:
            with pytest.raises(UsageError, match="have no notices"):
                queue.announce("policy", 3)
            return
        assert queue.latest("policy") is None
        assert queue.announce("policy", 3, b"three")
        assert not queue.announce("policy", 3, b"again")
        assert not queue.announce("policy", 2, b"two")
        notice = queue.latest("policy")
        assert notice is not None
        assert (notice.topic, notice.version, notice.payload) == ("policy", 3, b"three")
        assert queue.latest("policy", newer_than=3) is None
        assert queue.latest("policy", newer_than=2) == notice
        assert queue.latest("other") is None

    def test_notices_are_compared_to_the_last_bit_of_their_versions(self, queue: TicketQueue) -> None:
        if self.has_notices:
            ascending = [-(2**62) - 1, -(2**62), -10, -3, 0, 9, 10, 2**53, 2**53 + 1]
            assert all(queue.announce("policy", version) for version in ascending)
            assert not any(queue.announce("policy", version) for version in ascending)

    # --- waiting -------------------------------------------------------------------------------------
    def test_waits_end_without_anything_when_the_time_is_over(self, queue: TicketQueue) -> None:
        assert queue.claim(1, 0.01, consumer="a") == []
        if self.has_notices:
            assert queue.latest("policy", timeout_s=0.01) is None

    def test_a_waiting_claim_wakes_for_a_publication(self, harness: Any, queue: Any) -> None:
        claims, thread = in_thread(lambda: queue.claim(1, 30, consumer="a"))
        harness.open().publish(ticket(0))
        thread.join()
        assert [claim.ticket_id for claim in claims[0]] == [ticket(0).id]

    def test_a_waiting_reader_wakes_for_a_notice(self, harness: Any, queue: TicketQueue) -> None:
        if not self.has_notices:
            with pytest.raises(UsageError, match="have no notices"):
                queue.latest("policy", timeout_s=30)
            return
        queue.announce("policy", 1)
        notices, thread = in_thread(lambda: queue.latest("policy", newer_than=1, timeout_s=30))
        harness.open().announce("policy", 2)
        thread.join()
        assert notices[0] is not None
        assert notices[0].version == 2

    def test_close_ends_waits(self, queue: TicketQueue) -> None:
        def wait() -> str:
            with pytest.raises(ClosedError):
                queue.claim(1, 30, consumer="a")
            return "ended"

        outcomes, thread = in_thread(wait)
        queue.close()
        thread.join()
        assert outcomes == ["ended"]

    def test_after_close_everything_is_refused(self, queue: TicketQueue) -> None:
        queue.close()
        queue.close()
        with pytest.raises(ClosedError):
            queue.claim(1, consumer="a")
        with pytest.raises(ClosedError):
            queue.depth()


def in_thread(call: Callable[[], object]) -> tuple[list, threading.Thread]:
    """Results of ``call`` in a thread that has begun."""
    results: list = []
    begun = threading.Event()

    def work() -> None:
        begun.set()
        results.append(call())

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    return results, thread
