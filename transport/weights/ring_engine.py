"""RingEngine: weights over this package's rings, listeners and clients.

A trainer's engine sends. A replica's engine receives versions ("lands" them in shared memory), or maps what another
replica of its host has landed. Both are the same class, because a replica that lands may also relay. `build_topology`
assigns the roles.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec

from transport.client.client import UCXXClient
from transport.devices.libraries import parse_device
from transport.errors import InternalError, UsageError, WeightsError
from transport.runtime.arguments import expect
from transport.runtime.decoders import hiding
from transport.runtime.explaining import explained
from transport.runtime.progress import Progress, silent
from transport.schema import TensorSpec
from transport.settings import Settings
from transport.ticket import host_identity
from transport.weights.engine_holdings import EngineHoldings
from transport.weights.options import EngineOptions
from transport.weights.plan import topology
from transport.weights.plan.engine import Metadata, WeightEngine, Weights
from transport.weights.plan.steps import Proof
from transport.weights.plan.topology import Description, Shape
from transport.weights.transfer.feed import Feed, Upstream, announce_failure
from transport.weights.transfer.messages import Failed
from transport.weights.transfer.receiving import Landing, map_
from transport.weights.transfer.sending import Base, Sending, drain
from transport.weights.versions.copies import Held
from transport.wire.addresses import advertised

BUCKET_BYTES = 256 << 20
IN_FLIGHT = 2
_READ_TIMEOUT_S = 120.0  # of one bucket, retries included
_LEAST_BUCKET = 4096
_OPTIONS = EngineOptions()
# A bucket has one port, and the whole group waits for it: retry soon, or fail soon.
_SETTINGS = Settings(port_quarantine_s=0.2, port_quarantine_most_s=1.0, backoff_first_s=0.1, backoff_most_s=0.5)


@hiding("token")
class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The parent that a replica pulls from, and the replica's rank among the parent's readers."""

    parent: str
    address: str
    port: int
    token: str
    rank: int
    mapped: bool


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


class RingEngine(EngineHoldings[Held], WeightEngine):
    """One member's side of updates. Belongs to the loop of its first use; `close` releases everything.

    Args:
        name: unique in the group.
        bucket_bytes, in_flight: size and number of the buckets; every sender has memory for so many.
        delta: keep a copy of the last version, and send only the changes if every replica has that version.
        specs: the tensors of `send_weights`, if known before the first version; otherwise the first version is held in
            memory until its iterator ends.
        address: to listen on; default: the address of this host's default route.
        device: "cupy" or "torch" (":1" for the second device): received tensors are in its memory, as that library's
            arrays. Tensors that are sent may always be in device memory.
        progress: called with (done, due, bytes) while a version moves.
        options: further choices, for example ``options=EngineOptions(secret=b"…")``.

    Raises:
        UsageError: invalid sizes, or a missing device.
        MissingDependencyError: ``device`` without CuPy, torch or CUDA.
    """

    @explained
    def __init__(
        self,
        name: str,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        in_flight: int = IN_FLIGHT,
        delta: bool = False,
        specs: Sequence[TensorSpec] | None = None,
        address: str | None = None,
        device: str | None = None,
        progress: Progress = silent,
        options: EngineOptions = _OPTIONS,
    ) -> None:
        expect(options, EngineOptions, "options", "EngineOptions")
        if bucket_bytes < _LEAST_BUCKET or bucket_bytes % 64 or in_flight < 1:
            raise UsageError(
                f"bucket_bytes={bucket_bytes}, in_flight={in_flight}: give a multiple of 64, {_LEAST_BUCKET} or more, "
                "and at least one in flight"
            )
        self.name = name
        self._bucket_bytes = bucket_bytes
        self._specs = None if specs is None else tuple(specs)
        self._shape: Shape = options.shape
        self._fanout = options.fanout
        self._host = options.host or host_identity()
        self._address = address or advertised()[0]
        self._wires = options.wires
        self._secret = options.secret
        self._progress = progress
        self._device = None if device is None else parse_device(device)
        self._base = Base() if delta else None
        super().__init__(bucket_bytes, in_flight, self._address, options)
        self._upstream: Upstream | None = None
        self._link: Link | None = None
        self._mapped: tuple[str, ...] = ()
        self._from_base: Proof | None = None
        self._rank = 0

    def __repr__(self) -> str:
        return f"<RingEngine {self.name} {self._held!r}>"

    @property
    def sends(self) -> bool:
        """Whether this is the first of the group's trainers, which is the one that sends."""
        return self._rank == 0

    @property
    def proof(self) -> Proof | None:
        """The complete version that this member holds, verified on arrival."""
        if self._held is not None:
            return self._held.proof
        return self._base.proof if self._base is not None else None

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
        """Listen for the members that will pull from this one."""
        await self.finalize()
        self._feed = Feed(self._sender.lost)
        await self._feed.open(self._address)
        proof = self.proof
        description = Description(
            name=self.name,
            host=self._host,
            address=self._address,
            port=self._feed.port,
            token=self._feed.token,
            version=-1 if proof is None else proof.version,
            checksum=0 if proof is None else proof.checksum,
            shape=self._shape,
            fanout=self._fanout,
        )
        found: Metadata = msgspec.to_builtins(description)
        return found

    @classmethod
    def build_topology(
        cls, actor_n: int, rollout_n: int, metadata: list[Metadata]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 of the trainers sends. topology.py chooses each replica's parent."""
        found = [msgspec.convert(each, Description) for each in metadata]
        if len(found) != actor_n + rollout_n or actor_n < 1:
            raise UsageError(
                f"{len(found)} descriptions for {actor_n} trainers and {rollout_n} replicas: "
                "give one of each member, trainers first"
            )
        trainer, replicas = found[0], found[actor_n:]
        hops = topology.hops(replicas, trainer.shape, trainer.fanout)
        members = [*replicas, trainer]  # parent -1 is the last
        wired: list[list[str]] = [[] for _ in members]
        mapped: list[list[str]] = [[] for _ in members]
        links = []
        for replica, hop in zip(replicas, hops, strict=True):
            parent = members[hop.parent]
            readers = (mapped if hop.mapped else wired)[hop.parent]
            link = Link(
                parent=parent.name,
                address=parent.address,
                port=parent.port,
                token=parent.token,
                rank=len(readers) + hop.mapped,  # rank 0 of a landed version is the member that landed it
                mapped=hop.mapped,
            )
            links.append(msgspec.to_builtins(link))
            readers.append(replica.name)
        base = topology.base_of(trainer, replicas)
        nothing: list[Any] = [None] * (actor_n - 1)
        actor: dict[str, list[Any]] = {
            "rank": list(range(actor_n)),
            "link": [None] * actor_n,
            "wired": [wired[-1], *nothing],
            "mapped": [mapped[-1], *nothing],
            "base": [base, *nothing],
        }
        rollout: dict[str, list[Any]] = {
            "rank": list(range(actor_n, actor_n + rollout_n)),
            "link": links,
            "wired": wired[:-1],
            "mapped": mapped[:-1],
            "base": [base] * rollout_n,
        }
        return actor, rollout

    async def init_process_group(self, **arguments: Any) -> None:
        """Connect to the parent, and wait for the children. The arguments are those of `build_topology`."""
        feed = self._feed
        if feed is None:
            raise UsageError(f"{self.name}: call prepare() before init_process_group()")
        self._rank = int(arguments["rank"])
        wired, self._mapped = tuple(arguments["wired"] or ()), tuple(arguments["mapped"] or ())
        base = arguments["base"]
        self._from_base = None if base is None else Proof(*base)
        await self._sender.begin(feed, wired)
        await self._join(self.name, feed, [*wired, *self._mapped], self._connected(arguments["link"]))

    async def _connected(self, link: Any) -> list[Upstream]:
        """Connect to the parent, if there is one."""
        if link is None:
            return []
        self._link = msgspec.convert(link, Link)
        if self._client is None and not self._link.mapped:
            self._client = UCXXClient(
                wire="auto" if self._wires is None else self._wires, secret=self._secret, settings=_SETTINGS
            )
        self._upstream = await Upstream.connect(
            self._link.parent, self._link.address, self._link.port, self._link.token, self.name
        )
        return [self._upstream]

    async def finalize(self) -> None:
        """Leave the group, and release the version before the current one. Valid in every state."""
        upstream, self._upstream = self._upstream, None
        self._link = None
        await self._leave([] if upstream is None else [upstream])

    async def close(self) -> None:
        """Release everything, the current version too. Idempotent."""
        try:
            await self.finalize()
        finally:
            await self._release()

    # --- weights ---------------------------------------------------------------------------------------------
    async def send_weights(self, weights: Weights, global_steps: int) -> Proof | None:
        """Send, if this is the first trainer. Sends a delta if the whole group has the previous version."""
        if self._feed is None:
            raise UsageError(f"{self.name}: call init_process_group() before send_weights()")
        if self._rank != 0:
            await drain(weights)
            return None
        sending = Sending(self._feed, self._sender, self._bucket_bytes, self._specs, self._base, self._progress)
        try:
            proof, layout = await sending.run(weights, global_steps, self._from_base)
        except BaseException as error:
            kind = type(error).__name__
            await announce_failure(self._feed, Failed(kind, str(error) or kind))
            raise
        self._specs = layout.specs
        return proof

    async def receive(self, global_steps: int) -> Held:
        """Receive and prove a version. It is held from now on, and the previous one until `finalize`."""
        link, upstream, feed = self._link, self._upstream, self._feed
        if link is None or upstream is None or feed is None:
            raise UsageError(f"{self.name}: call init_process_group() before receive_weights()")
        try:
            held = await self._receive(link, upstream, feed, global_steps)
        except BaseException:
            upstream.close()  # the parent need not wait for this one
            raise
        if self._previous is not None:
            self._previous.release()
        self._previous, self._held = self._held, held
        return held

    async def _receive(self, link: Link, upstream: Upstream, feed: Feed, version: int) -> Held:
        if link.mapped:
            return await map_(upstream, version, link.rank)
        if self._client is None:
            raise InternalError("a replica that receives over a wire has no client")
        landing = Landing(
            upstream,
            self._client,
            link.rank,
            self._copies,
            feed,
            self._mapped,
            self._sender,
            self._held,
            _READ_TIMEOUT_S,
            self._progress,
        )
        return await landing.run(version)

    def revert(self) -> None:
        """Return to the version before, or to none, because the new one is not to be served. Only until `finalize`."""
        held, self._held, self._previous = self._held, self._previous, None
        if held is not None:
            held.release()

    async def receive_weights(self, global_steps: int) -> AsyncIterator[tuple[str, Any]]:
        """The arrays of a version, once all of it is proven. Their memory remains as long as they exist."""
        held = await self.receive(global_steps)
        for name, array in self.arrays(held):
            yield name, array

    async def get_weights(self) -> AsyncIterator[tuple[str, Any]]:
        """The version that is held."""
        if self._held is not None:
            for name, array in self.arrays(self._held):
                yield name, array

    def arrays(self, held: Held) -> Iterator[tuple[str, Any]]:
        """The tensors of a version that is held: read-only views of it, or with ``device=`` copies there.

        See `Held.on_device` for the memory of these, and for what comes after their arrival.
        """
        if self._device is None:
            return iter(held.arrays().items())
        return held.on_device(*self._device, self._bucket_bytes)

    in_place = spoilt = False

    @property
    def on_device(self) -> bool:
        """Whether received tensors are in device memory."""
        return self._device is not None

    async def __aenter__(self) -> RingEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(WeightsError):
            await self.close()
