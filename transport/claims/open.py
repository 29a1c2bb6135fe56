"""Opens the rings that a text names."""

from __future__ import annotations

from typing import Any

from transport.claims.places import AtAddresses, Discovery, InDirectory, OnThisHost
from transport.claims.rings import FoundRings
from transport.errors import ConfigurationError, UsageError
from transport.ring.buffer import SharedRingBuffer
from transport.storage.urls import SQLiteURL, parse_url
from transport.store.directory import Directory
from transport.store.open import open_store

_FORMS = "give rings:NAME for rings of this host, rings://host:port,host:port or rings+redis://… for those of several"
_STORES = ("redis", "rediss", "sqlite")


def open_rings(text: str) -> FoundRings:
    """Open the rings that a text names.

    ``rings:NAME`` are the rings of this host that belong to NAME: it ends with a separator (- @ . _ =), or one follows
    it, so that "job1" has not those of "job10" ("rings:": those of rollout workers that were given no rings).
    ``rings://host:port,host:port`` is what is served at these addresses, and ``rings+URL`` what servers have published
    in the directory of a store (``rings+redis://host:port/db?run=name``, ``rings+sqlite:///path``).

    Raises:
        ConfigurationError: the text is none of these.
        StoreUnsuitableError: this place cannot hold a directory.
        StoreUnavailableError: the server does not answer.
        MissingDependencyError: the redis package is not installed.
    """
    scheme, _, place = text.partition(":")  # what follows may have a password
    known, _, store_kind = scheme.lower().partition("+")
    if scheme.lower() in _STORES:
        raise ConfigurationError(f"{scheme + ':'!r} is a store, in which rings are found: write rings+{scheme}:…")
    if scheme != "rings" and (known != "rings" or store_kind not in _STORES):
        raise ConfigurationError(f"{scheme + ':'!r} names no rings: {_FORMS}")
    if scheme != "rings":
        store = open_store(text.partition("+")[2])
        return FoundRings(InDirectory(Directory(store)), store=store)
    if place.startswith("//"):
        return FoundRings(AtAddresses(place.removeprefix("//")))
    try:
        return FoundRings(OnThisHost(place or None))
    except UsageError as error:
        raise ConfigurationError(f"{text!r}: {error}") from None


def known_rings(text: str) -> FoundRings:
    """Open the rings that a text names, to look at them: where a directory's file is missing, none is made.

    Raises as `open_rings` does, and UsageError for that file, and for rings at addresses, which their host shows.
    """
    if text.startswith("rings://"):
        raise UsageError(f"{text}: a ring is seen by its own host: run it on the host of the rings, with rings:NAME")
    if text.startswith("rings+"):
        match parse_url(text.removeprefix("rings+")):
            case SQLiteURL(path) if not path.exists():
                raise UsageError(f"{path} does not exist: give the path that rollouts and trainers use")
    return open_rings(text)


def given_rings(*rings: SharedRingBuffer, **options: Any) -> FoundRings:
    """Return rings that this process is attached to, and no others. They stay the caller's.

    ``options``: of `FoundRings`.
    """
    given = FoundRings(Discovery(), **options)
    for ring in rings:
        given.hand_out(ring)
    return given
