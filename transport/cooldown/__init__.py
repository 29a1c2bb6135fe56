"""Cooldown: an epoch ends with a checkpoint, uploaded by the first of the elected clients. See docs/COOLDOWN.md."""

from transport.cooldown.client import CooldownClient, Part, Taken
from transport.cooldown.coordination import CooldownHost
from transport.cooldown.destinations.base import Destination, check_permissions
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs.ledger import Ledger
from transport.cooldown.epochs.records import EpochRecord, Outcome, Phase
from transport.cooldown.restoring import Restored, recorded_outcomes, restore
from transport.cooldown.sharded import ShardedClient
from transport.cooldown.verify import CheckpointProof

__all__ = [
    "CheckpointProof",
    "CooldownClient",
    "CooldownHost",
    "Destination",
    "EpochRecord",
    "Ledger",
    "Outcome",
    "Part",
    "Phase",
    "Restored",
    "ShardedClient",
    "Taken",
    "check_permissions",
    "open_destination",
    "recorded_outcomes",
    "restore",
]
