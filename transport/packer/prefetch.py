"""Double buffering: one batch is fetched in the background, one may be deferred until that one is collected.

The two batches are the state. Each call changes it in its last statement, after what it started on the loop; so a call
that an interrupt (Ctrl-C) ended can be repeated, and has what the first one would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar, overload

from transport.client.payload import Payload
from transport.errors import SchemaError, TransportError, UsageError
from transport.runtime.loop_thread import Job
from transport.ticket import Ticket

B = TypeVar("B")


class Fetch(NamedTuple, Generic[B]):
    """Items to be fetched, and the job that does it, which may not have begun."""

    items: B
    job: Job[FetchedBatch]


class Prefetch(Generic[B]):
    """The batch that is fetched, and the deferred one. Belongs to the trainer's thread.

    A batch that is deferred while another is fetched or not collected starts when that one is collected. A second
    deferral is refused, because memory would not be bounded.

    Args:
        job: makes the job that fetches a batch.
    """

    def __init__(self, job: Callable[[B], Job[FetchedBatch]]) -> None:
        self._job = job
        self._current: Fetch[B] | None = None
        self._deferred: Fetch[B] | None = None

    def __repr__(self) -> str:
        state = "idle" if self._current is None else "ready" if self._current.job.done() else "fetching"
        return f"<Prefetch {state}{', one deferred' if self._deferred is not None else ''}>"

    @property
    def items(self) -> list[B]:
        """Items that are being fetched, and those deferred."""
        return [fetch.items for fetch in (self._current, self._deferred) if fetch is not None]

    def start(self, items: B) -> None:
        """Fetch ``items`` now. Raises UsageError while another batch is fetched or not collected."""
        if self._current is not None:
            raise UsageError(
                "the previous batch is not collected: call collect_prefetch() first, or defer_prefetch() for this one"
            )
        self._current = Fetch(items, self._job(items))
        self._current.job.start()

    def defer(self, items: B) -> None:
        """Fetch ``items`` when the previous batch is collected; now if there is none."""
        if self._current is None:
            self.start(items)
        elif self._deferred is not None:
            raise UsageError("another batch is already deferred: call collect_prefetch() first")
        else:
            self._deferred = Fetch(items, self._job(items))

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the batch is complete, failures included; False after the time, or if nothing is fetched."""
        if self._current is None:
            return False
        self._current.job.start()  # it has not begun where an interrupt ended `start`
        return self._current.job.wait(timeout_s)

    def collect(self, keep: Callable[[FetchedBatch], None]) -> FetchedBatch:
        """Return the complete batch, behind ``keep`` of it; the deferred one starts. Raises what fetching raised."""
        assert self._current is not None and self._current.job.outcome is not None
        batch, error = self._current.job.outcome
        if self._deferred is not None:
            self._deferred.job.start()
        if batch is not None:
            keep(batch)
        self._current, self._deferred = self._deferred, None
        if error is not None:
            raise error
        assert batch is not None
        return batch

    def stop(self) -> None:
        """End fetching: on return no job runs. The batches stay until `clear`."""
        for fetch in (self._current, self._deferred):
            if fetch is not None:
                fetch.job.end()

    def clear(self) -> None:
        """Forget both batches."""
        self._current = self._deferred = None


# --- what a batch becomes -----------------------------------------------------------------------------
@dataclass(slots=True, weakref_slot=True)
class FetchedItem:
    """One ticket of a batch, with its payload or its error."""

    ticket: Ticket
    payload: Payload | None = None
    error: TransportError | None = None
    duplicate: bool = False  # already consumed here, so not fetched
    trainable: bool | None = field(default=None, init=False, repr=False)  # consumed for the first time; None: not yet
    handed: bool = field(default=False, init=False, repr=False)  # as a policy's input, which its batch then lacks

    def came(self, payload: Payload) -> None:
        """Take the payload in; one that this trainer cannot describe is an error, since it cannot be trained on."""
        if why := payload.undescribed:
            self.error = SchemaError(f"{why}; it is not consumed")
        else:
            self.payload, self.error = payload, None


@dataclass(slots=True)
class FetchedBatch(Sequence[FetchedItem]):
    """A batch, in the order of the request: a sequence of its items, failed ones included.

    `payloads` are those that arrived. `consume(batch)` returns the ones to train on; `trainable` keeps them.
    """

    items: Sequence[FetchedItem]
    rounds: int = 0
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, at: int) -> FetchedItem: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[FetchedItem]: ...

    def __getitem__(self, at: int | slice) -> FetchedItem | Sequence[FetchedItem]:
        return self.items[at]

    @property
    def payloads(self) -> list[Payload]:
        """The payloads that arrived."""
        return [item.payload for item in self.items if item.payload is not None]

    @property
    def trainable(self) -> list[Payload]:
        """All that `consume` of this batch has returned, also where an interrupt took the result from its caller."""
        return [item.payload for item in self.items if item.payload is not None and item.trainable and not item.handed]

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
