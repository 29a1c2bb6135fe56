"""Scenes of what others hand out: leases, claims and batches of a ring, joined payloads; of small records, metrics and
adapters.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import api_page
from misuse_scenes import Arguments, Calls, Scene, any_queue, nothing, own_ring, values

from transport import BlockingClient, Schema, SharedRingBuffer, UCXXServer, UpTo
from transport.adapters import sglang
from transport.client.payload import ClientStatistics
from transport.joined import PARENTS, Parent, read_joined, with_parents, write_group
from transport.observe.metrics import Exporter
from transport.observe.statistics import PackerStatistics
from transport.packer.consumed_record import ConsumedRecord
from transport.queue import QueueDepth
from transport.queue.group import GroupQueue
from transport.store.directory import Directory, Serving
from transport.store.memory import MemoryStore
from transport.testing import MemoryQueue
from transport.weights.sharded.meeting import Meeting


def each_of(kind: type, title: str, make: Callable[[], Any], more: dict[str, Callable[[], Arguments]]) -> Scene:
    """The calls of a class, each on an object that is made for it; ``more``: the arguments of those that have any."""
    members = api_page._members(kind, title)
    names = [name for name, member in members if not isinstance(member, property) and name != "register"]

    def on_a_new_one(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(kind, name))
        def called(*arguments: Any, **named: Any) -> Any:
            made = make()
            try:
                return getattr(made, name)(*arguments, **named)
            finally:
                with contextlib.suppress(Exception):
                    (getattr(made, "release", None) or made.abort)()

        signature = inspect.signature(getattr(kind, name))
        called.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return staticmethod(called)

    thing = type(kind.__name__, (), {name: on_a_new_one(name) for name in names})
    return Scene(thing, {name: more.get(name, nothing) for name in names}, close="")


def of_a_ring(
    kind: type, title: str, make: Callable[[SharedRingBuffer], Any], **more: Callable[[], Arguments]
) -> Callable[[], contextlib.AbstractContextManager[Scene]]:
    @contextlib.contextmanager
    def scene() -> Iterator[Scene]:
        with own_ring(64) as (ring, room, intact):

            def complete() -> None:
                """No slot is held by what a call was interrupted with."""
                intact()
                room()
                assert ring.statistics().writing == 0

            yield each_of(kind, title, lambda: make(ring), more)._replace(intact=complete, room=room)

    return scene


def read_lease(ring: SharedRingBuffer) -> Any:
    return ring.read_raw(ring.write(values()))


def claimed(ring: SharedRingBuffer) -> Any:
    ring.write(values())
    return ring.claim(1, 5.0)[0]


def claimed_batch(ring: SharedRingBuffer) -> Any:
    ring.write(values())
    return ring.claim_batch(1, 5.0, layout="padded")


@contextlib.contextmanager
def joined() -> Iterator[Scene]:
    """The functions, over a group of a ring whose payloads name their parents."""
    first, second = Schema.of(tokens=("int32", UpTo(8))), Schema.of(reward="float32", parents=PARENTS)
    with (
        SharedRingBuffer.create(first, slots=32, overflow="error") as parents,
        SharedRingBuffer.create(second, slots=32, overflow="error") as children,
        UCXXServer(parents, addresses=("127.0.0.1",), mode="thread"),
        UCXXServer(children, addresses=("127.0.0.1",), mode="thread"),
        BlockingClient(schemas=[first, second], wire={"tcp"}, ack="manual") as client,
    ):
        common, sample = {"tokens": [1, 2]}, {"reward": 1.0}

        def child() -> Any:
            return children.write(with_parents(sample, [parents.write(common)]))

        def intact() -> None:
            payload = read_joined(client, child(), timeout=10.0)
            assert payload["tokens"].tolist() == [1, 2] and payload["reward"] == 1.0
            assert payload.ack()
            payload.release()

        def room() -> None:
            for ring in (parents, children):
                if ring.statistics().free < 8:
                    for each in ring.tickets():
                        ring.discard(each)

        made: dict[str, tuple[Any, Any]] = {
            "with_parents": (with_parents, lambda: {"values": sample, "parents": [Parent(parents.write(common))]}),
            "write_group": (
                write_group,
                lambda: {
                    "ring": parents, "common": common, "samples": [sample], "samples_ring": children, "readers": 1,
                    "**options": {"timeout_s": 0.0},
                },
            ),
            "read_joined": (
                read_joined,
                lambda: {"client": client, "ticket": child(), "rank": 0, "fields": None, "timeout": 10.0},
            ),
        }  # fmt: skip
        thing = type("Joined", (), {name: staticmethod(function) for name, (function, _) in made.items()})
        yield Scene(thing, {name: of for name, (_, of) in made.items()}, intact, close="", room=room)


@contextlib.contextmanager
def consumed_record() -> Iterator[Scene]:
    record = ConsumedRecord()
    record.accept("kept", 1, 2, 3)
    one: Arguments = {"ring": "ab" * 16, "slot": 0, "generation": 1, "rank": 0}
    calls: Calls = {
        "accept": lambda: dict(one), "contains": lambda: dict(one), "is_last": lambda: dict(one), "to_bytes": nothing,
        "from_bytes": lambda: {"data": record.to_bytes(), "settings": api_page.config.Settings()},
    }  # fmt: skip

    def intact() -> None:
        assert ConsumedRecord.from_bytes(record.to_bytes()).contains("kept", 1, 2, 3)

    yield Scene(record, calls, intact, close="")


@contextlib.contextmanager
def group_queue() -> Iterator[Scene]:
    queue = MemoryQueue()
    with (
        contextlib.closing(queue),
        any_queue(GroupQueue(queue, MemoryStore(), "group", 0, 1), queue.another) as scene,
    ):
        yield scene._replace(calls={**scene.calls, "in_question": scene.calls["renew"]})


@contextlib.contextmanager
def directory() -> Iterator[Scene]:
    made = Directory(MemoryStore())
    serving = Serving(ring="ab" * 16, host="h", addresses=("127.0.0.1",), ports=(1,), epoch=1)
    version = made.publish(serving)

    def intact() -> None:
        assert made.find(serving.ring) is not None

    calls: Calls = {
        "find": lambda: {"ring": serving.ring}, "absent": lambda: {"rings": [serving.ring]}, "all": nothing,
        "next_epoch": nothing, "publish": lambda: {"serving": serving},
        "renew": lambda: {"ring": serving.ring, "version": version},
        "withdraw": lambda: {"ring": "cd" * 16, "version": 1},
    }  # fmt: skip
    yield Scene(made, calls, intact, close="")


@contextlib.contextmanager
def exporter() -> Iterator[Scene]:
    with SharedRingBuffer.create(slots=1, slot_bytes=8) as ring, Exporter(0) as made:
        calls: Calls = {
            "add_ring": lambda: {"ring": ring},
            "add_client": lambda: {"name": "x", "statistics": lambda: ClientStatistics()},
            "add_packer": lambda: {"name": "x", "statistics": lambda: PackerStatistics(client=ClientStatistics())},
            "add_queue": lambda: {"name": "x", "depth": QueueDepth},
            "close": nothing,
        }
        yield Scene(made, calls)


@contextlib.contextmanager
def adapters() -> Iterator[Scene]:
    """Those whose names are there without their framework."""
    meeting = Meeting(store="sqlite:x.db", run="run", senders=1, receivers=1)
    made: dict[str, tuple[Any, Any]] = {
        "address": (
            sglang.address,
            lambda: {"meeting": meeting, "shards": "module:function", "version": 1, "**options": {}},
        ),
    }
    thing = type("Adapters", (), {name: staticmethod(function) for name, (function, _) in made.items()})
    yield Scene(thing, {name: of for name, (_, of) in made.items()}, close="")
