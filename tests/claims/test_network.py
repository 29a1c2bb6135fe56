"""Payloads of rings elsewhere: what an interrupt or an error leaves, and what goes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import pytest
from found_rings import HereAndElsewhere, consume, contents, here_and_elsewhere, names, ring_of, seen, some, take
from helpers import NETWORK, PATIENCE_S, eventually
from patience import PATIENCE

from transport import FoundRings, SharedRingBuffer, UCXXServer
from transport.claims import network
from transport.claims.batch import ClaimedRows
from transport.claims.connection import ClaimConnection
from transport.claims.mapped import RingsOfHost
from transport.claims.network import NetworkSource
from transport.claims.places import OnThisHost
from transport.claims.taken_part import TakenPart
from transport.errors import AuthenticationError, ClosedError, RingFullError
from transport.runtime.loop_thread import LoopThread
from transport.training.batch import Claimed

pytestmark = pytest.mark.ucx
SLOTS = 16


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with ring_of(prefix, slots=SLOTS) as made:
        yield made


@pytest.fixture
def queue(prefix: str, ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FoundRings]:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with FoundRings(OnThisHost(prefix)) as opened:
        yield opened


def test_a_take_that_is_interrupted_at_any_message_to_the_loop_can_be_repeated(
    ring: SharedRingBuffer, queue: FoundRings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had in hand goes back, and leaves room for others."""
    interrupted = Counter[str]()

    def interrupt(owner: type, name: str) -> None:
        tell = getattr(owner, name)

        def told(*arguments: Any) -> None:
            if threading.current_thread() is threading.main_thread() and interrupted[name] < 4:
                interrupted[name] += 1
                raise KeyboardInterrupt
            tell(*arguments)

        monkeypatch.setattr(owner, name, told)

    interrupt(NetworkSource, "_soon")
    interrupt(ClaimedRows, "soon")
    for number in range(SLOTS):
        ring.write_raw(bytes([number]))
    for _ in range(SLOTS):
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                assert consume(some(queue, 1)) == [True]
                break
    assert interrupted == {"_soon": 4, "soon": 4}


def test_what_an_idle_trainer_gives_back_while_it_takes_again_comes_again(
    ring: SharedRingBuffer, queue: FoundRings
) -> None:
    assert take(queue, 1) == []  # from here on payloads come
    of = queue._network._ranks[0]
    loop = of.demands._loop

    class GivenBack(deque[TakenPart]):
        """What came, of which the loop gives back all between the caller's look and its reach."""

        def popleft(self) -> TakenPart:
            asyncio.run_coroutine_threadsafe(rested(), loop).result(PATIENCE_S)
            return super().popleft()

    async def rested() -> None:
        network._rest(of)

    of.came = GivenBack()
    ring.write_raw(b"one")
    eventually(lambda: len(of.came) == 1, "it has come")
    assert take(queue, 1) == []
    of.came = deque()
    assert contents(parts := some(queue, 1)) == [b"one"]
    assert consume(parts) == [True]


def test_a_wrong_secret_is_the_callers_error(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with (
        SharedRingBuffer.create(prefix=prefix, slots=2, slot_bytes=64) as ring,
        UCXXServer(ring, mode="thread", secret=b"the secret of the run"),
        FoundRings(OnThisHost(prefix)) as queue,
    ):
        ring.write_raw(b"one")
        with pytest.raises(AuthenticationError):
            take(queue, 1, 2.0 * PATIENCE)


def test_a_ring_of_another_secret_is_left_out_and_named_and_the_others_go_on(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with (
        ring_of(prefix, secret=b"of another start"),
        FoundRings(OnThisHost(prefix)) as queue,
        contextlib.ExitStack() as rollouts,
    ):
        ring = rollouts.enter_context(ring_of(prefix))
        ring.write_raw(b"one")
        assert consume(some(queue, 1)) == [True]
        eventually(lambda: "shared secret" in str(queue.why_nothing()), "it is named")
        rollouts.close()
        eventually(lambda: not queue._network.slots(), "its connection has ended")
        assert take(queue, 1, 0.1) == []  # a rollout that is started again is waited for


def test_a_ring_of_another_secret_elsewhere_does_not_end_a_trainer_that_maps_rings(prefix: str) -> None:
    there = f"there-{prefix}"
    with (
        SharedRingBuffer.create(prefix=prefix, slots=2, slot_bytes=64) as mapped,
        ring_of(there, secret=b"of another start"),
        FoundRings(HereAndElsewhere(prefix, there)) as rings,
    ):
        eventually(lambda: take(rings, 1) == [] and "shared secret" in str(rings.why_nothing(0)), "it is refused")
        mapped.write_raw(b"one")
        assert consume(some(rings, 1)) == [True]
        assert take(rings, 1, 0.1) == []


def test_what_came_for_a_trainer_that_asks_for_nothing_any_more_goes_to_another_one(
    prefix: str, ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        ring.write_raw(bytes([number]))
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with FoundRings(OnThisHost(prefix)) as other:
        monkeypatch.setenv("TRANSPORT_CLAIM_LEASE_S", "0.5")
        with FoundRings(OnThisHost(prefix)) as idle:
            held = some(idle, 1)  # the other payload came with it
            eventually(lambda: ring.statistics().reading == 2)
            came = some(other, 1)
            assert consume(came) == [True]
            assert consume(held) == [True]


def test_what_came_for_an_idle_rank_goes_to_another_trainer_though_a_rank_beside_it_asks(
    prefix: str, ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        ring.write_raw(bytes([number]), readers=2)
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with FoundRings(OnThisHost(prefix)) as other:
        monkeypatch.setenv("TRANSPORT_CLAIM_LEASE_S", "0.3")
        with FoundRings(OnThisHost(prefix)) as rings:
            held = some(rings, 1, rank=1)  # the other payload came with it
            eventually(lambda: ring.native.depth(1)["claimed"] == 2)

            def came() -> list[Claimed]:
                consume(take(rings, 1, rank=0))
                return take(other, 1, rank=1)

            eventually(lambda: consume(came()) == [True], "it goes back, and comes")
            assert len(held) == 1


def test_every_ring_elsewhere_hears_that_the_holder_of_its_claims_lives(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = set()
    renew = ClaimConnection.renew

    def tells(connection: ClaimConnection) -> None:
        renewed.add(connection.ring)
        renew(connection)

    monkeypatch.setattr(ClaimConnection, "renew", tells)
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    monkeypatch.setenv("TRANSPORT_CLAIM_LEASE_S", "0.4")
    with ring_of(prefix) as first, ring_of(prefix) as second, FoundRings(OnThisHost(prefix)) as rings:
        for each in (first, second):
            each.write_raw(b"one")
        held = some(rings, 2)
        eventually(lambda: renewed == {first.ring_id, second.ring_id})
        assert sum(map(len, held)) == 2


# --- what nothing refers to any more ----------------------------------------------------------------------
def test_a_part_that_is_dropped_goes_back_and_others_of_the_same_answer_stay(
    ring: SharedRingBuffer, queue: FoundRings
) -> None:
    for number in range(4):
        ring.write_raw(bytes([number]))
    parts = [part for _ in range(4) for part in some(queue, 1)]
    dropped = names([parts.pop(1)])
    gc.collect()
    again = some(queue, 1)
    assert (names(again), seen(again).attempts.tolist(), seen(again).in_vain.tolist()) == (dropped, [2], [0])
    assert consume([*parts, *again]) == [True] * 4
    assert ring.native.depth(0)["done"] == 4


def test_a_part_that_is_dropped_goes_back_and_one_that_is_asked_again_has_the_same_answer(
    ring: SharedRingBuffer, queue: FoundRings
) -> None:
    ring.write_raw(b"one")
    assert len(some(queue, 1)) == 1
    parts = some(queue, 1)
    assert seen(parts).attempts.tolist() == [2]
    for _ in range(2):
        assert consume(parts) == [True]


def test_parts_that_were_consumed_leave_nothing_behind(ring: SharedRingBuffer, queue: FoundRings) -> None:
    for _ in range(20):
        ring.write_raw(b"one")
        assert consume(some(queue, 1)) == [True]
    gc.collect()
    connections = queue._network._claims
    assert connections is not None
    eventually(lambda: not connections._held, "the loop knows of no claim")


def test_payloads_come_through_other_connections_once_one_is_spent(
    ring: SharedRingBuffer, queue: FoundRings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.claims.connection._SPENT", 1)
    for number in range(6):
        ring.write_raw(bytes([number]))
        if number == 0:
            parts = some(queue, 1)
    parts += some(queue, 5)
    assert consume(parts) == [True] * 6


# --- rings here and elsewhere -------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [KeyboardInterrupt, RingFullError], ids=lambda error: error.__name__)
@pytest.mark.parametrize("failing", ["here", "elsewhere"])
def test_an_error_in_one_half_of_a_take_loses_nothing_of_the_other(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], failing: str
) -> None:
    with here_and_elsewhere() as (here, elsewhere, queue):
        good = elsewhere if failing == "here" else here
        half: Any = RingsOfHost if failing == "here" else NetworkSource
        taken = half.take_parts
        hit: list[bool] = []

        def fails(*arguments: Any, **named: Any) -> Any:
            if good.native.depth(0)["claimed"]:
                hit.append(True)
                raise error("an error of one half")
            return taken(*arguments, **named)

        monkeypatch.setattr(half, "take_parts", fails)
        good.write_raw(b"must not be lost")
        found: list[Claimed] = []
        give_up = time.monotonic() + 15
        while not hit:
            assert time.monotonic() < give_up
            try:
                found += take(queue, 2, 0.2)
            except error:
                break
        monkeypatch.setattr(half, "take_parts", taken)
        gc.collect()
        if not found:
            found = some(queue, 1)
        assert consume(found) == [True]
        del found
        eventually(lambda: here.statistics().free == elsewhere.statistics().free == SLOTS, "every slot is free")


# --- parts ------------------------------------------------------------------------------------------------
def test_a_part_that_is_consumed_counts_as_used_while_older_claims_are_held(
    ring: SharedRingBuffer, queue: FoundRings
) -> None:
    ring.write_raw(b"held for long")
    held = some(queue, 1)
    demands = queue._network._rank(0).demands
    assert demands is not None
    takers = demands._takers
    for _ in range(3):
        ring.write_raw(b"another")
        assert consume(some(queue, 1)) == [True]
        assert takers.unused == 0
    assert consume(held) == [True]
    assert takers.unused == 0


def test_claiming_through_a_client_that_was_closed_blames_no_fork() -> None:
    thread = LoopThread("client")
    thread.close()
    with pytest.raises(ClosedError) as caught:
        NetworkSource(dict, 1, thread=thread).take_parts(1, 0.0, 0, "test", None)
    assert "fork" not in str(caught.value)


def test_rings_are_followed_after_a_look_that_failed(ring: SharedRingBuffer, queue: FoundRings) -> None:
    find, looks = queue._network._served, itertools.count()

    def failing() -> Any:
        if next(looks) == 0:
            raise OSError("too many open files")
        return find()

    queue._network._served = failing
    ring.write_raw(b"one")
    assert some(queue, 1)
