"""Every destination keeps one contract: a folder on disk, S3 and Google Cloud Storage as servers speak them."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoint_services import GS, S3, SECRET, Service
from helpers import Child

from transport.cooldown.destinations.base import PIECE, Destination, check_permissions, normalise
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.destinations.masking import masked
from transport.cooldown.destinations.open import open_destination
from transport.errors import (
    DestinationDeniedError,
    DestinationError,
    MissingDependencyError,
    TransportError,
    UploadCancelledError,
    UsageError,
)
from transport.runtime.blocking_calls import in_parallel

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # of aiohttp, by gcsfs
PLACES = [None, S3, pytest.param(GS, marks=pytest.mark.adapters("torch"))]


@pytest.fixture(scope="module", params=PLACES, ids=lambda each: each.module if each else "folder")
def served(request: pytest.FixtureRequest) -> Iterator[Service | None]:
    """The service of the destinations, while it runs; None: a folder."""
    service: Service | None = request.param
    with contextlib.ExitStack() as stack:
        if service is not None:
            stack.enter_context(service.prepared())
            stack.enter_context(service.serving())
        yield service


@pytest.fixture
def destination(served: Service | None, tmp_path: Path) -> Iterator[Destination]:
    url = f"{served.url}/{secrets.token_hex(4)}" if served else str(tmp_path)
    # gcsfs keeps its connections until the server ends.
    with GS.serving() if served is GS else contextlib.nullcontext(), open_destination(url) as made:
        yield made


def write(destination: Destination, path: str, data: bytes) -> None:
    destination.write(path, len(data), (data[at : at + PIECE] for at in range(0, len(data), PIECE)))


@pytest.mark.nightly(keep=1)
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


@pytest.mark.nightly(keep=1)
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


@pytest.mark.nightly(keep=1)
def test_a_small_file_is_replaced(destination: Destination) -> None:
    destination.put("outcome", b"first")
    destination.put("outcome", b"second and longer")
    assert destination.read("outcome", 100) == b"second and longer"
    assert destination.names("") == ["outcome"]


def test_too_long_a_file_is_not_read_as_a_small_one(destination: Destination) -> None:
    destination.put("small", b"12345")
    with pytest.raises(DestinationError, match="5 bytes"):
        destination.read("small", 4)


@pytest.mark.nightly(keep=1)
def test_a_folder_is_deleted_with_all_that_is_in_it(destination: Destination) -> None:
    for name in ("x/a", "x/y/b", "xy/c"):
        destination.put(name, b"1")
    destination.delete("x")
    assert destination.names("x") == []
    assert destination.size("x/y/b") is None
    assert destination.size("xy/c") == 1


@pytest.mark.nightly(keep=1)
def test_a_folder_that_several_delete_at_once_is_gone_for_each(destination: Destination) -> None:
    for number in range(200 if isinstance(destination, Folder) else 10):
        destination.put(f"x/{number % 10}/{number}", b"1")
    together = threading.Barrier(4)

    def delete() -> None:
        together.wait()
        destination.delete("x")

    in_parallel([delete] * 4, 4, together.abort)
    assert destination.names("x") == []


@pytest.mark.nightly(keep=2)
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


@pytest.mark.nightly(keep=1)
def test_one_may_join_where_everything_is_allowed(destination: Destination) -> None:
    check_permissions(destination)
    assert destination.names("") == []


# --- refusals -------------------------------------------------------------------------------------------
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


@pytest.mark.nightly(keep=1)
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


@pytest.mark.nightly(keep=3)
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
