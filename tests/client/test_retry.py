"""Retry: deadlines, backoff, and the plan."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.client.retry import (
    Deadline,
    GiveUp,
    Retry,
    Try,
    Wait,
    backoff,
    backoff_ceiling,
)
from transport.errors import (
    DeadlineExceededError,
    RetriesExhaustedError,
    StaleSlotError,
    TransportError,
    UnreachableError,
)
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
def test_tries_wait_in_between_and_end_with_the_last_failure() -> None:
    retry = plan(attempts=2)
    assert retry.step(0.0) == Try(1)
    retry.failed(UnreachableError("first"), 1.0)
    assert retry.step(1.0) == Wait(pytest.approx(0.25))
    assert retry.step(1.1) == Wait(pytest.approx(0.15))  # woken early
    assert retry.step(1.25) == Try(2)
    last = UnreachableError("last")
    retry.failed(last, 2.0)
    step = retry.step(2.0)
    assert isinstance(step, GiveUp)
    assert isinstance(step.error, RetriesExhaustedError)
    assert step.error.attempts == retry.begun == 2
    assert step.error.__cause__ is last
    assert str(step.error) == "2 of 2 attempts failed, the last one with: last"
    assert repr(retry) == "<Retry 2 of 2 attempts, last error UnreachableError('last')>"


def test_a_final_error_ends_the_plan_unchanged() -> None:
    retry = plan()
    retry.step(0.0)
    stale = StaleSlotError("consumed")
    retry.failed(stale, 0.0)
    assert retry.step(0.0) == GiveUp(stale)


def test_another_healthy_port_is_tried_without_waiting() -> None:
    retry = plan()
    retry.step(0.0)
    retry.failed(UnreachableError("one port"), 0.0, elsewhere=True)
    assert retry.step(0.0) == Try(2)


def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    retry = plan(deadline=Deadline(1.01))
    retry.step(0.0)
    failure = UnreachableError("slow")
    retry.failed(failure, 1.0)
    step = retry.step(1.0)
    assert isinstance(step, GiveUp)
    assert isinstance(step.error, DeadlineExceededError)
    assert step.error.__cause__ is failure
    assert not step.error.retryable  # no outer layer tries again


def test_after_the_deadline_not_even_a_first_attempt_is_made() -> None:
    step = plan(deadline=Deadline(1.0)).step(1.0)
    assert isinstance(step, GiveUp)
    assert "0 were made, the last failure was: none" in str(step.error)


@given(
    attempts=st.integers(1, 5),
    random=st.floats(0, 1, exclude_max=True),
    at=st.floats(0.0, 20.0),
    deadline=st.floats(0.0, 40.0) | st.just(math.inf),
    elsewhere=st.booleans(),
    error=st.sampled_from([UnreachableError("gone"), StaleSlotError("consumed")]),
)
def test_a_plan_made_after_the_first_failure_goes_on_as_if_it_had_begun_with_it(
    attempts: int, random: float, at: float, deadline: float, elsewhere: bool, error: TransportError
) -> None:
    def steps(retry: Retry) -> list[str]:
        """What it says from the first failure on, every further attempt failing at once."""
        retry.failed(error, at, elsewhere=elsewhere)
        now, said = at, []
        for _ in range(20):
            step = retry.step(now)
            said.append(f"{step!r} {getattr(step, 'error', None)!r} {retry!r} {retry.begun}")
            match step:
                case Try():
                    retry.failed(UnreachableError("again"), now)
                case Wait(seconds):
                    now += seconds
                case GiveUp():
                    return said
        raise AssertionError("it never gave up")

    early = plan(attempts, Deadline(max(deadline, math.nextafter(0.0, 1.0))), random)
    assert early.step(0.0) == Try(1)
    late = plan(attempts, Deadline(max(deadline, math.nextafter(0.0, 1.0))), random)
    late.begin()
    assert late.begun == early.begun == 1
    assert repr(late) == repr(early)
    assert steps(late) == steps(early)
