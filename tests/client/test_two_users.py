"""Reader and writer of one host that are different users: by TCP, since neither may map the other's memory.

Real processes, which root gives their users.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import Child

from transport.errors import WireNotAllowedError
from transport.wires import settings_for

pytestmark = [
    pytest.mark.ucx,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes of two users"),
]

# What is read from disk is loaded first: the interpreter's files may be root's alone. A process that has changed its
# user counts as one that keeps a secret of the first; a user's own does not.
BECOME = """
import ctypes, encodings.idna, os, sys
import uvloop
from loopback import LOOPBACK, at
from transport import BlockingClient, SharedRingBuffer, Ticket, UCXXServer, errors
from transport.server import listener
from transport.wire import library as ucx
ucx.engine()
ucx.transports_here({})
user, group = int(sys.argv[1]), int(sys.argv[2])
os.setgroups([])
os.setresgid(group, group, group)
os.setresuid(user, user, user)
assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0
"""
WRITER = (
    BECOME
    + """
with (
    SharedRingBuffer.create(slots=4, slot_bytes=1 << 20) as ring,
    UCXXServer(ring, addresses=(LOOPBACK,), mode=sys.argv[3]),
):
    for size in (1000, 200_000, 1 << 20):
        print(ring.write_raw(bytes(size)).to_text(), flush=True)
    sys.stdin.readline()
"""
)
READER = (
    BECOME
    + """
wire = "auto" if sys.argv[3] == "auto" else set(sys.argv[3].split(","))
with BlockingClient(wire=wire) as client:
    for text in sys.argv[4:]:
        try:
            payload = client.read(Ticket.parse(text))
            print(payload.wire, len(bytes(payload.data)), flush=True)
        except errors.TransportError as error:
            print(type(error).__name__, flush=True)
"""
)

TAKER = (
    "from transport import Trainer\n"
    "Trainer(None, 'rings:nothing').close()\n"
    + BECOME
    + """
wire = "auto" if sys.argv[3] == "auto" else set(sys.argv[3].split(","))
[port] = Ticket.parse(sys.argv[4]).ports
with Trainer(None, f"rings://{at(port)}", wire=wire) as trainer:
    batch = trainer.take(3, 20.0, fill_s=20.0)
    batch.consume()
    print(*(payload.nbytes for payload in batch), batch.accepted.all(), flush=True)
"""
)


@contextlib.contextmanager
def written(user: int, group: int, mode: str) -> Iterator[list[str]]:
    """Tickets of payloads that another user's listeners serve."""
    with Child(WRITER, user, group, mode) as writer:
        yield [writer.line() for _ in range(3)]
        writer.tell()
        assert writer.wait() == 0


def said(user: int, group: int, wire: str, tickets: list[str]) -> list[str]:
    with Child(READER, user, group, wire, *tickets) as reader:
        lines = [reader.line() for _ in tickets]
        assert reader.wait() == 0
    return lines


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("wire", ["auto", "shm,tcp"])
@pytest.mark.parametrize(
    ("writer", "mode", "reader"),
    [
        pytest.param((0, 0), "process", (1000, 1000), id="the writer is root"),
        pytest.param((1000, 1000), "thread", (0, 0), id="the reader is root"),
        pytest.param((1000, 1000), "thread", (1001, 1001), id="neither is root"),
    ],
)
def test_another_users_payloads_are_read_by_tcp(
    wire: str, writer: tuple[int, int], mode: str, reader: tuple[int, int]
) -> None:
    with written(*writer, mode) as tickets:
        assert said(*reader, wire, tickets) == ["tcp 1000", "tcp 200000", "tcp 1048576"]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("wire", ["auto", "shm,tcp"])
@pytest.mark.parametrize(
    ("writer", "reader"), [((0, 0), (1000, 1000)), ((1000, 1000), (0, 0)), ((1000, 1000), (1001, 1001))]
)
def test_another_users_rings_are_a_queue_by_tcp(wire: str, writer: tuple[int, int], reader: tuple[int, int]) -> None:
    with written(*writer, "thread") as tickets, Child(TAKER, *reader, wire, tickets[0]) as taker:
        assert taker.line() == "1000 200000 1048576 True"
        assert taker.wait() == 0


def test_the_same_user_in_another_group_reads_by_tcp() -> None:
    """Of its own segment it may have a mapping; of another group's process it may see no descriptor."""
    with written(1000, 1000, "thread") as tickets:
        assert said(1000, 1001, "shm,tcp", tickets) == ["tcp 1000", "tcp 200000", "tcp 1048576"]


def test_shared_memory_alone_is_refused_where_it_cannot_work() -> None:
    with written(0, 0, "process") as tickets:
        assert said(1000, 1000, "shm", tickets) == [WireNotAllowedError.__name__] * 3


def test_the_same_user_goes_on_by_shared_memory() -> None:
    with written(1000, 1000, "thread") as tickets:
        assert said(1000, 1000, "shm", tickets) == ["shm 1000", "shm 200000", "shm 1048576"]


@pytest.mark.parametrize(
    ("theirs", "left"),
    [("all", "^sm"), ("^ib", "^ib,sm"), ("sm,tcp,self", "tcp,self"), ("posix,\\\\sysv,tcp:aux", "tcp:aux")],
)
def test_a_choice_of_transports_in_the_environment_holds_less_shared_memory(
    theirs: str, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.wires.user_settings", lambda: frozenset({"TLS"}))
    monkeypatch.setenv("UCX_TLS", theirs)
    settings: dict[str, Any] = settings_for(None, shared_memory=False, refused="")
    assert settings["TLS"] == left


def test_shared_memory_alone_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.wires.user_settings", lambda: frozenset({"TLS"}))
    monkeypatch.setenv("UCX_TLS", "sm")
    with pytest.raises(WireNotAllowedError, match="add tcp"):
        settings_for(None, shared_memory=False)
