"""The states of replicas: which ones take traffic, and with which version. A table; pure.

A replica is admitted only in state ``serving``: it has proven, by the checksum of what it would serve, that these are
the complete weights of a named version. ``updating`` and ``pending`` take no traffic; ``excluded`` takes none and is
left out of updates until it is readmitted.
"""

from __future__ import annotations

import enum

import msgspec

from transport.errors import InvalidAdmission


class State(enum.StrEnum):
    """State of one replica; stored by name."""

    SERVING = "serving"
    UPDATING = "updating"
    PENDING = "pending weights"
    EXCLUDED = "excluded"


class Event(enum.StrEnum):
    """Events of a replica."""

    BEGIN = "begin"  # of an update that it takes part in
    PROVEN_NEW = "proven new"  # it has all of the update's version
    PROVEN_OLD = "proven old"  # it still has all of the version before
    UNPROVEN = "unproven"  # it can prove neither
    EXCLUDE = "exclude"  # by policy, by hand, or because it is gone
    READMIT = "readmit"  # by hand, or because it is back


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.PENDING, Event.BEGIN): State.UPDATING,
    (State.SERVING, Event.BEGIN): State.UPDATING,
    (State.UPDATING, Event.PROVEN_NEW): State.SERVING,
    (State.UPDATING, Event.PROVEN_OLD): State.SERVING,
    (State.UPDATING, Event.UNPROVEN): State.PENDING,
    (State.UPDATING, Event.EXCLUDE): State.EXCLUDED,
    (State.PENDING, Event.EXCLUDE): State.EXCLUDED,
    (State.SERVING, Event.EXCLUDE): State.EXCLUDED,
    (State.EXCLUDED, Event.EXCLUDE): State.EXCLUDED,
    (State.EXCLUDED, Event.READMIT): State.PENDING,
}


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """State of one replica. A new one is pending: it has proven nothing.

    version: of the weights that it serves, or served last and has proven; -1: none. While it is updating or pending
        they may no longer be there.
    reason: of the last event that took it out of traffic.
    """

    state: State = State.PENDING
    version: int = -1
    reason: str = "it has no weights yet"

    def __str__(self) -> str:
        return f"serving v{self.version}" if self.state is State.SERVING else f"{self.state} ({self.reason})"

    @property
    def admitted(self) -> bool:
        """Whether the replica may take requests."""
        return self.state is State.SERVING

    def after(self, event: Event, *, version: int | None = None, reason: str = "") -> Admission:
        """The state after ``event``. Raises InvalidAdmission if there is no transition.

        version: that was proven, for the two events that prove one.
        """
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            raise InvalidAdmission(f"no transition for event {event.value!r} of a replica that is {self}")
        if (to is State.SERVING) != (version is not None):
            raise InvalidAdmission(f"{event.value!r} of a replica that is {self} with version {version}")
        return Admission(state=to, version=self.version if version is None else version, reason=reason)
