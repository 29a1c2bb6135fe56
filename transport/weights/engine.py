"""WeightsEngine: weights of which every trainer rank sends its shards, and every receiver gets those it wants.

    trainer = WeightsEngine("trainer 0", layout)               # what this rank has
    server = WeightsEngine("server 0", layout)                 # what this rank wants

No rank has the model. `build_topology` computes the plan from the layouts, once as long as they stay. A rank that
sends and one that receives are the same class. Without a layout the first trainer's rank sends the whole model,
whatever its tensors are, as one part that all receivers want. Memory: a sender has `in_flight` buckets; a
receiver two versions of what it lands, `in_flight` buckets for arrivals, as many if it relays, and as many bytes of
changes that wait there; with ``in_place`` no version.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from transport.client.client import UCXXClient
from transport.devices.buffers import BufferPool
from transport.devices.libraries import parse_device
from transport.errors import ClosedError, ProtocolError, SchemaError, UsageError, WeightsTimeoutError
from transport.runtime.progress import Progress, silent
from transport.schema import TensorSpec
from transport.ticket import memory_identity
from transport.weights.options import EngineOptions
from transport.weights.plan.steps import Metadata, VersionProof, Weights
from transport.weights.sharding.layouts import Layout
from transport.weights.sharding.roles import RankRole, ShardDescription, completed, pack, unpack
from transport.weights.sharding.shards import whole_model
from transport.weights.transfer.bucket_sender import SETTINGS, BucketSender
from transport.weights.transfer.changes import ShardBase
from transport.weights.transfer.feed import Feed, Upstream, announce_failure
from transport.weights.transfer.parts import OwnTensors
from transport.weights.transfer.receiving import ShardReceiving, start_of
from transport.weights.transfer.sending import ShardSending, iterate
from transport.weights.transfer.threads import ended, in_thread
from transport.weights.versions.copies import Copies, ShardHeld
from transport.weights.versions.layout import specs_of
from transport.weights.versions.tensors import on_host, tensor_of
from transport.wire.addresses import advertised

_BUCKET_BYTES, _IN_FLIGHT = 32 << 20, 8
_WHOLE_BUCKET_BYTES, _WHOLE_IN_FLIGHT = 256 << 20, 2  # of whole models
_LEAST_BUCKET = 4096
_OPTIONS = EngineOptions()


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine was made.

    Attributes:
        bytes_sent: bytes over this member's link; each bucket counts once for each child that pulled it.
        bytes_copied: bytes that this member copied from memory to memory. A mapped version is not copied.
        bytes_received: bytes that UCX put into this member's memory, by wire.
    """

    version: int
    bytes_sent: int
    bytes_copied: int
    bytes_received: dict[str, int]


class WeightsEngine:
    """One rank's side of updates, with the method names of verl's checkpoint engines.

    Belongs to the loop of its first use; `close` releases everything: each step of an end is taken whatever the others
    raise, and where a cancellation comes in between.

    Args:
        name: unique among all ranks.
        layout: of the tensors that this rank has (a trainer's) or wants. None, of all ranks or of no one: the whole
            model, which the first trainer sends.
        bucket_bytes: largest size of buckets; default: 32 MiB, without a layout 256 MiB. All ranks use the smallest
            size that one of them has, or less: with layouts a 64th of the largest part for each hop, but 256 KiB at
            least.
        address: to listen on; default: the address of this host's default route.
        in_place: the engine's own tensors by name, in host memory: versions land in them, and in no slot. An update
            that fails after its first byte has spoilt them: `spoilt` is true until the next version is complete.
        device: "cupy" or "torch" (":1" for the second device): received tensors are copied to its memory, as that
            library's arrays. Tensors that are sent may always be in device memory.
        delta: of a trainer's rank: keep what was sent last, which takes as much memory again, and send changes since
            then where all senders do so and all receivers have that version.
        specs: without a layout: the tensors of `send_weights`, if known before the first version; otherwise the first
            version is held in memory until its iterator ends.
        progress: called with (done, due, bytes) while a version moves.
        options: further choices; ``shape`` and ``fanout`` of the first trainer's rank count.

    Raises:
        UsageError, SchemaError: sizes that make no sense, or tensors that do not fit the layout.
    """

    def __init__(
        self,
        name: str,
        layout: Layout | None = None,
        *,
        bucket_bytes: int | None = None,
        address: str | None = None,
        in_place: Mapping[str, Any] | None = None,
        device: str | None = None,
        delta: bool = False,
        specs: Sequence[TensorSpec] | None = None,
        progress: Progress = silent,
        options: EngineOptions = _OPTIONS,
    ) -> None:
        if bucket_bytes is None:
            bucket_bytes = _WHOLE_BUCKET_BYTES if layout is None else _BUCKET_BYTES
        in_flight = options.in_flight
        if in_flight is None:
            in_flight = _WHOLE_IN_FLIGHT if layout is None else _IN_FLIGHT
        if bucket_bytes < _LEAST_BUCKET or bucket_bytes % 64 or in_flight < 1:
            raise UsageError(
                f"bucket_bytes={bucket_bytes}, in_flight={in_flight}: give a multiple of 64, {_LEAST_BUCKET} or more, "
                "and at least one in flight"
            )
        if in_place is not None and device is not None:
            raise UsageError("in_place and device exclude each other: in_place is for tensors in host memory")
        self.name = name
        self.layout = layout
        self._bucket_bytes = bucket_bytes
        self._own = None if in_place is None else OwnTensors(layout, in_place)
        self._specs = None if specs is None else tuple(specs)
        self._options = options
        self._host = options.host or memory_identity()
        self._address = address or advertised()[0]
        self._progress = progress
        self._device = None if device is None else parse_device(device)
        self._sender = BucketSender(
            in_flight,
            address=self._address,
            wires=None if options.wires is None else options.wires - {"mapped"} or None,
            secret=options.secret,
            rate=options.rate,
            stall_s=options.stall_s,
            prefix=options.prefix,
        )
        self._copies = Copies(options.prefix)
        self._client: UCXXClient | None = None
        self._feed: Feed | None = None
        self._held: ShardHeld | None = None  # the current version
        self._previous: ShardHeld | None = None  # the one before, until `finalize`
        self._process = os.getpid()
        self._buffers = BufferPool(in_flight * bucket_bytes)
        self._packed = "" if layout is None else pack(layout)
        self._role: RankRole | None = None
        self._upstreams: dict[str, Upstream] = {}
        self._base = ShardBase() if delta else None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self._held!r}>"

    @property
    def held(self) -> ShardHeld | None:
        """The complete version that this member holds."""
        return self._held

    @property
    def previous(self) -> ShardHeld | None:
        """The version before, which `revert` returns to; None after `finalize`."""
        return self._previous

    @property
    def proof(self) -> VersionProof | None:
        """The complete version that this rank holds, or has kept to send changes since then."""
        if self._held is not None:
            return self._held.proof
        return None if self._base is None else self._base.proof

    @property
    def sends(self) -> bool:
        """True if this rank sends in its group; without a layout only the first trainer's does."""
        return self._role is None or bool(self._role.outgoing)

    @property
    def spoilt(self) -> bool:
        """True if the engine's own tensors hold a mixture: an update began to change them and did not complete."""
        return self._own is not None and self._own.spoilt

    @property
    def in_place(self) -> bool:
        """True if versions land in the engine's own tensors."""
        return self._own is not None

    @property
    def on_device(self) -> bool:
        """True if received tensors are in device memory."""
        return self._device is not None

    def statistics(self) -> EngineStatistics:
        """Counters at this moment."""
        carried = {} if self._client is None else self._client.statistics().bytes_by_wire
        proof = self.proof
        return EngineStatistics(
            version=-1 if proof is None else proof.version,
            bytes_sent=self._sender.bytes_sent,
            bytes_copied=self._sender.bytes_copied,
            bytes_received=carried,
        )

    # --- the group ------------------------------------------------------------------------------------------
    async def prepare(self) -> Metadata:
        """Listen for the ranks that will pull from this one; returns what they need to connect, as plain values."""
        await self.finalize()
        self._feed = Feed(self._sender.lost, self._options.stall_s)
        await self._feed.open(self._address)
        described = ShardDescription(
            name=self.name,
            host=self._host,
            address=self._address,
            port=self._feed.port,
            token=self._feed.token,
            layout=self._packed,
            bucket_bytes=self._bucket_bytes,
            in_place=self.in_place,
            proof=None if self.spoilt else self.proof,
            shape=self._options.shape,
            fanout=self._options.fanout,
        )
        return {"ranks": [msgspec.to_builtins(described)], "in_place": self.in_place}

    async def init_process_group(self, **arguments: Any) -> None:
        """Connect to the ranks that this one pulls from, and wait for those that pull from it; these hear of a failure.

        A parent that fails meanwhile ends the wait: its failure may be the reason why a child does not come.
        """
        feed = self._feed
        if feed is None:
            raise UsageError(f"{self.name}: call prepare() before init_process_group()")
        (packed,) = arguments["roles"]
        self._role = role = unpack(packed, RankRole)
        self._sender.begin(feed, role.readers)
        if self._client is None and any(each.mapped is None for each in role.incoming):
            wires = self._options.wires
            self._client = UCXXClient(
                wire="auto" if wires is None else wires, secret=self._options.secret, settings=SETTINGS
            )
        try:
            try:
                async with asyncio.timeout(self._options.join_s):
                    await feed.joined(role.children, await self._connected(role))
            except TimeoutError:
                missing = ", ".join(sorted(feed.missing(role.children))) or "an answer of its parents"
                raise WeightsTimeoutError(
                    f"{self.name}: the group was not complete within {self._options.join_s:g} s (join_s), missing: "
                    f"{missing}; look at the logs of these"
                ) from None
        except BaseException as error:
            await announce_failure(feed, error)
            raise

    async def _connected(self, role: RankRole) -> list[Upstream]:
        """Connect to all parents."""

        async def connect(peer: Any) -> None:
            self._upstreams[peer.name] = await Upstream.connect(
                peer.name, peer.address, peer.port, peer.token, self.name, self._options.stall_s
            )

        tasks = [asyncio.ensure_future(connect(peer)) for peer in role.peers]
        try:
            await asyncio.gather(*tasks)
        finally:
            await ended(*tasks)
        return list(self._upstreams.values())

    async def finalize(self) -> None:
        """Leave the group, and release the version before the current one. Valid in every state."""
        self._check_process()
        upstreams, self._upstreams = self._upstreams, {}
        feed, self._feed = self._feed, None
        previous, self._previous = self._previous, None
        self._role = None
        async with contextlib.AsyncExitStack() as stack:
            if previous is not None:
                stack.push_async_callback(in_thread, self._copies.trim)
                stack.push_async_callback(in_thread, previous.release)
            stack.callback(self._sender.abandon)
            if feed is not None:
                stack.push_async_callback(feed.close)
            for upstream in upstreams.values():
                stack.callback(upstream.close)

    async def close(self) -> None:
        """Release everything, the current version too. Idempotent."""
        self._check_process()
        held, client = self._held, self._client
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(in_thread, self._copies.close)
            stack.push_async_callback(in_thread, self._sender.close)
            if client is not None:
                stack.push_async_callback(client.close)
            if held is not None:
                stack.push_async_callback(in_thread, held.release)
            stack.push_async_callback(self.finalize)  # first
            self._held = self._client = None

    def _check_process(self) -> None:
        """ClosedError in a forked child, which has neither the connections nor the threads of its parent."""
        if self._process != os.getpid():
            raise ClosedError("a forked child does not have its parent's engine of weights; make one in the child")

    # --- weights ---------------------------------------------------------------------------------------------
    async def send_weights(self, weights: Weights | Mapping[str, Any], global_steps: int) -> VersionProof | None:
        """Send this rank's shards; returns when all that want them have read them. None: this rank sends nothing.

        weights: its local tensors by name, or pairs of name and tensor, which are then held until the end. Tensors
            must not change meanwhile. Without a layout pairs are held only while they are sent, once the model's
            tensors are known; they come in an order that stays. A plain iterator has the loop while it makes a tensor:
            one that may take longer than ``stall_s`` is to be an asynchronous one, else receivers take this member for
            stopped.
        """
        feed, role, layout = self._feed, self._role, self.layout
        if feed is None or role is None:
            raise UsageError(f"{self.name}: call init_process_group() before send_weights()")
        if role.whole and not role.outgoing:
            if not isinstance(weights, Mapping):
                async for _ in iterate(weights):
                    pass  # the other trainers wait until the tensors are produced
            return None
        self._role = msgspec.structs.replace(role, base=None)  # the group's next version is whole
        try:
            tensors: Any = weights
            if not isinstance(weights, Mapping) and (layout is not None or self._specs is None):
                tensors = {}
                async for name, value in iterate(weights):
                    if name in tensors:
                        raise SchemaError(f"{name}: two tensors have this name")
                    # a device has no room for all of a model at once
                    tensors[name] = value if layout is not None else await in_thread(on_host, tensor_of(value, name))
            specs = None
            if layout is None:
                if self._specs is None:
                    self._specs = specs_of(tensors)
                layout = await in_thread(whole_model, self._specs)  # of a hundred thousand tensors it takes seconds
                role = await in_thread(completed, role, layout)
                specs = tuple((each.name, each.dtype, each.shape) for each in self._specs)
            if not isinstance(tensors, Mapping):
                tensors = iterate(tensors)
            sending = await in_thread(
                ShardSending,
                feed,
                self._sender,
                layout,
                role.outgoing,
                role.bucket_bytes,
                self._progress,
                self._base,
                role.base,
            )
            await sending.run(tensors, global_steps, specs)
            if self._base is not None:
                self._base.end(VersionProof(global_steps, role.update))
        except BaseException as error:
            await announce_failure(feed, error)
            raise
        return VersionProof(global_steps, role.update)

    async def receive(self, global_steps: int) -> ShardHeld:
        """Receive and prove a version. It is held from now on, and the previous one until `finalize`."""
        feed, role = self._feed, self._role
        if feed is None or role is None:
            raise UsageError(f"{self.name}: call init_process_group() before receive_weights()")
        self._role = msgspec.structs.replace(role, base=None)  # the group's next version is whole
        layout, specs = self.layout, None
        try:
            if layout is None:
                ((name, upstream),) = self._upstreams.items()
                specs = (await start_of(name, upstream, global_steps)).specs
                if specs is None:
                    raise ProtocolError(f"{name} says nothing of the model's tensors")
                layout = await in_thread(lambda: whole_model(tuple(TensorSpec(*spec) for spec in specs)))
                if self._own is not None:
                    self._own.fit(layout)
                role = await in_thread(completed, role, layout)
            receiving = await in_thread(
                ShardReceiving,
                role,
                layout,
                self._upstreams,
                self._client,
                self._copies if self._own is None else self._own,
                self._buffers,
                feed,
                self._sender,
                self._held,
                self._progress,
            )
            held = await receiving.run(global_steps, specs)
        except BaseException as error:
            await announce_failure(feed, error)
            for upstream in self._upstreams.values():
                upstream.close()  # the parents need not wait for this one
            raise
        if self._previous is not None:
            self._previous.release()
        self._previous, self._held = self._held, held
        if self._own is not None:
            self._own.spoilt = False
        return held

    def revert(self) -> None:
        """Return to the version before, or to none, because the new one is not to be served. Only until `finalize`.

        Where versions land in place the one before is gone: the engine's own tensors are no version then.
        """
        if self._own is not None:
            self._own.spoilt = True
            return
        held, self._held, self._previous = self._held, self._previous, None
        if held is not None:
            held.release()

    async def receive_weights(self, global_steps: int) -> AsyncIterator[tuple[str, Any]]:
        """Yield the tensors of a version, once all of it is proven. Their memory remains as long as they exist."""
        held = await self.receive(global_steps)
        for name, array in self.arrays(held):
            yield name, array

    async def get_weights(self) -> AsyncIterator[tuple[str, Any]]:
        """Yield the version that is held."""
        if self._held is not None:
            for name, array in self.arrays(self._held):
                yield name, array

    def arrays(self, held: ShardHeld) -> Iterable[tuple[str, Any]]:
        """Return the tensors of a held version: views, the engine's own tensors, or with ``device=`` copies there."""
        if self._device is None:
            return held.arrays().items()
        return held.on_device(*self._device, self._bucket_bytes)
