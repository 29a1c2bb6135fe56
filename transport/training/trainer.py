"""Trainer: takes batches of payloads from the rings of a run.

    with Trainer(SCHEMA) as trainer:
        for batch in trainer.batches(64):
            loss = step(batch["tokens"], batch["reward"])
            batch.consume()

Rings of this host are mapped: a payload is a view of its slot. For rings elsewhere demands wait at their listeners, and
bring payloads ahead of the call that takes them. Nothing else lies in between: a ring's slots say who has what.
"""

from __future__ import annotations

import _thread
import asyncio
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import compress, repeat
from typing import TYPE_CHECKING, Any, Final, Literal, Self, Unpack

import msgspec
import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.claims.lead import LeadSaid
from transport.claims.open import open_rings
from transport.claims.rings import FoundRings
from transport.client.blocking import statistics_of
from transport.client.client import UCXXClient
from transport.config import configuration
from transport.errors import (
    ClosedError,
    ConfigurationError,
    SchemaError,
    TicketError,
    TransportError,
    UsageError,
)
from transport.joined.payloads import names_parents
from transport.observe.metrics import configured_exporter
from transport.observe.statistics import TrainerStatistics
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.options import ClientOptions
from transport.packer.session import completed, make_client
from transport.ring.batch import Gathered, columns_of
from transport.ring.batch_shape import Shape, ShapeArguments
from transport.ring.claiming import check_claim
from transport.ring.consumers import check_consumer
from transport.runtime import hurry, spans, threads
from transport.runtime.amounts import count
from transport.runtime.arguments import at_least, one_of, seconds
from transport.runtime.error_text import error_text
from transport.runtime.logs import SAY_AGAIN_S, LoggedErrors, LogLimit
from transport.runtime.loop_thread import LoopThread, gone
from transport.schema import Schema
from transport.store.memory import MemoryStore
from transport.store.open import open_store
from transport.ticket import ORIGIN, Delivery, Ticket
from transport.training.assembling import REASONS, Group, Reason
from transport.training.batch import Batch, Claimed
from transport.training.counts import StepCounts
from transport.training.holding import Holding
from transport.training.joining import Child, end_parts, join_all
from transport.training.learned import Learned
from transport.training.mesh import Mesh
from transport.training.planner import Choose, Planner, StepTerms
from transport.training.step_reader import StepReader
from transport.training.step_records import StepRecords
from transport.training.steps import Steps, Underway

if TYPE_CHECKING:
    from transport.client.client import WirePolicy
    from transport.store.base import Store

log = logging.getLogger(__name__)

_CLIENT: Final = ClientOptions()
_SLICE_S: Final = 0.25  # of a wait for payloads, after which the end of the data is looked for
_FILL_S: Final = 1.0
_UNANSWERED: Final = 2  # batches whose `consume` has no answer yet, beside the one that is taken
_ORIGIN: Final = ORIGIN.encode()
_CONTEXT: Final = spans.CONTEXT.encode()
_HELD_S: Final = 1.0  # until what another batch of this trainer has is claimed again


class Trainer:
    """Source of batches from a run's rings. One call at a time, from any thread; its batches likewise.

    Args:
        schema: of the payloads; several, or None for any: then a batch has payloads, and no tensors of all of them.
        rings: where the rings are: text as `open_rings` has it (``"rings:NAME"``, ``"rings://host:port"``,
            ``"rings+redis://…"``), or what `open_rings` gave, which stays the caller's. None: the rings of this host
            whose rollouts were given no name either.
        rank: this trainer's rank among the readers of each payload; or the name of a consumer ("reference", "train:2").
        max_age: how many versions a payload may be older than `version`; older ones are discarded and counted.
        record: `Trainer.record` from a checkpoint, or its bytes: payloads that it has are consumed and left out.
            Trainers that share a rank's payloads each give the records of all, `ConsumedRecord.merged`: any may get
            what another one had.
        mesh: the ranks that train one model together, for `steps`; None: this process alone.
        joined: a payload that names its parents (docs/PAYLOADS.md) has the fields of all parts, and is consumed with
            them. True, or the parents' schemas, where those are not in ``schema``: they are read and not taken.
        expected_rollouts: how many rollouts have to end before `finished`; None: those that this trainer has seen.
        wire, client: of the connections, and the trainer's name and settings; default as the operator configured them.
        shape: how batches are laid out, see `Shape`: layout, fill, pad_to, memory, out, verify, fields. A "padded" or
            "packed" batch is laid out while its payloads are taken; by default they stay where they are, and are padded
            when somebody looks at a tensor.

    Attributes:
        rings: of the run; for `Offers`, notices and depth.

    Dropped without `close`, it ends by itself, and what it has claimed goes back.

    Raises:
        ConfigurationError: ``rings`` or the operator's configuration is wrong.
        SchemaError, UsageError: an argument makes no sense.
    """

    def __init__(
        self,
        schema: Schema | Sequence[Schema] | None = None,
        rings: str | FoundRings | None = None,
        *,
        rank: int | str = 0,
        max_age: int | None = None,
        record: ConsumedRecord | bytes | None = None,
        mesh: Mesh | None = None,
        joined: bool | Sequence[Schema] = False,
        expected_rollouts: int | None = None,
        wire: WirePolicy | None = None,
        client: ClientOptions = _CLIENT,
        **shape: Unpack[ShapeArguments],
    ) -> None:
        schemas = [schema] if isinstance(schema, Schema) else list(schema or ())
        self._schema = schemas[0] if len(schemas) == 1 else None
        self._shape = Shape(**shape)
        if self._schema is not None:
            self._shape.fills(self._schema)
        elif self._shape != Shape():
            raise SchemaError("tensors of a batch are those of one schema: give Trainer one, or leave its shape out")
        if client.device is not None:
            raise UsageError(
                'ClientOptions(device=…) is for reads by ticket: give layout="padded" or "packed", and memory="torch", '
                "for batches and steps in device memory"
            )
        self._joined = joined is not False
        if self._joined and self._shape.layout != "list":
            raise UsageError("joined=True has payloads of several schemas in one: use batch.payloads, without a layout")
        parents = [] if isinstance(joined, bool) else joined
        self._rank = check_consumer(rank, "rank") if isinstance(rank, str) else rank
        check_claim(1, self._rank)
        self._max_age = None if max_age is None else at_least(0, max_age, "max_age")
        expected = None if expected_rollouts is None else at_least(1, expected_rollouts, "expected_rollouts")
        self._schemas = {each.fingerprint: each for each in schemas}
        self._discards = LogLimit()
        self._calls = _thread.allocate_lock()
        operator = configuration()
        client, settings, self._name = completed(client, operator)
        self._settings = settings
        record = ConsumedRecord.from_bytes(record, settings) if isinstance(record, bytes) else record
        self._book = TrainerBook(record)
        wire = operator.wire_policy if wire is None else wire
        self._mesh = mesh
        self._step_records: StepRecords | None = None
        self._steps: Steps | None = None
        self._underway: list[Underway] = []  # the one of these
        self._learned = Learned(record, self._book.consumed_record)
        self._counts = StepCounts()
        self._closed = False
        self._ends: list[Callable[[], object]] = []  # that may run again, the last one first
        with ExitStack() as undo:
            undo.callback(self._end)
            self._thread = thread = LoopThread("transport trainer")
            self._ends.append(thread.close)
            if not isinstance(rings, FoundRings):
                rings = open_rings("rings:" if rings is None else rings)
                self._ends.append(rings.close)
            client = msgspec.structs.replace(client, directory=client.directory or rings.places.directory)
            self._client = self._book.client = thread.run(
                make_client(thread, [*schemas, *parents], wire, settings, client)
            )
            self._ends.append(partial(rings.disconnect, self._client))
            self.rings = rings.connect(thread, self._client, schemas, expected_rollouts=expected)
            self.rings.say_ended()
            self._holds = rings.connect(thread, self._client, schemas, expected_rollouts=expected, contents=False)
            self._most_deliveries = self.rings.max_deliveries
            self._heart = thread.submit(_live(self.rings))
            self._ends.append(self._heart.cancel)
            if (exporter := configured_exporter(operator)) is not None:
                self._ends.append(exporter.close)
                exporter.add_trainer(self._name, _statistics_of(weakref.ref(self)))
                exporter.add_queue(repr(self.rings.places), self.rings)
            self.metrics_port = None if exporter is None else exporter.port
            self._ends.append(partial(_close_steps, self._underway, self._learned))
            undo.pop_all()
        self._process = os.getpid()
        self._dropped = weakref.finalize(self, _end_dropped, self._process, thread, self._ends)
        self._dropped.atexit = False

    def __repr__(self) -> str:
        return f"<Trainer {self._name} rank {self._rank} of {self.rings!r}{' closed' if self._closed else ''}>"

    @property
    def version(self) -> int | None:
        """Version of the policy in training; set it as training goes on. Required with ``max_age``."""
        return self._learned.version

    @version.setter
    def version(self, version: int | None) -> None:
        before, self._learned.version = self._learned.version, version
        if self._max_age is not None and before is not None and (version is None or version < before):
            self.rings.rest_at_once()  # demands that wait discard what is not too old from now on

    # --- taking -------------------------------------------------------------------------------------
    def take(self, n: int, timeout_s: float = 0.0, *, fill_s: float = 0.0) -> Batch | None:
        """Take up to ``n`` payloads, of each ring the oldest first. None: none came within ``timeout_s``.

        Args:
            fill_s: seconds for which an incomplete batch waits for more payloads, unless the rollouts have said that
                there are none. Bounded, because other trainers may hold the missing ones, or no slot may be free for
                them.

        Raises:
            UsageError: an argument makes no sense, ``max_age`` has no `version` to count from, or another call runs.
            ClosedError: the trainer is closed, or is a forked child's.
            WireNotAllowedError, AuthenticationError and the like: what keeps this process from every ring.
        """
        if n < 1 or math.isnan(timeout_s) or math.isnan(fill_s):
            check_claim(n, self._rank)
            seconds(timeout_s, "timeout_s of take()")
            seconds(fill_s, "fill_s of take()")
        if self._calls.locked():
            raise UsageError("another thread takes from this trainer at the moment: give each thread a Trainer")
        with self._calls:  # an interrupt finds no moment between the taking and the block
            if self._closed:
                raise ClosedError("this trainer is closed; make a new one")
            if self._steps is not None:
                raise UsageError("this trainer gives out steps, which claim all that comes: give batches another one")
            self._book.settle(_UNANSWERED)
            if self._book.in_slots:
                self._book.let_go_of_slots()
            begun = time.monotonic()
            try:
                batch = self._take(n, begun + timeout_s, fill_s)
            finally:
                self._counts.waited_s += time.monotonic() - begun
            if batch is not None and spans.API in sys.modules and spans.tracer() is not None:
                batch.claimed_in = spans.ended(
                    "transport.claim",
                    begun,
                    kind="CONSUMER",
                    links=spans.links_of(_of_traced_writes(batch)),
                    payloads=len(batch),
                    bytes=int(batch.sizes.sum()),
                    trainer=self._name,
                )
            return batch

    def _take(self, n: int, give_up: float, fill_s: float) -> Batch | None:
        oldest = None if self._max_age is None else _oldest(self._learned, self._max_age)
        left = n
        parts: list[Claimed] = []
        full_by = 0.0
        written = False  # whether the rings have only what is held here, by the look before the last take
        while True:
            wait_s = max(0.0, (full_by if parts else give_up) - time.monotonic())
            came = self.rings.take_parts(
                left,
                0.0 if written else min(wait_s, _SLICE_S) if parts else wait_s,
                rank=self._rank,
                oldest_version=oldest,
                consumer=self._name,
            )
            if came and not parts:
                full_by = time.monotonic() + fill_s if fill_s else 0.0
            for part in came:
                self._without_unreadable(part)
            if self._book.remembers:
                came = self._book.left(came, parts, self._end_parts if self._joined else None)
            for part in came:
                if empty := part.empty():
                    _consume_markers(part, empty)
                if count := len(part):
                    parts.append(part)
                    left -= count
            is_last = written and not came
            if parts and (not left or not full_by or is_last or time.monotonic() >= full_by):
                batch = self._batch(parts, oldest)
                if batch.slots.size:
                    return batch
                parts, left = [], n
            if not parts and not came and time.monotonic() >= give_up:
                return None
            written = bool(parts) and not came and self.rings.all_written(self._rank, self._book.claimed(parts))

    def _batch(self, parts: list[Claimed], oldest: int | None) -> Batch:
        gathered = None
        if self._schema is not None:
            for part in parts:
                for at in reversed(part.strange(self._schema.fingerprint)):  # of a ring that is made for any schema
                    self._discard(part, at, f"its schema is not {self._schema.fingerprint}, which this trainer wants")
            gathered = Gathered.gathered(
                parts,
                self._schema,
                self._shape,
                max_deliveries=self._most_deliveries,
                consumer=self._name,
            )
        else:
            self._without_undescribed(parts)
        batch = Batch(parts, gathered, self._shape, self._schemas, self._book, self._learned.version)
        if self._joined and not self._join(batch):
            return self._batch(parts, oldest)  # without those whose parts cannot be read
        self._book.batches += batch.slots.size > 0
        self._book.dropped += batch.dropped
        self._book.open.add(batch)
        if oldest is not None:
            self._book.say_ageless(batch)
        return batch

    def _join(self, batch: Batch) -> bool:
        """Read the parents of the payloads that name some. False: some cannot be read, and have left their parts."""
        which = [at for at in range(len(batch)) if names_parents(self._client, batch.ticket(at))]
        children = [Child(batch.ticket(at), int(batch.ranks[at]), batch.wire(at), batch.data(at)) for at in which]
        found = self._thread.run(join_all(self._client, children, self._settings))
        batch.joined = {at: each for at, each in zip(which, found, strict=True) if each.error is None}
        places = [(part, index) for part in batch.parts for index in range(len(part))]
        for at, each in reversed(list(zip(which, found, strict=True))):
            if each.error is not None:
                part, index = places[at]
                if each.error.retryable:
                    log.warning("payload %s was not joined: %s", batch.name(at), each.error)
                    self._book.failed += 1
                    part.drop(index, error_text(each.error), False, self._name, self._settings.backoff_most_s)
                else:
                    for parent in each.parts:
                        parent.ack(self._client)
                    self._discard(part, index, error_text(each.error))
        return len(batch.joined) == len(which)

    def _end_parts(self, part: Claimed, at: int) -> bool:
        """Acknowledge the parents of a payload that was consumed before. False: they are out of reach, it goes back."""
        ticket = Ticket.decode(part.note(at))
        if names_parents(self._client, ticket):
            rank = int(columns_of([part])[2, at])
            try:
                self._thread.run(end_parts(self._client, ticket, rank, self._settings))
            except TransportError as error:
                log.warning("payload %s, consumed before, has parts that cannot be ended yet: %s", ticket.name, error)
                part.drop(at, "", False, delay_s=self._settings.backoff_most_s, in_vain=False)
                return False
        return True

    def _without_unreadable(self, part: Claimed) -> None:
        """Discard the payloads whose tickets have what is looked at later, and cannot be decoded."""
        marked = range(len(part)) if self._joined else {*part.marked(_ORIGIN), *part.marked(_CONTEXT)}
        for at in sorted(marked, reverse=True):
            try:
                Ticket.decode(part.note(at))
            except TicketError as error:
                self._discard(part, at, error_text(error))

    def _without_undescribed(self, parts: Sequence[Claimed]) -> None:
        """Discard the payloads that neither their ticket nor a schema of this trainer describes."""
        for part in parts:
            for at in reversed(range(len(part))):
                try:
                    ticket = Ticket.decode(part.note(at))
                    ticket.layout(ticket.schema or self._schemas.get(ticket.schema_fingerprint))
                except TransportError as error:
                    self._discard(part, at, error_text(error))

    def _discard(self, part: Claimed, at: int, why: str) -> None:
        if (before := self._discards.due()) is not None:
            more = f" ({before} more since the last report)" if before else ""
            log.warning("a payload of ring %s was discarded: %s%s", part.ring[:8], why, more)
        self._book.failed += 1
        part.drop(at, why, True, self._name)

    def batches(self, n: int, *, fill_s: float = _FILL_S, stopping: Callable[[], object] = lambda: False) -> Batches:
        """Iterate over batches of ``n`` payloads until the data has ended (`finished`); also by ``async for``.

        A batch is smaller where no more payloads come within ``fill_s`` seconds. The loop's last batch is let go when
        the next one is taken: what was not consumed goes back.

        Args:
            stopping: called before each batch, and again and again while none comes; a true value ends the loop.
        """
        check_claim(n, self._rank)
        seconds(fill_s, "fill_s of batches()")
        return Batches(self, n, fill_s, stopping)

    def finished(self) -> bool:
        """Return True when no payload comes any more: every rollout has closed cleanly, every payload is done.

        A killed rollout has not ended; another one is expected in its place, unless ``expected_rollouts`` have ended.
        """
        self._book.settle()
        return self.rings.finished()

    def why_nothing(self) -> str:
        """Return a sentence that says why no payload comes; empty where it is only the rollouts' turn."""
        found = self.rings.why_nothing(self._rank)
        return "" if found is None else found.text

    # --- steps --------------------------------------------------------------------------------------
    def steps(
        self,
        groups: int,
        *,
        max_tokens: int | None = None,
        choose: Choose | None = None,
        incomplete: Literal["drop", "short"] = "drop",
        group_timeout_s: float | None = 600.0,
        stale: Literal["drop", "keep", "return"] = "drop",
        dropped: Callable[[Group, Reason], object] | None = None,
        tail: Literal["drop", "short"] = "short",
        ahead: bool = True,
    ) -> Steps:
        """Iterate over training steps, the same for every rank of the mesh, until the data of the rings has ended.

        A step is complete groups (``Rollout.write(group=, of=)``; a payload without a group is one by itself), divided
        over the replicas by size, the largest first. Every rank has as many micro-batches, and gets a step when all
        ranks have read theirs. It is consumed when all ranks have called its ``consume``, or comes again whole.

        Args:
            groups: of a step.
            max_tokens: of a micro-batch, by the ``tokens`` of `Rollout.write` (default: bytes); None: no limit. A
                larger sample is alone in its micro-batch.
            choose: called with each complete `Group`, before its payloads move: those that it refuses are consumed. As
                for the other terms, those of the rank that plans count: give all ranks the same.
            incomplete: what becomes of a group whose samples do not come: "drop" it, or train it "short".
            group_timeout_s: after which a group that is not complete waits no longer; None: until the data ends.
            stale: what becomes of a group with a sample that is older than ``max_age``: "drop" it, "keep" it and
                look at `Payloads.ages`, or "return" it: `Rollout.returned` names it to those that wrote its samples.
            dropped: called with each group that no step gets, and the reason ("incomplete", "stale", "not chosen",
                "tail"), for example to have its prompt sampled again; on the rank that plans, in a thread of its own.
            tail: what becomes of the last groups, where they are fewer than ``groups``: a "short" step, or "drop".
            ahead: read the next step while one is learned from.

        Raises:
            UsageError: an argument makes no sense.
            ConfigurationError: a mesh has no store.
            StoreError: the store does not answer.
        """
        seconds(group_timeout_s, "group_timeout_s")
        terms = StepTerms(
            groups=at_least(1, groups, "groups"),
            max_tokens=None if max_tokens is None else at_least(1, max_tokens, "max_tokens"),
            choose=choose,
            incomplete=one_of(("drop", "short"), incomplete, "incomplete"),
            group_timeout_s=group_timeout_s,
            stale=one_of(("drop", "keep", "return"), stale, "stale"),
            dropped=dropped,
            tail=one_of(("drop", "short"), tail, "tail"),
        )
        if self._closed or gone(self._process):
            raise ClosedError("this trainer is closed, or its process was forked; make a new one")
        if isinstance(self._rank, str) or self._joined:
            raise UsageError("steps are of payloads for a numbered rank, without joined=True")
        if self._shape.out is not None:
            raise UsageError("out= is memory of one batch, and micro-batches are several: leave it out for steps")
        _close_underway(self._underway)
        mesh, lease_s = self._mesh or Mesh(), self._settings.claim_lease_s
        if self._step_records is None:
            self._step_records = StepRecords(self._store_of_steps(), mesh.name, mesh.rank, mesh.ranks, lease_s)
            self._learned.of(self._step_records.id if self._mesh is not None else "")
        records = self._step_records
        planner = Planner(
            Holding(self._holds, self._rank, self._name),
            records,
            terms,
            shape=(mesh.dp, mesh.tp),
            rank=self._rank,
            oldest=partial(_oldest, self._learned, self._max_age),
            fits=partial(_check_fit, self._schema, self._schemas),
            lead=LeadSaid(self.rings, self._rank, records.id),
            learned=self._learned,
            counts=self._counts,
        )
        self._holds.incomplete = planner.waiting
        self._holds.says_why(self._client)
        reader = StepReader(
            self._client,
            records,
            mesh,
            self._rank,
            schema=self._schema,
            schemas=self._schemas,
            shape=self._shape,
            settings=self._settings,
        )
        underway = Underway(self._thread, reader, planner, self._learned, self._settings.batch_deadline_s)
        self._underway.append(underway)
        self._steps = Steps(self, underway, records, mesh, self._learned, self._counts, ahead=ahead)
        return self._steps

    def consume(self) -> None:
        """Consume every step that was accepted: the checkpoint that has them is stored."""
        if self._steps is not None:
            self._steps.consume()

    def _store_of_steps(self) -> Store:
        if self._mesh is None:
            return MemoryStore()
        store = self.rings.store if self._mesh.store is None else self._mesh.store
        if store is None:
            raise ConfigurationError(
                "a mesh needs a store: rings of a directory have one (rings+redis://…, rings+sqlite:///path), or give "
                "Mesh(store=…)"
            )
        if isinstance(store, str):
            store = open_store(store)
            self._ends.insert(0, store.close)  # last
        return store

    # --- looking ------------------------------------------------------------------------------------
    @property
    def record(self) -> ConsumedRecord:
        """A copy of what was consumed, and what batches have accepted: for a checkpoint, with the weights."""
        self._book.settle()
        record = self._book.with_accepted()
        self._learned.note_accepted(record)
        return record

    def statistics(self) -> TrainerStatistics:
        """Return the counters of this moment, or of the end. Those of groups are of the rank that plans."""
        book, counts, steps = self._book, self._counts, self._steps
        return TrainerStatistics(
            batches=book.batches,
            consumed=book.consumed_count + self._learned.samples,
            duplicates=book.duplicates,
            failed=book.failed + book.dropped,
            stale=counts.stale_samples,
            returned=book.returned,
            lost_claims=book.lost,
            waited_s=counts.waited_s,
            steps=counts.steps,
            void_steps=counts.void_steps,
            lag=counts.lag,
            groups={"planned": counts.planned, **{reason: counts.dropped[reason] for reason in REASONS}},
            open_groups=0 if steps is None else steps.planner.open_groups,
            surplus=counts.surplus,
            client=statistics_of(self._thread, self._client),
        )

    def close(self) -> None:
        """Give back what was not consumed, and end the connections. Idempotent; after an interrupt call it again."""
        self._closed = True  # from here on nothing is taken
        _all_of([self._end, self._book.let_go, self._book.settle])

    def _end(self) -> None:
        """End everything that the trainer began; what has ended stays so."""
        _end_all(self._ends)
        if hasattr(self, "_dropped"):
            self._dropped.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Batches:
    """The batches of a trainer until its data has ended. Made by `Trainer.batches`."""

    def __init__(self, trainer: Trainer, n: int, fill_s: float, stopping: Callable[[], object]) -> None:
        self._trainer = trainer
        self._n = n
        self._fill_s = fill_s
        self._stopping = stopping
        self._seen: tuple[Batch | None, bool] | None = None  # by a call that was cancelled

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        over = False
        while not over and not self._stopping():
            batch, over = self._look()
            if batch is not None:
                return batch
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        """Take the next batch. A call that is cancelled ends with its look, and the next call has what it saw."""
        over = False
        while not over and not self._stopping():
            looking = asyncio.create_task(asyncio.to_thread(self._look))
            try:
                batch, over = await asyncio.shield(looking)
            except asyncio.CancelledError:  # no thread may take for a call that is gone, however often it is cancelled
                while not looking.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait({looking})
                if looking.exception() is None:
                    self._seen = looking.result()
                raise
            if batch is not None:
                return batch
        raise StopAsyncIteration

    def _look(self) -> tuple[Batch | None, bool]:
        """Return a batch, if one came within a slice of time, and else whether the data has ended."""
        if self._seen is not None:
            seen, self._seen = self._seen, None
            return seen
        batch = self._trainer.take(self._n, _SLICE_S, fill_s=self._fill_s)
        return batch, batch is None and self._trainer.finished()


class TrainerBook:
    """The books of a trainer: payloads that were consumed, those of accepted batches, and counters.

    Attributes:
        client: acknowledges the parents of joined payloads.
    """

    client: UCXXClient

    def __init__(self, record: ConsumedRecord | None) -> None:
        self.consumed_record = ConsumedRecord() if record is None else record
        self.open: weakref.WeakSet[Batch] = weakref.WeakSet()  # neither consumed nor given back
        self.in_slots: list[weakref.ref[Batch]] = []  # consumed, and perhaps looked at until the next take
        self.unanswered: deque[Batch] = deque()  # whose rings have not answered `consume`
        self._ageless = LogLimit(SAY_AGAIN_S)
        self.batches = self.consumed_count = self.duplicates = self.returned = self.lost = 0
        self.failed = self.dropped = 0
        self.remembers = record is not None  # whether a payload that comes may have come before

    def claimed(self, parts: Sequence[Claimed]) -> Counter[str]:
        """Count by ring what these parts and the batches that are open have claimed, and not asked to consume."""
        batches = [batch for batch in list(self.open) if batch not in self.unanswered]
        counts: Counter[str] = Counter()
        for part in (*parts, *(part for batch in batches for part in batch.parts)):
            counts[part.ring] += len(part)
        return counts

    def let_go(self) -> None:
        """Give back what is not consumed: the trainer is closed."""
        for batch in list(self.open):
            batch.release()

    def left(
        self, parts: Sequence[Claimed], before: Sequence[Claimed], end_parts: Callable[[Claimed, int], bool] | None
    ) -> list[Claimed]:
        """Return the parts without payloads that were consumed, or are in hand: a restored one may be in two rings.

        Args:
            before: parts of the batch that is being taken.
            end_parts: called for each that was consumed before; False: it has left its part. None: there are no parts.
        """
        batches = [batch for batch in (*self.open, *self.unanswered) if not batch.settled]
        held = {each for batch in batches for each in deliveries(batch.parts, batch.columns)}
        held.update(deliveries(before, columns_of(before)))
        for part in parts:
            for at, delivery in reversed(list(enumerate(deliveries([part], columns_of([part]))))):
                if self.consumed_record.contains(*delivery):
                    if end_parts is None or end_parts(part, at):
                        part.consume(at)
                        self.duplicates += 1
                elif delivery in held:  # the batch that has it may come to nothing, and then it comes again
                    part.drop(at, "", False, delay_s=_HELD_S, in_vain=False)
                else:
                    held.add(delivery)
        return [part for part in parts if len(part)]

    def settle(self, most: int = 0) -> None:
        """Note the answers that are there, and wait for those of all batches but the last ``most``.

        After an interrupt the next call goes on.
        """
        for batch in list(self.unanswered):
            if len(self.unanswered) <= most and not batch.answered:
                continue
            try:
                batch.settle()
            except TransportError:
                self.unanswered.remove(batch)
                raise
            self.unanswered.remove(batch)

    def let_go_of_slots(self) -> None:
        """Let consumed batches go, to which a caller may refer while the next one is taken."""
        for each in self.in_slots:
            if (batch := each()) is not None:
                batch.let_go_of_slots()
        self.in_slots.clear()

    def consumed(self, batch: Batch, verdicts: npt.NDArray[np.bool_]) -> None:
        """Note what was consumed: all of an accepted batch, since the model has learned from it, else what was ours.

        Noted again, after an interrupt or when what was in question is answered, a batch is counted as it is then.
        """
        self.open.discard(batch)
        found = deliveries(batch.parts, batch.columns)
        ours = found if batch.learned or verdicts.all() else list(compress(found, verdicts.tolist()))
        self.consumed_record.accept_all(ours)
        for at, joined in batch.joined.items():
            if verdicts[at]:  # where another trainer has the claim, its parents are left to that one
                for part in joined.parts:
                    part.ack(self.client)
        if batch.in_slots:
            self.in_slots.append(weakref.ref(batch))
        lost = 0 if verdicts.all() else int((~verdicts & ~batch.in_question).sum())
        before = batch.counted
        counts = self.consumed_count + len(ours) - before[0], self.lost + lost - before[1]
        (self.consumed_count, self.lost), batch.counted = counts, (len(ours), lost)  # at once, for an interrupt

    def given_back(self, batch: Batch) -> None:
        """Note that a batch was given back."""
        if batch in self.open:
            self.returned += len(batch)
            self.open.discard(batch)

    def with_accepted(self) -> ConsumedRecord:
        """Return a copy of the record with what accepted batches have."""
        record = self.consumed_record.copy()
        for batch in (*self.open, *self.unanswered):
            if batch.learned:
                record.accept_all(deliveries(batch.parts, batch.columns))
        return record

    def say_ageless(self, batch: Batch) -> None:
        """Warn of payloads without a version, which ``max_age`` cannot discard."""
        ageless = int((batch.versions == _ring.NO_VERSION).sum())
        if ageless and self._ageless.due() is not None:
            log.warning(
                "no version, and so no age for max_age, in %d of %s: have their rollouts write them with version=",
                ageless,
                count(len(batch), "payload"),
            )


def _of_traced_writes(batch: Batch) -> Iterator[Mapping[str, Any]]:
    """Iterate over the metadata of the payloads whose writes were traced."""
    for part in batch.parts:
        for at in part.marked(_CONTEXT):
            yield Ticket.decode(part.note(at)).metadata


def deliveries(parts: Sequence[Claimed], columns: npt.NDArray[np.int64]) -> list[Delivery]:
    """Return what a record has of payloads; restored ones have the identity that they had first."""
    slots, generations, ranks = columns[:3].tolist()
    found: list[Delivery] = []
    for part in parts:
        begin = len(found)
        of = slice(begin, begin + len(part))
        found += zip(repeat(part.ring), slots[of], generations[of], ranks[of], strict=False)
        for at in part.marked(_ORIGIN):
            found[begin + at] = (*Ticket.decode(part.note(at)).origin, found[begin + at][-1])
    return found


def _consume_markers(part: Claimed, empty: Sequence[int]) -> None:
    """Consume those of a part's payloads without bytes that say the end of a group."""
    for at in reversed(empty):
        with suppress(TicketError):  # an unreadable ticket is said where its payload is left out
            if Ticket.decode(part.note(at)).ends_group is not None:
                part.consume(at)


def _oldest(learned: Learned, max_age: int | None) -> int | None:
    """Return the version below which payloads are too old; None: none is."""
    if max_age is None:
        return None
    if learned.version is None:
        raise UsageError("max_age counts from the version in training: set trainer.version before you take")
    return learned.version - max_age


def _check_fit(schema: Schema | None, schemas: Mapping[str, Schema], ticket: Ticket) -> None:
    """Raise SchemaError for a payload that a trainer of these schemas cannot lay out."""
    if schema is not None and ticket.schema_fingerprint != schema.fingerprint:
        raise SchemaError(f"its schema is not {schema.fingerprint}, which this trainer wants")
    ticket.layout(ticket.schema or schemas.get(ticket.schema_fingerprint))


def _statistics_of(trainer: weakref.ref[Trainer]) -> Callable[[], TrainerStatistics]:
    def statistics() -> TrainerStatistics:
        if (found := trainer()) is None:
            raise ClosedError("this trainer was dropped")
        return found.statistics()

    return statistics


# What follows does not refer to the trainer, which may be dropped.
def _close_underway(underway: list[Underway]) -> None:
    while underway:
        underway[-1].close()
        underway.pop()


def _close_steps(underway: list[Underway], learned: Learned) -> None:
    _close_underway(underway)
    learned.closed = True


def _end_all(ends: Sequence[Callable[[], object]]) -> None:
    """End everything that a trainer began, the last one first; what has ended stays so.

    An interrupt leaves the rest to the next call: rings that are closed take no answer to what is consumed.
    """
    with hurry.while_ending():
        _all_of(ends)


def _all_of(ends: Sequence[Callable[[], object]]) -> None:
    """Call all of these, the last one first, also after an error; an interrupt leaves the rest to the next call."""
    failed: Exception | None = None
    for end in reversed(ends):
        try:
            end()
        except Exception as error:  # the other ends must run, too: each frees something of its own
            failed = failed or error
    if failed is not None:
        raise failed


def _end_dropped(process: int, thread: LoopThread, ends: Sequence[Callable[[], object]]) -> None:
    """End a trainer that nobody refers to any more, in a thread of its own: any thread may drop it, also the loop."""

    def end() -> None:
        try:
            _end_all(ends)
        except TransportError as error:
            log.warning("the end of a trainer that was dropped failed: %s", error_text(error))

    if not gone(process):
        thread.soon(threads.start, threading.Thread(target=end, name="transport dropped trainer", daemon=True))


async def _live(rings: FoundRings) -> None:
    failures = LoggedErrors(log, "a sign of life to the rings of this host")
    while True:
        await asyncio.sleep(rings.lease_s / 3)
        with failures:
            rings.heard()
