"""Folders of a user who has none, and a working folder that is gone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from transport import folders
from transport.cli.epochs import default_store
from transport.config import load
from transport.cooldown.destinations.base import normalise
from transport.errors import ConfigurationError


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME and without an entry in /etc/passwd."""
    for name in ("HOME", "XDG_STATE_HOME", "TRANSPORT_STORE"):
        monkeypatch.delenv(name, raising=False)

    def no_entry(_: object) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr("pwd.getpwuid", no_entry)


def test_without_a_home_each_use_of_it_says_what_to_give(homeless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="XDG_STATE_HOME"):
        default_store()
    with pytest.raises(ConfigurationError, match="HOME"):
        normalise("~/checkpoints")
    with pytest.raises(ConfigurationError, match="HOME"):
        load({"TRANSPORT_CONFIG": "~/transport.toml"})
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert folders.kept("XDG_STATE_HOME", "x") == Path("/state")


def test_a_working_folder_that_is_gone_has_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "named.toml"
    named.write_text("read_timeout_s = 19.0\n")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    shutil.rmtree(gone)
    assert load({}).configuration == load({}, folder=tmp_path).configuration
    assert load({"TRANSPORT_CONFIG": os.fspath(named)}).configuration.read_timeout_s == 19.0
