"""Sharded weights from N trainer ranks to M engine ranks, each a host of its own, beside the time that the links need.

The limit is the largest number of bytes that one link must carry, over the rate of one plain TCP stream on it. Beside
it the first rank sends all of the model to all receivers, as a trainer does that gathers it.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import shard_model
import uvloop
from links import Links
from process_member import ProcessMember

from transport.bench.result import aligned
from transport.errors import InternalError
from transport.runtime.interruption import segment_prefix
from transport.runtime.progress import Progress
from transport.weights.engine import RingEngine, ShardEngine
from transport.weights.manager import WeightUpdate
from transport.weights.plan.steps import Step
from transport.weights.sharded_replica import ShardedReplica
from transport.weights.sharding.plan import make_plan

_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "UCXX_LOG_LEVEL": "FATAL"}
_MOST_TP = 8


class ShardLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, and how. ``rate``: bytes per second of every link; 0: not limited. ``beside``: rank 0, too."""

    size_bytes: int
    bucket_bytes: int
    rate: float
    shape: str
    repetitions: int
    beside: bool = True


class ShardRow(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the repetitions.

    Attributes:
        mode: "shards", or "rank 0" for the whole model from the first rank to every receiver.
        tp: ranks of an engine.
        link_bytes: the most that one link has to carry, whatever is sent by whom.
        stream_rate: bytes per second of one plain stream.
        limit_s: link_bytes over stream_rate.
        ratio: transfer_s over limit_s.
        prepare_s: topology and connections: the plan is in it.
        plan_s, slices: the time to compute the plan, and how many slices it has.
        sender_bytes: that the busiest sender sent. sender_memory, receiver_memory: the most that one process had.
    """

    senders: int
    receivers: int
    tp: int
    mode: str
    model_bytes: int
    transfer_s: float
    limit_s: float
    ratio: float
    link_bytes: int
    stream_rate: float
    prepare_s: float
    plan_s: float
    slices: int
    sender_bytes: int
    sender_memory: int
    receiver_memory: int
    verified: bool


def run(load: ShardLoad, cases: Sequence[tuple[int, int]], progress: Progress) -> tuple[list[ShardRow], str]:
    """Measure each (senders, receivers), and say how the links were made."""
    rows: list[ShardRow] = []
    about = ""
    modes = ("shards", "rank 0") if load.beside else ("shards",)
    for number, (senders, receivers) in enumerate(cases):
        for at, mode in enumerate(modes):
            with Links.made(senders + receivers, load.rate) as links:
                about = links.about
                rows.append(uvloop.run(_measure(load, senders, receivers, mode, links)))
            progress(number * len(modes) + at + 1, len(cases) * len(modes), 0)
    return rows, about


async def _measure(load: ShardLoad, senders: int, receivers: int, mode: str, links: Links) -> ShardRow:
    sizes = range(1, min(senders, receivers, _MOST_TP) + 1)
    tp = max(each for each in sizes if receivers % each == 0 and shard_model.HEADS % each == 0)
    begun = time.monotonic()
    plan = make_plan(
        [shard_model.trained(load.size_bytes, rank, senders) for rank in range(senders)],
        [shard_model.served(load.size_bytes, rank % tp, tp) for rank in range(receivers)],
    )
    plan_s = time.monotonic() - begun
    stream_rate = await asyncio.to_thread(links.stream)
    whole = mode == "rank 0"
    members: list[ProcessMember] = []
    try:
        trainers, ranks = await _started(load, 1 if whole else senders, receivers, tp, links, members, whole)
        replicas: list[Any] = list(ranks)
        if not whole:
            replicas = [ShardedReplica(f"engine {at // tp}", ranks[at : at + tp]) for at in range(0, receivers, tp)]
        manager = WeightUpdate(trainers, replicas, engine=RingEngine if whole else ShardEngine)
        await manager.update(0)  # memory is made, connections are opened
        before = [(await trainer.call("statistics"))["bytes_sent"] for trainer in trainers]
        transfers, preparing = [], []
        for version in range(1, load.repetitions + 1):
            outcome = await manager.update(version, whole=True)
            transfers.append(outcome.steps_s[Step.TRANSFER.value])
            preparing.append(outcome.steps_s[Step.TOPOLOGY.value] + outcome.steps_s[Step.CONNECT.value])
        after = [(await trainer.call("statistics"))["bytes_sent"] for trainer in trainers]
        wrong = sum(await asyncio.gather(*(rank.call("told", "verify") for rank in ranks)))
        if wrong or set(manager.admitted.values()) != {load.repetitions}:
            raise InternalError(f"{wrong} tensors are not those of v{load.repetitions}: {manager!r}")
        memory = [[await each.call("told", "memory") for each in side] for side in (trainers, ranks)]
    finally:
        await asyncio.gather(*(member.close() for member in members))
    link_bytes = max(*plan.sent(), *plan.wanted())
    transfer_s = statistics.median(transfers)
    return ShardRow(
        senders=senders,
        receivers=receivers,
        tp=tp,
        mode=mode,
        model_bytes=sum(layout.nbytes for layout in [shard_model.trained(load.size_bytes, 0, 1)]),
        transfer_s=round(transfer_s, 3),
        limit_s=round(link_bytes / stream_rate, 3),
        ratio=round(transfer_s * stream_rate / link_bytes, 3),
        link_bytes=link_bytes,
        stream_rate=round(stream_rate),
        prepare_s=round(statistics.median(preparing), 3),
        plan_s=round(plan_s, 4),
        slices=plan.slices,
        sender_bytes=max(b - a for a, b in zip(before, after, strict=True)) // load.repetitions,
        sender_memory=max(memory[0]),
        receiver_memory=max(memory[1]),
        verified=True,
    )


async def _started(
    load: ShardLoad, senders: int, receivers: int, tp: int, links: Links, members: list[ProcessMember], whole: bool
) -> tuple[list[ProcessMember], list[ProcessMember]]:
    """The processes, each on its host; ``members`` has them as soon as they are there."""

    def engine(host: int) -> dict[str, Any]:
        further = {} if links.shaped or not links.rate else {"rate": links.rate}
        common = {"address": links.address(host), "host": f"host {host}", "wires": ["tcp"], "shape": load.shape}
        return {**common, **further, "bucket_bytes": load.bucket_bytes}

    def made(kind: str, rank: int, world: int) -> dict[str, Any]:
        arguments = {"size_bytes": load.size_bytes, "rank": rank, "world": world, "whole": whole}
        return {"made": f"shard_model:{kind}", "arguments": arguments}

    trainers: list[ProcessMember] = []
    ranks: list[ProcessMember] = []
    for host in range(senders + receivers):
        place = host - senders
        what = made("Shards", host, senders) if host < senders else made("Server", place % tp, tp)
        name = f"trainer {host}" if host < senders else f"engine {place // tp}.{place % tp}"
        member = await ProcessMember.start(
            name,
            {**what, "engine": engine(host)},
            _ENVIRONMENT,
            prefix=segment_prefix("weights"),
            within=links.within(host),
        )
        members.append(member)
        (trainers if host < senders else ranks).append(member)
    return trainers, ranks


def table(rows: Sequence[ShardRow], load: ShardLoad, about: str) -> str:
    """The rows as text."""
    cells: list[tuple[str, ...]] = [
        ("N → M", "mode", "tp", "transfer s", "limit s", "× limit", "link GB", "init s", "plan s", "slices", "memory")
    ]
    cells += [
        (
            f"{row.senders} → {row.receivers}",
            row.mode,
            str(row.tp),
            f"{row.transfer_s:.2f}",
            f"{row.limit_s:.2f}",
            f"{row.ratio:.2f}",
            f"{row.sender_bytes / 1e9:.3f}",
            f"{row.prepare_s:.2f}",
            f"{row.plan_s:.3f}",
            str(row.slices),
            f"{row.sender_memory / 1e9:.2f}, {row.receiver_memory / 1e9:.2f} GB",
        )
        for row in rows
    ]
    heading = (
        f"{rows[0].model_bytes / 1e9:.3f} GB in bfloat16, buckets of {load.bucket_bytes / (1 << 20):g} MiB, {about}, "
        f"{rows[0].stream_rate / 1e6:.1f} MB/s in one plain stream, {load.shape} of relays; every process a host of "
        "its own; link: what the busiest sender sent; memory: of the largest sender and receiver process, its own "
        "tensors included; every tensor compared with what it should be"
    )
    return "\n".join([heading, "", *aligned(cells, right=frozenset(range(2, 10)))])
