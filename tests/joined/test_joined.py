"""Payloads of several stages: one mapping, each part from where it lies, one acknowledgement for all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from claimed import claim_each
from helpers import asynchronous

from transport import BlockingClient, Schema, SharedRingBuffer, StaleSlotError, Ticket, UCXXClient, UCXXServer, UpTo
from transport.errors import PayloadDamagedError, RankError, RingFullError, SchemaError, UsageError
from transport.joined.parents import MAX_PARENTS, PARENTS, Parent, with_parents, write_group
from transport.joined.payloads import MAX_DEPTH, MAX_PARTS, join, read_joined

pytestmark = pytest.mark.ucx

ROLLOUT = Schema.of(prompt=("text", UpTo(64)), tokens=("int32", UpTo(64)))
REFERENCE = Schema.of(ref_logprobs=("float32", UpTo(64)), parents=PARENTS)
REWARD = Schema.of(reward="float32", parents=PARENTS)
ADVANTAGE = Schema.of(advantage=("float32", UpTo(64)), parents=PARENTS)
SCHEMAS = [ROLLOUT, REFERENCE, REWARD, ADVANTAGE]


class Rings:
    """A served ring for each stage."""

    def __init__(self) -> None:
        self.all = [SharedRingBuffer.create(schema, slots=4) for schema in SCHEMAS]
        self.rollout, self.reference, self.reward, self.advantage = self.all
        self._servers = [UCXXServer(ring, mode="thread") for ring in self.all]

    def free(self) -> list[int]:
        return [ring.statistics().free for ring in self.all]

    def chain(self) -> tuple[Ticket, Ticket, Ticket, Ticket]:
        """A rollout, what two stages add to it, and what a third one makes of these."""
        rolled = self.rollout.write({"prompt": "p", "tokens": [1, 2, 3]})
        referenced = self.reference.write(with_parents({"ref_logprobs": [0.5] * 3}, [rolled]))
        rewarded = self.reward.write(with_parents({"reward": 2.0}, [rolled]))
        valued = self.advantage.write(with_parents({"advantage": [1.0, 2.0, 3.0]}, [referenced, rewarded]))
        return rolled, referenced, rewarded, valued

    def __enter__(self) -> Rings:
        for server in self._servers:
            server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.__exit__(None, None, None)
        for ring in self.all:
            ring.close()


@pytest.fixture
def rings() -> Iterator[Rings]:
    with Rings() as made:
        yield made


@pytest.fixture(params=["mapped", "tcp"])
def client(request: pytest.FixtureRequest) -> Iterator[BlockingClient]:
    with BlockingClient(schemas=SCHEMAS, wire={request.param}, ack="manual") as made:
        yield made


@pytest.mark.nightly(keep=1)
def test_a_reader_sees_one_payload_of_four_parts_and_acknowledges_all(rings: Rings, client: BlockingClient) -> None:
    *_, valued = rings.chain()
    payload = read_joined(client, valued.to_text())
    assert set(payload) == {"prompt", "tokens", "ref_logprobs", "reward", "advantage"}
    assert payload["prompt"] == "p"
    assert payload["tokens"].tolist() == [1, 2, 3]
    assert payload["reward"] == 2
    assert len(payload.parts) == 4
    assert "parents" not in payload
    assert rings.free() == [3, 3, 3, 3]
    assert payload.ack()
    assert not payload.ack()
    payload.release()
    del payload
    client.close()
    assert all(wait_free(ring) for ring in rings.all)


def wait_free(ring: SharedRingBuffer) -> bool:
    """Take every slot, which waits for those that are being freed."""
    taken = [ring.native.take(20.0) for _ in range(4)]
    return all(loan is not None and loan.release() for loan in taken)


@asynchronous
async def test_join_is_the_same_with_an_event_loop() -> None:
    with Rings() as rings:
        *_, valued = rings.chain()
        async with UCXXClient(schemas=SCHEMAS, ack="manual") as client:
            with await join(client, valued) as payload:
                assert payload["ref_logprobs"].tolist() == [0.5] * 3
            assert rings.free() == [4, 4, 4, 4]


def test_a_payload_without_parents_is_one_part(rings: Rings, client: BlockingClient) -> None:
    with read_joined(client, rings.rollout.write({"prompt": "x", "tokens": []})) as payload:
        assert dict(payload)["prompt"] == "x"


@pytest.mark.nightly(keep=1)
def test_some_fields_are_read_from_the_parts_that_have_them(rings: Rings, client: BlockingClient) -> None:
    *_, valued = rings.chain()
    payload = read_joined(client, valued, fields=("tokens", "reward"))
    assert set(payload) == {"tokens", "reward"}
    payload.ack()
    payload.release()
    client.close()
    assert all(wait_free(ring) for ring in rings.all)  # also of the parts whose fields were not asked for


@pytest.mark.nightly(keep=1)
def test_fields_that_no_part_has_are_named(rings: Rings, client: BlockingClient) -> None:
    *_, valued = rings.chain()
    with pytest.raises(SchemaError, match="no part of it has nothing, rewards"):
        read_joined(client, valued, fields=("tokens", "rewards", "nothing"))
    with read_joined(client, valued) as payload:  # nothing was acknowledged
        assert len(payload.parts) == 4
        with pytest.raises(KeyError, match=r"token; the fields are .*tokens"):
            payload["token"]


@pytest.mark.nightly(keep=1)
def test_a_part_that_is_gone_is_named_and_nothing_is_acknowledged(rings: Rings, client: BlockingClient) -> None:
    rolled, *_, valued = rings.chain()
    rings.rollout.discard(rolled)
    with pytest.raises(StaleSlotError, match=f"payload {valued.name} cannot be read: its part {rolled.name}: "):
        read_joined(client, valued)
    assert rings.free() == [4, 3, 3, 3]
    rings.advantage.discard(valued)
    with pytest.raises(StaleSlotError) as caught:
        read_joined(client, valued)
    assert "its part" not in str(caught.value)


def test_a_client_that_acknowledges_on_arrival_is_refused(rings: Rings) -> None:
    *_, valued = rings.chain()
    with BlockingClient(schemas=SCHEMAS) as client, pytest.raises(UsageError, match='need a client with ack="manual"'):
        read_joined(client, valued)
    assert rings.free() == [3, 3, 3, 3]


@pytest.mark.nightly(keep=1)
def test_a_field_in_two_parts_is_an_error(rings: Rings, client: BlockingClient) -> None:
    rolled, _, rewarded, _ = rings.chain()
    again = rings.reward.write(with_parents({"reward": 3.0}, [rolled, rewarded]))
    with pytest.raises(SchemaError, match=r"the field 'reward' is in two of its parts"):
        read_joined(client, again)


@pytest.mark.nightly(keep=1)
def test_an_exception_in_the_block_acknowledges_nothing(rings: Rings, client: BlockingClient) -> None:
    *_, valued = rings.chain()
    with pytest.raises(ZeroDivisionError), read_joined(client, valued) as payload:
        raise ZeroDivisionError(payload["reward"])
    with read_joined(client, valued) as payload:
        assert payload["reward"] == 2


# --- groups -----------------------------------------------------------------------------------------------
def test_a_group_shares_what_it_has_in_common_once(client: BlockingClient) -> None:
    samples = Schema.of(completion=("text", UpTo(64)), parents=PARENTS)
    with (
        SharedRingBuffer.create(ROLLOUT, slots=2) as common,
        SharedRingBuffer.create(samples, slots=8) as ring,
        UCXXServer(common, mode="thread"),
        UCXXServer(ring, mode="thread"),
    ):
        client._client._deliveries._schemas[samples.fingerprint] = samples
        texts = [f"answer {at}" for at in range(5)]
        tickets = write_group(
            common,
            {"prompt": "shared", "tokens": [1]},
            [{"completion": text} for text in texts],
            samples_ring=ring,
            metadata=[{"text": text} for text in texts],
        )
        assert [ticket.metadata["text"] for ticket in tickets] == texts
        assert common.statistics().free == 1
        for at, ticket in enumerate(tickets):
            with read_joined(client, ticket) as payload:
                assert (payload["prompt"], payload["completion"]) == ("shared", texts[at])
        client.close()
        assert common.reserve({"prompt": 0, "tokens": 0}, timeout_s=20).abort() is None
        assert [common.native.take(20.0) for _ in range(2)]  # with the last sample the common payload was free


def test_a_group_that_does_not_fit_leaves_nothing() -> None:
    samples = Schema.of(completion=("text", UpTo(64)), parents=PARENTS)
    with (
        SharedRingBuffer.create(ROLLOUT, slots=2) as common,
        SharedRingBuffer.create(samples, slots=2, overflow="error") as ring,
    ):
        shared: dict[str, Any] = {"prompt": "", "tokens": []}
        with pytest.raises(RingFullError):
            write_group(common, shared, [{"completion": "x"}] * 3, samples_ring=ring)
        with pytest.raises(SchemaError, match="completion"):
            write_group(common, shared, [{"completion": 3}], samples_ring=ring)
        for wrong in ([], [{"completion": "x"}] * 17):
            with pytest.raises(UsageError, match="1 to 16 readers"):
                write_group(common, shared, wrong, samples_ring=ring)
        assert (common.statistics().free, ring.statistics().free) == (2, 2)


def test_a_sample_that_was_consumed_before_the_group_failed_is_named_as_written() -> None:
    samples = Schema.of(completion=("text", UpTo(64)), parents=PARENTS)
    with (
        SharedRingBuffer.create(ROLLOUT, slots=2) as common,
        SharedRingBuffer.create(samples, slots=2, overflow="block") as ring,
        ThreadPoolExecutor(1) as pool,
    ):

        def consume() -> None:
            [claimed] = claim_each(ring, 1, 20.0)
            claimed.consume()

        consuming = pool.submit(consume)
        with pytest.raises(RingFullError) as caught:
            write_group(
                common, {"prompt": "", "tokens": []}, [{"completion": "x"}] * 4, samples_ring=ring, timeout_s=0.5
            )
        consuming.result()
        assert [ticket.slot for ticket in caught.value.written] == [0]
        assert ring.statistics().free == 2


def test_numbers_of_numpy_are_readers(rings: Rings) -> None:
    rolled = rings.rollout.write({"prompt": "", "tokens": []}, readers=2)
    assert with_parents({}, [Parent(rolled, np.int64(1))]) == with_parents({}, [Parent(rolled, 1)])  # type: ignore[arg-type]
    tickets = write_group(
        rings.rollout,
        {"prompt": "", "tokens": []},
        [{"reward": 1}] * 2,
        samples_ring=rings.reward,
        readers=np.int64(2),
    )  # type: ignore[arg-type]
    assert [ticket.readers for ticket in tickets] == [2, 2]


def test_a_group_whose_write_is_interrupted_leaves_nothing() -> None:
    samples = Schema.of(completion=("text", UpTo(64)), parents=PARENTS)
    with (
        SharedRingBuffer.create(ROLLOUT, slots=2) as common,
        SharedRingBuffer.create(samples, slots=2) as ring,
    ):

        def interrupt() -> None:
            while ring.statistics().full_waits == 0:  # it waits for room for the third sample
                pass
            os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                write_group(common, {"prompt": "", "tokens": []}, [{"completion": "x"}] * 3, samples_ring=ring)
        finally:
            interrupting.join()
            signal.signal(signal.SIGINT, before)
        assert (common.statistics().free, ring.statistics().free) == (2, 2)


# --- what parents may be ------------------------------------------------------------------------------------
def test_parents_are_bounded_and_checked(rings: Rings) -> None:
    rolled = rings.rollout.write({"prompt": "", "tokens": []})
    others = [
        Ticket.from_json(rolled.to_json().replace('"slot":0', f'"slot":{at}')) for at in range(1, MAX_PARENTS + 1)
    ]
    assert len(with_parents({}, others)["parents"]) == MAX_PARENTS
    for wrong in ([], [rolled, *others], "ticket", rolled, None):
        with pytest.raises(UsageError, match="1 to 8 tickets"):
            with_parents({}, wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="named twice"):
        with_parents({}, [rolled, Parent(rolled)])
    with pytest.raises(UsageError, match="give its Ticket"):
        with_parents({}, ["text"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="names a payload's parents"):
        with_parents({"parents": 1}, [rolled])
    with pytest.raises(RankError):
        with_parents({}, [Parent(rolled, 1)])
    assert rings.reward.write(with_parents({"reward": 1}, others))  # the largest fits


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize(
    "found",
    [None, [], "text", [1], [[b"x", 0]], [[b"x"]], [["text", 0]], [[b"TK\x01", True]], {"a": 1}, [[b"", 0]] * 9],
)
def test_parents_that_are_none_are_damage(found: Any, rings: Rings, client: BlockingClient) -> None:
    ticket = rings.reward.write({"reward": 1.0, "parents": found})
    with pytest.raises(PayloadDamagedError, match="its field 'parents'"):
        read_joined(client, ticket)


def test_ranks_of_parents_outside_of_theirs_are_refused(rings: Rings, client: BlockingClient) -> None:
    rolled = rings.rollout.write({"prompt": "", "tokens": []})
    for first, error in ((16, PayloadDamagedError), (-1, PayloadDamagedError), (3, RankError)):
        ticket = rings.reward.write({"reward": 1.0, "parents": [[rolled.encode(), first]]})
        with pytest.raises(error):
            read_joined(client, ticket)
        rings.reward.discard(ticket)


def test_generations_and_parts_are_bounded() -> None:
    open_rings = {"slots": 40, "slot_bytes": 1 << 16}
    with SharedRingBuffer.create(**open_rings) as ring, BlockingClient(ack="manual") as client:
        ticket = ring.write({"f": 0})
        for depth in range(1, MAX_DEPTH + 1):
            ticket = ring.write(with_parents({f"f{depth}": depth}, [ticket]))
        assert len(read_joined(client, ticket).parts) == MAX_DEPTH + 1
        with pytest.raises(PayloadDamagedError, match="4 deep"):
            read_joined(client, ring.write(with_parents({"last": 1}, [ticket])))
        leaves = [ring.write({f"leaf{at}": at}) for at in range(MAX_PARTS)]
        halves = [ring.write(with_parents({f"half{at}": 1}, leaves[at * 8 : at * 8 + 8])) for at in range(2)]
        with pytest.raises(PayloadDamagedError, match="more than 16 parts"):
            read_joined(client, ring.write(with_parents({"top": 1}, halves)))


# --- the order of acknowledgements --------------------------------------------------------------------
def acknowledged_before(payload: Any, names: dict[Any, str]) -> list[tuple[str, int]]:
    return [(names[part.ticket.identity], part.rank) for part in payload.to_acknowledge]


@pytest.mark.nightly(keep=1)
def test_a_parent_is_acknowledged_before_every_payload_that_names_it(rings: Rings, client: BlockingClient) -> None:
    """Also where the payload that was asked for names it directly, before another parent that names it, too."""
    rolled = rings.rollout.write({"prompt": "p", "tokens": [1]})
    referenced = rings.reference.write(with_parents({"ref_logprobs": [0.5]}, [rolled]))
    valued = rings.advantage.write(with_parents({"advantage": [1.0]}, [rolled, referenced]))
    names = {rolled.identity: "rolled", referenced.identity: "referenced", valued.identity: "valued"}
    payload = read_joined(client, valued)
    assert acknowledged_before(payload, names) == [("rolled", 0), ("referenced", 0), ("valued", 0)]
    payload.ack()
    payload.release()


def test_a_parent_without_a_reader_for_a_rank_by_which_its_child_was_not_read_is_left_out() -> None:
    """As where two stages each read the same payload, whose own parent has one reader."""
    schemas = [Schema.of(**{name: "int32"}, parents=PARENTS) for name in ("read_twice", "middle", "last")]
    source = Schema.of(document="int32")
    with (
        SharedRingBuffer.create(source, slots=1) as sources,
        SharedRingBuffer.create(schemas[0], slots=1) as twice,
        SharedRingBuffer.create(schemas[1], slots=1) as middles,
        SharedRingBuffer.create(schemas[2], slots=1) as lasts,
        BlockingClient(schemas=[source, *schemas], wire={"mapped"}, ack="manual") as reader,
    ):
        document = sources.write({"document": 1})
        shared = twice.write(with_parents({"read_twice": 2}, [document]), readers=2)
        middle = middles.write(with_parents({"middle": 3}, [Parent(shared, 1)]))
        last = lasts.write(with_parents({"last": 4}, [Parent(shared, 0), Parent(middle, 0)]))
        payload = read_joined(reader, last)
        assert payload.ack()
        payload.release()
        assert [ring.statistics().free for ring in (sources, twice, middles, lasts)] == [1, 1, 1, 1]


_DIES = """
import os, signal, sys
from transport import BlockingClient, Schema
from transport.client.payload import ReadPayload
from transport.joined import read_joined
import msgspec

schemas = [Schema.from_json(each) for each in msgspec.json.decode(sys.argv[2], type=list[str])]
client = BlockingClient(schemas=schemas, wire={"mapped"}, ack="manual")
payload = read_joined(client, sys.argv[1])
left = int(sys.argv[3])
ack = ReadPayload.ack

def counted(self):
    global left
    if self is not payload:
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
    return ack(self)

ReadPayload.ack = counted
payload.ack()
"""


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("acknowledged", range(3))
def test_a_reader_that_is_killed_between_acknowledgements_leaves_no_part_that_no_payload_names(
    rings: Rings, acknowledged: int
) -> None:
    rolled = rings.rollout.write({"prompt": "p", "tokens": [1]})
    referenced = rings.reference.write(with_parents({"ref_logprobs": [0.5]}, [rolled]))
    valued = rings.advantage.write(with_parents({"advantage": [1.0]}, [rolled, referenced]))
    told = msgspec.json.encode([each.to_json() for each in SCHEMAS]).decode()
    killed = subprocess.run([sys.executable, "-c", _DIES, valued.to_text(), told, str(acknowledged)], check=False)
    assert killed.returncode == -signal.SIGKILL
    for ring in rings.all:
        ring.reclaim()
    there = [bool(ring.tickets()) for ring in (rings.rollout, rings.reference, rings.advantage)]
    assert there == [number >= acknowledged for number in range(3)]
    assert valued in rings.advantage.tickets()


def test_ancestors_of_a_shared_parent_are_acknowledged_for_every_rank_that_leads_to_them() -> None:
    """Two samples of a group have a rank each of what they share, and of what that names."""
    sample = Schema.of(answer="int32", parents=PARENTS)
    joined = Schema.of(pair="int32", parents=PARENTS)
    common = Schema.of(question="int32", parents=PARENTS)
    source = Schema.of(document="int32")
    with (
        SharedRingBuffer.create(source, slots=1) as sources,
        SharedRingBuffer.create(common, slots=1) as commons,
        SharedRingBuffer.create(sample, slots=2) as samples,
        SharedRingBuffer.create(joined, slots=1) as pairs,
        BlockingClient(schemas=[source, common, sample, joined], wire={"mapped"}, ack="manual") as reader,
    ):
        document = sources.write({"document": 1}, readers=2)
        first, second = write_group(
            commons, with_parents({"question": 2}, [document]), [{"answer": 3}, {"answer": 4}], samples_ring=samples
        )
        pair = pairs.write(with_parents({"pair": 5}, [first, second]))
        with pytest.raises(SchemaError):  # of the samples' own fields, which are two of one name
            read_joined(reader, pair)
        payload = read_joined(reader, pair, fields=("pair", "question", "document"))
        assert payload.ack()
        payload.release()
        assert [ring.statistics().free for ring in (sources, commons, samples, pairs)] == [1, 1, 2, 1]
