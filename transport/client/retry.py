"""Retry: when to try again, when to stop, and the worst case. Decisions only; clock and randomness are arguments.

Three layers use the same plan, one inside the other, under one deadline:

    layer 3   rounds over a batch          rounds_per_batch
    layer 2     calls for a ticket           calls_per_ticket
    layer 1       attempts of a read           attempts_per_read, and at least one per port

docs/UCXX.md has what follows for one ticket: the most attempts, and the longest wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transport.errors import DeadlineExceededError, RetriesExhaustedError, TransportError
from transport.settings import DEFAULTS, Settings


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time (monotonic clock) by which a whole operation ends; passed on to its parts, never extended."""

    at: float

    @classmethod
    def after(cls, seconds: float, now: float) -> Deadline:
        """Return the moment ``seconds`` from ``now``; infinity is allowed and never passes."""
        return cls(now + seconds)

    def passed(self, now: float) -> bool:
        """Return whether no time is left."""
        return now >= self.at

    def remaining(self, now: float) -> float:
        """Seconds left, more than 0. Raises DeadlineExceededError when there are none."""
        if self.passed(now):
            raise DeadlineExceededError(f"the deadline passed {now - self.at:.3f} s ago")
        return self.at - now


def backoff_ceiling(failures: int, settings: Settings = DEFAULTS) -> float:
    """Longest wait after the ``failures``-th failure in a row (from 1): doubles up to ``backoff_most_s``."""
    # 2**60 times anything is beyond the limit, and larger powers do not fit a float.
    return min(settings.backoff_most_s, settings.backoff_first_s * 2.0 ** min(failures - 1, 60))


def backoff(failures: int, settings: Settings, random: Callable[[], float]) -> float:
    """Seconds to wait after the ``failures``-th failure in a row, by full jitter; ``random`` is in [0, 1).

    Full jitter (anything from nothing to the ceiling), because what fails for one reader fails for all of
    its ranks at the same moment, and they should not return at the same moment.
    """
    return backoff_ceiling(failures, settings) * random()


class Retry:
    """The plan for one operation of at most ``attempts`` attempts:

        while True:
            try:
                return await attempt(deadline.remaining(now()))
            except TransportError as error:
                pause_s = plan.failed(error, now())
            await asyncio.sleep(pause_s)

    A pause that would end at or after the deadline is not begun: the plan gives up at once. So it does where the
    deadline passes during a pause or an attempt; with the failure before it, if there was one.

    Args:
        what: the operation's object, named by the error that gives up; "": the failures name it.

    Attributes:
        failures: attempts that have failed.
    """

    def __init__(
        self,
        attempts: int,
        deadline: Deadline,
        settings: Settings,
        random: Callable[[], float],
        what: str = "",
    ) -> None:
        self._what = f"{what}: " if what else ""
        self._attempts = attempts
        self._deadline = deadline
        self._settings = settings
        self._random = random
        self._last: TransportError | None = None
        self.failures = 0

    def __repr__(self) -> str:
        return f"<Retry {self.failures} of {self._attempts} attempts failed>"

    def failed(self, error: TransportError, now: float, *, elsewhere: bool = False) -> float:
        """Note a failed attempt; return the seconds until the next. ``elsewhere``: to another healthy port, at once.

        Raises the error to give up with, whose ``__cause__`` is the last failure where it is not itself that failure.
        """
        if isinstance(error, DeadlineExceededError) and self._last is not None:
            raise self._no_time(self._last) from self._last
        self.failures += 1
        if not error.retryable:
            raise error
        if self.failures >= self._attempts:
            raise RetriesExhaustedError(
                f"{self._what}{self.failures} of {self._attempts} attempts failed, the last one with: {error}",
                self.failures,
            ) from error
        pause_s = 0.0 if elsewhere else backoff(self.failures, self._settings, self._random)
        if self._deadline.passed(now + pause_s):
            raise self._no_time(error) from error
        self._last = error.with_traceback(None)  # its frames would keep the memory of the attempt alive
        return pause_s

    def _no_time(self, last: TransportError) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{self._what}the deadline leaves no time for another attempt; {self.failures} failed, "
            f"the last one with: {last}"
        )


def attempts_of_read(settings: Settings, places: int) -> int:
    """Return the attempts of a read: ``attempts_per_read``, at least one per place, so that a living listener is found.

    places: pairs of an address and a port at which the ring may be served; a listener on two addresses is two.
    """
    return max(settings.attempts_per_read, places)
