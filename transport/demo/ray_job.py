"""``transport demo --on ray``: the main job with rollouts and trainers as Ray actors, and nothing beside the cluster.

Where a node dies, Ray starts its actors on another one, and their work begins again from the records of the ranks.
The directory, with the records, is an actor on the driver's node.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

import msgspec

from transport.demo.display import Display
from transport.demo.main_job import InterruptedBySignal
from transport.demo.plan import Plan
from transport.demo.summary import Summary, summarise
from transport.demo.worker import RolloutDone
from transport.demo.workers import WorkerFailedError
from transport.errors import MissingDependencyError, UsageError
from transport.queue import QueueDepth
from transport.ring.attachment import remove_dead
from transport.runtime import interruption
from transport.runtime.installing import install
from transport.runtime.interruption import segment_prefix

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
except ImportError as error:
    raise MissingDependencyError(f"--on ray: Ray cannot be imported ({error}): {install('ray')}") from error

from transport.adapters.ray import RayStore, start_directory
from transport.demo.ray_actors import RolloutActor, TrainerActor
from transport.demo.ray_record import RankRecord, nodes_of, records, restarts, trained_by_all, written

_LOOK_S: Final = 0.5
_CONNECT_S: Final = 10.0
_STOP_S: Final = 15.0
_PLACED_S: Final = 30.0
_RESTARTS: Final = 8  # an actor that ends so often has another reason than its node
_CPUS: Final = 0.1  # of an actor: the demo is to run on a cluster that has few free
_STORE_BYTES: Final = 80 << 20  # of a local cluster: payloads are not in Ray's object store


class RaySummary(Summary, frozen=True, kw_only=True):
    """With what Ray did."""

    nodes: int  # on which actors were at last
    restarts: int  # of actors
    replayed: int  # episodes that were played again, as the ring that had them was lost
    repeated: int  # deliveries of episodes that had been trained on; they were dropped

    def __str__(self) -> str:
        return (
            f"{super().__str__()}\nray       {self.nodes} nodes, {self.restarts} restarts of actors, "
            f"{self.replayed} episodes played again, {self.repeated} repeated deliveries dropped"
        )


def run_on_ray(plan: Plan, display: Display, address: str | None = None) -> RaySummary:
    """Run the demo on a Ray cluster. Actors and directory have ended when this returns.

    Args:
        address: of a cluster; None: the one that this process has joined, else one that is started here for the run.

    Raises:
        InterruptedBySignal: SIGINT or SIGTERM.
        WorkerFailedError: an actor failed, or was restarted too often.
        UsageError: there is no cluster at the address.
    """
    started = time.monotonic()
    prefix = segment_prefix("demo")
    directory = prefix.rstrip("-")
    with _cluster(address), _signals() as came:
        handle = start_directory(directory)
        try:
            store = RayStore(directory)
            actors = {
                f"{kind.kind} {index}": _made(kind, plan, index, directory, prefix)
                for kind, number in ((TrainerActor, plan.trainers), (RolloutActor, plan.rollouts))
                for index in range(number)
            }
            running = {name: actor.run.remote() for name, actor in actors.items()}
            try:
                results = _results(running, store, plan, display, came)
            finally:
                _end(actors, running)
            ranks, placed, again, writes = records(store, plan), nodes_of(store), restarts(store), written(store)
        finally:
            ray.kill(handle)
            remove_dead(prefix)  # of killed actors of this host
    rollouts = [result for result in results if isinstance(result, RolloutDone)]
    whole_run = len(trained_by_all(ranks))
    seconds = time.monotonic() - started
    # Rollouts report for their last life only: the ranks' records are the whole run.
    fields = msgspec.structs.asdict(
        summarise(plan, rollouts, [record.done(plan) for record in ranks], QueueDepth(), seconds)
    ) | {
        "payloads": whole_run,
        "lost": plan.episodes * plan.trainers - sum(len(set(record.episodes)) for record in ranks),
    }
    return RaySummary(
        **fields,
        nodes=len(set(placed.values())),
        restarts=again,
        replayed=max(0, writes - whole_run),
        repeated=sum(record.repeated for record in ranks),
    )


def _made(kind: type[Any], plan: Plan, index: int, directory: str, prefix: str) -> Any:
    actor = ray.remote(
        num_cpus=_CPUS,
        max_restarts=_RESTARTS,
        max_task_retries=_RESTARTS,  # `run` begins again in the next life
        max_concurrency=2,  # `run`, and `stop`
        scheduling_strategy="SPREAD",
    )(kind)
    return actor.remote(plan, index, directory, prefix)


def _results(
    running: dict[str, Any], store: RayStore, plan: Plan, display: Display, came: list[signal.Signals]
) -> list[Any]:
    """Of all actors. Raises WorkerFailedError as soon as one cannot, and InterruptedBySignal for one that came."""
    names = {reference: name for name, reference in running.items()}
    left = list(names)
    late_at = time.monotonic() + _PLACED_S
    told = 0
    while left:
        ended, left = ray.wait(left, num_returns=len(left), timeout=_LOOK_S)
        if came:
            raise InterruptedBySignal(came[0])
        for reference in ended:
            try:
                ray.get(reference)
            except RayTaskError as error:
                raise WorkerFailedError(f"{names[reference]}: {type(error.cause).__name__}: {error.cause}") from error
            except RayActorError as error:
                raise WorkerFailedError(f"{names[reference]}: {error}") from error
        _show(records(store, plan), display)
        if (again := restarts(store)) > told:
            told = again
            display.say(f"Ray has restarted actors: {again} restarts so far")
        if time.monotonic() > late_at:
            late_at = float("inf")
            missing = sorted(set(names.values()) - {name.replace("-", " ") for name in nodes_of(store)})
            if missing:
                display.say(f"not started after {_PLACED_S:g} s: {', '.join(missing)}; see `ray status` for free CPUs")
    results: list[Any] = ray.get(list(names))
    return results


def _show(ranks: list[RankRecord], display: Display) -> None:
    if any(record.episodes for record in ranks):
        display.show([record.progress() for record in ranks])


def _end(actors: dict[str, Any], running: dict[str, Any]) -> None:
    """Stop what still works, in order: `run` cleans up before it returns. Then end the processes."""
    ending = [*(actor.stop.remote() for actor in actors.values()), *running.values()]
    ray.wait(ending, num_returns=len(ending), timeout=_STOP_S)
    for actor in actors.values():
        ray.kill(actor)


@contextlib.contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """Take part in a cluster; leave it at the end unless this process had joined it before."""
    if ray.is_initialized():
        if address is not None:
            raise UsageError(f"--ray-address {address}: this process takes part in a cluster already; leave it away")
        yield
        return
    if address is not None:
        _check_address(address)
    local: dict[str, Any] = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    try:
        ray.init(address=address or "local", logging_level="ERROR", **({} if address else local))
    except Exception as error:  # Ray raises bare ones, too: its own start has a limit of 30 s
        if address is None:
            raise UsageError(f"--on ray: Ray did not start here: {error}") from None
        raise UsageError(
            f"--ray-address {address}: no cluster answers ({error}); give host:port of its head, or auto"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raises UsageError where nothing listens: Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host or int(port) > 65535:
        raise UsageError(f"--ray-address {address}: give host:port of the cluster's head, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise UsageError(
            f"--ray-address {address}: no cluster answers ({error}); give host:port of its head, or auto"
        ) from None


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """SIGINT and SIGTERM while the block runs. The handler raises nothing: Ray's own calls do not survive that."""
    came: list[signal.Signals] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        came.append(signal.Signals(number))
        interruption.began(_STOP_S)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
