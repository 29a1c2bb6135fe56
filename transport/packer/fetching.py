"""Fetching a batch for a trainer: calls for each ticket, and rounds over all of them, under one deadline.

layer 3  `_ucxx_dp_fetch_all`       rounds over the batch, for retryable failures   rounds_per_batch
layer 2    `PackerSession.retried`  fresh calls for one ticket                      calls_per_ticket
layer 1      `UCXXClient.read`      rotation over the ring's ports                  attempts_per_read
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import time
from collections.abc import Sequence

from transport.client.payload import ReceivedPayload
from transport.client.retry import Deadline, backoff
from transport.errors import OWN_FAULTS, ClosedError, TransportError
from transport.packer.joining import join_all
from transport.packer.prefetch import FetchedBatch, FetchedItem
from transport.packer.session import PackerSession, TicketLike

log = logging.getLogger(__name__)


class Fetching:
    """Layers 2 and 3 of a data packer's retries, on its loop."""

    _ucxx: PackerSession | None = None

    @property
    def _packer(self) -> PackerSession:
        if self._ucxx is None:
            raise ClosedError("this trainer is closed, or not set up: make a new Trainer, or call setup_ucxx_packer()")
        return self._ucxx

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
                        item.payload, item.error = outcome.payload, outcome.error
                        if outcome.error is not None and outcome.error.retryable:
                            again.append(item)
                    packer.progress(len(batch.payloads), len(batch.items), batch.bytes)
        calls = packer.settings.calls_per_ticket - 1
        if calls < 1:
            return
        for item in again:
            try:
                item.payload = await packer.retried(functools.partial(_read, packer, item), deadline, calls)
                item.error = None
            except TransportError as error:
                item.error = error.with_traceback(None)  # its frames would keep payloads of this batch alive
            packer.progress(len(batch.payloads), len(batch.items), batch.bytes)


async def _read(packer: PackerSession, item: FetchedItem, timeout_s: float) -> ReceivedPayload:
    return await packer.client.read(item.ticket, rank=packer.rank_of(item), timeout=timeout_s)
