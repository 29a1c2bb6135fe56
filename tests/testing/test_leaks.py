"""The leak check finds what it is there to find, and names it."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from helpers import Child
from supervised import read_all, write

from transport import BlockingClient, SharedRingBuffer, Ticket
from transport.client.payload import ReadOutcome
from transport.testing import ResourceSnapshot, leaks, run


def test_a_descriptor_is_named_with_its_target(tmp_path: Path) -> None:
    before = ResourceSnapshot.take()
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert before.leaks(grace_s=0) == [f"descriptor {descriptor} of {tmp_path}"]
    os.close(descriptor)
    assert before.leaks() == []


def test_a_thread_gets_time_to_end() -> None:
    before = ResourceSnapshot.take()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="straggler")
    thread.start()
    assert before.leaks(grace_s=0) == ["thread 'straggler'"]
    stop.set()
    assert before.leaks() == []


LEAKS_A_SEGMENT = """
import subprocess, sys
from mounts import own_shared_memory
if not own_shared_memory():
    print("no /dev/shm of its own")
    raise SystemExit
from transport import SharedRingBuffer
from transport.testing import ResourceSnapshot
before = ResourceSnapshot.take()
ring = SharedRingBuffer.create(slots=1, slot_bytes=100)
segment = f"shared memory /dev/shm/{ring.name.removeprefix('/')}"
print(segment in before.leaks(grace_s=0))
# A process that is no descendant: its parent has ended, and it does not carry the mark.
uses = "import os, sys; from transport import SharedRingBuffer; print(os.getpid(), flush=True); sys.stdin.read()"
starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {uses!r}], env={{}})"
with subprocess.Popen([sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
    stranger = int(parent.stdout.readline())
    parent.wait()
    print(segment not in before.leaks(grace_s=0))
    parent.stdin.close()
    while parent.stdout.read():
        pass
print(segment in before.leaks(grace_s=0))
ring.close()
print(before.leaks())
"""


def test_a_ring_that_was_not_closed_is_named_unless_a_stranger_may_have_made_it() -> None:
    with Child(LEAKS_A_SEGMENT, env={leaks._MARK: "another"}) as child:
        if (line := child.line()).startswith("no"):
            pytest.skip(line)
        assert [line, *(child.line() for _ in range(3))] == ["True", "True", "True", "[]"]


def test_a_segment_of_a_process_that_was_there_before_counts_when_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaks, "_strangers_run", lambda ours: False)
    segment = Path("/dev/shm") / f"{leaks.SEGMENT_PREFIX}{uuid.uuid4().hex}"
    code = (
        "import mmap, sys\n"
        "input()\n"
        "file = open(sys.argv[1], 'wb+')\n"
        "file.truncate(4096)\n"
        "mapped = mmap.mmap(file.fileno(), 4096)\n"
        "print('mapped', flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", code, str(segment)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            before = ResourceSnapshot.take()
            child.stdin.write(b"\n")
            child.stdin.flush()
            assert child.stdout.readline() == b"mapped\n"
            assert f"shared memory {segment}" not in before.leaks(grace_s=0)
            child.communicate(b"\n")
            assert f"shared memory {segment}" in before.leaks(grace_s=0)
        finally:
            segment.unlink(missing_ok=True)


def test_a_child_is_named_alive_or_not_waited_for() -> None:
    before = ResourceSnapshot.take()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert child.stdin is not None
    assert any(leak.startswith(f"child process {child.pid} (") for leak in before.leaks(grace_s=0))
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    [zombie] = before.leaks(grace_s=0)
    assert zombie.endswith("ended but not waited for)")
    child.wait()
    assert before.leaks() == []


def test_a_process_whose_parent_is_gone_is_found_by_its_mark() -> None:
    before = ResourceSnapshot.take()
    grandchild = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True)"
    parent = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.wait()
    assert any(f"process {pid} (" in leak for leak in before.leaks(grace_s=0))
    parent.stdin.close()
    parent.stdout.close()
    assert before.leaks() == []


def test_a_child_with_the_number_of_an_ended_stranger_is_found() -> None:
    before = ResourceSnapshot.take()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        leaks._elders.add((0, child.pid))  # the folder of a process that had its number has another inode
        assert any(leak.startswith(f"child process {child.pid} (") for leak in before.leaks(grace_s=0))
        assert child.stdin is not None
        child.stdin.close()
    assert before.leaks() == []
    assert (0, child.pid) not in leaks._elders, "what has ended is forgotten"


CHECKED = """
import os, threading, pytest

@pytest.fixture(scope="module")
def shared():
    descriptor = os.open("/", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)

def test_of_nothing(): pass
def test_opens_what_is_shared(shared): pass
def test_leaves_a_descriptor(shared): os.open("/tmp", os.O_RDONLY)
def test_after_it(shared): pass
def test_leaves_a_thread(): threading.Thread(target=threading.Event().wait, name="straggler", daemon=True).start()
def test_after_that(): pass
"""


@pytest.mark.nightly
def test_the_check_of_this_suite_names_what_each_test_leaves_behind_and_spares_what_tests_share(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(CHECKED)
    tests = Path(__file__).parents[1]
    search = os.pathsep.join(map(str, (tests, tests / "support")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "PYTHONPATH": search}, cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert "6 passed, 2 errors" in done.stdout, done.stdout
    for test, what in [("leaves_a_descriptor", " of /tmp"), ("leaves_a_thread", "thread 'straggler'")]:
        _, of_the_test, rest = done.stdout.partition(f"ERROR at teardown of test_{test} _")
        assert of_the_test, done.stdout
        [named] = [line for line in rest.splitlines() if line.startswith("left behind: ")][:1]
        assert named.endswith(what), named
        assert ";" not in named


def test_a_pending_task_is_named() -> None:
    before = ResourceSnapshot.take()

    async def sleeper() -> None:
        await asyncio.sleep(60)

    async def leave() -> list[str]:
        task = asyncio.create_task(sleeper(), name="sleepy")
        await asyncio.sleep(0)
        leaks = [leak for leak in before.leaks(grace_s=0) if "sleepy" in leak]
        task.cancel()
        return leaks

    loop = asyncio.new_event_loop()
    try:
        [leak] = loop.run_until_complete(leave())
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()
    assert leak.startswith("task 'sleepy' of ")


def test_run_returns_the_result_and_refuses_tasks_left_behind() -> None:
    async def good() -> int:
        return 5

    async def untidy() -> None:
        asyncio.create_task(asyncio.sleep(60), name="forgotten")  # noqa: RUF006

    assert run(good()) == 5
    with pytest.raises(AssertionError, match="left behind: task 'forgotten' of sleep"):
        run(untidy())


# --- what other tests rely on --------------------------------------------------------------------------
class _Forgetful:
    """A client whose `read_many` keeps the last payload to itself, or hands the first one out again."""

    def __init__(self, inner: BlockingClient, again: bool) -> None:
        self._inner = inner
        self._again = again

    async def read_many(self, tickets: list[Ticket]) -> AsyncIterator[ReadOutcome]:
        outcomes = list(self._inner.read_many(tickets))
        for outcome in [*outcomes[:-1], *([outcomes[0]] if self._again else [])]:
            yield outcome


@pytest.mark.ucx
@pytest.mark.parametrize("again", [False, True])
def test_a_payload_that_does_not_come_fails_whoever_reads_all(again: bool) -> None:
    with SharedRingBuffer.create(slots=8, slot_bytes=100) as ring, BlockingClient(wire={"mapped"}) as client:
        with pytest.raises((AssertionError, ValueError)):
            run(read_all(_Forgetful(client, again), write(ring, 3, size=100)))  # type: ignore[arg-type]
        gc.collect()
