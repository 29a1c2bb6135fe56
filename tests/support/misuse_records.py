"""Scenes of the mixins, of runs and of the tools; the scene of every public class that has an end, by its title."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

from misuse_scenes import (
    SCHEMA,
    Arguments,
    Calls,
    Make,
    Scene,
    a_ring,
    any_queue,
    found_rings,
    memory_queue,
    nothing,
    redis_queue,
    ring_queue,
    sqlite_store,
    values,
)
from misuse_wire import a_client, a_server, blocking_client, served

import transport
from transport import (
    Rollout,
    SharedRingBuffer,
    Trainer,
)
from transport.client import trace
from transport.client.payload import ClientStatistics
from transport.cooldown.destinations.folder import Folder
from transport.observe.metrics import Exporter
from transport.observe.statistics import PackerStatistics
from transport.packer.prefetch import FetchedBatch
from transport.queue import RingQueue
from transport.queue.group import GroupQueue
from transport.rendezvous import Reason, Rendezvous, Rules
from transport.store.memory import MemoryStore
from transport.testing import LocalTransport, MemoryQueue


# --- values -----------------------------------------------------------------------------------------------
# --- tools
@contextlib.contextmanager
def a_destination() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as text, contextlib.closing(Folder(Path(text))) as folder:
        folder.put("a/b", b"12")
        again = itertools.count()
        calls: Calls = {
            "names": lambda: {"path": "a"}, "size": lambda: {"path": "a/b"}, "pieces": lambda: {"path": "a/b"},
            "write": lambda: {"path": f"a/c{next(again)}", "size": 1, "pieces": [b"x"]},
            "put": lambda: {"path": "a/d", "data": b"x"},
            "delete": lambda: {"path": "a/d"}, "read": lambda: {"path": "a/b", "most": 10},
            "settle": lambda: {"place": "a"}, "proofs": lambda: {"path": "a/b"},
            "publish": lambda: {"name": "x", "files": {"b": "a/b"}}, "unpublish": lambda: {"name": "x"},
            "leftovers": lambda: {"path": "a"}, "remove_leftover": lambda: {"path": "a/d"}, "close": nothing,
        }  # fmt: skip

        def intact() -> None:
            assert Folder(Path(text)).read("a/b", 10) == b"12"

        yield Scene(folder, calls, intact)


# --- the two sides of a job -------------------------------------------------------------------------------
@contextlib.contextmanager
def a_rollout() -> Iterator[Scene]:
    with contextlib.closing(MemoryQueue()) as tickets:
        rollout = Rollout(
            SCHEMA, slots=64, queue=tickets, mode="thread", drain_s=0.0,
            server=transport.ServerOptions(addresses=("127.0.0.1",)), ring=transport.RingOptions(overflow="error"),
        )  # fmt: skip
        more: Arguments = {"metadata": {"a": 1}, "policy_version": 1, "deadline_s": None, "timeout_s": 0.0}
        calls: Calls = {
            "write_to_buffer": lambda: {"trajectory": values(), **more},
            "write_many_to_buffer": lambda: {"trajectories": [values()], **more},
            "flush_ucxx": lambda: {"timeout_s": 5.0},
            "reconcile": nothing, "ring_statistics": nothing,
            "close": lambda: {"drain_s": 0.0}, "cleanup_ucxx": lambda: {"drain_s": 0.0},
        }  # fmt: skip
        with contextlib.closing(rollout):
            yield Scene(rollout, calls)


@contextlib.contextmanager
def a_trainer() -> Iterator[Scene]:
    with served() as (ring, _, room, intact), contextlib.closing(MemoryQueue()) as tickets:
        trainer = Trainer(schemas=[SCHEMA], queue=tickets, wire={"tcp"})

        def published() -> Any:
            written = transport.packer.rollout.queued(ring.write(values()))
            tickets.publish([written])
            return written

        def claimed() -> Any:
            written = published()
            trainer.cancel_prefetch()
            while True:
                [claim] = trainer.claim_tickets(1, 5.0)
                if claim.ticket_id == written.id:
                    return [claim]
                tickets.discard(claim, "of an earlier call")  # whose payload may be gone

        def collected() -> FetchedBatch:
            trainer.start_prefetch(claimed())
            batch = trainer.collect_prefetch(10.0)
            assert batch is not None
            return batch

        def started() -> Arguments:
            trainer.start_prefetch(claimed())
            return {"timeout": 10.0}

        calls: Calls = {
            "claim_tickets": lambda: (published(), {"n": 1, "timeout_s": 0.0, "policy_version": 1})[1],
            "consume": lambda: {"batch": collected()},
            "abandon": lambda: {"batch": collected(), "reason": "because"},
            "start_prefetch": lambda: {"items": claimed()},
            "defer_prefetch": lambda: {"items": claimed()},
            "wait_prefetch": started,
            "collect_prefetch": started,
            "cancel_prefetch": nothing,
            "get_policy_input": lambda: {"item": collected().items[0].ticket, "*arguments": (), "**named": {}},
            "payload_to_policy_input": lambda: {"payload": collected().items[0].payload, "*_": (), "**__": {}},
            "ucxx_statistics": nothing, "consumed_record": nothing, "close": nothing, "cleanup_ucxx_packer": nothing,
        }  # fmt: skip

        with contextlib.closing(trainer):
            yield Scene(trainer, calls, intact, room=room)


@contextlib.contextmanager
def local_transport() -> Iterator[Scene]:
    with LocalTransport(SCHEMA, slots=64) as local:
        calls: Calls = {"write": lambda: {"arrays": values(), "metadata": {"a": 1}}, "close": nothing}

        def room() -> None:
            for ticket in local.ring.tickets() if not local.ring.native.closed else ():
                local.ring.discard(ticket)

        yield Scene(local, calls, room=room)


# --- runs -------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def a_trace() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as text, contextlib.closing(trace.Trace(Path(text) / "t", "x")) as made:
        calls: Calls = {
            "span": lambda: {"name": "a", "key": "b", "begun": 1.0, "**about": {"more": 1}},
            "instant": lambda: {"name": "a", "key": "b", "**about": {"more": 1}},
            "close": nothing,
        }
        yield Scene(made, calls)


@contextlib.contextmanager
def a_rendezvous() -> Iterator[Scene]:
    with asyncio.Runner() as runner:
        kept = MemoryStore()

        def wait(awaitable: Awaitable[Any]) -> Any:
            async def waiting() -> Any:
                async with asyncio.timeout(30):
                    return await awaitable

            return runner.run(waiting())

        async def enter() -> Rendezvous:
            return await Rendezvous(
                kept, "run", Rules(poll_s=0.05, last_call_s=0.0, host_poll_least_s=0.05)
            ).__aenter__()

        member = runner.run(enter())
        calls: Calls = {
            "join": nothing, "roster": nothing,
            "close": lambda: {"reason": Reason.SUCCESS, "message": "because"}, "aclose": nothing,
        }  # fmt: skip
        try:
            yield Scene(member, calls, wait=wait, close="aclose")
        finally:
            runner.run(member.aclose())


@contextlib.contextmanager
def group_queue() -> Iterator[Scene]:
    queue = MemoryQueue()
    with (
        contextlib.closing(queue),
        any_queue(GroupQueue(queue, MemoryStore(), "group", 0, 1), queue.another) as scene,
    ):
        yield scene


@contextlib.contextmanager
def exporter() -> Iterator[Scene]:
    with SharedRingBuffer.create(slots=1, slot_bytes=8) as ring, RingQueue([ring]) as queue, Exporter(0) as made:
        calls: Calls = {
            "add_ring": lambda: {"ring": ring},
            "add_client": lambda: {"name": "x", "statistics": lambda: ClientStatistics()},
            "add_packer": lambda: {"name": "x", "statistics": lambda: PackerStatistics(client=ClientStatistics())},
            "add_queue": lambda: {"name": "x", "queue": queue},
            "close": nothing,
        }
        yield Scene(made, calls)


SCENES: dict[str, Make] = {
    "SharedRingBuffer": a_ring, "UCXXServer": a_server,
    "BlockingClient": blocking_client, "UCXXClient": a_client, "Rollout": a_rollout, "Trainer": a_trainer,
    "transport.queue.RedisQueue": redis_queue, "transport.queue.RingQueue": ring_queue,
    "transport.queue.FoundRings": found_rings, "transport.queue.group.GroupQueue": group_queue,
    "transport.testing.MemoryQueue": memory_queue, "transport.testing.LocalTransport": local_transport,
    "transport.store.SQLiteStore": sqlite_store, "transport.cooldown.Destination": a_destination,
    "transport.rendezvous.Rendezvous": a_rendezvous, "transport.client.trace.Trace": a_trace,
    "transport.observe.metrics.Exporter": exporter,
}  # fmt: skip
LOOPS = {"UCXXClient", "transport.rendezvous.Rendezvous"}
"""What belongs to a loop."""

ENDS = {"close", "end", "aclose", "cleanup_ucxx", "cleanup_ucxx_packer"}
"""Calls that end what they are made on."""
