"""Rendezvous in real processes over the embedded store: members killed and stopped, hosts killed, stores lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Child, asynchronous, eventually, until
from redis_server import needs_redis, redis_server

from transport.decoders import json_decoder
from transport.errors import ClosedError, RunLostError, StoreUnavailableError, StoreUnsuitableError
from transport.rendezvous import Archive, Closing, Place, Reason, Rendezvous, Rules
from transport.rendezvous.records import Round, RoundPhase
from transport.store.memory import MemoryStore
from transport.store.open import open_store

RUN = "run"
QUICK: dict[str, Any] = {
    "lease_s": 1.0,
    "poll_s": 0.1,
    "last_call_s": 0.5,
    "join_timeout_s": 30.0,
    "store_patience_s": 1.0,
}

# Joins again and again, and does what it is told in between. Ends with the run's exit code.
MEMBER = """
import asyncio, json, sys
from transport.errors import RunLostError
from transport.rendezvous import Archive, Place, Reason, Rendezvous, Rules
from transport.storage.urls import parse_url
from transport.store import RedisStore
from transport.store.open import open_store

url, archive, rules, name = sys.argv[1:]

def say(*words):
    print(*words, flush=True)

async def told(words):
    return (await words.readline()).decode().split()

async def main():
    words = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    with RedisStore(parse_url(url), patience_s=0.3) if url.startswith("redis") else open_store(url) as store:
        options = dict(archive=Archive(archive), address=name, member=name)
        async with Rendezvous(store, "run", Rules(**json.loads(rules)), **options) as rendezvous:
            say("here")
            while True:
                found = await rendezvous.join()
                if not isinstance(found, Place):
                    break
                say("rank", found.round, found.rank, found.size)
                over, order = asyncio.create_task(rendezvous.over()), asyncio.create_task(told(words))
                await asyncio.wait([over, order], return_when=asyncio.FIRST_COMPLETED)
                if order.done() and order.result()[:1] == ["done"]:
                    await rendezvous.finish()
                elif order.done() and order.result()[:1] == ["close"]:
                    await rendezvous.close(Reason(order.result()[1]), "told to")
                elif not order.done():
                    order.cancel()
                await over
            return rendezvous.exit_code

try:
    status = asyncio.run(main())
except RunLostError as error:
    say("lost", error)
    status = 1
sys.exit(status)
"""


class MemberGroup:
    """Member processes of one run."""

    def __init__(self, folder: Path, url: str, **rules: Any) -> None:
        self.url = url
        self.archive = folder / "closed.json"
        self._rules = json.dumps({**QUICK, **rules})
        self._stack = contextlib.ExitStack()
        self._store = self._stack.enter_context(open_store(url))

    def member(self, name: str) -> Child:
        child = self._stack.enter_context(Child(MEMBER, self.url, self.archive, self._rules, name))
        assert child.line() == "here"
        return child

    def round(self) -> Round | None:
        entry = self._store.get(f"rendezvous/{RUN}/round")
        return None if entry is None else json_decoder(Round)(entry.value)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> MemberGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[MemberGroup]:
    with MemberGroup(tmp_path, f"sqlite://{tmp_path}/store.sqlite3", least=2) as group:
        yield group


def ranks(*members: Child) -> list[str]:
    return sorted(member.line() for member in members)


# --- processes ------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_spare_takes_the_place_of_the_killed_host_and_everybody_ends_well(group: MemberGroup) -> None:
    members = [group.member("a"), group.member("b")]
    assert ranks(*members) == ["rank 1 0 2", "rank 1 1 2"]
    spare = group.member("c")
    survivor, host = sorted(members, key=lambda each: each is members["ab".index(group.round().host)])
    host.kill()
    assert ranks(survivor, spare) == ["rank 2 0 2", "rank 2 1 2"]
    late = group.member("d")
    for each in (survivor, spare):
        each.tell("done")
    assert [each.wait() for each in (survivor, spare, late)] == [0, 0, 0]
    assert Archive(group.archive).read().reason is Reason.SUCCESS


@pytest.mark.slow
@pytest.mark.parametrize(("reason", "code"), [("no_restart", 93)])
def test_waiters_end_with_the_code_of_the_reason(group: MemberGroup, reason: str, code: int) -> None:
    members = [group.member("a"), group.member("b")]
    ranks(*members)
    spare = group.member("c")
    members[1].tell(f"close {reason}")
    assert [each.wait() for each in (*members, spare)] == [code] * 3
    assert group.round().phase is RoundPhase.CLOSED


@pytest.mark.slow
def test_a_stopped_member_is_replaced_and_comes_back_as_a_spare(group: MemberGroup) -> None:
    members = [group.member("a"), group.member("b")]
    ranks(*members)
    spare = group.member("c")
    members[1].process.send_signal(signal.SIGSTOP)
    assert ranks(members[0], spare) == ["rank 2 0 2", "rank 2 1 2"]
    members[1].process.send_signal(signal.SIGCONT)
    members[0].tell("close success")
    assert [each.wait() for each in (*members, spare)] == [0, 0, 0]


@needs_redis
@pytest.mark.slow
def test_a_store_that_is_lost_ends_everybody_within_its_patience(tmp_path: Path) -> None:
    with redis_server() as server, MemberGroup(tmp_path, server.place(), least=2) as group:
        members = [group.member("a"), group.member("b")]
        ranks(*members)
        spare = group.member("c")
        server.kill()
        for each in (*members, spare):
            assert "store unavailable for" in each.line()
        assert [each.wait() for each in (*members, spare)] == [1, 1, 1]


@needs_redis
@pytest.mark.slow
def test_a_store_that_is_lost_after_the_end_costs_nothing(tmp_path: Path) -> None:
    with redis_server() as server, MemberGroup(tmp_path, server.place(), least=1) as group:
        member = group.member("a")
        ranks(member)
        spare = group.member("b")
        spare.process.send_signal(signal.SIGSTOP)
        member.tell("close no_restart")
        assert member.wait() == 93
        server.kill()
        spare.process.send_signal(signal.SIGCONT)
        assert spare.wait() == 93


@needs_redis
@pytest.mark.slow
def test_a_store_that_comes_back_in_time_costs_rounds_and_nothing_else(tmp_path: Path) -> None:
    with redis_server() as server, MemberGroup(tmp_path, server.place(), least=2, store_patience_s=15.0) as group:
        members = [group.member("a"), group.member("b")]
        ranks(*members)
        server.kill()
        server.start()
        for each in members:
            each.tell("done")
        left = list(members)
        while left:  # a member whose lease has ended joins again, and is done again
            for each in tuple(left):
                try:
                    if each.line().startswith("rank"):
                        each.tell("done")
                except (AssertionError, BrokenPipeError):
                    left.remove(each)
        assert [each.wait() for each in members] == [0, 0]


# --- in this process ----------------------------------------------------------------------------------------
@asynchronous
async def test_a_rendezvous_of_one_begins_finishes_and_says_so() -> None:
    with MemoryStore() as store:
        async with Rendezvous(store, RUN, Rules(**QUICK), address="here:1") as alone:
            place = await alone.join()
            assert isinstance(place, Place)
            assert (place.rank, place.size, place.leader, alone.is_host) == (0, 1, "here:1", True)
            assert [peer.member for peer in (await alone.roster()).peers] == [alone.member]
            closing = await alone.finish()
            assert closing is not None
            assert closing.reason is Reason.SUCCESS
            assert alone.exit_code == 0
            assert await alone.join() == closing


@asynchronous
async def test_a_restart_ends_in_a_new_round() -> None:
    with MemoryStore() as store:
        async with Rendezvous(store, RUN, Rules(**QUICK)) as alone:
            assert (await alone.join()).round == 1
            assert await alone.restart("no memory") is None
            assert (await alone.join()).round == 2


@asynchronous
async def test_what_members_say_is_recorded_as_far_as_it_is_unicode_and_as_records_have_room() -> None:
    said = f"no checkpoint {os.fsdecode(bytes([255]))}.pt" + "!" * 5000  # as names of files are
    with MemoryStore() as store:
        async with Rendezvous(store, RUN, Rules(**QUICK)) as alone:
            await alone.join()
            assert await alone.restart(said) is None
            assert (await alone.join()).round == 2
            closing = await alone.close(Reason.NO_RESTART, said)
            assert closing.message.startswith("no checkpoint ?.pt!")


@asynchronous
async def test_a_cancelled_wait_changes_nothing() -> None:
    with MemoryStore() as store:
        async with Rendezvous(store, RUN, Rules(**{**QUICK, "least": 2})) as one:
            waiting = asyncio.create_task(one.join())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            async with Rendezvous(store, RUN, Rules(**{**QUICK, "least": 2})) as other:
                found = await asyncio.gather(one.join(), other.join())
                assert sorted(place.rank for place in found) == [0, 1]


@asynchronous
async def test_leaving_ends_waits_and_frees_the_place_at_once() -> None:
    with MemoryStore() as store:
        rules = Rules(**{**QUICK, "lease_s": 3600.0})
        async with Rendezvous(store, RUN, rules) as spare:
            async with Rendezvous(store, RUN, rules) as first:
                await first.join()
                waiting = asyncio.create_task(spare.join())
                over = asyncio.create_task(first.over())
                await asyncio.sleep(0)
            with pytest.raises(ClosedError):
                await over
            assert (await waiting).round == 2
            await spare.close(Reason.SUCCESS)
        with pytest.raises(ClosedError):
            await spare.join()


class Away(MemoryStore):
    """A store that can be cut off, or hold its answers back."""

    away = False

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()

    def _get_many(self, keys: Any) -> Any:
        if self.away:
            raise StoreUnavailableError("the store is away")
        self.answers.wait()
        return super()._get_many(keys)

    def _renew(self, leases: Any, lease_s: float) -> Any:
        self.answers.wait()
        return super()._renew(leases, lease_s)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("closed", [True, False])
@asynchronous
async def test_waiters_learn_of_the_stores_loss_or_from_the_archive(tmp_path: Path, closed: bool) -> None:
    archive = Archive(tmp_path / "closed.json")
    with Away() as store:
        async with Rendezvous(store, RUN, Rules(**QUICK), archive=archive) as member:
            await member.join()
            waiting = asyncio.create_task(member.wait_closed())
            store.away = True
            if closed:
                entry = member._session._member.incarnation
                archive.write(Closing(run="run", reason=Reason.NO_RESTART, round=1, incarnation=entry, by="x"))
                assert (await waiting).reason is Reason.NO_RESTART
                assert member.exit_code == 93
            else:
                with pytest.raises(RunLostError, match="store unavailable for"):
                    await waiting
                assert member.exit_code == 1


@asynchronous
async def test_a_member_whose_store_holds_its_answers_back_stops_when_its_lease_has_ended() -> None:
    """Others may have its place by then, though no call has failed."""
    with Away() as store:
        async with Rendezvous(store, RUN, Rules(**{**QUICK, "store_patience_s": 60.0})) as member:
            await member.join()
            store.answers.clear()
            assert await member.over() is None
            again = asyncio.create_task(member.join())
            await asyncio.sleep(0)
            store.answers.set()
            assert (await again).round == 2


@pytest.mark.nightly
@asynchronous
async def test_a_store_that_never_answers_is_lost() -> None:
    with Away() as store:
        async with Rendezvous(store, RUN, Rules(**QUICK)) as member:
            store.answers.clear()
            with pytest.raises(RunLostError, match="a call does not return"):
                await member.wait_closed()
            store.answers.set()


@asynchronous
async def test_another_programs_record_ends_the_member_with_an_error_that_names_it() -> None:
    with MemoryStore() as store:
        store.put(f"rendezvous/{RUN}/round", b"mine!")
        async with Rendezvous(store, RUN, Rules(**QUICK)) as member:
            with pytest.raises(StoreUnsuitableError, match="run/round"):
                await member.join()


def test_leases_go_on_while_the_loop_is_blocked() -> None:
    """A program that keeps its loop from running must not lose its place for it."""

    async def main() -> None:
        with MemoryStore() as store:
            async with Rendezvous(store, RUN, Rules(**QUICK)) as member:
                place = await member.join()
                seat = f"rendezvous/{RUN}/1/seat/0"
                lease = store._records[seat].ends_at
                eventually(lambda: store._records[seat].ends_at > lease + QUICK["lease_s"])
                assert place.round == 1
                assert member.place == place

    asyncio.run(main())


@asynchronous
async def test_the_end_of_another_run_in_the_archive_is_not_this_runs(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "closed.json")
    with MemoryStore() as store:
        for run in ("run-7", "run-8"):
            async with Rendezvous(store, run, Rules(**QUICK), archive=archive) as member:
                assert isinstance(await member.join(), Place)
                await member.finish()
            assert archive.read().run == run


@asynchronous
async def test_a_run_does_not_delete_what_another_run_below_its_name_has(tmp_path: Path) -> None:
    with MemoryStore() as store:
        async with (
            Rendezvous(store, "exp/1", Rules(**QUICK)) as other,
            Rendezvous(store, "exp", Rules(**QUICK)) as member,
        ):
            place = await other.join()
            for _ in range(3):  # a third round deletes the records of the first
                await member.join()
                await member.restart("again")
            assert (await other.roster()).round == place.round
            assert (await other.finish()).reason is Reason.SUCCESS


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("call", ["finish", "restart", "close"])
@asynchronous
async def test_calls_and_the_end_do_not_wait_for_a_store_that_hangs(call: str) -> None:
    threads = threading.active_count()
    with Away() as store:
        try:
            async with Rendezvous(store, RUN, Rules(**QUICK)) as member:
                await member.join()
                store.answers.clear()
                arguments = {"restart": ("why",), "close": (Reason.FAILURE,)}.get(call, ())
                with pytest.raises(RunLostError, match="does not return"):
                    await getattr(member, call)(*arguments)
                assert member.place is None  # its lease has ended
        finally:
            store.answers.set()
            await until(lambda: threading.active_count() == threads)
