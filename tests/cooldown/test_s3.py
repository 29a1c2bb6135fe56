"""Checkpoints and snapshots in S3 beside what every service does: its parts, its checksums, its configuration."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from checkpoint_services import PART, S3, SECRET
from claimed import claim_each, consumed
from helpers import Child
from silent_server import silent_server

from transport import SharedRingBuffer
from transport.claims.open import given_rings
from transport.cooldown import EpochRecord, Outcome, open_destination
from transport.cooldown.destinations import base
from transport.cooldown.destinations.base import check_permissions
from transport.cooldown.destinations.bucket import Bucket
from transport.cooldown.epochs.records import Phase, Refusal, ReportKind, UploadReport
from transport.cooldown.pruning import carry_out, plan
from transport.cooldown.upload import Uploaded, upload
from transport.cooldown.verify import RefusedUpload, verified
from transport.errors import DestinationError
from transport.snapshots import Saved, prune, snapshot
from transport.snapshots.manifest import place_of

SERVICE = S3
pytestmark = pytest.mark.usefixtures("shared")
MODEL = {"large": secrets.token_bytes(3 * PART + 7), "small": b"1"}  # four parts, and none
RECORD = EpochRecord(run="run", epoch=7, destination="", cooldown_s=60.0, seed=1, step=30, clients=("a",))
ATTEMPT = "0" * 16


@pytest.fixture
def place() -> Iterator[Bucket]:
    with open_destination(f"s3://checkpoints/{secrets.token_hex(4)}") as each:
        assert isinstance(each, Bucket)
        yield each


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for name, data in MODEL.items():
        (tmp_path / "model" / name).write_bytes(data)
    return tmp_path / "model"


def report(done: Uploaded) -> UploadReport:
    return UploadReport(
        run="run", epoch=7, client="a", kind=ReportKind.UPLOADED, attempt=ATTEMPT, manifest_sha256=done.sha256
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "stored", [{"etag": "0" * 32}, {"of another kind": "0" * 32}, {}], ids=["other", "unknown", "none"]
)
def test_a_service_with_other_checksums_is_read_back(
    place: Bucket, model: Path, monkeypatch: pytest.MonkeyPatch, stored: dict[str, str]
) -> None:
    """As where it encrypts with keys of its own: a proof that differs refutes nothing, and proves nothing."""
    done = upload(model, place, RECORD, "a", ATTEMPT)
    monkeypatch.setattr(place, "proofs", lambda path: stored)
    assert verified(place, RECORD, report(done)).files == 2
    place.put(done.manifest.path(done.manifest.files[1]), b"2")
    with pytest.raises(RefusedUpload) as caught:
        verified(place, RECORD, report(done))
    assert caught.value.refusal is Refusal.WRONG_CHECKSUM


@pytest.mark.nightly
def test_parts_of_a_file_are_sent_at_the_same_time(shared: Child, place: Bucket, model: Path) -> None:
    shared.tell("pair")
    upload(model, place, RECORD, "a", ATTEMPT)
    shared.tell("most")
    assert int(shared.line()) >= 2


@pytest.mark.nightly
def test_parts_that_cannot_be_removed_are_named_in_the_log_without_secrets(
    server: Child, place: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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


def test_what_a_killed_uploader_left_is_found_and_removed(place: Bucket, model: Path) -> None:
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


def test_a_service_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with open_destination("s3://checkpoints/x") as gone, pytest.raises(DestinationError, match="cannot list") as caught:
        check_permissions(gone)
    assert SECRET not in str(caught.value)


@pytest.mark.nightly
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
        assert isinstance(place, Bucket)
        place.put("a", b"x")
        config = place._fs.s3.meta.config
        assert config.s3["addressing_style"] == "path"
        assert "operator/1" in config.user_agent
        assert (config.connect_timeout, config.read_timeout) == (base.CONNECT_S, 33)
    assert own.keys() == {"s3", "user_agent_extra", "read_timeout"}


@pytest.mark.nightly
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


SNAPSHOTTER = """
import sys
from transport import SharedRingBuffer
from transport.claims.open import given_rings
from transport.cooldown.destinations import bucket
from transport.snapshots import snapshot
bucket.PART = 5 << 20
def progress(done, files, size):
    if size > 9 << 20:
        print("half", flush=True)
        sys.stdin.readline()
with SharedRingBuffer.create(slots=4, slot_bytes=9 << 20, prefix=sys.argv[2]) as ring, given_rings(ring) as queue:
    for _ in range(3):
        ring.write_raw(bytes(9 << 20))
    snapshot(queue, sys.argv[1], 3, progress=progress).wait()
"""


def test_what_a_killed_snapshot_left_goes_with_the_next_prune(place: Bucket, prefix: str) -> None:
    with Child(SNAPSHOTTER, place.url, prefix) as child:
        assert child.line() == "half"
        child.kill()
    [segment] = Path("/dev/shm").glob(f"transport-{prefix}*")
    segment.unlink()  # nobody served it
    [left] = place.leftovers("run")
    assert left.startswith("run/snapshots/step-000000000003/")
    assert plan({}, place, "run", 1).kept == []  # it is of no epoch
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as ring, given_rings(ring) as queue:
        assert prune(place.url, 1) == []  # perhaps under way
        snapshot(queue, place.url, 4).wait(60)
    assert [(each.step, each.complete) for each in prune(place.url, 1)] == [(3, False)]
    assert place.leftovers("run") == []


def test_parts_of_a_snapshot_that_is_there_no_more_go_with_the_next_prune(place: Bucket) -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as ring, given_rings(ring) as queue:
        snapshot(queue, place.url, 4).wait(60)
    lost = f"{place_of('run', 3, ATTEMPT)}/files/payloads"
    place._call("create_multipart_upload", lost)
    assert [each.path for each in prune(place.url, 1)] == [place_of("run", 3, ATTEMPT)]
    assert place.leftovers("run") == []


def test_a_configuration_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": "path"})
    with pytest.raises(DestinationError, match="s3://checkpoints: cannot be opened"):
        open_destination("s3://checkpoints")
