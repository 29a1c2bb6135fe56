"""What the demo's processes tell their parent: one JSON object per line, its kind under "type"."""

from __future__ import annotations

import msgspec


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """A trainer has consumed another batch. Bytes and wires are since its start."""

    consumed: int  # in all lives of a run
    bytes: int
    wires: list[str]
    mean_return: float  # of this batch


class RolloutDone(msgspec.Struct, frozen=True, kw_only=True, tag="rollout done"):
    """A rollout has published its share."""

    published: int
    pauses_s: list[float]  # of each version that it took from the trainer: how long it did not play
    policies_missed: int  # announced, but replaced by a newer version before they were read


class TrainerDone(msgspec.Struct, frozen=True, kw_only=True, tag="trainer done"):
    """A trainer has seen every episode."""

    consumed: int
    duplicates: int
    stale: int
    retries: int
    bytes_by_wire: dict[str, int]
    mean_return_first: float  # of the first tenth that was consumed
    mean_return_last: float
    mean_staleness: float  # versions between the policy that played an episode and the one it improved
    updates: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A worker gives up."""

    kind: str  # class of the error
    message: str


Done = RolloutDone | TrainerDone
Message = Progress | RolloutDone | TrainerDone | Failed

_decoder = msgspec.json.Decoder(Message)


def encode(message: Message) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line. Raises msgspec.MsgspecError."""
    message: Message = _decoder.decode(line)
    return message
