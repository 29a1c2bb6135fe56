"""UCXXDataPackerMixin: a trainer's data packer reads payloads by ticket, prefetched, and trains on each once.

`fetching.py` has the retries of a batch.

Consumption (with a queue): a payload is consumed when `queue.ack` returned True for its claim; only then is its slot
acknowledged and only then may it be trained on. The claims of a killed trainer are claimed again by another one.

The mixin owns one background loop, from `setup_ucxx_packer` to `cleanup_ucxx_packer`. Its public methods block; call
them from the trainer's thread only.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from transport.client.client import WirePolicy
from transport.client.payload import AckMode, ReceivedPayload
from transport.client.retry import Deadline
from transport.config import configuration
from transport.errors import ConnectionLostError, StaleSlotError, TransportError, UsageError
from transport.observe.metrics import configured_exporter
from transport.observe.statistics import PackerStatistics
from transport.packer.claims import ClaimBook
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.fetching import Fetching
from transport.packer.joining import join_one
from transport.packer.options import ClientOptions, check_options
from transport.packer.prefetch import FetchedBatch, FetchedItem, item_of_no_batch
from transport.packer.session import PackerSession, TicketLike, check_shared, open_session, resolved
from transport.packer.with_block import WithBlock
from transport.queue.base import Claim, TicketQueue
from transport.ring.consumers import check_consumer
from transport.runtime.arguments import expect, several, text, waiting, whole
from transport.runtime.explaining import explained
from transport.runtime.progress import Progress
from transport.schema import Schema
from transport.settings import _MAX_FETCH_ROUNDS, Settings
from transport.ticket import Ticket

__all__ = ["_MAX_FETCH_ROUNDS", "FetchedBatch", "FetchedItem", "PackerStatistics", "UCXXDataPackerMixin"]

log = logging.getLogger(__name__)

_CLIENT = ClientOptions()  # what setup_ucxx_packer() takes where nothing is said
_BATCH = "the batch that collect_prefetch() returned"


class UCXXDataPackerMixin(Fetching, WithBlock):
    """Mix into a data packer, before its base class; `get_policy_input` then also takes tickets.

    `Trainer` is one by itself. A ``with`` cleans up at its end.
    """

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

    # --- claiming and consuming -------------------------------------------------------------------------
    def claim_tickets(self, n: int, timeout_s: float = 0.0, *, policy_version: int | None = None) -> list[Claim]:
        """Up to ``n`` claims for this rank, renewed until consumed or failed; waits ``timeout_s`` for the first.

        policy_version: the version in training; required with ``max_policy_age``.
        """
        return self._packer.claims.claim(n, timeout_s, policy_version)

    def consume(self, batch: FetchedBatch) -> list[ReceivedPayload]:
        """Acknowledge a batch, first to the queue, then to the rings; returns the payloads to train on, each once.

        Failed payloads, duplicates, and payloads whose claim another trainer has are not returned. Those whose ring
        went out of reach just then are in ``batch.in_question``: `consume` the batch again later, and it returns those
        that the ring had accepted. They are lost otherwise.
        """
        packer = self._packer
        expect(batch, FetchedBatch, "consume()", _BATCH)
        again = batch.consumed
        if again and not batch.in_question:
            raise UsageError("this batch was already consumed")
        if not again:
            packer.claims.report(batch)
            packer.claims.report_arrivals(batch)
        first = [item for item in batch.items if item.payload is not None and not item.handed]
        before, items = batch.in_question, batch.in_question if again else first
        trainable = packer.settle(items)
        try:
            batch.in_question = packer.claims.in_question(items)
            batch.consumed = True  # last, so that a call that raised can be repeated
            return trainable
        except BaseException:  # an interrupt: the repeated call returns them
            batch.in_question, batch.consumed = before, again
            raise

    def abandon(self, batch: FetchedBatch, reason: str = "abandoned by the trainer") -> None:
        """Give up a collected batch: payloads remain in their rings, and other trainers can claim them."""
        packer = self._packer
        expect(batch, FetchedBatch, "abandon()", _BATCH)
        text(reason, "reason of abandon()")  # before anything is given up
        batch.consumed, batch.in_question = True, []
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

        Raises StaleSlotError if the payload was already consumed, or another trainer has claimed it;
        ConnectionLostError if its ring is out of reach: the repeated call asks again.
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
        if payload is not None:
            return self.payload_to_policy_input(payload, *arguments, **named)
        fetched = packer.collected.get(ticket.identity)
        try:
            if fetched is None:
                fetched = item_of_no_batch(ticket, claim)
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
            if fetched.alone:
                packer.claims.report_arrivals(FetchedBatch([fetched]))
            consumed = packer.settle([fetched])
            if not consumed and packer.claims.in_question([fetched]):
                packer.collected[ticket.identity] = fetched  # the payload, for the call that is repeated
                raise ConnectionLostError(
                    f"payload {ticket.name}: its ring went out of reach before it said whether this trainer may train "
                    "on it; call get_policy_input() again"
                )
            if not consumed:
                raise StaleSlotError(f"payload {ticket.name} was already consumed, or another trainer has claimed it")
            given = self.payload_to_policy_input(consumed[0], *arguments, **named)
            fetched.handed = True
            return given
        except BaseException as error:
            if fetched is not None and fetched.payload is not None and not isinstance(error, Exception):
                fetched.handed = False
                packer.collected[ticket.identity] = fetched  # an interrupt: the repeated call has it
            raise

    @explained
    def payload_to_policy_input(self, payload: ReceivedPayload, *_: Any, **__: Any) -> Any:
        """The policy's input from a payload; override it. Default: its arrays by name."""
        return dict(payload)

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
