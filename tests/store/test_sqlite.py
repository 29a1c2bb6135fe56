"""The store in an SQLite file: the common contract, and what only a file can get wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from helpers import SHM, in_thread
from properties import examples
from store_conformance import Harness, StoreConformance
from store_model import StoreMachine

from transport.errors import ClosedError, StoreFullError, StoreUnavailableError, StoreUnsuitableError, TransportError
from transport.store import Change, Entry, SQLiteStore, open_store, sqlite


class SQLiteHarness(Harness):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.path = directory / "store.db"

    def make(self, clock: Callable[[], float] | None, **options: Any) -> SQLiteStore:
        return SQLiteStore(self.path, clock=clock or time.monotonic, **options)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[SQLiteHarness]:
    harness = SQLiteHarness(tmp_path)
    yield harness
    harness.close()


class TestConformance(StoreConformance):
    pass


class SQLiteMachine(StoreMachine):
    @staticmethod
    def make_harness() -> SQLiteHarness:
        directory = tempfile.TemporaryDirectory(dir=SHM)  # in memory: what a disk keeps is not the model's
        harness = SQLiteHarness(Path(directory.name))
        close = harness.close

        def close_and_remove() -> None:
            close()
            directory.cleanup()

        harness.close = close_and_remove  # type: ignore[method-assign]
        return harness


TestModel = SQLiteMachine.TestCase
TestModel.settings = examples(12, stateful_step_count=25)


# --- the file ----------------------------------------------------------------------------------------
@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def test_open_store_opens_the_file_of_a_url(path: Path) -> None:
    with open_store(f"sqlite://{path}") as store:
        assert isinstance(store, SQLiteStore)
        store.put("a", b"1")
        assert repr(store) == f"<SQLiteStore {path} open>"
    with SQLiteStore(path) as store:
        assert list(store.scan("")) == ["a"]


@pytest.mark.parametrize("name", ["s" * 300, "folder"])
def test_a_file_that_cannot_be_made_is_no_store(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreUnsuitableError):
        SQLiteStore(tmp_path / name)


def test_the_file_of_another_program_is_no_store(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA application_id = 7")
    with pytest.raises(StoreUnsuitableError, match="belongs to another program"):
        SQLiteStore(path)


def test_a_full_store_is_an_error_and_stores_nothing_of_the_call(path: Path) -> None:
    with SQLiteStore(path, max_bytes=128 << 10) as store:
        version = store.put("a", b"1")
        with pytest.raises(StoreFullError, match="no room for the store"):
            store.put_many([Change(f"big/{number}", bytes(4096)) for number in range(100)])
        assert store.scan("") == {"a": Entry(b"1", version)}


def test_a_store_held_too_long_is_unavailable(path: Path) -> None:
    with SQLiteStore(path, busy_timeout_s=0.01) as store, contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="longer than the time limit"):
            store.put("a", b"1")
        assert store.get("a") is None  # reading waits for nobody


def test_a_reboot_ends_every_lease(harness: SQLiteHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    store = harness.open()
    store.put("leased", b"1", lease_s=1e6)
    kept = store.put("kept", b"1")
    store.close()
    monkeypatch.setattr(sqlite, "boot_id", lambda: "another boot")
    harness.now = 5.0  # the clock begins anew
    assert harness.open().scan("") == {"kept": Entry(b"1", kept)}


def test_a_killed_process_leaves_whole_writes_only(path: Path) -> None:
    program = f"""
from transport.store import Change, SQLiteStore
store = SQLiteStore({str(path)!r})
number = 0
while True:
    number += 1
    store.put_many([Change("x/a", b"%d" % number), Change("x/b", b"%d" % number)])
    if number == 20: print("going", flush=True)
"""
    with SQLiteStore(path) as store:
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "going\n"
        child.kill()
        child.wait()
        child.stdout.close()
        one, other = store.get_many(["x/a", "x/b"])
        assert one and other and one.value == other.value
        assert store.compare_and_set("x/a", b"mine", one.version)


def test_a_process_that_is_stopped_in_a_transaction_is_named_and_not_continued(path: Path) -> None:
    program = f"""
import os, signal
from transport.store import SQLiteStore
store = SQLiteStore({str(path)!r})
with store._database.transaction() as connection:
    connection.execute("UPDATE revision SET latest = latest + 100")
    print("in it", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
print("over", flush=True)
"""
    with SQLiteStore(path, busy_timeout_s=1.5) as store:
        first = store.put("a", b"1")
        with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "in it\n"
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            with pytest.raises(StoreUnavailableError, match=rf"process {child.pid} ") as raised:
                store.put("a", b"2")
            assert raised.value.retryable
            assert store.get("a") == Entry(b"1", first)  # reading waits for nobody
            assert not os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOHANG)
            child.send_signal(signal.SIGCONT)
            assert child.stdout.readline() == "over\n"
            assert store.put("a", b"2") == first + 101  # after the whole of the stopped transaction


def test_a_write_that_waits_for_another_process_holds_up_no_other_thread(path: Path) -> None:
    with SQLiteStore(path, busy_timeout_s=30) as store, contextlib.closing(sqlite3.connect(path)) as other:
        first = store.put("a", b"1")
        other.execute("BEGIN IMMEDIATE")
        connection = store._database._connection
        assert connection is not None
        tried = threading.Event()
        connection.set_trace_callback(lambda statement: tried.set() if "BEGIN" in statement else None)

        def write() -> type[TransportError]:
            with pytest.raises(TransportError) as raised:
                store.put("a", b"2")
            return raised.type

        errors, thread = in_thread(write)
        tried.wait()
        assert store.get("a") == Entry(b"1", first)
        store.close()  # while it waits
        thread.join()
        assert errors == [ClosedError]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # what is tested is that it is safe
def test_a_forked_child_and_its_parent_use_the_store(path: Path) -> None:
    with SQLiteStore(path) as store:
        found, thread = in_thread(lambda: store.watch("a", 0, 30))
        child = os.fork()
        if not child:
            store.put("a", b"the child's")
            os._exit(0)
        thread.join()
        assert os.waitpid(child, 0)[1] == 0
        assert found[0].value == b"the child's"
        assert store.add("n") == 1


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_file_that_is_removed_while_it_is_in_use_is_refused(tmp_path: Path, replaced: bool) -> None:
    """Processes that have it open would go on among themselves, and new ones would begin another file."""
    path = tmp_path / "store.sqlite3"
    with SQLiteStore(path) as store:
        store.put("a", b"1")
        for file in tmp_path.glob("store.sqlite3*"):
            file.unlink()
        if replaced:
            SQLiteStore(path).close()
        with pytest.raises(StoreUnsuitableError, match="was removed while it was in use; restart every process of it"):
            store.put("a", b"2")


def test_a_database_whose_making_is_interrupted_at_once_ends_without_an_error() -> None:
    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is sqlite._Database.__init__.__code__:
            raise KeyboardInterrupt

    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            SQLiteStore("no file is made")
    finally:
        sys.settrace(None)
