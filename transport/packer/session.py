"""The state of `UCXXDataPackerMixin` between setup and cleanup: client, loop, record, collected batches.

Belongs to the trainer's thread, except where a coroutine of the mixin runs on the session's own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from transport.client.blocking import statistics_of
from transport.client.client import UCXXClient, WirePolicy
from transport.client.retry import Deadline, Retry
from transport.config import Configuration
from transport.errors import StaleSlotError, TransportError, bare
from transport.observe.metrics import Exporter
from transport.observe.statistics import PackerStatistics
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.options import ClientOptions
from transport.packer.prefetch import FetchedBatch, FetchedItem, Prefetch
from transport.packer.warming import warm_up
from transport.runtime import hurry
from transport.runtime.loop_thread import Job, LoopThread
from transport.runtime.progress import Progress, bar, silent
from transport.schema import Schema
from transport.settings import Settings
from transport.store.directory import Directory
from transport.ticket import Identity, Ticket

log = logging.getLogger(__name__)

T = TypeVar("T")
Fetcher = Callable[[Sequence[Ticket], Deadline], Coroutine[Any, Any, FetchedBatch]]


class PackerSession:
    """The state of a mixin between setup and cleanup.

    Args:
        fetch: fetches a batch.
        shown: draws the progress; ended with the session.

    Attributes:
        collected: items that were collected, or read alone, for as long as the trainer holds them.
        alone: the item of no batch whose input `get_policy_input` has not returned yet.
    """

    def __init__(
        self,
        client: UCXXClient,
        thread: LoopThread,
        settings: Settings,
        rank: int,
        record: ConsumedRecord,
        progress: Progress,
        shown: contextlib.ExitStack,
        fetch: Fetcher,
    ) -> None:
        self.client = client
        self.thread = thread
        self.settings = settings
        self.rank = rank
        self.record = record
        self.progress = progress
        self._shown = shown
        self.prefetch: Prefetch[Sequence[Ticket]] = Prefetch(
            lambda items: Job(thread, lambda: fetch(items, Deadline.after(settings.batch_deadline_s, time.monotonic())))
        )
        self.collected: weakref.WeakValueDictionary[Identity, FetchedItem] = weakref.WeakValueDictionary()
        self.alone: FetchedItem | None = None
        self.warming: Job[None] | None = None
        self.counts = dict.fromkeys(("batches", "consumed", "duplicates", "failed", "stale", "lost_claims"), 0)
        self.metrics_port: int | None = None

    def show(self, exporter: Exporter | None, name: str) -> None:
        """Have these metrics in an exporter that ends with the session."""
        if exporter is None:
            return
        self._shown.callback(exporter.close)
        exporter.add_packer(name, self.statistics)
        self.metrics_port = exporter.port

    def warm_up(self, directory: Directory | None) -> None:
        """Connect in the background to the rings that the directory knows of."""
        self.warming = self.thread.submit(warm_up(self.client, directory))

    def item(self, ticket: Ticket) -> FetchedItem:
        """Return the item to fetch for a ticket, marked as duplicate if it is the last consumed of its slot."""
        return FetchedItem(ticket, duplicate=self.record.is_last(*ticket.origin, self.rank))

    async def retried(self, call: Callable[[float], Awaitable[T]], deadline: Deadline, calls: int) -> T:
        """Layer 2: fresh calls for one ticket, given the seconds left. Errors that are not retryable end it."""
        plan = Retry(calls, deadline, self.settings, random.random)
        while True:
            try:
                return await call(deadline.remaining(time.monotonic()))
            except TransportError as error:
                pause_s = plan.failed(bare(error), time.monotonic())
            await asyncio.sleep(pause_s)

    def count(self, batch: FetchedBatch) -> None:
        """Count and log the failures of a fetched batch, and acknowledge its duplicates again. Called on the loop."""
        for item in batch.items:
            if item.duplicate:  # its ring may not have its acknowledgement yet
                self.counts["duplicates"] += 1
                self.client.ack(item.ticket, self.rank)
            if item.error is not None:
                self.counts["failed"] += 1
                self.counts["stale"] += isinstance(item.error, StaleSlotError)
                kind, said = type(item.error).__name__, str(item.error)  # a record that is kept would keep its frames
                log.warning("payload %s was not read: %s: %s", item.ticket.name, kind, said)

    def consume(self, item: FetchedItem) -> None:
        """Acknowledge the item's payload, and decide once whether it is to be trained on. May be repeated."""
        if item.payload is None:
            return
        delivery = (*item.ticket.origin, self.rank)
        if item.trainable is None:
            fresh = not self.record.contains(*delivery)
            accepted = item.payload.acknowledged or item.payload.ack()
            item.trainable = fresh and accepted
            self.counts["consumed"] += item.trainable
            self.counts["duplicates"] += not fresh
            self.counts["lost_claims"] += not accepted
        if item.trainable:
            self.record.accept(*delivery)

    def collect(self, timeout_s: float | None) -> FetchedBatch | None:
        """Return the prefetched batch; None: nothing was started. TimeoutError: it is not complete."""
        if not self.prefetch.items:
            return None
        if not self.prefetch.wait(timeout_s):
            raise TimeoutError(
                f"batch not complete after {timeout_s} s; fetching continues, call collect_prefetch() again"
            )
        return self.prefetch.collect(self._keep)

    def _keep(self, batch: FetchedBatch) -> None:
        self.counts["batches"] += 1
        self.collected.update((item.ticket.identity, item) for item in batch.items if item.payload is not None)

    def cancel(self) -> None:
        """Stop fetching. On return no fetch runs."""
        self.prefetch.stop()
        self.prefetch.clear()

    def close(self) -> None:
        """Stop fetching, close the client and the loop. Every step runs, even if others fail.

        Idempotent; after an interrupt the next call runs the remaining steps.
        """
        with hurry.while_ending(), contextlib.ExitStack() as stack:
            stack.callback(self._shown.close)
            stack.callback(self.thread.close)  # and with it the client
            stack.callback(self.cancel)
            if self.warming is not None:
                stack.callback(self.warming.end)

    def statistics(self) -> PackerStatistics:
        """Return the counters of this moment."""
        return PackerStatistics(returned=0, **self.counts, client=statistics_of(self.thread, self.client))


def open_session(
    schemas: Sequence[Schema],
    wire: WirePolicy,
    options: ClientOptions,
    *,
    settings: Settings,
    record: ConsumedRecord,
    rank: int,
    progress: Progress | Literal["bar"] | None,
    fetch: Fetcher,
) -> PackerSession:
    """Open loop and client: both, or none where one cannot be had."""
    with contextlib.ExitStack() as undo:
        thread = LoopThread("transport data packer")
        undo.callback(thread.close)
        client = thread.run(make_client(thread, schemas, wire, settings, options))
        shown = undo.enter_context(contextlib.ExitStack())
        show = shown.enter_context(bar("payloads")) if progress == "bar" else progress or silent
        session = PackerSession(client, thread, settings, rank, record, show, shown, fetch)
        undo.pop_all()
    return session


def completed(options: ClientOptions, operator: Configuration) -> tuple[ClientOptions, Settings, str]:
    """Return the options with the operator's secret where they have none, and the settings and the name to use."""
    if options.secret is None:
        options = msgspec.structs.replace(options, secret=operator.secret())
    settings = operator.settings if options.settings is None else options.settings
    return options, settings, options.name or f"{socket.gethostname()}:{os.getpid()}"


async def make_client(
    thread: LoopThread,
    schemas: Sequence[Schema],
    wire: WirePolicy,
    settings: Settings,
    options: ClientOptions,
) -> UCXXClient:
    """Make the client of a session or a `Trainer`, closed with its thread. What is used is acknowledged by hand."""
    client = UCXXClient(
        schemas=schemas,
        wire=wire,
        ack="manual",
        settings=settings,
        secret=options.secret,
        device=options.device,
        device_receive=options.device_receive,
        directory=options.directory,
    )
    thread.closes(client.close)
    return client
