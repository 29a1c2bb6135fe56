"""What the processes of a cluster agree on, and what each of them is told."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from queues import SaidRings

from transport.claims.places import AtAddresses, InDirectory
from transport.queue import RedisQueue
from transport.queue.base import TicketQueue
from transport.settings import DEFAULTS, Settings
from transport.storage.urls import RedisURL, parse_url
from transport.store.directory import Directory
from transport.store.open import open_store

Finding = Literal["addresses", "directory", "redis"]

# A third of the defaults or less, so that faults of seconds outlast them, in the same order as the defaults.
SETTINGS = msgspec.structs.replace(
    DEFAULTS,
    read_timeout_s=2.0,
    connect_timeout_s=2.0,
    handshake_timeout_s=2.0,
    batch_deadline_s=30.0,
    backoff_first_s=0.1,
    backoff_most_s=1.0,
    port_quarantine_s=1.0,
    port_quarantine_most_s=4.0,
    ack_timeout_s=10.0,
    watchdog_s=3.5,
    heartbeat_s=1.0,
    linger_s=60.0,
    claim_lease_s=5.0,
    claim_renew_s=1.5,
)
DIRECTORY_LEASE_S = 5.0
LOST_AFTER_S = DIRECTORY_LEASE_S * 5 / 3  # the lease and its grace: payloads of who is out of reach for longer are lost
FIRST_PORT = 7001
REDIS_PORT = 6379


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One process.

    Attributes:
        name: of its journal, as "rollout-3.1": host and life.
        queue: a place, as `open_queue` takes it.
        store: of the directory; "": none.
    """

    folder: str
    name: str
    finding: Finding
    queue: str
    store: str
    settings: Settings = SETTINGS

    @property
    def journal(self) -> Path:
        """Where it says what it does."""
        return Path(self.folder) / f"{self.name}.journal"

    def directory(self) -> Directory | None:
        """Where servers are published, of a queue that does not know it itself."""
        return Directory(open_store(self.store), lease_s=DIRECTORY_LEASE_S) if self.finding == "redis" else None


class RolloutPart(Part, frozen=True, kw_only=True):
    """A rollout worker. ``writer`` is another one in each life; ``address`` is its host's."""

    writer: int
    address: str
    ports: tuple[int, ...]
    per_s: float
    slots: int = 256


class TrainerPart(Part, frozen=True, kw_only=True):
    """A trainer."""

    batch: int = 32


def opened(part: Part, patience_s: float = 10.0) -> TicketQueue:
    """The queue. QueueError if its server does not answer."""
    lease_s = part.settings.claim_lease_s
    if part.finding == "addresses":
        return SaidRings(AtAddresses(part.queue.removeprefix("rings://")), lease_s=lease_s)
    if part.finding == "directory":
        store = open_store(part.queue.removeprefix("rings+"))
        return SaidRings(InDirectory(Directory(store, lease_s=DIRECTORY_LEASE_S)), store=store, lease_s=lease_s)
    url = parse_url(part.queue)
    assert isinstance(url, RedisURL)
    return RedisQueue(url, lease_s=lease_s, patience_s=patience_s)
