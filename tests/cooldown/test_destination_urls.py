"""URLs of destinations, packages that they need, and secrets that no message shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from transport.cooldown.destinations.base import normalise
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.destinations.masking import masked
from transport.cooldown.destinations.open import open_destination
from transport.errors import (
    MissingDependencyError,
    TransportError,
    UsageError,
)

SECRET = "wJalrXUtnFEMI/K7MDENG-testing-only"


@pytest.mark.parametrize(
    ("url", "form"),
    [
        ("/a/b/../c/", "file:///a/c"),
        ("file:///a%20b", "file:///a%20b"),
        ("s3://bucket/x//", "s3://bucket/x"),
        ("hf://datasets/a/b@main", "hf://datasets/a/b@main"),
    ],
)
def test_a_url_has_one_form(url: str, form: str) -> None:
    assert normalise(url) == form
    assert normalise(form) == form


@pytest.mark.parametrize(
    "url",
    ["", "ftp://x/y", "s3://", "s3://key:secret@bucket/x", "s3://bucket/x?AWSAccessKeyId=1", "gs://b/x#token", "file://host/x"],
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
