"""Arguments of a wrong kind are UsageErrors that say what to pass, at every entry; nothing is done, nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packers import Packer, Worker
from redis_server import WHY_NOT, redis_server

from transport import ClientOptions, Schema, ServerOptions, SharedRingBuffer, UCXXServer
from transport.errors import UsageError
from transport.queue import Claim, QueuedTicket, RedisQueue, SQLiteQueue, TicketQueue, open_queue
from transport.storage.urls import parse_url
from transport.store import RedisStore, SQLiteStore, open_store

SCHEMA = Schema.of(step=("int64",))
CLAIM = Claim("ring/0/1", b"", 0, 1, "1:1")
Wrong = Callable[[Any], object]


def refused(wrong: Wrong, of: Any, give: str) -> None:
    with pytest.raises(UsageError, match=give) as caught:
        wrong(of)
    assert "object has no attribute" not in str(caught.value)


# --- queues and places --------------------------------------------------------------------------------------
OPENING: list[tuple[Wrong, str]] = [
    (lambda _: RedisQueue("redis://host/0?run=x"), r"a URL that was parsed, or use open_queue\(\)"),  # type: ignore[arg-type]
    (lambda _: RedisStore("redis://host/0?run=x"), r"a URL that was parsed, or use open_store\(\)"),  # type: ignore[arg-type]
    (lambda _: RedisQueue(None), "got None: give a URL that was parsed"),  # type: ignore[arg-type]
    (lambda _: SQLiteQueue(None), "give the path of a file"),  # type: ignore[arg-type]
    (lambda _: SQLiteStore(3), "got an int: give the path of a file"),  # type: ignore[arg-type]
    (lambda _: open_queue(None), "give text: sqlite:file"),  # type: ignore[arg-type]
    (lambda _: open_queue(Path("q.db")), "give text: sqlite:file"),  # type: ignore[arg-type]
    (lambda _: open_store(3), "give text: sqlite:file"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("case", range(len(OPENING)))
def test_opening(case: int) -> None:
    refused(OPENING[case][0], None, OPENING[case][1])


@pytest.fixture(params=["sqlite", "redis"], scope="module")
def queue(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TicketQueue]:
    if request.param == "sqlite":
        with SQLiteQueue(tmp_path_factory.mktemp("queue") / "queue.db") as made:
            yield made
        return
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with redis_server() as server, open_queue(server.place()) as made:
        yield made


QUEUE: list[tuple[Wrong, str]] = [
    (lambda queue: queue.publish("x"), "publish.* got a str: give a QueuedTicket or several"),
    (lambda queue: queue.publish(None), "publish.* got None: give a QueuedTicket or several"),
    (lambda queue: queue.publish([b"x"]), "publish.* got a bytes: give a QueuedTicket or several"),
    (lambda queue: queue.publish(QueuedTicket("id", "text")), "data.* got a str: give bytes"),  # type: ignore[arg-type]
    (lambda queue: queue.publish(QueuedTicket(3, b"")), "id.* got an int: give text"),  # type: ignore[arg-type]
    (lambda queue: queue.publish([], readers="2"), "readers.* got a str: give a whole number"),
    (lambda queue: queue.publish([], policy_version="2"), "policy_version.* got a str: give a whole number"),
    (lambda queue: queue.known("ring/0/1"), "known.* got a str: give several ids"),
    (lambda queue: queue.known([3]), "known.* got an int: give several ids"),
    (lambda queue: queue.claim("1", consumer="a"), "n of claim.* got a str: give a whole number"),
    (lambda queue: queue.claim(1, "soon", consumer="a"), "timeout_s.* got a str: give seconds"),
    (lambda queue: queue.claim(1, rank="0", consumer="a"), "rank.* got a str: give a whole number"),
    (lambda queue: queue.claim(1, consumer=None), "consumer.* got None: give a name"),
    (lambda queue: queue.claim(1, consumer="a", oldest_version="1"), "oldest_version.* got a str: give a whole"),
    (lambda queue: queue.ack(None), "got None: give claims"),
    (lambda queue: queue.ack_many(CLAIM), "got a Claim: give claims, several in a list"),
    (lambda queue: queue.ack_many(["x"]), "got a str: give claims"),
    (lambda queue: queue.finish("x"), "got a str: give claims"),
    (lambda queue: queue.renew(None), "got None: give claims"),
    (lambda queue: queue.discard("x", ""), "got a str: give claims"),
    (lambda queue: queue.discard(CLAIM, None), "reason.* got None: give text"),
    (lambda queue: queue.retry(None), "got None: give claims"),
    (lambda queue: queue.retry(CLAIM, "soon"), "delay_s.* got a str: give seconds"),
    (lambda queue: queue.failures("x"), "limit.* got a str: give a whole number"),
    (lambda queue: queue.depth("x"), "rank.* got a str: give a whole number"),
    (lambda queue: queue.announce(3, 1), "topic.* got an int: give text"),
    (lambda queue: queue.announce("t", "1"), "version.* got a str: give a whole number"),
    (lambda queue: queue.announce("t", 1, "text"), "payload.* got a str: give bytes"),
    (lambda queue: queue.latest(None), "topic.* got None: give text"),
    (lambda queue: queue.latest("t", "1"), "newer_than.* got a str: give a whole number"),
    (lambda queue: queue.latest("t", 1, "soon"), "timeout_s.* got a str: give seconds"),
]


@pytest.mark.parametrize("case", range(len(QUEUE)))
def test_queues(case: int, queue: TicketQueue) -> None:
    refused(QUEUE[case][0], queue, QUEUE[case][1])
    assert queue.depth().unfinished == 0


def test_numpys_numbers_are_numbers_to_a_queue(queue: TicketQueue) -> None:
    number: Any = np.int64
    assert queue.publish(QueuedTicket("numpy", b"x"), readers=number(1), policy_version=number(7)) == 1
    (claim,) = queue.claim(number(2), np.float32(0), rank=number(0), consumer="a", oldest_version=number(7))
    assert type(claim.policy_version) is int
    assert claim.policy_version == 7
    assert queue.retry(claim, np.float32(0))
    assert queue.depth(number(0)).unfinished == 1
    (claim,) = queue.claim(1, consumer="a", oldest_version=3)
    assert queue.ack(claim)
    assert queue.failures(number(3)) == []
    assert queue.announce("numpy", number(3))
    assert queue.announce("numpy", 4)  # whatever the earlier one was stored as
    notice = queue.latest("numpy", number(3))
    assert notice is not None
    assert type(notice.version) is int


OUT_OF_RANGE: list[tuple[Wrong, str]] = [
    (lambda queue: queue.publish(QueuedTicket("x", b""), policy_version=2**70), "policy_version.* 64 bits"),
    (lambda queue: queue.publish(QueuedTicket("\ud800", b"")), "id of a QueuedTicket.* UTF-8"),
    (lambda queue: queue.claim(2**70, consumer="a"), "n of claim.* 64 bits"),
    (lambda queue: queue.claim(1, consumer="a", oldest_version=-(2**70)), "oldest_version.* 64 bits"),
    (lambda queue: queue.failures(2**70), "limit.* 64 bits"),
    (lambda queue: queue.announce("t", 2**70), "version.* 64 bits"),
    (lambda queue: queue.latest("t", 2**70), "newer_than.* 64 bits"),
    (lambda queue: queue.retry(CLAIM, float("inf")), "delay_s.* is infinite"),
]


@pytest.mark.parametrize("case", range(len(OUT_OF_RANGE)))
def test_numbers_that_no_queue_can_store(case: int, queue: TicketQueue) -> None:
    refused(OUT_OF_RANGE[case][0], queue, OUT_OF_RANGE[case][1])
    assert queue.depth().unfinished == 0


MADE_WITH: list[tuple[dict[str, Any], str]] = [
    ({"lease_s": "3"}, "lease_s got a str: give seconds"),
    ({"lease_s": float("nan")}, "lease_s is not a number"),
    ({"lease_s": 0}, "lease_s=0; .* above 0"),
    ({"lease_s": float("inf")}, "lease_s=inf; .* above 0"),
    ({"max_deliveries": "x"}, "max_deliveries got a str: give a whole number"),
    ({"max_deliveries": 0}, "max_deliveries=0; .* at least 1"),
    ({"keep_finished": "x"}, "keep_finished got a str: give a whole number"),
    ({"keep_finished": -1}, "keep_finished=-1; .* at least 0"),
]
OF_A_FILE: list[tuple[dict[str, Any], str]] = [
    ({"max_bytes": "x"}, "max_bytes got a str: give a whole number"),
    ({"max_bytes": 0}, "max_bytes=0; .* at least 1"),
    ({"busy_timeout_s": "x"}, "busy_timeout_s got a str: give seconds"),
    ({"synchronous": "full"}, "synchronous='full'; choose 'NORMAL' or 'FULL'"),
]


@pytest.mark.parametrize("case", range(len(MADE_WITH)))
def test_what_a_queue_is_made_with(case: int, tmp_path: Path) -> None:
    options, give = MADE_WITH[case]
    refused(lambda _: SQLiteQueue(tmp_path / "queue.db", **options), None, give)
    place = parse_url("redis://localhost:1/0?run=none")
    refused(lambda _: RedisQueue(place, **options), None, give)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [SQLiteQueue, SQLiteStore])
@pytest.mark.parametrize("case", range(len(OF_A_FILE)))
def test_what_a_file_is_opened_with(case: int, kind: Any, tmp_path: Path) -> None:
    options, give = OF_A_FILE[case]
    refused(lambda _: kind(tmp_path / "file.db", **options), None, give)
    assert list(tmp_path.iterdir()) == []


# --- rings and servers --------------------------------------------------------------------------------------
@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=1, slot_bytes=100) as made:
        yield made


create = SharedRingBuffer.create
RING: list[tuple[Wrong, str]] = [
    (lambda ring: create("schema"), "schema.* got a str: give a Schema"),  # type: ignore[arg-type]
    (lambda ring: create({"a": 1}), "schema.* got a dict: give a Schema"),  # type: ignore[arg-type]
    (lambda ring: create(SCHEMA, slots="4"), "slots.* got a str: give a whole number"),  # type: ignore[arg-type]
    (lambda ring: create(slot_bytes=1.5), "slot_bytes.* got a float: give a whole"),  # type: ignore[arg-type]
    (lambda ring: create(SCHEMA, name=3), "name.* got an int: give text"),  # type: ignore[arg-type]
    (lambda ring: SharedRingBuffer.attach(None, role="reader"), "name.* got None: give"),  # type: ignore[arg-type]
    (lambda ring: ring.write(None), "write.* got None: give a mapping"),
    (lambda ring: ring.write([1]), "write.* got a list: give a mapping"),
    (lambda ring: ring.write({"a": 1}, readers="2"), "readers.* got a str: give a whole number"),
    (lambda ring: ring.write_raw("text"), "write_raw.* got a str: give bytes"),
    (lambda ring: ring.write_raw(None), "write_raw.* got None: give bytes"),
    (lambda ring: ring.reserve(3), "reserve.* got an int: give"),
    (lambda ring: ring.read_raw("TK"), "got a str: give a Ticket, Ticket.parse"),
    (lambda ring: ring.check(None), "got None: give a Ticket"),
    (lambda ring: ring.discard(None), "got None: give a Ticket"),
    (lambda ring: ring.acknowledge("TK"), "got a str: give a Ticket"),
    (lambda ring: UCXXServer("ring"), "ring.* got a str: give a SharedRingBuffer"),  # type: ignore[arg-type]
    (lambda ring: UCXXServer(ring, 5), "ports.* got an int: give several"),  # type: ignore[arg-type]
    (lambda ring: UCXXServer(ring, ("5",)), "ports.* got a str: give a whole number"),  # type: ignore[arg-type]
    (lambda ring: UCXXServer(ring, addresses="10.0.0.7"), "addresses.* got a str: give several"),
    (lambda ring: UCXXServer(ring, addresses=(3,)), "addresses.* got an int: give several"),  # type: ignore[arg-type]
    (lambda ring: UCXXServer(ring, secret="text"), "secret.* got a str: give bytes"),  # type: ignore[arg-type]
    (lambda ring: UCXXServer(ring, settings={}), "settings.* got a dict: give Settings"),  # type: ignore[arg-type]
    (lambda ring: UCXXServer(ring, linger_s="3"), "linger_s.* got a str: give seconds"),  # type: ignore[arg-type]
    (lambda ring: UCXXServer(ring, bind=None), "bind.* got None: give text"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("case", range(len(RING)))
def test_rings_and_servers(case: int, ring: SharedRingBuffer) -> None:
    refused(RING[case][0], ring, RING[case][1])
    assert ring.statistics().free == 1


# --- the mixins ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def packer() -> Iterator[Packer]:
    made = Packer()
    made.setup_ucxx_packer()
    made._packer.thread.run(asyncio.sleep(0))  # by then its own tasks are there, and the leak check knows them
    yield made
    made.cleanup_ucxx_packer()


PACKER: list[tuple[Wrong, str]] = [
    (lambda packer: packer.consume(None), r"consume\(\) got None: give the batch that collect_prefetch\(\) returned"),
    (lambda packer: packer.consume([]), r"consume\(\) got a list: give the batch"),
    (lambda packer: packer.abandon(None), r"abandon\(\) got None: give the batch"),
    (lambda packer: packer.start_prefetch(None), r"start_prefetch\(\) got None: give tickets or claims, in a list"),
    (lambda packer: packer.start_prefetch("TK"), r"start_prefetch\(\) got a str: give tickets or claims, in a list"),
    (lambda packer: packer.start_prefetch([3]), r"start_prefetch\(\) got an int: give tickets or claims"),
    (lambda packer: packer.defer_prefetch([None]), r"defer_prefetch\(\) got None: give tickets or claims"),
    (lambda packer: Packer().setup_ucxx_packer(queue="redis://h/0?run=x"), r"queue.* got a str: .*open_queue"),
    (lambda packer: Packer().setup_ucxx_packer(schemas=SCHEMA), "schemas.* got a Schema: give several"),
    (lambda packer: Packer().setup_ucxx_packer(schemas=["x"]), "schemas.* got a str: give several"),
    (lambda packer: Packer().setup_ucxx_packer(rank="0"), "rank.* got a str: give a whole number"),
    (lambda packer: Packer().setup_ucxx_packer(settings={}), "settings.* got a dict: give Settings"),
    (lambda packer: Packer().setup_ucxx_packer(client=ClientOptions(secret="text")), "secret.* got a str: give bytes"),
    (lambda packer: Packer().setup_ucxx_packer(consumed=b""), "consumed.* got a bytes: .*ConsumedRecord.from_bytes"),
    (
        lambda packer: Packer().setup_ucxx_packer(client=ClientOptions(directory="x")),
        "directory.* got a str: give a Directory",
    ),
    (lambda packer: Packer().setup_ucxx_packer(client={"secret": b"x"}), "client.* got a dict: give a ClientOptions"),
    (lambda packer: Packer().setup_ucxx_packer(ack="never"), "ack='never': choose"),
    (lambda packer: Worker().setup_ucxx("schema"), "schema.* got a str: give a Schema"),
    (lambda packer: Worker().setup_ucxx(SCHEMA, queue="x"), r"queue.* got a str: .*open_queue"),
    (lambda packer: Worker().setup_ucxx(SCHEMA, server=ServerOptions(ports=5)), "ports.* got an int: give several"),
    (
        lambda packer: Worker().setup_ucxx(SCHEMA, server=ServerOptions(directory=3)),
        "directory.* got an int: give a Directory",
    ),
    (lambda packer: Worker().setup_ucxx(SCHEMA, ring=8), "ring.* got an int: give a RingOptions"),
    (lambda packer: Worker().setup_ucxx(SCHEMA, readers="2"), "readers.* got a str: give a whole number"),
    (lambda packer: Worker().setup_ucxx(SCHEMA, server=ServerOptions(secret="text")), "secret.* got a str: give bytes"),
]


@pytest.mark.ucx
@pytest.mark.parametrize("case", range(len(PACKER)))
def test_mixins(case: int, packer: Packer) -> None:
    refused(PACKER[case][0], packer, PACKER[case][1])
    assert packer.collect_prefetch() is None  # nothing was begun


def test_numpys_numbers_are_numbers(ring: SharedRingBuffer) -> None:
    ticket = ring.write({"a": 1}, readers=np.int64(2))  # type: ignore[arg-type]
    assert ticket.readers == 2
