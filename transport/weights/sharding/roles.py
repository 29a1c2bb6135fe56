"""The role of each rank in one update: from the descriptions of all ranks and the plan. No I/O.

Receivers of a part are ordered as `topology.hops` orders replicas: one of each host lands the part, the others of the
host map it, the landings relay it to each other. A relay always stands before its children in one order of all
receivers, so that no two of them can wait for each other.
"""

from __future__ import annotations

import base64
import secrets
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from transport.decoders import convert, msgpack_decoder
from transport.errors import ProtocolError, SchemaError, UsageError
from transport.runtime.hiding import hiding
from transport.weights.plan import topology
from transport.weights.plan.steps import VersionProof
from transport.weights.plan.topology import Hop
from transport.weights.sharding.layouts import Layout
from transport.weights.sharding.plan import ShardPart, ShardStream, Slice, make_plan

T = TypeVar("T")

_KEPT_PLANS = 2
_WIDE = 4  # fan-out for parts of few bytes
_STEPS = 64  # buckets of a large part for each hop: a hop lets about three of them pass before it has one to pass on
_FINEST = 256 << 10  # below this a bucket costs more than its bytes
_MOST_BYTES = 256 << 20  # of a packed value


@hiding("token")
class ShardDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's description of itself.

    layout: packed; of what it has (a trainer's rank) or wants. Empty: the whole model, whatever its tensors are.
    in_place: it receives into its own tensors, which no other process can map.
    proof: the complete version that it has, which changes can be based on.
    """

    name: str
    host: str
    address: str
    port: int
    token: str
    layout: str
    bucket_bytes: int
    in_place: bool = False
    proof: VersionProof | None = None
    shape: topology.Shape = "tree"
    fanout: int = topology.FANOUT


@hiding("token")
class ParentRank(msgspec.Struct, frozen=True, array_like=True):
    """A rank that this one pulls from."""

    name: str
    address: str
    port: int
    token: str


class BucketSource(NamedTuple):
    """Source of a stream's buckets: the peer, and this rank's number among the readers there."""

    sender: int
    parent: str
    rank: int
    slices: tuple[Slice, ...]


class Incoming(NamedTuple):
    """A part that this rank gets.

    part: its number in the plan.
    tensors: numbers of its tensors in this rank's layout, in the part's order.
    mapped: (name of the landing, rank among its readers) if it is mapped; then there are no sources.
    local: children of this host that map it. wired: children that its buckets are relayed to.
    """

    part: int
    tensors: tuple[int, ...]
    mapped: tuple[str, int] | None
    sources: tuple[BucketSource, ...]
    local: tuple[str, ...]
    wired: tuple[str, ...]


class Outgoing(NamedTuple):
    """A stream that this rank sends. ``dtypes``: of the part's tensors."""

    part: int
    sender: int
    children: tuple[str, ...]
    dtypes: tuple[str, ...]
    slices: tuple[Slice, ...]


class RankRole(msgspec.Struct, frozen=True, array_like=True):
    """Role of a rank in one update: whom it sends to, and what it receives.

    update: a number that this update has and no other; together with the version it is what members prove.
    bucket_bytes: of all streams: what every rank has room for, or less, so that a chain of relays is soon filled.
    base: the version that all ranks have, where buckets may hold changes since it.
    whole: the first sender sends its whole model to all receivers, as one part; `completed` with its tensors once they
        are known.
    """

    update: int
    bucket_bytes: int
    peers: tuple[ParentRank, ...] = ()
    incoming: tuple[Incoming, ...] = ()
    outgoing: tuple[Outgoing, ...] = ()
    base: VersionProof | None = None
    whole: bool = False

    @property
    def readers(self) -> list[str]:
        """The ranks that read buckets of this one's ring, each once."""
        found = dict.fromkeys(name for each in self.outgoing for name in each.children)
        return list(found | dict.fromkeys(name for each in self.incoming for name in each.wired))

    @property
    def children(self) -> list[str]:
        """All ranks that pull from this one, each once: the readers, and those that map what it lands."""
        return list(dict.fromkeys([*self.readers, *(name for each in self.incoming for name in each.local)]))


def pack(value: Any) -> str:
    """Return a value as text, which any framework's remote calls carry."""
    return base64.b64encode(zlib.compress(_encode(value), 1)).decode("ascii")


def unpack(text: str, kind: type[T]) -> T:
    """Return what `pack` made. ProtocolError for anything else."""
    try:
        unzip = zlib.decompressobj()
        data = unzip.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
        if unzip.unconsumed_tail or not unzip.eof:
            raise ValueError(f"more than {_MOST_BYTES} bytes, or cut short")
        return msgpack_decoder(kind)(data)
    except (ValueError, zlib.error, msgspec.MsgspecError, RecursionError, AttributeError, TypeError) as error:
        raise ProtocolError(f"not a {kind.__name__} ({len(text)} characters): {error}") from error


@lru_cache(_KEPT_PLANS)
def plan_of(senders: tuple[str, ...], receivers: tuple[str, ...]) -> tuple[ShardPart, ...]:
    """`make_plan` for packed layouts; remembered, because they are the same in every update."""
    layouts = {text: unpack(text, Layout) for text in {*senders, *receivers}}
    return make_plan([layouts[each] for each in senders], [layouts[each] for each in receivers])


def roles(
    senders: Sequence[ShardDescription], receivers: Sequence[ShardDescription], update: int, *, whole: bool = False
) -> tuple[list[RankRole], list[RankRole]]:
    """One role for each sender and each receiver. ``whole``: all bytes are sent, not changes.

    Raises what `make_plan` and `topology.hops` raise.
    """
    everyone = [*senders, *receivers]
    if not senders or not receivers or len({each.name for each in everyone}) != len(everyone):
        raise UsageError(
            f"{len(senders)} senders and {len(receivers)} receivers: give at least one of each, with different names"
        )
    whole_model = not senders[0].layout
    if whole_model:
        if any(each.layout for each in everyone):
            raise UsageError("some ranks have a layout and others the whole model: give all of them one, or none")
        everyone = [senders[0], *receivers]
        everywhere = tuple(range(len(receivers)))
        plan: tuple[ShardPart, ...] = (ShardPart(everywhere, ((),) * len(receivers), (), (ShardStream(0, (), 0),)),)
    else:
        plan = plan_of(tuple(each.layout for each in senders), tuple(each.layout for each in receivers))
    room = min(each.bucket_bytes for each in everyone)
    place = _order(receivers)
    groups = [sorted(part.receivers, key=place.__getitem__) for part in plan]
    trees = [
        _hops(
            [receivers[each] for each in among],
            senders[0],
            part.nbytes,
            min(room, _FINEST),
        )
        for part, among in zip(plan, groups, strict=True)
    ]
    sizes = [(part.nbytes, topology.depth(hops)) for part, hops in zip(plan, trees, strict=True)]
    bucket_bytes = room if whole_model else finer(room, sizes)
    proof, *others = {each.proof for each in everyone}
    base = None if whole or others else proof
    incoming: list[list[Incoming]] = [[] for _ in receivers]
    outgoing: list[list[Outgoing]] = [[] for _ in senders]
    parents: list[dict[str, ShardDescription]] = [{} for _ in receivers]
    for number, (part, among, hops) in enumerate(zip(plan, groups, trees, strict=True)):
        firsts = tuple(receivers[each].name for each, hop in zip(among, hops, strict=True) if hop.parent < 0)
        wired: list[list[str]] = [[] for _ in among]
        local: list[list[str]] = [[] for _ in among]
        for each, hop in zip(among, hops, strict=True):
            if hop.parent >= 0:
                (local if hop.mapped else wired)[hop.parent].append(receivers[each].name)
        numbers = dict(zip(part.receivers, part.numbers, strict=True))
        dtypes = tuple(tensor.dtype for tensor in part.tensors)
        for stream in part.streams:
            outgoing[stream.sender].append(Outgoing(number, stream.sender, firsts, dtypes, stream.slices))
        for at, (each, hop) in enumerate(zip(among, hops, strict=True)):
            name = receivers[each].name
            mapped, sources = None, []
            if hop.mapped:
                parent = receivers[among[hop.parent]]
                parents[each][parent.name] = parent
                mapped = parent.name, 1 + local[hop.parent].index(name)  # rank 0 is the landing itself
            for stream in () if hop.mapped else part.streams:
                parent = senders[stream.sender] if hop.parent < 0 else receivers[among[hop.parent]]
                parents[each][parent.name] = parent
                rank = firsts.index(name) if hop.parent < 0 else wired[hop.parent].index(name)
                sources.append(BucketSource(stream.sender, parent.name, rank, stream.slices))
            incoming[each].append(
                Incoming(
                    number,
                    numbers[each],
                    mapped,
                    tuple(sources),
                    tuple(local[at]),
                    tuple(wired[at]),
                )
            )
    return (
        [RankRole(update, bucket_bytes, outgoing=tuple(each), base=base, whole=whole_model) for each in outgoing],
        [
            RankRole(
                update,
                bucket_bytes,
                tuple(ParentRank(peer.name, peer.address, peer.port, peer.token) for peer in peers.values()),
                tuple(each),
                base=base,
                whole=whole_model,
            )
            for each, peers in zip(incoming, parents, strict=True)
        ],
    )


def completed(role: RankRole, layout: Layout) -> RankRole:
    """Return the role of a whole model whose tensors are known: they are its part, each of them one slice."""
    tensors = layout.tensors
    slices = tuple(
        Slice(at, (0,) * len(each.shape), at, (0,) * len(each.shape), each.shape)
        for at, each in enumerate(tensors)
        if each.nbytes
    )
    numbers, dtypes = tuple(range(len(tensors))), tuple(each.dtype for each in tensors)
    incoming = [
        each._replace(tensors=numbers, sources=tuple(source._replace(slices=slices) for source in each.sources))
        for each in role.incoming
    ]
    outgoing = [each._replace(dtypes=dtypes, slices=slices) for each in role.outgoing]
    there = bool(slices)  # else nothing is sent
    return msgspec.structs.replace(
        role, incoming=tuple(incoming) if there else (), outgoing=tuple(outgoing) if there else ()
    )


def finer(room: int, parts: Sequence[tuple[int, int]]) -> int:
    """Return the size of buckets, from what ranks have room for and (bytes, hops) of each part. A multiple of 64.

    A relay passes a bucket on when all of it has come, so each hop of a chain is some buckets behind the one before.
    The largest part determines the size; the others are done before it.
    """
    nbytes, depth = max(parts, default=(0, 1))
    return min(room, max(_FINEST, nbytes // (_STEPS * max(1, depth)) // 64 * 64))


def _order(receivers: Sequence[ShardDescription]) -> dict[int, int]:
    """Place of each receiver in the common order: host by host."""
    hosts: dict[str, int] = {}
    for receiver in receivers:
        hosts.setdefault(receiver.host, len(hosts))
    ordered = sorted(range(len(receivers)), key=lambda each: (hosts[receivers[each].host], each))
    return {each: at for at, each in enumerate(ordered)}


def _hops(receivers: Sequence[ShardDescription], sender: ShardDescription, nbytes: int, bucket_bytes: int) -> list[Hop]:
    """Return the parent of each receiver of a part of so many bytes."""
    shape, fanout = sender.shape, sender.fanout
    few = bool(sender.layout) and nbytes < len({each.host for each in receivers}) * bucket_bytes
    if shape == "chain" and few:
        shape, fanout = "tree", _WIDE  # few bytes: the time is that of the hops
    hops = topology.hops([each.host for each in receivers], shape, fanout)
    if any(each.in_place for each in receivers):
        hops = [Hop(parent=hop.parent, mapped=False) for hop in hops]
    return hops


def build_topology(
    actor_n: int, rollout_n: int, metadata: Sequence[Any], *, whole: bool = False
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return the arguments of `WeightsEngine.init_process_group` for each trainer and each replica, by name.

    A member's metadata, from its `prepare`, may list several ranks (``{"ranks": […]}``, as `ShardedReplica` has them);
    its argument ``roles`` then has as many. ``base`` is the version that changes are based on, or None; with ``whole``
    always None. UsageError, SchemaError.
    """
    if len(metadata) != actor_n + rollout_n or actor_n < 1:
        raise UsageError(
            f"{len(metadata)} descriptions for {actor_n} trainers and {rollout_n} replicas: "
            "give one of each member, trainers first"
        )
    members = describe(metadata)
    sides = members[:actor_n], members[actor_n:]
    senders, receivers = ([rank for member in side for rank in member] for side in sides)
    found = roles(senders, receivers, secrets.randbits(63), whole=whole)
    base = found[0][0].base
    arguments: list[dict[str, list[Any]]] = []
    for side, of_side in zip(sides, found, strict=True):
        left = iter(of_side)
        packed = [[pack(next(left)) for _ in member] for member in side]
        arguments.append(
            {"roles": packed, "base": [None if base is None else [base.version, base.checksum]] * len(side)}
        )
    return arguments[0], arguments[1]


def describe(metadata: Sequence[Any]) -> list[list[ShardDescription]]:
    """Return the ranks of each member, from what its `prepare` returned. SchemaError for anything else."""
    try:
        return [convert(each["ranks"], list[ShardDescription]) for each in metadata]
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise SchemaError(f"not the description of a member with shards: {error}") from error


_encode = msgspec.msgpack.Encoder().encode
