"""FINISH and the end of its connection: what was consumed is told to who consumed it, by whichever port is there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import pytest
from helpers import asynchronous, eventually, settings_with, until
from loopback import at, lasting_port
from takes import LONG_S, SLOTS, addresses, broken_between, consume, ended, link_of, remote, seen, take

from transport import SharedRingBuffer, UCXXClient, UCXXServer
from transport.claims.batch import Verdict
from transport.claims.outcomes import Outcomes, Served
from transport.claims.taken_part import TakenPart
from transport.client.connections.pool import PortKey
from transport.client.connections.routes import Routes
from transport.wire.frames import MOST_UNANSWERED

pytestmark = pytest.mark.ucx


def kill_listener(ring: SharedRingBuffer, address: str) -> None:
    [doomed] = [each.pid for each in ring.native.owners() if address.endswith(f":{each.port}")]
    os.kill(doomed, signal.SIGKILL)


class Taken(NamedTuple):
    """Payloads that a client has taken through the first of a ring's listeners, and the address of the second."""

    client: UCXXClient
    batch: TakenPart
    first: str
    second: str


@contextlib.asynccontextmanager
async def taken(ring: SharedRingBuffer, count: int = 1, *, ports: int = 2, **arguments: Any) -> AsyncIterator[Taken]:
    for _ in range(count):
        ring.write_raw(b"a payload")
    with UCXXServer(ring, ports=(0,) * ports):
        found = addresses(ring)
        async with remote(**arguments) as client:
            yield Taken(client, await take(client, found[0], count), found[0], found[-1])


def killed_after_the_end(ring: SharedRingBuffer, of: Taken, *then: Callable[[], object]) -> None:
    """The listener is killed when the ring has done what the next message asks, and its answer is lost."""
    broken_between(
        of.batch,
        lambda: eventually(lambda: ring.statistics().free == SLOTS, "the ring has ended the claims"),
        *then,
        lambda: kill_listener(ring, of.first),
    )


@contextlib.contextmanager
def stopped(ring: SharedRingBuffer, address: str) -> Iterator[None]:
    """The listener at this address does not run."""
    [listener] = [each.pid for each in ring.native.owners() if address.endswith(f":{each.port}")]
    os.kill(listener, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # which the test has killed meanwhile
            os.kill(listener, signal.SIGCONT)


@contextlib.asynccontextmanager
async def its_port_anothers(ring: SharedRingBuffer) -> AsyncIterator[TakenPart]:
    """A payload whose ring consumes it without an answer, and whose only port has another ring from then on."""
    ring.write_raw(b"a payload")
    with (
        SharedRingBuffer.create(slots=SLOTS, slot_bytes=4096) as another,
        contextlib.ExitStack() as later,
        UCXXServer(ring, ports=(port := lasting_port(),), mode="thread") as server,
    ):
        async with remote() as client:
            batch = await take(client, addresses(ring)[0], 1)
            broken_between(
                batch,
                lambda: eventually(lambda: ring.statistics().free == SLOTS, "the ring has consumed it"),
                server.close,
                lambda: later.enter_context(UCXXServer(another, ports=(port,), mode="thread")),
            )
            yield batch


async def comes_again(of: Taken) -> None:
    """The payload is taken through the other port, for the second time, and consumed."""
    again = await take(of.client, of.second, 1, wait_s=LONG_S)
    assert (seen(again)[0].attempts, (await consume(again)).tolist()) == (2, [True])


@asynchronous
async def test_what_was_consumed_before_its_listener_was_killed_is_told_by_another_port(ring: SharedRingBuffer) -> None:
    async with taken(ring, 3) as of:
        killed_after_the_end(ring, of)
        assert (await consume(of.batch)).tolist() == [True] * 3


@asynchronous
async def test_what_was_not_consumed_when_its_listener_was_killed_is_refused_and_anothers(
    ring: SharedRingBuffer,
) -> None:
    async with taken(ring) as of:
        send = link_of(of.batch)._send

        def never_sent() -> None:
            kill_listener(ring, of.first)
            send()

        link_of(of.batch)._send = never_sent  # type: ignore[method-assign]
        _, verdicts = await asyncio.gather(comes_again(of), consume(of.batch))
        assert verdicts.tolist() == [False]


@pytest.mark.nightly
@asynchronous
async def test_a_finish_that_a_stopped_listener_has_not_seen_is_refused_when_it_goes_on(ring: SharedRingBuffer) -> None:
    async with taken(ring, settings=settings_with(read_timeout_s=0.5)) as of:
        with stopped(ring, of.first):
            assert (await consume(of.batch)).tolist() == [False]
        await comes_again(of)


@asynchronous
async def test_a_consume_whose_question_fails_is_answered_when_it_is_asked_again(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with taken(ring) as of:
        killed_after_the_end(ring, of)
        with monkeypatch.context() as patch:

            async def no_thread(*_: Any) -> Any:
                raise RuntimeError("can't start new thread")

            patch.setattr(Outcomes, "of", no_thread)
            assert (await consume(of.batch)).tolist() == [False]
        assert of.batch.claims.verdicts[of.batch.positions].tolist() == [Verdict.IN_QUESTION]
        assert (await consume(of.batch)).tolist() == [True]


@asynchronous
async def test_a_consume_that_is_cancelled_has_the_same_answer_when_it_is_asked_again(ring: SharedRingBuffer) -> None:
    for _ in range(3):
        ring.write_raw(b"trained on")
    with UCXXServer(ring, mode="thread"):
        async with remote() as client:
            batch = await take(client, addresses(ring)[0], 3)
            for turns in range(3):
                doomed = asyncio.create_task(consume(batch, [turns]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                doomed.cancel()
                await asyncio.gather(doomed, return_exceptions=True)
            for _ in range(2):
                assert (await consume(batch)).tolist() == [True] * 3


@asynchronous
async def test_what_was_consumed_is_told_by_a_ring_that_was_out_of_reach_when_it_is_asked_again(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        ring.write_raw(b"its answer is lost")
    monkeypatch.setattr(Outcomes, "patience_s", 0.5)
    port = lasting_port()
    with UCXXServer(ring, ports=(port,), mode="thread") as server:
        async with remote() as client:
            batch = await take(client, at(port), 2)
            broken_between(
                batch,
                lambda: eventually(lambda: ring.statistics().free == SLOTS - 1, "the ring has consumed it"),
                server.close,
            )
            assert (await consume(batch, [0])).tolist() == [False]
            assert "what became of 1 payload, and no port of the ring has answered" in caplog.text
            monkeypatch.setattr(Outcomes, "patience_s", LONG_S)
            with UCXXServer(ring, ports=(port,), mode="thread"):
                for _ in range(2):
                    assert (await consume(batch)).tolist() == [True, False]  # of the second it was not asked in time


@asynchronous
async def test_another_ring_at_the_ports_of_one_that_is_gone_leaves_its_finishes_unknown(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outcomes, "patience_s", 0.5)
    async with its_port_anothers(ring) as batch:
        assert (await consume(batch)).tolist() == [False]
        assert not any(batch.in_question())
        assert "what became of 1 payload, and no port of the ring knows" in caplog.text


@asynchronous
async def test_what_was_consumed_is_told_at_another_port_that_is_found_once_the_only_one_has_another_ring(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as later:
        async with its_port_anothers(ring) as batch:
            found, refused = [Served()], Routes.serves_another
            link_of(batch).served = lambda: found[-1]

            def serve(host: str) -> None:
                if len(found) == 1:
                    moved = later.enter_context(UCXXServer(ring, mode="thread"))
                    found.append(Served(((host, moved.ports[0]),)))

            def told(routes: Routes, of: str, port: PortKey) -> None:
                refused(routes, of, port)
                asyncio.get_running_loop().call_soon(serve, port[0])  # after who asked has heard the refusal

            monkeypatch.setattr(Routes, "serves_another", told)
            assert (await consume(batch)).tolist() == [True]


@asynchronous
async def test_what_was_consumed_is_told_by_the_segment_where_the_only_port_has_another_ring(
    ring: SharedRingBuffer,
) -> None:
    async with its_port_anothers(ring) as batch:
        link_of(batch).served = lambda: Served((), ring.name)
        assert (await consume(batch)).tolist() == [True]


@asynchronous
async def test_a_port_that_has_another_ring_by_now_does_not_keep_the_others_from_being_asked(
    ring: SharedRingBuffer,
) -> None:
    ring.write_raw(b"x")
    with (
        SharedRingBuffer.create(slots=1, slot_bytes=64) as another,
        UCXXServer(another, mode="thread") as moved,
        UCXXServer(ring, mode="thread"),
    ):
        async with remote() as client:
            batch = await take(client, addresses(ring)[0], 1)
            link = link_of(batch)
            host, port = link.link.port
            link.served = lambda: Served(((host, moved.ports[0]), (host, port)))
            broken_between(batch, lambda: eventually(lambda: ring.statistics().free == SLOTS))
            assert (await consume(batch)).tolist() == [True]


# --- ends that are not consumption --------------------------------------------------------------------
@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("how", [Verdict.DEAD, Verdict.AGED], ids=lambda how: how.name.lower())
@asynchronous
async def test_an_end_that_was_done_before_its_listener_was_killed_is_told_by_another_port(
    ring: SharedRingBuffer, how: Verdict
) -> None:
    async with taken(ring) as of:
        killed_after_the_end(ring, of)
        link, rows = link_of(of.batch), of.batch.rows
        assert await ended(of.batch, how, "no use", "trainer 0") == [True]
        assert [reason for *_, reason, _, _ in ring.native.failures()] == ["no use"]
        # Of the same claim another end was never done.
        assert await of.client._claims.outcomes.of(link.link, rows) == [1]


@asynchronous
async def test_an_end_that_a_killed_listener_had_not_seen_is_refused_and_the_payload_comes_again(
    ring: SharedRingBuffer,
) -> None:
    async with taken(ring, settings=settings_with(read_timeout_s=0.5)) as of:
        with stopped(ring, of.first):
            assert await ended(of.batch, Verdict.DEAD, "no use", "trainer 0") == [False]
        await comes_again(of)
        assert ring.native.failures() == []


@asynchronous
async def test_what_is_given_back_while_its_connection_breaks_comes_again(ring: SharedRingBuffer) -> None:
    async with taken(ring) as of:
        with stopped(ring, of.first):
            of.batch.release(LONG_S)
            kill_listener(ring, of.first)
        await comes_again(of)  # without the delay, which the ring has not heard
        assert (await consume(of.batch)).tolist() == [False]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("then", ["finish", "end"])
@asynchronous
async def test_a_listener_that_stopped_with_a_full_window_of_unanswered_ends_keeps_no_later_one_waiting(
    then: str,
) -> None:
    with (
        SharedRingBuffer.create(slots=MOST_UNANSWERED + 1, slot_bytes=64) as ring,
        UCXXServer(ring, ports=(0,), settings=settings_with(watchdog_s=LONG_S)),
    ):
        for _ in range(MOST_UNANSWERED + 1):
            ring.write_raw(b"one")
        [address] = addresses(ring)
        [stopped] = [each.pid for each in ring.native.owners() if address.endswith(f":{each.port}")]
        async with remote(settings=settings_with(read_timeout_s=1.0)) as client:
            first, second = await take(client, address, MOST_UNANSWERED), await take(client, address, 1)
            link = link_of(second)
            os.kill(stopped, signal.SIGSTOP)
            try:
                consuming = asyncio.ensure_future(consume(first))
                await until(lambda: link._unanswered == MOST_UNANSWERED, "everything is sent")
                consuming.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await consuming
                async with asyncio.timeout(LONG_S / 4):
                    if then == "finish":
                        assert (await consume(second)).tolist() == [False]
                    else:
                        assert await ended(second, Verdict.DEAD) == [False]
                assert link.lost
            finally:
                os.kill(stopped, signal.SIGCONT)
