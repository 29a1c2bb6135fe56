"""The state of `UCXXDataPackerMixin` between setup and cleanup: client, loop, claims, collected batches.

Belongs to the trainer's thread, except where a coroutine of the mixin runs on the session's own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal, TypeVar

from transport.claims.rings import FoundRings
from transport.client.client import UCXXClient, WirePolicy
from transport.client.connections.acknowledgements import Identity
from transport.client.payload import ClientStatistics, ReceivedPayload
from transport.client.retry import Deadline, Retry
from transport.errors import RankError, TicketError, TransportError, UsageError
from transport.observe.metrics import Exporter
from transport.observe.statistics import PackerStatistics
from transport.packer.claims import ClaimBook
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.options import ClientOptions
from transport.packer.prefetch import FetchedBatch, FetchedItem, Prefetch
from transport.packer.warming import warm_up
from transport.queue.base import Claim, TicketQueue
from transport.runtime import hurry
from transport.runtime.arguments import several
from transport.runtime.loop_thread import Job, LoopThread
from transport.runtime.progress import Progress, bar, silent
from transport.schema import Schema
from transport.settings import Settings
from transport.store.directory import Directory
from transport.ticket import Ticket

T = TypeVar("T")

TicketLike = Ticket | Claim | bytes | str
Delivery = tuple[str, int, int, int]  # a payload's id, and a rank
Fetcher = Callable[[Sequence[TicketLike], Deadline], Coroutine[Any, Any, FetchedBatch]]


class PackerSession:
    """The state of a mixin between setup and cleanup.

    Args:
        fetch: fetches a batch.
        own_queue: the queue was made for this session, and is closed with it.
        joined: payloads that name parents come with them.
        shown: draws the progress; ended with the session.
    """

    def __init__(
        self,
        client: UCXXClient,
        thread: LoopThread,
        settings: Settings,
        rank: int | str,
        claims: ClaimBook,
        record: ConsumedRecord,
        progress: Progress,
        shown: contextlib.ExitStack,
        fetch: Fetcher,
        queue: TicketQueue,
        own_queue: bool = False,
        joined: bool = False,
    ) -> None:
        self.client = client
        self.thread = thread
        self.settings = settings
        self.rank = rank
        self.claims = claims
        self.record = record
        self.progress = progress
        self.queue = queue
        self.own_queue = own_queue
        self.joined = joined
        self._shown = shown
        self.prefetch: Prefetch[Sequence[TicketLike]] = Prefetch(
            lambda items: Job(thread, lambda: fetch(items, Deadline.after(settings.batch_deadline_s, time.monotonic())))
        )
        self.latest: FetchedBatch | None = None  # collected and not consumed; for `get_policy_input`
        # Collected, and consumed, for as long as the trainer holds them.
        self.collected: weakref.WeakValueDictionary[Identity, FetchedItem] = weakref.WeakValueDictionary()
        self.trained: weakref.WeakValueDictionary[Identity, ReceivedPayload] = weakref.WeakValueDictionary()
        self.alone: FetchedItem | None = None  # of no batch; `get_policy_input` has not returned it yet
        # Neither consumed nor abandoned, in order. Weak: an item that is dropped gives up its claim, and comes again.
        self._accepted: weakref.WeakValueDictionary[Delivery, FetchedItem] = weakref.WeakValueDictionary()
        self.renewer = thread.submit(claims.keep_leases())
        self.warming: Job[None] | None = None
        self.batches = 0
        self.consumed = 0
        self.metrics_port: int | None = None

    def show(self, exporter: Exporter | None, name: str) -> None:
        """Have these metrics, and those of its queue, in an exporter that ends with the session."""
        if exporter is None:
            return
        self._shown.callback(exporter.close)
        exporter.add_packer(name, self.statistics)
        exporter.add_queue(self.queue.name, self.queue)
        self.metrics_port = exporter.port

    def warm_up(self, directory: Directory | None) -> None:
        """Connect in the background to the rings that the directory knows of."""
        self.warming = self.thread.submit(warm_up(self.client, directory))

    def item(self, each: TicketLike) -> FetchedItem:
        """The item to fetch for a ticket or claim, marked as duplicate if it is the last consumed of its slot."""
        ticket, claim = resolved(each)
        ring, slot, generation = ticket.origin
        item = FetchedItem(ticket, claim)
        item.duplicate = self.record.is_last(ring, slot, generation, self.rank_of(item))
        return item

    def batch_of(self, items: Iterable[TicketLike]) -> FetchedBatch:
        """The items to fetch. A claim whose ticket cannot be decoded fails alone; other tickets raise TicketError."""
        fetched, undecodable = [], []
        for each in items:
            try:
                fetched.append(self.item(each))
            except TicketError as error:
                if not isinstance(each, Claim):
                    raise
                undecodable.append((each, error.with_traceback(None)))
        return FetchedBatch(fetched, undecodable)

    def rank_of(self, item: FetchedItem) -> int:
        """This trainer's rank among the item's readers. RankError: it has a name, which only claims have a rank for."""
        if isinstance(self.rank, int):
            return self.rank
        if item.claim is None:
            raise RankError(
                f"payload {item.ticket.name} came as a ticket, and this trainer's rank is {self.rank!r}: give its "
                "claim, or set the trainer up with the number that the ring's rank_of() has for the name"
            )
        return item.claim.rank

    def fetchable(self, items: Iterable[TicketLike], call: str) -> list[TicketLike]:
        """The tickets or claims to fetch. RankError for a ticket without a rank."""
        found = several(items, f"{call}()")
        if isinstance(self.rank, str):  # before anything is fetched: the claims stay the caller's
            for each in found:
                if not isinstance(each, Claim):
                    self.rank_of(FetchedItem(*resolved(each)))
        return found

    async def retried(self, call: Callable[[float], Awaitable[T]], deadline: Deadline, calls: int | None = None) -> T:
        """Layer 2: fresh calls for one ticket, given the seconds left. Errors that are not retryable end it.

        calls: at most; None: as many as the settings say.
        """
        plan = Retry(self.settings.calls_per_ticket if calls is None else calls, deadline, self.settings, random.random)
        while True:
            try:
                return await call(deadline.remaining(time.monotonic()))
            except TransportError as error:
                pause_s = plan.failed(_bare(error), time.monotonic())
            await asyncio.sleep(pause_s)

    def take_in(self, item: FetchedItem) -> bool:
        """The item gets the payload that came with its claim. False: none did, it is to be read."""
        came = None if item.duplicate or item.claim is None else self.queue.payload_bytes(item.claim)
        if came is not None:
            item.came(self.client.hand_in(item.ticket, self.rank_of(item), came.wire, came.data))
        return came is not None

    def settle(self, items: Sequence[FetchedItem]) -> tuple[list[ReceivedPayload], list[FetchedItem]]:
        """Consume: first the queue, then the record, then the rings, and with them the parts of joined payloads, which
        are whose the claim is. It ends nothing that another item has accepted.

        That comes again when its claim ends with its item: as a duplicate, or to be trained on if the other was
        abandoned. Returns the payloads to train on, and the items whose ring has not answered; asked again with the
        same items, a call returns the same.
        """
        taken = dict(self._accepted.items())
        if taken:
            items = [item for item in items if taken.get(self._delivery(item), item) is item]
        accepted, unsure = self.claims.settle(items)
        # What is unsure, too: later payloads of its slots may be recorded before it.
        self.consumed += self._judge([*accepted, *unsure])
        trainable = []
        for item in accepted:
            assert item.payload is not None
            self.record.accept(*self._delivery(item))
            if item.fresh:
                item.trainable = True
                trainable.append(item.payload)
                self.trained[item.ticket.identity] = item.payload
            item.payload.ack()
        return trainable, unsure

    def report(self, batch: FetchedBatch) -> None:
        """Report failures and duplicates of a fetched batch, and end what is not read any more. Once; any thread."""
        if batch.reported:
            return
        for item in batch.items:
            if item.over:
                self._end_parts(item)
        self.claims.report(batch)
        for item in batch.items:
            if item.over and item.error is None:  # a duplicate, whose ring may not have its acknowledgement yet
                self.client.ack(item.ticket, self.rank_of(item))

    def _end_parts(self, item: FetchedItem) -> None:
        """Before the payload itself: who is killed in between leaves one that comes again, and leads to its parts."""
        for part in item.parts:
            part.ack(self.client)

    def accept(self, items: Sequence[FetchedItem]) -> list[ReceivedPayload]:
        """The payloads to train on before they are consumed. Asked again, it returns the same."""
        self._judge(items)
        fresh = [item for item in items if item.fresh]
        for item in fresh:
            self._accepted[self._delivery(item)] = item
        return [item.payload for item in fresh if item.payload is not None]

    def learned(self, items: Sequence[FetchedItem]) -> None:
        """Record what was accepted of a batch that is consumed, also where another trainer has its claim by now."""
        for item in items if self._accepted else ():
            if self._accepted.get(delivery := self._delivery(item)) is item:
                self.record.accept(*delivery)
                del self._accepted[delivery]
                self.consumed += 1

    def unlearned(self, items: Sequence[FetchedItem]) -> None:
        """What was accepted of these comes again, and is trained on then."""
        for item in items if self._accepted else ():
            if self._accepted.get(delivery := self._delivery(item)) is item:
                del self._accepted[delivery]

    def record_with_accepted(self) -> ConsumedRecord:
        """A copy of the record, with what was accepted and is not consumed yet."""
        record = self.record.copy()
        for delivery in self._accepted:
            record.accept(*delivery)
        return record

    def _delivery(self, item: FetchedItem) -> Delivery:
        return (*item.ticket.origin, self.rank_of(item))

    def _judge(self, items: Sequence[FetchedItem]) -> int:
        """Decide, once for each item, whether it is to be trained on; later for what another item has accepted.

        For how many that is so now.
        """
        seen: set[Delivery] = set()
        taken, fresh = dict(self._accepted.items()), 0
        for item in items:
            delivery = self._delivery(item)
            if item.fresh is None and taken.get(delivery, item) is item:
                item.fresh = delivery not in seen and not self.record.contains(*delivery)
                self.claims.counts["duplicates"] += not item.fresh
                fresh += item.fresh
            seen.add(delivery)
        return fresh

    def collect(self, timeout_s: float | None) -> FetchedBatch | None:
        """The prefetched batch; None: nothing was started. TimeoutError: it is not complete."""
        if not self.prefetch.items:
            return None
        if not self.prefetch.wait(timeout_s):
            raise TimeoutError(
                f"batch not complete after {timeout_s} s; fetching continues, call collect_prefetch() again"
            )
        return self.prefetch.collect(self._keep)

    def _keep(self, batch: FetchedBatch) -> None:
        self.batches += 1
        self.latest = batch
        self.collected.update((item.ticket.identity, item) for item in batch.items if item.payload is not None)

    def forget(self, batch: FetchedBatch) -> None:
        """`get_policy_input` does not look in this batch any more."""
        for item in batch.items:
            self.collected.pop(item.ticket.identity, None)
        if self.latest is batch:
            self.latest = None

    def cancel(self) -> None:
        """Stop fetching. On return no fetch runs, and its claims are back in the queue."""
        self.prefetch.stop()
        claims = [each for items in self.prefetch.items for each in items if isinstance(each, Claim)]
        try:
            self.claims.give_back(claims, "the fetch was cancelled")
        except Exception:
            self.prefetch.clear()
            raise
        self.prefetch.clear()

    def close(self) -> None:
        """Stop fetching, give every claim back, close the client and the loop. Every step runs, even if others fail.

        Idempotent; after an interrupt the next call runs the remaining steps.
        """
        with hurry.while_ending(), contextlib.ExitStack() as stack:
            stack.callback(self._shown.close)
            stack.callback(self.thread.close)  # and with it the client
            stack.callback(self._leave_queue)
            stack.callback(lambda: self.claims.give_back(self.claims.in_hand, "the trainer stopped"))
            stack.callback(self.renewer.cancel)
            stack.callback(self.cancel)
            if self.warming is not None:
                stack.callback(self.warming.end)

    def _leave_queue(self) -> None:
        self.queue.disconnect(self.client)
        if self.own_queue:
            self.queue.close()

    def statistics(self) -> PackerStatistics:
        """Counters at this moment."""
        client = self.thread.run(_statistics(self.client))
        return PackerStatistics(batches=self.batches, consumed=self.consumed, **self.claims.counts, client=client)


def open_session(
    queue: TicketQueue | None,
    schemas: Sequence[Schema],
    wire: WirePolicy,
    options: ClientOptions,
    settings: Settings,
    *,
    claims: Callable[[TicketQueue], ClaimBook],
    record: ConsumedRecord,
    rank: int | str,
    progress: Progress | Literal["bar"] | None,
    fetch: Fetcher,
    joined: bool = False,
    parents: Sequence[Schema] = (),
) -> PackerSession:
    """Loop, client, and the queue (None: of the rings of this host): all of them, or none where one cannot be had.

    Args:
        schemas: of what is claimed; parents: of what the client reads besides.
    """
    with contextlib.ExitStack() as undo:
        thread = LoopThread("transport data packer")
        undo.callback(thread.close)
        client = thread.run(_make_client(thread, [*schemas, *parents], wire, settings, options))
        own = queue is None
        if queue is None:
            queue = undo.enter_context(FoundRings())
        undo.callback(queue.disconnect, client)
        queue = queue.connect(thread, client, schemas)
        shown = undo.enter_context(contextlib.ExitStack())
        show = shown.enter_context(bar("payloads")) if progress == "bar" else progress or silent
        book = claims(queue)
        session = PackerSession(
            client, thread, settings, rank, book, record, show, shown, fetch, queue, own_queue=own, joined=joined
        )
        undo.pop_all()
    return session


async def _make_client(
    thread: LoopThread,
    schemas: Sequence[Schema],
    wire: WirePolicy,
    settings: Settings,
    options: ClientOptions,
) -> UCXXClient:
    """The session's client. Always ack="manual": the packer acknowledges to the queue before the ring."""
    client = UCXXClient(
        schemas=schemas,
        wire=wire,
        ack="manual",
        settings=settings,
        secret=options.secret,
        device=options.device,
        device_receive=options.device_receive,
        directory=options.directory,
        trace=options.trace,
    )
    thread.closes(client.close)
    return client


async def _statistics(client: UCXXClient) -> ClientStatistics:
    return client.statistics()


def _bare(error: TransportError) -> TransportError:
    """The error as a value: frames of its traceback, and of its cause's, would keep the payloads alive."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def check_queue(queue: object) -> None:
    """UsageError for a queue's URL."""
    if isinstance(queue, str):
        raise UsageError("queue: give a queue; open_queue(URL) opens one")


def resolved(item: TicketLike) -> tuple[Ticket, Claim | None]:
    """The ticket, and the claim it came with."""
    if isinstance(item, Ticket):
        return item, None
    if isinstance(item, Claim):
        return Ticket.decode(item.data), item
    return Ticket.parse(item), None
