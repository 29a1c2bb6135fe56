"""Rings in files: one that is served again after its processes were killed, and a host that loses its power.

test_restart.py has whole jobs over such rings.

What a loss of power leaves is made of copies: the pages of the file as they were when it was synced last, and as they
were at moments after that, in any mixture. A real disk may also write a part of a page; then the page's payload, or its
ticket, has another checksum, as after the changes of tests/ring/test_files.py.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from delivery_accounts import Serving, Told, compare, consumed, place_of
from helpers import Child
from preloaded import needs_compiler, preloaded
from ring_files import SCHEMA, forget, links_to, payload, take_all

from transport import SharedRingBuffer
from transport.packer.consumed_record import ConsumedRecord
from transport.ring.buffer import Sync

_PAGE = 4096
_HEADER = 2 * _PAGE
_SLOTS = 4


@pytest.mark.nightly(keep=1)
@pytest.mark.guarantee("every process of a job is killed, its rings in files")
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tickets", "tcp"])
def test_a_ring_in_a_file_whose_processes_were_all_killed_is_served_again(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "ring"
    place = place_of(kind)
    with Told("writer", place, file=str(file)) as first:
        serving = Serving(first)
        first.ask("write", 0, 3)
        serving.kill_all()
    forget(file)
    with Told("writer", place, file=str(file)) as second:
        assert second.ask("segment") == serving.segment
        second.ask("write", 3, 1)
        compare(range(4), consumed(place, 4))
        second.end()
    assert links_to(file) == []


# --- a loss of power ----------------------------------------------------------------------------------------
LIFE = """
import random, sys
from claimed import claim_each
from ring_files import SCHEMA, payload
from transport import SharedRingBuffer

def say(what, *about):
    print(what, *about, flush=True)

chosen = random.Random(sys.argv[2])
ring = SharedRingBuffer.create(SCHEMA, slots=4, file=sys.argv[1], sync=sys.argv[3], overflow="error")
reader = SharedRingBuffer.attach(ring.name, SCHEMA, role="reader")
number, claims, readable, delays = 0, [], {}, [1e6]
while True:
    if chosen.random() < 0.5 and ring.statistics().free:
        count = chosen.randrange(1, ring.statistics().free + 1)
        numbers = range(number, number + count)
        number += count
        say("begin", *numbers)
        for each, ticket in zip(numbers, ring.write_many(map(payload, numbers)), strict=True):
            readable[ticket.identity] = each
        say("written", *numbers)
    elif not claims:
        claims = claim_each(reader, chosen.randrange(1, 4)) if ring.statistics().ready else []
    elif chosen.random() < 0.3:
        claims.pop().release(delays.pop() if delays else 0.0)
    else:
        claim = claims.pop(0)
        say("recorded", *claim.ticket.identity, readable[claim.ticket.identity])  # the trainer's checkpoint
        assert claim.consume()
"""


class Life:
    """What a process said before it was killed."""

    def __init__(self) -> None:
        self.begun: set[int] = set()
        self.written: set[int] = set()
        self.recorded: set[int] = set()
        self.record = ConsumedRecord()

    def hear(self, line: str) -> None:
        """One line; one that was cut off says nothing."""
        what, *rest = line.split()
        if what == "recorded":
            ring, slot, generation, number = rest
            assert self.record.accept(ring, int(slot), int(generation), 0)
            self.recorded.add(int(number))
        else:
            (self.begun if what == "begin" else self.written).update(map(int, rest))


def lives(file: Path, seed: int, sync: str, environment: dict[str, str], synced: Path) -> tuple[Life, list[bytes]]:
    """A process that writes and consumes until it is killed, and what the disk may have of each page then."""
    chosen = random.Random(seed)
    life = Life()
    copies: list[tuple[object, bytes]] = []  # with the identity of the copy that was the last synced one before

    def last_synced() -> object:
        return ((found := synced.stat()).st_ino, found.st_mtime_ns) if synced.exists() else None

    with Child(LIFE, file, str(seed), sync, env=environment) as child:
        for _ in range(chosen.randrange(5, 80)):
            life.hear(child.line())
            if chosen.random() < 0.3:
                before = last_synced()
                copies.append((before, file.read_bytes()))
        child.process.kill()
        assert child.process.stdout is not None
        for line in child.process.stdout:
            if line.endswith("\n"):
                life.hear(line)
        child.wait()
    after = [data for before, data in copies if before == last_synced()]
    first = [synced.read_bytes()] if synced.exists() else after[:1]
    return life, [*first, *after, file.read_bytes()]


def mixed(versions: list[bytes], headers: list[bytes], chosen: random.Random) -> bytes:
    """A page of each version, by chance. The header is synced by itself, and is one of these."""
    pages = range(_HEADER, len(versions[0]), _PAGE)
    return chosen.choice(headers)[:_HEADER] + b"".join(chosen.choice(versions)[at : at + _PAGE] for at in pages)


def left(file: Path, life: Life, sync: Sync) -> list[int]:
    """What a trainer with the record of a life gets from a file that a loss of power left.

    Nothing that the record has comes again, and it accepts all that is written from then on.
    """
    record = ConsumedRecord.from_bytes(life.record.to_bytes())
    with SharedRingBuffer.create(SCHEMA, slots=_SLOTS, file=file, sync=sync) as ring:
        found = take_all(ring, record)  # compares the bytes
        assert len(set(found)) == len(found)
        assert set(found) <= life.begun - life.recorded
        later = [max(life.begun, default=0) + number for number in range(1, 2 * _SLOTS + 1)]
        accepted = []
        for half in (later[:_SLOTS], later[_SLOTS:]):
            ring.write_many(map(payload, half))
            accepted += take_all(ring, record)
        assert accepted == later, "no number of a slot is used again"
    forget(file)
    file.unlink()
    return found


@pytest.mark.guarantee("their host loses its power, with sync")
@needs_compiler
@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("seed", range(60))
def test_what_a_write_to_a_synced_ring_returned_for_is_there_after_a_loss_of_power(seed: int, tmp_path: Path) -> None:
    file, synced = tmp_path / "ring", tmp_path / "synced"
    environment = preloaded("synced", tmp_path) | {"SYNCED_COPY": str(synced)}
    life, versions = lives(file, seed, "publish", environment, synced)
    forget(file)
    chosen = random.Random(seed)
    for _ in range(20):
        file.write_bytes(mixed(versions, versions, chosen))
        assert life.written - life.recorded - set(left(file, life, "publish")) == set(), "lost"


@pytest.mark.guarantee("their host loses its power, without")
@needs_compiler
@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("seed", range(40))
def test_without_a_sync_nothing_that_was_recorded_comes_again_and_nothing_new_is_refused(
    seed: int, tmp_path: Path
) -> None:
    file, synced = tmp_path / "ring", tmp_path / "synced"
    environment = preloaded("synced", tmp_path) | {"SYNCED_PAGES": str(synced)}
    life, versions = lives(file, seed, "never", environment, tmp_path / "none")
    forget(file)
    headers = [synced.read_bytes(), versions[-1]] if synced.exists() else versions
    chosen = random.Random(seed)
    for _ in range(20):
        file.write_bytes(mixed(versions, headers, chosen))
        left(file, life, "never")
