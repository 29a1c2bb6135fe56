"""The records of a run in the store: six kinds, and their keys.

All keys of a run begin with ``rendezvous/RUN/``; "/" and "%" in its name are escaped, so no run is below another.

    RUN/round           Round: the state of the run; written by compare-and-set only
    RUN/host            lease of the host, with the term it was won for
    RUN/waiting/NAME    name of a member that waits as a spare, under a lease; only where a newcomer may end a round
    RUN/7/slots         counter: the last slot taken in round 7
    RUN/7/seat/0        Seat: who took slot 0 of round 7, under a lease that its heartbeat renews
    RUN/7/place/0       Place: rank or standby, written when the round is complete
    RUN/7/roster        Roster: all members with a rank, in the order of ranks

Only RUN/round and RUN/host are rewritten: their values contain round and term, and the store refuses a write with an
older version. Values are JSON, so that an operator can read them; enums are stored by name.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from transport.errors import UsageError
from transport.runtime.error_text import MOST_TEXT

MOST_NAME_CHARACTERS = 128  # of runs and members
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME_CHARACTERS)]
Text = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class RoundPhase(enum.StrEnum):
    """State of a round."""

    OPEN = "open"  # members that come take a slot
    RUNNING = "running"  # members that come wait as hot spares
    CLOSED = "closed"  # the run is over, for good


class Reason(enum.StrEnum):
    """Reason for which a run was closed."""

    SUCCESS = "success"
    FAILURE = "failure"
    NO_RESTART = "no_restart"


class Role(enum.StrEnum):
    """Role of a member in a round."""

    ACTIVE = "active"  # has a rank
    STANDBY = "standby"  # joined, but all ranks were taken
    SPARE = "spare"  # came during the round, and waits for the next one


class Status(enum.StrEnum):
    """A member's report on its work in the round."""

    HERE = "here"
    DONE = "done"  # proven done; the run succeeds when all members with a rank are done
    RESTART = "restart"  # asks for a new round


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """End of a run. ``incarnation`` distinguishes it from a later run of the same name in an emptied store."""

    run: Name
    reason: Reason
    round: Count
    incarnation: Name
    by: Name
    message: Text = ""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """State of the run. ``term`` grows with every change of the host and is never reused in a run."""

    incarnation: Name
    number: Count
    phase: RoundPhase
    term: Count
    host: Name
    least: Count
    most: Count
    why: Text = ""  # reason for this round
    closing: Closing | None = None


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A member in a round.

    ``address`` is the address that others reach it by. ``where`` is its position in the network, a path such as
    ``pod1/rack3/host7``; members with similar paths get neighbouring ranks.
    """

    round: Count
    slot: Count
    member: Name
    address: Text = ""
    where: Text = ""
    status: Status = Status.HERE
    message: Text = ""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The role of a seat in its round. ``rank`` is -1 for standby; ``leader`` is the address of rank 0."""

    round: Count
    member: Name
    role: Role
    rank: int
    size: Count
    leader: Text


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """A member with a rank."""

    member: Name
    slot: Count
    address: Text


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """All members with a rank in a round, in the order of ranks."""

    round: Count
    peers: tuple[Peer, ...]


def check_name(what: str, name: str) -> str:
    """Return ``name``, or raise UsageError when it cannot be part of a key."""
    if not 0 < len(name) <= MOST_NAME_CHARACTERS or not name.isascii() or not name.isprintable() or " " in name:
        raise UsageError(f"{what} {name!r}: give 1 to {MOST_NAME_CHARACTERS} printable ASCII characters, no spaces")
    return name


class Keys:
    """Keys of one run."""

    def __init__(self, run: str) -> None:
        self.run = check_name("run", run)
        self.all = f"rendezvous/{run.replace('%', '%25').replace('/', '%2F')}/"  # prefix of all keys of the run
        self.round = f"{self.all}round"
        self.host = f"{self.all}host"

    def of_round(self, number: int) -> str:
        """Return the prefix of all keys of a round."""
        return f"{self.all}{number}/"

    @property
    def waiting(self) -> str:
        """Prefix of the keys of all waiting spares."""
        return f"{self.all}waiting/"

    def slots(self, number: int) -> str:
        """Return the key of the counter of slots taken."""
        return f"{self.all}{number}/slots"

    def seats(self, number: int) -> str:
        """Return the prefix of the keys of all seats of a round."""
        return f"{self.all}{number}/seat/"

    def seat(self, number: int, slot: int) -> str:
        """Return the key of a seat."""
        return f"{self.seats(number)}{slot}"

    def place(self, number: int, slot: int) -> str:
        """Return the key of a place."""
        return f"{self.all}{number}/place/{slot}"

    def roster(self, number: int) -> str:
        """Return the key of a roster."""
        return f"{self.all}{number}/roster"
