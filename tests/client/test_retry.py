"""Retry: deadlines, backoff, the plan, and its ceilings driven to the end with a clock of our own."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.client.retry import (
    Deadline,
    GiveUp,
    Retry,
    Try,
    Wait,
    attempts_of_read,
    backoff,
    backoff_ceiling,
    worst_case_attempts,
    worst_case_wait,
)
from transport.errors import (
    DeadlineExceededError,
    RetriesExhaustedError,
    StaleSlotError,
    TransportError,
    UnreachableError,
)
from transport.settings import DEFAULTS, Settings

NEVER = Deadline(math.inf)


def plan(attempts: int = 3, deadline: Deadline = NEVER, random: float = 1.0) -> Retry:
    return Retry(attempts, deadline, DEFAULTS, lambda: random)


# --- deadline ------------------------------------------------------------------------------------
def test_a_deadline_bounds_every_timeout_and_then_refuses() -> None:
    deadline = Deadline.after(10.0, now=100.0)
    assert deadline.remaining(104.0) == 6.0
    assert deadline.bounded(5.0, 104.0) == 5.0
    assert deadline.bounded(5.0, 108.0) == 2.0
    assert deadline.earlier(5.0, 104.0).at == 109.0
    assert deadline.earlier(50.0, 104.0).at == 110.0
    assert not deadline.passed(109.9)
    assert deadline.passed(110.0)
    for late in (lambda: deadline.remaining(110.5), lambda: deadline.bounded(5.0, 110.5)):
        with pytest.raises(DeadlineExceededError, match=r"passed 0\.500 s ago"):
            late()


def test_a_deadline_may_be_infinitely_far() -> None:
    assert Deadline.after(math.inf, 5.0).bounded(7.0, 1e12) == 7.0


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


# --- the ceilings --------------------------------------------------------------------------------
class Simulation:
    """The three layers around an attempt that always takes as long as it may and fails."""

    def __init__(self, settings: Settings, size: int, ports: int) -> None:
        self.settings = settings
        self.ports = ports
        self.attempt_s = settings.connect_timeout_s + settings.handshake_timeout_s + settings.read_timeout(size)
        self.now = 0.0
        self.attempts = 0
        self.deadline = Deadline.after(settings.batch_deadline_s, self.now)

    def layer(self, attempts: int, inner: list[int]) -> None:
        retry = Retry(attempts, self.deadline, self.settings, lambda: 1.0)
        while True:
            match retry.step(self.now):
                case Try():
                    try:
                        if inner:
                            self.layer(inner[0], inner[1:])
                        else:
                            self.attempt()
                    except TransportError as error:
                        retry.failed(error, self.now)
                case Wait(seconds):
                    self.now += seconds
                case GiveUp(error):
                    raise error

    def attempt(self) -> None:
        self.attempts += 1
        self.now += self.deadline.bounded(self.attempt_s, self.now)
        raise UnreachableError("always")

    def run(self) -> TransportError:
        settings = self.settings
        calls, reads = settings.calls_per_ticket, attempts_of_read(settings, self.ports)
        with pytest.raises(TransportError) as caught:
            self.layer(settings.rounds_per_batch, [calls, reads])
        return caught.value


def test_the_product_of_the_defaults() -> None:
    assert worst_case_attempts(DEFAULTS) == 2 * 2 * 3
    assert worst_case_attempts(DEFAULTS, ports=4) == 4 * 2 * 3


@given(
    reads=st.integers(1, 4),
    calls=st.integers(1, 3),
    rounds=st.integers(1, 4),
    ports=st.integers(1, 6),
    size=st.integers(0, 1 << 30),
)
def test_without_a_deadline_the_formulas_are_exact(reads: int, calls: int, rounds: int, ports: int, size: int) -> None:
    settings = msgspec.structs.replace(
        DEFAULTS, attempts_per_read=reads, calls_per_ticket=calls, rounds_per_batch=rounds, batch_deadline_s=1e9
    )
    simulation = Simulation(settings, size, ports)
    assert isinstance(simulation.run(), RetriesExhaustedError)
    assert simulation.attempts == worst_case_attempts(settings, ports)
    assert simulation.now == pytest.approx(worst_case_wait(settings, size, ports))


@given(
    counts=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)),
    times=st.tuples(*(st.floats(0.01, 50.0) for _ in range(3))),
    backoffs=st.tuples(st.floats(0.001, 5.0), st.floats(1.0, 20.0)),
    rate=st.floats(1e5, 1e10),
    deadline_s=st.floats(0.02, 3.0) | st.just(1e7),
    ports=st.integers(1, 16),
    size=st.integers(0, 1 << 33),
)
def test_over_all_settings_nothing_takes_longer_than_the_formula_says(
    counts: tuple[int, int, int],
    times: tuple[float, float, float],
    backoffs: tuple[float, float],
    rate: float,
    deadline_s: float,
    ports: int,
    size: int,
) -> None:
    """``deadline_s``: as a share of what it would take without one, or none to speak of."""
    reads, calls, rounds = counts
    connect_s, handshake_s, read_s = times
    settings = msgspec.structs.replace(
        DEFAULTS,
        attempts_per_read=reads,
        calls_per_ticket=calls,
        rounds_per_batch=rounds,
        connect_timeout_s=connect_s,
        handshake_timeout_s=handshake_s,
        read_timeout_s=read_s,
        read_slowest_rate=rate,
        backoff_first_s=min(backoffs),
        backoff_most_s=max(backoffs),
        batch_deadline_s=1e12,
    )
    unlimited = worst_case_wait(settings, size, ports)
    settings = msgspec.structs.replace(settings, batch_deadline_s=unlimited * deadline_s)
    simulation = Simulation(settings, size, ports)
    error = simulation.run()
    assert simulation.attempts <= worst_case_attempts(settings, ports)
    assert simulation.now <= worst_case_wait(settings, size, ports) * (1 + 1e-9)
    if deadline_s > 1.001:
        assert isinstance(error, RetriesExhaustedError)
        assert simulation.now == pytest.approx(unlimited)
        assert simulation.attempts == worst_case_attempts(settings, ports)
    else:
        assert simulation.now <= settings.batch_deadline_s * (1 + 1e-9)


@given(ports=st.integers(1, 16), size=st.integers(0, 1 << 36), deadline_s=st.floats(6.0, 1000.0))
def test_the_deadline_caps_both(ports: int, size: int, deadline_s: float) -> None:
    settings = msgspec.structs.replace(DEFAULTS, batch_deadline_s=deadline_s)
    simulation = Simulation(settings, size, ports)
    simulation.run()
    assert simulation.attempts <= worst_case_attempts(settings, ports)
    assert simulation.now <= worst_case_wait(settings, size, ports) * (1 + 1e-9) <= deadline_s * (1 + 1e-9)


def test_an_outage_ends_with_the_deadlines_error_when_that_comes_first() -> None:
    settings = msgspec.structs.replace(DEFAULTS, batch_deadline_s=20.0)
    simulation = Simulation(settings, 0, 1)
    assert isinstance(simulation.run(), DeadlineExceededError)
    assert simulation.now == pytest.approx(20.0)
