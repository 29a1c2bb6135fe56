"""Places where the commands about checkpoints find the epochs: a store, or what a destination has recorded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transport.cli.output import few
from transport.config import load, without_password
from transport.errors import ConfigurationError, NoCheckpointError, UsageError
from transport.folders import kept
from transport.storage.urls import SQLiteURL, parse_url

if TYPE_CHECKING:
    from transport.cooldown.epochs.records import EpochRecord


def default_store() -> str:
    """Return the store's URL where none is given: the configured one, or the file in which the demo keeps its epochs.

    Raises ConfigurationError, which names the setting, where the configured one is no URL of a store.
    """
    loaded = load()
    given = loaded.configuration.store
    if given:
        try:
            parse_url(given)
        except ConfigurationError as error:
            where = f"{loaded.sources['store']}: store={without_password(given)}"
            raise ConfigurationError(f"{where}: {error}") from None
        return given
    return SQLiteURL(state_folder() / "store.sqlite3").text


def store_to_write(url: str | None = None) -> str:
    """Return this store's URL, or that of the default one; the folder that its file is to lie in is made."""
    url = url or default_store()
    parsed = parse_url(url)
    if isinstance(parsed, SQLiteURL):
        parsed.path.parent.mkdir(parents=True, exist_ok=True)
    return url


def state_folder() -> Path:
    """Return the folder of what outlives the commands."""
    return kept("XDG_STATE_HOME", ".local/state") / "transport"


def recorded(store: str | None, destination: str | None, run: str | None) -> list[EpochRecord]:
    """Return a run's epochs, or those of all in the store; with ``destination`` those that ended, as recorded there.

    Raises:
        NoCheckpointError: this run has no epochs there.
        UsageError: the store's file does not exist, or a destination is given without a run.
    """
    found = _from_store(store, run) if destination is None else _from_destination(destination, run)
    if run is not None and not found:
        raise NoCheckpointError(f"run {run} has no epochs {_where(store, destination)}")
    return found


def _where(store: str | None, destination: str | None) -> str:
    """Say where a run was looked for, and which runs a store has."""
    if destination is not None:
        return f"at {destination}; give the name and the place of its uploads"
    names = sorted({record.run for record in _from_store(store, None)})
    shown = without_password(store or default_store())
    return f"in the store {shown}, which has those of {few(names) or 'no run'}; --run and --store choose"


def _from_store(url: str | None, run: str | None) -> list[EpochRecord]:
    from transport.cooldown.epochs.ledger import Ledger, runs
    from transport.store.open import open_store

    url = url or default_store()
    parsed = parse_url(url)
    if isinstance(parsed, SQLiteURL) and not parsed.path.exists():  # looking must not make one
        raise UsageError(f"--store {url}: the file does not exist; give the run's store")
    with open_store(url) as store:
        chosen = runs(store) if run is None else [run]
        return [record for name in chosen for record in Ledger(store, name).epochs().values()]


def _from_destination(url: str, run: str | None) -> list[EpochRecord]:
    from transport.cooldown.destinations.open import open_destination
    from transport.cooldown.restoring import recorded_outcomes

    if run is None:
        raise UsageError("--destination needs --run, the run's name")
    with open_destination(url) as destination:
        return [record for _, record in sorted(recorded_outcomes(destination, run).items())]
