"""Updates of the weights, from one trainer or from the shards of many.

python benchmarks/weights --senders 4,8 --receivers 16,8 --size 256MiB --rate 50MB --shape chain
"""

from __future__ import annotations

import sys
from typing import Annotated

import resharding
import typer
import update as measuring

from transport.bench.machine import machine, settings_of
from transport.bench.result import Report
from transport.bench.units import parse_size
from transport.cli import run_program
from transport.cli.bench_options import check_device, counts
from transport.cli.output import JsonTarget, about, emit
from transport.errors import UsageError
from transport.runtime.progress import bar_with_time_left
from transport.weights.plan.topology import SHAPES

_MOST_HOSTS = 64
_LONGEST_UPDATE_S = 3600.0


def weights(
    replicas: Annotated[str, typer.Option(metavar="N,…", help="Numbers of replicas, one process each.")] = "1,2,4,8",
    size: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Bytes of the model. Each host needs 2 times, the trainer 2.5 times as much."
        ),
    ] = "1GiB",
    rate: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes per second of the trainer's link; 0: no limit.")
    ] = "100MB",
    bucket: Annotated[str, typer.Option(metavar="SIZE", help="Bytes that are sent at a time.")] = "64MiB",
    shape: Annotated[
        str, typer.Option(metavar="chain|tree|star", help="Order of the relays; star: no relays.")
    ] = "tree",
    hosts: Annotated[int, typer.Option(min=1, max=8, help="Simulated hosts that the replicas are spread over.")] = 1,
    changed: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the weights that changes, for a delta; 0: no delta.")
    ] = 0.01,
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of each row.")] = 1,
    device: Annotated[
        str | None,
        typer.Option(metavar="cuda", help="Measure from device memory to device memory; needs CuPy. Default: host."),
    ] = None,
    senders: Annotated[
        str | None,
        typer.Option(metavar="N,…", help="Measure sharded weights from so many trainer ranks. Default: no shards."),
    ] = None,
    receivers: Annotated[
        str, typer.Option(metavar="M,…", help="Engine ranks for each of --senders; as many numbers.")
    ] = "1",
    beside: Annotated[
        bool, typer.Option("--beside/--alone", help="With --senders: beside it, all of the model from one trainer.")
    ] = True,
    json_target: JsonTarget = None,
) -> None:
    """Measure weight updates from a trainer with a limited link to replicas of this host.

    Each replica proves by checksum which version it serves. With --senders every trainer rank sends its shards, every
    process is a host of its own (a network namespace where the kernel allows it), and --rate is that of every link.
    """

    if shape not in SHAPES:
        raise UsageError(f"--shape {shape}: choose one of {', '.join(SHAPES)}")
    if device is not None:
        check_device(device)
    if senders is not None:
        if device is not None:
            raise UsageError("--senders measures host memory; leave out --device")
        _sharded(_pairs(senders, receivers), size, rate, bucket, shape, repetitions, beside, json_target)
        return
    load = measuring.Load(
        size_bytes=parse_size(size),
        bucket_bytes=parse_size(bucket),
        rate=_rate(rate),
        shape=shape,
        hosts=hosts,
        changed=changed,
        repetitions=repetitions,
        device=device is not None,
    )
    if load.rate and load.size_bytes / load.rate > _LONGEST_UPDATE_S:
        raise UsageError(
            f"--rate {rate}: {size} would take {load.size_bytes / load.rate / 3600:.0f} h; give a higher rate or a "
            "smaller --size"
        )
    where = machine()
    with bar_with_time_left("updates") as progress:
        rows = measuring.run(load, counts("--replicas", replicas), progress)
    report = Report(machine=where, settings={"tcp": settings_of("tcp")}, rows=rows)
    emit(report, "\n".join([about(report), "", measuring.table(rows, load)]), json_target)


def _sharded(
    cases: list[tuple[int, int]],
    size: str,
    rate: str,
    bucket: str,
    shape: str,
    repetitions: int,
    beside: bool,
    json_target: str | None,
) -> None:

    load = resharding.ShardLoad(
        size_bytes=parse_size(size),
        bucket_bytes=parse_size(bucket),
        rate=_rate(rate),
        shape=shape,
        repetitions=repetitions,
        beside=beside,
    )
    where = machine()
    with bar_with_time_left("updates") as progress:
        rows, links = resharding.run(load, cases, progress)
    report = Report(machine=where, settings={"tcp": settings_of("tcp")}, rows=rows)
    emit(report, "\n".join([about(report), "", resharding.table(rows, load, links)]), json_target)


def _rate(text: str) -> float:

    return 0.0 if text == "0" else float(parse_size(text))


def _pairs(senders: str, receivers: str) -> list[tuple[int, int]]:
    found = []
    for option, texts in (("--senders", senders), ("--receivers", receivers)):
        found.append([counts(option, each, most=_MOST_HOSTS)[0] for each in texts.split(",")])
    if len(found[0]) != len(found[1]):
        raise UsageError(f"--senders {senders} --receivers {receivers}: give as many numbers of both")
    return list(zip(*found, strict=True))


if __name__ == "__main__":
    sys.exit(run_program("benchmarks/weights", weights))
