"""The data path between engines in one process, over real rings, listeners and feeds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mounts
import numpy as np
import pytest
from helpers import Child, asynchronous, leaving_at_once
from interrupted_lines import at_each_line, interrupts
from weights_engines import BUCKET, TOTAL, build, engine, engines, sizes, transfer
from weights_members import checksum_of, version_of

from transport import UCXXClient, UCXXServer, _ring
from transport.errors import (
    AuthenticationError,
    ChildrenLostError,
    ClosedError,
    ParentLostError,
    RetriesExhaustedError,
    SchemaError,
    StaleSlotError,
    UsageError,
    WeightsChecksumError,
)
from transport.ring.packing import views
from transport.server.running import OneThread
from transport.ticket import Ticket
from transport.weights import WeightsTrainer
from transport.weights.engine import WeightsEngine
from transport.weights.manager import WeightUpdate
from transport.weights.options import EngineOptions
from transport.weights.plan.steps import VersionProof
from transport.weights.sharding.layouts import Layout
from transport.weights.sharding.roles import build_topology
from transport.weights.transfer.bucket_sender import SETTINGS, BucketSender
from transport.weights.transfer.feed import Feed, Upstream
from transport.weights.transfer.messages import Slices
from transport.weights.versions.copies import Copies, Held, ShardHeld, attach
from transport.weights.versions.layout import row_of, specs_of, weights_checksum
from transport.weights.worker import ReferenceWorker, Replica

pytestmark = pytest.mark.ucx


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("shape", ["chain", "tree", "star"])
@asynchronous
async def test_a_version_arrives_whole_over_every_shape_of_relays(shape: str) -> None:
    async with engines("aabc", shape=shape) as made:
        assert await transfer(made, 1) == checksum_of(1)
        sent = made[0].statistics().bytes_sent
        model = sum(array.nbytes for array in version_of(1).values())
        assert model <= sent / (4 if shape == "star" else 1) <= TOTAL  # unused bytes of buckets do not travel
        if shape != "star":
            assert made[2].statistics().bytes_received == {}  # it maps what replica 0 has landed


# A replica with a /dev/shm of its own, as a container has; the first line that it writes is empty if it can have none.
CONTAINED = """
import asyncio, json, sys
from mounts import own_shared_memory
if not own_shared_memory():
    print()
    raise SystemExit
from weights_engines import engine

async def main():
    made = engine("contained")
    try:
        print(json.dumps(await made.prepare()), flush=True)
        await made.init_process_group(roles=json.loads(await asyncio.to_thread(sys.stdin.readline)))
        print((await made.receive(1)).checksum, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await made.close()

asyncio.run(main())
"""


@pytest.mark.nightly
@asynchronous
async def test_replicas_of_a_host_that_share_no_memory_receive_a_version_each() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(mounts.__file__).parent)}
    made = [engine(name) for name in ("trainer", "replica 0", "replica 1")]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CONTAINED), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        described = await child.stdout.readline()
        if not described.strip():
            pytest.skip("this system does not allow a /dev/shm of one's own")
        actor, rollout = build_topology(1, 3, [*[await each.prepare() for each in made], json.loads(described)])
        *roles, contained = *actor["roles"], *rollout["roles"]
        child.stdin.write(json.dumps(contained).encode() + b"\n")
        await asyncio.gather(*(each.init_process_group(roles=role) for each, role in zip(made, roles, strict=True)))
        sent = made[0].send_weights(iter(version_of(1).items()), 1)
        _, *held, found = await asyncio.gather(sent, *(each.receive(1) for each in made[1:]), child.stdout.readline())
        assert {int(found), *(each.checksum for each in held)} == {checksum_of(1)}
        assert made[2].statistics().bytes_received == {}  # it maps what replica 0 has landed
    finally:
        child.stdin.close()
        for each in made:
            await each.close()
        await child.wait()


@asynchronous
async def test_a_tensor_larger_than_a_bucket_is_split_and_arrives_contiguous() -> None:
    weights = {"big": np.arange(5 * BUCKET, dtype=np.float32), "small": np.ones(3, np.uint8)}
    async with engines("ab") as made:
        await transfer(made, 1, weights)
        received = {name: array async for name, array in made[2].get_weights()}
        assert received["big"].flags.c_contiguous
        np.testing.assert_array_equal(received["big"], weights["big"])


@asynchronous
async def test_tensors_in_the_other_byte_order_arrive_as_the_same_numbers() -> None:
    swapped = {name: array.astype(array.dtype.newbyteorder()) for name, array in version_of(1).items()}
    async with engines("ab") as made:
        assert await transfer(made, 1, swapped) == checksum_of(1)
        received = {name: array async for name, array in made[2].get_weights()}
    for name, array in version_of(1).items():
        np.testing.assert_array_equal(received[name], array)


@asynchronous
async def test_a_trainer_whose_iterator_fails_tells_why_and_nobody_holds_a_part() -> None:
    def failing() -> Iterator[tuple[str, Any]]:
        for number, item in enumerate(version_of(2).items()):
            if number == 3:
                raise RuntimeError("no more tensors")
            yield item

    async with engines("ab") as made:
        await transfer(made, 1)
        await build(made)
        sent, *received = await asyncio.gather(
            made[0].send_weights(failing(), 2), *(each.receive(2) for each in made[1:]), return_exceptions=True
        )
        assert isinstance(sent, RuntimeError)
        assert all(isinstance(each, ParentLostError) and "no more tensors" in str(each) for each in received)
        for each in made:
            await each.finalize()
        assert [each.held.checksum for each in made[1:]] == [checksum_of(1)] * 2
        await transfer(made, 3)


@asynchronous
async def test_members_with_another_secret_get_nothing() -> None:
    trainer = engine("trainer", secret=b"ours")
    replica = engine("replica", secret=b"theirs", wires=frozenset({"tcp"}))
    try:
        await build([trainer, replica])
        sent, received = await asyncio.gather(
            trainer.send_weights(iter(version_of(1).items()), 1), replica.receive(1), return_exceptions=True
        )
        assert isinstance(received, AuthenticationError | RetriesExhaustedError)
        assert isinstance(sent, ChildrenLostError)
    finally:
        await replica.close()
        await trainer.close()


@pytest.mark.parametrize("options", [{"bucket_bytes": 100}, {"bucket_bytes": 8193}, {"in_flight": 0}, {"rate": 0.0}])
def test_sizes_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        engine("e", **options)


PINS = """
import sys
from transport import SharedRingBuffer
from transport.ticket import Ticket
leases = []
for line in sys.stdin:
    ticket = Ticket.decode(bytes.fromhex(line))
    leases.append(SharedRingBuffer.attach(ticket.segment, role="reader").read_raw(ticket, 1))
    print("pinned", flush=True)
"""


@pytest.mark.parametrize("mapped", [False, True])
def test_versions_that_a_dead_reader_never_gave_back_are_free(mapped: bool) -> None:
    layout = row_of(specs_of(version_of(1)))
    copies = Copies()
    with contextlib.ExitStack() as stack:
        stack.callback(copies.close)
        reader = stack.enter_context(Child(PINS)) if mapped else None
        for _ in range(3):
            lease = copies.take(layout.total, readers=2)
            lease.memory[:] = bytes(layout.total)
            checksum = lease.checksum = _ring.checksum(lease.memory)
            ticket = lease.publish()
            held = copies.hold(ticket, layout, checksum)
            if reader is not None:
                reader.tell(ticket.encode().hex())
                assert reader.line() == "pinned"
            held.release()
        if reader is not None:
            assert len(copies._rings) == 3
            reader.kill()
            reader.wait()
        copies.trim()
        assert len(copies._rings) <= 1


def test_of_readers_that_let_go_of_a_dead_landings_version_the_last_one_removes_it() -> None:
    layout = row_of(specs_of(version_of(1)))
    copies = Copies()
    lease = copies.take(layout.total, readers=3)
    lease.memory[:] = bytes(layout.total)
    checksum = lease.checksum = _ring.checksum(lease.memory)
    ticket = lease.publish()
    held = [attach(ticket, rank, layout, checksum) for rank in range(3)]
    for ring in copies._rings:
        ring.native.close()  # as if it had been killed
    with leaving_at_once([each._attached for each in held if each._attached]) as threads:
        list(threads.map(Held.release, held))
    assert ticket.segment not in _ring.segments()


def test_a_landed_version_that_changed_afterwards_is_not_mapped() -> None:
    weights = version_of(1)
    layout = row_of(specs_of(weights))
    copies = Copies()
    try:
        lease = copies.take(layout.total, readers=2)
        for name, array in views(layout, lease.memory, writable=True).items():
            array[...] = weights[name]
        for before, after in zip(layout.placements, layout.placements[1:], strict=False):
            lease.memory[before.offset + before.nbytes : after.offset] = bytes(
                after.offset - before.offset - before.nbytes
            )
        checksum = _ring.checksum(lease.memory)
        assert checksum == checksum_of(1)
        lease.checksum = checksum
        memory, ticket = lease.memory, lease.publish()
        memory[7] ^= 1
        with pytest.raises(WeightsChecksumError):
            attach(ticket, 1, layout, checksum)
        memory[7] ^= 1
        held = attach(ticket, 1, layout, checksum)
        assert weights_checksum(held.arrays()) == checksum
        held.release()
        held.release()
    finally:
        copies.close()


@asynchronous
async def test_a_mapped_bucket_with_other_bytes_than_its_sender_wrote_is_no_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = [engine("trainer"), engine("replica")]
    read = UCXXClient.read

    async def altered(client: UCXXClient, ticket: Ticket, *, out: Any, **named: Any) -> Any:
        payload = await read(client, ticket, out=out, **named)
        assert payload.wire == "mapped"
        out[0] ^= 1
        return payload

    monkeypatch.setattr(UCXXClient, "read", altered)
    try:
        await build(made)
        sent = made[0].send_weights(iter(version_of(1).items()), 1)
        _, received = await asyncio.gather(sent, made[1].receive(1), return_exceptions=True)
        assert isinstance(received, WeightsChecksumError)
        assert made[1].held is None
    finally:
        for each in made:
            await each.close()


class Source:
    def weights(self, version: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        yield from version_of(version).items()


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(("policy", "states"), [("exclude", ["excluded", "serving"]), ("fail_job", ["excluded"] * 2)])
@asynchronous
async def test_policies_that_do_not_restore(policy: Any, states: list[str]) -> None:
    class Failing(ReferenceWorker):
        def load(self, weights: Any, version: int) -> Any:
            if version == 2:
                raise RuntimeError("no room")
            return super().load(weights, version)

    async with engines("aa") as made:
        replicas = [Replica(made[1], Failing()), Replica(made[2], ReferenceWorker())]
        manager = WeightUpdate([WeightsTrainer(made[0], Source())], replicas, policy=policy)  # type: ignore[arg-type]
        await manager.update(1)
        if policy == "exclude":
            assert (await manager.update(2)).failures == ["load: replica 0: RuntimeError: no room"]
        else:
            with pytest.raises(RuntimeError, match="no room"):
                await manager.update(2)
        assert [each.state for each in manager.admissions.values()] == states
        assert [replica.worker.generating for replica in replicas] == [state == "serving" for state in states]  # type: ignore[attr-defined]
        for replica in replicas:
            if not manager.admissions[replica.name].admitted:
                manager.join(replica)
        await manager.update(3)
        assert set(manager.admitted.values()) == {3}
        for replica in replicas:
            assert replica.worker.served_checksum() == checksum_of(3)
            replica.worker.weights.clear()  # type: ignore[attr-defined]


@pytest.mark.slow
@asynchronous
async def test_a_child_that_holds_a_bucket_too_long_is_dropped_and_the_others_go_on() -> None:
    async with engines("ab", shape="star", stall_s=3.0) as made:  # in which the quick one takes its bucket
        await build(made)
        slow, quick = made[1], made[2]
        sending = asyncio.ensure_future(made[0].send_weights(iter(version_of(1).items()), 1))
        held = await quick.receive(1)  # the other one joined, and never reads
        assert await sending == held.proof
        assert held.checksum == checksum_of(1)
        with pytest.raises((ParentLostError, StaleSlotError)):
            await slow.receive(1)


# A replica that gets the signal while it copies its first bucket out of the trainer's ring.
COPIES = """
import asyncio, json, os, signal, sys
from transport.ring.buffer import SharedRingBuffer
from transport.weights.engine import WeightsEngine
from transport.weights.options import EngineOptions
def copy_out(self, ticket, rank, destination):
    with self.read_raw(ticket, rank):
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
SharedRingBuffer.copy_out = copy_out
async def main():
    replica = WeightsEngine("copies", address="127.0.0.1", options=EngineOptions(prefix=sys.argv[2]))
    print(json.dumps(await replica.prepare()), flush=True)
    await replica.init_process_group(roles=json.loads(sys.stdin.readline()))
    await replica.receive(1)
asyncio.run(main())
"""


@pytest.fixture
def prefix() -> Iterator[str]:
    """Of the segments of a child, which one that is killed leaves."""
    chosen = f"copies-{secrets.token_hex(4)}-"
    yield chosen
    for left in Path("/dev/shm").glob(f"transport-{chosen}*"):
        left.unlink()


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("others", ["", "a"])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@asynchronous
async def test_a_child_that_ends_or_stops_while_it_copies_a_bucket_out_is_dropped(
    how: str, others: str, prefix: str
) -> None:
    weights = {"w": np.ones(1000, np.float32)}  # one bucket
    async with engines(others, shape="star", stall_s=3.0) as made:
        with Child(COPIES, how, prefix) as child:
            metadata = [await made[0].prepare(), json.loads(await asyncio.to_thread(child.line))]
            metadata += [await each.prepare() for each in made[1:]]
            actor, rollout = build_topology(1, len(metadata) - 1, metadata)
            role, *roles = rollout["roles"]
            child.tell(json.dumps(role))
            roles = [*actor["roles"], *roles]
            await asyncio.gather(*(each.init_process_group(roles=role) for each, role in zip(made, roles, strict=True)))
            sending = asyncio.ensure_future(made[0].send_weights(weights, 1))
            for each in made[1:]:
                held = await each.receive(1)
                assert held.proof == await sending
            if not others:
                with pytest.raises(ChildrenLostError):
                    await sending


@asynchronous
async def test_a_child_that_reads_one_bucket_after_the_other_is_not_dropped_before_it_stops() -> None:
    sender = BucketSender(3, address="127.0.0.1", stall_s=1.0)
    feed = Feed(sender.lost)
    await feed.open("127.0.0.1")
    child = await Upstream.connect("trainer", "127.0.0.1", feed.port, feed.token, "child")
    try:
        sender.begin(feed, ["child"])
        sender.provide([64] * 3)
        for index in range(3):
            await sender.send(64, ("child",), Slices(0, 0, index), _ring.checksum)
        assert sender._ring is not None
        for ticket, _ in list(sender._unread.values())[:2]:
            for _ in range(2):  # waits of 0.9 s in all, in which this bucket is not read
                sender._count_stalls(0.9)
            assert sender.children == ("child",)
            sender._ring.acknowledge(ticket, 0)
        for _ in range(3):
            sender._count_stalls(0.9)
        assert sender.children == ()
    finally:
        child.close()
        await feed.close()
        await asyncio.to_thread(sender.close)


@asynchronous
async def test_a_model_of_few_bytes_takes_as_little_shared_memory() -> None:
    made = [WeightsEngine(name, address="127.0.0.1", options=EngineOptions(prefix="few-")) for name in ("a", "b")]
    try:
        await build(made)
        weights = {"w": np.zeros((64, 64), np.float32)}
        await asyncio.gather(made[0].send_weights(weights, 1), made[1].receive(1))
        assert sum(sizes("few-")) < 1 << 20
    finally:
        for each in made:
            await each.close()


class Unreadable(Exception):
    """An error of a framework, whose message cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no message")


@pytest.mark.parametrize(
    "error",
    [OSError("/data/\udcff"), MemoryError("x" * (40 << 20)), Unreadable()],
    ids=["not UTF-8", "40 MiB", "raises"],
)
@asynchronous
async def test_a_source_that_fails_with_any_text_ends_the_transfer_of_all(error: Exception) -> None:
    class Fails:
        def weights(self, version: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
            yield "w", np.zeros(4, np.float32)
            raise error

    async with engines("ab") as made:
        replicas = [Replica(each, ReferenceWorker()) for each in made[1:]]
        manager = WeightUpdate([WeightsTrainer(made[0], Fails())], replicas)  # type: ignore[arg-type]
        with pytest.raises(type(error)) as caught:
            await manager.update(1)
        assert caught.value is error
        heard = [line for line in getattr(error, "__notes__", []) if type(error).__name__ in line]
        assert len(heard) == len(replicas), "each was told why"


@asynchronous
async def test_a_bucket_that_is_cancelled_while_it_is_filled_does_not_keep_its_slot() -> None:
    sender = BucketSender(1, address="127.0.0.1")
    feed = Feed(sender.lost)
    sender.begin(feed, ["child"])
    sender.provide([BUCKET])
    begun, go_on = threading.Event(), threading.Event()

    def fill(memory: memoryview) -> int:
        begun.set()
        go_on.wait()
        return _ring.checksum(memory)

    try:
        task = asyncio.ensure_future(sender.send(64, ("child",), Slices(0, 0, 0), fill))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        (await sender.reserve(64, ("child",))).abort()
    finally:
        await asyncio.to_thread(sender.close)


@pytest.mark.nightly(keep=1)
@at_each_line
def test_a_sender_that_is_interrupted_at_any_line_of_its_start_leaves_no_listener(first: int) -> None:
    before = threading.enumerate()
    for interrupt in interrupts(first, ("transport.weights.transfer.bucket_sender",)):
        sender = BucketSender(1, address="127.0.0.1")
        sender.begin(Feed(sender.lost), ["child"])
        with interrupt:
            sender.provide([BUCKET])
        sender.close()
        assert threading.enumerate() == before, interrupt.at


@asynchronous
async def test_a_sender_whose_server_cannot_be_stopped_gives_up_its_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = BucketSender(1, address="127.0.0.1")
    sender.begin(Feed(sender.lost), ["child"])
    await asyncio.to_thread(sender.provide, [BUCKET])
    ring, close = sender._ring, UCXXServer.close
    assert ring is not None

    def failing(server: UCXXServer) -> None:
        close(server)
        raise RuntimeError("can't join thread")

    monkeypatch.setattr(UCXXServer, "close", failing)
    with pytest.raises(RuntimeError):
        await asyncio.to_thread(sender.close)
    assert ring.native.closed


def test_a_part_that_cannot_be_released_spares_the_others() -> None:
    released = []

    class Part:
        def __init__(self, number: int) -> None:
            self.number = number

        def release(self) -> None:
            released.append(self.number)
            if self.number == 1:
                raise ClosedError("its ring is closed")

    held = ShardHeld(Layout(()), VersionProof(1, 1), [Part(0), Part(1), Part(2)])  # type: ignore[list-item]
    with pytest.raises(ClosedError):
        held.release()
    assert sorted(released) == [0, 1, 2]


@asynchronous
async def test_a_listener_leaves_a_bucket_to_its_reader_for_the_whole_of_an_attempt() -> None:
    sender = BucketSender(1, address="127.0.0.1", wires=frozenset({"tcp"}))
    feed = Feed(sender.lost)
    try:
        sender.begin(feed, ["child"])
        sender.provide([BUCKET])
        await sender.send(BUCKET, ("child",), Slices(0, 0, 0), _ring.checksum)
        [(ticket, _)] = sender._unread.values()
        ring, running = sender._ring, sender._server._run  # type: ignore[union-attr]
        assert ring is not None
        assert isinstance(running, OneThread)
        assert running._thread is not None

        async def swept(now: float) -> None:
            running._listeners[0].sweep(now)

        async with UCXXClient(wire={"tcp"}, settings=SETTINGS, ack="manual") as client:
            begun = time.monotonic()
            payload = await client.read(ticket)
            for seconds, reading in ((SETTINGS.read_timeout(BUCKET), 1), (10 * SETTINGS.read_timeout(BUCKET), 0)):
                await asyncio.to_thread(running._thread.run, swept(begun + seconds))
                assert ring.statistics().reading == reading
            payload.release()
    finally:
        await asyncio.to_thread(sender.close)


def test_a_third_segment_goes_once_it_is_free() -> None:
    copies = Copies("third-")

    def segments() -> int:
        return sum(name.startswith("/transport-third-") for name in _ring.segments())

    try:
        first, _, third = [copies.take(100, readers=1) for _ in range(3)]
        copies.trim()
        assert segments() == 3  # none is free
        first.abort()
        third.abort()
        copies.trim()
        assert segments() == 2
    finally:
        copies.close()
    assert segments() == 0


@asynchronous
async def test_other_tensors_than_before_are_sent_whole() -> None:
    async with engines("a", delta=True) as made:
        await transfer(made, 1)
        smaller = {"embed.weight": version_of(1)["embed.weight"]}
        with pytest.raises((SchemaError, ParentLostError)):
            await transfer(made, 2, smaller)  # the layout was learnt; a trainer whose model changes gives specs
