"""Checkpoints in Google Cloud Storage, by gcsfs, against a stand-in of the service's HTTP interface."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cooldown_runs import restored_though_the_service_died
from helpers import Child
from silent_server import silent_server

from transport.cooldown import CheckpointProof, EpochRecord, open_destination
from transport.cooldown import client as client_module
from transport.cooldown.destinations import base, bucket
from transport.cooldown.destinations.base import Destination, check_permissions
from transport.cooldown.epochs.records import Refusal, ReportKind, UploadReport
from transport.cooldown.upload import Uploaded, upload
from transport.cooldown.verify import RefusedUpload, verified
from transport.errors import DestinationError, UploadCancelledError

pytestmark = [
    pytest.mark.adapters("torch"),  # its environment has gcsfs
    pytest.mark.skipif(not importlib.util.find_spec("gcsfs"), reason="gcsfs is not installed"),
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),  # gcsfs gives aiohttp bytes
]

SERVER = """
import runpy, sys
sys.argv = ["gcs_server", *sys.argv[1:]]
runpy.run_module("gcs_server", run_name="__main__")
"""
URL = "gs://checkpoints/below"
MODEL = {"large": secrets.token_bytes(3 << 20), "small": b"1"}
RECORD = EpochRecord(run="run", epoch=7, destination="", cooldown_s=60.0, seed=1, step=30, clients=("a",))
ATTEMPT = "0" * 16


@contextlib.contextmanager
def serving(port: int = 0) -> Iterator[Child]:
    with Child(SERVER, port) as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.line()
        yield server


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Before the first leak check: fsspec's thread stays for life."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", "")
        patch.setattr(bucket, "PART", 1 << 20)  # so that a few MiB are several pieces
        with serving(), open_destination(URL) as place:
            place.put("first", b"")
        yield


@pytest.fixture
def server() -> Iterator[Child]:
    with serving() as each:
        yield each


@pytest.fixture
def place(server: Child) -> Iterator[Destination]:
    with open_destination(URL) as each:
        yield each


def save(folder: Path, step: int) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in MODEL.items():
        (folder / name).write_bytes(data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(tmp_path / "model", 1)
    return tmp_path / "model"


def report(done: Uploaded) -> UploadReport:
    return UploadReport(
        run="run", epoch=7, client="a", kind=ReportKind.UPLOADED, attempt=ATTEMPT, manifest_sha256=done.sha256
    )


def test_one_may_join_and_nothing_stays(place: Destination) -> None:
    check_permissions(place)
    assert place.names("") == []


def test_credentials_may_be_in_a_file(server: Child, tmp_path: Path, model: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    account = {
        "type": "service_account",
        "client_email": "trainer@project.example",
        "project_id": "project",
        "private_key": rsa.generate_private_key(65537, 2048).private_bytes(*encoding).decode(),
        "token_uri": os.environ["STORAGE_EMULATOR_HOST"] + "/token",
    }
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps(account))
    server.tell("locked")
    command = [sys.executable, "-m", "transport", "cooldown", "upload", str(model), "--run", "run", "--skip-upload"]
    environment = {**os.environ, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true"}  # no gRPC here
    said = []
    for given in ({}, {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}):
        done = subprocess.run([*command, "--destination", URL], env=environment | given, capture_output=True, text=True)
        said.append((done.returncode == 0, done.stdout + done.stderr))
    assert [ok for ok, _ in said] == [False, True], said
    assert "cannot list" in said[0][1]


def test_an_upload_is_proven_by_the_services_checksums_alone(server: Child, place: Destination, model: Path) -> None:
    done = upload(model, place, RECORD, "a", ATTEMPT)
    assert verified(place, RECORD, report(done)).files == 2
    server.tell("said")
    assert int(server.line().split()[1]) < 10_000  # the manifest, and no file
    verified(place, RECORD, report(done), proof=CheckpointProof.READ)
    server.tell("said")
    assert int(server.line().split()[1]) >= 3 << 20
    place.delete(f"run/epoch-000000000007/a/{ATTEMPT}")
    assert place.names("run") == []


def test_what_was_altered_in_the_store_is_refused(place: Destination, model: Path) -> None:
    done = upload(model, place, RECORD, "a", ATTEMPT)
    place.put(done.manifest.path(done.manifest.files[1]), b"2")
    with pytest.raises(RefusedUpload) as caught:
        verified(place, RECORD, report(done))
    assert caught.value.refusal is Refusal.WRONG_CHECKSUM


def test_an_upload_that_is_given_up_is_not_there(server: Child, place: Destination) -> None:
    def given_up() -> Iterator[bytes]:
        yield bytes(2 << 20)
        raise UploadCancelledError("given up")

    with pytest.raises(UploadCancelledError):
        place.write("given/up", 3 << 20, given_up())
    assert place.size("given/up") is None
    server.tell("said")
    assert server.line().split()[2] == "0"  # nor is it begun any more


def test_a_throttled_upload_is_slower_and_whole(server: Child, place: Destination, model: Path) -> None:
    server.tell("throttle 2")
    done = upload(model, place, RECORD, "a", ATTEMPT)
    server.tell("said")
    assert server.line().split()[0] == "2"
    assert verified(place, RECORD, report(done), proof=CheckpointProof.READ).files == 2


def test_a_server_that_is_killed_in_the_middle_gets_the_checkpoint_when_it_is_back(
    server: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "AGAIN_FIRST_S", 0.01)
    port = int(os.environ["STORAGE_EMULATOR_HOST"].rpartition(":")[2])
    found = restored_though_the_service_died(tmp_path, URL, server, lambda: serving(port), save)
    assert found == MODEL


@pytest.mark.parametrize("limit", ["ANSWER_S", "REQUEST_S"])
def test_a_service_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    import gcsfs.retry

    monkeypatch.setattr(gcsfs.retry, "is_retriable", lambda error: False)
    monkeypatch.setattr(base, limit, 0.2)
    with silent_server() as port:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        with open_destination(URL) as place:
            with pytest.raises(DestinationError, match="cannot look at a"):
                place.size("a")
            with pytest.raises(DestinationError, match="cannot write b"):
                place.put("b", b"x")


def test_the_operator_s_own_limits_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "gs", {"requests_timeout": 0.2})
    monkeypatch.setitem(fsspec.config.conf, "gcs", {"timeout": 33})
    with open_destination(URL) as place:
        assert isinstance(place, bucket.Bucket)
        assert (place._fs.requests_timeout, place._fs.timeout) == (0.2, 33)
