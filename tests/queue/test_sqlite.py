"""The ticket queue in an SQLite file: the common contract, and what only a file can get wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from queue_conformance import QueueConformance
from queue_harness import LEASE_S, ids, tickets
from queue_model import QueueMachine
from queue_waits import in_thread, ticket

from transport.errors import InternalError, QueueBusyError, QueueError, QueueFullError, QueueUnsuitableError
from transport.queue import DeliveryState, QueueDepth, QueuedTicket, SQLiteQueue
from transport.queue.statements import sqlite as sql
from transport.storage import sqlite_file


class SQLiteHarness:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "queue.db"
        self.now = 1000.0
        self.queues: list[SQLiteQueue] = []

    def open(self, *, max_deliveries: int = 20, **options: object) -> SQLiteQueue:
        queue = SQLiteQueue(
            self.path, lease_s=LEASE_S, max_deliveries=max_deliveries, clock=lambda: self.now, **options
        )
        self.queues.append(queue)
        return queue

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        for queue in self.queues:
            queue.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[SQLiteHarness]:
    harness = SQLiteHarness(tmp_path)
    yield harness
    harness.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


class TestConformance(QueueConformance):
    pass


class SQLiteMachine(QueueMachine):
    @staticmethod
    def make_harness() -> SQLiteHarness:
        directory = tempfile.TemporaryDirectory()
        harness = SQLiteHarness(Path(directory.name))
        close = harness.close

        def close_and_remove() -> None:
            close()
            directory.cleanup()

        harness.close = close_and_remove  # type: ignore[method-assign]
        return harness


TestModel = SQLiteMachine.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# --- the file ----------------------------------------------------------------------------------------
def test_files_are_readable_by_their_owner_only(path: Path) -> None:
    with SQLiteQueue(path) as queue:
        queue.publish(ticket(0))
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == dict.fromkeys(["queue.db", "queue.db-shm", "queue.db-wal", "queue.db.wake"], 0o600)


def test_repr_tells_path_and_state(path: Path) -> None:
    queue = SQLiteQueue(path)
    assert repr(queue) == f"<SQLiteQueue {path} open>"
    queue.close()
    assert repr(queue) == f"<SQLiteQueue {path} closed>"


def test_tickets_survive_reopening(path: Path) -> None:
    with SQLiteQueue(path) as queue:
        queue.publish(tickets(2))
    with SQLiteQueue(path) as queue:
        assert ids(queue.claim(9, consumer="a")) == [ticket(0).id, ticket(1).id]


def test_another_programs_database_is_refused_unchanged(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(QueueUnsuitableError, match="belongs to another program"):
        SQLiteQueue(path)
    assert path.read_bytes() == before


def test_an_unknown_version_is_refused_by_name(path: Path) -> None:
    SQLiteQueue(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 9")
    with pytest.raises(QueueUnsuitableError, match="has version 9, this program reads 2"):
        SQLiteQueue(path)


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(QueueUnsuitableError, match="not an intact SQLite file"):
        SQLiteQueue(path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(QueueUnsuitableError, match=f"directory {tmp_path / 'absent'} does not exist"):
        SQLiteQueue(tmp_path / "absent" / "queue.db")


def test_a_network_file_system_is_refused_with_what_to_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "file_system_type", lambda path: "nfs4")
    with pytest.raises(QueueUnsuitableError, match=r"system \(nfs4\).*use a local path \(every process of this queue"):
        SQLiteQueue(path)
    assert not path.exists()


@pytest.mark.parametrize(
    "file_system", ["nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "fuse.sshfs", "fuse.glusterfs"]
)
def test_types_that_hosts_share(file_system: str) -> None:
    assert sqlite_file.is_network_type(file_system)


@pytest.mark.parametrize("file_system", ["ext4", "tmpfs", "overlay", "fuse.fuse-overlayfs", "fuseblk", ""])
def test_types_of_one_host(file_system: str) -> None:
    assert not sqlite_file.is_network_type(file_system)


def test_the_file_system_is_that_of_the_deepest_and_latest_mount() -> None:
    table = (
        "1 0 0:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:2 / /home rw shared:1 - xfs /dev/b rw\n"
        "3 1 0:3 / /home/my\\040data rw - nfs4 host:/x rw\n"
        "4 1 0:4 / /home rw - tmpfs none rw\n"
    )
    assert sqlite_file.file_system_type(Path("/etc"), table) == "ext4"
    assert sqlite_file.file_system_type(Path("/home/me"), table) == "tmpfs"
    assert sqlite_file.file_system_type(Path("/home/my data/run"), table) == "nfs4"
    assert sqlite_file.file_system_type(Path("/homes"), table) == "ext4"


# --- the bounds ----------------------------------------------------------------------------------------
def test_a_full_store_is_an_error_and_stores_nothing_of_the_call(path: Path) -> None:
    with SQLiteQueue(path, max_bytes=256 << 10) as queue:
        queue.publish(ticket(0))
        with pytest.raises(QueueFullError, match="no room"):
            queue.publish([QueuedTicket(f"big/{number}/1", bytes(4096)) for number in range(200)])
        assert queue.depth() == QueueDepth(ready=1)
        [claim] = queue.claim(1, consumer="a")
        assert queue.ack(claim)


def test_finished_tickets_are_remembered_up_to_the_bound_without_their_bytes(path: Path) -> None:
    with SQLiteQueue(path, keep_finished=10) as queue:
        queue.publish(ticket(999))  # stays unfinished, however old
        [_oldest] = queue.claim(1, consumer="a")
        for number in range(100):
            queue.publish(QueuedTicket(f"ring/{number}/2", bytes(1000)))
            assert queue.ack_many(queue.claim(9, consumer="a"))
        with contextlib.closing(sqlite3.connect(path)) as connection:
            (kept, size) = connection.execute("SELECT COUNT(*), SUM(LENGTH(data)) FROM tickets").fetchone()
        assert kept <= 10 + 10 + 1
        assert size == len(ticket(999).data)
        assert queue.known(["ring/99/2", "ring/0/2"]) == {"ring/99/2": (DeliveryState.DONE,)}
        assert queue.depth() == QueueDepth(claimed=1, done=100)


def test_a_store_held_too_long_is_busy(path: Path) -> None:
    with SQLiteQueue(path, busy_timeout_s=0.01) as queue, contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(QueueBusyError, match="longer than the time limit"):
            queue.publish(ticket(0))


def test_any_other_failure_is_a_queue_error(path: Path) -> None:
    with SQLiteQueue(path) as queue:
        with contextlib.closing(sqlite3.connect(path)) as other:
            other.execute("DROP TABLE notices")
        with pytest.raises(QueueError, match="no such table: notices"):
            queue.announce("policy", 1)


def test_every_frequent_query_goes_through_an_index(path: Path) -> None:
    queries = [
        (sql.ANYTHING_DUE, {"rank": 0, "now": 0.0}),
        (sql.NEXT_DUE, (0,)),
        (sql.OLDEST_READY, (0, 0.0, 1)),
        (sql.ENDED, (0.0,)),
        (sql.CLAIM, (0.0, "a", 0, "[1]")),
        (sql.MOVE, ("done", "", 0.0, "[[1, 0, 1]]", "claimed")),
        (sql.CLOSE, ("[1]",)),
        (sql.DELIVER, (0, 1)),
    ]
    SQLiteQueue(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for query, arguments in queries:
            plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}", arguments)]
            assert not [step for step in plan if step.startswith(("SCAN tickets", "SCAN deliveries"))], query


def test_a_signal_handler_cannot_break_the_transaction_it_interrupts(path: Path) -> None:
    with SQLiteQueue(path) as queue:
        with queue._database.transaction(), pytest.raises(InternalError, match="signal handler"):
            queue.publish(ticket(0))
        assert queue.publish(ticket(0)) == 1


# --- boots, forks, deaths ----------------------------------------------------------------------------
def test_a_reboot_voids_leases_and_delays(harness: SQLiteHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = harness.open()
    queue.publish(tickets(2))
    claimed, delayed = queue.claim(2, consumer="a")
    queue.retry(delayed, delay_s=1e6)
    queue.close()
    monkeypatch.setattr(sqlite_file, "boot_id", lambda: "another boot")
    harness.now = 5.0  # the clock begins anew
    queue = harness.open()
    assert ids(queue.claim(9, consumer="b")) == [claimed.ticket_id, delayed.ticket_id]
    assert not queue.ack(claimed)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_uses_the_queue_and_so_does_its_parent(path: Path) -> None:
    with SQLiteQueue(path) as queue:
        queue.publish(tickets(2))
        [mine] = queue.claim(1, consumer="parent")
        child = os.fork()
        if not child:
            outcome = 1
            with contextlib.suppress(BaseException):
                claims = queue.claim(1, consumer="child")
                outcome = 0 if ids(claims) == [ticket(1).id] and queue.ack(claims[0]) else 2
            os._exit(outcome)
        assert queue.ack(mine)
        assert os.waitpid(child, 0)[1] == 0
        assert queue.depth() == QueueDepth(done=2)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # what is tested is that it is safe
def test_a_fork_beside_busy_threads_leaves_no_lock_held(path: Path) -> None:
    with SQLiteQueue(path) as queue:
        waiting, thread = in_thread(lambda: queue.claim(1, 30, consumer="a"))
        children = []
        for _ in range(5):
            child = os.fork()
            if not child:
                queue.announce("child", os.getpid())
                os._exit(0)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
        queue.publish(ticket(0))
        thread.join()
        assert ids(waiting[0]) == [ticket(0).id]


def process(path: Path, body: str) -> subprocess.Popen[str]:
    """A real process with ``queue`` open, a short lease, and one line of output before it waits."""
    program = f"""
import os, signal, sys
from transport.queue import QueuedTicket, SQLiteQueue
queue = SQLiteQueue({str(path)!r}, lease_s=0.2)
{body}
"""
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def end(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    child.kill()
    child.wait()
    child.stdout.close()


def test_what_a_killed_process_had_claimed_is_claimed_by_another(path: Path) -> None:
    with SQLiteQueue(path, lease_s=0.2) as queue:
        queue.publish(tickets(2))
        child = process(path, "print(len(queue.claim(2, consumer='child')), flush=True); signal.pause()")
        assert first_line(child) == "2"
        assert queue.claim(1, consumer="parent") == [] or queue.depth().expired  # a slow machine ends leases too
        end(child)
        taken: list[str] = []
        while len(taken) < 2:
            taken += ids(queue.ack_many(queue.claim(2, 30, consumer="parent")))
        assert sorted(taken) == [ticket(0).id, ticket(1).id]
        assert queue.depth().expired >= 2


def test_processes_that_publish_and_are_killed_leave_a_working_queue(path: Path) -> None:
    body = """
number = 0
while True:
    queue.publish(QueuedTicket(f"{os.getpid()}/{number}/1", bytes(500)), readers=2)
    number += 1
    if number == 20: print("going", flush=True)
"""
    with SQLiteQueue(path) as queue:
        children = [process(path, body) for _ in range(3)]
        for child in children:
            assert first_line(child) == "going"
        for child in children:
            end(child)
        published = queue.depth(0).ready
        assert published >= 60
        assert queue.depth(1).ready == published  # no ticket is half there
        while claims := queue.claim(64, consumer="a"):
            assert queue.ack_many(claims) == claims
        assert queue.depth(0) == QueueDepth(done=published)


def test_processes_that_claim_and_are_killed_lose_nothing_and_get_nothing_twice(path: Path) -> None:
    body = """
while claims := queue.claim(5, 10, consumer=str(os.getpid())):
    for claim in queue.ack_many(claims):
        print(claim.ticket_id, flush=True)
"""
    with SQLiteQueue(path, lease_s=0.2) as queue:
        queue.publish(tickets(2000))
        children = [process(path, body) for _ in range(3)]
        lines = [first_line(child) for child in children for _ in range(20)]
        trained = [line for line in lines if line]  # a child that started late may find nothing left
        for child in children:
            child.kill()
            assert child.stdout is not None
            trained += child.stdout.read().split()  # whole lines: a line is one write
            end(child)
        assert len(trained) == len(set(trained))
        while queue.depth().unfinished:
            trained += ids(queue.ack_many(queue.claim(64, 30, consumer="parent")))
        assert len(trained) == len(set(trained))
        assert queue.depth().done == 2000
        assert len(trained) >= 2000 - 3 * 5  # what a child had acknowledged and not yet printed


def test_a_waiting_process_wakes_for_a_publication(path: Path) -> None:
    with SQLiteQueue(path) as queue:
        child = process(
            path, "print('waiting', flush=True)\nprint(queue.claim(1, 60, consumer='child')[0].ticket_id, flush=True)"
        )
        try:
            assert first_line(child) == "waiting"
            queue.publish(ticket(0))
            assert first_line(child) == ticket(0).id
            assert child.wait() == 0
        finally:
            end(child)


def test_an_interrupt_ends_a_wait(path: Path) -> None:
    SQLiteQueue(path).close()
    body = """
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("waiting", flush=True)
    queue.claim(1, 60, consumer="child")
except KeyboardInterrupt: print("interrupted", flush=True)
"""
    child = process(path, body)
    try:
        assert first_line(child) == "waiting"
        child.send_signal(signal.SIGINT)
        assert first_line(child) == "interrupted"
        assert child.wait() == 0
    finally:
        end(child)
