"""Rings in files: what is unread waits there for the next writer, and what is no ring is refused and left as it is."""

from __future__ import annotations

import json
import os
import secrets
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from claimed import claim_each
from helpers import Child
from preloaded import needs_compiler, preloaded
from ring_files import SCHEMA, forget, links_to, payload, take_all

from transport import RingOptions, Rollout, SharedRingBuffer, open_rings
from transport.cli import run
from transport.errors import LayoutError, RingBusyError, RingNotFoundError, SharedMemoryError, UsageError
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.options import ServerOptions
from transport.ring.attachment import attached
from transport.schema import Schema

WRITER = """
import os, signal, sys
from ring_files import SCHEMA, payload
from transport import SharedRingBuffer
ring = SharedRingBuffer.create(SCHEMA, slots=4, file=sys.argv[1])
for number in range(3):
    ring.write(payload(number))
lease = ring.reserve()
print(ring.name, ring.ring_id, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "rollout-3.ring"
    yield path
    forget(path)


def made(file: Path, /, **options: object) -> SharedRingBuffer:
    return SharedRingBuffer.create(SCHEMA, **{"slots": 4, "file": file, **options})  # type: ignore[arg-type]


def test_what_a_writer_left_unread_when_it_closed_is_there_for_the_next_one(file: Path) -> None:
    with made(file) as first:
        first.write_many(map(payload, range(3)))
        assert first.file == str(file)
        name, ring_id = first.name, first.ring_id
    with made(file, sync="publish") as second:
        assert (second.name, second.ring_id) == (name, ring_id)
        second.write(payload(3))
        assert take_all(second, ConsumedRecord()) == [0, 1, 2, 3]
        assert second.statistics().torn == 0
    assert file.exists()
    assert links_to(file) == []  # nothing is in it that another process could read


def test_what_a_killed_writer_had_written_is_claimed_with_or_without_another_writer(file: Path) -> None:
    with Child(WRITER, file) as child:
        name, ring_id = child.line().split()
        child.kill()
    record = ConsumedRecord()
    with SharedRingBuffer.attach(name, SCHEMA, role="reader") as reader:
        [claim] = claim_each(reader, 1)
        assert record.accept(*claim.ticket.identity, 0)
        assert claim.consume()
    forget(file)  # the host starts again
    with made(file) as second:
        assert (second.name, second.ring_id) == (name, ring_id)
        assert second.native.torn == 0
        assert take_all(second, record) == [1, 2]
        assert second.statistics().writing == 0


def test_a_file_that_is_opened_again_is_not_found_before_its_data_begin(file: Path) -> None:
    with made(file) as first:
        first.end_data()
    with made(file, begins=False) as second, attached(second.name, "observer") as seen:
        assert not seen.native.drained  # the end was that of the first one
        for role in ("writer", "reader", "observer"):
            with pytest.raises(RingNotFoundError):
                SharedRingBuffer.attach(second.name, SCHEMA, role=role)  # type: ignore[arg-type]
        second.begin_data()
        second.write(payload(0))
        with SharedRingBuffer.attach(second.name, SCHEMA, role="reader") as reader:
            assert take_all(reader, ConsumedRecord()) == [0]


def test_a_file_whose_trainer_is_still_there_keeps_its_end_until_the_next_data_begin(file: Path) -> None:
    with made(file) as first:
        reader = SharedRingBuffer.attach(first.name, SCHEMA, role="reader")
        first.end_data()
    with reader, made(file, begins=False) as second:
        with SharedRingBuffer.attach(second.name, SCHEMA, role="observer") as late:
            assert not late.native.ended  # whoever writes it is here
        second.close()
        assert reader.native.drained
        with made(file):
            assert not reader.native.ended


def test_what_is_unread_in_a_file_waits_when_its_next_set_up_fails(file: Path, shown: Callable[..., Any]) -> None:
    """Nobody takes it from a ring without a writer meanwhile, and the commands go on."""
    run = f"rings:files-{secrets.token_hex(4)}-"
    with made(file) as first:
        first.write_many(map(payload, range(3)))
        first.end_data()
    too_many = ServerOptions(ports=(0,) * 40)
    with pytest.raises(UsageError):
        Rollout(SCHEMA, run, slots=4, mode="thread", ring=RingOptions(file=file), server=too_many)
    with open_rings(run) as rings:
        assert rings.take_parts(1, 0.0, consumer="a trainer") == []
        assert not rings.has_met_rings()
    [link] = links_to(file)
    name = f"/{link.name}"
    [seen] = [each for each in shown("reclaim", "--dry-run")["segments"] if each["name"] == name]
    assert (seen["ready"], seen["dead"], seen["file"]) == (3, True, str(file))
    assert shown("queue", run)["files"] == [str(file)]
    assert shown("reclaim", name)["removed"] == 1
    with Rollout(SCHEMA, run, slots=4, mode="thread", drain_s=0.0, ring=RingOptions(file=file)) as rollout:
        assert take_all(rollout.ring, ConsumedRecord()) == [0, 1, 2]


def test_a_file_has_one_writer_whatever_the_names(file: Path) -> None:
    with made(file), pytest.raises(RingBusyError, match="one writer at a time"):
        made(file, prefix="another-run-")
    with made(file, prefix="another-run-") as second:
        assert links_to(file) == [Path(f"/dev/shm{second.name}")]


def test_the_name_of_a_former_run_goes_with_the_next_one(file: Path) -> None:
    with made(file, prefix="first-") as first:
        first.write(payload(0))
    assert links_to(file) == [Path(f"/dev/shm{first.name}")]
    with made(file, prefix="second-") as second:
        assert links_to(file) == [Path(f"/dev/shm{second.name}")]
        assert take_all(second, ConsumedRecord()) == [0]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"name": "a"}, "the file names the ring"),
        ({"file": None, "sync": "publish"}, "there is no file"),
        ({"sync": "always"}, "choose 'never' or 'publish'"),
        ({"file": "/no/such/folder/ring"}, "a folder that exists"),
        ({"file": "/tmp"}, "names no file"),
        ({"file": ""}, "names no file"),
        ({"file": 3}, "give the path"),
    ],
)
def test_what_makes_no_sense_is_refused(file: Path, options: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        made(file, **options)
    assert not file.exists()


def test_a_file_that_does_not_fit_leaves_nothing(file: Path) -> None:
    with pytest.raises(SharedMemoryError, match="another file system"):
        SharedRingBuffer.create(slots=4, slot_bytes=1 << 50, file=file)
    assert not file.exists()
    assert links_to(file) == []


def _without_size(data: bytes) -> bytes:
    return data[:16] + struct.pack("=Q", 5) + data[24:]


def _with_another_secret(data: bytes) -> bytes:
    return data[:72] + bytes([data[72] ^ 1]) + data[73:]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data[: len(data) // 2], "header says"),
        (lambda data: data[:100], "truncated"),
        (lambda data: b"something else of its user's" * 1000, "not a ring"),
        (lambda data: data[:8] + struct.pack("=I", 99) + data[12:], "layout version 99"),
        (_without_size, "sizes contradict"),
        (_with_another_secret, "header is damaged"),
        (lambda data: data[:12] + bytes(4) + data[16:], "not a ring"),
    ],
)
def test_a_file_that_is_no_ring_any_more_is_refused_and_left_as_it_is(file: Path, change: object, match: str) -> None:
    with made(file) as ring:
        ring.write(payload(0))
    forget(file)
    changed = change(file.read_bytes())  # type: ignore[operator]
    file.write_bytes(changed)
    with pytest.raises(LayoutError, match=match):
        made(file)
    assert file.read_bytes() == changed
    assert links_to(file) == []


@pytest.mark.parametrize("other", [{"slots": 5}, {"slot_bytes": 1 << 20}, {"consumers": ["reference", "train"]}])
def test_another_layout_is_refused_and_what_is_unread_stays(file: Path, other: dict[str, object]) -> None:
    with made(file) as ring:
        ring.write(payload(0))
    with pytest.raises(LayoutError):
        made(file, **other)
    with pytest.raises(LayoutError, match="another fingerprint"):
        SharedRingBuffer.create(Schema.of(other=("int8",)), slots=4, slot_bytes=ring.slot_capacity, file=file)
    with made(file) as ring:
        assert take_all(ring, ConsumedRecord()) == [0]


def test_payloads_with_changed_bytes_are_counted_and_freed_and_the_others_are_there(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with made(file) as ring:
        tickets = [ring.write(payload(number)) for number in range(4)]
    data = bytearray(file.read_bytes())
    bytes_of = np.asarray(payload(1)["data"]).tobytes()
    at = bytes(data).index(bytes_of)
    data[at + 100] ^= 1
    at = bytes(data).index(tickets[2].encode())  # the ticket of another one
    data[at + 20] ^= 1
    file.write_bytes(data)
    with made(file) as ring:
        assert "2 payloads not as published" in caplog.text
        assert ring.statistics().torn == 2
        assert take_all(ring, ConsumedRecord()) == [0, 3]
        ring.write_many(map(payload, range(4)))
        assert len(take_all(ring, ConsumedRecord())) == 4


@pytest.mark.nightly
@needs_compiler
def test_a_payload_that_the_disk_does_not_take_is_not_published(file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    child = f"""
import pathlib, sys
from ring_files import SCHEMA, payload
from transport import SharedRingBuffer
from transport.errors import RingError
broken = pathlib.Path({str(broken)!r})
with SharedRingBuffer.create(SCHEMA, slots=4, file=sys.argv[1], sync="publish") as ring:
    ring.write(payload(0))
    broken.touch()
    for write in (lambda: ring.write(payload(1)), lambda: ring.write_many(map(payload, range(2, 5)))):
        try:
            write()
        except RingError as error:
            assert "fdatasync" in str(error), error
        else:
            raise AssertionError("it was written")
        assert (ring.statistics().ready, ring.statistics().writing) == (1, 0)
    broken.unlink()
    ring.write_many(map(payload, range(5, 8)))
print("done", flush=True)
"""
    with Child(child, file, env=preloaded("synced", tmp_path) | {"SYNCED_BROKEN": str(broken)}) as writer:
        assert writer.line() == "done"
        assert writer.wait() == 0
    with made(file) as ring:
        assert take_all(ring, ConsumedRecord()) == [0, 5, 6, 7]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What a command shows as JSON."""

    def show(*command: str) -> Any:
        assert run([*command, "--json", "-"]) == 0
        return json.loads(capsys.readouterr().out)

    return show


def test_the_commands_show_the_file_and_reclaim_removes_the_name_alone(file: Path, shown: Callable[..., Any]) -> None:
    with Child(WRITER, file) as child:
        name, _ = child.line().split()
        [seen] = [each for each in shown("reclaim", "--dry-run")["segments"] if each["name"] == name]
        assert (seen["file"], seen["dead"]) == (str(file), False)
        [seen] = shown("top", "--once", name)["rings"]
        assert seen["file"] == str(file)
        assert shown("queue", f"rings:{name.removeprefix('/transport-')}")["files"] == [str(file)]
        child.kill()
    report = shown("reclaim", name)
    assert (report["removed"], report["bytes_freed"]) == (1, 0)
    assert links_to(file) == []
    with made(file) as ring:
        assert take_all(ring, ConsumedRecord()) == [0, 1, 2]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_file_of_another_user_is_refused_and_left_as_it_is() -> None:
    child = """
import os, sys
from pathlib import Path
from ring_files import SCHEMA, payload
from transport import RingOptions, Rollout, SharedRingBuffer
from transport.errors import SharedMemoryError
theirs, own = map(Path, sys.argv[1:])
values = payload(1)
os.setgroups([]), os.setgid(65534), os.setuid(65534)
for options in ({"ring": RingOptions(file=theirs)}, {"file": theirs}):
    try:
        (Rollout if "ring" in options else SharedRingBuffer.create)(SCHEMA, slots=4, **options)
    except SharedMemoryError as error:
        print(error, flush=True)
with SharedRingBuffer.create(SCHEMA, slots=4, file=own) as ring:
    ring.write(values)
    print(ring.name, flush=True)
"""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        mine, theirs = Path(folder, "mine"), Path(folder, "theirs")
        with made(mine) as ring:
            ring.write(payload(0))
        forget(mine)
        with Child(child, mine, theirs) as another:
            for _ in range(2):
                assert "Permission denied" in another.line()
            name = another.line()
            assert another.wait() == 0
        with pytest.raises(SharedMemoryError, match="belongs to user 65534"):
            made(theirs)
        with pytest.raises(SharedMemoryError, match="belongs to user 65534"):
            SharedRingBuffer.attach(name, SCHEMA, role="reader")
        with made(mine) as ring:
            assert take_all(ring, ConsumedRecord()) == [0]
        for file in (mine, theirs):
            forget(file)


@pytest.mark.nightly
def test_the_name_of_a_file_that_was_deleted_is_reclaimed(file: Path, shown: Callable[..., Any]) -> None:
    with made(file) as ring:
        ring.write(payload(0))
    file.unlink()
    [seen] = [each for each in shown("reclaim")["segments"] if each["name"] == ring.name]
    assert (seen["unreadable"], seen["removed"]) == ("its file is gone", True)
    assert not os.path.lexists(f"/dev/shm{ring.name}")
    with made(file) as ring:  # a new one
        assert ring.statistics().ready == 0
