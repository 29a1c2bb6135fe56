"""UCXXClient: from a ticket to the payload in this process's memory.

    read ─► mapped, if the ring is on this host and `wire` allows it
         └► attempts over the ring's ports: healthiest port → pooled link → READ → verified → acknowledged

The client decides nothing about ports, links, retries or acknowledgements by itself: pool, quarantine, retry plan and
ack ledger do (files of those names); here their decisions are carried out. It belongs to the loop it was made on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from transport.claims.connection import ClaimConnections
from transport.client.attempts import RemoteReads
from transport.client.connections.links import Links
from transport.client.connections.warming import CONCURRENCY, Warming, WarmUpTarget
from transport.client.deliveries import Deliveries
from transport.client.device_reads import DeviceReads, DeviceReceive
from transport.client.payload import AckMode, ClientStatistics, Payload, ReadOutcome
from transport.client.reading import Reads
from transport.client.status_socket import StatusSocket
from transport.devices.buffers import BufferPool
from transport.errors import ClosedError, UsageError
from transport.ring.attached import AttachedRings, through
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.event_loop import check_loop
from transport.schema import Schema
from transport.settings import DEFAULTS, Settings
from transport.store.directory import Directory, Finder
from transport.ticket import Ticket
from transport.wire.addresses import host_port
from transport.wire.frames import Kind, Record, SlotFate, fate_of
from transport.wires import Wire, named_wires

log = logging.getLogger(__name__)

WirePolicy = Literal["auto"] | Wire | Iterable[Wire]


class UCXXClient:
    """Client that reads payloads by ticket. Make it inside a running loop; `async with` closes it.

    Args:
        schemas: of rings whose tickets do not describe their payloads themselves.
        wire: "auto", or the set of wires that may carry payloads ("mapped", "shm", "tcp", "rdma", "cuda"). A read
            that would go over another one is refused.
        ack: "on_arrival" acknowledges when a payload, verified, is handed to the caller: as `read` returns,
            as `read_many` yields. "on_consumed" and "manual" leave it to `payload.ack()`, or to the end of the
            payload's ``with``.
        secret: shared secret to prove to listeners.
        verify: compare the checksum of what arrives with the ticket's.
        device: "cupy" or "torch" (":1" for the second device): reads without `out` go to new memory there, and their
            arrays are that library's. None: host memory.
        device_receive: how a payload over a wire gets into device memory. "staged": into pinned host memory, verified
            there, copied on the stream; "direct": UCX writes large ones into it, where its context knows device memory
            (for RDMA; over shm and tcp staging is as fast or faster, docs/GPU.md).
        directory: where servers publish themselves; asked when a ticket's own ports do not answer.
    """

    def __init__(
        self,
        *,
        schemas: Sequence[Schema] = (),
        wire: WirePolicy = "auto",
        ack: AckMode = "on_arrival",
        secret: bytes | None = None,
        verify: bool = True,
        device: str | None = None,
        device_receive: DeviceReceive = "staged",
        directory: Directory | None = None,
        settings: Settings = DEFAULTS,
    ) -> None:
        if ack not in ("on_arrival", "on_consumed", "manual"):
            raise UsageError(f"ack={ack!r}; choose 'on_arrival', 'on_consumed' or 'manual'")
        if device_receive not in ("staged", "direct"):
            raise UsageError(f"device_receive={device_receive!r}; choose 'staged' or 'direct'")
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError(
                "UCXXClient is made in a coroutine, where an event loop runs; without one use BlockingClient, which "
                "takes the same arguments"
            ) from None
        self._wires: frozenset[Wire] | None = None if wire == "auto" else named_wires(wire)
        self._settings = settings.validate()
        self._maps = self.allows("mapped")
        self._own = self._attached = AttachedRings()
        self._device_reads = DeviceReads(device, device_receive, settings.staging_bytes)
        with contextlib.ExitStack() as undo:
            self._links = Links(
                self._settings,
                self._wires,
                secret,
                lambda: self._attached.leave_ended(),
                device_memory=device_receive == "direct",
            )
            undo.callback(self._links.end)
            self._remote = RemoteReads(self._links, self._settings, self._wires, verify)
            self._finder = None if directory is None else Finder(directory)
            self._verify = verify
            self._buffers = BufferPool()
            self._deliveries = Deliveries(schemas, ack, self._links, self._find)
            self._claims = ClaimConnections(self._links, self._settings, self._buffers)
            self._reads = Reads(
                self._check_open,
                self._settings,
                self._find,
                self._links,
                self._remote,
                self._device_reads,
                self._deliveries,
                self._buffers,
                self._finder,
            )
            self._warming = Warming(
                self._links,
                self._settings,
                self._wires,
                lambda ticket: self._find(ticket) is not None,
                self._buffers,
            )
            self._pid = os.getpid()
            self._closing: asyncio.Task[None] | None = None
            self.why_nothing: Callable[[], str] = str
            self.places = ""
            self._status = StatusSocket(self._loop, self.statistics, self._rings, lambda: self.why_nothing())
            undo.pop_all()

    def __reduce__(self) -> NoReturn:
        """Raise UsageError, for `pickle` and `copy`."""
        raise UsageError("a client is not pickled: make one in each process")

    def __repr__(self) -> str:
        return f"<UCXXClient {'closed' if self._deliveries.closed else 'open'} {self._links!r}>"

    def _check_open(self) -> None:
        """Raise unless the client is open, and called where it belongs."""
        if self._deliveries.closed:
            raise ClosedError("this client is closed")
        check_loop(
            self._loop, self._pid, "this client", "make one there, or use BlockingClient, which any thread may call"
        )

    def _find(self, ticket: Ticket) -> SharedRingBuffer | None:
        """Return the ticket's ring, if it is here, and may be and can be mapped; None: read it through the network."""
        return self._attached.find(ticket) if self._maps else None

    # --- before the first read ----------------------------------------------------------------------
    async def warm(self, *places: WarmUpTarget) -> int:
        """Make UCX ready and open connections, so that the first reads find them; the connections that stand then.

        A listener that cannot be reached raises nothing: it is logged and counted (``warm_up_failures``), and a read
        connects by itself. Rings that this process maps need no connection. Cancelling it keeps what was opened.

        Args:
            places: tickets, or addresses of listeners as "host:port". A ticket stands for its ring, and for memory of
                its size. None at all: only the worker is made, and only where ``wire`` excludes mapping.

        Raises:
            UsageError: neither a ticket nor an address.
        """
        self._check_open()
        return await self._warming.warm(places)

    # --- reading ------------------------------------------------------------------------------------
    async def read(
        self,
        ticket: Ticket | str | bytes,
        out: Any = None,
        rank: int = 0,
        timeout: float | None = None,
        fields: Sequence[str] | None = None,
        ack: AckMode | None = None,
    ) -> Payload:
        """Fetch one payload.

        Args:
            ticket: names it; the ticket itself, or any form of it that `Ticket.parse` knows.
            out: where to put the bytes: numpy, pinned, torch or CuPy memory, writable, contiguous, large enough;
                None: a mapped view, or a pooled buffer. Into device memory they come on the stream that is current
                when the read is called; work on that stream may be queued as soon as the read returns.
            rank: which of the ticket's readers this is.
            timeout: seconds for all attempts together; default the settings' batch deadline.
            fields: names of the fields that are wanted; only their bytes are moved, over a wire each with a checksum of
                its own. Others are not in the payload. Acknowledging it is for the whole payload.
            ack: of this payload; None: as the client was made.

        Raises:
            SchemaError: ``fields`` has a name that the payload does not have, or its schema is not known here. With
                ``out``, or an ``ack`` by hand, bytes need none.
            StaleSlotError: consumed by this rank, overwritten, discarded or expired. Final.
            RetriesExhaustedError, DeadlineExceededError: every attempt failed; ``__cause__`` is the last failure.
            PayloadLostError: every port answers that it serves another ring; or none answers, and none has published
                the ring for a while (`transport.store.directory`).
            WireNotAllowedError: only wires that the policy excludes lead there.
            BufferUnsuitableError: ``out`` cannot take the payload, or there is no memory for it.
            RankError: the payload has no such rank; nothing was sent.
            MissingDependencyError: `out` is in device memory, and CuPy is not installed.
            TicketError: `ticket` is neither a ticket nor a form of one.
        """
        return self._deliveries.hand_over(await self._reads.one(ticket, out, rank, timeout, fields), out, ack)

    async def read_many(
        self,
        tickets: Iterable[Ticket | str | bytes],
        *,
        rank: int = 0,
        timeout: float | None = None,
        concurrency: int = CONCURRENCY,
        fields: Sequence[str] | None = None,
    ) -> AsyncGenerator[ReadOutcome, None]:
        """Fetch many payloads, or some ``fields`` of them; yields a `ReadOutcome` for each as it completes.

        That has the payload or the error: what cannot be read raises nothing here. Small ones share messages.

            async for outcome in client.read_many(tickets):
                if outcome.error is None:
                    learn(outcome.payload["reward"])

        Some are fetched ahead. With ack="on_arrival" each is acknowledged as it is yielded, so leaving the iteration
        early consumes nothing beyond. It also cancels what is still under way; use ``contextlib.aclosing`` to have
        that at once.
        """
        async with contextlib.aclosing(self._reads.many(tickets, rank, timeout, concurrency, fields)) as lists:
            async for outcomes in lists:
                for outcome in self._deliveries.hand_over_all(outcomes):
                    yield outcome

    @property
    def acknowledges(self) -> AckMode:
        """Mode of acknowledgement: as `ack` said."""
        return self._deliveries.mode

    def schema_of(self, ticket: Ticket) -> Schema | None:
        """Return the payload's schema, by its ticket or as this client was given it; None: neither."""
        return self._deliveries.schema_of(ticket)

    def allows(self, wire: Wire) -> bool:
        """Return whether the policy lets this wire carry payloads."""
        return self._wires is None or wire in self._wires

    def uses_network(self) -> bool:
        """Return whether the policy lets anything but the mapping carry payloads."""
        return self._wires is None or bool(self._wires - {"mapped"})

    def hand_in(self, ticket: Ticket, rank: int, wire: Wire, data: Any) -> Payload:
        """Return a payload that came without a read, as `read` returns it. Its claim's end is its acknowledgement."""
        if self._device_reads.always:
            data = self._device_reads.from_host(memoryview(data))
        return self._deliveries.handed_in(ticket, rank, wire, data)

    # --- taking, without tickets ----------------------------------------------------------------------
    def share(self, attached: AttachedRings) -> None:
        """Map what tickets name through the attachments of a run's rings, which are the rings' to close.

        What is read so is claimed by a trainer, or a parent of what is, which ends with it: its slots are held,
        whether it is copied or not.
        """
        self._attached = attached
        self._reads.bounded = False

    @property
    def claims(self) -> ClaimConnections:
        """Connections that hold claims."""
        if self._deliveries.closed:
            raise ClosedError("this client is closed")
        return self._claims

    # --- acknowledgements and what else can be said about a payload ------------------------------------
    def ack(self, ticket: Ticket | str | bytes, rank: int = 0) -> bool:
        """Acknowledge a payload; it goes with the next request to its ring, or alone after ``ack_delay_s``. Any thread.

        Raises RankError for a rank that is not one of the ticket's readers.
        """
        ticket = Ticket.of(ticket)
        ticket.check_rank(rank)  # one that no record can hold would come back at every message to its ring
        return self._deliveries.acknowledge(ticket, rank)

    async def discard(self, ticket: Ticket | str | bytes, timeout: float | None = None) -> bool:
        """Free a payload that is not needed, for all ranks. False when it was gone before.

        Raises what `read` raises where the ring cannot be reached.
        """
        self._check_open()
        ticket = Ticket.of(ticket)
        fate = await self.state(ticket, timeout=timeout)
        if fate is SlotFate.GONE:
            return False
        if (discarded := through(self._find, ticket, lambda ring: ring.discard(ticket))) is not None:
            return discarded
        discarding = Record(Kind.DISCARD, ticket.slot, ticket.generation, 0, ticket.key)
        asking = Record(Kind.STATE, ticket.slot, ticket.generation, 0, ticket.key)
        after = await self._remote.ask(ticket, asking, [discarding], self._reads.deadline(timeout))
        return SlotFate(after) is SlotFate.GONE

    async def state(self, ticket: Ticket | str | bytes, rank: int = 0, timeout: float | None = None) -> SlotFate:
        """Return what became of a payload, for a rank: readable, consumed by it, or gone. Raises as `discard` does."""
        self._check_open()
        ticket = Ticket.of(ticket)
        ticket.check_rank(rank)
        record = Record(Kind.STATE, ticket.slot, ticket.generation, rank, ticket.key)

        def look(ring: SharedRingBuffer) -> SlotFate:
            ring.check(ticket, rank)
            return fate_of(ring.native.info(ticket.slot), record)

        if (fate := through(self._find, ticket, look)) is not None:
            return fate
        return SlotFate(await self._remote.ask(ticket, record, [], self._reads.deadline(timeout)))

    def _rings(self) -> tuple[str, set[str]]:
        """Return where rings are looked for, and the ids of those that are connected."""
        return self.places, self._links.rings

    def statistics(self) -> ClientStatistics:
        """Counters and gauges at this moment."""
        counts, ledger = self._links.counts(), self._links.ledger
        return ClientStatistics(
            stale=self._reads.stale,
            failed_reads=self._reads.failed,
            reads=self._deliveries.reads,
            retries=self._remote.retries,
            checksum_failures=self._remote.checksum_failures + self._claims.checksum_failures,
            bytes_by_wire=dict(self._deliveries.bytes_by_wire),
            links_opened=self._links.opened,
            warm_up_failures=self._warming.failures,
            links_idle=counts.idle,
            links_in_use=counts.in_use,
            acks_pending=ledger.pending_count,
            acks_unconfirmed=ledger.sent_count,
            acks_dropped=ledger.dropped_count,
            quarantined_ports=tuple(
                host_port(host, port) for host, port in self._links.quarantine.quarantined(time.monotonic())
            ),
        )

    async def close(self) -> None:
        """Send the last acknowledgements and close every link. Reads under way fail with ClosedError. Idempotent.

        It goes on where it is cancelled; called again, it waits for the same end. When the loop ends first, everything
        is closed at once, and what was not acknowledged by then is not. Nothing in a forked child: the client is its
        parent's. UsageError in another loop.
        """
        if os.getpid() != self._pid:
            return
        check_loop(self._loop, self._pid, "this client", "close it in its own")
        if self._closing is None:
            self._deliveries.closed = True
            self._closing = self._loop.create_task(self._close(), name="transport client closes")
            self._closing.add_done_callback(lambda _: self.end())  # also where it is cancelled before it has begun
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.end)
            self._claims.close()
            self._warming.close()
            await self._links.close()
            await self._claims.ended()

    def end(self) -> None:
        """Close at once, without telling a listener: what is not acknowledged yet is not. Idempotent."""
        self._deliveries.closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._buffers.clear)
            stack.callback(self._own.close, but_lent=True)
            stack.callback(self._remote.close)
            stack.callback(self._device_reads.close)
            stack.callback(self._links.end)
            stack.callback(self._claims.close)
            stack.callback(self._warming.close)
            if self._finder is not None:
                stack.callback(self._finder.end)
            self._status.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    if not TYPE_CHECKING:  # a type checker refuses it by itself

        def __enter__(self) -> NoReturn:
            self.end()
            raise UsageError(
                "UCXXClient needs `async with`; for a plain `with` use BlockingClient, which takes the same arguments"
            )

        def __exit__(self, *_: object) -> None: ...
