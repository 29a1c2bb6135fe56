"""Every destination keeps one contract: a folder on disk, and S3 as a real server speaks it."""

from __future__ import annotations

import errno
import importlib.util
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import Child

from transport.cooldown import EpochRecord
from transport.cooldown.destinations import bucket
from transport.cooldown.destinations.base import PIECE, Destination, check_permissions, normalise
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.destinations.masking import masked
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.upload import Stop, upload
from transport.errors import (
    DestinationDeniedError,
    DestinationError,
    MissingDependencyError,
    TransportError,
    UploadCancelledError,
    UsageError,
)

SECRET = "wJalrXUtnFEMI/K7MDENG-testing-only"
_HAVE_S3 = all(importlib.util.find_spec(name) for name in ("moto", "s3fs", "flask"))
needs_s3 = pytest.mark.skipif(not _HAVE_S3, reason="needs moto's server and s3fs")


@pytest.fixture(scope="module", autouse=True)  # before the first leak check: fsspec's thread stays for life
def s3_server() -> Iterator[str]:
    """moto's server in a process of its own; the bucket is "checkpoints"."""
    if not _HAVE_S3:
        yield ""
        return
    import fsspec.asyn
    import s3fs

    with pytest.MonkeyPatch.context() as patch, Child("import s3_server; s3_server.main()", 0) as child:
        url = child.line()
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        system = s3fs.S3FileSystem(skip_instance_cache=True)
        system.mkdir("checkpoints")
        fsspec.asyn.sync(system.loop, system._s3creator.__aexit__, None, None, None)
        del system
        yield url


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least that S3 takes for a part, so that a few MiB are several."""
    monkeypatch.setattr(bucket, "PART", 5 << 20)


def folder(request: pytest.FixtureRequest) -> Destination:
    return Folder(request.getfixturevalue("tmp_path"))


def s3(request: pytest.FixtureRequest) -> Destination:
    request.getfixturevalue("s3_server")
    return open_destination(f"s3://checkpoints/{secrets.token_hex(4)}")


@pytest.fixture(params=[folder, pytest.param(s3, marks=needs_s3)], ids=["folder", "s3"])
def destination(request: pytest.FixtureRequest) -> Iterator[Destination]:
    with request.param(request) as made:
        yield made


def write(destination: Destination, path: str, data: bytes) -> None:
    destination.write(path, len(data), (data[at : at + PIECE] for at in range(0, len(data), PIECE)))


# --- the contract ---------------------------------------------------------------------------------------
def test_what_was_written_is_read(destination: Destination) -> None:
    data = secrets.token_bytes(PIECE) * 2 + b"end"
    write(destination, "a/b/large", data)
    write(destination, "a/empty", b"")
    destination.put("a/small", b"small")
    assert destination.size("a/b/large") == len(data)
    assert (destination.size("a/empty"), destination.size("a/small")) == (0, 5)
    with destination.pieces("a/b/large") as pieces:
        assert b"".join(pieces) == data
    assert destination.read("a/empty", 10) == b""
    assert destination.names("a") == ["b", "empty", "small"]


def test_a_part_of_a_file_is_read(destination: Destination) -> None:
    data = secrets.token_bytes(PIECE + 1000)
    write(destination, "a/file", data)
    assert destination.part("a/file", PIECE - 10, 20) == data[PIECE - 10 : PIECE + 10]
    assert destination.part("a/file", PIECE, 2000) == data[PIECE:]  # it ends before
    with pytest.raises(DestinationError, match="read nothing"):
        destination.part("nothing", 0, 10)


def test_what_is_not_there_is_none(destination: Destination) -> None:
    assert destination.size("nothing") is None
    assert destination.read("nothing/at/all", 10) is None
    assert destination.names("nothing") == []
    destination.delete("nothing")
    with pytest.raises(DestinationError, match="read nothing"), destination.pieces("nothing") as pieces:
        list(pieces)


def test_what_another_process_wrote_is_seen_at_once(destination: Destination) -> None:
    with open_destination(destination.url) as other:
        assert (destination.names("a"), destination.size("a/b")) == ([], None)
        other.put("a/b", b"1")
        assert (destination.names("a"), destination.size("a/b")) == (["b"], 1)
        other.put("a/b", b"12")
        other.put("a/c", b"1")
        assert (destination.names("a"), destination.size("a/b")) == (["b", "c"], 2)
        other.delete("a")
        assert (destination.names("a"), destination.size("a/b")) == ([], None)


def test_a_small_file_is_replaced(destination: Destination) -> None:
    destination.put("outcome", b"first")
    destination.put("outcome", b"second and longer")
    assert destination.read("outcome", 100) == b"second and longer"
    assert destination.names("") == ["outcome"]


def test_too_long_a_file_is_not_read_as_a_small_one(destination: Destination) -> None:
    destination.put("small", b"12345")
    with pytest.raises(DestinationError, match="5 bytes"):
        destination.read("small", 4)


def test_a_folder_is_deleted_with_all_that_is_in_it(destination: Destination) -> None:
    for name in ("x/a", "x/y/b", "xy/c"):
        destination.put(name, b"1")
    destination.delete("x")
    assert destination.names("x") == []
    assert destination.size("x/y/b") is None
    assert destination.size("xy/c") == 1


@pytest.mark.parametrize("size", [0, 2 * PIECE])
def test_a_file_that_was_given_up_leaves_what_was_there(destination: Destination, size: int) -> None:
    def given_up() -> Iterator[bytes]:
        yield from [bytes(PIECE)] * (size // PIECE)
        raise UploadCancelledError("given up")

    destination.put("given/before", b"before")
    for name in ("up", "before"):
        with pytest.raises(UploadCancelledError):
            destination.write(f"given/{name}", 3 * PIECE, given_up())
    assert destination.names("given") == ["before"]
    assert destination.read("given/before", 10) == b"before"


def test_one_may_join_where_everything_is_allowed(destination: Destination) -> None:
    check_permissions(destination)
    assert destination.names("") == []


@needs_s3
def test_an_upload_to_s3_that_is_called_off_leaves_nothing_at_all(tmp_path: Path) -> None:
    """Not even the parts of a multipart upload, which cost money where nobody sees them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "large").write_bytes(bytes(14 << 20))
    record = EpochRecord(run="run", epoch=1, destination="", cooldown_s=1.0, seed=1)
    stop = Stop()
    begun = []

    def progress(done: int, files: int, size: int) -> None:
        if size > 9 << 20:
            begun.extend(destination._fs.list_multipart_uploads("checkpoints"))  # type: ignore[attr-defined]
            stop.set()

    with open_destination(f"s3://checkpoints/{secrets.token_hex(4)}") as destination:
        with pytest.raises(UploadCancelledError):
            upload(tmp_path / "model", destination, record, "a", "0" * 16, stop=stop, progress=progress)
        assert begun
        assert destination._fs.list_multipart_uploads("checkpoints") == []  # type: ignore[attr-defined]
        assert destination.names("") == []


# --- refusals -------------------------------------------------------------------------------------------


@needs_s3
def test_a_service_that_is_not_there_is_an_error(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with open_destination("s3://checkpoints/x") as gone, pytest.raises(DestinationError, match="cannot list") as caught:
        check_permissions(gone)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(("operation", "named"), [
    ("names", "cannot list"), ("put", "cannot create files in"), ("read", "cannot read"),
    ("delete", "cannot delete from"),
])  # fmt: skip
def test_what_is_refused_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, named: str) -> None:
    """Each of the four on its own; how a system refuses is the tests' below."""
    destination = Folder(tmp_path)

    def refuse(*_: object) -> None:
        with destination.translated(operation, "x"):
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(destination, operation, refuse)
    with pytest.raises(DestinationDeniedError, match=f"cannot join: it {named}") as caught:
        check_permissions(destination)
    assert not caught.value.retryable
    assert operation == "delete" or not list(tmp_path.iterdir())


_UNPRIVILEGED = """
import os, sys
from pathlib import Path
from transport.cooldown.destinations.base import check_permissions
from transport.cooldown.destinations.folder import Folder
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    check_permissions(Folder(Path(sys.argv[1])))
    print("joined")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("mode", "said"), [(0o555, "cannot create files in"), (0o333, "cannot list"), (0o777, "joined")]
)
def test_the_systems_refusal_is_named(mode: int, said: str, open_tmp: Path) -> None:
    target = open_tmp / "target"
    target.mkdir()
    target.chmod(mode)
    with Child(_UNPRIVILEGED, target, env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")}) as child:
        line = child.line()
    target.chmod(0o755)
    assert said in line
    assert line == "joined" or line.startswith("DestinationDeniedError this client cannot join")


@pytest.fixture
def open_tmp() -> Iterator[Path]:
    """A folder that another user reaches; those of pytest are private."""
    import shutil
    import tempfile

    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_a_folder_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    root.mkdir()
    destination = Folder(root)
    destination.put("a/b", b"1")
    (root / "a" / "b").unlink()
    (root / "a").rmdir()
    root.rmdir()
    calls: list[Callable[[], object]] = [
        lambda: destination.put("a/b", b"1"), lambda: destination.write("a/c", 1, [b"1"]),
        lambda: destination.names(""), lambda: destination.size("a/b"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(DestinationError, match=r"No such file.* make it"):
            call()
    assert not root.exists()
    root.mkdir()
    with pytest.raises(DestinationError) as caught, destination.pieces("a/b"):
        pass
    assert "make it" not in str(caught.value)  # only a file of it is missing
    root.rmdir()
    root.write_bytes(b"")
    with pytest.raises(DestinationError, match="make it"):
        destination.put("a/b", b"1")


def test_a_folder_that_another_process_made_and_did_not_flush_is_flushed_by_who_writes_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, flushed = os.fsync, set()

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", flush)
    (tmp_path / "run" / "epoch").mkdir(parents=True)  # as by a process that was stopped there
    with Folder(tmp_path) as destination:
        destination.put("run/epoch/file", b"x")
    assert {path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("*"))} <= flushed


# --- uRLs of destinations, packages that they need, and secrets that no message shows


@pytest.mark.parametrize(
    ("url", "form"),
    [
        ("/a/b/../c/", "file:///a/c"),
        ("file:///a%20b", "file:///a%20b"),
        ("/a#2?", "file:///a%232%3F"),
        ("s3://bucket/x//", "s3://bucket/x"),
        ("hf://datasets/a/b@main", "hf://datasets/a/b@main"),
    ],
)
def test_a_url_has_one_form(url: str, form: str) -> None:
    assert normalise(url) == form
    assert normalise(form) == form


@pytest.mark.parametrize(
    "url",
    ["", "ftp://x/y", "s3://", "s3://key:secret@bucket/x", "s3://bucket/x?AWSAccessKeyId=1", "gs://b/x#token", "file://host/x",
     "file:///a#2", "file:///a?b", "file:///a#"],
)  # fmt: skip
def test_a_url_with_credentials_or_without_a_place_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        normalise(url)
    assert "secret" not in str(caught.value)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*s3fs"):
        open_destination("s3://bucket/x")


def test_secrets_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    text = (
        f"PUT https://user:pass@host/x?X-Amz-Signature=abc123&X-Amz-Credential=AKIA/1 with {SECRET}, hf_abcdefgh, "
        f"Authorization: Bearer eyJ0"
    )
    clean = masked(text)
    for secret in (SECRET, "hf_abcdefgh", "pass@", "abc123", "AKIA", "eyJ0"):
        assert secret not in clean
    assert clean.startswith("PUT https://***@host/x?X-Amz-Signature=***&")
    assert masked("nothing secret here") == "nothing secret here"


def test_what_a_service_says_is_masked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STORE_TOKEN", "very-secret-token")
    with pytest.raises(TransportError) as caught, Folder(tmp_path).translated("list", ""):
        raise OSError("refused very-secret-token")
    assert "very-secret" not in str(caught.value)
