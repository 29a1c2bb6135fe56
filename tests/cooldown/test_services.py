"""Every service keeps checkpoints alike: S3, Google Cloud Storage and Hugging Face, by their own packages."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_services import GS, HUB, PART, S3, Service
from cooldown_runs import Run
from helpers import Child, asynchronous, until

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
from transport.cooldown.destinations.base import Destination, check_permissions
from transport.cooldown.epochs.records import Refusal, ReportKind, UploadReport
from transport.cooldown.upload import Stop, Uploaded, upload
from transport.cooldown.verify import RefusedUpload, verified
from transport.errors import UploadCancelledError
from transport.store.sqlite import SQLiteStore

MODEL = {"large": secrets.token_bytes(3 * PART + 7), "small": b"1"}  # four parts, and one
ATTEMPT = "0" * 16


def each_of(*services: Service) -> pytest.MarkDecorator:
    """Marks a test that needs these services; the environment of torch's tests has the packages of two of them."""
    others = [each for each in services if each is not S3]
    given = [pytest.param(each, marks=pytest.mark.adapters("torch")) for each in others]
    return pytest.mark.parametrize("service", [S3, *given], ids=lambda each: each.module, indirect=True)


every_service = each_of(S3, GS, HUB)
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # of aiohttp, by gcsfs


@pytest.fixture
def place(shared: Child, service: Service) -> Iterator[Destination]:
    with open_destination(service.url) as each:
        yield each


@pytest.fixture
def record() -> EpochRecord:
    """An epoch of a run of the test's own."""
    run = secrets.token_hex(4)
    return EpochRecord(run=run, epoch=7, destination="", cooldown_s=60.0, seed=1, step=30, clients=("a",))


def save(folder: Path, step: int) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in MODEL.items():
        (folder / name).write_bytes(data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(tmp_path / "model", 1)
    return tmp_path / "model"


def report(record: EpochRecord, done: Uploaded) -> UploadReport:
    kind = ReportKind.UPLOADED
    return UploadReport(run=record.run, epoch=7, client="a", kind=kind, attempt=ATTEMPT, manifest_sha256=done.sha256)


def asked(server: Child, what: str) -> int:
    """A number that the server says when it is asked."""
    server.tell(what)
    return int(server.line())


@every_service
def test_one_may_join_and_nothing_stays(place: Destination) -> None:
    before = place.names("")
    check_permissions(place)
    assert place.names("") == before


@pytest.mark.nightly(keep=1)
@every_service
def test_an_upload_is_proven_by_the_services_checksums_alone(
    place: Destination, model: Path, record: EpochRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    pieces = Destination.pieces
    monkeypatch.setattr(Destination, "pieces", lambda self, path: (read.append(path), pieces(self, path))[1])
    done = upload(model, place, record, "a", ATTEMPT)
    assert verified(place, record, report(record, done)).bytes == sum(map(len, MODEL.values()))
    assert [path.rpartition("/")[2] for path in read] == ["manifest.json"]
    verified(place, record, report(record, done), proof=CheckpointProof.READ)
    assert {path.rpartition("/")[2] for path in read} == {"manifest.json", *MODEL}


@pytest.mark.nightly(keep=1)
@every_service
def test_what_was_altered_in_the_store_is_refused(place: Destination, model: Path, record: EpochRecord) -> None:
    done = upload(model, place, record, "a", ATTEMPT)
    place.put(done.manifest.path(done.manifest.files[1]), b"2")
    with pytest.raises(RefusedUpload) as caught:
        verified(place, record, report(record, done))
    assert caught.value.refusal is Refusal.WRONG_CHECKSUM


@pytest.mark.nightly(keep=1)
@each_of(S3, GS)
def test_an_upload_that_is_called_off_leaves_nothing_at_all(
    shared: Child, place: Destination, model: Path, record: EpochRecord
) -> None:
    """Not even the parts of a multipart upload, which cost money where nobody sees them."""
    stop = Stop()
    begun: list[int] = []

    def progress(done: int, files: int, size: int) -> None:
        if size > 2 * PART and not begun:
            begun.append(asked(shared, "begun"))
            stop.set()

    with pytest.raises(UploadCancelledError):
        upload(model, place, record, "a", ATTEMPT, stop=stop, progress=progress)
    assert [*begun, asked(shared, "begun")] == [1, 0]
    assert place.names(record.run) == []


@pytest.mark.nightly(keep=1)
@each_of(S3, GS)
def test_a_throttled_upload_is_slower_and_whole(
    shared: Child, place: Destination, model: Path, record: EpochRecord
) -> None:
    shared.tell("throttle 2")
    done = upload(model, place, record, "a", ATTEMPT)
    assert asked(shared, "throttled") == 2
    assert verified(place, record, report(record, done), proof=CheckpointProof.READ).files == 2


@pytest.mark.nightly(keep=1)
@every_service
@asynchronous
async def test_a_server_that_is_killed_in_the_middle_gets_the_checkpoint_when_it_is_back(
    server: Child, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back empty, as a service would that lost everything: worse than those that keep what was complete."""
    monkeypatch.setattr(client_module, "AGAIN_FIRST_S", 0.01)
    port = int(os.environ[service.variable].rpartition(":")[2])
    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        run = Run(tmp_path, store)
        host = CooldownHost(store, "run", service.url, cooldown_s=60, seed=1, clock=run.clock)
        await host.open(7)
        server.tell("die")
        leading = asyncio.create_task(host.cooldown(7, 30, ["a"]))
        taking = asyncio.create_task(run.client("a", save=save).cooldown(7))
        assert await asyncio.to_thread(server.wait) == 9
        if service is S3:  # the other packages try again for longer
            await until(lambda: run.record(7).notes.get("a"))
            assert run.record(7).notes["a"].kind is ReportKind.FAILED
        with service.serving(port):
            assert (await taking).part is Part.WON
            record = await leading
            assert record.outcome is Outcome.CHECKPOINTED
            with open_destination(record.destination) as place:
                assert recorded_outcomes(place, "run") == {7: record}
                files = restore(record, place, tmp_path / "restored").files
            assert {name: path.read_bytes() for name, path in files.items()} == MODEL
