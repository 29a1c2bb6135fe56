"""Retry: deadlines, backoff, and the plan."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.client.retry import Deadline, Retry, backoff, backoff_ceiling
from transport.errors import DeadlineExceededError, RetriesExhaustedError, StaleSlotError, UnreachableError
from transport.settings import DEFAULTS

NEVER = Deadline(math.inf)


def plan(attempts: int = 3, deadline: Deadline = NEVER, random: float = 1.0) -> Retry:
    return Retry(attempts, deadline, DEFAULTS, lambda: random)


# --- deadline ------------------------------------------------------------------------------------
def test_a_deadline_says_what_is_left_and_then_refuses() -> None:
    deadline = Deadline.after(10.0, now=100.0)
    assert deadline.remaining(104.0) == 6.0
    assert not deadline.passed(109.9)
    assert deadline.passed(110.0)
    with pytest.raises(DeadlineExceededError, match=r"passed 0\.500 s ago"):
        deadline.remaining(110.5)


def test_a_deadline_may_be_infinitely_far() -> None:
    assert Deadline.after(math.inf, 5.0).remaining(1e12) == math.inf


# --- backoff -------------------------------------------------------------------------------------
def test_the_ceiling_of_the_backoff_doubles_up_to_the_limit() -> None:
    ceilings = [backoff_ceiling(failures) for failures in range(1, 9)]
    assert ceilings == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    assert backoff_ceiling(10**6) == 4.0


@given(st.integers(1, 100), st.floats(0, 1, exclude_max=True))
def test_jitter_is_anything_from_nothing_to_the_ceiling(failures: int, random: float) -> None:
    assert 0 <= backoff(failures, DEFAULTS, lambda: random) <= backoff_ceiling(failures)


# --- the plan --------------------------------------------------------------------------------------
def test_pauses_follow_failures_and_the_last_one_ends_the_plan() -> None:
    retry = plan(attempts=3)
    assert [retry.failed(UnreachableError("first"), now) for now in (1.0, 2.0)] == [0.25, 0.5]
    last = UnreachableError("last")
    with pytest.raises(RetriesExhaustedError, match="3 of 3 attempts failed, the last one with: last") as caught:
        retry.failed(last, 3.0)
    assert (caught.value.attempts, caught.value.__cause__) == (3, last)


def test_a_final_error_ends_the_plan_unchanged() -> None:
    stale = StaleSlotError("consumed")
    with pytest.raises(StaleSlotError) as caught:
        plan().failed(stale, 0.0)
    assert caught.value is stale


def test_another_healthy_port_is_tried_without_waiting() -> None:
    assert plan().failed(UnreachableError("one port"), 0.0, elsewhere=True) == 0.0


def test_a_pause_beyond_the_deadline_is_not_begun() -> None:
    failure = UnreachableError("slow")
    with pytest.raises(DeadlineExceededError, match="1 failed, the last one with: slow") as caught:
        plan(deadline=Deadline(1.01)).failed(failure, 1.0)
    assert caught.value.__cause__ is failure
    assert not caught.value.retryable  # no outer layer tries again


def test_a_pause_that_ends_before_the_deadline_is_begun() -> None:
    assert plan(deadline=Deadline(1.26)).failed(UnreachableError("slow"), 1.0) == 0.25


def test_a_deadline_that_passes_later_leaves_the_failure_before_it_as_the_cause() -> None:
    retry, failure = plan(), UnreachableError("slow")
    retry.failed(failure, 1.0)
    with pytest.raises(DeadlineExceededError, match="slow") as caught:
        retry.failed(DeadlineExceededError("late"), 2.0)
    assert caught.value.__cause__ is failure
    first = DeadlineExceededError("late at once")
    with pytest.raises(DeadlineExceededError) as caught:
        plan().failed(first, 1.0)
    assert caught.value is first
