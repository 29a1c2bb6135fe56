"""Public classes in working order, with arguments that their calls accept: the tests of misuse change them one by one.

A scene is one object. `calls` has a fresh, valid set of arguments for each of its calls; ``intact`` fails when the
payload that was written beforehand cannot be read any more, or can be read twice.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from redis_server import redis_server

from transport import (
    Schema,
    SharedRingBuffer,
    Ticket,
    UpTo,
)
from transport.claims.places import OnThisHost
from transport.packer.rollout import queued
from transport.queue import FoundRings, QueuedTicket, RedisQueue, RingQueue
from transport.queue.base import TicketQueue
from transport.storage.urls import RedisURL, parse_url
from transport.store import Change, SQLiteStore, Store
from transport.testing import MemoryQueue, a_ticket

SCHEMA = Schema.of(tokens=("int32", UpTo(8)), reward=("float32",))
Arguments = dict[str, Any]
Calls = Mapping[str, Callable[[], Arguments]]


class Scene(NamedTuple):
    """One object to be misused.

    Attributes:
        thing: the object.
        calls: by name of a method of ``thing``: arguments that it accepts now.
        intact: raises AssertionError when the payload written beforehand is lost or can be read twice.
        wait: runs an awaitable of ``thing`` on its loop; None: it has no loop.
        close: name of the method that ends ``thing``; empty: it has none.
        room: makes room for what the next call writes.
    """

    thing: Any
    calls: Calls
    intact: Callable[[], None] = lambda: None
    wait: Callable[[Awaitable[Any]], Any] | None = None
    close: str = "close"
    room: Callable[[], None] = lambda: None


Make = Callable[[], contextlib.AbstractContextManager[Scene]]


def values(number: int = 0) -> dict[str, Any]:
    """One payload."""
    return {"tokens": np.arange(3, dtype=np.int32), "reward": np.float32(number)}


def nothing() -> Arguments:
    return {}


@contextlib.contextmanager
def own_ring(slots: int = 64) -> Iterator[tuple[SharedRingBuffer, Callable[[], None], Callable[[], None]]]:
    """A ring; what makes room in it; and the check that a payload, which only rank 1 has not read, is read once."""
    with SharedRingBuffer.create(SCHEMA, slots=slots, overflow="error") as ring:
        ticket = ring.write(values(99), readers=2)
        assert ring.acknowledge(ticket, 0)
        name = ring.name

        def intact() -> None:
            with SharedRingBuffer.attach(name, SCHEMA, role="reader") as own:
                with own.read_raw(ticket, 1) as lease:
                    assert bytes(lease.view)[-4:] == np.float32(99).tobytes() or np.float32(99).tobytes() in bytes(
                        lease.view
                    )
                    assert lease.consume()
                assert not own.acknowledge(ticket, 1), "consumed twice"

        def room() -> None:
            if not ring.native.closed and ring.statistics().free < slots // 2:
                gc.collect()
                for each in ring.tickets():
                    if each.name != ticket.name:
                        ring.discard(each)

        yield ring, room, intact


@contextlib.contextmanager
def a_ring() -> Iterator[Scene]:
    with own_ring(256) as (ring, room, intact):

        def pinned() -> Ticket:
            ticket = ring.write(values())
            ring.read_raw(ticket)._open = False  # its pin is ended by the call
            return ticket

        def written() -> Arguments:
            return {"ticket": ring.write(values()), "rank": 0}

        def claimed() -> Arguments:
            ring.write(values())
            return {"claims": ring.claim(1, 5.0), "keep_memory": False}

        def to_claim() -> Arguments:
            ring.write(values(), policy_version=3)
            return {
                "n": 1, "timeout_s": 0.0, "rank": 0, "most_bytes": None, "oldest_version": None, "max_deliveries": 0,
                "consumer": "test",
            }  # fmt: skip

        writing = {"readers": 1, "metadata": {"a": 1}, "deadline_s": None, "timeout_s": 0.0}
        batch = {"layout": "padded", "fill": 0, "pad_to": "longest", "out": None, "memory": "host", "most_memory": None}
        calls: Calls = {
            "write": lambda: {"values": values(), **writing, "policy_version": 1, "casting": "safe"},
            "write_many": lambda: {"payloads": [values()], **writing, "policy_version": 1, "casting": "safe"},
            "reserve": lambda: {"lengths": {"tokens": 2}, **writing},
            "get_ready_count": nothing, "statistics": nothing, "tickets": nothing, "unread": nothing,
            "discard_expired": lambda: {"now": 0.0},
            "check": written,
            "key": lambda: {"slot": 0, "generation": 1},
            "read_raw": written,
            "refusal": lambda: {"answer": 1, **written()},
            "mark_consumed": lambda: {"ticket": pinned(), "rank": 0},
            "acknowledge": written,
            "release_reading": lambda: {"ticket": pinned()},
            "discard": lambda: {"ticket": ring.write(values())},
            "claim": to_claim,
            "claim_batch": lambda: {**to_claim(), "verify": None, "fields": None, **batch},
            "consume": claimed,
            "settle": nothing,
            "reclaim": nothing,
            "close": lambda: {"keep_unread": False},
            "rank_of": lambda: {"consumer": 0, "rank": None}, "readers_of": lambda: {"readers": 1},
        }  # fmt: skip
        yield Scene(ring, calls, intact, room=room)


@contextlib.contextmanager
def ring_class() -> Iterator[Scene]:
    with own_ring() as (ring, room, intact):
        calls: Calls = {
            "create": lambda: {
                "schema": SCHEMA, "slots": 2, "slot_bytes": None, "name": None, "prefix": "", "overflow": "block",
                "consumers": None,
            },
            "attach": lambda: {"name": ring.name, "schema": SCHEMA, "role": "reader"},
        }  # fmt: skip
        yield Scene(SharedRingBuffer, calls, intact, close="", room=room)


# --- queues ---------------------------------------------------------------------------------------------
def calls_of_queue(queue: TicketQueue, publish: Callable[[], list[QueuedTicket]]) -> dict[str, Any]:
    """``publish`` writes and publishes a payload, and returns what could be published again."""

    def claimed() -> Any:
        publish()
        (claim,) = queue.claim(1, 5.0, consumer="test")
        return claim

    def to_claim() -> Arguments:
        publish()
        return {"n": 1, "timeout_s": 0.0, "rank": 0, "consumer": "test", "oldest_version": None}

    many: Callable[[], Arguments] = lambda: {"claims": [claimed()]}  # noqa: E731
    return {
        "publish": lambda: {"tickets": publish(), "readers": 1, "policy_version": 1},
        "claim": to_claim,
        "ack_many": many,
        "ack": lambda: {"claim": claimed()},
        "in_question": many,
        "renew": many,
        "retry": lambda: {"claim": claimed(), "delay_s": 0.0, "reason": "because"},
        "retry_many": lambda: {**many(), "delay_s": 0.0, "reason": "because"},
        "discard": lambda: {"claim": claimed(), "reason": "because"},
        "depth": lambda: {"rank": 0},
        "failures": lambda: {"limit": 10},
        "requeue": lambda: {"limit": 10},
        "known": lambda: {"ticket_ids": ["a"]},
        "unfinished": lambda: {"n": 10},
        "announce": lambda: {"topic": "weights", "version": 1, "payload": b"x"},
        "latest": lambda: {"topic": "weights", "newer_than": None, "timeout_s": 0.0},
        "payload_bytes": lambda: {"claim": claimed()},
        "close": nothing,
    }


def publisher(queue: TicketQueue) -> Callable[[], list[QueuedTicket]]:
    def publish() -> list[QueuedTicket]:
        made = [queued(a_ticket())]
        queue.publish(made)
        return made

    return publish


def still_there(queue: Callable[[], TicketQueue], first: QueuedTicket) -> Callable[[], None]:
    """Rank 1's delivery of the first ticket is claimed once; asked through another object of the queue."""

    def intact() -> None:
        with contextlib.closing(queue()) as own:
            claims = own.claim(10, rank=1, consumer="the check")
            assert [claim.ticket_id for claim in claims] == [first.id]
            assert own.ack(claims[0])
            assert own.claim(10, rank=1, consumer="the check") == []

    return intact


@contextlib.contextmanager
def any_queue(queue: TicketQueue, another: Callable[[], TicketQueue]) -> Iterator[Scene]:
    with contextlib.closing(queue):
        first = queued(a_ticket())
        queue.publish([first], readers=2)
        assert queue.ack(queue.claim(1, consumer="first")[0])
        yield Scene(queue, calls_of_queue(queue, publisher(queue)), still_there(another, first))


@contextlib.contextmanager
def memory_queue() -> Iterator[Scene]:
    queue = MemoryQueue()
    with any_queue(queue, queue.another) as scene:
        yield scene._replace(calls={**scene.calls, "another": lambda: {"max_deliveries": None}})


@contextlib.contextmanager
def redis_queue() -> Iterator[Scene]:
    with redis_server() as server:
        url = parse_url(server.place("misuse"))
        assert isinstance(url, RedisURL)
        with any_queue(RedisQueue(url), lambda: RedisQueue(url)) as scene:
            yield scene


@contextlib.contextmanager
def ring_queue() -> Iterator[Scene]:
    with own_ring(256) as (ring, room, intact), own_ring(2) as (other, _, _):
        queue = RingQueue([ring])

        def publish() -> list[QueuedTicket]:
            return [queued(ring.write(values()))]

        calls = calls_of_queue(queue, publish)
        calls["add"] = lambda: {"ring": ring}
        calls["remove"] = lambda: {"ring": other}
        del calls["requeue"], calls["announce"], calls["latest"]  # which it refuses to all
        with contextlib.closing(queue):
            yield Scene(queue, calls, intact, room=room)


@contextlib.contextmanager
def found_rings() -> Iterator[Scene]:
    """Rings of this host and one elsewhere: served, and reached over the network only."""
    with own_ring(256) as (ring, room, intact):
        queue = FoundRings(OnThisHost("misuse-"))
        queue.hand_out(ring)

        def publish() -> list[QueuedTicket]:
            return [queued(ring.write(values()))]

        calls = calls_of_queue(queue, publish)
        del calls["requeue"]
        calls["hand_out"] = lambda: {"ring": ring}
        calls["not_counted"] = nothing
        calls["take"] = lambda: {"n": 1, "timeout_s": 0.0, "rank": 0}
        with contextlib.closing(queue):
            yield Scene(queue, calls, intact, room=room)


# --- stores ---------------------------------------------------------------------------------------------
def calls_of_store(store: Store) -> Calls:
    def put() -> int:
        return store.put("a", b"1", lease_s=60.0)

    return {
        "get": lambda: {"key": "a"},
        "get_many": lambda: {"keys": ["a"]},
        "scan": lambda: {"prefix": "a"},
        "put": lambda: {"key": "a", "value": b"1", "lease_s": None},
        "compare_and_set": lambda: {"key": "a", "value": b"2", "expected": put(), "lease_s": None},
        "delete": lambda: {"key": "a"},
        "put_many": lambda: {"changes": [Change("a", b"2")]},
        "add": lambda: {"key": "count", "amount": 1},
        "renew": lambda: {"leases": {"a": put()}, "lease_s": 60.0},
        "watch": lambda: {"key": "a", "version": put() - 1, "timeout_s": 0.0},
        "close": nothing,
    }


@contextlib.contextmanager
def any_store(store: Store, another: Callable[[], Store]) -> Iterator[Scene]:
    store.put("kept", b"kept")

    def intact() -> None:
        with contextlib.closing(another()) as own:
            entry = own.get("kept")
            assert entry is not None and entry.value == b"kept"

    with contextlib.closing(store):
        yield Scene(store, calls_of_store(store), intact)


@contextlib.contextmanager
def sqlite_store() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        with any_store(SQLiteStore(path), lambda: SQLiteStore(path)) as scene:
            yield scene
