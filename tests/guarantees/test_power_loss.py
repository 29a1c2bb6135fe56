"""Power losses: what SQLite's queue knows afterwards, at every moment of a process that publishes, claims and consumes.

The writes and flushes of a real process are recorded and replayed; power_loss.py says what that does not show. The
rings are in memory: their payloads are gone with the power, whatever the queue knows.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers import Child
from power_loss import Disk, disks, put
from preloaded import needs_compiler, preloaded

from transport.queue import DeliveryState, SQLiteQueue

pytestmark = [pytest.mark.slow, needs_compiler]
QUEUE = "queue.db"

# Says what it has done as soon as the queue has said so. The file is closed in between, which writes the log back.
PROGRAM = """
import os, sys
from transport.queue import QueuedTicket, SQLiteQueue
folder, synchronous = sys.argv[1:]
said = os.open(f"{folder}/said", os.O_WRONLY | os.O_CREAT)
for begin in (0, 3):
    with SQLiteQueue(f"{folder}/queue.db", synchronous=synchronous) as queue:
        for number in range(begin, begin + 3):
            queue.publish(QueuedTicket(f"ring/{number}/1", b"a ticket" * 50))
            os.write(said, f"published ring/{number}/1".encode())
        claims = queue.claim(2, consumer="trainer")
        for claim in queue.ack_many(claims[:1]):
            os.write(said, f"done {claim.ticket_id}".encode())
        if queue.ack(claims[1], trained=False):
            os.write(said, f"arrived {claims[1].ticket_id}".encode())
"""


@pytest.fixture
def after(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Iterator[Disk]]:
    """What the disk may have, with the parameter as ``synchronous``."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    environment = preloaded("recorded", tmp_path) | {"RECORDED": str(folder)}
    with Child(PROGRAM, folder, request.param, env=environment) as child:
        assert child.wait() == 0
    yield disks((folder / "record").read_bytes())


def forgotten(disk: Disk, folder: Path) -> list[str]:
    """What had been said and is not so; the file is intact."""
    put(disk, folder)
    wrong = []
    try:
        with SQLiteQueue(folder / QUEUE) as queue:
            for text in disk.said:
                what, ticket = text.split()
                states = queue.known([ticket]).get(ticket, ())
                # what was said last may have been overtaken by what was not said yet
                late = {
                    "published": set(DeliveryState),
                    "arrived": {DeliveryState.ARRIVED},
                    "done": {DeliveryState.DONE},
                }[what]
                if not set(states) & late:
                    wrong.append(text)
        with closing(sqlite3.connect(folder / QUEUE)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        shutil.rmtree(folder)
    return wrong


def all_forgotten(after: Iterator[Disk], folder: Path) -> tuple[int, list[list[str]]]:
    """How many different disks there may be, and what is wrong on those where something is."""
    seen, found = set(), []
    for disk in after:
        known = tuple(sorted(disk.files.items())), len(disk.said)
        if known not in seen:
            seen.add(known)
            found += [wrong] if (wrong := forgotten(disk, folder)) else []
    return len(seen), found


@pytest.mark.parametrize("after", ["FULL"], indirect=True)
def test_with_synchronous_full_nothing_that_the_queue_has_said_is_forgotten(
    after: Iterator[Disk], tmp_path: Path
) -> None:
    count, wrong = all_forgotten(after, tmp_path / "disk")
    assert count > 100
    assert wrong == []


@pytest.mark.parametrize("after", ["NORMAL"], indirect=True)
def test_with_synchronous_normal_the_last_transactions_may_be_forgotten_and_the_file_is_intact(
    after: Iterator[Disk], tmp_path: Path
) -> None:
    _, wrong = all_forgotten(after, tmp_path / "disk")
    assert wrong, "the test above would find it"
