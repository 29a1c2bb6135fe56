"""Google Cloud Storage beside what every service does: credentials in a file, and the operator's configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_services import GS
from helpers import Child
from silent_server import silent_server

from transport.cooldown import open_destination
from transport.cooldown.destinations import base, bucket
from transport.errors import DestinationError

SERVICE = GS
pytestmark = [pytest.mark.adapters("torch"), pytest.mark.usefixtures("shared")]  # torch's environment has gcsfs


def test_credentials_may_be_in_a_file(server: Child, tmp_path: Path) -> None:
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
    (model := tmp_path / "model").mkdir()
    (model / "small").write_bytes(b"1")
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps(account))
    server.tell("locked")
    command = [sys.executable, "-m", "transport", "cooldown", "upload", str(model), "--run", "run", "--skip-upload"]
    command += ["--destination", GS.url]
    environment = {**os.environ, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true"}  # no gRPC here
    said = []
    for given in ({}, {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}):
        done = subprocess.run(command, env=environment | given, capture_output=True, text=True)
        said.append((done.returncode == 0, done.stdout + done.stderr))
    assert [ok for ok, _ in said] == [False, True], said
    assert "cannot list" in said[0][1]


@pytest.mark.parametrize("limit", ["ANSWER_S", "REQUEST_S"])
def test_a_service_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    import gcsfs.retry

    monkeypatch.setattr(gcsfs.retry, "is_retriable", lambda error: False)
    monkeypatch.setattr(base, limit, 0.2)
    with silent_server() as port:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        with open_destination(GS.url) as place:
            with pytest.raises(DestinationError, match="cannot look at a"):
                place.size("a")
            with pytest.raises(DestinationError, match="cannot write b"):
                place.put("b", b"x")


def test_the_operator_s_own_limits_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "gs", {"requests_timeout": 0.2})
    monkeypatch.setitem(fsspec.config.conf, "gcs", {"timeout": 33})
    with open_destination(GS.url) as place:
        assert isinstance(place, bucket.Bucket)
        assert (place._fs.requests_timeout, place._fs.timeout) == (0.2, 33)
