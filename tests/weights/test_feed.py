"""The feed of a member: who is admitted, and what strangers can do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop
from helpers import PATIENCE_S, asynchronous, ended, until

from transport.errors import ParentLostError
from transport.weights.transfer.feed import Feed, Upstream, _next
from transport.weights.transfer.messages import Alive, FeedHello, FeedWelcome, Start, encode


@asynchronous
async def test_a_feed_admits_only_its_group_and_nobody_late() -> None:
    lost: list[str] = []
    feed = Feed(lost.append)
    await feed.open("127.0.0.1")
    try:
        with pytest.raises(ParentLostError, match="group's token"):
            await Upstream.connect("p", "127.0.0.1", feed.port, "wrong", "a")
        joining = asyncio.ensure_future(feed.joined(["a"]))
        first = await Upstream.connect("p", "127.0.0.1", feed.port, feed.token, "a")
        await joining
        with pytest.raises(ParentLostError, match="already connected"):
            await Upstream.connect("p", "127.0.0.1", feed.port, feed.token, "a")
        with pytest.raises(ParentLostError, match="joins with the next update"):
            await Upstream.connect("p", "127.0.0.1", feed.port, feed.token, "late")
        begin = Start(1, (("t", "float32", (3,)),))
        await feed.tell(begin, ["a", "not there"])
        assert await first.next() == begin
        feed.drop("a")
        with pytest.raises(ParentLostError):
            await first.next()
        first.close()
    finally:
        await feed.close()


@asynchronous
async def test_a_child_is_told_nothing_from_the_moment_in_which_its_connection_is_gone() -> None:
    feed = Feed(lambda _: None)
    await feed.open("127.0.0.1")
    try:
        for number in range(20):
            child = await Upstream.connect("p", "127.0.0.1", feed.port, feed.token, f"c{number}")
            await until(lambda number=number: f"c{number}" in feed.children)
            child._writer.transport.abort()
            while f"c{number}" not in feed.left:
                await feed.tell(Start(1, (("t" * 4096, "float32", (3,)),)), [f"c{number}"])
                await asyncio.sleep(0)
            child.close()
    finally:
        await feed.close()


CROWD = 400  # children of one parent

both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@asynchronous
async def test_a_stranger_at_a_feed_may_announce_no_more_than_a_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.weights.transfer.feed._HELLO_S", 1000.0)
    feed = Feed(lambda _: None)
    await feed.open("127.0.0.1")
    try:
        for said in (
            b"\1\x10\0\0",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\0",
            encode(Start(1, (("x" * 4096, "", ()),))),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", feed.port)
            writer.write(said)
            with contextlib.suppress(ConnectionError):  # ended with some of it unread
                assert await reader.read() == b""
            writer.close()
    finally:
        await feed.close()


@both_loops
def test_strangers_that_come_at_once_are_counted_as_they_come(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.weights.transfer.feed._HELLO_S", 1000.0)
    monkeypatch.setattr("transport.weights.transfer.feed._MOST_STRANGERS", 3)

    async def coming() -> None:
        feed = Feed(lambda _: None)
        await feed.open("127.0.0.1")
        crowd = [socket.create_connection(("127.0.0.1", feed.port)) for _ in range(40)]  # while the loop waits
        await until(lambda: sum(map(ended, crowd)) >= 37)
        assert len(crowd) - sum(map(ended, crowd)) == 3
        for each in crowd:
            each.close()
        await feed.close()

    run(coming())


@asynchronous
async def test_members_that_were_admitted_take_no_place_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.weights.transfer.feed._MOST_STRANGERS", 1)
    feed = Feed(lambda _: None)
    await feed.open("127.0.0.1")
    async with contextlib.AsyncExitStack() as members:
        members.push_async_callback(feed.close)
        for name in "abc":
            member = await Upstream.connect("p", "127.0.0.1", feed.port, feed.token, name)
            members.callback(member.close)
        assert feed.children == set("abc")


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Feed]:
    feed = Feed(lambda _: None)
    await feed.open("127.0.0.1")
    try:
        yield feed
    finally:
        await feed.close()


@both_loops
def test_a_group_of_hundreds_that_comes_at_once_is_admitted(run: Callable[..., None]) -> None:
    async def coming() -> None:
        async with opened() as feed:
            at = ("127.0.0.1", feed.port)
            crowd = [socket.create_connection(at, 10.0) for _ in range(CROWD)]  # while the loop is busy
            for number, each in enumerate(crowd):
                each.sendall(encode(FeedHello(feed.token, f"member {number}")))
            await until(lambda: len(feed.children) == CROWD or any(map(ended, crowd)))
            admitted = len(feed.children)
            for each in crowd:
                each.close()
        assert admitted == CROWD

    run(coming())


@both_loops
def test_a_feed_that_closes_ends_the_connections_that_it_has_just_accepted(run: Callable[..., None]) -> None:
    async def closing() -> None:
        feed = Feed(lambda _: None)
        await feed.open("127.0.0.1")
        crowd = [socket.create_connection(("127.0.0.1", feed.port)) for _ in range(3)]
        while not feed._tasks:  # noqa: ASYNC110 - at no later moment: the tasks are there, and have not begun
            await asyncio.sleep(0)
        await feed.close()
        await until(lambda: all(map(ended, crowd)))
        for each in crowd:
            each.close()

    run(closing())


@pytest.mark.slow
@asynchronous
async def test_a_parent_is_not_lost_for_time_in_which_the_child_did_not_look() -> None:
    feed = Feed(lambda _: None, stall_s=1.0)
    await feed.open("127.0.0.1")
    upstream = await Upstream.connect("parent", "127.0.0.1", feed.port, feed.token, "child", stall_s=1.0)
    try:
        time.sleep(1.5)  # noqa: ASYNC251 - both are away
        await asyncio.sleep(0.1)  # a timer that was due has fired
        await feed.tell(Start(1, ()), ["child"])
        assert await upstream.next() == Start(1, ())
    finally:
        upstream.close()
        await feed.close()


@asynchronous
async def test_a_child_that_takes_a_long_message_slowly_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(lambda _: None, stall_s=0.05)
    await feed.open("127.0.0.1")
    try:
        with socket.create_connection(("127.0.0.1", feed.port), 30.0) as child:
            child.sendall(encode(FeedHello(feed.token, "child")))
            await feed.joined(["child"])
            sent, taken = feed._sent, bytearray()

            def look(name: str, writer: asyncio.StreamWriter) -> int:
                found = sent(name, writer)
                taken.extend(child.recv(1 << 20))  # what leaves the feed next is seen by the next look
                return found

            monkeypatch.setattr(feed, "_sent", look)
            message = Start(1, (("x" * (16 << 20), "float32", ()),))
            await feed.tell(message, ["child"])
            assert feed.children == {"child"}
            assert len(taken) > 4 << 20, "it was looked at several times"
    finally:
        await feed.close()


@asynchronous
async def test_every_child_hears_that_its_parent_lives() -> None:
    feed = Feed(lambda _: None, stall_s=0.1)
    await feed.open("127.0.0.1")
    children = []
    try:
        for name in "ab":
            children.append(await asyncio.open_connection("127.0.0.1", feed.port))
            children[-1][1].write(encode(FeedHello(feed.token, name)))
        for reader, _ in children:
            heard = [(await _next(reader, PATIENCE_S))[0] for _ in range(3)]
            assert [type(each) for each in heard] == [FeedWelcome, Alive, Alive]
    finally:
        for _, each in children:
            each.close()
        await feed.close()


@asynchronous
async def test_a_message_that_comes_slowly_is_no_silence() -> None:
    class Slow(asyncio.StreamReader):
        async def read(self, n: int = -1) -> bytes:
            await asyncio.sleep(0.02)
            return await super().read(min(n, 1))

    message = Start(1, (("x" * 100, "float32", ()),))
    reader = Slow()
    reader.feed_data(encode(message))
    assert (await _next(reader, 1.0))[0] == message  # two seconds in all
    with pytest.raises(TimeoutError):
        await _next(asyncio.StreamReader(), 0.01)


@asynchronous
async def test_a_refused_greeting_makes_no_room_for_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.weights.transfer.feed._HELLO_S", 1000.0)
    monkeypatch.setattr("transport.weights.transfer.feed._MOST_STRANGERS", 3)
    feed = Feed(lambda _: None)
    await feed.open("127.0.0.1")
    silent = []
    try:
        for _ in range(3):
            if len(silent) < 2:
                with pytest.raises(ParentLostError, match="group's token"):
                    await Upstream.connect("p", "127.0.0.1", feed.port, "wrong", "a")
            silent.append(await asyncio.open_connection("127.0.0.1", feed.port))
            await until(lambda: len(feed._strangers) == len(silent))
        reader, writer = await asyncio.open_connection("127.0.0.1", feed.port)
        assert await reader.read() == b""
        writer.close()
    finally:
        for _, each in silent:
            each.close()
        await feed.close()
