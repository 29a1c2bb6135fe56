"""``transport demo``: the main job on this host."""

from __future__ import annotations

import contextlib
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transport.cli.cooldown import default_store
from transport.cli.output import JsonTarget, emit
from transport.errors import TransportError, UsageError

if TYPE_CHECKING:
    from transport.observe.metrics import Exporter
    from transport.wires import Wire

EXAMPLE = "Example: transport demo --rollouts 4 --readers 2 --wire tcp --json demo.json"

# Each rollout maps the trainer's ring and the other way round; 16 owner places also serve writer and listener.
_MOST = 14
_EMBEDDED = "sqlite"
_TARGET = 2.0
_DEMO_WIRES = ("mapped", "shm", "tcp", "rdma")  # episodes are in host memory: cuda would have nothing to carry


def demo(
    rollouts: Annotated[int, typer.Option(min=1, max=_MOST, help="Processes that play.")] = 2,
    episodes: Annotated[int, typer.Option(min=1, help="Payloads: episodes of all rollouts together.")] = 480,
    readers: Annotated[int, typer.Option(min=1, max=_MOST, help="Trainers; each reads every payload once.")] = 1,
    queue: Annotated[
        str,
        typer.Option(
            metavar="sqlite|PATH|redis://…",
            help="Ticket queue: temporary, a new file that stays, or redis://host:port/db, where ?run=name stays.",
        ),
    ] = _EMBEDDED,
    wire: Annotated[
        str, typer.Option(metavar="WIRE,…", help=f"What may carry payloads: auto, or some of {', '.join(_DEMO_WIRES)}.")
    ] = "auto",
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Folder, s3://…, gs://… or hf://…: begin with the last checkpoint, end with one."
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Phases of every read and write, for chrome://tracing.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Prometheus metrics while it runs; 0: any free port.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of policy, learner and environments.")] = 0,
    target: Annotated[
        float | None,
        typer.Option(
            min=0, help="Least ratio of the mean returns of last and first tenth; 0: any. Default 2, resumed 0."
        ),
    ] = None,
    json_target: JsonTarget = None,
) -> int:
    """Rollouts play CartPole, a trainer fetches their episodes and improves the policy they play.

    Exit status 1 when a payload was lost or came twice, or the policy did not learn.
    """
    wires = _wires(wire)
    queue_text, temporary = _queue_text(queue)

    import uvloop

    from transport.demo.display import Display
    from transport.demo.main_job import CheckpointTo, InterruptedBySignal, run_demo
    from transport.demo.plan import Plan

    if trace is not None and not trace.absolute().parent.is_dir():
        raise UsageError(f"--trace {trace}: its folder does not exist")
    exporter = _exporter(metrics_port)
    plan = Plan(rollouts=rollouts, trainers=readers, episodes=episodes, wires=wires, seed=seed)
    try:
        with Display(episodes) as display:
            to = CheckpointTo(checkpoint, default_store()) if checkpoint is not None else None
            if exporter is not None:
                display.say(f"metrics on http://127.0.0.1:{exporter.port}/metrics")
            summary = uvloop.run(run_demo(plan, display, queue_text, to, trace=trace, exporter=exporter))
    except InterruptedBySignal as interruption:
        print(f"transport demo: stopped by {interruption}; nothing is left behind", file=sys.stderr)
        return 128 + interruption.number
    finally:
        if exporter is not None:
            exporter.close()
        if temporary:
            _remove_run(temporary)
    emit(summary, str(summary), json_target)
    if target is None:
        target = 0.0 if summary.resumed_from else _TARGET  # what has learned before need not double again
    problems = summary.problems(episodes, target)
    if problems:
        print(f"transport demo: {'; '.join(problems)}", file=sys.stderr)
    return 1 if problems else 0


def _exporter(port: int | None) -> Exporter | None:
    from transport.observe.metrics import Exporter

    return None if port is None else Exporter(port)


def _wires(names: str) -> tuple[Wire, ...]:
    from transport.wires import WIRES

    wanted = {name.strip() for name in names.split(",")}
    if wanted == {"auto"}:
        return ()
    if not wanted <= set(_DEMO_WIRES):
        raise UsageError(f"--wire {names}: choose auto, or some of {', '.join(_DEMO_WIRES)}, separated by commas")
    if wanted == {"rdma"}:
        from transport.wire.addresses import rdma_interfaces

        if not rdma_interfaces():
            raise UsageError("--wire rdma: this host has no InfiniBand or RoCE device; choose auto, shm or tcp")
    return tuple(wire for wire in WIRES if wire in wanted)


def _queue_text(queue: str) -> tuple[str | None, str | None]:
    """The place of the queue, None for a temporary file; and that of a run on a server that is to be removed."""
    from transport.storage.urls import RedisPlace, SQLitePlace, has_scheme, parse_place

    if queue == _EMBEDDED:
        return None, None
    if queue.startswith(("redis://", "rediss://")) and "?" not in queue:
        queue = f"{queue}?run=demo-{secrets.token_hex(6)}"
        parse_place(queue)
        return queue, queue
    place = parse_place(queue) if has_scheme(queue) else SQLitePlace(Path(queue))
    if isinstance(place, RedisPlace):
        return queue, None
    if place.path.exists():
        raise UsageError(f"--queue {queue}: exists, and its tickets would be mixed with the demo's; name a new file")
    return place.text, None


def _remove_run(text: str) -> None:
    from transport.queue import RedisQueue
    from transport.storage.urls import RedisPlace, parse_place

    place = parse_place(text)
    if isinstance(place, RedisPlace):
        # A server that is gone keeps what it had, and the first error is the one to see.
        with contextlib.suppress(TransportError), RedisQueue(place, patience_s=1.0) as queue:
            queue.remove()
