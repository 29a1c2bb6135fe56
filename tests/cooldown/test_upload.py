"""One upload, the look at it by the coordinator, and the way back: bit-exact, or an error that says what is wrong."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from helpers import Child

from transport.cooldown.destinations.folder import Folder
from transport.cooldown.epochs import manifest as manifests
from transport.cooldown.epochs.records import (
    Checkpoint,
    EpochRecord,
    Outcome,
    Phase,
    Refusal,
    ReportKind,
    UploadReport,
    upload_folder,
)
from transport.cooldown.restoring import restore
from transport.cooldown.upload import Stop, Uploaded, plain_files, remove, upload
from transport.cooldown.verify import RefusedUpload, verified
from transport.errors import (
    CheckpointDamagedError,
    DestinationDeniedError,
    DestinationError,
    NoCheckpointError,
    UploadCancelledError,
    UsageError,
)
from transport.store.stored import encode

RECORD = EpochRecord(run="run", epoch=7, destination="", cooldown_s=60.0, seed=1, step=30, clients=("a",))
ATTEMPT = "0123456789abcdef"
PLACE = upload_folder("run", 7, f"a/{ATTEMPT}")
FILES = {"model/weights-1": secrets.token_bytes(9 << 20), "model/weights-2": b"", "config.json": b"{}"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def destination(tmp_path: Path) -> Folder:
    root = tmp_path / "destination"
    root.mkdir()
    return Folder(root)


@pytest.fixture
def uploaded(model: Path, destination: Folder) -> Uploaded:
    return upload(model, destination, RECORD, "a", ATTEMPT)


def report(sha256: str, attempt: str = ATTEMPT, epoch: int = 7) -> UploadReport:
    return UploadReport(
        run="run", epoch=epoch, client="a", kind=ReportKind.UPLOADED, attempt=attempt, manifest_sha256=sha256
    )


def ended(checkpoint: Checkpoint) -> EpochRecord:
    return msgspec.structs.replace(RECORD, phase=Phase.ENDED, outcome=Outcome.CHECKPOINTED, checkpoint=checkpoint)


def left(destination: Folder) -> list[str]:
    return [path.name for path in destination.root.rglob("*") if path.is_file()]


# --- the way there and back -----------------------------------------------------------------------------
def test_what_was_uploaded_is_verified_and_restored(tmp_path: Path, destination: Folder, uploaded: Uploaded) -> None:
    checkpoint = verified(destination, RECORD, report(uploaded.sha256))
    assert (checkpoint.files, checkpoint.bytes) == (3, sum(map(len, FILES.values())))
    restored = restore(ended(checkpoint), destination, tmp_path / "restored")
    assert {name: path.read_bytes() for name, path in restored.files.items()} == FILES
    assert restored.manifest.step == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == ["destination", "model", "restored"]


RESTORER = """
import sys
from pathlib import Path
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.epochs.records import EpochRecord
from transport.cooldown.restoring import restore
from transport.store.stored import decode
def progress(done, files, size):
    if size:
        print("some", flush=True)
        sys.stdin.readline()
record = decode(EpochRecord, "", sys.argv[1].encode())
restore(record, Folder(Path(sys.argv[2])), Path(sys.argv[3]), progress=progress)
"""


def test_a_restore_removes_what_a_killed_one_left_and_not_what_a_living_one_has(
    tmp_path: Path, destination: Folder, uploaded: Uploaded
) -> None:
    record = ended(verified(destination, RECORD, report(uploaded.sha256)))
    parent = tmp_path / "many"
    parent.mkdir()
    drafts: list[set[Path]] = []
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            arguments = (encode(record).decode(), destination.root, parent / "restored")
            child = stack.enter_context(Child(RESTORER, *arguments))
            assert child.line() == "some"
            drafts.append(set(parent.iterdir()))
            if len(drafts) == 1:
                child.kill()
        (killed,), (living,), both = drafts
        assert killed != living and living in both and killed not in both
        child.tell("\n" * 100)
        assert child.wait() == 0
        assert set(parent.iterdir()) == {living, parent / "restored"}
    shutil.rmtree(parent / "restored")
    restored = restore(record, destination, parent / "restored")
    assert {name: path.read_bytes() for name, path in restored.files.items()} == FILES
    assert list(parent.iterdir()) == [parent / "restored"]


def test_an_epoch_without_a_checkpoint_is_not_restored(tmp_path: Path, destination: Folder) -> None:
    timed_out = msgspec.structs.replace(RECORD, phase=Phase.ENDED, outcome=Outcome.TIMED_OUT)
    for record, state in ((timed_out, "timed_out"), (RECORD, "in phase training")):
        with pytest.raises(NoCheckpointError, match=f"no checkpoint; it is {state}"):
            restore(record, destination, tmp_path / "restored")


# --- a manifest that lies -------------------------------------------------------------------------------
def lie(destination: Folder, what: str) -> None:
    files = destination.root / PLACE / manifests.FILES
    large = files / "model/weights-1"
    match what:
        case "missing":
            large.unlink()
        case "shorter":
            large.write_bytes(FILES["model/weights-1"][:-1])
        case "longer":
            large.write_bytes(FILES["model/weights-1"] + b"x")
        case "altered":
            data = bytearray(FILES["model/weights-1"])
            data[len(data) // 2] ^= 1
            large.write_bytes(data)
        case "no manifest":
            (destination.root / PLACE / manifests.NAME).unlink()
        case "other manifest":
            (destination.root / PLACE / manifests.NAME).write_bytes(b"{}")
        case "a folder instead":
            large.unlink()
            large.mkdir()


LIES = [
    ("missing", Refusal.FILE_MISSING),
    ("shorter", Refusal.WRONG_SIZE),
    ("longer", Refusal.WRONG_SIZE),
    ("altered", Refusal.WRONG_CHECKSUM),
    ("no manifest", Refusal.MANIFEST_MISSING),
    ("other manifest", Refusal.MANIFEST_ALTERED),
    ("a folder instead", Refusal.FILE_MISSING),
]


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize(("what", "refusal"), LIES)
def test_a_lie_is_found(destination: Folder, uploaded: Uploaded, what: str, refusal: Refusal) -> None:
    lie(destination, what)
    with pytest.raises(RefusedUpload) as caught:
        verified(destination, RECORD, report(uploaded.sha256))
    assert caught.value.refusal is refusal


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize(("what", "refusal"), LIES)
def test_what_was_damaged_later_is_not_restored(
    tmp_path: Path, destination: Folder, uploaded: Uploaded, what: str, refusal: Refusal
) -> None:
    record = ended(verified(destination, RECORD, report(uploaded.sha256)))
    lie(destination, what)
    with pytest.raises(CheckpointDamagedError, match="run run, epoch 7"):
        restore(record, destination, tmp_path / "restored")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["destination", "model"]


@pytest.mark.parametrize("stored", [{}, {"crc64": "00"}, {"etag": "0" * 32}, {"sha256": ""}])
def test_what_no_known_checksum_proves_is_read_back(
    destination: Folder, uploaded: Uploaded, monkeypatch: pytest.MonkeyPatch, stored: dict[str, str]
) -> None:
    monkeypatch.setattr(Folder, "proofs", lambda self, path: stored)
    assert verified(destination, RECORD, report(uploaded.sha256)).files == len(FILES)
    largest = destination.root / PLACE / manifests.FILES / "model/weights-1"
    with largest.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    with pytest.raises(RefusedUpload) as caught:
        verified(destination, RECORD, report(uploaded.sha256))
    assert caught.value.refusal is Refusal.WRONG_CHECKSUM


def test_the_manifest_of_another_epoch_does_not_count(model: Path, destination: Folder) -> None:
    """Its bytes are as reported, and all its files are there."""
    older = msgspec.structs.replace(RECORD, epoch=6)
    done = upload(model, destination, older, "a", ATTEMPT)
    shutil.copytree(destination.root / upload_folder("run", 6, f"a/{ATTEMPT}"), destination.root / PLACE)
    with pytest.raises(RefusedUpload, match="another upload") as caught:
        verified(destination, RECORD, report(done.sha256))
    assert caught.value.refusal is Refusal.MANIFEST_ALTERED


@pytest.mark.parametrize(
    "name", ["../../../secret", "/etc/passwd", "a/../../b", "a//b", "", ".", "a\\b", "a\x00b", "C:x"]
)
def test_a_manifest_cannot_name_files_elsewhere(destination: Folder, name: str) -> None:
    file = manifests.File(name=name, size=0, blocks=(hashlib.sha256().hexdigest(),))
    data = manifests.CheckpointManifest(run="run", epoch=7, step=1, client="a", attempt=ATTEMPT, files=(file,)).encode()
    destination.put(f"{PLACE}/{manifests.NAME}", data)
    with pytest.raises(RefusedUpload, match="invalid entry") as caught:
        verified(destination, RECORD, report(hashlib.sha256(data).hexdigest()))
    assert caught.value.refusal is Refusal.MANIFEST_ALTERED


@pytest.mark.parametrize(
    ("size", "blocks"), [(0, 0), (manifests.BLOCK + 1, 1), (manifests.BLOCK, 2), (2 * manifests.BLOCK, 3)]
)
def test_a_manifest_has_a_checksum_for_each_block_of_a_file(size: int, blocks: int) -> None:
    digest = hashlib.sha256().hexdigest()
    file = manifests.File(name="large", size=size, blocks=(digest,) * blocks)
    data = manifests.CheckpointManifest(run="run", epoch=7, step=1, client="a", attempt=ATTEMPT, files=(file,)).encode()
    with pytest.raises(CheckpointDamagedError, match="invalid entry"):
        manifests.decode(data)


@pytest.mark.parametrize("size", [0, 6, 7, 8, 20])
@pytest.mark.parametrize("piece", [1, 5, 30])
def test_a_files_checksums_are_those_of_its_blocks_however_its_bytes_come(
    size: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "BLOCK", 7)
    data = secrets.token_bytes(size)
    found = manifests.Blocks()
    for start in range(0, size, piece):
        found.update(data[start : start + piece])
    blocks = [data[start : start + 7] for start in range(0, max(size, 1), 7)]
    assert (found.size, found.checksums()) == (size, tuple(hashlib.sha256(each).hexdigest() for each in blocks))


@pytest.mark.parametrize("attempt", ["", "..", "../../..", "0123456789ABCDEF", "0" * 15])
def test_a_report_cannot_name_a_place_elsewhere(destination: Folder, attempt: str) -> None:
    with pytest.raises(RefusedUpload, match="is not the name of an upload"):
        verified(destination, RECORD, report("", attempt))


# --- cancelled -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("at", ["before", "within a file", "between files", "before the manifest"])
def test_an_upload_that_was_called_off_says_so_and_leaves_nothing(
    model: Path, destination: Folder, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.cooldown.upload.FILES_AT_ONCE", 1)  # so that the moment is known
    stop = Stop()
    reached = []

    def progress(done: int, files: int, size: int) -> None:
        now = {
            "within a file": done == 1 and 0 < size < 9 << 20,
            "between files": done == 1 and size == 2,
            "before the manifest": done == files,
        }
        if now.get(at):
            reached.append(at)
            stop.set()

    if at == "before":
        stop.set()
    with pytest.raises(UploadCancelledError, match="cancelled"):
        upload(model, destination, RECORD, "a", ATTEMPT, stop=stop, progress=progress)
    assert reached or at == "before"
    assert left(destination) == []


def test_files_that_are_copied_at_the_same_time_end_with_the_first_that_fails(
    tmp_path: Path, destination: Folder
) -> None:
    for number in range(6):
        (tmp_path / "many" / str(number)).parent.mkdir(exist_ok=True)
        (tmp_path / "many" / str(number)).write_bytes(bytes(9 << 20))
    together = threading.Barrier(4)

    class Failing(Folder):
        def write(self, path: str, size: int, pieces: Iterable[bytes]) -> dict[str, str]:
            together.wait(10)  # four at once, not less
            if path.endswith("/2"):
                raise DestinationError("this one")
            return super().write(path, size, pieces)

    with pytest.raises(DestinationError, match="this one"):
        upload(tmp_path / "many", Failing(destination.root), RECORD, "a", ATTEMPT)
    assert left(destination) == []


def test_an_upload_that_is_cancelled_while_its_manifest_is_written_leaves_nothing(
    model: Path, destination: Folder
) -> None:
    stop = Stop()
    written = []

    class Watched(Folder):
        def put(self, path: str, data: bytes) -> None:
            stop.set()
            super().put(path, data)
            written.append(path)

    with pytest.raises(UploadCancelledError):
        upload(model, Watched(destination.root), RECORD, "a", ATTEMPT, stop=stop)
    assert written == [f"{PLACE}/manifest.json"]
    assert left(destination) == []


def test_removing_takes_the_manifest_first(destination: Folder, uploaded: Uploaded) -> None:
    order = []

    class Watched(Folder):
        def delete(self, path: str) -> None:
            order.append(path)
            super().delete(path)

    remove(Watched(destination.root), PLACE)
    assert order == [f"{PLACE}/manifest.json", PLACE]
    assert left(destination) == []


# --- a destination that fails ---------------------------------------------------------------------------
@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    path = tmp_path / "mounted"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_destination_fails_in_words_and_keeps_nothing(model: Path, mounted: Path) -> None:
    with pytest.raises(DestinationError, match="no space left"):
        upload(model, Folder(mounted), RECORD, "a", ATTEMPT)
    assert left(Folder(mounted)) == []


def test_a_read_only_destination_is_a_refusal(model: Path, mounted: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    with pytest.raises(DestinationDeniedError, match="Read-only file system"):
        upload(model, Folder(mounted), RECORD, "a", ATTEMPT)


def test_a_destination_that_vanishes_on_the_way_is_an_error(model: Path, destination: Folder) -> None:
    def vanish(done: int, files: int, size: int) -> None:
        if done == 1 and destination.root.exists():
            destination.root.rename(destination.root.with_name("elsewhere"))

    with pytest.raises(DestinationError, match="No such file"):
        upload(model, destination, RECORD, "a", ATTEMPT, progress=vanish)
    assert not destination.root.exists()
    assert not list(destination.root.with_name("elsewhere").rglob("manifest.json"))


# --- what is uploaded -----------------------------------------------------------------------------------
def test_only_plain_files_are_uploaded(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="leads out of the checkpoint"):
        plain_files(tmp_path)
    (tmp_path / "link").unlink()
    with pytest.raises(UsageError, match="no file to upload"):
        upload(tmp_path, Folder(tmp_path), RECORD, "a", ATTEMPT)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        plain_files(tmp_path)


# --- symbolic links -------------------------------------------------------------------------------------
def cache(folder: Path) -> Path:
    """A folder as Hugging Face's cache has it: the files under their checksums, and links with their names."""
    (folder / "blobs").mkdir(parents=True)
    (folder / "snapshots" / "main" / "shards").mkdir(parents=True)
    for name, blob in (("config.json", "aa"), ("shards/1.bin", "bb")):
        (folder / "blobs" / blob).write_text(name)
        link = folder / "snapshots" / "main" / name
        link.symlink_to(Path("../" * (2 + name.count("/"))) / "blobs" / blob)
    (folder / "latest").symlink_to("snapshots/main")
    return folder


def test_links_that_stay_in_the_folder_stand_for_their_files(tmp_path: Path, destination: Folder) -> None:
    folder = cache(tmp_path / "cache")
    (tmp_path / "named").symlink_to(folder)
    found = plain_files(tmp_path / "named")
    names = ["blobs/aa", "blobs/bb"]
    names += [f"{each}/{name}" for each in ("latest", "snapshots/main") for name in ("config.json", "shards/1.bin")]
    assert [name for name, _ in found] == names
    assert {path for _, path in found} == {folder / "blobs" / "aa", folder / "blobs" / "bb"}
    uploaded = upload(tmp_path / "named", destination, RECORD, "a", ATTEMPT)
    sizes = {file.name: file.size for file in uploaded.manifest.files}
    assert sizes["latest/shards/1.bin"] == len("shards/1.bin")


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "../../", "nowhere", "link", ".", "inner/.."])
def test_other_links_are_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "model" / "inner").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "model" / "link").symlink_to(target)
    with pytest.raises(UsageError, match="link"):
        plain_files(tmp_path / "model")


def test_restored_files_are_on_disk_before_their_folder_appears(
    destination: Folder, uploaded: Uploaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: dict[int, int] = {}
    appeared: list[Path] = []
    fsync, rename = os.fsync, Path.rename
    record = ended(verified(destination, RECORD, report(uploaded.sha256)))

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        flushed[found.st_ino] = found.st_mtime_ns

    def appear(self: Path, target: Path) -> Path:
        if not self.is_dir():
            return rename(self, target)
        files = [path.stat() for path in self.rglob("*") if path.is_file()]
        assert len(files) == len(FILES)
        assert all(flushed.get(each.st_ino, 0) >= each.st_mtime_ns for each in files)
        appeared.append(target)
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "rename", appear)
    restore(record, destination, tmp_path / "restored")
    assert appeared == [tmp_path / "restored"]


def test_a_name_that_not_every_system_takes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a:b").touch()
    with pytest.raises(UsageError, match="rename it"):
        plain_files(tmp_path)


def test_verification_can_be_called_off(destination: Folder, uploaded: Uploaded) -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(UploadCancelledError):
        verified(destination, RECORD, report(uploaded.sha256), stop)
