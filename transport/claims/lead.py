"""Lead: how many training steps of samples wait in the rings of a run, as its planner says it in a notice.

planner ──say──► notice ──► rollouts, which wait while it is more than their ``ahead``
"""

from __future__ import annotations

import logging
import time
from typing import Final

import msgspec

from transport.claims.rings import FoundRings
from transport.errors import ClosedError, TransportError, UsageError
from transport.runtime import hurry
from transport.runtime.error_text import error_text
from transport.runtime.logs import LOOK_S, LogLimit

log = logging.getLogger(__name__)

_SLICE_S: Final = 0.5  # of a wait, after which a request to stop is seen


def _topic(rank: int) -> str:
    return f"lead.{rank}"


class LeadSaid:
    """A planner's notices of how many steps wait. It repeats a number only after `again`.

    Args:
        rank: of the readers for whom it plans.
    """

    def __init__(self, rings: FoundRings, rank: int) -> None:
        self._rings = rings
        self._topic = _topic(rank)
        self._said: int | None = None
        self._failed = LogLimit()

    def again(self) -> None:
        """Repeat the next number even if it is unchanged: another planner may have announced one since."""
        self._said = None

    def say(self, steps: int) -> None:
        """Say that so many steps wait, where that is new. Rings at addresses have no notices: there nobody hears it."""
        if steps == self._said:
            return
        try:
            before, number = self._rings.latest(self._topic), msgspec.msgpack.encode(steps)
            if before is None or before.payload != number:
                self._rings.announce(self._topic, 0 if before is None else before.version + 1, number)
        except UsageError:
            log.debug("rollouts do not hear how many steps wait: %r have no notices", self._rings)
        except (TransportError, OSError) as error:  # a hint; it is said again soon
            if not isinstance(error, ClosedError) and self._failed.due() is not None:
                log.warning("rollouts with ahead= do not hear how many steps wait: %s", error_text(error))
            return
        self._said = steps


class Lead:
    """Messages of a planner, as a rollout hears them.

    Args:
        most: steps that may wait.
        readers: ranks that read each payload.

    Raises:
        UsageError: these rings have no notices.
    """

    def __init__(self, rings: FoundRings, most: int, readers: int) -> None:
        self._rings = rings
        self._most = most
        self._topics = [_topic(rank) for rank in range(readers)]
        self._said = LogLimit()
        rings.latest(self._topics[0])

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until at most so many steps wait. False: the time is over, or a signal has asked the program to stop.

        Where no trainer plans steps, nobody waits.
        """
        begun = time.monotonic()
        give_up = float("inf") if timeout_s is None else begun + timeout_s
        for topic in self._topics:
            notice = self._rings.latest(topic)
            while notice is not None and (steps := msgspec.msgpack.decode(notice.payload, type=int)) > self._most:
                left_s = give_up - time.monotonic()
                if left_s <= 0 or hurry.stop_requested():
                    return False
                if time.monotonic() > begun + LOOK_S and self._said.due() is not None:
                    log.info("this rollout waits: %d steps of samples wait, and ahead= is %d", steps, self._most)
                newer = self._rings.latest(topic, notice.version, min(left_s, _SLICE_S))
                notice = self._rings.latest(topic) if newer is None else newer  # it ends with its planner
        return True
