"""Where a queue or a store is, as text: what is taken, and what the refusal of anything else says to type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from transport import open_rings
from transport.errors import ConfigurationError, StoreUnsuitableError, UsageError
from transport.storage.urls import RedisURL, SQLiteURL, parse_url
from transport.store import SQLiteStore, open_store


@pytest.mark.parametrize(
    ("text", "path"), [("sqlite:q.db", "q.db"), ("sqlite:///var/q.db", "/var/q.db"), ("sqlite:a%20b/q.db", "a b/q.db")]
)
def test_files_relative_and_absolute(text: str, path: str) -> None:
    assert parse_url(text) == SQLiteURL(Path(path))


def test_a_server_and_a_run() -> None:
    assert parse_url("redis://host:1/2?run=x") == RedisURL("redis://host:1/2", "x")


@pytest.mark.parametrize("password", ["sesa/same", "12/same", "1?same", "1#same", "sesame#same", "\u2100same", "[same"])
@pytest.mark.parametrize("user", ["user:", ":"])
def test_a_password_that_ends_the_address_too_early_is_refused_without_showing_it(user: str, password: str) -> None:
    for text in (f"redis://{user}{password}@host:6379/0?run=x", f"redis://{user}{password}@host?run=x"):
        with pytest.raises(ConfigurationError, match="%2F") as refused:
            parse_url(text)
        assert "same" not in str(refused.value)
        assert "sesa" not in str(refused.value)
    quoted = parse_url(f"redis://{user}{quote(password, safe='')}@host:6379/0?run=x")
    assert isinstance(quoted, RedisURL)


@pytest.mark.parametrize(
    ("text", "relative", "absolute"),
    [
        ("sqlite://q.db", "sqlite:q.db", "sqlite://{folder}/q.db"),
        ("sqlite://data/q.db", "sqlite:data/q.db", "sqlite://{folder}/data/q.db"),
    ],
)
def test_two_slashes_are_answered_with_what_leads_to_the_file_that_was_meant(
    text: str, relative: str, absolute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        parse_url(text)
    absolute = absolute.format(folder=tmp_path)
    assert f"give {relative} for the file in the working directory, which is {absolute}" in str(caught.value)
    for advised in (relative, absolute):
        place = parse_url(advised)
        assert isinstance(place, SQLiteURL)
        assert place.path.absolute() == tmp_path / text.removeprefix("sqlite://")


@pytest.mark.parametrize("text", ["sqlite:", "sqlite://", "sqlite:///", "sqlite:q.db?run=x"])
def test_a_place_without_a_file_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigurationError, match="give sqlite:file"):
        parse_url(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("redis://host", "needs run=name"),
        ("redis://host?run=", "needs run=name"),
        ("redis://host?run=a b", "needs run=name"),
        ("redis://host?run=a&run=b", "needs run=name"),
        ("redis://host?run=a&fun=b", "unknown option fun"),
        ("redis://host/name?run=a", "database in a Redis URL must be a number"),
        ("redis:///0?run=a", "without a host"),
        ("redis://host:port/0?run=a", "invalid URL"),
        ("", "has no scheme"),
    ],
)
def test_text_that_names_no_server_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_url(text)


@pytest.mark.parametrize("opened", [open_store, parse_url])
@pytest.mark.parametrize("text", ["amqp://host/0?run=x", "amqp:q.db", "unix:///run/redis.sock", "SQLITE2:q.db"])
def test_a_url_of_another_scheme_is_refused_by_its_name(text: str, opened: Callable[[str], Any]) -> None:
    kind = text.partition(":")[0].lower()
    with pytest.raises(ConfigurationError, match=f"unknown URL scheme '{kind}': give sqlite:file"):
        opened(text)


@pytest.mark.parametrize("make", [SQLiteStore, lambda path: open_store(f"sqlite:{path}")], ids=["path", "url"])
@pytest.mark.parametrize("name", [":memory:", "file::memory:", "file:q.db"])
def test_sqlites_own_names_make_no_files(
    name: str, make: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreUnsuitableError, match="is a database in memory"):
        make(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["sqlite:///var/s.db", "redis://host/0?run=x", Path("sqlite:s.db")])
def test_a_url_instead_of_a_path_is_refused_with_the_function_that_takes_urls(
    url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"open_store\(\)"):
        SQLiteStore(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["/tmp/x.sqlite", "x.sqlite", "//user:sesame@host"])
def test_text_without_a_scheme_is_named_unless_it_may_have_a_password(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_url(text)
    assert (repr(text) in str(caught.value)) == ("@" not in text)
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("ring:run-7-", "give rings:NAME"),
        ("redis://user:sesame@host/0?run=x", "write rings+redis:"),
        ("rings+reddis://user:sesame@host/0?run=x", "give rings:NAME"),
        ("amqp://user:sesame@host", "give rings:NAME"),
        ("seven", "give rings:NAME"),
    ],
)
def test_what_names_no_rings_is_told_how_they_are_named(text: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_rings(text)
    assert meant in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_a_file_of_a_store_is_told_how_rings_are_found_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"write rings\+sqlite:"):
        open_rings(f"sqlite:{tmp_path}/s.db")
    assert list(tmp_path.iterdir()) == []
