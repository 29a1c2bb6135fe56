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
from typing import TypeAlias

from transport.errors import DeadlineExceededError, RetriesExhaustedError, TransportError
from transport.settings import DEFAULTS, Settings


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time (monotonic clock) by which a whole operation ends; passed on to its parts, never extended."""

    at: float

    @classmethod
    def after(cls, seconds: float, now: float) -> Deadline:
        """The moment ``seconds`` from ``now``; infinity is allowed and never passes."""
        return cls(now + seconds)

    def passed(self, now: float) -> bool:
        """Whether no time is left."""
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


@dataclass(frozen=True, slots=True)
class Try:
    """Make attempt ``number`` (from 1) now."""

    number: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Sleep, then ask again."""

    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Raise ``error``; its ``__cause__`` is the last failure where it is not itself that failure."""

    error: TransportError


Step: TypeAlias = Try | Wait | GiveUp


class Retry:
    """The plan for one operation of at most ``attempts`` attempts. Ask ``step`` until the operation succeeds:

        while True:
            match plan.step(now()):
                case Try():
                    try:
                        return await attempt()
                    except TransportError as error:
                        plan.failed(error, now())
                case Wait(seconds):
                    await asyncio.sleep(seconds)
                case GiveUp(error):
                    raise error

    A wait that would end at or after the deadline is not begun: the plan gives up at once.
    """

    def __init__(
        self,
        attempts: int,
        deadline: Deadline,
        settings: Settings,
        random: Callable[[], float],
    ) -> None:
        self._attempts = attempts
        self._deadline = deadline
        self._settings = settings
        self._random = random
        self._begun = 0
        self._last_error: TransportError | None = None
        self._ready_at = float("-inf")

    def __repr__(self) -> str:
        return f"<Retry {self._begun} of {self._attempts} attempts, last error {self._last_error!r}>"

    @property
    def begun(self) -> int:
        """Attempts made so far."""
        return self._begun

    def step(self, now: float) -> Step:
        """What to do now. ``Try`` counts as an attempt."""
        error = self._last_error
        if error is not None and not error.retryable:
            return GiveUp(error)
        if self._begun >= self._attempts:
            return GiveUp(self._exhausted())
        if self._deadline.passed(max(now, self._ready_at)):
            return GiveUp(self._late())
        if now < self._ready_at:
            return Wait(self._ready_at - now)
        self._begun += 1
        return Try(self._begun)

    def begin(self) -> None:
        """Count the first attempt, which was made before the plan existed."""
        self._begun += 1

    def failed(self, error: TransportError, now: float, *, elsewhere: bool = False) -> None:
        """The attempt failed. ``elsewhere``: the next one goes to another healthy port and need not wait."""
        self._last_error = error
        if not elsewhere:
            self._ready_at = now + backoff(self._begun, self._settings, self._random)

    def _exhausted(self) -> TransportError:
        exhausted = RetriesExhaustedError(
            f"{self._begun} of {self._attempts} attempts failed, the last one with: {self._last_error}", self._begun
        )
        exhausted.__cause__ = self._last_error
        return exhausted

    def _late(self) -> TransportError:
        late = DeadlineExceededError(
            f"the deadline leaves no time for another attempt; {self._begun} were made, "
            f"the last failure was: {self._last_error or 'none'}"
        )
        late.__cause__ = self._last_error
        return late


def attempts_of_read(settings: Settings, places: int) -> int:
    """Attempts of one read: ``attempts_per_read``, and at least one per place, so that one living listener is found.

    places: pairs of an address and a port at which the ring may be served; a listener on two addresses is two.
    """
    return max(settings.attempts_per_read, places)
