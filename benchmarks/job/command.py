"""The program `benchmarks/job`: its options, and what it prints."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from transport.cli import run_program
from transport.cli.output import JsonTarget, about, causes, emit, status_of
from transport.errors import MissingDependencyError, UsageError
from transport.runtime.installing import install

_NAME = "benchmarks/job"


def run(arguments: Sequence[str]) -> int:
    """Run the program with these arguments, and return its exit status."""
    return run_program(_NAME, job, arguments)


def job(
    sizes: Annotated[
        str, typer.Option(metavar="SIZE,…", help="Payload sizes: bytes, KiB, MiB or GiB.")
    ] = "4KiB,64KiB,1MiB",
    writers: Annotated[int, typer.Option(min=1, max=64, help="Writer processes, each with its own ring.")] = 1,
    trainers: Annotated[int, typer.Option(min=1, max=64, help="Trainer processes that share the payloads.")] = 1,
    wire: Annotated[
        str, typer.Option(metavar="WIRE,…", help="Wires to measure: some of mapped, shm, tcp, rdma.")
    ] = "mapped,tcp",
    layout: Annotated[str, typer.Option(help="Layout of a batch: list, padded or packed.")] = "list",
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="all|NAME,…",
            help="Alternatives: all, or some of zmq, redis, redis-stream, ray, transferqueue. Default: none.",
        ),
    ] = None,
    payload: Annotated[
        str,
        typer.Option(help='What payloads are: "bytes", or "trajectory": text, messages, tokens, log-probs, an image.'),
    ] = "bytes",
    batch: Annotated[
        int, typer.Option(min=1, max=4096, help="Payloads in one claim, and in one call that writes.")
    ] = 32,
    idle: Annotated[bool, typer.Option("--idle", help="Write one payload at a time, to an idle trainer.")] = False,
    seconds: Annotated[float, typer.Option(min=0.001, help="Seconds for each row and repetition.")] = 1.0,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Repetitions in fresh processes; each row is their median.")
    ] = 5,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the rows into this file. Default: no drawing.")
    ] = None,
    json_target: JsonTarget = None,
) -> int:
    """Measure the whole job: payloads are written, claimed, read, verified and consumed; also with other carriers.

    Exit status 1 when one of our payloads failed, was lost or came twice; a peer that fails is reported and left out.
    """
    if importlib.util.find_spec("xxhash") is None:
        raise MissingDependencyError(f"{_NAME} needs xxhash: {install('bench')}")
    from benchmarks.job import driver, plan
    from benchmarks.job.rows import JobRow, table
    from benchmarks.peers.plot import check, draw_job
    from benchmarks.peers.registry import JOB_PEERS, chosen
    from transport.bench import session
    from transport.bench.machine import machine, settings_of
    from transport.bench.result import OURS, BenchReport
    from transport.bench.units import parse_sizes
    from transport.runtime.progress import bar_with_time_left

    if payload not in ("bytes", "trajectory"):
        raise UsageError(f"--payload {payload}: choose bytes or trajectory")
    if payload == "trajectory":
        return _trajectories(wire, peers, batch, seconds, repetitions, json_target)
    others = chosen(peers, JOB_PEERS) if peers is not None else []
    wires = plan.check_wires(wire)
    shape = plan.check_layout(layout)
    if plot is not None:
        check(plot)
    work = plan.cases(parse_sizes(sizes), wires, shape, others, writers, trainers, batch, idle)
    where = machine()
    with _stopped_as_by_ctrl_c(), bar_with_time_left(_NAME) as progress:
        outcome = session.run(work, repetitions, progress, lambda case: driver.measure(case, seconds), JobRow.of)
    report = BenchReport(machine=where, settings={each: settings_of(each) for each in wires}, **outcome._asdict())
    emit(report, "\n".join([about(report), "", table(report)]), json_target)
    if plot is not None and outcome.rows:
        draw_job(report, plot)
    failed = causes(outcome.failed)
    failed += [
        f"{row.name}, {row.size_bytes} bytes: {row.lost} payloads lost, {row.duplicated} came twice"
        for row in outcome.rows
        if row.peer == OURS and row.lost + row.duplicated
    ]
    return status_of(_NAME, failed)


def _trajectories(
    wire: str, peers: str | None, batch: int, seconds: float, repetitions: int, json_target: str | None
) -> int:
    """Put, get of two fields and the whole job, in one process with each wire."""
    from benchmarks.job import plan
    from benchmarks.job.trajectory_rows import PEERS, run, table
    from benchmarks.peers.registry import JOB_PEERS, chosen
    from transport.bench.machine import machine, settings_of
    from transport.bench.result import BenchReport
    from transport.runtime.progress import bar_with_time_left

    others = [] if peers is None else chosen(",".join(PEERS) if peers == "all" else peers, JOB_PEERS)
    wires: Any = plan.check_wires(wire)
    where = machine()
    with _stopped_as_by_ctrl_c(), bar_with_time_left(_NAME) as progress:
        outcome = run(wires, others, seconds, batch, repetitions, progress)
    report = BenchReport(machine=where, settings={each: settings_of(each) for each in wires}, **outcome._asdict())
    emit(report, "\n".join([about(report), "", table(report)]), json_target)
    return status_of(_NAME, causes(outcome.failed))


@contextlib.contextmanager
def _stopped_as_by_ctrl_c() -> Iterator[None]:
    """While the block runs, SIGTERM stops it as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
