"""``transport demo``: runs the main job on this host."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transport.cli.epochs import state_folder, store_to_write
from transport.cli.output import JsonTarget, Said, emit, status_of
from transport.errors import UsageError

if TYPE_CHECKING:
    from transport.demo.summary import Summary
    from transport.wires import Wire

EXAMPLE = "Example: transport demo --rollouts 4 --readers 2 --wire tcp --json demo.json"

# Each rollout maps the trainer's ring and the other way round; 16 owner places also serve writer and listener.
_MOST = 14
_TARGET = 2.0
_PROCESSES, _RAY = "processes", "ray"
_DEMO_WIRES = ("mapped", "shm", "tcp", "rdma")  # episodes are in host memory: cuda would have nothing to carry


def demo(
    rollouts: Annotated[int, typer.Option(min=1, max=_MOST, help="Rollout worker processes.")] = 2,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of all rollouts together; each is one payload.")] = 480,
    readers: Annotated[
        int, typer.Option(min=1, max=_MOST, help="Trainer processes; each reads every payload once.")
    ] = 1,
    wire: Annotated[
        str, typer.Option(metavar="WIRE,…", help=f"Allowed wires: auto, or some of {', '.join(_DEMO_WIRES)}.")
    ] = "auto",
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Folder, s3://…, gs://… or hf://…: begin with the last checkpoint, end with one. Default: none.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Save policy and snapshots of the rings every other update, at --checkpoint or else in "
            "~/.local/state, and go on from them if a run was killed. For one trainer.",
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Record the phases of every read and write, for chrome://tracing. Default: no file.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the Prometheus metrics; 0: any free port. Default: no metrics."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of policy, learner and environments.")] = 0,
    target: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Least ratio of the mean returns of the last and the first tenth. Default: 2; 0 for a resumed run.",
        ),
    ] = None,
    where: Annotated[
        str, typer.Option("--on", metavar="processes|ray", help="processes: of this host; ray: actors of a cluster.")
    ] = _PROCESSES,
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Of a Ray cluster, or auto. Default: one is started here for the run."),
    ] = None,
    json_target: JsonTarget = None,
) -> int:
    """Run the main job: rollouts play CartPole, a trainer fetches their episodes and improves the policy.

    Exit status 1 when a payload was lost or came twice, or the policy did not learn.
    """
    wires = _wires(wire)
    _check_where(
        where,
        ray_address,
        [
            name
            for name, given in (
                ("--checkpoint", checkpoint),
                ("--resume", resume),
                ("--trace", trace),
                ("--metrics-port", metrics_port is not None),
            )
            if given
        ],
    )
    if resume and readers > 1:
        raise UsageError("--resume is for one trainer: leave --readers away")

    import uvloop

    from transport.demo.display import Display
    from transport.demo.main_job import CheckpointTo, InterruptedBySignal, run_demo
    from transport.demo.plan import Plan
    from transport.observe.metrics import Exporter

    if trace is not None and not trace.absolute().parent.is_dir():
        raise UsageError(f"--trace {trace}: the folder does not exist; create it first")
    exporter = None if metrics_port is None else Exporter(metrics_port)
    plan = Plan(rollouts=rollouts, trainers=readers, episodes=episodes, wires=wires, seed=seed)
    try:
        with Display(episodes) as display:
            to = CheckpointTo(checkpoint, store_to_write()) if checkpoint is not None else None
            if exporter is not None:
                display.say(f"metrics on http://127.0.0.1:{exporter.port}/metrics")
            summary: Summary
            if where == _RAY:
                from transport.demo.ray_job import run_on_ray

                summary = run_on_ray(plan, display, ray_address)
            else:
                summary = uvloop.run(
                    run_demo(
                        plan,
                        display,
                        to,
                        resume=(checkpoint or str(state_folder() / "demo")) if resume else None,
                        trace=trace,
                        exporter=exporter,
                    )
                )
    except InterruptedBySignal as interruption:
        how = "interrupted" if interruption.number == signal.SIGINT else f"stopped by {interruption}"
        print(f"transport demo: {how}; nothing is left behind", file=sys.stderr)
        return Said(128 + interruption.number)
    finally:
        if exporter is not None:
            exporter.close()
    emit(summary, str(summary), json_target)
    if target is None:
        target = 0.0 if summary.resumed_from else _TARGET  # a resumed policy need not double its return again
    return status_of("transport demo", summary.problems(episodes, target))


def _check_where(where: str, ray_address: str | None, without: list[str]) -> None:
    """``without``: options in use that only processes of this host have."""
    if where not in (_PROCESSES, _RAY):
        raise UsageError(f"--on {where}: choose processes or ray")
    if where == _PROCESSES and ray_address is not None:
        raise UsageError(f"--ray-address {ray_address}: give --on ray as well")
    if where == _RAY and without:
        raise UsageError(f"--on ray does not take {', '.join(without)}; leave it away, or give --on processes")


def _wires(names: str) -> tuple[Wire, ...]:
    from transport.bench.units import parse_names
    from transport.wires import WIRES

    wanted = parse_names("--wire", names, ("auto", *_DEMO_WIRES))
    if wanted == ["auto"]:
        return ()
    if "auto" in wanted:
        raise UsageError(f"--wire {names}: auto allows every wire; give it alone, or leave it out")
    if wanted == ["rdma"]:
        from transport.doctor import infiniband

        infiniband.require()
    return tuple(wire for wire in WIRES if wire in wanted)
