"""UCXXDataPackerMixin: a data packer reads payloads by ticket, prefetched, and trains on each once.

with TicketTrainer(schemas=[schema], queue=queue) as trainer:
    trainer.start_prefetch(trainer.claim_tickets(32, timeout_s=5))
    payloads = trainer.consume(trainer.collect_prefetch())

A batch is fetched by calls for each ticket, and rounds over all of them, under one deadline:

layer 3  `_ucxx_dp_fetch_all`       rounds over the batch, for retryable failures   rounds_per_batch
layer 2    `PackerSession.retried`  fresh calls for one ticket                      calls_per_ticket
layer 1      `UCXXClient.read`      rotation over the ring's ports                  attempts_per_read

Consumption (with a queue): a payload is consumed when `queue.ack` returned True for its claim; only then is its slot
acknowledged and only then may it be trained on. The claims of a killed trainer are claimed again by another one.

The mixin owns one background loop, from `setup_ucxx_packer` to `cleanup_ucxx_packer`. Its public methods block; call
them from the trainer's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import socket
import time
from collections.abc import Sequence
from operator import index
from types import TracebackType
from typing import Any, Literal

import msgspec

from transport.client.client import WirePolicy
from transport.client.payload import ReceivedPayload
from transport.client.retry import Deadline, backoff
from transport.config import configuration
from transport.errors import (
    OWN_FAULTS,
    ClosedError,
    ConnectionLostError,
    StaleSlotError,
    TransportError,
    UsageError,
)
from transport.observe.metrics import configured_exporter
from transport.observe.statistics import PackerStatistics
from transport.packer.claims import ClaimBook
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.joining import join_all
from transport.packer.options import ClientOptions
from transport.packer.prefetch import FetchedBatch, FetchedItem
from transport.packer.session import PackerSession, TicketLike, check_queue, open_session, resolved
from transport.packer.with_block import WithBlock
from transport.queue.base import Claim, TicketQueue
from transport.ring.consumers import check_consumer
from transport.runtime.arguments import at_least, waiting
from transport.runtime.progress import Progress
from transport.schema import Schema
from transport.settings import _MAX_FETCH_ROUNDS, Settings
from transport.ticket import Ticket

__all__ = [
    "_MAX_FETCH_ROUNDS",
    "FetchedBatch",
    "FetchedItem",
    "PackerStatistics",
    "TicketTrainer",
    "UCXXDataPackerMixin",
]

log = logging.getLogger(__name__)

_CLIENT = ClientOptions()  # what setup_ucxx_packer() takes where nothing is said


class UCXXDataPackerMixin(WithBlock):
    """Mix into a data packer, before its base class; `get_policy_input` then also takes tickets.

    `TicketTrainer` is one by itself. A ``with`` cleans up at its end.
    """

    _ucxx: PackerSession | None = None
    _expected_rollouts: int | None = None

    @property
    def _packer(self) -> PackerSession:
        if self._ucxx is None:
            raise ClosedError("this trainer is closed, or not set up: make a new one, or call setup_ucxx_packer()")
        return self._ucxx

    # --- life ---------------------------------------------------------------------------------------
    def setup_ucxx_packer(
        self,
        *,
        schemas: Sequence[Schema] = (),
        queue: TicketQueue | None = None,
        rank: int | str = 0,
        consumer: str | None = None,
        max_policy_age: int | None = None,
        consumed: ConsumedRecord | None = None,
        progress: Progress | Literal["bar"] | None = None,
        joined: bool = False,
        parents: Sequence[Schema] = (),
        expected_rollouts: int | None = None,
        wire: WirePolicy | None = None,
        client: ClientOptions = _CLIENT,
        settings: Settings | None = None,
    ) -> None:
        """Start the background loop and the client. Called again, it cleans up first.

        Args:
            schemas: of the payloads to claim, where their tickets do not describe them. A queue that finds the rings
                itself leaves those of other schemas alone; none: it claims any payload. One that nothing describes is
                an error of its item, and not consumed.
            queue: the queue that claims come from; for a rank of a model-parallel group a `GroupQueue`. None: the rings
                of this host whose writers were given no queue either, as ``open_queue("rings:")``.
            rank: this trainer's rank among the readers of each payload; or the name of a consumer, as the rings have it
                ("reference", "train:2"), where the queue is the rings themselves.
            consumer: name in the queue's reports; default host and process id.
            max_policy_age: how many versions a claimed payload may be older than the ``policy_version`` given to
                `claim_tickets`; the queue discards and counts older ones. What was written without a version has no
                age: it is not discarded, and a warning says so.
            consumed: record from a checkpoint, so that a restarted trainer drops the payloads it has trained on.
            progress: called with (payloads done, payloads of the batch, bytes done) while a batch is fetched; "bar"
                draws it on the terminal.
            joined: a payload that names its parents (docs/PAYLOADS.md) is a `JoinedPayload` of all parts, which is
                consumed as a whole.
            parents: schemas of the parents of joined payloads, which are read with these, and not claimed.
            expected_rollouts: how many rollouts have to end before `finished`; None: those that this trainer has seen.
            client: further choices, for example ``client=ClientOptions(device="torch")``.
            wire, settings: default: the operator's configuration (config.py), which may also turn on metrics.

        Raises:
            ConfigurationError: the operator's configuration is wrong.
            UsageError: an argument that makes no sense, as ``parents`` without ``joined``.
        """
        if parents and not joined:
            raise UsageError("parents are schemas of what is read with a payload: give joined=True as well")
        rank = check_consumer(rank, "rank") if isinstance(rank, str) else index(rank)
        check_queue(queue)
        if isinstance(schemas, Schema):
            raise UsageError("schemas is one Schema: give a list, schemas=[schema]")
        if expected_rollouts is not None:
            expected_rollouts = at_least(1, expected_rollouts, "expected_rollouts")
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
            claims=lambda queue: ClaimBook(queue, rank, name, settings, max_policy_age),
            record=consumed if consumed is not None else ConsumedRecord(settings),
            rank=rank,
            progress=progress,
            fetch=self._ucxx_dp_fetch_all,
            joined=joined,
            parents=parents,
        )
        self._expected_rollouts = expected_rollouts
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

    def finished(self) -> bool:
        """Whether no payload comes any more: every rollout has closed cleanly, and every payload is done.

        Ask when `claim_tickets` returned nothing. A killed rollout has not ended; ``expected_rollouts`` counts those
        that did. False for a queue that is not the rings themselves.
        """
        return self._packer.queue.finished(self._expected_rollouts)

    def accept(self, batch: FetchedBatch) -> list[ReceivedPayload]:
        """The payloads of a batch to train on before it is consumed, each once. `consumed_record` has them from now on.

        For checkpoints: accept, learn, store weights and record, and only then `consume`. A trainer that is killed
        before the checkpoint is stored gets the payloads again; one that is killed behind it drops them. `abandon`
        takes them out of the record again, and so does dropping the batch: only for weights that have not learned from
        them.
        """
        if _collected(batch).consumed:
            raise UsageError("this batch was already consumed")
        return self._packer.accept([item for item in batch.items if item.payload is not None])

    def consume(self, batch: FetchedBatch) -> list[ReceivedPayload]:
        """Acknowledge a batch, first to the queue, then to the rings; returns the payloads to train on, each once.

        Failed payloads, duplicates, and payloads whose claim another trainer has are not returned; nor is what another
        batch of this trainer has accepted, which keeps its claim for as long as this batch is held. Those whose ring
        went out of reach just then are in ``batch.in_question``: `consume` the batch again later, and it returns those
        that the ring had accepted. They are lost otherwise. ``batch.trainable`` keeps all that this returned.
        """
        packer = self._packer
        if _collected(batch).consumed and not batch.in_question:
            raise UsageError("this batch was already consumed; its `trainable` is what consume() returned")
        packer.report(batch)
        first = [item for item in batch.items if item.payload is not None and not item.handed]
        trainable, unsure = packer.settle(batch.in_question if batch.consumed else first)
        packer.learned(batch.items)  # also what is in question: the caller has said that it learned from it
        packer.forget(batch)
        batch.in_question, batch.consumed = unsure, True  # last, so that a call that raised can be repeated
        return trainable

    def abandon(self, batch: FetchedBatch, reason: str = "abandoned by the trainer") -> None:
        """Give up a collected batch: payloads remain in their rings, and other trainers can claim them."""
        packer = self._packer
        reason.encode()  # before anything is given up
        packer.unlearned(_collected(batch).items)
        batch.consumed, batch.in_question = True, []
        packer.forget(batch)
        batch.release()
        packer.claims.give_back([item.claim for item in batch.items if item.claim is not None], reason)

    # --- prefetch -----------------------------------------------------------------------------------
    def start_prefetch(self, items: Sequence[TicketLike]) -> None:
        """Fetch a batch in the background. Raises UsageError if the previous one is not collected."""
        packer = self._packer
        packer.prefetch.start(packer.fetchable(items, "start_prefetch"))

    def defer_prefetch(self, items: Sequence[TicketLike]) -> None:
        """Fetch a batch in the background as soon as the previous one is collected; now if there is none."""
        packer = self._packer
        packer.prefetch.defer(packer.fetchable(items, "defer_prefetch"))

    def wait_prefetch(self, timeout: float | None = None) -> bool:
        """Wait until the batch is complete; False after ``timeout`` seconds, or if nothing is being fetched."""
        return self._packer.prefetch.wait(waiting(timeout, "timeout of wait_prefetch()"))

    def collect_prefetch(self, timeout: float | None = None) -> FetchedBatch | None:
        """Wait for the prefetched batch, start the deferred one, and return the batch, failures included.

        None if nothing was started. Raises TimeoutError after ``timeout`` seconds; fetching continues. Raises errors of
        this trainer's configuration that affect all payloads (a wrong secret, a wire that is not allowed, ucxx
        missing); the claims are then back in the queue.
        """
        return self._packer.collect(waiting(timeout, "timeout of collect_prefetch()"))

    def cancel_prefetch(self) -> None:
        """Stop fetching; the claims of the batch and of a deferred one return to the queue."""
        self._packer.cancel()

    async def _ucxx_dp_fetch_all(self, items: Sequence[TicketLike], deadline: Deadline) -> FetchedBatch:
        """Layer 3: rounds over the batch; each round repeats the retryable failures of the previous one."""
        packer = self._packer
        started = time.monotonic()
        batch = packer.batch_of(items)
        fetched = batch.items
        todo = [item for item in fetched if not item.duplicate and not packer.take_in(item)]
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
            own_fault = next((item.error for item in fetched if isinstance(item.error, OWN_FAULTS)), None)
            if own_fault is not None:
                raise own_fault
        except asyncio.CancelledError:
            batch.release()
            raise
        except Exception as error:
            batch.release()
            claims = [item.claim for item in fetched if item.claim is not None]
            try:
                await asyncio.to_thread(packer.claims.give_back, claims, f"{type(error).__name__}: {error}")
            except TransportError as second:  # the first error is what the trainer must see
                log.warning(
                    "%d claims were not given back to the queue; their leases will end: %s", len(claims), second
                )
            raise
        batch.seconds = time.monotonic() - started
        packer.claims.count(batch)
        if not batch.undecodable and all(item.payload is not None for item in fetched):
            return batch
        try:
            await asyncio.to_thread(packer.report, batch)
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
                        if outcome.payload is not None:
                            item.came(outcome.payload)
                        else:
                            item.error = outcome.error
                        if outcome.error is not None and outcome.error.retryable:
                            again.append(item)
                    packer.progress(len(batch.payloads), len(batch.items), batch.bytes)
        calls = packer.settings.calls_per_ticket - 1
        if calls < 1:
            return
        for item in again:
            try:
                item.came(await packer.retried(functools.partial(_read, packer, item), deadline, calls))
            except TransportError as error:
                item.error = error.with_traceback(None)  # its frames would keep payloads of this batch alive
            packer.progress(len(batch.payloads), len(batch.items), batch.bytes)

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
                raise UsageError("get_policy_input(): give a Ticket, a Claim, or the bytes of Ticket.encode()")
            return of_the_base(item, *arguments, **named)
        packer = self._packer
        ticket, claim = resolved(item)
        fetched = packer.collected.get(ticket.identity)
        payload = packer.trained.get(ticket.identity)
        if payload is not None and (fetched is None or fetched.handed):
            return self.payload_to_policy_input(payload, *arguments, **named)
        if fetched is None:
            deadline = Deadline.after(packer.settings.batch_deadline_s, time.monotonic())
            fetched = packer.thread.run(self._ucxx_dp_fetch_all([ticket if claim is None else claim], deadline))[0]
            if fetched.error is not None:
                raise fetched.error
            packer.collected[ticket.identity] = packer.alone = fetched  # for the call that is repeated
        consumed, unsure = packer.settle([fetched] if fetched.payload is not None else [])
        if unsure:
            raise ConnectionLostError(
                f"payload {ticket.name}: its ring went out of reach before it said whether this trainer may train "
                "on it; call get_policy_input() again"
            )
        if not consumed:
            raise StaleSlotError(f"payload {ticket.name} was already consumed, or another trainer has claimed it")
        given = self.payload_to_policy_input(consumed[0], *arguments, **named)
        fetched.handed, packer.alone = True, None
        return given

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
        """What was consumed, and what was accepted and is consumed later: a copy of the record, as it is now.

        Store its `to_bytes()` in checkpoints for exactly-once across a restart.
        """
        return self._packer.record_with_accepted()


def _collected(batch: FetchedBatch) -> FetchedBatch:
    """UsageError for what else a program has at hand: its claims, or the payloads of a batch."""
    if not isinstance(batch, FetchedBatch):
        raise UsageError(f"got a {type(batch).__name__}; give the batch that collect_prefetch() returned")
    return batch


async def _read(packer: PackerSession, item: FetchedItem, timeout_s: float) -> ReceivedPayload:
    return await packer.client.read(item.ticket, rank=packer.rank_of(item), timeout=timeout_s)


class TicketTrainer(UCXXDataPackerMixin):
    """A trainer's data packer that is set up as it is made; `UCXXDataPackerMixin` has its methods.

    Arguments and errors are those of `UCXXDataPackerMixin.setup_ucxx_packer`.
    """

    def __init__(
        self,
        *,
        schemas: Sequence[Schema] = (),
        queue: TicketQueue | None = None,
        rank: int | str = 0,
        consumer: str | None = None,
        max_policy_age: int | None = None,
        consumed: ConsumedRecord | None = None,
        progress: Progress | Literal["bar"] | None = None,
        joined: bool = False,
        parents: Sequence[Schema] = (),
        expected_rollouts: int | None = None,
        wire: WirePolicy | None = None,
        client: ClientOptions = _CLIENT,
        settings: Settings | None = None,
    ) -> None:
        self.setup_ucxx_packer(
            schemas=schemas,
            queue=queue,
            rank=rank,
            consumer=consumer,
            max_policy_age=max_policy_age,
            consumed=consumed,
            progress=progress,
            joined=joined,
            parents=parents,
            expected_rollouts=expected_rollouts,
            wire=wire,
            client=client,
            settings=settings,
        )

    def __repr__(self) -> str:
        return "<TicketTrainer closed>" if self._ucxx is None else f"<TicketTrainer {self._ucxx.claims!r}>"

    def close(self) -> None:
        """The same as `cleanup_ucxx_packer`."""
        self.cleanup_ucxx_packer()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # None: type checkers know that this `with` lets exceptions through
        super().__exit__(kind, error, trace)
