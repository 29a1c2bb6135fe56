"""Rollouts that close cleanly say their end, and trainers learn that no payload comes any more."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers import Child, eventually, in_thread
from loopback import lasting_port

from transport import FoundRings, Rollout, Schema, SharedRingBuffer, Trainer, UCXXServer, _ring
from transport._ring import segments
from transport.claims.places import OnThisHost, each_observed
from transport.errors import BusyError
from transport.packer.options import ServerOptions
from transport.ring.attachment import remove_dead
from transport.training.batch import Batch
from transport.wires import Wire

pytestmark = pytest.mark.ucx
SCHEMA = Schema.of(number=("int64",))
both = pytest.mark.parametrize("wires", ["mapped", "tcp"])
mapped = pytest.mark.parametrize("wires", ["mapped"])
tcp = pytest.mark.parametrize("wires", ["tcp"])

# Writes, says so, and closes cleanly when it is told to; its end waits for the trainers, for so long. At so many ports.
ROLLOUT = """
import sys
from transport import FoundRings, Rollout, Schema
from transport.packer.options import ServerOptions
from transport import open_rings
from transport.settings import Settings
with (
    open_rings(sys.argv[1]) as queue,
    Rollout(
        Schema.of(number=("int64",)), rings=queue, drain_s=float(sys.argv[3]), server=ServerOptions(
            ports=(0,) * int(sys.argv[4]), addresses=("127.0.0.1",), settings=Settings(linger_s=1.0),
        ),
    ) as rollout,
):
    for number in range(int(sys.argv[2])):
        rollout.write_to_buffer({"number": number})
    print(*rollout.ports, flush=True)
    sys.stdin.readline()
"""

# Takes at addresses, and keeps its batch.
HOLDER = """
import sys
from transport import Schema, Trainer
with Trainer(Schema.of(number=("int64",)), sys.argv[1]) as trainer:
    batch = trainer.take(int(sys.argv[2]), 30.0, fill_s=30.0)
    print("holds", flush=True)
    sys.stdin.readline()
    batch.consume()
    print(int(batch.accepted.sum()), flush=True)
    while not trainer.finished():
        trainer.take(1, 0.05)
"""


@pytest.fixture
def url(wires: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRANSPORT_WIRES", wires)
    return f"rings:end-{os.getpid()}-{wires}-"


# Serves its ring itself, writes, says the end when it is told to, and lives on.
WRITER = """
import sys
from transport import FoundRings, Rollout, Schema
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


def take(trainer: Trainer, n: int) -> Batch:
    batch = trainer.take(n, 30.0, fill_s=30.0)
    assert batch is not None and len(batch) == n
    return batch


def consume(batch: Batch) -> int:
    batch.consume()
    count = int(batch.accepted.sum())
    batch.release()
    return count


def consumed(trainer: Trainer) -> int:
    """Consume what comes until no more comes; how many."""
    count = 0
    while not trainer.finished():
        if (batch := trainer.take(3, 0.05)) is not None:
            count += consume(batch)
    return count


@both
def test_a_trainer_is_finished_when_every_rollout_has_ended_and_every_payload_is_done(url: str) -> None:
    with (
        Trainer(SCHEMA, url, expected_rollouts=2) as trainer,
        rollouts(url, 5, 7) as children,
    ):
        assert not trainer.finished()
        for child in children:
            end(child)
        assert consumed(trainer) == 12
        assert trainer.take(1) is None


@both
def test_a_batch_is_not_filled_for_longer_than_rollouts_write(url: str) -> None:
    with Trainer(SCHEMA, url) as trainer, rollouts(url, 3, 4) as children:
        first, held = take(trainer, 2), take(trainer, 2)
        assert consume(first) == 2
        for child in children:
            end(child)
        last = trainer.take(8, 30.0, fill_s=1e6)
        assert last is not None and len(last) == 3
        assert consume(last) + consume(held) == 5


@mapped
def test_a_batch_is_filled_while_one_of_several_rollouts_may_write(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, prefix, all_written = threading.Event(), url.removeprefix("rings:"), FoundRings.all_written

    def look(rings: FoundRings, rank: int | str, held: Mapping[str, int]) -> bool:
        found = all_written(rings, rank, held)
        looked.set()
        return found

    monkeypatch.setattr(FoundRings, "all_written", look)
    with (
        SharedRingBuffer.create(SCHEMA, slots=2, prefix=prefix) as over,
        SharedRingBuffer.create(SCHEMA, slots=2, prefix=prefix) as other,
        Trainer(SCHEMA, url) as trainer,
    ):
        over.write({"number": 1})
        over.end_data()
        batches, taking = in_thread(lambda: trainer.take(2, 30.0, fill_s=1e6))
        assert looked.wait(30.0)
        other.write({"number": 2})
        taking.join()
        assert [len(batch) for batch in batches] == [2]


@mapped
def test_what_is_claimed_and_not_consumed_is_not_done(url: str) -> None:
    with Trainer(SCHEMA, url) as trainer, rollouts(url, 1) as [child]:
        batch = take(trainer, 1)
        end(child)
        assert trainer.take(1, 0.5) is None
        assert not trainer.finished()
        assert consume(batch) == 1
        eventually(lambda: trainer.take(1) is None and trainer.finished(), "it is finished")


@both
def test_the_end_of_a_rollout_stands_for_a_killed_one_of_its_name_whose_ring_is_gone(url: str) -> None:
    name = f"rollout-{url.removeprefix('rings:')}named"
    with Trainer(SCHEMA, f"rings:{name}") as trainer:
        with Child(WRITER, name, 0) as first:
            first.line()
            batch = take(trainer, 1)
            lost_ring = batch[0].name
            assert consume(batch) == 1
            first.kill()
        remove_dead(name)
        eventually(lambda: trainer.take(1, 0.05) is None and not trainer.rings.segments_here(), "its ring is gone")
        assert not trainer.finished()
        eventually(lambda: lost_ring[:8] in trainer.why_nothing(), "the reason names it")
        with Child(WRITER, name, 0) as second:
            second.line()
            assert consume(take(trainer, 1)) == 1
            assert not trainer.finished()
            end(second)
            eventually(lambda: trainer.take(1, 0.05) is None and trainer.finished(), "it is finished")
            second.tell("close")
            second.wait()
        assert trainer.finished()


@tcp
def test_a_killed_rollout_has_not_ended_and_another_one_ends_in_its_place(url: str) -> None:
    with Trainer(SCHEMA, url) as trainer:
        with rollouts(url, 2) as [child]:
            batch = take(trainer, 2)
            child.process.send_signal(signal.SIGKILL)
            child.process.wait()
            consume(batch)
        beginning = "/transport-" + url.removeprefix("rings:")

        def gone() -> bool:
            trainer.take(1, 0.05)
            return not any(name.startswith(beginning) for name in segments())

        eventually(gone, "the killed rollout's ring is gone")
        assert not trainer.finished()
        with rollouts(url, 1) as [child]:
            assert consume(take(trainer, 1)) == 1
            end(child)
        eventually(lambda: trainer.take(1) is None and trainer.rings.finished(1), "one has ended")
        assert not trainer.finished() and not trainer.rings.finished(2)


def test_rollouts_at_addresses_are_finished_when_each_has_ended() -> None:
    ports: list[str] = []
    with (
        rollouts(f"rings:end-{os.getpid()}-", 2, 3, ports=ports) as children,
        Trainer(SCHEMA, "rings://" + ",".join(f"127.0.0.1:{port}" for port in ports)) as trainer,
    ):
        end(children[0])
        end(children[1])
        assert consumed(trainer) == 5


def test_two_addresses_of_one_rollout_are_finished_when_it_has_ended() -> None:
    ports: list[str] = []
    with (
        rollouts(f"rings:end-{os.getpid()}-", 3, ports=ports, listeners=2) as [rollout],
        Trainer(SCHEMA, "rings://" + ",".join(f"127.0.0.1:{port}" for port in ports[0].split())) as trainer,
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
        with Trainer(SCHEMA, url) as trainer:
            assert trainer.take(3, 0.2) is None
            end(rollout)
            for _ in range(5):
                assert trainer.take(1, 0.2) is None
                assert not trainer.finished()
            if killed:
                holder.kill()
                assert consumed(trainer) == 3
            else:
                holder.tell()
                assert holder.line() == "3"
                assert consumed(trainer) == 0
                assert holder.wait() == 0


def of_rings(prefix: str, count: Callable[[_ring.Ring], int]) -> int:
    """The sum over the rings of this host, which a trainer at addresses does not look at."""
    return sum(count(ring.native) for ring in each_observed(OnThisHost(prefix).segments()))


def test_a_rollout_that_does_not_wait_tells_the_end_and_refuses_what_was_claimed() -> None:
    ports: list[str] = []
    prefix = f"end-{os.getpid()}-"
    with rollouts(f"rings:{prefix}", 3, ports=ports, drain_s=0.0) as [rollout]:
        url = f"rings://127.0.0.1:{ports[0]}"
        with (
            Child(HOLDER, url, 3) as holder,
            Trainer(SCHEMA, url) as trainer,
        ):
            assert holder.line() == "holds"
            assert trainer.take(1, 0.05) is None
            eventually(lambda: of_rings(prefix, lambda ring: ring.takers) == 2, "both have asked")
            end(rollout)
            assert consumed(trainer) == 0
            holder.tell()
            assert holder.line() == "0"
            assert holder.wait() == 0


@contextlib.contextmanager
def at_an_address(payloads: int, **options: Any) -> Iterator[tuple[str, Child, Trainer]]:
    """The prefix of a ring, its rollout, and a trainer that knows its address alone."""
    ports: list[str] = []
    prefix = f"end-{os.getpid()}-"
    with (
        rollouts(f"rings:{prefix}", payloads, ports=ports, **options) as [rollout],
        Trainer(SCHEMA, f"rings://127.0.0.1:{ports[0]}") as trainer,
    ):
        yield prefix, rollout, trainer


def test_a_trainer_with_its_hands_full_hears_the_end_of_a_rollout_that_does_not_wait() -> None:
    with at_an_address(12, drain_s=0.0) as (prefix, rollout, trainer):
        batch = take(trainer, 1)
        eventually(lambda: of_rings(prefix, lambda ring: ring.depth(0)["claimed"]) >= 4, "it has three ahead")
        end(rollout)
        rollout.wait()
        assert consume(batch) == 0
        assert consumed(trainer) == 0


def test_a_trainer_that_rests_hears_the_end() -> None:
    with at_an_address(2) as (_, rollout, trainer):
        assert consume(take(trainer, 2)) == 2
        trainer.rings.rest_at_once()  # as when nothing is taken for a lease's time
        end(rollout)
        rollout.wait()
        assert consumed(trainer) == 0


def test_a_trainer_that_has_never_asked_a_rollout_hears_its_end() -> None:
    port = lasting_port()
    server = ServerOptions(ports=(port,), addresses=("127.0.0.1",))
    with Trainer(SCHEMA, f"rings://127.0.0.1:{port}") as trainer:
        assert trainer.take(1, 0.05) is None
        trainer.rings.rest_at_once()
        with Rollout(SCHEMA, f"rings:end-{os.getpid()}-", mode="thread", server=server):
            eventually(trainer.rings.slots, "it is connected")
        eventually(trainer.finished, "it has heard the end")


@pytest.mark.parametrize("wire", ["tcp", "shm"])
def test_a_trainer_that_has_enough_of_one_rollout_hears_the_end_of_another(wire: Wire) -> None:
    ports: list[str] = []
    prefix = f"end-{os.getpid()}-"
    with (
        rollouts(f"rings:{prefix}", 0, 60, ports=ports) as [ends, writes],
        Trainer(SCHEMA, "rings://" + ",".join(f"127.0.0.1:{port}" for port in ports), wire={wire}) as trainer,
    ):
        taken = [consume(take(trainer, 1))]
        while of_rings(prefix, lambda ring: ring.takers) < 2:  # it has not asked both
            taken.append(consume(take(trainer, 1)))
        batch = take(trainer, 1)
        eventually(lambda: of_rings(prefix, lambda ring: ring.depth(0)["claimed"]) >= 4, "it has three ahead")
        end(ends)
        ends.wait()
        end(writes)
        assert sum(taken) + consume(batch) + consumed(trainer) == 60
        assert trainer.statistics().lost_claims == 0


def test_a_trainer_whose_listener_is_killed_before_the_end_hears_it() -> None:
    with at_an_address(2) as (prefix, rollout, trainer):
        assert consume(take(trainer, 2)) == 2
        for ring in each_observed(OnThisHost(prefix).segments()):
            [listener] = [owner.pid for owner in ring.native.owners() if owner.port]
        os.kill(listener, signal.SIGKILL)
        end(rollout)
        rollout.wait()
        assert consumed(trainer) == 0


@mapped
def test_a_payload_that_is_consumed_and_still_looked_at_is_done(url: str) -> None:
    with Trainer(SCHEMA, url) as trainer, rollouts(url, 1) as [child]:
        batch = take(trainer, 1)
        number = batch[0]["number"]
        batch.consume()
        end(child)
        eventually(lambda: trainer.take(1) is None and trainer.finished(), "it is finished")
        assert int(number.item()) == 0


def test_a_trainer_that_comes_late_learns_the_end_from_the_directory_and_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the job was started again, its own rollouts are still to begin."""

    def warned() -> bool:
        return any("run=" in each.getMessage() for each in caplog.records if each.name == "transport.claims.rings")

    url = f"rings+sqlite:///{tmp_path}/store"
    with Trainer(SCHEMA, url) as trainer:
        assert not trainer.finished()
        with Rollout(SCHEMA, url, mode="thread"):
            pass
        assert consumed(trainer) == 0
        assert not warned()
    with Trainer(SCHEMA, url) as trainer:
        assert consumed(trainer) == 0
        assert warned()


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


# Is not closed, however its process ends.
UNCLOSED = """
import gc, sys
from transport import Rollout, Schema
rollout = Rollout(Schema.of(number=("int64",)), sys.argv[1])
print(rollout.ring.ring_id, flush=True)
sys.stdin.readline()
del rollout
gc.collect()
"""


@both
def test_a_rollout_that_is_never_closed_says_nothing(url: str) -> None:
    with Trainer(SCHEMA, url) as trainer:
        with Child(UNCLOSED, url) as child:
            ring = child.line()
            eventually(lambda: trainer.take(1, 0.05) is None and trainer.rings.has_met_rings(), "it is met")
            end(child)
            assert child.wait() == 0
        eventually(lambda: trainer.take(1, 0.05) is None and not trainer.rings.segments_here(), "it is gone")
        eventually(lambda: trainer.take(1, 0.05) is None and ring[:8] in trainer.why_nothing(), "it is named")
        assert not trainer.finished()


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
    with Trainer(SCHEMA, url) as trainer:
        with Rollout(SCHEMA, url, mode="thread") as rollout:
            assert trainer.take(1) is None
            rollout.close(0.0, ends=False)
        assert trainer.take(1, 0.5) is None
        assert not trainer.finished()
        with Rollout(SCHEMA, url, mode="thread"):
            pass
        eventually(lambda: trainer.take(1) is None and trainer.rings.finished(1), "one has ended")


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


@pytest.mark.nightly(keep=2)
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
        Trainer(SCHEMA, f"rings:{prefix}") as trainer,
    ):

        def tell(child: Child, line: str) -> None:
            child.tell(line)
            assert child.line() == "done"

        assert [child.line() for child in (first, second)] == ["attached"] * 2
        ring.only_serve()
        tell(first, "end")
        assert not ring.native.ended
        assert trainer.take(1, 0.5) is None and not trainer.finished()
        tell(second, "7")
        batch = take(trainer, 1)
        assert int(batch[0]["number"]) == 7 and consume(batch) == 1
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
    port = str(lasting_port())
    with Child(WRITER, name, port) as first:
        assert first.line() == port
        with Trainer(SCHEMA, f"rings://127.0.0.1:{port}") as trainer:
            assert consume(take(trainer, 1)) == 1
            end(first)
            eventually(lambda: trainer.take(1, 0.05) is None and trainer.finished(), "it is finished")
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            with Child(WRITER, name, port) as second:
                assert second.line() == port
                batch = take(trainer, 1)
                assert not trainer.finished()
                assert consume(batch) == 1
                end(second)
                eventually(lambda: trainer.take(1, 0.05) is None and trainer.finished(), "it is finished again")
                second.tell("close")
                second.wait()


def test_a_listener_lets_no_trainer_in_while_its_ring_is_set_up() -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=2, begins=False) as ring,
        UCXXServer(ring, mode="thread", addresses=("127.0.0.1",)) as server,
        Trainer(SCHEMA, f"rings://127.0.0.1:{server.ports[0]}") as trainer,
    ):

        def is_refused() -> bool:
            assert trainer.take(1, 0.05) is None
            faults = trainer.rings._network.reached(0, named=False, met=False).faults
            return any(isinstance(fault, BusyError) for fault in faults.values())

        eventually(is_refused, "it is refused")
        assert not trainer.rings.has_met_rings()
        ring.begin_data()
        ring.write({"number": 1})
        assert consume(take(trainer, 1)) == 1


@mapped
def test_the_end_of_a_ring_of_another_schema_is_not_a_rollouts_of_this_trainer(url: str, tmp_path: Path) -> None:
    other = Schema.of(other=("float32",))
    for place in (url, f"rings+sqlite:///{tmp_path}/store"):
        with Trainer(SCHEMA, place, expected_rollouts=1) as trainer:
            with Rollout(other, place, mode="thread"):
                assert trainer.take(1, 0.5) is None
            assert trainer.take(1, 0.5) is None
            assert not trainer.finished()
