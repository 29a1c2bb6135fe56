"""A replica's side of the data path: a version is received and verified as a whole before it is announced.

`Landing` pulls buckets over a wire into memory that its host can map, and relays them to its children. `map_` waits
until another replica of the host has landed the version. Either returns a complete and proven version, or raises and
leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from transport import _ring
from transport.client.client import UCXXClient
from transport.errors import (
    ChildrenLostError,
    ProtocolError,
    SchemaError,
    WeightsChecksumError,
    WeightsError,
)
from transport.ring.leases import WriteLease
from transport.runtime.progress import Progress, silent
from transport.schema import TensorSpec
from transport.ticket import Ticket
from transport.weights.plan.steps import Proof
from transport.weights.transfer.bucket_sender import BucketSender
from transport.weights.transfer.feed import Feed, Upstream, announce_failure
from transport.weights.transfer.messages import Begin, Bucket, End, Failed, Landed
from transport.weights.transfer.threads import ended, in_thread
from transport.weights.versions import delta
from transport.weights.versions.copies import Copies, Held, attach
from transport.weights.versions.layout import VersionLayout

_AHEAD = 2  # buckets being read while one is worked on; the parent has no more in flight

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def _layout_of(begin: Begin) -> VersionLayout:
    return VersionLayout.of(TensorSpec(*spec) for spec in begin.specs)


async def _begin(upstream: Upstream, version: int) -> Begin:
    frame = await upstream.next()
    if not isinstance(frame, Begin):
        raise ProtocolError(f"unexpected message at the start of a version: {type(frame).__name__}, expected Begin")
    if frame.version != version:
        raise WeightsError(f"version mismatch: received v{frame.version}, expected v{version}")
    return frame


async def map_(upstream: Upstream, version: int, rank: int) -> Held:
    """Map the version that the parent has landed, and prove it here."""
    layout = _layout_of(await _begin(upstream, version))
    frame = await upstream.next()
    if not isinstance(frame, Landed):
        raise ProtocolError(f"unexpected message: {type(frame).__name__}, expected Landed")
    ticket = Ticket.decode(frame.ticket)
    work = asyncio.ensure_future(asyncio.to_thread(attach, ticket, rank, layout, version, frame.checksum))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(_let_go)
        raise


def _let_go(work: asyncio.Future[Held]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().release()


class Landing:
    """Receives one version and relays it to the children. Create it, and `run` it once.

    Args:
        rank: of this replica among those that pull from the parent.
        mapped: names of the children on this host, by rank from 1; they map what is landed here.
        sender: to the children that pull over a wire.
        base: complete weights that changes can be applied to.
    """

    def __init__(
        self,
        upstream: Upstream,
        client: UCXXClient,
        rank: int,
        copies: Copies,
        feed: Feed,
        mapped: Sequence[str],
        sender: BucketSender,
        base: Held | None,
        read_timeout_s: float,
        progress: Progress = silent,
    ) -> None:
        self._upstream = upstream
        self._client = client
        self._rank = rank
        self._copies = copies
        self._feed = feed
        self._mapped = tuple(mapped)
        self._sender = sender
        self._base = base
        self._read_timeout_s = read_timeout_s
        self._progress = progress
        self._hasher = _ring.Checksum()
        self._hashed = 0

    async def run(self, version: int) -> Held:
        """Receive the complete version. A failure is sent to the children, and leaves no part of the version."""
        try:
            return await self._run(version)
        except BaseException as error:
            kind = type(error).__name__
            await announce_failure(self._feed, Failed(kind, str(error) or kind))
            raise

    async def _run(self, version: int) -> Held:
        begin = await _begin(self._upstream, version)
        layout = _layout_of(begin)
        lease = await self._slot(layout)
        try:
            row = np.frombuffer(lease.memory, np.uint8)
            await self._feed.tell(begin, self._feed.children)
            if begin.base >= 0:
                await self._copy_base(begin, layout, row)
            end = await self._buckets(layout, row, begin.base >= 0)
            checksum = self._hasher.digest() if begin.base < 0 else await in_thread(_ring.checksum, row.data)
            if checksum != end.checksum or (begin.base < 0 and self._hashed != layout.total):
                raise WeightsChecksumError(
                    f"v{version}: checksum mismatch: received {checksum:016x}, expected {end.checksum:016x}"
                )
            lease.checksum = checksum
            ticket = lease.publish()
        except BaseException:
            lease.abort()
            raise
        held = self._copies.hold(ticket, layout, Proof(version, checksum))
        try:
            await self._feed.tell(Landed(ticket.encode(), checksum), self._mapped)
            await self._feed.tell(end, self._sender.children)
            with contextlib.suppress(ChildrenLostError):
                await self._sender.drained()
        except BaseException:
            held.release()
            raise
        return held

    async def _slot(self, layout: VersionLayout) -> WriteLease:
        work = asyncio.ensure_future(asyncio.to_thread(self._copies.take, layout.total, 1 + len(self._mapped)))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_abort)
            raise

    async def _copy_base(self, begin: Begin, layout: VersionLayout, row: Bytes) -> None:
        base = self._base
        if base is None or base.proof != Proof(begin.base, begin.base_checksum) or base.layout != layout:
            raise SchemaError(f"base mismatch: received changes against v{begin.base}, this replica has {base!r}")
        await in_thread(_ring.copy, row.data, base.row)
        self._sender.bytes_copied += len(row)

    # --- buckets -----------------------------------------------------------------------------------------
    async def _buckets(self, layout: VersionLayout, row: Bytes, changes: bool) -> End:
        """Read every bucket into its range, in order; up to `_AHEAD` are read while one is hashed and relayed."""
        reads: deque[tuple[Bucket, Bytes, asyncio.Task[Any]]] = deque()
        count = 0
        try:
            while True:
                frame = await self._upstream.next()
                if isinstance(frame, End):
                    break
                if not isinstance(frame, Bucket) or frame.index != count:
                    raise ProtocolError(f"unexpected message: {type(frame).__name__}, expected bucket {count}")
                count += 1
                ticket = Ticket.decode(frame.ticket)
                place = np.empty(ticket.size, np.uint8) if changes else self._place(frame, ticket, layout, row)
                read = self._client.read(ticket, out=place, rank=self._rank, timeout=self._read_timeout_s)
                reads.append((frame, place, asyncio.get_running_loop().create_task(read)))
                if len(reads) >= _AHEAD:
                    await self._take(row, *reads.popleft())
            while reads:
                await self._take(row, *reads.popleft())
        finally:
            await ended(*(task for _, _, task in reads))
        if frame.buckets != count:
            raise ProtocolError(f"bucket count mismatch: received {count}, sent {frame.buckets}")
        return frame

    def _place(self, frame: Bucket, ticket: Ticket, layout: VersionLayout, row: Bytes) -> Bytes:
        if frame.records or not 0 <= frame.start <= frame.start + ticket.size <= layout.total:
            raise ProtocolError(f"bucket {frame.index} does not fit a version of {layout.total} bytes")
        return row[frame.start : frame.start + ticket.size]

    async def _take(self, row: Bytes, frame: Bucket, place: Bytes, read: asyncio.Task[Any]) -> None:
        try:
            payload = await read  # verified by the bucket's checksum, and read again when that fails, over a wire
            if payload.wire == "mapped" and await in_thread(_ring.checksum, place.data) != payload.ticket.checksum:
                raise WeightsChecksumError(f"bucket {frame.index}: checksum mismatch")
        except BaseException:
            await ended(read)
            raise
        payload.release()
        if frame.records:
            await in_thread(_apply, frame, place, row)
            self._sender.bytes_copied += len(place)
        else:
            if frame.start != self._hashed:
                raise ProtocolError(
                    f"bucket {frame.index}: offset mismatch: received {frame.start}, expected {self._hashed}"
                )
            await in_thread(self._hasher.update, place.data)
            self._hashed += len(place)
        if self._sender.children:

            def fill(lease: WriteLease) -> None:
                lease.checksum = payload.ticket.checksum
                _ring.copy(lease.memory, place.data)

            with contextlib.suppress(ChildrenLostError):  # a landing that loses all its children lands for its host
                await self._sender.send(len(place), fill, frame.start, frame.records)
        self._progress(frame.index + 1, 0, self._hashed)


def _apply(frame: Bucket, data: Bytes, row: Bytes) -> None:
    at = 0
    for fields in frame.records:
        record = delta.checked(fields)
        size = record.encoded_bytes
        delta.apply(record, data[at : at + size], row)
        at += size


def _abort(work: asyncio.Future[WriteLease]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().abort()
