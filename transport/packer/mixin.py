"""UCXXDataPackerMixin: a data packer reads the payloads whose tickets a framework hands it, prefetched.

    packer.start_prefetch(tickets)
    payloads = packer.consume(packer.collect_prefetch())

A batch is fetched by calls for each ticket, and rounds over all of them, under one deadline:

layer 3  `_ucxx_dp_fetch_all`       rounds over the batch, for retryable failures   rounds_per_batch
layer 2    `PackerSession.retried`  fresh calls for one ticket                      calls_per_ticket
layer 1      `UCXXClient.read`      rotation over the ring's ports                  attempts_per_read

The framework decides who gets which ticket; a payload is consumed when its ring has its acknowledgement. What no
framework hands out, a `Trainer` takes from the rings itself.

The mixin owns one background loop, from `setup_ucxx_packer` to `cleanup_ucxx_packer`. Its public methods block; call
them from the trainer's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, Literal

from transport.client.client import WirePolicy
from transport.client.payload import Payload
from transport.client.retry import Deadline, backoff
from transport.config import configuration
from transport.errors import OWN_FAULTS, ClosedError, StaleSlotError, TransportError, UsageError
from transport.observe.metrics import configured_exporter
from transport.observe.statistics import PackerStatistics
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.options import ClientOptions
from transport.packer.prefetch import FetchedBatch, FetchedItem
from transport.packer.session import PackerSession, completed, open_session
from transport.packer.with_block import WithBlock
from transport.runtime.arguments import several, waiting
from transport.runtime.progress import Progress
from transport.schema import Schema
from transport.settings import _MAX_FETCH_ROUNDS
from transport.ticket import Identity, Ticket

__all__ = [
    "_MAX_FETCH_ROUNDS",
    "FetchedBatch",
    "FetchedItem",
    "PackerStatistics",
    "UCXXDataPackerMixin",
]

_CLIENT = ClientOptions()  # what setup_ucxx_packer() takes where nothing is said


class UCXXDataPackerMixin(WithBlock):
    """Mixin for a data packer, before its base class; `get_policy_input` then also takes tickets.

    A ``with`` cleans up at its end.
    """

    _ucxx: PackerSession | None = None

    @property
    def _packer(self) -> PackerSession:
        if self._ucxx is None:
            raise ClosedError("this data packer is closed, or not set up: call setup_ucxx_packer()")
        return self._ucxx

    # --- life ---------------------------------------------------------------------------------------
    def setup_ucxx_packer(
        self,
        *,
        schemas: Sequence[Schema] = (),
        rank: int = 0,
        consumed: ConsumedRecord | None = None,
        progress: Progress | Literal["bar"] | None = None,
        wire: WirePolicy | None = None,
        client: ClientOptions = _CLIENT,
    ) -> None:
        """Start the background loop and the client. Called again, it cleans up first.

        Args:
            schemas: of the payloads, where their tickets do not describe them. A payload that nothing describes is an
                error of its item, and not consumed.
            rank: this trainer's rank among the readers of each payload.
            consumed: record from a checkpoint, so that a restarted trainer drops the payloads it has trained on.
            progress: called with (payloads done, payloads of the batch, bytes done) while a batch is fetched; "bar"
                draws it on the terminal.
            wire: default: the operator's (config.py), who may also turn on metrics.
            client: further choices, for example ``client=ClientOptions(device="torch")``.

        Raises:
            ConfigurationError: the operator's configuration is wrong.
            UsageError: an argument that makes no sense.
        """
        rank = index(rank)
        if isinstance(schemas, Schema):
            raise UsageError("schemas is one Schema: give a list, schemas=[schema]")
        self.cleanup_ucxx_packer()
        operator = configuration()
        wire = operator.wire_policy if wire is None else wire
        client, settings, name = completed(client, operator)
        self._ucxx = open_session(
            schemas,
            wire,
            client,
            settings=settings,
            record=consumed if consumed is not None else ConsumedRecord(settings),
            rank=rank,
            progress=progress,
            fetch=self._ucxx_dp_fetch_all,
        )
        try:
            self._ucxx.warm_up(client.directory)
            self._ucxx.show(configured_exporter(operator), name)
        except BaseException:
            self.cleanup_ucxx_packer()
            raise

    def cleanup_ucxx_packer(self) -> None:
        """Stop fetching, close client and loop. Any state; idempotent."""
        packer = self._ucxx
        if packer is not None:
            try:
                packer.close()
            except Exception:  # every step has run; after an interrupt the next call runs the rest
                self._ucxx = None
                raise
            self._ucxx = None

    # --- prefetch -----------------------------------------------------------------------------------
    def start_prefetch(self, items: Iterable[Ticket | bytes | str]) -> None:
        """Fetch a batch in the background: tickets, or any form of them that `Ticket.parse` knows.

        Raises:
            UsageError: the previous batch is not collected.
            TicketError: one is no ticket.
        """
        packer = self._packer
        packer.prefetch.start([Ticket.of(each) for each in several(items, "start_prefetch()")])

    def defer_prefetch(self, items: Iterable[Ticket | bytes | str]) -> None:
        """Fetch a batch in the background as soon as the previous one is collected; now if there is none."""
        packer = self._packer
        packer.prefetch.defer([Ticket.of(each) for each in several(items, "defer_prefetch()")])

    def wait_prefetch(self, timeout: float | None = None) -> bool:
        """Wait until the batch is complete; False after ``timeout`` seconds, or if nothing is being fetched."""
        return self._packer.prefetch.wait(waiting(timeout, "timeout of wait_prefetch()"))

    def collect_prefetch(self, timeout: float | None = None) -> FetchedBatch | None:
        """Wait for the prefetched batch, start the deferred one, and return the batch, failures included.

        None if nothing was started. Raises TimeoutError after ``timeout`` seconds; fetching continues. Raises errors of
        this trainer's configuration when no payload was read for them (a wrong secret, a wire that is not allowed, ucxx
        missing); the payloads remain in their rings.
        """
        return self._packer.collect(waiting(timeout, "timeout of collect_prefetch()"))

    def cancel_prefetch(self) -> None:
        """Stop fetching the batch, and forget a deferred one; their payloads remain in their rings."""
        self._packer.cancel()

    def consume(self, batch: FetchedBatch) -> list[Payload]:
        """Acknowledge a batch; returns the payloads to train on, each once, and the same when it is called again.

        Failed payloads, duplicates, and payloads that another reader of this rank has consumed are not returned; nor
        are those that `get_policy_input` has handed out.
        """
        if not isinstance(batch, FetchedBatch):
            raise UsageError(f"got a {type(batch).__name__}; give the batch that collect_prefetch() returned")
        packer = self._packer
        for item in batch.items:
            packer.consume(item)
        return batch.trainable

    async def _ucxx_dp_fetch_all(self, items: Sequence[Ticket], deadline: Deadline) -> FetchedBatch:
        """Layer 3: rounds over the batch; each round repeats the retryable failures of the previous one."""
        packer = self._packer
        started = time.monotonic()
        batch = FetchedBatch([packer.item(each) for each in items])
        todo = [item for item in batch.items if not item.duplicate]
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
            own_fault = next((item.error for item in batch.items if isinstance(item.error, OWN_FAULTS)), None)
            if own_fault is not None and not batch.payloads:  # else a ring's alone, and a failure of the batch
                raise own_fault
        except BaseException:  # a cancellation, too
            batch.release()
            raise
        batch.seconds = time.monotonic() - started
        packer.count(batch)
        return batch

    async def _round(
        self, packer: PackerSession, todo: list[FetchedItem], batch: FetchedBatch, deadline: Deadline
    ) -> None:
        """One call for every ticket, with small payloads in shared messages; then the remaining calls for failures."""
        by_identity: dict[Identity, list[FetchedItem]] = {}
        for item in todo:
            by_identity.setdefault(item.ticket.identity, []).append(item)
        again: list[FetchedItem] = []
        tickets = [items[0].ticket for items in by_identity.values()]
        timeout = max(deadline.at - time.monotonic(), 0.0)
        outcomes = packer.client.read_many(tickets, rank=packer.rank, timeout=timeout)
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
        """Return the policy's input. A ticket is resolved; anything else is passed to the base class.

        A ticket of a collected batch is looked up; one that was not prefetched is read now. This call consumes the
        payload, unless `consume` has already consumed its batch.

        Raises StaleSlotError if the payload was already consumed.
        """
        if not isinstance(item, Ticket) and not (isinstance(item, bytes) and item.startswith(b"TK")):
            of_the_base = getattr(super(), "get_policy_input", None)  # of the packer mixed with
            if of_the_base is None:
                raise UsageError("get_policy_input(): give a Ticket, or the bytes of Ticket.encode()")
            return of_the_base(item, *arguments, **named)
        packer = self._packer
        ticket = Ticket.of(item)
        fetched = packer.collected.get(ticket.identity)
        if fetched is None:
            deadline = Deadline.after(packer.settings.batch_deadline_s, time.monotonic())
            fetched = packer.thread.run(self._ucxx_dp_fetch_all([ticket], deadline))[0]
            if fetched.error is not None:
                raise fetched.error
            packer.collected[ticket.identity] = packer.alone = fetched  # for the call that is repeated
        packer.consume(fetched)
        if not fetched.trainable or fetched.payload is None:
            raise StaleSlotError(f"payload {ticket.name} was already consumed")
        given = self.payload_to_policy_input(fetched.payload, *arguments, **named)
        fetched.handed, packer.alone = True, None
        return given

    def payload_to_policy_input(self, payload: Payload, *_: Any, **__: Any) -> Any:
        """Return the policy's input from a payload; override it. Default: its arrays by name."""
        return dict(payload)

    def ucxx_statistics(self) -> PackerStatistics:
        """Counters at this moment."""
        return self._packer.statistics()

    @property
    def metrics_port(self) -> int | None:
        """Port of this trainer's metrics; None: ``metrics_port`` is not configured."""
        return self._packer.metrics_port

    def consumed_record(self) -> ConsumedRecord:
        """Return a copy of what was consumed.

        Store its `to_bytes()` in checkpoints: a restarted trainer that gets these tickets again drops them.
        """
        return self._packer.record.copy()


async def _read(packer: PackerSession, item: FetchedItem, timeout_s: float) -> Payload:
    return await packer.client.read(item.ticket, rank=packer.rank, timeout=timeout_s)
