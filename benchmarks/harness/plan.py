"""What a rollout or trainer of the soak or the cluster is told, and the rings that it opens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from transport import FoundRings
from transport._ring import MAX_ATTEMPTS
from transport.claims.places import AtAddresses, InDirectory, OnThisHost
from transport.errors import StoreError
from transport.settings import DEFAULTS, Settings
from transport.store.directory import Directory
from transport.store.open import open_store

Answer = TypeVar("Answer")
# Short times, so that every clock of the protocol runs out many times in a soak.
SETTINGS = msgspec.structs.replace(
    DEFAULTS,
    read_timeout_s=2.0,
    connect_timeout_s=2.0,
    handshake_timeout_s=2.0,
    batch_deadline_s=20.0,
    backoff_first_s=0.1,
    backoff_most_s=1.0,
    port_quarantine_s=0.5,
    port_quarantine_most_s=2.0,
    ack_timeout_s=5.0,
    watchdog_s=3.0,
    heartbeat_s=0.5,
    linger_s=120.0,
    claim_lease_s=3.0,
)
DIRECTORY_LEASE_S = 5.0
_MAX_DELIVERIES = 1000  # a payload is not given up because its trainers were killed
_PAUSE_S = 0.1


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One process.

    Attributes:
        name: of its journal and log, as "trainer-2".
        queue: a place, as `open_rings` takes it.
    """

    folder: str
    name: str
    queue: str
    settings: Settings = SETTINGS

    @property
    def journal(self) -> Path:
        """Where it says what it does."""
        return Path(self.folder) / f"{self.name}.journal"

    @property
    def role(self) -> str:
        """writer or trainer."""
        return self.name.partition("-")[0]


class RolloutPart(Part, frozen=True, kw_only=True):
    """A rollout worker in this life.

    Attributes:
        readers: ranks that read each payload.
        ring: name of its segment, which a successor takes over; None: a new one.
        first, left: the number to go on with, and how many payloads to publish.
        per_s: payloads a second, at most; 0: as fast as it goes.
        deadlines: some payloads have one (payloads.py).
    """

    writer: int
    readers: int = 1
    ring: str | None = None
    slots: int = 768
    address: str = "127.0.0.1"
    ports: tuple[int, ...] = (0, 0)
    first: int = 0
    left: int = 1 << 40
    per_s: float = 0.0
    deadlines: bool = True


class TrainerPart(Part, frozen=True, kw_only=True):
    """A trainer in this life; ``wire`` empty: auto."""

    rank: int = 0
    wire: list[str] = []
    batch: int = 128


def opened(part: Part) -> FoundRings:
    """The rings of the part. StoreError if their directory cannot be had."""
    options: dict[str, Any] = {"lease_s": part.settings.claim_lease_s}
    scheme, _, rest = part.queue.partition(":")
    options["max_deliveries"] = min(_MAX_DELIVERIES, MAX_ATTEMPTS)
    if scheme.startswith("rings+"):
        store = open_store(part.queue.removeprefix("rings+"))
        return FoundRings(InDirectory(Directory(store, lease_s=DIRECTORY_LEASE_S)), store=store, **options)
    places = AtAddresses(rest[2:]) if rest.startswith("//") else OnThisHost(rest)
    return FoundRings(places, **options)


def patiently(action: Callable[[], Answer], complain: Callable[[str], object]) -> Answer:
    """Until the store does not fail. It has waited for its server itself; the pause is the pace of tries.

    No event says that a disk has room again, or that a server is back.
    """
    while True:
        try:
            return action()
        except StoreError as error:
            complain(str(error))
            time.sleep(_PAUSE_S)  # a pace of trying again: a server that is away tells nobody when it is back


def words_of(deliveries: Sequence[tuple[Any, Any]]) -> list[str]:
    """(writer, number) as the journal names payloads."""
    return [f"{writer}={number}" for writer, number in deliveries]
