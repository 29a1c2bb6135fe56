"""Scenes of what is made of values, of the mixins, of runs and of the tools; all scenes by the title of their class."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import misuse_further as further
import misuse_weights as weights
import numpy as np
from misuse_constructors import constructors, functions
from misuse_epochs import a_destination, a_ledger, an_archive, an_epoch_record, keys
from misuse_scenes import (
    SCHEMA,
    Arguments,
    Calls,
    Make,
    Scene,
    a_ring,
    found_rings,
    memory_queue,
    nothing,
    ring_class,
    ring_queue,
    sqlite_queue,
    sqlite_store,
    values,
)
from misuse_wire import a_client, a_server, blocking_client, served

import transport
from transport import (
    Rollout,
    Settings,
    Trainer,
    UpTo,
)
from transport.client import trace
from transport.packer.prefetch import FetchedBatch
from transport.rendezvous import Closing, ExitCodes, Reason, Rendezvous, Rules
from transport.ring.batches import PayloadBatch
from transport.ring.claimed import ClaimedPayload
from transport.ring.leases import ReadLease, WriteLease
from transport.store.memory import MemoryStore
from transport.testing import LocalTransport, MemoryQueue, a_ticket


# --- values -----------------------------------------------------------------------------------------------
@contextlib.contextmanager
def schemas() -> Iterator[Scene]:
    calls: Calls = {
        "of": lambda: {"**tensors": {"tokens": ("int32", UpTo(4), 3)}},
        "from_arrays": lambda: {"arrays": {"tokens": np.arange(3)}},
        "layout": lambda: {"lengths": (3,)},
        "only": lambda: {"fields": ["tokens"]},
        "encode": nothing,
        "decode": lambda: {"data": SCHEMA.encode()},
        "to_json": nothing,
        "from_json": lambda: {"text": SCHEMA.to_json()},
    }
    yield Scene(SCHEMA, calls, close="")


@contextlib.contextmanager
def tickets() -> Iterator[Scene]:
    ticket = a_ticket(SCHEMA, lengths=(3,))
    place = (ticket.ring, ticket.host, ticket.schema_fingerprint, ticket.addresses, ticket.ports)
    calls: Calls = {
        "check_rank": lambda: {"rank": 0},
        "layout": lambda: {"schema": SCHEMA}, "fields": lambda: {"schema": SCHEMA},
        "encode": nothing, "to_text": nothing, "to_json": nothing,
        "head_of": lambda: {"place": place},
        "decode": lambda: {"data": ticket.encode()},
        "from_json": lambda: {"text": ticket.to_json()},
        "parse": lambda: {"source": ticket.to_text()},
        "of": lambda: {"source": ticket.to_text()},
    }  # fmt: skip
    yield Scene(ticket, calls, close="")


@contextlib.contextmanager
def settings() -> Iterator[Scene]:
    yield Scene(Settings(), {"read_timeout": lambda: {"size": 10}, "validate": nothing}, close="")


@contextlib.contextmanager
def rules() -> Iterator[Scene]:
    yield Scene(Rules(), {"host_poll_s": lambda: {"members": 10}, "validate": nothing}, close="")


@contextlib.contextmanager
def exit_codes() -> Iterator[Scene]:
    yield Scene(
        ExitCodes(),
        {"of": lambda: {"closing": Closing(reason=Reason.SUCCESS, round=1, incarnation="i", by="x")}},
        close="",
    )


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


SCENES: dict[str, Make] = {
    "SharedRingBuffer": a_ring, "SharedRingBuffer, the class": ring_class, "UCXXServer": a_server,
    "BlockingClient": blocking_client, "UCXXClient": a_client, "Rollout": a_rollout, "Trainer": a_trainer,
    "transport.queue.SQLiteQueue": sqlite_queue, "transport.queue.RingQueue": ring_queue,
    "transport.queue.FoundRings": found_rings, "transport.testing.MemoryQueue": memory_queue,
    "transport.testing.LocalTransport": local_transport,
    "transport.store.SQLiteStore": sqlite_store, "transport.cooldown.Ledger": a_ledger,
    "transport.cooldown.Destination": a_destination, "transport.rendezvous.Archive": an_archive,
    "transport.rendezvous.Rendezvous": a_rendezvous, "transport.client.trace.Trace": a_trace,
    "transport.rendezvous.Keys": keys, "transport.cooldown.EpochRecord": an_epoch_record,
    "Schema": schemas, "Ticket": tickets, "Settings": settings, "transport.rendezvous.Rules": rules,
    "transport.rendezvous.ExitCodes": exit_codes, "constructors": constructors, "functions": functions,
    "transport.ring.leases.WriteLease": further.of_a_ring(
        WriteLease, "transport.ring.leases.WriteLease", lambda ring: ring.reserve({"tokens": 2})
    ),
    "transport.ring.leases.ReadLease": further.of_a_ring(
        ReadLease, "transport.ring.leases.ReadLease", further.read_lease
    ),
    "transport.ring.claimed.ClaimedPayload": further.of_a_ring(
        ClaimedPayload, "transport.ring.claimed.ClaimedPayload", further.claimed,
        release=lambda: {"delay_s": 0.0},
        discard=lambda: {"reason": "because", "consumer": "test", "how": "discarded"},
    ),
    "transport.ring.batches.PayloadBatch": further.of_a_ring(
        PayloadBatch, "transport.ring.batches.PayloadBatch", further.claimed_batch
    ),
    "transport.joined": further.joined, "transport.packer.consumed_record.ConsumedRecord": further.consumed_record,
    "transport.queue.group.GroupQueue": further.group_queue, "transport.store.directory.Directory": further.directory,
    "transport.observe.metrics.Exporter": further.exporter, "transport.adapters": further.adapters,
    "transport.weights": weights.weights_functions, "transport.weights.Admission": weights.admissions,
    "transport.weights.Limits": weights.limits, "transport.weights.ReferenceWorker": weights.a_worker,
    "transport.weights.Taker": weights.a_taker, "transport.weights.WeightUpdate": weights.a_manager,
    "transport.weights.WeightUpdate, sharded": weights.a_sharded_manager,
    "transport.weights.sharding.layouts.Layout": weights.layouts,
    "transport.weights.sharding.shards": weights.shard_functions,
}  # fmt: skip
LOOPS = {title for title in SCENES if title.startswith("transport.weights.WeightUpdate")} | {
    "UCXXClient", "transport.rendezvous.Rendezvous",
}  # fmt: skip
"""What belongs to a loop."""

ENDS = {"close", "end", "aclose", "cleanup_ucxx", "cleanup_ucxx_packer"}
"""Calls that end what they are made on."""
