"""GroupQueue: every rank of a group trains on the same tickets in the same order, or on none of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from queue_harness import ids, tickets
from queue_waits import in_thread, ticket
from ring_queues import RingHarness

from transport.claims.places import Discovery
from transport.errors import ConfigurationError, GroupBrokenError, RankError, StoreUnavailableError
from transport.queue import FoundRings, QueueDepth
from transport.queue.group import GroupQueue, _Vote, counted
from transport.ring.buffer import SharedRingBuffer
from transport.store import SQLiteStore, Store


class Place:
    """A queue and a store, and groups on them."""

    def __init__(self, rings: RingHarness, store: Store) -> None:
        self._rings, self.store = rings, store
        self.queue: Any = rings.open()

    def group(self, name: str = "a", ranks: int = 2, patience_s: float = 30) -> list[GroupQueue]:
        return [GroupQueue(self.queue, self.store, name, rank, ranks, patience_s=patience_s) for rank in range(ranks)]

    def lose_the_holder(self) -> None:
        """What was claimed is anybody's."""
        self._rings.lose_the_holder()
        self.queue = self._rings.open()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with contextlib.closing(RingHarness()) as rings, SQLiteStore(tmp_path / "store.db") as store:
        yield Place(rings, store)


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
    held = leader.claim(2, consumer="a")
    assert ids(held) == ids(follower.claim(99, rank=1, consumer="f"))
    others, theirs = place.group("b")
    held += others.claim(1, consumer="b")
    assert ids(held[2:]) == [ticket(2).id]
    held += leader.claim(9, consumer="a")
    assert ids(held[3:]) == [ticket(3).id, ticket(4).id]
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
    assert place.queue.depth() == (QueueDepth(done=1, discarded=1) if final else QueueDepth(done=1, ready=1, retried=1))
    if final:
        assert place.queue.failures()[0].reason == ("rank 1: gone" if who else "gone")


def test_a_leader_that_is_gone_breaks_the_group_and_another_group_gets_its_tickets(place: Place) -> None:
    place.queue.publish(ticket(0))
    leader, follower = place.group(patience_s=0.01)
    leader.claim(1, consumer="a")
    with pytest.raises(GroupBrokenError, match="under another name"):
        follower.ack_many(follower.claim(1, rank=1, consumer="f"))
    place.lose_the_holder()
    other, others = place.group("b")
    claims = other.claim(1, consumer="b"), others.claim(1, rank=1, consumer="b")
    acked = at_once(lambda: other.ack_many(claims[0]), lambda: others.ack_many(claims[1]))
    assert [ids(each) for each in acked] == [[ticket(0).id]] * 2


def test_a_claim_whose_holder_is_gone_is_trained_on_by_no_rank(place: Place) -> None:
    place.queue.publish(ticket(0))
    group = place.group()
    claims = [member.claim(1, rank=rank, consumer="g") for rank, member in enumerate(group)]
    place.lose_the_holder()
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


def test_old_tickets_are_passed_over_for_the_whole_group(place: Place) -> None:
    place.queue.publish(ticket(0), policy_version=1)
    place.queue.publish(ticket(1), policy_version=5)
    leader, follower = place.group()
    assert ids(leader.claim(2, consumer="a", oldest_version=4)) == [ticket(1).id]
    assert ids(follower.claim(2, rank=1, consumer="f")) == [ticket(1).id]
    assert leader.depth(1).aged == 1


def test_the_ranks_agree_on_the_end_also_where_another_rollout_comes_after_it(tmp_path: Path) -> None:
    class Ending(FoundRings):
        over = True

        def finished(self, expected_rollouts: int | None = None) -> bool:
            return self.over

    with (
        SharedRingBuffer.create(slots=1, slot_bytes=8) as ring,
        Ending(Discovery()) as queue,
        SQLiteStore(tmp_path / "store.db") as store,
    ):
        queue.hand_out(ring)
        ranks = [GroupQueue(queue, store, "a", rank, 2) for rank in range(2)]
        for over in (True, False, True):
            queue.over = over
            assert [rank.finished() for rank in ranks] == [over, over]
        ring.write_raw(b"x", readers=2)
        claims = ranks[0].claim(1, consumer="a")  # the leader goes on, though it has said that this is the end
        assert not ranks[1].finished()
        assert ids(ranks[1].claim(1, rank=1, consumer="b")) == ids(claims)
        assert not ranks[1].finished()


def test_only_the_leader_renews(place: Place) -> None:
    place.queue.publish(ticket(0))
    leader, follower = place.group()
    claims = leader.claim(1, consumer="a")
    theirs = follower.claim(1, rank=1, consumer="f")
    assert leader.renew(claims) == claims
    assert follower.renew(theirs) == theirs
    assert leader.retry(claims[0])
    assert leader.renew(claims) == []
    assert follower.renew(theirs) == theirs
