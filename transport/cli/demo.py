"""``transport demo``: runs the main job on this host."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from transport.cli.output import JsonTarget, Said, emit, status_of
from transport.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    json_target: JsonTarget = None,
) -> int:
    """Run the main job: rollouts play CartPole, a trainer takes their episodes and improves the policy.

    The program is one file, transport/demo/cartpole.py, to be copied. Exit status 1 when a payload was lost or came
    twice, or the policy did not learn.
    """
    from transport.demo.cartpole import Options, run
    from transport.runtime.interruption import owning_segment, segment_prefix

    signal.signal(signal.SIGTERM, _stop)  # as Ctrl-C: everything ends in order
    name = segment_prefix("demo")  # its segments end with the command, however that ends
    options = Options(run=name, rollouts=rollouts, episodes=episodes, readers=readers, wire=_wires(wire), seed=seed)
    try:
        with _progress(episodes) as shown, owning_segment(f"transport-offers-{name}"):
            summary = run(options, shown)
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
def _progress(episodes: int) -> Iterator[Callable[[int, int, float], None]]:
    """A bar on a terminal; elsewhere a line for each tenth of the run, and after a while without one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    tenth, said_at = -1, time.monotonic()
    columns = (TextColumn("episodes"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[what]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=episodes, what="starting")

        def show(done: int, size: int, mean_return: float) -> None:
            nonlocal tenth, said_at
            what = f"{size / 1e6:.1f} MB, mean return {mean_return:.1f}"
            bar.update(task, completed=done, what=what)
            now = time.monotonic()
            if bar.disable and (done * 10 // episodes > tenth or now - said_at > _LINE_EVERY_S):
                tenth, said_at = done * 10 // episodes, now
                console.print(f"{done} of {episodes} episodes, {what}", markup=False, highlight=False, soft_wrap=True)

        yield show
