"""Weights to many replicas over a limited link: how the time grows with their number, and what a delta saves.

All members are processes of this host. The trainer counts as another host: its buckets go over TCP, and a token bucket
in the sender keeps to the link's rate. The replicas are spread over ``hosts`` pretended hosts; those of one map what
one of them has landed. Every replica proves each version by the checksum of all bytes that it serves.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import uvloop
from process_member import ProcessMember

from transport.bench.result import aligned
from transport.errors import InternalError
from transport.runtime.interruption import segment_prefix
from transport.runtime.progress import Progress
from transport.weights.manager import Outcome, WeightUpdate
from transport.weights.plan.steps import Step
from transport.wire.addresses import LOOPBACK

_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "UCXX_LOG_LEVEL": "FATAL"}


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, and how. ``rate`` in bytes per second; 0: no limit.

    device: out of device memory, and into it.
    """

    size_bytes: int
    bucket_bytes: int
    rate: float
    shape: str
    hosts: int
    changed: float
    repetitions: int
    device: bool = False


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the repetitions.

    Attributes:
        mode: "full", or "delta" with the share that changed.
        transfer_s: send and receive, until the last replica has loaded and proven the version.
        update_s: the whole update, prepare to finalize.
        pause_ms: for which a replica did not generate: the median of all, and the longest.
        link_bytes: that left the trainer.
        ratio: of transfer_s to that of the fewest replicas in the same mode.
        of_full: of transfer_s to that of "full" with as many replicas.
        trainer_copies, replica_copies: bytes copied from memory to memory for each byte of the model; all replicas
            together. What a wire does is not in them.
        received: bytes that came over a wire into a replica, for each byte of the model, over all replicas.
    """

    replicas: int
    mode: str
    transfer_s: float
    update_s: float
    pause_ms: tuple[float, float]
    model_bytes: int
    link_bytes: int
    ratio: float
    of_full: float
    trainer_copies: float
    replica_copies: float
    received: float
    verified: bool


class _Sample(msgspec.Struct, frozen=True):
    outcome: Outcome
    link_bytes: int
    trainer_copied: int
    replicas_copied: int
    received: int


def run(load: Load, replicas: Sequence[int], progress: Progress) -> list[Row]:
    """Measure each number of replicas, in processes of their own."""
    rows: list[Row] = []
    work = len(replicas) * (1 + bool(load.changed)) * load.repetitions
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, work, done * load.size_bytes)

    progress(0, work, 0)
    for count in replicas:
        samples, size = uvloop.run(_measure(load, count, step))
        for mode, of_mode in samples.items():
            rows.append(_row(count, mode, of_mode, size, rows))
    return rows


def _row(count: int, mode: str, samples: list[_Sample], size: int, before: list[Row]) -> Row:
    transfer_s = statistics.median(each.outcome.steps_s[Step.TRANSFER.value] for each in samples)
    pauses = [pause for each in samples for pause in each.outcome.pause_s.values()]
    fewest = next((row.transfer_s for row in before if row.mode == mode), transfer_s)
    full = next((row.transfer_s for row in before if row.replicas == count and row.mode == "full"), transfer_s)
    return Row(
        replicas=count,
        mode=mode,
        transfer_s=round(transfer_s, 3),
        update_s=round(statistics.median(each.outcome.seconds for each in samples), 3),
        pause_ms=(round(statistics.median(pauses) * 1e3, 2), round(max(pauses) * 1e3, 2)),
        model_bytes=size,
        link_bytes=samples[-1].link_bytes,
        ratio=round(transfer_s / fewest, 3),
        of_full=round(transfer_s / full, 3),
        trainer_copies=round(samples[-1].trainer_copied / size, 3),
        replica_copies=round(samples[-1].replicas_copied / size, 3),
        received=round(samples[-1].received / size, 3),
        verified=True,
    )


async def _measure(load: Load, count: int, step: Any) -> tuple[dict[str, list[_Sample]], int]:
    common = {"bucket_bytes": load.bucket_bytes, "address": LOOPBACK}
    sending = {**common, "delta": bool(load.changed), "shape": load.shape, "rate": load.rate or None, "host": "trainer"}
    members: list[ProcessMember] = []
    try:
        trainer = await ProcessMember.start(
            "trainer",
            {
                "made": "model:Model",
                "arguments": {"size_bytes": load.size_bytes, "device": load.device},
                "engine": sending,
            },
            _ENVIRONMENT,
            prefix=segment_prefix("weights"),
        )
        members.append(trainer)
        for number in range(count):
            receiving = {**common, "wires": ["tcp"], "host": f"host {number * load.hosts // count}"}
            if load.device:
                receiving["device"] = "cupy"
            made = {"made": "model:Server", "engine": receiving}
            prefix = segment_prefix("weights")
            members.append(await ProcessMember.start(f"replica {number}", made, _ENVIRONMENT, prefix=prefix))
        manager = WeightUpdate([trainer], members[1:])
        size = await trainer.call("told", 0.0)
        await manager.update(0)  # memory is made, connections are opened, the layout is learnt
        samples: dict[str, list[_Sample]] = {"full": []}
        version = 0
        for mode in ("full", "delta") if load.changed else ("full",):
            samples[mode] = []
            for _ in range(load.repetitions):
                version += 1
                await trainer.call("told", load.changed)
                samples[mode].append(await _update(manager, members, version, mode == "full"))
                step()
        return samples, size
    finally:
        await asyncio.gather(*(member.close() for member in members))


async def _update(manager: WeightUpdate, members: list[ProcessMember], version: int, whole: bool) -> _Sample:
    before = [await member.call("statistics") for member in members]
    outcome = await manager.update(version, whole=whole)
    after = [await member.call("statistics") for member in members]
    if set(manager.admitted.values()) != {version} or len(manager.admitted) != len(members) - 1:
        raise InternalError(f"v{version} is not proven by every replica: {manager!r}")
    if outcome.delta == whole:
        raise InternalError(f"v{version} was sent {'as a delta' if outcome.delta else 'whole'}")

    def grown(what: str, among: slice) -> int:
        return sum(b[what] - a[what] for a, b in zip(before[among], after[among], strict=True))

    received = sum(
        sum(b["bytes_received"].values()) - sum(a["bytes_received"].values())
        for a, b in zip(before[1:], after[1:], strict=True)
    )
    first, rest = slice(0, 1), slice(1, None)
    return _Sample(
        outcome, grown("bytes_sent", first), grown("bytes_copied", first), grown("bytes_copied", rest), received
    )


def table(rows: Sequence[Row], load: Load) -> str:
    """The rows as text."""
    cells: list[tuple[str, ...]] = [
        (
            "replicas",
            "mode",
            "transfer s",
            "× fewest",
            "× full",
            "update s",
            "pause ms: median",
            "longest",
            "link GB",
            "copies: trainer",
            "replicas",
            "wire",
        )
    ]
    cells += [
        (
            str(row.replicas),
            row.mode,
            f"{row.transfer_s:.2f}",
            f"{row.ratio:.2f}",
            f"{row.of_full:.2f}",
            f"{row.update_s:.2f}",
            f"{row.pause_ms[0]:.1f}",
            f"{row.pause_ms[1]:.1f}",
            f"{row.link_bytes / 1e9:.3f}",
            f"{row.trainer_copies:.2f}",
            f"{row.replica_copies:.2f}",
            f"{row.received:.2f}",
        )
        for row in rows
    ]
    kind = "float16, from device to device memory" if load.device else "bfloat16"
    about = (
        f"{rows[0].model_bytes / 1e9:.3f} GB in {kind}, buckets of {load.bucket_bytes >> 20} MiB, trainer's link "
        + (f"{load.rate / 1e6:.0f} MB/s (token bucket in the sender)" if load.rate else "not limited")
        + f", {load.shape} over {load.hosts} pretended host{'s' if load.hosts > 1 else ''}, delta of "
        f"{load.changed:.1%}; copies and wire: bytes for each byte of the model, all replicas together; every version "
        "proven by every replica"
    )
    return "\n".join([about, "", *aligned(cells, right=frozenset(range(2, 12)))])
