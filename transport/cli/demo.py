"""``transport demo``: the main job on this host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transport.cli.output import JsonTarget, emit
from transport.errors import UsageError

if TYPE_CHECKING:
    from transport.metrics import Exporter
    from transport.wires import Wire

EXAMPLE = "Example: transport demo --rollouts 4 --readers 2 --wire tcp --json demo.json"

_EMBEDDED = "sqlite"
_DEMO_WIRES = ("mapped", "shm", "tcp", "rdma")  # episodes are in host memory: cuda would have nothing to carry


def demo(
    rollouts: Annotated[int, typer.Option(min=1, max=14, help="Processes that play.")] = 2,
    episodes: Annotated[int, typer.Option(min=1, help="Payloads: episodes of all rollouts together.")] = 480,
    readers: Annotated[int, typer.Option(min=1, max=14, help="Trainers; each reads every payload once.")] = 1,
    queue: Annotated[
        str, typer.Option(metavar="sqlite|PATH", help="Ticket queue: temporary, or a new file that stays.")
    ] = _EMBEDDED,
    wire: Annotated[
        str, typer.Option(metavar="WIRE,…", help=f"What may carry payloads: auto, or some of {', '.join(_DEMO_WIRES)}.")
    ] = "auto",
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Phases of every read and write, for chrome://tracing.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Prometheus metrics while it runs; 0: any free port.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of policy, learner and environments.")] = 0,
    target: Annotated[
        float, typer.Option(min=0, help="Least ratio of the mean returns of last and first tenth; 0: any.")
    ] = 2.0,
    json_target: JsonTarget = None,
) -> int:
    """Rollouts play CartPole, a trainer fetches their episodes and improves the policy they play.

    Exit status 1 when a payload was lost or came twice, or the policy did not learn.
    """
    wires = _wires(wire)
    queue_path = _queue_path(queue)

    import uvloop

    from transport.demo.display import Display
    from transport.demo.main_job import InterruptedBySignal, run_demo
    from transport.demo.plan import Plan

    if trace is not None and not trace.absolute().parent.is_dir():
        raise UsageError(f"--trace {trace}: its folder does not exist")
    exporter = _exporter(metrics_port)
    plan = Plan(rollouts=rollouts, trainers=readers, episodes=episodes, wires=wires, seed=seed)
    try:
        with Display(episodes) as display:
            if exporter is not None:
                display.say(f"metrics on http://127.0.0.1:{exporter.port}/metrics")
            summary = uvloop.run(run_demo(plan, display, queue_path, trace=trace, exporter=exporter))
    except InterruptedBySignal as interruption:
        print(f"transport demo: stopped by {interruption}; nothing is left behind", file=sys.stderr)
        return 128 + interruption.number
    finally:
        if exporter is not None:
            exporter.close()
    emit(summary, str(summary), json_target)
    problems = summary.problems(episodes, target)
    if problems:
        print(f"transport demo: {'; '.join(problems)}", file=sys.stderr)
    return 1 if problems else 0


def _exporter(port: int | None) -> Exporter | None:
    from transport.metrics import Exporter

    return None if port is None else Exporter(port)


def _wires(names: str) -> tuple[Wire, ...]:
    from transport.wires import WIRES

    wanted = {name.strip() for name in names.split(",")}
    if wanted == {"auto"}:
        return ()
    if not wanted <= set(_DEMO_WIRES):
        raise UsageError(f"--wire {names}: choose auto, or some of {', '.join(_DEMO_WIRES)}, separated by commas")
    if wanted == {"rdma"}:
        from transport.addresses import rdma_interfaces

        if not rdma_interfaces():
            raise UsageError("--wire rdma: this host has no InfiniBand or RoCE device; choose auto, shm or tcp")
    return tuple(wire for wire in WIRES if wire in wanted)


def _queue_path(queue: str) -> Path | None:
    if queue == _EMBEDDED:
        return None
    if "://" in queue:
        raise UsageError(f"--queue {queue}: this version has the embedded queue only; use --queue sqlite, or a path")
    path = Path(queue)
    if path.exists():
        raise UsageError(f"--queue {queue}: exists, and its tickets would be mixed with the demo's; name a new file")
    return path
