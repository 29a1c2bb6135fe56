"""Checkpoints in S3, whose server is killed, throttled, or holds what a killed uploader left. The server is moto's."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from claimed import claim_each, consumed
from cooldown_runs import Run
from helpers import Child, asynchronous, until
from silent_server import silent_server

from transport import SharedRingBuffer
from transport.claims.open import given_rings
from transport.cooldown import (
    CheckpointProof,
    CooldownHost,
    EpochRecord,
    Outcome,
    Part,
    open_destination,
    recorded_outcomes,
    restore,
)
from transport.cooldown import client as client_module
from transport.cooldown.destinations import base, bucket
from transport.cooldown.destinations.s3 import S3
from transport.cooldown.epochs.records import Phase, Refusal, ReportKind, UploadReport
from transport.cooldown.pruning import carry_out, plan
from transport.cooldown.upload import Uploaded, upload
from transport.cooldown.verify import RefusedUpload, verified
from transport.errors import DestinationError
from transport.snapshots import Saved, snapshot
from transport.store.sqlite import SQLiteStore

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("moto", "s3fs", "flask"))), reason="needs moto's server and s3fs"
)
MODEL = {"large": secrets.token_bytes(17 << 20), "small": b"1"}  # four parts, and none
RECORD = EpochRecord(run="run", epoch=7, destination="", cooldown_s=60.0, seed=1, step=30, clients=("a",))
ATTEMPT = "0" * 16


@pytest.fixture(scope="module", autouse=True)
def shared() -> Iterator[Child]:
    """A server for the tests that do not kill theirs. Before the first leak check: fsspec's thread stays for life."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing-only")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")  # s3fs repeats as well
        patch.setattr(bucket, "PART", 5 << 20)  # the least that S3 takes
        patch.setenv("AWS_ENDPOINT_URL", "")
        with serving() as server:
            with open_destination("s3://checkpoints") as place:
                place.put("first", b"")
            yield server


@contextlib.contextmanager
def serving(port: int = 0) -> Iterator[Child]:
    """A server with an empty bucket "checkpoints"; each is a process that forgets everything when it ends."""
    with Child("import s3_server; s3_server.main()", port, stderr=subprocess.DEVNULL) as server:
        os.environ["AWS_ENDPOINT_URL"] = server.line()
        with open_destination("s3://checkpoints") as place:
            assert isinstance(place, S3)
            place._fs.mkdir("checkpoints")
        yield server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "")
    with serving() as each:
        yield each


@pytest.fixture
def place() -> Iterator[S3]:
    with open_destination(f"s3://checkpoints/{secrets.token_hex(4)}") as each:
        assert isinstance(each, S3)
        yield each


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(tmp_path / "model", 1)
    return tmp_path / "model"


def save(folder: Path, step: int) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in MODEL.items():
        (folder / name).write_bytes(data)


def report(done: Uploaded) -> UploadReport:
    return UploadReport(
        run="run", epoch=7, client="a", kind=ReportKind.UPLOADED, attempt=ATTEMPT, manifest_sha256=done.sha256
    )


# --- proofs -----------------------------------------------------------------------------------------
@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose bytes were read back from the service."""
    names: list[str] = []
    pieces = S3.pieces
    monkeypatch.setattr(S3, "pieces", lambda self, path: (names.append(path.rpartition("/")[2]), pieces(self, path))[1])
    return names


def test_an_upload_is_proven_by_the_services_checksums_alone(place: S3, model: Path, read: list[str]) -> None:
    done = upload(model, place, RECORD, "a", ATTEMPT)
    assert verified(place, RECORD, report(done)).bytes == sum(map(len, MODEL.values()))
    assert read == ["manifest.json"]
    verified(place, RECORD, report(done), proof=CheckpointProof.READ)
    assert {*read} == {"manifest.json", *MODEL}
    assert done.manifest.files[0].proofs["etag"].endswith("-4")


def test_what_was_altered_in_the_store_is_refused(place: S3, model: Path) -> None:
    done = upload(model, place, RECORD, "a", ATTEMPT)
    place.put(done.manifest.path(done.manifest.files[1]), b"2")
    with pytest.raises(RefusedUpload) as caught:
        verified(place, RECORD, report(done))
    assert caught.value.refusal is Refusal.WRONG_CHECKSUM


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    "stored", [{"etag": "0" * 32}, {"of another kind": "0" * 32}, {}], ids=["other", "unknown", "none"]
)
def test_a_service_with_other_checksums_is_read_back(
    place: S3, model: Path, monkeypatch: pytest.MonkeyPatch, read: list[str], stored: dict[str, str]
) -> None:
    """As where it encrypts with keys of its own: a proof that differs refutes nothing, and proves nothing."""
    done = upload(model, place, RECORD, "a", ATTEMPT)
    monkeypatch.setattr(S3, "proofs", lambda self, path: stored)
    assert verified(place, RECORD, report(done)).files == 2
    assert sorted(read) == ["large", "manifest.json", "small"]
    place.put(done.manifest.path(done.manifest.files[1]), b"2")
    with pytest.raises(RefusedUpload) as caught:
        verified(place, RECORD, report(done))
    assert caught.value.refusal is Refusal.WRONG_CHECKSUM


def test_parts_of_a_file_are_sent_at_the_same_time(shared: Child, place: S3, model: Path) -> None:
    shared.tell("pair")
    upload(model, place, RECORD, "a", ATTEMPT)
    shared.tell("said")
    assert int(shared.line().split()[1]) >= 2


# --- a service that slows down, or ends -------------------------------------------------------------
def test_a_throttled_upload_is_slower_and_whole(shared: Child, place: S3, model: Path, tmp_path: Path) -> None:
    shared.tell("throttle 6")
    done = upload(model, place, RECORD, "a", ATTEMPT)
    shared.tell("said")
    assert int(shared.line().split()[0]) == 6
    assert verified(place, RECORD, report(done), proof=CheckpointProof.READ).files == 2


def test_parts_that_cannot_be_removed_are_named_in_the_log_without_secrets(
    server: Child, place: S3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STORE_TOKEN", "127.0.0.1")  # part of what s3fs says
    more = 0

    def pieces() -> Iterator[bytes]:
        nonlocal more
        yield bytes(6 << 20)
        server.kill()
        more += 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place.write("step/model", 17 << 20, pieces())
    assert more
    assert "cannot remove the parts of step/model" in caplog.text
    assert "127.0.0.1" not in caplog.text


def client_host(run: Run) -> CooldownHost:
    return CooldownHost(run.store, "run", "s3://checkpoints/below", cooldown_s=60.0, seed=49, clock=run.clock)


@pytest.fixture
def cooling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(client_module, "AGAIN_FIRST_S", 0.01)
    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        yield Run(tmp_path, store)


@asynchronous
async def test_a_server_that_is_killed_in_the_middle_gets_the_checkpoint_when_it_is_back(
    server: Child, cooling: Run
) -> None:
    """It comes back empty, as a service would that lost everything: worse than those that keep what was complete."""
    port = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
    killed: list[int] = []

    def progress(done: int, files: int, size: int) -> None:
        if size > 12 << 20 and not killed:
            server.kill()
            killed.append(size)

    host = client_host(cooling)
    await host.open(7)
    leading = asyncio.create_task(host.cooldown(7, 30, ["a"]))
    taking = asyncio.create_task(cooling.client("a", save=save, progress=progress).cooldown(7))
    await until(lambda: cooling.record(7).notes.get("a"))
    assert killed
    assert cooling.record(7).notes["a"].kind is ReportKind.FAILED
    with serving(port):
        assert (await taking).part is Part.WON
        record = await leading
        assert record.outcome is Outcome.CHECKPOINTED
        with open_destination(record.destination) as place:
            assert recorded_outcomes(place, "run") == {7: record}
            files = restore(record, place, cooling.path / "restored").files
        assert {name: path.read_bytes() for name, path in files.items()} == MODEL


UPLOADER = """
import os, sys
from pathlib import Path
from transport.cooldown import EpochRecord, open_destination
from transport.cooldown.destinations import bucket
from transport.cooldown.upload import upload
bucket.PART = 5 << 20
record = EpochRecord(run="run", epoch=7, destination="", cooldown_s=60.0, seed=1)
def progress(done, files, size):
    if size > 9 << 20:
        print("half", flush=True)
        sys.stdin.readline()
with open_destination(sys.argv[2]) as place:
    upload(Path(sys.argv[1]), place, record, "a", "0" * 16, progress=progress)
"""


def test_what_a_killed_uploader_left_is_found_and_removed(place: S3, model: Path) -> None:
    (model / "small").unlink()  # nothing of the upload is an object
    with Child(UPLOADER, model, place.url) as child:
        assert child.line() == "half"
        child.kill()
    left = place.leftovers("run")
    assert left == [f"run/epoch-000000000007/a/{ATTEMPT}/files/large"]
    assert place.leftovers("other") == []
    ended = msgspec.structs.replace(RECORD, phase=Phase.ENDED, outcome=Outcome.TIMED_OUT)
    found = plan({7: ended}, place, "run", 1)
    assert [(each.what, each.path) for each in found.surplus] == [("unfinished", left[0])]
    carry_out(found, place, "run")
    assert place.leftovers("run") == []


def test_a_service_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(base, "ANSWER_S", 0.2)
    with silent_server() as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        with open_destination("s3://checkpoints") as place:
            with pytest.raises(DestinationError, match=r"cannot look at a: .*[Tt]imeout"):
                place.size("a")
            monkeypatch.setattr(base, "REQUEST_S", 1.0)
            with pytest.raises(DestinationError, match=r"cannot write c: .*[Tt]imeout"):
                place.put("c", b"x")
            with pytest.raises(DestinationError, match=r"cannot write b: .*[Tt]imeout"):
                place.write("b", 6 << 20, [bytes(6 << 20)])


def test_the_operator_s_own_configuration_of_botocore_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    for protocol in ("s3", "s3a"):
        monkeypatch.delitem(fsspec.config.conf, protocol, raising=False)
    own = {"s3": {"addressing_style": "path"}, "user_agent_extra": "operator/1", "read_timeout": 33}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": own})
    with open_destination("s3://checkpoints") as place:
        assert isinstance(place, S3)
        place.put("a", b"x")
        config = place._fs.s3.meta.config
        assert config.s3["addressing_style"] == "path"
        assert "operator/1" in config.user_agent
        assert (config.connect_timeout, config.read_timeout) == (base.CONNECT_S, 33)
    assert own.keys() == {"s3", "user_agent_extra", "read_timeout"}


# --- snapshots of rings -------------------------------------------------------------------------------
def test_a_snapshot_of_several_parts_and_blocks_goes_there_and_back() -> None:
    given = [secrets.token_bytes(size) for size in (9 << 20, 1, 9 << 20, 7 << 20)]
    with SharedRingBuffer.create(slots=4, slot_bytes=9 << 20) as ring:
        for number, data in enumerate(given):
            ring.write_raw(data, metadata={"number": number})
        with given_rings(ring) as queue:
            manifest = snapshot(queue, "s3://checkpoints/snapshots", 3).wait(60)
        consumed(ring, 4)
    [part] = manifest.rings
    assert part.data is not None and len(part.data.blocks) == 2
    found = []
    for number in (0, 1):
        with (
            SharedRingBuffer.create(slots=2, slot_bytes=9 << 20) as ring,
            Saved("s3://checkpoints/snapshots", 3) as saved,
        ):
            saved.restore(ring, share=(number, 2))
            found += [bytes(claim.payload["data"]) for claim in claim_each(ring, 4)]
    assert found == given


@pytest.mark.nightly
def test_a_server_that_is_killed_during_a_snapshot_is_an_error_and_the_ring_is_free(server: Child) -> None:
    with SharedRingBuffer.create(slots=4, slot_bytes=9 << 20) as ring:
        for _ in range(4):
            ring.write_raw(bytes(9 << 20))
        with given_rings(ring) as queue:
            taken = snapshot(queue, "s3://checkpoints", 3, progress=lambda *_: server.kill())
            with pytest.raises(DestinationError):
                taken.wait(90)
        assert consumed(ring, 4) == 4 and ring.statistics().free == 4


def test_a_configuration_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": "path"})
    with pytest.raises(DestinationError, match="s3://checkpoints: cannot be opened"):
        open_destination("s3://checkpoints")
