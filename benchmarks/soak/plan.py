"""What the processes of a soak agree on."""

from __future__ import annotations

from pathlib import Path

import msgspec

from transport.settings import DEFAULTS, Settings

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
    claim_renew_s=1.0,
)
MAX_DELIVERIES = 1000  # a payload is not given up because its trainers were killed


def lapse_s(plan: Plan) -> float:
    """So long has a trainer to be stopped until its claims are another's, however they were made."""
    over_the_wire_s = plan.settings.ack_timeout_s if plan.queue.startswith("rings") else 0.0
    return max(plan.settings.claim_lease_s, over_the_wire_s) + 0.5


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Told to every process on its command line."""

    folder: str
    queue: str  # a place, as the package takes it
    deadlines: bool = True  # some payloads have one (payloads.py)
    run: str
    seed: int
    slots: int = 768
    settings: Settings = SETTINGS

    def journal(self, who: str) -> Path:
        """Of the process ``who``, as "writer-0"."""
        return Path(self.folder) / f"{who}.journal"

    def ring(self, writer: int) -> str:
        """Name of a writer's segment."""
        return f"/transport-soak-{self.run}-{writer}"


class WriterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One writer's part."""

    plan: Plan
    number: int
    readers: int
    first: int  # number to go on with
    left: int  # payloads to publish
    ports: int = 2
    per_second: float | None = None  # payloads, at most
    seconds: float | None = None  # for which it writes, at most


class TrainerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer's part in this life."""

    plan: Plan
    number: int
    rank: int
    wire: list[str]  # empty: auto
    batch: int = 128
