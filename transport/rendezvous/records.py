"""What stands in the store for a run: five kinds of records, their keys, and nothing that the store cannot lose safely.

    RUN/round           Round: the one truth about the run; written by compare-and-set only
    RUN/host            lease of whoever acts for the round, with the term it was won for
    RUN/7/slots         counter: the last slot taken in round 7
    RUN/7/seat/0        Seat: who took slot 0 of round 7, under a lease that its heartbeat renews
    RUN/7/place/0       Place: rank or standby, written when the round is complete
    RUN/7/roster        Roster: everybody with a rank, in the order of ranks

Only RUN/round and RUN/host are used again and again: their values carry round and term, and whoever comes with an older
version is refused by the store. Values are JSON, so that an operator can read them; enums are stored by name.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeVar

import msgspec

from transport.errors import StoreUnsuitableError, UsageError
from transport.runtime.decoders import ready
from transport.store.base import Entry

MOST_NAME_CHARACTERS = 128  # of runs and members
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME_CHARACTERS)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Phase(enum.StrEnum):
    """Of a round."""

    OPEN = "open"  # the gate is open: who comes takes a slot
    RUNNING = "running"  # the gate is closed; who comes waits at it as a hot spare
    CLOSED = "closed"  # the run is over, for good


class Reason(enum.StrEnum):
    """Why a run was closed."""

    SUCCESS = "success"
    FAILURE = "failure"
    NO_RESTART = "no_restart"


class Role(enum.StrEnum):
    """What a member is to a round."""

    ACTIVE = "active"  # has a rank
    STANDBY = "standby"  # joined, but all ranks were taken
    SPARE = "spare"  # came while the gate was closed, and waits for it to open


class Status(enum.StrEnum):
    """What a member says of its work in the round."""

    HERE = "here"
    DONE = "done"  # proven done; the run succeeds when everybody with a rank says so
    RESTART = "restart"  # wants a new round


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. ``incarnation`` tells this run from one of its name in a store that was emptied meanwhile."""

    reason: Reason
    round: Count
    incarnation: Name
    by: Name
    message: Text = ""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run stands. ``term`` grows with every change of the host; it is never given twice in a run."""

    incarnation: Name
    number: Count
    phase: Phase
    term: Count
    host: Name
    least: Count
    most: Count
    why: Text = ""  # what made this round necessary
    closing: Closing | None = None


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A member in a round. ``address`` is whatever others reach it by."""

    round: Count
    slot: Count
    member: Name
    address: Text = ""
    status: Status = Status.HERE
    message: Text = ""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What the round made of a seat. ``rank`` is -1 for standby; ``leader`` is the address of rank 0."""

    round: Count
    member: Name
    role: Role
    rank: int
    size: Count
    leader: Text


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Somebody with a rank."""

    member: Name
    slot: Count
    address: Text


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """Everybody with a rank in a round, in the order of ranks."""

    round: Count
    peers: tuple[Peer, ...]


ready(Closing, Round, Seat, Place, Peer, Roster)

Record = TypeVar("Record", bound=msgspec.Struct)


def encode(record: msgspec.Struct) -> bytes:
    """As it stands in the store."""
    return msgspec.json.encode(record)


def decode(kind: type[Record], key: str, entry: Entry) -> Record:
    """The record under ``key``. Raises StoreUnsuitableError when something else stands there."""
    try:
        return msgspec.json.decode(entry.value, type=kind)
    except msgspec.MsgspecError as error:
        what = f"the store has no valid {kind.__name__} under {key!r}: {error}"
        raise StoreUnsuitableError(f"{what}; choose another run name") from error


def check_name(what: str, name: str) -> str:
    """Return ``name``, or raise UsageError when it cannot be part of a key."""
    if not 0 < len(name) <= MOST_NAME_CHARACTERS or not name.isascii() or not name.isprintable() or " " in name:
        raise UsageError(f"{what} {name!r}: give 1 to {MOST_NAME_CHARACTERS} printable ASCII characters, no spaces")
    return name


class Keys:
    """Keys of one run."""

    def __init__(self, run: str) -> None:
        self.run = check_name("run", run).strip("/")
        self.round = f"{self.run}/round"
        self.host = f"{self.run}/host"

    def of_round(self, number: int) -> str:
        """What all keys of a round begin with."""
        return f"{self.run}/{number}/"

    def slots(self, number: int) -> str:
        """Counter of slots taken."""
        return f"{self.run}/{number}/slots"

    def seat(self, number: int, slot: int) -> str:
        """Seat."""
        return f"{self.run}/{number}/seat/{slot}"

    def place(self, number: int, slot: int) -> str:
        """Place."""
        return f"{self.run}/{number}/place/{slot}"

    def roster(self, number: int) -> str:
        """Roster."""
        return f"{self.run}/{number}/roster"
