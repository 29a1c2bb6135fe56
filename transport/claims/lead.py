"""Lead: how many training steps of samples wait in the rings of a run, as its planner says it in a notice.

planner ──say──► notice ──► rollouts, which wait while it is more than their ``ahead``

A planner takes what it plans from, so what nobody has taken no notice counts. A rollout counts that itself, by its own
groups: while no planner runs it waits with its share of ``ahead`` steps in the ring. Before the first notice it cannot
know how many groups that is, and counts each as a step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Final

import msgspec

from transport import _ring
from transport.claims.notices import Notice
from transport.claims.rings import FoundRings
from transport.decoders import msgpack_decoder
from transport.errors import ClosedError, TransportError, UsageError
from transport.ring.buffer import SharedRingBuffer
from transport.runtime import hurry
from transport.runtime.amounts import count
from transport.runtime.blocking_calls import BoundedCalls
from transport.runtime.error_text import error_text
from transport.runtime.logs import LOOK_S, SAY_AGAIN_S, LogLimit
from transport.ticket import Ticket

log = logging.getLogger(__name__)

_SLICE_S: Final = 0.5  # of a wait, after which a request to stop is seen, and what was read without a claim
_REPEAT_S: Final = 10.0  # of a planner that has nothing new to say
_ALONE_S: Final = 60.0  # without a sign of a trainer, after which a rollout waits no longer
_PUBLISHED: Final = (_ring.READY, _ring.READING)


def _topic(rank: int) -> str:
    return f"lead.{rank}"


class _StepsWaiting(msgspec.Struct, frozen=True, array_like=True):
    """Steps that wait, how many groups of each ring a step has, and the mesh whose steps they are."""

    steps: int
    share: int
    mesh: str = ""


class LeadSaid:
    """A planner's notices of how many steps wait. It repeats them only after `again`.

    Args:
        rank: of the readers for whom it plans.
        mesh: for which it plans: two of one rank take each other's samples, which a warning says.
    """

    def __init__(self, rings: FoundRings, rank: int, mesh: str = "") -> None:
        self._rings = rings
        self._rank = rank
        self._mesh = mesh
        self._topic = _topic(rank)
        self._said_once = False
        self._two_said = LogLimit(SAY_AGAIN_S)
        self._said: _StepsWaiting | None = None
        self._repeat_at = 0.0
        self._failed = LogLimit()

    def again(self) -> None:
        """Say the next number even if it is unchanged: another planner may have announced one since."""
        self._said = None

    def say(self, steps: int, share: int = 1) -> None:
        """Say that so many steps wait, where that is new. Rings at addresses have no notices: there nobody hears it.

        Args:
            share: groups of a step that each ring has, in the mean.
        """
        said = _StepsWaiting(steps, share, self._mesh)
        if said == self._said:
            return
        try:
            before, payload, now = self._rings.latest(self._topic), msgspec.msgpack.encode(said), time.monotonic()
            if self._said_once and before is not None and _said_in(before).mesh != self._mesh:
                self._say_two()
            if before is None or before.payload != payload or now >= self._repeat_at:
                self._rings.announce(self._topic, 0 if before is None else before.version + 1, payload)
                self._repeat_at = now + _REPEAT_S
                self._said_once = True
        except UsageError:
            log.debug("rollouts do not hear how many steps wait: %r have no notices", self._rings)
        except (TransportError, OSError) as error:  # a hint; it is said again soon
            if not isinstance(error, ClosedError) and self._failed.due() is not None:
                log.warning("rollouts with ahead= do not hear how many steps wait: %s", error_text(error))
            return
        self._said = said

    def _say_two(self) -> None:
        if self._two_said.due() is not None:
            log.warning(
                "two meshes, or trainers without one, plan steps of reader %d of %r: each has a part of the samples, "
                "and groups stay incomplete. Give each a reader of its own: Rollout(readers=2), Trainer(rank=1)",
                self._rank,
                self._rings,
            )


def _said_in(notice: Notice) -> _StepsWaiting:
    try:
        return msgpack_decoder(_StepsWaiting)(notice.payload)
    except msgspec.MsgspecError:  # of another version of this package
        return _StepsWaiting(0, 1)


class Lead:
    """Messages of a planner, as a rollout hears them, and the groups of the rollout that nobody has taken.

    Args:
        ring: of the rollout.
        most: steps that may wait.
        readers: ranks that read each payload.

    Raises:
        UsageError: these rings have no notices.
    """

    def __init__(self, rings: FoundRings, ring: SharedRingBuffer, most: int, readers: int) -> None:
        self._rings = rings
        self._ring = ring
        self._most = most
        self._topics = [_topic(rank) for rank in range(readers)]
        self._share = 1  # groups of this ring that are a step
        self._completed: deque[tuple[int, int]] = deque(maxlen=ring.slot_count)  # by slot and generation
        self._said = LogLimit()
        self._alone_said = LogLimit(SAY_AGAIN_S)
        self._unheard = LogLimit(SAY_AGAIN_S)
        self._looks = BoundedCalls()
        rings.latest(self._topics[0])

    def completed(self, last: Iterable[Ticket]) -> None:
        """Note groups that have all their samples, by the last one of each."""
        self._completed.extend((each.slot, each.generation) for each in last)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until at most so many steps wait. False: the time is over, or a signal has asked the program to stop.

        It ends, too, where nothing is heard of a trainer for a minute: perhaps none plans steps.
        """
        begun = heard = time.monotonic()
        give_up = float("inf") if timeout_s is None else begun + timeout_s
        while True:
            claims = self._ring.native.claimed_event()
            if not self._is_untaken(self._most * self._share):
                break
            why = f"no trainer has taken its last {count(self._most * self._share + 1, 'group')}"
            if (ended := self._ended(begun, heard, give_up, why)) is not None:
                return ended
            self._ring.native.wait_claimed(claims, max(0.0, min(give_up - time.monotonic(), _SLICE_S)))
        for topic in self._topics:
            heard, notice = time.monotonic(), self._latest(topic, give_up)
            while notice is not None and (steps := self._steps(notice)) > self._most:
                if (ended := self._ended(begun, heard, give_up, f"samples of {count(steps, 'step')} wait")) is not None:
                    return ended
                newer = self._latest(topic, give_up, notice.version, _SLICE_S)
                if newer is None:
                    notice = self._latest(topic, give_up)  # it ends with its planner
                else:
                    heard, notice = time.monotonic(), newer
        return True

    def _latest(self, topic: str, give_up: float, newer_than: int | None = None, slice_s: float = 0.0) -> Notice | None:
        """Return the notice, a hint. None, too, where it cannot be had: a write that waits here has written."""
        left_s = max(0.0, give_up - time.monotonic())
        look = partial(self._rings.latest, topic, newer_than, min(left_s, slice_s))
        try:
            if self._rings.store is None or left_s == float("inf"):
                return look()
            return self._looks.call(look, left_s)
        except (TransportError, OSError) as error:
            if self._unheard.due() is not None:
                log.warning("this rollout does not hear how many steps wait, and goes on: %s", error_text(error))
            return None

    def _ended(self, begun: float, heard: float, give_up: float, why: str) -> bool | None:
        """Return what a wait ends with; None: it goes on."""
        now = time.monotonic()
        if now >= give_up or hurry.stop_requested():
            return False
        if now >= heard + _ALONE_S:
            if self._alone_said.due() is not None:
                log.warning(
                    "this rollout goes on, although %s and ahead= is %d: nothing was heard of a trainer for %.0f s. "
                    "Start the trainer, in another process or thread, or leave ahead= out where none plans steps",
                    why,
                    self._most,
                    now - heard,
                )
            return True
        if now >= begun + LOOK_S and self._said.due() is not None:
            log.info("this rollout waits: %s, and ahead= is %d", why, self._most)
        return None

    def _steps(self, notice: Notice) -> int:
        """Return how many steps wait, as the notice says it."""
        said = _said_in(notice)
        self._share = said.share
        return said.steps

    def _is_untaken(self, later: int) -> bool:
        """Tell whether nobody has taken the group that was completed before so many others.

        Trainers take the oldest of a ring first, so that all later ones wait as well.
        """
        if len(self._completed) <= later:
            return False
        slot, generation = self._completed[-1 - later]
        native = self._ring.native
        info = native.info(slot)
        if info.generation != generation or info.state not in _PUBLISHED:
            return False
        ranks = range(info.readers)
        if any(info.done >> rank & 1 for rank in ranks):
            return False
        holders = {native.claim_word(slot, rank)[0] for rank in ranks} - {-1}
        return not holders or not any(owner.alive for owner in native.owners() if owner.index in holders)
