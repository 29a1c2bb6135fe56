"""What a trainer claims payloads from: the rings of a run, or a group's view of them. Tickets are opaque bytes.

A payload for n readers is n independent *deliveries*, one per rank:

                  ┌────────────── retry, or the claim ends ──────────────┐
                  ▼                                                      │
    write ──►  ready ──claim──►  claimed ──ack──────────────────────►  done
                                   │ └──discard──► discarded
                                   └──retry, or the claim ends, at the last delivery──► dead

* Deliveries of a ring come out in the order of writing; a retried delivery keeps its position.
* A claim belongs to its claimant until it is ended, or its lease is over. What a claim that is over asks for is refused
  and has no effect. An unfinished delivery whose claim is over is claimed again, with ``attempts`` + 1.
* A claim has one end. A call that asks for the end that it had has the same answer as the first one, so a call that was
  interrupted is repeated.
* A delivery that was claimed ``max_deliveries`` times without success is ``dead``, with its reason: a payload that
  kills its trainers must not kill them all.
"""

from __future__ import annotations

import abc
import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import msgspec

from transport.runtime.decoders import hiding
from transport.wires import Wire

if TYPE_CHECKING:
    from transport.runtime.loop_thread import LoopThread
    from transport.schema import Schema

log = logging.getLogger(__name__)

MAX_DELIVERIES = 20


class DeliveryState(enum.StrEnum):
    """State of one delivery; stored by name."""

    READY = "ready"
    CLAIMED = "claimed"
    DONE = "done"
    DISCARDED = "discarded"
    DEAD = "dead"

    @property
    def final(self) -> bool:
        """Whether the state of the delivery will not change again."""
        return self not in (DeliveryState.READY, DeliveryState.CLAIMED)


@hiding("data", "token")
class Claim(msgspec.Struct, frozen=True, weakref=True):
    """The exclusive right of one consumer to one delivery, until its lease ends."""

    ticket_id: str
    data: bytes
    rank: int
    attempts: int  # how often the delivery was claimed, this time included
    token: str  # opaque; proves that the claim is this one
    policy_version: int | None = None


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """Deliveries by state, of one rank or of all. The finished ones are counted from the queue's beginning."""

    ready: int = 0  # includes those waiting for the delay of a retry
    claimed: int = 0
    done: int = 0
    discarded: int = 0
    dead: int = 0
    retried: int = 0  # how often a claim was given back
    expired: int = 0  # how often a lease ended before its claim did
    aged: int = 0  # of the discarded: those whose policy was older than the claimant's ``oldest_version``

    @property
    def unfinished(self) -> int:
        """Deliveries that are still to be trained on."""
        return self.ready + self.claimed


class Failure(msgspec.Struct, frozen=True):
    """A delivery that ended without being trained on, and why."""

    ticket_id: str
    rank: int
    state: DeliveryState  # discarded or dead
    attempts: int
    consumer: str
    reason: str


@hiding("data")
class PayloadBytes(NamedTuple):
    """The bytes of a payload that came with its claim, and what carried them. The claim's end acknowledges it."""

    wire: Wire
    data: Any


class Carrier(Protocol):
    """What a queue uses of a packer's client (`UCXXClient`)."""

    why_nothing: Callable[[], str]  # the queue says it, for `transport top`

    @property
    def claims(self) -> Any: ...

    def allows(self, wire: Wire) -> bool: ...

    def carries(self) -> bool: ...


class Notice(msgspec.Struct, frozen=True):
    """The latest announcement on a topic."""

    topic: str
    version: int
    payload: bytes


class FirstAnnouncements:
    """Of one queue, on each topic: a warning where the notice of an earlier run seems to be in the way."""

    def __init__(self) -> None:
        self._topics: set[str] = set()

    def answer(self, topic: str, version: int, accepted: bool, later: Callable[[], Notice | None]) -> bool:
        """``accepted``, as `TicketQueue.announce` returns it. ``later`` looks for a notice beyond this version."""
        first = topic not in self._topics
        self._topics.add(topic)
        if first and not accepted and (there := later()) is not None:
            log.warning(
                "version %d of topic %r is not announced, since version %d stands there; if an earlier run announced "
                "it, go on from latest(%r).version, or give this run a name of its own",
                version,
                topic,
                there.version,
                topic,
            )
        return accepted


def too_old(version: int, oldest_version: int) -> str:
    """Reason of a delivery that was discarded for its age."""
    return f"policy version {version} is older than {oldest_version}"


class TicketQueue(abc.ABC):
    """What payloads are claimed from. All methods are thread-safe and block; call them from threads, not from an event
    loop. All raise ClosedError after ``close``.
    """

    lease_s: float  # of claims; renew at a third of it

    @property
    def name(self) -> str:
        """What metrics call it."""
        return type(self).__name__

    @abc.abstractmethod
    def claim(
        self, n: int, timeout_s: float = 0.0, *, rank: int | str = 0, consumer: str, oldest_version: int | None = None
    ) -> list[Claim]:
        """Up to ``n`` deliveries of ``rank``, the oldest first; waits for the first one up to ``timeout_s``.

        ``rank`` may be the name that a ring has for a consumer; RankError for one that it does not have.
        ``consumer`` names the claimant in reports. Returns an empty list when the time is over. What is due and of an
        older policy than ``oldest_version`` is discarded instead, with that reason, and counted as ``aged``; what was
        written without a version is never too old.
        """

    @abc.abstractmethod
    def ack_many(self, claims: Sequence[Claim]) -> list[Claim]:
        """Consume; returns the claims that the caller still owned, each once. Train only on the returned ones.

        Asked again with the same claims the answer is the same.
        """

    @abc.abstractmethod
    def in_question(self, claims: Sequence[Claim]) -> list[Claim]:
        """Of claims that `ack_many` did not return: those that may have been accepted; their ring is out of reach.

        Keep what was made of them, and give them to `ack_many` again later: it asks the ring again. Only rings
        elsewhere have such claims.
        """

    def ack(self, claim: Claim) -> bool:
        """Consume one delivery: whether the claim was the caller's."""
        return bool(self.ack_many([claim]))

    def retry(self, claim: Claim, delay_s: float = 0.0, reason: str = "") -> bool:
        """Return a claim, to be claimed again after ``delay_s``; dead at the last delivery. False if not owned."""
        return bool(self.retry_many([claim], delay_s, reason))

    @abc.abstractmethod
    def retry_many(self, claims: Sequence[Claim], delay_s: float = 0.0, reason: str = "") -> list[Claim]:
        """`retry` of several in one call to the queue; returns the claims that the caller still owned."""

    @abc.abstractmethod
    def discard(self, claim: Claim, reason: str) -> bool:
        """Discard the delivery: its payload cannot or should not be read. False if not owned."""

    @abc.abstractmethod
    def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        """Restart the lease; returns the claims that the caller still owns."""

    @abc.abstractmethod
    def depth(self, rank: int | None = None) -> QueueDepth:
        """Counts of one rank, or of all."""

    @abc.abstractmethod
    def failures(self, limit: int = 100) -> list[Failure]:
        """The last deliveries that were discarded or died, the latest published first."""

    @abc.abstractmethod
    def finished(self, expected_rollouts: int | None = None) -> bool:
        """Whether no payload comes any more: every rollout of the run has closed cleanly, and every payload is done.

        Ask when a claim has brought nothing.

        Args:
            expected_rollouts: how many have to end; None: all of those, at least one, that this process has seen; 0:
                none has to, but none that this process has seen goes on.
        """

    @abc.abstractmethod
    def reasons(self) -> Mapping[str, int]:
        """How often a look, every few seconds without a payload, found why none comes."""

    @abc.abstractmethod
    def announce(self, topic: str, version: int, payload: bytes = b"") -> bool:
        """Replace the topic's notice, unless it has this version or a later one (then False)."""

    @abc.abstractmethod
    def latest(self, topic: str, newer_than: int | None = None, timeout_s: float = 0.0) -> Notice | None:
        """The topic's notice if later than ``newer_than``; waits for one up to ``timeout_s``."""

    @abc.abstractmethod
    def connect(self, thread: LoopThread, client: Carrier, schemas: Sequence[Schema]) -> TicketQueue:
        """The queue as a packer is to use it that has this client, and payloads of these schemas."""

    @abc.abstractmethod
    def disconnect(self, client: Carrier) -> None:
        """This client is closed from now on; what was claimed through it can be claimed again."""

    @abc.abstractmethod
    def payload_bytes(self, claim: Claim) -> PayloadBytes | None:
        """The payload, where it came with the claim; None: it is to be read by its ticket."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything, and end waits in other threads with ClosedError. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
