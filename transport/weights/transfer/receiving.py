"""A receiver's side: its parts from several senders and relays at once, all of a version or nothing.

Each parent has a task that follows its messages. Buckets are read side by side, as many as there is memory for, in
whatever order they come. What was proven in its place goes on to the children from there: a slow child delays no
reading. Changes are kept for the children beside their places; where too many wait, buckets go on whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, ParamSpec

import msgspec
import numpy as np

from transport import _ring
from transport.client.client import UCXXClient
from transport.devices.buffers import BufferPool
from transport.errors import ChildrenLostError, InternalError, ProtocolError, WeightsChecksumError, WeightsError
from transport.runtime.progress import Progress
from transport.ticket import Ticket
from transport.weights.plan.steps import VersionProof
from transport.weights.sharding.buckets import Chunk, size_of
from transport.weights.sharding.layouts import Layout
from transport.weights.sharding.roles import Incoming, RankRole
from transport.weights.transfer.bucket_sender import BucketSender
from transport.weights.transfer.feed import Feed, Upstream
from transport.weights.transfer.messages import Placed, Slices, Start
from transport.weights.transfer.parts import OwnTensors, PartLanding, row_layout_of
from transport.weights.transfer.sending import copied
from transport.weights.transfer.threads import in_thread
from transport.weights.versions.copies import Copies, Held, ShardHeld, attach

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
P = ParamSpec("P")

_READS = 3  # buckets on the link at once from one parent: two cover the time of an answer, which waits in a busy link
_NOTHING: Bytes = np.empty(0, np.uint8)


async def start_of(name: str, upstream: Upstream, version: int) -> Start:
    """Return a parent's first message of a version. ProtocolError, or WeightsError for another version."""
    frame = await upstream.next()
    if not isinstance(frame, Start):
        raise ProtocolError(f"unexpected message at the start of a version: {type(frame).__name__}, expected Start")
    if frame.version != version:
        raise WeightsError(f"version mismatch: {name} sends v{frame.version}, expected v{version}")
    return frame


class ShardReceiving:
    """Receiver of one version. Create it, in a thread if the model is large, and `run` it once.

    Args:
        role, layout: with the tensors that the version has, of a whole model too.
        buffers: memory for buckets that are read and put into their places.
        into: what the version lands in: slots that the host shares, or the engine's own tensors.
        sender: for relays; as many buckets as it may have in flight are read at once.
        base: the version that changes are based on, if the role says that they are sent.
    """

    def __init__(
        self,
        role: RankRole,
        layout: Layout,
        upstreams: Mapping[str, Upstream],
        client: UCXXClient | None,
        into: Copies | OwnTensors,
        buffers: BufferPool,
        feed: Feed,
        sender: BucketSender,
        base: ShardHeld | None,
        progress: Progress,
    ) -> None:
        self._role = role
        self._upstreams = upstreams
        self._client = client
        self._into = into
        self._buffers = buffers
        self._feed = feed
        self._sender = sender
        self._base = base
        self._progress = progress
        self._layout = layout
        # Buckets that are read at once share the link, and each arrives later. A relay that waits for four of them
        # before it has one to pass on costs the whole chain behind it that time. So few are on the link; those that
        # have come and are being placed or relayed are not among them. Of many parents, one from each.
        parents = {source.parent for each in role.incoming for source in each.sources}
        self._link = asyncio.Semaphore(min(sender.in_flight, max(_READS, len(parents))))
        self._room = asyncio.Semaphore(sender.in_flight)
        self._turn = asyncio.Lock()  # first come, first served
        self._version = -1
        self._held: list[Held] = []
        self._proven: set[int] = set()  # parts
        self._tasks = asyncio.TaskGroup()  # of this version; a task begins others
        self._buckets = self._bytes = 0
        self._waiting = 0  # bytes of changes that are kept for the children
        self._landings = {
            each.part: PartLanding(each, layout, role.bucket_bytes) for each in role.incoming if each.mapped is None
        }
        sender.provide([size for landing in self._landings.values() for size in landing.relayed])
        self._mapped = {each.part: each for each in role.incoming if each.mapped is not None}

    async def run(self, version: int, specs: Any) -> ShardHeld:
        """Receive the complete version. A failure leaves no part of it in slots; the engine's own tensors may then hold
        a mixture.

        specs: what the children are told of the tensors.
        """
        self._version = version
        try:
            if self._role.base is not None and (self._base is None or self._base.proof != self._role.base):
                raise WeightsError(f"base mismatch: changes since {self._role.base} come, this rank has {self._base!r}")
            base = None if self._role.base is None or self._base is None else self._base.arrays()
            for landing in self._landings.values():
                if isinstance(self._into, Copies):
                    self._sender.bytes_copied += await in_thread(landing.open, self._into, base)
                else:
                    landing.open_in_place(self._into.tensors, based=base is not None)
            await self._feed.tell(Start(version, specs), self._feed.children)
            await self._follow_all()
            if self._proven != {each.part for each in self._role.incoming}:
                raise InternalError(f"{len(self._proven)} of {len(self._role.incoming)} parts are proven")
            with contextlib.suppress(ChildrenLostError):
                await self._sender.drained()
            own = None if isinstance(self._into, Copies) else self._into.tensors
            held = ShardHeld(self._layout, VersionProof(version, self._role.update), self._held, own)
            await in_thread(held.hash)
            return held
        except BaseException:
            for each in self._held:
                each.release()
            raise
        finally:
            for landing in self._landings.values():
                landing.abort()

    async def _follow_all(self) -> None:
        """Follow all parents, until the last task has ended; after the first error the others are cancelled."""
        first = None
        try:
            async with self._tasks:
                for name, upstream in self._upstreams.items():
                    self._begin(self._follow, name, upstream)
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
        if first is not None:
            raise first

    def _begin(self, work: Callable[P, Coroutine[Any, Any, None]], *arguments: P.args, **named: P.kwargs) -> None:
        """Begin a task of this version. A call in it that is cancelled by itself is an error, else ignored."""

        async def run() -> None:
            try:
                await work(*arguments, **named)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise InternalError("a part's task was cancelled") from error

        self._tasks.create_task(run())

    # --- one parent -------------------------------------------------------------------------------------------
    async def _follow(self, name: str, upstream: Upstream) -> None:
        """Take the messages of one parent, until it has sent all that the plan has for this receiver."""
        buckets = sum(landing.count(name) for landing in self._landings.values())
        mapped = {part for part, each in self._mapped.items() if each.mapped is not None and each.mapped[0] == name}
        if not self._role.whole:
            await start_of(name, upstream, self._version)
        while buckets or mapped:
            frame = await upstream.next()
            if isinstance(frame, Slices) and buckets:
                buckets -= 1
                landing = self._landings.get(frame.part)
                if landing is None:
                    raise ProtocolError(f"unexpected bucket of part {frame.part} from {name}")
                self._begin(self._take, landing, frame, *landing.bucket(frame, name))
            elif isinstance(frame, Placed) and frame.part in mapped:
                mapped.discard(frame.part)
                await self._map(self._mapped[frame.part], frame)
            else:
                raise ProtocolError(f"unexpected message from {name}: {type(frame).__name__}")

    async def _map(self, incoming: Incoming, frame: Placed) -> None:
        """Map a part that another receiver of the host has landed, and prove it here."""
        assert incoming.mapped is not None
        row_layout = row_layout_of(incoming, self._layout)
        ticket = Ticket.decode(frame.ticket)
        _, rank = incoming.mapped
        await in_thread(lambda: self._held.append(attach(ticket, rank, row_layout, frame.checksum)))
        self._proven.add(incoming.part)

    def _spoil(self) -> None:
        """Note, before the first byte of the engine's own tensors changes, that they are no version."""
        if isinstance(self._into, OwnTensors):
            self._into.spoilt = True

    # --- one bucket -------------------------------------------------------------------------------------------
    async def _take(self, landing: PartLanding, frame: Slices, bucket: list[Chunk], ticket: Ticket | None) -> None:
        """Read a bucket or its changes, put it into its place, relay it."""
        changes = None
        async with self._room:
            if ticket is None:
                await in_thread(landing.change, bucket, frame, _NOTHING)
            else:
                changes = await self._read(landing, frame, bucket, ticket)
        if landing.incoming.wired:
            await self._relay(landing, frame, bucket, ticket, changes)
        last = landing.placed()
        self._buckets, self._bytes = self._buckets + 1, self._bytes + (0 if ticket is None else ticket.size)
        self._progress(self._buckets, 0, self._bytes)
        if last:
            await self._conclude(landing)

    async def _relay(
        self, landing: PartLanding, frame: Slices, bucket: list[Chunk], ticket: Ticket | None, changes: Bytes | None
    ) -> None:
        """Send a bucket on: its changes, if they were kept, otherwise what stands in its place."""
        size, checksum = (0, 0) if ticket is None else (ticket.size, ticket.checksum or 0)
        fill = partial(landing.collect, bucket) if changes is None else partial(copied, changes)
        if frame.records and changes is None:
            size, checksum = size_of(bucket), frame.checksum
            frame = msgspec.structs.replace(frame, records=None, checksum=0)

        def filled(memory: memoryview) -> int:
            fill(memory)
            return checksum  # of what came, and was proven

        # A relay that waits for its children keeps none of the memory and threads that reading needs: this rank's
        # link would idle, and with it those of all before it. One bucket waits, the others behind it, in order.
        async with self._turn:
            await self._sender.send(size, landing.incoming.wired, frame, filled)
        if changes is not None:
            self._waiting -= len(changes)

    async def _read(self, landing: PartLanding, frame: Slices, bucket: list[Chunk], ticket: Ticket) -> Bytes | None:
        """Read a bucket into its place; returns its changes, if it has only these and they are relayed.

        None, too, where what waits for the children has as many bytes as may be read: a bucket needs no memory to
        wait in its place, from where all of it can be sent.
        """
        if self._client is None:
            raise InternalError("a replica that receives over a wire has no client")
        straight = landing.place_of(bucket) if frame.records is None else None
        if straight is None:
            data: Bytes = np.frombuffer(memoryview(self._buffers.take(ticket.size)), np.uint8)
        else:
            data = straight
            self._spoil()
        async with self._link:
            payload = await self._client.read(ticket, out=data, rank=landing.rank(frame.sender))
            # verified by its checksum, and read again when that fails, over a wire
        checksum = ticket.checksum or 0
        if payload.wire == "mapped" and await in_thread(_ring.checksum, data.data) != checksum:
            raise WeightsChecksumError(f"bucket {frame.index} of sender {frame.sender}: checksum mismatch")
        payload.release()
        if straight is not None:
            return None
        self._spoil()
        self._sender.bytes_copied += len(data)
        if frame.records is None:
            await in_thread(landing.place, bucket, data, checksum)
            return None
        await in_thread(landing.change, bucket, frame, data)
        most = self._sender.in_flight * self._role.bucket_bytes
        if not landing.incoming.wired or self._waiting + len(data) > most:
            return None
        self._waiting += len(data)
        return data

    async def _conclude(self, landing: PartLanding) -> None:
        """All of a part is here and proven: the host's other receivers may map it, unless it landed in place."""
        part = landing.incoming.part
        if isinstance(self._into, Copies):
            checksum = await in_thread(landing.checksum)
            ticket, held = landing.publish(checksum, self._into)
            self._held.append(held)
            await self._feed.tell(Placed(part, ticket.encode(), checksum), landing.incoming.local)
        self._proven.add(part)
