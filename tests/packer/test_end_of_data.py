"""Rollouts that close cleanly say their end, and trainers learn that no payload comes any more."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Child, eventually
from packers import collected, fetch
from transport.packer.stream import BatchStream

from transport import Rollout, Schema, SharedRingBuffer, UCXXServer
from transport._ring import segments
from transport.packer.mixin import TicketTrainer
from transport.queue import Claim, FoundRings, open_queue
from transport.ring.attachment import remove_dead

pytestmark = pytest.mark.ucx
SCHEMA = Schema.of(number=("int64",))
both = pytest.mark.parametrize("wires", ["mapped", "tcp"])
mapped = pytest.mark.parametrize("wires", ["mapped"])
tcp = pytest.mark.parametrize("wires", ["tcp"])

# Writes, says so, and closes cleanly when it is told to; its end waits for the trainers, for so long. At so many ports.
ROLLOUT = """
import sys
from transport import Rollout, Schema
from transport.packer.options import ServerOptions
from transport.queue import open_queue
from transport.settings import Settings
with (
    open_queue(sys.argv[1]) as queue,
    Rollout(
        Schema.of(number=("int64",)), rings=queue, drain_s=float(sys.argv[3]), settings=Settings(linger_s=1.0),
        server=ServerOptions(ports=(0,) * int(sys.argv[4]), addresses=("127.0.0.1",)),
    ) as rollout,
):
    for number in range(int(sys.argv[2])):
        rollout.write_to_buffer({"number": number})
    print(*rollout.ports, flush=True)
    sys.stdin.readline()
"""

# Claims at addresses, and keeps its claims.
HOLDER = """
import sys
from transport import Schema
from transport.packer.mixin import TicketTrainer
from transport.queue import open_queue
with open_queue(sys.argv[1]) as queue, TicketTrainer(queue=queue, schemas=[Schema.of(number=("int64",))]) as trainer:
    claims = []
    while len(claims) < int(sys.argv[2]):
        claims += trainer.claim_tickets(int(sys.argv[2]) - len(claims), 30.0)
    print("holds", flush=True)
    sys.stdin.readline()
    trainer.start_prefetch(claims)
    batch = trainer.collect_prefetch()
    print(len(trainer.consume(batch)), len(batch.in_question), flush=True)
    while not trainer.finished():
        trainer.claim_tickets(1, 0.05)
"""


@pytest.fixture
def url(wires: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRANSPORT_WIRES", wires)
    return f"rings:end-{os.getpid()}-{wires}-"


# Serves its ring itself, writes, says the end when it is told to, and lives on.
WRITER = """
import sys
from transport import Rollout, Schema
from transport.packer.options import ServerOptions
rollout = Rollout(
    Schema.of(number=("int64",)), name=sys.argv[1], mode="thread", slots=4,
    server=ServerOptions(ports=(int(sys.argv[2]),), addresses=("127.0.0.1",)),
)
rollout.write_to_buffer({"number": 1})
print(*rollout.ports, flush=True)
sys.stdin.readline()
rollout.ring.end_data()
sys.stdin.readline()
rollout.close()
"""


@contextlib.contextmanager
def rollouts(
    url: str, *counts: int, ports: list[str] | None = None, drain_s: float = 30.0, listeners: int = 1
) -> Iterator[list[Child]]:
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(ROLLOUT, url, count, drain_s, listeners)) for count in counts]
        for child in children:
            (ports if ports is not None else []).append(child.line())
        yield children
        for child in children:
            child.wait()


def end(child: Child) -> None:
    child.tell("end")


def consume(trainer: TicketTrainer, claims: list[Claim]) -> int:
    batch = collected(trainer, claims)
    count = len(trainer.consume(batch))
    batch.release()
    return count


def consumed(trainer: TicketTrainer) -> int:
    """Consume what comes until no more comes; how many."""
    count = 0
    while not trainer.finished():
        if claims := trainer.claim_tickets(3, 0.05):
            count += consume(trainer, claims)
    return count


@both
def test_a_trainer_is_finished_when_every_rollout_has_ended_and_every_payload_is_done(url: str) -> None:
    with (
        open_queue(url) as queue,
        TicketTrainer(queue=queue, schemas=[SCHEMA], expected_rollouts=2) as trainer,
        rollouts(url, 5, 7) as children,
    ):
        assert not trainer.finished()
        for child in children:
            end(child)
        assert consumed(trainer) == 12
        assert trainer.claim_tickets(1) == []


@mapped
def test_what_is_claimed_and_not_consumed_is_not_done(url: str) -> None:
    with open_queue(url) as queue, TicketTrainer(queue=queue, schemas=[SCHEMA]) as trainer, rollouts(url, 1) as [child]:
        claims = trainer.claim_tickets(1, 30.0)
        end(child)
        assert trainer.claim_tickets(1, 0.5) == []
        assert not trainer.finished()
        assert consume(trainer, claims) == 1
        eventually(lambda: trainer.claim_tickets(1) == [] and trainer.finished(), "it is finished")


@both
def test_the_end_of_a_rollout_stands_for_a_killed_one_of_its_name_whose_ring_is_gone(url: str) -> None:
    name = f"rollout-{url.removeprefix('rings:')}named"
    with open_queue(f"rings:{name}") as queue, TicketTrainer(queue=queue, schemas=[SCHEMA]) as trainer:
        assert isinstance(queue, FoundRings)
        own = trainer._packer.queue
        assert isinstance(own, FoundRings)
        with Child(WRITER, name, 0) as first:
            first.line()
            claims = trainer.claim_tickets(1, 30.0)
            assert consume(trainer, claims) == 1
            lost_ring = claims[0].ticket_id
            first.kill()
        remove_dead(name)
        eventually(lambda: trainer.claim_tickets(1, 0.05) == [] and not queue.segments_here(), "its ring is gone")
        assert not trainer.finished()
        eventually(lambda: lost_ring[:8] in str(own.why_nothing()), "the reason names it")
        with Child(WRITER, name, 0) as second:
            second.line()
            assert consume(trainer, trainer.claim_tickets(1, 30.0)) == 1
            assert not trainer.finished()
            end(second)
            eventually(lambda: trainer.claim_tickets(1, 0.05) == [] and trainer.finished(), "it is finished")
            second.tell("close")
            second.wait()
        assert trainer.finished()


@tcp
def test_a_killed_rollout_has_not_ended_and_another_one_ends_in_its_place(url: str) -> None:
    with open_queue(url) as queue, TicketTrainer(queue=queue, schemas=[SCHEMA]) as trainer:
        assert isinstance(queue, FoundRings)
        with rollouts(url, 2) as [child]:
            claims = trainer.claim_tickets(2, 30.0)
            assert claims
            child.process.send_signal(signal.SIGKILL)
            child.process.wait()
            consume(trainer, claims)
        beginning = "/transport-" + url.removeprefix("rings:")

        def gone() -> bool:
            trainer.claim_tickets(1, 0.05)
            return not any(name.startswith(beginning) for name in segments())

        eventually(gone, "the killed rollout's ring is gone")
        assert not trainer.finished()
        with rollouts(url, 1) as [child]:
            assert consume(trainer, trainer.claim_tickets(1, 30.0)) == 1
            end(child)
        eventually(lambda: trainer.claim_tickets(1) == [] and trainer._packer.queue.finished(1), "one has ended")
        assert not trainer.finished()


def test_rollouts_at_addresses_are_finished_when_each_has_ended() -> None:
    ports: list[str] = []
    with (
        rollouts(f"rings:end-{os.getpid()}-", 2, 3, ports=ports) as children,
        open_queue("rings://" + ",".join(f"127.0.0.1:{port}" for port in ports)) as queue,
        TicketTrainer(queue=queue, schemas=[SCHEMA]) as trainer,
    ):
        end(children[0])
        end(children[1])
        assert consumed(trainer) == 5


def test_two_addresses_of_one_rollout_are_finished_when_it_has_ended() -> None:
    ports: list[str] = []
    with (
        rollouts(f"rings:end-{os.getpid()}-", 3, ports=ports, listeners=2) as [rollout],
        open_queue("rings://" + ",".join(f"127.0.0.1:{port}" for port in ports[0].split())) as queue,
        TicketTrainer(queue=queue, schemas=[SCHEMA]) as trainer,
    ):
        assert not trainer.finished()
        end(rollout)
        assert consumed(trainer) == 3


@pytest.fixture
def addresses() -> Iterator[tuple[str, Child]]:
    """A rollout with three payloads that waits 30 s at its end, and where it is served."""
    ports: list[str] = []
    with rollouts(f"rings:end-{os.getpid()}-", 3, ports=ports) as [rollout]:
        yield f"rings://127.0.0.1:{ports[0]}", rollout


@pytest.mark.parametrize("killed", [False, True])
def test_at_addresses_nobody_is_finished_while_another_trainer_holds_claims(
    addresses: tuple[str, Child], killed: bool
) -> None:
    url, rollout = addresses
    with Child(HOLDER, url, 3) as holder:
        assert holder.line() == "holds"
        with open_queue(url) as queue, TicketTrainer(queue=queue, schemas=[SCHEMA]) as trainer:
            assert trainer.claim_tickets(3, 0.2) == []
            end(rollout)
            for _ in range(5):
                assert trainer.claim_tickets(1, 0.2) == []
                assert not trainer.finished()
            if killed:
                holder.kill()
                assert consumed(trainer) == 3
            else:
                holder.tell()
                assert holder.line() == "3 0"
                assert consumed(trainer) == 0
                assert holder.wait() == 0


def test_a_rollout_that_does_not_wait_tells_the_end_and_refuses_what_was_claimed() -> None:
    ports: list[str] = []
    with rollouts(f"rings:end-{os.getpid()}-", 3, ports=ports, drain_s=0.0) as [rollout]:
        url = f"rings://127.0.0.1:{ports[0]}"
        with (
            Child(HOLDER, url, 3) as holder,
            open_queue(url) as queue,
            TicketTrainer(queue=queue, schemas=[SCHEMA]) as trainer,
        ):
            assert holder.line() == "holds"
            connected = trainer._packer.queue
            assert isinstance(connected, FoundRings)
            eventually(
                lambda: (
                    trainer.claim_tickets(1, 0.05) == [] and bool(connected._network.reached(None, named=False).rings)
                ),
                "connected",
            )
            end(rollout)
            assert consumed(trainer) == 0
            holder.tell()
            assert holder.line().startswith("0 ")
            assert holder.wait() == 0


@mapped
def test_a_payload_that_is_consumed_and_still_looked_at_is_done(url: str) -> None:
    with open_queue(url) as queue, TicketTrainer(queue=queue, schemas=[SCHEMA]) as trainer, rollouts(url, 1) as [child]:
        batch = fetch(trainer, 1)
        [payload] = trainer.consume(batch)
        number = payload["number"]
        end(child)
        eventually(lambda: trainer.claim_tickets(1) == [] and trainer.finished(), "it is finished")
        assert int(number.item()) == 0


def test_a_trainer_that_comes_late_learns_the_end_from_the_directory_and_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the job was started again, its own rollouts are still to begin."""

    def warned() -> bool:
        return any("run=" in each.getMessage() for each in caplog.records if each.name == "transport.claims.rings")

    url = f"rings+sqlite:///{tmp_path}/store"
    with open_queue(url) as queue, TicketTrainer(queue=queue, schemas=[SCHEMA]) as trainer:
        assert not trainer.finished()
        with open_queue(url) as theirs, Rollout(SCHEMA, rings=theirs, mode="thread"):
            pass
        assert consumed(trainer) == 0
        assert not warned()
    with open_queue(url) as queue, TicketTrainer(queue=queue, schemas=[SCHEMA]) as trainer:
        assert consumed(trainer) == 0
        assert warned()


@tcp
def test_a_stream_ends_with_the_rollouts(url: str) -> None:
    with (
        open_queue(url) as queue,
        rollouts(url, 5) as [child],
        BatchStream(queue, 2, fill_s=0.0, idle_s=None, schemas=[SCHEMA], expected_rollouts=1) as stream,
    ):
        end(child)
        found = []
        while (batch := stream.next()) is not None:
            found += [int(payload["number"].item()) for payload in stream.used(batch)]
            batch.release()
        assert sorted(found) == [0, 1, 2, 3, 4]


@mapped
def test_a_stream_behind_the_end_waits_for_a_rollout_that_goes_on_and_for_no_other(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.packer.stream._MEET_S", 0.0)

    def behind(queue: FoundRings, write: Callable[[int], None]) -> list[int]:
        waits = (write(wait) for wait in itertools.count())
        options: dict[str, Any] = {"fill_s": 0.0, "idle_s": None, "schemas": [SCHEMA], "expected_rollouts": 2}
        with BatchStream(queue, 1, stopping=lambda: bool(next(waits)), **options) as stream:
            stream.behind_end = True
            found = []
            while (batch := stream.next()) is not None:
                found += [int(payload["number"]) for payload in stream.used(batch)]
                batch.release()
            return found

    with open_queue(url) as queue, Rollout(SCHEMA, rings=queue, mode="thread") as rollout:

        def write(wait: int) -> None:
            if wait == 3:
                rollout.write_to_buffer({"number": 5})
                rollout.ring.end_data()

        assert behind(queue, write) == [5]
    with open_queue(url) as queue:
        assert behind(queue, lambda _: None) == []


def test_a_rollout_that_an_exception_ends_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    end_data = SharedRingBuffer.end_data

    def noted(ring: SharedRingBuffer) -> None:
        said.append(ring)
        end_data(ring)

    monkeypatch.setattr(SharedRingBuffer, "end_data", noted)
    with pytest.raises(ZeroDivisionError), Rollout(SCHEMA, mode="thread"):
        raise ZeroDivisionError
    assert said == []
    with Rollout(SCHEMA, mode="thread"):
        pass
    assert len(said) == 1


@pytest.mark.parametrize("drain_s", [0.0, 0.05])
def test_a_rollout_that_has_waited_in_vain_is_not_told_to_wait(
    drain_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    with Rollout(SCHEMA, slots=1, mode="thread", drain_s=drain_s) as rollout:
        rollout.write_to_buffer({"number": 1})
        ring = rollout.ring.ring_id[:8]
    [said] = [each for each in caplog.messages if ring in each]
    assert ("until_stopped" in said) == (drain_s == 0.0)


def test_a_rollout_that_another_one_replaces_has_not_ended(tmp_path: Path) -> None:
    url = f"rings+sqlite:///{tmp_path}/store"
    with open_queue(url) as queue, TicketTrainer(queue=queue, schemas=[SCHEMA]) as trainer:
        with Rollout(SCHEMA, rings=queue, mode="thread") as rollout:
            assert trainer.claim_tickets(1) == []
            rollout.close(0.0, ends=False)
        assert trainer.claim_tickets(1, 0.5) == []
        assert not trainer.finished()
        with Rollout(SCHEMA, rings=queue, mode="thread"):
            pass
        eventually(lambda: trainer.claim_tickets(1) == [] and queue.finished(1), "one has ended")


def test_a_ring_that_is_taken_over_has_not_ended() -> None:
    name = f"end-{os.getpid()}"
    with SharedRingBuffer.create(SCHEMA, slots=2, name=name) as ring:
        ring.write({"number": 1})
        ring.end_data()
        assert ring.native.ended
        assert not ring.native.drained
        ring.close(keep_unread=True)
        with SharedRingBuffer.create(SCHEMA, slots=2, name=name) as again:
            assert again.native.taken_over
            assert not again.native.ended


ATTACHED = """
import sys
from transport import Schema, SharedRingBuffer
ring = SharedRingBuffer.attach(sys.argv[1], Schema.of(number=("int64",)), role="writer")
print("attached", flush=True)
for line in sys.stdin:
    if line == "end\\n":
        ring.end_data()
    elif line == "close\\n":
        ring.close()
    else:
        ring.write({"number": int(line)})
    print("done", flush=True)
"""


@pytest.mark.parametrize("last", ["end", "close", "kill"])
@both
def test_a_ring_of_several_writers_has_ended_when_none_has_yet_to_say_it(
    last: str, wires: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", wires)
    prefix = f"writers-{os.getpid()}-"
    with (
        SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix) as ring,
        UCXXServer(ring, mode="thread"),
        Child(ATTACHED, ring.name) as first,
        Child(ATTACHED, ring.name) as second,
        open_queue(f"rings:{prefix}") as queue,
        TicketTrainer(queue=queue, schemas=[SCHEMA]) as trainer,
    ):

        def tell(child: Child, line: str) -> None:
            child.tell(line)
            assert child.line() == "done"

        assert [child.line() for child in (first, second)] == ["attached"] * 2
        ring.only_serve()
        tell(first, "end")
        assert not ring.native.ended
        assert trainer.claim_tickets(1, 0.5) == [] and not trainer.finished()
        tell(second, "7")
        [claim] = trainer.claim_tickets(1, 30.0)
        batch = collected(trainer, [claim])
        assert [int(payload["number"]) for payload in trainer.consume(batch)] == [7]
        batch.release()
        if last == "kill":
            second.kill()
        else:
            tell(second, last)
        eventually(trainer.finished, "no living writer has yet to say it")


def test_a_trainer_elsewhere_follows_a_ring_that_another_writer_takes_over_after_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    name = f"rollout-end-{os.getpid()}"
    with Child(WRITER, name, 0) as first:
        port = first.line()
        with open_queue(f"rings://127.0.0.1:{port}") as queue, TicketTrainer(queue=queue, schemas=[SCHEMA]) as trainer:
            assert consume(trainer, trainer.claim_tickets(1, 30.0)) == 1
            end(first)
            eventually(lambda: trainer.claim_tickets(1, 0.05) == [] and trainer.finished(), "it is finished")
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            with Child(WRITER, name, port) as second:
                assert second.line() == port
                claims: list[Claim] = []
                eventually(lambda: claims.extend(trainer.claim_tickets(1, 0.05)) or bool(claims), "its payload comes")
                assert not trainer.finished()
                assert consume(trainer, claims) == 1
                end(second)
                eventually(lambda: trainer.claim_tickets(1, 0.05) == [] and trainer.finished(), "it is finished again")
                second.tell("close")
                second.wait()


@mapped
def test_the_end_of_a_ring_of_another_schema_is_not_a_rollouts_of_this_trainer(url: str, tmp_path: Path) -> None:
    other = Schema.of(other=("float32",))
    for place in (url, f"rings+sqlite:///{tmp_path}/store"):
        with open_queue(place) as queue, TicketTrainer(queue=queue, schemas=[SCHEMA], expected_rollouts=1) as trainer:
            with open_queue(place) as written, Rollout(other, rings=written, mode="thread"):
                assert trainer.claim_tickets(1, 0.5) == []
            assert trainer.claim_tickets(1, 0.5) == []
            assert not trainer.finished()
