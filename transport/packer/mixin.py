"""UCXXDataPackerMixin: a trainer's data packer reads payloads by ticket, prefetched, and trains on each once.

Three layers of retry share one deadline:

    layer 3  `_ucxx_dp_fetch_all`   rounds over the batch, for retryable failures         rounds_per_batch
    layer 2    `_read_one`            fresh calls for one ticket                            calls_per_ticket
    layer 1      `UCXXClient.read`      rotation over the ring's ports                        attempts_per_read

Consumption (with a queue): a payload is consumed when `queue.ack` returned True for its claim; only then is its slot
acknowledged and only then may it be trained on. The claims of a killed trainer are claimed again by another one.

The mixin owns one background loop, from `setup_ucxx_packer` to `cleanup_ucxx_packer`. Its public methods block; call
them from the trainer's thread only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import random
import socket
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from transport.client.client import WirePolicy
from transport.client.payload import AckMode, ReceivedPayload
from transport.client.retry import Deadline, GiveUp, Retry, Try, Wait, backoff
from transport.config import configuration
from transport.errors import (
    AuthenticationError,
    ClosedError,
    MissingDependencyError,
    StaleSlotError,
    TransportError,
    UsageError,
    VersionMismatchError,
    WireNotAllowedError,
)
from transport.observe.metrics import configured_exporter
from transport.observe.statistics import PackerStatistics
from transport.packer.claims import ClaimBook
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.joining import join_all, join_one
from transport.packer.options import ClientOptions, check_options
from transport.packer.prefetch import FetchedBatch, FetchedItem
from transport.packer.session import PackerSession, TicketLike, check_shared, open_session, resolved
from transport.packer.with_block import WithBlock
from transport.queue.base import Claim, TicketQueue
from transport.ring.consumers import check_consumer
from transport.runtime.arguments import expect, several, waiting, whole
from transport.runtime.explaining import explained
from transport.runtime.progress import Progress
from transport.schema import Schema
from transport.settings import _MAX_FETCH_ROUNDS, Settings
from transport.ticket import Ticket

__all__ = ["_MAX_FETCH_ROUNDS", "FetchedBatch", "FetchedItem", "PackerStatistics", "UCXXDataPackerMixin"]

log = logging.getLogger(__name__)

_CLIENT = ClientOptions()  # what setup_ucxx_packer() takes where nothing is said
_BATCH = "the batch that collect_prefetch() returned"
# With these errors no payload can be read until this trainer's configuration is changed.
_OWN_FAULTS = (AuthenticationError, MissingDependencyError, VersionMismatchError, WireNotAllowedError)


class UCXXDataPackerMixin(WithBlock):
    """Mix into a data packer, before its base class; `get_policy_input` then also takes tickets.

    `Trainer` is one by itself. A ``with`` cleans up at its end.
    """

    _ucxx: PackerSession | None = None

    # --- life ---------------------------------------------------------------------------------------
    @explained
    def setup_ucxx_packer(
        self,
        *,
        schemas: Sequence[Schema] = (),
        queue: TicketQueue | None = None,
        rank: int | str = 0,
        consumer: str | None = None,
        ack: AckMode = "on_consumed",
        max_policy_age: int | None = None,
        consumed: ConsumedRecord | None = None,
        progress: Progress | Literal["bar"] | None = None,
        joined: bool = False,
        wire: WirePolicy | None = None,
        client: ClientOptions = _CLIENT,
        settings: Settings | None = None,
    ) -> None:
        """Start the background loop and the client. Called again, it cleans up first.

        Args:
            schemas: schemas of the rings whose tickets do not describe their payloads.
            queue: the queue that claims come from; for a rank of a model-parallel group a `GroupQueue`. None: the rings
                of this host whose writers were given no queue either, as ``open_queue("rings:")``.
            rank: this trainer's rank among the readers of each payload; or the name of a consumer, as the rings have it
                ("reference", "train:2"), where the queue is the rings themselves.
            consumer: name in the queue's reports; default host and process id.
            ack: "on_consumed" (see above); "on_arrival" acknowledges a payload when it is collected, so the payloads
                in the memory of a killed trainer are lost, and the queue reports them.
            max_policy_age: how many versions a claimed payload may be older than the ``policy_version`` given to
                `claim_tickets`; the queue discards and counts older ones.
            consumed: record from a checkpoint, so that a restarted trainer drops the payloads it has trained on.
            progress: called with (payloads done, payloads of the batch, bytes done) while a batch is fetched; "bar"
                draws it on the terminal.
            joined: a payload that names its parents (docs/STAGES.md) comes as a `JoinedPayload` of all parts, which is
                consumed as a whole. ``schemas`` has those of the parents, too.
            client: further choices, for example ``client=ClientOptions(device="torch")``.
            wire, settings: default: the operator's configuration (config.py), which may also turn on metrics.

        Raises:
            ConfigurationError: the operator's configuration is wrong.
        """
        schemas = several(schemas, Schema, "schemas", "several Schemas, in a list")
        rank = check_consumer(rank, "rank") if isinstance(rank, str) else whole(rank, "rank")
        check_options(client=(client, ClientOptions))
        check_shared(queue, client.directory, settings, client.secret)
        if consumed is not None:
            expect(consumed, ConsumedRecord, "consumed", "a ConsumedRecord, as ConsumedRecord.from_bytes() makes it")
        if not isinstance(joined, bool):
            raise UsageError(f"joined={joined!r:.80}: give True or False")
        if ack not in ("on_consumed", "on_arrival"):
            raise UsageError(f"ack={ack!r}: choose 'on_consumed' or 'on_arrival'")
        self.cleanup_ucxx_packer()
        operator = configuration()
        wire = operator.wire_policy if wire is None else wire
        if client.secret is None:
            client = msgspec.structs.replace(client, secret=operator.secret())
        settings = operator.settings if settings is None else settings
        name = consumer or f"{socket.gethostname()}:{os.getpid()}"
        self._ucxx = open_session(
            queue,
            schemas,
            wire,
            client,
            settings,
            claims=lambda queue: ClaimBook(queue, rank, name, ack, settings, max_policy_age),
            record=consumed if consumed is not None else ConsumedRecord(settings),
            rank=rank,
            progress=progress,
            joined=joined,
        )
        try:
            self._ucxx.warm_up(client.directory)
            self._ucxx.show(configured_exporter(operator), name)
        except BaseException:
            self.cleanup_ucxx_packer()
            raise

    def cleanup_ucxx_packer(self) -> None:
        """Stop fetching, give claims back to the queue, close client and loop. Any state; idempotent."""
        packer = self._ucxx
        if packer is not None:
            try:
                packer.close()
            except Exception:  # every step has run; after an interrupt the next call runs the rest
                self._ucxx = None
                raise
            self._ucxx = None

    @property
    def _packer(self) -> PackerSession:
        if self._ucxx is None:
            raise ClosedError("call setup_ucxx_packer() first")
        return self._ucxx

    # --- claiming and consuming -------------------------------------------------------------------------
    def claim_tickets(self, n: int, timeout_s: float = 0.0, *, policy_version: int | None = None) -> list[Claim]:
        """Up to ``n`` claims for this rank, renewed until consumed or failed; waits ``timeout_s`` for the first.

        policy_version: the version in training; required with ``max_policy_age``.
        """
        return self._packer.claims.claim(n, timeout_s, policy_version)

    def consume(self, batch: FetchedBatch) -> list[ReceivedPayload]:
        """Acknowledge a batch, first to the queue, then to the rings; returns the payloads to train on, each once.

        Failed payloads, duplicates, and payloads whose claim another trainer has are not returned. Those of a ring that
        went out of reach just then are in ``batch.in_question``: the ring may have accepted them. Call `consume` with
        the batch again, later, and it returns those that were; or drop the batch, and they are lost.
        """
        packer = self._packer
        expect(batch, FetchedBatch, "consume()", _BATCH)
        again = batch.consumed
        if again and not batch.in_question:
            raise UsageError("this batch was already consumed")
        if not again:
            packer.claims.report(batch)
            packer.claims.report_arrivals(batch)
        items = batch.in_question if again else [item for item in batch.items if item.payload is not None]
        trainable = packer.settle(items, again)
        batch.in_question = packer.claims.in_question(items)
        batch.consumed = True  # last, so that a call that raised can be repeated
        return trainable

    def abandon(self, batch: FetchedBatch, reason: str = "abandoned by the trainer") -> None:
        """Give up a collected batch: payloads remain in their rings, and other trainers can claim them."""
        packer = self._packer
        expect(batch, FetchedBatch, "abandon()", _BATCH)
        batch.consumed = True
        for item in batch.items:
            packer.collected.pop(item.ticket.identity, None)
        batch.release()
        packer.claims.give_back([item.claim for item in batch.items if item.claim is not None], reason)

    # --- prefetch -----------------------------------------------------------------------------------
    @explained
    def start_prefetch(self, items: Sequence[TicketLike]) -> None:
        """Fetch a batch in the background. Raises UsageError if the previous one is not collected."""
        packer = self._packer
        self._start(packer, packer.prefetch.start(packer.fetchable(items, "start_prefetch")))

    @explained
    def defer_prefetch(self, items: Sequence[TicketLike]) -> None:
        """Fetch a batch in the background as soon as the previous one is collected; now if there is none."""
        packer = self._packer
        batch = packer.prefetch.defer(packer.fetchable(items, "defer_prefetch"))
        if batch is not None:
            self._start(packer, batch)

    def _start(self, packer: PackerSession, items: Sequence[TicketLike]) -> None:
        deadline = Deadline.after(packer.settings.batch_deadline_s, time.monotonic())
        packer.fetching = packer.thread.submit(self._ucxx_dp_fetch_all(items, deadline))

    def wait_prefetch(self, timeout: float | None = None) -> bool:
        """Wait until the batch is complete; False after ``timeout`` seconds, or if nothing is being fetched."""
        packer = self._packer
        timeout = waiting(timeout, "timeout of wait_prefetch()")
        if packer.fetching is None:
            return False
        concurrent.futures.wait([packer.fetching], timeout)
        if not packer.fetching.done():
            return False
        packer.prefetch.finished()
        return True

    def collect_prefetch(self, timeout: float | None = None) -> FetchedBatch | None:
        """Wait for the prefetched batch, start the deferred one, and return the batch, failures included.

        None if nothing was started. Raises TimeoutError after ``timeout`` seconds; fetching continues. Raises errors of
        this trainer's configuration that affect all payloads (a wrong secret, a wire that is not allowed, ucxx
        missing); the claims are then back in the queue.
        """
        packer = self._packer
        longest = waiting(timeout, "timeout of collect_prefetch()")
        if packer.fetching is None:
            return None
        fetching = packer.fetching
        concurrent.futures.wait([fetching], longest)
        if not fetching.done():
            raise TimeoutError(
                f"batch not complete after {timeout} s; fetching continues, call collect_prefetch() again"
            )
        packer.fetching = None
        following = packer.prefetch.collected()
        if following is not None:
            self._start(packer, following)
        batch = fetching.result()
        packer.batches += 1
        packer.collected.update((item.ticket.identity, item) for item in batch.items if item.payload is not None)
        try:
            packer.claims.report_arrivals(batch)
        except TransportError as error:  # the payloads are here; `consume` reports again
            log.warning("arrivals were not reported to the queue, consume() retries: %s", error)
        return batch

    def cancel_prefetch(self) -> None:
        """Stop fetching; the claims of the batch and of a deferred one return to the queue."""
        self._packer.cancel()

    # --- the interface of the trainer ---------------------------------------------------------------------
    def get_policy_input(self, item: Any, *arguments: Any, **named: Any) -> Any:
        """The policy's input. A ticket (or claim) is resolved; anything else is passed to the base class.

        A ticket of a collected batch is looked up; one that was not prefetched is read now. This call consumes the
        payload, unless `consume` has already consumed its batch.

        Raises StaleSlotError if the payload was already consumed, or another trainer has claimed it.
        """
        if not isinstance(item, Ticket | Claim) and not (isinstance(item, bytes) and item.startswith(b"TK")):
            of_the_base = getattr(super(), "get_policy_input", None)  # of the packer mixed with
            if of_the_base is None:
                expect(item, (Ticket, Claim, bytes), "get_policy_input()", "a Ticket, a Claim, or a Ticket as bytes")
                raise UsageError("get_policy_input() got bytes that are no ticket: give those of Ticket.encode()")
            return of_the_base(item, *arguments, **named)
        packer = self._packer
        ticket, claim = resolved(item)
        payload = packer.trained.get(ticket.identity)
        if payload is None:
            fetched = packer.collected.get(ticket.identity)
            if fetched is None:
                fetched = FetchedItem(ticket, claim)
                packer.thread.run(_taken_in(packer, fetched))
                deadline = Deadline.after(packer.settings.batch_deadline_s, time.monotonic())
                try:
                    if fetched.payload is None:
                        fetched.payload = packer.thread.run(self._read_one(fetched, deadline))
                    if packer.joined:
                        packer.thread.run(join_one(packer, fetched, deadline))
                        if fetched.error is not None:
                            raise fetched.error
                except TransportError as error:
                    fetched.error = error
                    packer.claims.report(FetchedBatch([fetched]))  # otherwise its claim is renewed for ever
                    raise
            consumed = packer.settle([fetched])
            if not consumed:
                raise StaleSlotError(f"payload {ticket.name} was already consumed, or another trainer has claimed it")
            payload = consumed[0]
        return self.payload_to_policy_input(payload, *arguments, **named)

    @explained
    def payload_to_policy_input(self, payload: ReceivedPayload, *_: Any, **__: Any) -> Any:
        """The policy's input from a payload; override it. Default: its arrays by name."""
        return dict(payload)

    # --- layers 2 and 3 -----------------------------------------------------------------------------------
    async def _read_one(self, item: FetchedItem, deadline: Deadline, calls: int | None = None) -> ReceivedPayload:
        """Layer 2: fresh calls for one ticket. Errors that are not retryable (such as StaleSlotError) end it."""
        packer = self._packer
        ticket, rank = item.ticket, packer.rank_of(item)
        limit = packer.settings.calls_per_ticket if calls is None else calls
        plan = Retry(limit, deadline, packer.settings, random.random)
        while True:
            match plan.step(time.monotonic()):
                case Wait(seconds):
                    await asyncio.sleep(seconds)
                case GiveUp(error):
                    raise error
                case Try():
                    now = time.monotonic()
                    try:
                        return await packer.client.read(ticket, rank=rank, timeout=deadline.remaining(now))
                    except TransportError as error:
                        plan.failed(error, time.monotonic())

    async def _ucxx_dp_fetch_all(self, items: Sequence[TicketLike], deadline: Deadline) -> FetchedBatch:
        """Layer 3: rounds over the batch; each round repeats the retryable failures of the previous one."""
        packer = self._packer
        started = time.monotonic()
        fetched = [packer.item(each) for each in items]
        todo = [item for item in fetched if not item.duplicate and not packer.take_in(item)]
        batch = FetchedBatch(fetched)
        try:
            while todo and batch.rounds < packer.settings.rounds_per_batch:
                if batch.rounds:
                    pause = backoff(batch.rounds, packer.settings, random.random)
                    if deadline.passed(time.monotonic() + pause):
                        break
                    await asyncio.sleep(pause)
                batch.rounds += 1
                await self._round(packer, todo, batch, deadline)
                todo = [item for item in todo if item.payload is None and item.error and item.error.retryable]
            if packer.joined:
                await join_all(packer, fetched, deadline)
            own_fault = next((item.error for item in fetched if isinstance(item.error, _OWN_FAULTS)), None)
            if own_fault is not None:
                raise own_fault
        except BaseException as error:
            batch.release()
            if isinstance(error, Exception):  # after a cancellation the caller cleans up
                claims = [item.claim for item in fetched if item.claim is not None]
                try:
                    await asyncio.to_thread(packer.claims.give_back, claims, f"{type(error).__name__}: {error}")
                except TransportError as second:  # the first error is what the trainer must see
                    log.warning(
                        "%d claims were not given back to the queue; their leases will end: %s", len(claims), second
                    )
            raise
        for item in fetched:
            if item.duplicate:  # the ring may not have its acknowledgement yet
                with contextlib.suppress(TransportError):  # best effort: the batch is complete without it
                    packer.client.ack(item.ticket, packer.rank_of(item))
        batch.seconds = time.monotonic() - started
        if not packer.claims.to_report(batch):
            return batch
        try:
            await asyncio.to_thread(packer.claims.report, batch)
        except TransportError as error:  # the payloads are here; `consume` reports again
            log.warning("failures of a batch were not reported to the queue, consume() retries: %s", error)
        return batch

    async def _round(
        self, packer: PackerSession, todo: list[FetchedItem], batch: FetchedBatch, deadline: Deadline
    ) -> None:
        """One call for every ticket, with small payloads in shared messages; then the remaining calls for failures."""
        by_rank: dict[int, dict[tuple[str, int, int], list[FetchedItem]]] = {}
        for item in todo:
            by_rank.setdefault(packer.rank_of(item), {}).setdefault(item.ticket.identity, []).append(item)
        again: list[FetchedItem] = []
        for rank, by_identity in by_rank.items():  # one, unless rings have different numbers for this trainer's name
            tickets = [items[0].ticket for items in by_identity.values()]
            timeout = deadline.at - time.monotonic()
            outcomes = packer.client.read_many(tickets, rank=rank, timeout=max(timeout, 0.0))
            async with contextlib.aclosing(outcomes):
                async for outcome in outcomes:
                    for item in by_identity[outcome.ticket.identity]:
                        item.payload, item.error = outcome.payload, outcome.error
                        if outcome.error is not None and outcome.error.retryable:
                            again.append(item)
                    packer.progress(len(batch.payloads), len(batch.items), batch.bytes)
        calls = packer.settings.calls_per_ticket - 1
        if calls < 1:
            return
        for item in again:
            try:
                item.payload = await self._read_one(item, deadline, calls)
                item.error = None
            except TransportError as error:
                item.error = error.with_traceback(None)  # its frames would keep payloads of this batch alive
            packer.progress(len(batch.payloads), len(batch.items), batch.bytes)

    def ucxx_statistics(self) -> PackerStatistics:
        """Counters at this moment."""
        return self._packer.statistics()

    @property
    def metrics_port(self) -> int | None:
        """Port of this trainer's metrics; None: ``metrics_port`` is not configured."""
        return self._packer.metrics_port

    def consumed_record(self) -> ConsumedRecord:
        """The record of consumed payloads; store its `to_bytes()` in checkpoints for exactly-once across a restart."""
        return self._packer.record


async def _taken_in(packer: PackerSession, item: FetchedItem) -> None:
    packer.take_in(item)
