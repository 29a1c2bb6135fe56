"""Updates of the weights from trainers to replicas, in processes that may be hosts of their own, and what they took.

One loop measures every kind of worker:

    mapped        serves the memory that landed
    own           copies it before the pause, and switches
    loader        copies it into its own tensors in the pause, as the loaders of inference engines do
    proven        as loader, and hashes them before it generates (`RolloutWorker.served_checksum`)
    delta         as mapped; the trainer sends what has changed, a share of the elements (--changed)
    one phase     versions land in its own tensors, and it is paused for the transfer: the order before two phases
    shards        as mapped; the trainer's ranks send their rows, the replicas are the ranks of tensor-parallel engines
    shards delta  as shards, of changes
    rank 0        as shards, but the first rank sends all of the model to every replica, as a trainer that gathers it
    gloo          torch.distributed.broadcast of every tensor into the replicas' tensors, which are paused meanwhile
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import shard_model
import uvloop
from links import Links
from model import shapes
from process_member import ProcessMember

from transport.errors import InternalError
from transport.runtime.interruption import segment_prefix
from transport.weights.manager import UpdateOutcome, WeightUpdate
from transport.weights.plan.steps import UpdateStep
from transport.weights.sharded_replica import ShardedReplica
from transport.weights.sharding.plan import make_plan

_WARM = 2  # updates that are not counted: memory is made, connections are opened, the layout is learnt
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "UCXX_LOG_LEVEL": "FATAL"}
_MOST_TP = 8


class Kind(NamedTuple):
    """A row's replicas. ``versions``: of the model that each of them has in memory, at most."""

    resident: str = "mapped"
    proves: bool = True
    in_place: bool = False
    shards: bool = False
    whole: bool = False  # with the model of shards, all of it from one rank
    delta: bool = False
    versions: int = 2


KINDS = {
    "mapped": Kind(),
    "own": Kind("own", versions=4),
    "loader": Kind("in_place", proves=False, versions=3),
    "proven": Kind("in_place", versions=3),
    "delta": Kind(delta=True),
    "one phase": Kind(in_place=True, versions=1),
    "shards": Kind(shards=True),
    "shards delta": Kind(shards=True, delta=True),
    "rank 0": Kind(whole=True),
    "gloo": Kind(versions=1),
}


class Case(NamedTuple):
    """What is sent.

    Attributes:
        size: of the model, about, in bytes.
        rate: of every link, in bytes per second; 0: no limit, and no hosts of their own.
        senders: trainer ranks, of shards.
        hosts: that the replicas are spread over; 0: one for each.
        every: one of so many elements changes, for deltas.
        device: out of device memory, and into it.
    """

    worker: str
    size: int
    replicas: int
    rate: float = 0.0
    senders: int = 2
    hosts: int = 0
    updates: int = 20
    every: int = 100
    bucket: int = 8 << 20
    shape: str = "tree"
    device: bool = False

    @property
    def kind(self) -> Kind:
        """Of the worker."""
        return KINDS[self.worker]

    @property
    def trainers(self) -> int:
        """Processes that send."""
        return self.senders if self.kind.shards else 1

    @property
    def of_links(self) -> int:
        """Hosts, those of the trainers included."""
        return self.trainers + (self.hosts or self.replicas)

    @property
    def tp(self) -> int:
        """Ranks of one engine."""
        if not self.kind.shards:
            return 1
        sizes = range(1, min(self.senders, self.replicas, _MOST_TP) + 1)
        return max(each for each in sizes if self.replicas % each == 0 and shard_model.HEADS % each == 0)

    @property
    def nbytes(self) -> int:
        """Of the model, exactly."""
        if self.kind.shards or self.kind.whole:
            return shard_model.trained(self.size, 0, 1).nbytes
        return sum(2 * int(np.prod(shape)) for shape in shapes(self.size).values())


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the updates, but for pauses and the memcpy.

    Attributes:
        transfer_s: send and receive, until the last replica has landed and proven the version.
        update_s: the whole update, prepare to finalize.
        pause_ms: for which a replica did not generate: least, median, 99th percentile of all.
        memcpy_ms: the least time of one memcpy of as many bytes, by all replicas at once; None: not measured.
        limit_s: the most bytes that one link must carry, over the rate of a plain TCP stream on it; 0: not limited.
        sent_bytes: that the busiest sender sent.
        received: bytes that came over a wire, for each byte of the model, over all replicas.
        trainer_copies, replica_copies: bytes copied in memory for each byte of the model, over all of them.
        sender_bytes, receiver_bytes: the most memory that one process had.
    """

    worker: str
    senders: int
    replicas: int
    tp: int
    model_bytes: int
    rate: float
    changed: float
    transfer_s: float
    update_s: float
    pause_ms: tuple[float, float, float]
    memcpy_ms: float | None = None
    limit_s: float = 0.0
    sent_bytes: int = 0
    received: float = 0.0
    trainer_copies: float = 0.0
    replica_copies: float = 0.0
    sender_bytes: int = 0
    receiver_bytes: int = 0
    verified: bool = False


class _Sample(NamedTuple):
    outcome: UpdateOutcome
    sent: int
    received: int
    trainers_copied: int
    replicas_copied: int


def configurations(case: Case, links: Links) -> list[tuple[str, int, dict[str, Any]]]:
    """Name, host and `MemberConfig` of every process: the trainers, then the replicas."""
    kind = case.kind
    module = "shard_model" if kind.shards or kind.whole else "model"
    every = case.every if kind.delta else 1
    limit = {} if links.shaped or not case.rate else {"rate": case.rate}
    found = []

    def add(name: str, host: int, made: str, arguments: dict[str, Any], **engine: Any) -> None:
        common = {"bucket_bytes": case.bucket, "address": links.address(host), "host": f"host {host}", **limit}
        found.append((name, host, {"made": made, "arguments": arguments, "engine": {**common, **engine}}))

    for rank in range(case.trainers):
        arguments: dict[str, Any] = {"size_bytes": case.size, "device": case.device}
        if module == "shard_model":
            arguments = {
                "size_bytes": case.size, "rank": rank, "world": case.trainers, "whole": kind.whole, "every": every,
            }  # fmt: skip
        add(f"trainer {rank}", rank, f"{module}:{_SENDS[module]}", arguments, delta=kind.delta, shape=case.shape)
    for number in range(case.replicas):
        arguments = {"resident": kind.resident, "proves": kind.proves, "size_bytes": case.size * kind.in_place}
        if module == "shard_model":
            arguments = {
                "size_bytes": case.size, "rank": number % case.tp, "world": case.tp, "whole": kind.whole,
                "every": every,
            }  # fmt: skip
        host = case.trainers + (number * case.hosts // case.replicas if case.hosts else number)
        engine: dict[str, Any] = {"wires": ["tcp"], "in_place": kind.in_place}
        add(
            f"replica {number}",
            host,
            f"{module}:Server",
            arguments,
            **engine,
            **({"device": "cupy"} if case.device else {}),
        )
    return found


_SENDS = {"model": "Model", "shard_model": "Shards"}


async def _measure(case: Case, links: Links, stream_rate: float) -> Row:
    kind = case.kind
    members: list[ProcessMember] = []
    try:
        for name, host, config in configurations(case, links):
            prefix, within = segment_prefix("weights"), links.within(host)
            members.append(await ProcessMember.start(name, config, _ENVIRONMENT, prefix=prefix, within=within))
        trainers, ranks = members[: case.trainers], members[case.trainers :]
        replicas: list[Any] = list(ranks)
        if kind.shards:
            firsts = range(0, case.replicas, case.tp)
            replicas = [ShardedReplica(f"engine {at // case.tp}", ranks[at : at + case.tp]) for at in firsts]
        manager = WeightUpdate(trainers, replicas)
        samples, copies = [], []
        for version in range(case.updates + _WARM):
            if kind.delta and not kind.shards:
                await trainers[0].call("told", 1 / case.every)
            sample = await _update(manager, trainers, ranks, version)
            if set(manager.admitted.values()) != {version} or sample.outcome.delta != (kind.delta and version > 0):
                raise InternalError(f"v{version} was not sent and served as asked: {sample.outcome}")
            if version >= _WARM:
                samples.append(sample)
                if not case.device:
                    copies.extend(await asyncio.gather(*(rank.call("told", "copy") for rank in ranks)))
        if kind.shards or kind.whole:
            wrong = sum(await asyncio.gather(*(rank.call("told", "verify") for rank in ranks)))
            if wrong:
                raise InternalError(f"{wrong} tensors are not those of v{case.updates + _WARM - 1}")
        memory = [max([await each.call("told", "memory") for each in side]) for side in (trainers, ranks)]
    finally:
        await asyncio.gather(*(member.close() for member in members))

    def median(name: str) -> float:
        return float(statistics.median(getattr(each, name) for each in samples))

    pauses = sorted(pause for each in samples for pause in each.outcome.pause_s.values())
    sent = int(median("sent"))
    return Row(
        **_of(case),
        transfer_s=round(statistics.median(each.outcome.steps_s[UpdateStep.TRANSFER.value] for each in samples), 3),
        update_s=round(statistics.median(each.outcome.seconds for each in samples), 3),
        pause_ms=_spread(pauses),
        memcpy_ms=round(min(copies) * 1e3, 2) if copies else None,
        limit_s=round(_link_bytes(case, sent) / stream_rate, 3) if stream_rate else 0.0,
        sent_bytes=sent,
        received=round(median("received") / case.nbytes, 3),
        trainer_copies=round(median("trainers_copied") / case.nbytes, 3),
        replica_copies=round(median("replicas_copied") / case.nbytes, 3),
        sender_bytes=int(memory[0]),
        receiver_bytes=int(memory[1]),
        verified=True,
    )


def _of(case: Case) -> dict[str, Any]:
    changed = 1 / case.every if case.kind.delta else 1.0
    return {
        "worker": case.worker, "senders": case.trainers, "replicas": case.replicas, "tp": case.tp,
        "model_bytes": case.nbytes, "rate": case.rate, "changed": changed,
    }  # fmt: skip


def _spread(pauses: list[float]) -> tuple[float, float, float]:
    p99 = pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))]
    least, median, most = (round(each * 1e3, 2) for each in (pauses[0], statistics.median(pauses), p99))
    return least, median, most


def _link_bytes(case: Case, sent: int) -> int:
    """The most bytes that one link has to carry, whatever is sent by whom."""
    if not case.kind.shards:
        return sent if case.kind.delta else case.nbytes
    plan = make_plan(
        [shard_model.trained(case.size, rank, case.senders) for rank in range(case.senders)],
        [shard_model.served(case.size, rank % case.tp, case.tp) for rank in range(case.replicas)],
    )
    out, wanted = Counter[int](), Counter[int]()
    for part in plan:
        out.update({stream.sender: stream.nbytes for stream in part.streams})
        wanted.update(dict.fromkeys(part.receivers, part.nbytes))
    return max(*out.values(), *wanted.values())


async def _update(
    manager: WeightUpdate, trainers: list[ProcessMember], ranks: list[ProcessMember], version: int
) -> _Sample:
    members = [*trainers, *ranks]
    before = [await member.call("statistics") for member in members]
    outcome = await manager.update(version)
    after = [await member.call("statistics") for member in members]

    def grown(what: str) -> list[int]:
        def of(each: dict[str, Any]) -> int:
            return sum(each[what].values()) if isinstance(each[what], dict) else each[what]

        return [of(now) - of(then) for then, now in zip(before, after, strict=True)]

    at = len(trainers)
    copied = grown("bytes_copied")
    sent, received = max(grown("bytes_sent")[:at]), sum(grown("bytes_received")[at:])
    return _Sample(outcome, sent, received, sum(copied[:at]), sum(copied[at:]))


def memory_short(case: Case) -> str:
    """Why the host has too little memory for this row; empty: it has enough."""
    kind = case.kind
    needed = (1 + kind.delta + kind.versions * (1 if kind.shards else case.replicas)) * case.nbytes
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if "MemAvailable" in line)
    shared = os.statvfs("/dev/shm")
    available = min(available, shared.f_bavail * shared.f_frsize)
    return f"needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} are there" if needed > 0.9 * available else ""


def _gloo(case: Case, links: Links, python: str) -> Row:
    """The same, by torch.distributed, in processes of ``python``."""
    script = str(Path(__file__).with_name("gloo.py"))
    text = ";".join(",".join(map(str, shape)) for shape in shapes(case.size).values())
    running = []
    for rank in range(1 + case.replicas):
        numbers = (rank, 1 + case.replicas, links.address(0), case.updates + _WARM)
        command = [*links.within(rank), python, "-P", script, *map(str, numbers), text]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        said = [[float(each) for each in (process.communicate()[0] or "").split()][_WARM:] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    took = round(statistics.median(said[0]), 3)
    pauses = sorted(pause for pauses in said[1:] for pause in pauses)
    return Row(**_of(case), transfer_s=took, update_s=took, pause_ms=_spread(pauses))


def measured(case: Case, torch: str = "") -> Row:
    """One row, in fresh processes. ``torch``: an interpreter that has torch, for gloo.

    Raises InternalError when a version was not sent as asked, or not served.
    """
    with Links.made(case.of_links if case.rate else 0, case.rate) as links:
        if case.worker == "gloo":
            return _gloo(case, links, torch)
        return uvloop.run(_measure(case, links, links.stream() if case.rate else 0.0))
