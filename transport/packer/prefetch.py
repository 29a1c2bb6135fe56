"""Double buffering as a pure state machine: one batch is fetched, one may be deferred.

    IDLE ──start──► FETCHING ──finished──► READY ──collect──► IDLE, or FETCHING the deferred batch
      ▲                 │  └──────────cancel──────────► IDLE
      └──── cancel ─────┴──── close (from any state) ──► CLOSED

A batch that is deferred while another is fetched or not collected starts when that one is collected. A second deferral
is refused, because memory would not be bounded.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, overload

from transport.client.payload import ReceivedPayload
from transport.errors import ClosedError, TransportError, UsageError
from transport.queue.base import Claim
from transport.ticket import Ticket

B = TypeVar("B")


class PrefetchState(enum.Enum):
    """State of the prefetch."""

    IDLE = "idle"
    FETCHING = "fetching"
    READY = "ready"
    CLOSED = "closed"


class Prefetch(Generic[B]):
    """The decisions; the mixin fetches. Each event returns the batch to start now, or None. One thread."""

    def __init__(self) -> None:
        self.state = PrefetchState.IDLE
        self._deferred: B | None = None

    def __repr__(self) -> str:
        return f"<Prefetch {self.state.value}{', one deferred' if self._deferred is not None else ''}>"

    def start(self, batch: B) -> B:
        """Start ``batch`` now. Raises UsageError while another one is fetched or not collected."""
        self._open("start_prefetch")
        if self.state is not PrefetchState.IDLE:
            raise UsageError(
                f"the previous batch is {self.state.value}: "
                "call collect_prefetch() first, or defer_prefetch() for this one"
            )
        self.state = PrefetchState.FETCHING
        return batch

    def defer(self, batch: B) -> B | None:
        """Start ``batch`` when the previous one is collected; now if there is none."""
        self._open("defer_prefetch")
        if self.state is PrefetchState.IDLE:
            return self.start(batch)
        if self._deferred is not None:
            raise UsageError("another batch is already deferred: call collect_prefetch() first")
        self._deferred = batch
        return None

    def finished(self) -> None:
        """The batch is complete, failures included."""
        if self.state is PrefetchState.FETCHING:
            self.state = PrefetchState.READY

    def collected(self) -> B | None:
        """The batch was handed to the trainer; the deferred one, if any, is to be started."""
        self._open("collect_prefetch")
        self.state = PrefetchState.IDLE
        deferred, self._deferred = self._deferred, None
        return None if deferred is None else self.start(deferred)

    def cancelled(self) -> B | None:
        """Fetching has stopped; returns the deferred batch, whose claims must be given back."""
        if self.state is not PrefetchState.CLOSED:
            self.state = PrefetchState.IDLE
        deferred, self._deferred = self._deferred, None
        return deferred

    def close(self) -> B | None:
        """No more batches; returns the deferred one as `cancelled` does."""
        deferred = self.cancelled()
        self.state = PrefetchState.CLOSED
        return deferred

    def _open(self, call: str) -> None:
        if self.state is PrefetchState.CLOSED:
            raise ClosedError(f"{call}() after cleanup_ucxx_packer(); call setup_ucxx_packer() again")


# --- what a batch becomes -----------------------------------------------------------------------------
@dataclass(slots=True)
class FetchedItem:
    """One ticket of a batch, with its payload or its error."""

    ticket: Ticket
    claim: Claim | None = None
    payload: ReceivedPayload | None = None
    error: TransportError | None = None
    duplicate: bool = False  # already consumed here, so not fetched
    alone: bool = field(default=False, init=False, repr=False)  # of no batch
    # What a call that was interrupted had found out; a repeated one goes on from there.
    counted: bool = field(default=False, init=False, repr=False)  # its failure
    asked: bool = field(default=False, init=False, repr=False)  # the queue, to end the claim
    mine: bool | None = field(default=None, init=False, repr=False)  # the queue accepted the claim's end
    fresh: bool | None = field(default=None, init=False, repr=False)  # the record did not have it
    settled: bool = field(default=False, init=False, repr=False)
    handed: bool = field(default=False, init=False, repr=False)  # as a policy's input, which its batch then lacks


@dataclass(slots=True)
class FetchedBatch:
    """A batch, in the order of the request: a sequence of its items, failed ones included.

    `payloads` are those that arrived. `consume(batch)` returns the ones to train on.
    """

    items: Sequence[FetchedItem]
    rounds: int = 0
    seconds: float = 0.0
    reported: bool = field(default=False, repr=False)  # the queue knows what failed
    arrived: bool = field(default=False, repr=False)  # with ack="on_arrival": queue and rings know what arrived
    consumed: bool = field(default=False, repr=False)
    in_question: list[FetchedItem] = field(default_factory=list, repr=False)  # `consume(batch)` again asks for them

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[FetchedItem]:
        return iter(self.items)

    @overload
    def __getitem__(self, at: int) -> FetchedItem: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[FetchedItem]: ...

    def __getitem__(self, at: int | slice) -> FetchedItem | Sequence[FetchedItem]:
        return self.items[at]

    @property
    def payloads(self) -> list[ReceivedPayload]:
        """The payloads that arrived."""
        return [item.payload for item in self.items if item.payload is not None]

    @property
    def failures(self) -> list[FetchedItem]:
        """The items that failed, each with its error."""
        return [item for item in self.items if item.error is not None]

    @property
    def bytes(self) -> int:
        """Payload bytes that arrived."""
        return sum(payload.nbytes for payload in self.payloads)

    def release(self) -> None:
        """Drop every payload without acknowledging what is not acknowledged."""
        for payload in self.payloads:
            payload.release()


def item_of_no_batch(ticket: Ticket, claim: Claim | None) -> FetchedItem:
    """What `get_policy_input` reads by itself."""
    item = FetchedItem(ticket, claim)
    item.alone = True
    return item
