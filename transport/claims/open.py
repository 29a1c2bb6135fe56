"""Opens the queue that a URL names."""

from __future__ import annotations

import difflib

from transport.claims.places import AtAddresses, InDirectory, OnThisHost
from transport.claims.rings import FoundRings
from transport.errors import ConfigurationError, UsageError
from transport.queue.base import TicketQueue
from transport.queue.redis import RedisQueue
from transport.storage.urls import RedisURL, parse_url
from transport.store.directory import Directory
from transport.store.open import open_store

_FORMS = (
    "give rings:NAME for rings of this host, rings://host:port,host:port or rings+redis://… for those of several, "
    "or redis://host:port/db?run=name for a queue beside them"
)
_KINDS = ("rings", "redis", "rediss", "sqlite")


def open_queue(url: str) -> TicketQueue:
    """Open the queue that a text names: the rings themselves, or a broker.

    ``rings:NAME`` are the rings of this host that belong to NAME: it ends with a separator (- @ . _ =), or one follows
    it, so that "job1" has not those of "job10" ("rings:": those of rollout workers that were given no queue).
    ``rings://host:port,host:port`` is what is served at these addresses, and ``rings+URL`` what servers have published
    in the directory of a store (``rings+redis://host:port/db?run=name``, ``rings+sqlite:///path``).
    ``redis://host:port/db?run=name`` is a queue beside the rings.

    Raises:
        ConfigurationError: the text is none of these.
        QueueUnsuitableError, StoreUnsuitableError: this server cannot hold a queue, or this place no directory.
        QueueUnavailableError, StoreUnavailableError: the server does not answer.
        MissingDependencyError: the redis package is not installed.
    """
    if isinstance(url, str) and url.partition(":")[0] in ("rings", "rings+redis", "rings+rediss", "rings+sqlite"):
        return open_rings(url)
    kind = url.partition(":")[0].lower()  # what follows may have a password
    if kind not in _KINDS:
        near = difflib.get_close_matches(kind, _KINDS[:3], n=1)
        meant = f"; did you mean {near[0]}:?" if near else ""
        raise ConfigurationError(f"{kind + ':'!r} begins no URL of a queue{meant}: {_FORMS}")
    parsed = parse_url(url)
    if not isinstance(parsed, RedisURL):
        raise ConfigurationError(f"{url!r} is a store, which holds no queue: {_FORMS}")
    return RedisQueue(parsed)


def open_rings(text: str) -> FoundRings:
    """`open_queue` for the rings of a run."""
    scheme, _, place = text.partition(":")
    if scheme != "rings":
        store = open_store(text.removeprefix("rings+"))
        return FoundRings(InDirectory(Directory(store)), store=store)
    if place.startswith("//"):
        return FoundRings(AtAddresses(place.removeprefix("//")))
    try:
        return FoundRings(OnThisHost(place or None))
    except UsageError as error:
        raise ConfigurationError(f"{text!r}: {error}") from None
