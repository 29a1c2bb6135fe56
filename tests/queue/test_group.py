"""GroupQueue: every rank of a group trains on the same tickets in the same order, or on none of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from queue_harness import LEASE_S, ids, tickets
from queue_waits import in_thread, ticket
from redis_server import WHY_NOT, RedisServer, needs_redis, redis_server

from transport.errors import ConfigurationError, GroupBrokenError, RankError, StoreUnavailableError
from transport.packer.mixin import UCXXDataPackerMixin
from transport.packer.options import RingOptions
from transport.packer.rollout import UCXXRolloutMixin
from transport.queue import DeliveryState, QueueDepth, RedisQueue, TicketQueue, open_queue
from transport.queue.group import GroupQueue, _Vote, counted
from transport.storage.urls import parse_url
from transport.store import SQLiteStore, Store, open_store
from transport.testing import MemoryQueue


class Place:
    """A queue and a store, and groups on them."""

    def __init__(self, queue: TicketQueue, store: Store, advance: Callable[[float], None]) -> None:
        self.queue, self.store, self.advance = queue, store, advance

    def group(self, name: str = "a", ranks: int = 2, patience_s: float = 30) -> list[GroupQueue]:
        return [GroupQueue(self.queue, self.store, name, rank, ranks, patience_s=patience_s) for rank in range(ranks)]


@pytest.fixture(scope="module", autouse=True)  # before the first test, whose leak it would be otherwise
def server() -> Iterator[RedisServer | None]:
    if WHY_NOT:
        yield None
        return
    with redis_server() as running:
        yield running


@pytest.fixture(params=["memory", pytest.param("redis", marks=needs_redis)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    times = [1000.0]

    def advance(seconds: float) -> None:
        times[0] += seconds

    with contextlib.ExitStack() as stack:
        queue: TicketQueue
        store: Store
        if request.param == "memory":
            queue = MemoryQueue(lease_s=LEASE_S, clock=lambda: times[0])
            store = SQLiteStore(tmp_path / "store.db")
        else:
            server = request.getfixturevalue("server")
            server.flush()
            queue = RedisQueue(parse_url(server.place()), lease_s=LEASE_S, clock=lambda: times[0])
            store = open_store(server.place())
        stack.enter_context(queue)
        stack.enter_context(store)
        yield Place(queue, store, advance)


def at_once(*calls: Callable[[], object]) -> list[object]:
    """What the calls return, each in a thread of its own."""
    pairs = [in_thread(call) for call in calls]
    for _, thread in pairs:
        thread.join()
    return [results[0] for results, _ in pairs]


def test_every_rank_gets_the_leaders_claims_in_the_leaders_order(place: Place) -> None:
    place.queue.publish(tickets(5))
    leader, follower = place.group()
    assert follower.claim(2, rank=1, consumer="f") == []  # nobody claims but the leader
    assert ids(leader.claim(2, consumer="a")) == ids(follower.claim(99, rank=1, consumer="f"))
    others, theirs = place.group("b")
    assert ids(others.claim(1, consumer="b")) == [ticket(2).id]
    assert ids(leader.claim(9, consumer="a")) == [ticket(3).id, ticket(4).id]
    claims = follower.claim(1, rank=1, consumer="f")
    assert ids(claims) == [ticket(3).id, ticket(4).id]
    assert {claim.rank for claim in claims} == {1}
    assert ids(theirs.claim(1, rank=1, consumer="f")) == [ticket(2).id]


@pytest.mark.parametrize("written", [False, True])
def test_a_claim_whose_telling_failed_is_the_groups_next_one_whether_the_store_has_it_or_not(
    place: Place, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    put = place.store.put

    def away(*arguments: Any, **named: Any) -> int:
        if written:
            put(*arguments, **named)
        raise StoreUnavailableError("away")

    place.queue.publish(tickets(3))
    leader, follower = place.group()
    with monkeypatch.context() as patched:
        patched.setattr(place.store, "put", away)
        with pytest.raises(StoreUnavailableError):
            leader.claim(2, rank=0, consumer="g")
    group = [member.claim(2, rank=rank, consumer="g") for rank, member in enumerate((leader, follower))]
    assert [claim.token for claim in group[0]] == [claim.token for claim in group[1]]
    acked = at_once(lambda: leader.ack_many(group[0]), lambda: follower.ack_many(group[1]))
    assert [ids(each) for each in acked] == [[ticket(0).id, ticket(1).id]] * 2
    assert place.queue.depth() == QueueDepth(ready=1, done=2)


def test_what_all_could_read_is_consumed_once_and_by_all(place: Place) -> None:
    place.queue.publish(tickets(3))
    group = place.group(ranks=3)
    claims = [member.claim(3, rank=rank, consumer="g") for rank, member in enumerate(group)]
    acked = at_once(*(lambda at=at: group[at].ack_many(claims[at]) for at in range(3)))
    assert [ids(each) for each in acked] == [[item.id for item in tickets(3)]] * 3
    assert place.queue.depth() == QueueDepth(done=3)


def test_an_answer_is_the_same_when_it_is_asked_for_again(place: Place) -> None:
    place.queue.publish(ticket(0))
    group = place.group()
    claims = [member.claim(1, rank=rank, consumer="g") for rank, member in enumerate(group)]
    assert at_once(*(lambda at=at: group[at].ack_many(claims[at]) for at in range(2))) == claims
    assert group[0].ack_many(claims[0]) == claims[0]
    assert not group[0].retry(claims[0][0])
    assert group[1].ack_many(claims[1]) == claims[1]
    assert place.queue.depth() == QueueDepth(done=1)


def test_a_decision_that_the_store_did_not_take_is_made_by_the_repeated_call(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.queue.publish(tickets(2))
    leader, follower = place.group()
    claims, theirs = (member.claim(2, rank=rank, consumer="g") for rank, member in enumerate((leader, follower)))
    answers, thread = in_thread(lambda: follower.ack_many(theirs))
    assert all(None not in votes for votes in leader._votes(claims))  # it waits for them

    def fail(*_: object) -> None:
        raise StoreUnavailableError("for once")

    with monkeypatch.context() as patch:
        patch.setattr(place.store, "put_many", fail)
        with pytest.raises(GroupBrokenError, match="did not take the decision"):
            leader.ack_many(claims)
        assert not leader.retry(claims[0])  # it is done
    assert leader.ack_many(claims) == claims
    thread.join()
    assert answers == [theirs]
    assert place.queue.depth() == QueueDepth(done=2)


@needs_redis
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_ends_gives_its_claims_back_with_as_many_calls_for_many_as_for_one(
    server: RedisServer, who: int
) -> None:
    import redis

    def calls(count: int) -> int:
        """Of the server's scripts and transactions."""
        server.flush()
        with RedisQueue(parse_url(server.place())) as queue, open_store(server.place()) as store:
            queue.publish(tickets(count))
            group = [GroupQueue(queue, store, "a", rank, 2) for rank in range(2)]
            claims = [member.claim(count, rank=rank, consumer="g") for rank, member in enumerate(group)][who]
            with redis.Redis(port=server.port) as client:
                client.config_resetstat()
                assert group[who].retry_many(claims, reason="the trainer stopped") == claims
                assert group[who].retry_many(claims, reason="again") == (claims if who == 0 else [])
                seen = client.info("commandstats")
        return sum(seen.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval", "exec"))

    assert calls(50) <= calls(1) + 2


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("final", [False, True])
def test_what_one_rank_could_not_read_nobody_trains_on(place: Place, who: int, final: bool) -> None:
    place.queue.publish(tickets(2))
    group = place.group()
    claims = [member.claim(2, rank=rank, consumer="g") for rank, member in enumerate(group)]
    bad = claims[who][0]
    assert group[who].discard(bad, "gone") if final else group[who].retry(bad, reason="no route")
    kept = [[claim for claim in claims[rank] if rank != who or claim is not bad] for rank in range(2)]
    acked = at_once(*(lambda at=at: group[at].ack_many(kept[at]) for at in range(2)))
    assert [ids(each) for each in acked] == [[ticket(1).id]] * 2
    state = DeliveryState.DISCARDED if final else DeliveryState.READY
    assert place.queue.known([ticket(0).id]) == {ticket(0).id: (state,)}
    if final:
        assert place.queue.failures()[0].reason == ("rank 1: gone" if who else "gone")


def test_a_leader_that_is_gone_breaks_the_group_and_another_group_gets_its_tickets(place: Place) -> None:
    place.queue.publish(ticket(0))
    leader, follower = place.group(patience_s=0.01)
    leader.claim(1, consumer="a")
    with pytest.raises(GroupBrokenError, match="under another name"):
        follower.ack_many(follower.claim(1, rank=1, consumer="f"))
    place.advance(LEASE_S)
    other, others = place.group("b")
    claims = other.claim(1, consumer="b"), others.claim(1, rank=1, consumer="b")
    acked = at_once(lambda: other.ack_many(claims[0]), lambda: others.ack_many(claims[1]))
    assert [ids(each) for each in acked] == [[ticket(0).id]] * 2


def test_a_claim_whose_lease_ended_is_trained_on_by_no_rank(place: Place) -> None:
    place.queue.publish(ticket(0))
    group = place.group()
    claims = [member.claim(1, rank=rank, consumer="g") for rank, member in enumerate(group)]
    place.advance(LEASE_S)
    assert at_once(*(lambda at=at: group[at].ack_many(claims[at]) for at in range(2))) == [[], []]


def test_a_name_is_used_once_and_a_rank_is_its_own(place: Place) -> None:
    leader, _ = place.group()
    with pytest.raises(ConfigurationError, match="was used before"):
        place.group()
    with pytest.raises(RankError, match="the queue of rank 0"):
        leader.claim(1, rank=1, consumer="a")
    with pytest.raises(RankError, match="rank 2 of a group of 2"):
        GroupQueue(place.queue, place.store, "c", 2, 2)


def test_a_final_no_comes_before_others() -> None:
    yes, no, never = _Vote(True), _Vote(False, reason="no"), _Vote(False, final=True, reason="never")
    assert counted([yes, yes]) == yes
    assert counted([yes, no]) == no
    assert counted([no, never]) == never
    assert counted([yes, None]).reason == "rank 1 of the group was silent"


MEMBER = """
import sys
from transport.queue.group import GroupQueue
from transport.queue import open_queue
from transport.store import open_store
queue, store, rank = open_queue(sys.argv[1]), open_store(sys.argv[2]), int(sys.argv[3])
group = GroupQueue(queue, store, "g", rank, 2)
trained = 0
while trained < 40:
    claims = group.claim(4, 30, rank=rank, consumer="member")
    bad = [claim for claim in claims if rank == 1 and claim.attempts == 1 and claim.ticket_id.endswith("3/1")]
    for claim in bad:
        group.retry(claim, reason="a read failed")
    for claim in group.ack_many([claim for claim in claims if claim not in bad]):
        trained += 1
        print(claim.ticket_id, flush=True)
queue.close(), store.close()
"""


@needs_redis
@pytest.mark.slow
def test_processes_of_a_group_train_on_the_same_in_the_same_order(tmp_path: Path, server: RedisServer) -> None:
    server.flush()
    places = server.place(), f"sqlite://{tmp_path}/store.db"
    with open_queue(places[0]) as queue:
        queue.publish(tickets(40))
        members = [
            subprocess.Popen([sys.executable, "-c", MEMBER, *places, str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        said = [member.communicate(timeout=100)[0].split() for member in members]
        assert said[0] == said[1]
        assert sorted(said[0]) == sorted(item.id for item in tickets(40))
        assert queue.depth() == QueueDepth(done=40, retried=4)


class Rollout(UCXXRolloutMixin):
    """The mixin alone."""


class Packer(UCXXDataPackerMixin):
    """The mixin alone."""


@pytest.mark.ucx
@pytest.mark.slow
def test_the_packers_of_a_group_train_on_the_same_payloads(place: Place) -> None:
    rollout, packers = Rollout(), [Packer(), Packer()]
    rollout.setup_ucxx(
        slots=8, readers=2, grouped=True, queue=place.queue, mode="thread", ring=RingOptions(slot_bytes=4096)
    )
    try:
        for rank, (packer, member) in enumerate(zip(packers, place.group(), strict=True)):
            packer.setup_ucxx_packer(queue=member, rank=rank, wire={"mapped"})
        tickets = [rollout.write_to_buffer({"step": np.int64(step)}) for step in range(6)]
        rollout.ring.discard(tickets[2])  # nobody can read it

        def train(packer: Packer) -> list[int]:
            packer.start_prefetch(packer.claim_tickets(6, 30))
            batch = packer.collect_prefetch()
            assert batch is not None
            payloads = packer.consume(batch)
            steps = [int(payload["step"]) for payload in payloads]
            for payload in payloads:
                payload.release()
            return steps

        assert at_once(*(lambda packer=packer: train(packer) for packer in packers)) == [[0, 1, 3, 4, 5]] * 2
        assert place.queue.depth() == QueueDepth(done=5, discarded=1)
        assert rollout.ring_statistics().ready == 0
    finally:
        for packer in packers:
            packer.cleanup_ucxx_packer()
        rollout.cleanup_ucxx()


def test_old_tickets_are_passed_over_for_the_whole_group(place: Place) -> None:
    place.queue.publish(ticket(0), policy_version=1)
    place.queue.publish(ticket(1), policy_version=5)
    leader, follower = place.group()
    assert ids(leader.claim(2, consumer="a", oldest_version=4)) == [ticket(1).id]
    assert ids(follower.claim(2, rank=1, consumer="f")) == [ticket(1).id]
    assert leader.depth(1).aged == 1


def test_the_ranks_agree_on_the_end_also_where_another_rollout_comes_after_it(tmp_path: Path) -> None:
    class Ending(MemoryQueue):
        over = True

        def finished(self, expected_rollouts: int | None = None) -> bool:
            return self.over

    with Ending() as queue, SQLiteStore(tmp_path / "store.db") as store:
        ranks = [GroupQueue(queue, store, "a", rank, 2) for rank in range(2)]
        for over in (True, False, True):
            queue.over = over
            assert [rank.finished() for rank in ranks] == [over, over]
        queue.publish(ticket(0))
        claims = ranks[0].claim(1, consumer="a")  # the leader goes on, though it has said that this is the end
        assert not ranks[1].finished()
        assert ids(ranks[1].claim(1, rank=1, consumer="b")) == ids(claims)
        assert not ranks[1].finished()


def test_only_the_leader_renews(place: Place) -> None:
    place.queue.publish(ticket(0))
    leader, follower = place.group()
    claims = leader.claim(1, consumer="a")
    theirs = follower.claim(1, rank=1, consumer="f")
    place.advance(LEASE_S * 2 / 3)
    assert leader.renew(claims) == claims
    assert follower.renew(theirs) == theirs
    place.advance(LEASE_S * 2 / 3)
    assert leader.renew(claims) == claims
