"""A group whose members fail while it forms: who waits for one of them hears of it, instead of waiting its time out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from helpers import asynchronous, until
from sharded_job import job
from weights_engines import engine, engines
from weights_members import version_of

from transport.errors import (
    MemberFailedError,
    ParentLostError,
    SchemaError,
    WeightsTimeoutError,
)
from transport.weights import WeightsTrainer
from transport.weights.manager import WeightUpdate
from transport.weights.plan.steps import Limits
from transport.weights.sharding.roles import RankRole, build_topology, unpack
from transport.weights.transfer.feed import Feed, Upstream, announce_failure
from transport.weights.transfer.messages import Start, encode
from transport.weights.worker import ReferenceWorker, Replica

pytestmark = pytest.mark.ucx


@contextlib.asynccontextmanager
async def opened(lost: Any = lambda name: None) -> AsyncIterator[Feed]:
    feed = Feed(lost)
    await feed.open("127.0.0.1")
    try:
        yield feed
    finally:
        await feed.close()


async def connected(feed: Feed, name: str) -> Upstream:
    return await Upstream.connect("parent", "127.0.0.1", feed.port, feed.token, name)


def columns(*sides: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The arguments of each member, trainers first."""
    return [{key: values[at] for key, values in side.items()} for side in sides for at in range(len(side["roles"]))]


@asynchronous
async def test_a_child_that_came_and_left_is_not_waited_for() -> None:
    async with opened() as feed:
        (await connected(feed, "a")).close()
        stays = await connected(feed, "b")
        await until(lambda: "a" not in feed.children)
        await feed.joined(["a", "b"])
        assert feed.children == {"b"}
        with pytest.raises(ParentLostError, match="a has left this group"):
            await connected(feed, "a")
        stays.close()


@asynchronous
async def test_who_waits_for_a_child_hears_that_a_parent_failed() -> None:
    async with opened() as parent, opened() as own:
        upstream = await connected(parent, "me")
        joining = asyncio.ensure_future(own.joined(["never comes"], [upstream]))
        await announce_failure(parent, SchemaError("gate is missing"))
        with pytest.raises(ParentLostError, match="SchemaError: gate is missing"):
            await joining
        upstream.close()


@asynchronous
async def test_what_a_parent_sends_before_all_children_are_there_is_not_lost() -> None:
    async with opened() as parent, opened() as own:
        upstream = await connected(parent, "me")
        joining = asyncio.ensure_future(own.joined(["late"], [upstream]))
        for version in (7, 8):
            await parent.tell(Start(version), ["me"])
        await until(lambda: upstream.ahead)
        late = await connected(own, "late")
        await joining
        assert [await upstream.next(), await upstream.next()] == [Start(7), Start(8)]
        upstream.close()
        late.close()


@asynchronous
async def test_who_waits_for_a_child_hears_that_a_parent_ended_after_its_first_messages() -> None:
    async with opened() as parent, opened() as own:
        upstream = await connected(parent, "me")
        joining = asyncio.ensure_future(own.joined(["never comes"], [upstream]))
        for version in (7, 8):
            await parent.tell(Start(version), ["me"])
        await parent.close()
        async with asyncio.timeout(10):
            with pytest.raises(ParentLostError, match="parent disconnected"):
                await joining
        assert [await upstream.next(), await upstream.next()] == [Start(7), Start(8)]
        for _ in range(2):
            with pytest.raises(ParentLostError, match="parent disconnected"):
                await upstream.next()
        upstream.close()


@asynchronous
async def test_a_parent_whose_messages_are_not_taken_is_read_ahead_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transport.weights.transfer.feed._MOST_AHEAD", 200)
    async with opened() as parent, opened() as own:
        upstream = await connected(parent, "me")
        joining = asyncio.ensure_future(own.joined(["late"], [upstream]))
        said = [Start(at) for at in range(300)]
        for frame in said:
            await parent.tell(frame, ["me"])
        await until(lambda: upstream.ahead >= 200)
        late = await connected(own, "late")
        await joining
        assert upstream.ahead <= 200 + len(encode(Start(300)))
        assert [await upstream.next() for _ in said] == said
        upstream.close()
        late.close()


@asynchronous
async def test_a_group_that_does_not_come_together_names_who_is_missing() -> None:
    async with engines("ab", shape="chain") as made:
        metadata = [await each.prepare() for each in made]
        arguments = columns(*build_topology(1, 2, metadata))
    async with engines("ab", shape="chain", join_s=0.2) as made:
        await made[0].prepare()
        with pytest.raises(WeightsTimeoutError, match=r"trainer: .* not complete within 0\.2 s.*missing: replica 0"):
            await made[0].init_process_group(**arguments[0])


@asynchronous
async def test_a_relay_that_waits_for_its_child_hears_its_parent_and_tells_its_other_children() -> None:
    made = [engine("trainer", shape="chain")]
    made += [engine(f"replica {at}", host=host, wires=frozenset({"tcp"})) for at, host in enumerate("aab")]
    try:
        metadata = [await each.prepare() for each in made]
        arguments = columns(*build_topology(1, 3, metadata))
        parts = [unpack(row["roles"][0], RankRole).incoming for row in arguments]
        relay = next(at for at, part in enumerate(parts) if part and part[0].wired and part[0].local)
        mapping = next(at for at, part in enumerate(parts) if part and part[0].mapped)
        joining = [asyncio.ensure_future(made[at].init_process_group(**arguments[at])) for at in (relay, mapping, 0)]
        await joining[1]
        await joining[2]
        waits = asyncio.ensure_future(made[mapping].receive(1))
        with pytest.raises(RuntimeError, match="no tensors"):  # the relay's other child never comes
            await made[0].send_weights(_failing(), 1)
        for waiting in (joining[0], waits):
            with pytest.raises(ParentLostError, match="no tensors"):
                await waiting
    finally:
        for each in made:
            await each.close()


def _failing() -> Any:
    raise RuntimeError("no tensors")
    yield


class Source:
    def weights(self, version: int) -> Any:
        return iter(version_of(version).items())


@asynchronous
async def test_a_replica_that_cannot_join_ends_the_wait_of_all_others() -> None:
    async with engines("ab", shape="star") as made:

        async def refused(**arguments: Any) -> None:
            raise RuntimeError("no way")

        made[1].init_process_group = refused  # type: ignore[method-assign]
        replicas = [Replica(each, ReferenceWorker()) for each in made[1:]]
        manager = WeightUpdate(
            [WeightsTrainer(made[0], Source())],
            replicas,  # type: ignore[arg-type]
            limits=Limits(connect=3600, total=7200),
        )
        with pytest.raises(RuntimeError, match="no way") as caught:
            await manager.update(1)
        assert not hasattr(caught.value, "__notes__")  # who was not waited for has not failed


@asynchronous
async def test_a_rank_that_cannot_join_is_named_also_when_it_blames_its_parent_and_another_rank_waits() -> None:
    async with job(1, ["ab"], join_s=2.0) as made:

        async def waits(**arguments: Any) -> None:  # as a relay for its child
            await asyncio.Event().wait()

        async def refused(**arguments: Any) -> None:
            raise ParentLostError("trainer 0 is unreachable")

        for rank, joins in zip(made.ranks, (waits, refused), strict=True):
            rank.engine.init_process_group = joins  # type: ignore[method-assign]
        with pytest.raises(ParentLostError, match="trainer 0 is unreachable"):
            await made.manager.update(1)


@asynchronous
async def test_who_leaves_while_it_waits_for_a_child_is_not_told_of_a_cancellation() -> None:
    async with opened() as parent, opened() as own:
        upstream = await connected(parent, "me")
        joining = asyncio.ensure_future(own.joined(["never comes"], [upstream]))
        await until(lambda: own._expected)
        upstream.close()
        with pytest.raises(ParentLostError, match="closed here"):
            await joining


@asynchronous
async def test_a_member_whose_call_is_cancelled_by_itself_has_failed() -> None:
    async with engines("a", shape="star", join_s=2.0) as made:

        async def cancelled(**arguments: Any) -> None:
            raise asyncio.CancelledError

        made[1].init_process_group = cancelled  # type: ignore[method-assign]
        manager = WeightUpdate([WeightsTrainer(made[0], Source())], [Replica(made[1], ReferenceWorker())])  # type: ignore[list-item]
        with pytest.raises(MemberFailedError, match="replica 0: its connect was cancelled"):
            await manager.update(1)
