"""``transport demo``: runs the main job on this host."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer

from transport.cli.output import JsonTarget, Said, emit, status_of
from transport.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transport.demo.cartpole import DemoOptions, DemoReport
    from transport.wires import Wire

EXAMPLE = "Example: transport demo --rollouts 4 --readers 2 --wire tcp --json demo.json"

_MOST = 14  # each maps the trainer's ring and the other way round; 16 owner places also serve writer and listener
_TARGET = 2.0
_DEMO_WIRES = ("mapped", "shm", "tcp", "rdma")  # episodes are in host memory: cuda would have nothing to carry
_LINE_EVERY_S = 10.0  # where there is no terminal


def demo(
    rollouts: Annotated[int, typer.Option(min=1, max=_MOST, help="Rollout worker processes.")] = 2,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of all rollouts together; each is one payload.")] = 480,
    readers: Annotated[int, typer.Option(min=1, max=_MOST, help="Trainers; each reads every payload once.")] = 1,
    wire: Annotated[
        str, typer.Option(metavar="WIRE,…", help=f"Allowed wires: auto, or some of {', '.join(_DEMO_WIRES)}.")
    ] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Random seed of policy and environments.")] = 0,
    target: Annotated[
        float, typer.Option(min=0, help="Least ratio of the mean returns of the last and the first tenth.")
    ] = _TARGET,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the trainer's metrics. Default: no metrics."),
    ] = None,
    json_target: JsonTarget = None,
) -> int:
    """Run the main job: rollouts play CartPole, a trainer takes their episodes and improves the policy.

    The program is one file, transport/demo/cartpole.py, to be copied. Exit status 1 when a payload was lost or came
    twice, or the policy did not learn.
    """
    try:
        from transport.demo.cartpole import DemoOptions, run
    except ModuleNotFoundError as error:
        from transport.runtime.installing import install

        raise MissingDependencyError(f"the demo needs Gymnasium's CartPole: {install('demo')}") from error
    from transport.runtime.interruption import owning_segment, segment_prefix

    signal.signal(signal.SIGTERM, _stop)  # as Ctrl-C: everything ends in order
    name = segment_prefix("demo")  # its segments end with the command, however that ends
    options = DemoOptions(
        run=name,
        rollouts=rollouts,
        episodes=episodes,
        readers=readers,
        wire=_wires(wire),
        seed=seed,
        metrics_port=metrics_port,
    )
    try:
        with _progress(episodes) as shown, owning_segment(f"transport-offers-{name}"):
            summary = Summary.of(run(options, shown), options)
    except KeyboardInterrupt as stop:
        how, number = ("stopped by SIGTERM", signal.SIGTERM) if stop.args else ("interrupted", signal.SIGINT)
        print(f"transport demo: {how}; nothing is left behind", file=sys.stderr)
        return Said(128 + number)
    emit(summary, str(summary), json_target)
    found = []
    if summary.payloads != episodes or summary.lost:
        found.append(f"{summary.payloads} of {episodes} episodes were taken, {summary.lost} deliveries were lost")
    if summary.duplicates:
        found.append(f"{summary.duplicates} deliveries came twice")
    if summary.mean_return_last < target * summary.mean_return_first:
        found.append(
            f"the policy did not learn: the mean return went from {summary.mean_return_first:.1f} to "
            f"{summary.mean_return_last:.1f}, due is {target:g} times as much (more --episodes, or another --seed)"
        )
    return status_of("transport demo", found)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's JSON. Bytes and deliveries are those of all trainers."""

    payloads: int
    bytes: int
    lost: int
    duplicates: int
    stale: int
    retries: int
    seconds: float
    wire: str
    mean_return_first: float  # of the first tenth of the episodes
    mean_return_last: float
    deliveries: int
    bytes_by_wire: dict[str, int]
    updates: int
    mean_age: float  # of an episode, in versions of the policy

    @classmethod
    def of(cls, report: DemoReport, options: DemoOptions) -> Summary:
        """Sum up what the trainers have reported."""
        tenth = max(1, options.episodes // 10)
        return cls(
            payloads=len(report.returns),
            bytes=report.by_wire.total(),
            lost=options.episodes * options.readers - report.deliveries,
            duplicates=report.duplicates,
            stale=0,
            retries=report.retries,
            seconds=report.seconds,
            wire=",".join(sorted(report.by_wire)),
            mean_return_first=fmean(report.returns[:tenth] or [0]),
            mean_return_last=fmean(report.returns[-tenth:] or [0]),
            deliveries=report.deliveries,
            bytes_by_wire=dict(report.by_wire),
            updates=report.updates,
            mean_age=fmean(report.ages or [0]),
        )

    def __str__(self) -> str:
        wires = ", ".join(f"{size / 1e6:.1f} MB by {wire}" for wire, size in self.bytes_by_wire.items()) or "0 bytes"
        return (
            f"payloads  {self.payloads} episodes, {self.deliveries} deliveries in {self.seconds:.1f} s\n"
            f"bytes     {wires}\n"
            f"faults    {self.lost} lost, {self.duplicates} duplicates, {self.stale} stale, {self.retries} retries\n"
            f"learning  mean return {self.mean_return_first:.1f} → {self.mean_return_last:.1f} in {self.updates} "
            f"updates, from episodes {self.mean_age:.1f} versions old"
        )


def _stop(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(number)


def _wires(names: str) -> str | frozenset[Wire]:
    from transport.bench.units import parse_names
    from transport.wires import WIRES

    wanted = parse_names("--wire", names, ("auto", *_DEMO_WIRES))
    if wanted == ["auto"]:
        return "auto"
    if "auto" in wanted:
        raise UsageError(f"--wire {names}: auto allows every wire; give it alone, or omit it")
    if wanted == ["rdma"]:
        from transport.doctor import infiniband

        infiniband.require()
    return frozenset(wire for wire in WIRES if wire in wanted)


@contextlib.contextmanager
def _progress(episodes: int) -> Iterator[Callable[[DemoReport], None]]:
    """Return a bar on a terminal; elsewhere a line for each tenth of the run, and after a while without one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    tenth, said_at = -1, time.monotonic()
    columns = (TextColumn("episodes"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[what]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=episodes, what="starting")

        def show(report: DemoReport) -> None:
            nonlocal tenth, said_at
            done = len(report.returns)
            what = f"{report.by_wire.total() / 1e6:.1f} MB, mean return {fmean(report.returns[-64:]):.1f}"
            bar.update(task, completed=done, what=what)
            now = time.monotonic()
            if bar.disable and (done * 10 // episodes > tenth or now - said_at > _LINE_EVERY_S):
                tenth, said_at = done * 10 // episodes, now
                console.print(f"{done} of {episodes} episodes, {what}", markup=False, highlight=False, soft_wrap=True)

        yield show
