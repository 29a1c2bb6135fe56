"""The states of replicas: which ones take traffic, and with which version. A table; pure.

A replica is admitted only in state ``serving``: it has proven, by the checksum of what it would serve, that these are
the complete weights of a named version. ``updating`` and ``pending`` take no traffic; ``excluded`` takes none and is
left out of updates until it is readmitted.
"""

from __future__ import annotations

import enum

import msgspec

from transport.errors import WeightsError


class AdmissionState(enum.StrEnum):
    """State of one replica; stored by name."""

    SERVING = "serving"
    UPDATING = "updating"
    PENDING = "pending weights"
    EXCLUDED = "excluded"


class AdmissionEvent(enum.StrEnum):
    """Events of a replica."""

    BEGIN = "begin"  # of an update that it takes part in
    PROVEN_NEW = "proven new"  # it has all of the update's version
    PROVEN_OLD = "proven old"  # it still has all of the version before
    UNPROVEN = "unproven"  # it can prove neither
    EXCLUDE = "exclude"  # by policy, by hand, or because it is gone
    READMIT = "readmit"  # by hand, or because it is back


TRANSITIONS: dict[tuple[AdmissionState, AdmissionEvent], AdmissionState] = {
    (AdmissionState.PENDING, AdmissionEvent.BEGIN): AdmissionState.UPDATING,
    (AdmissionState.SERVING, AdmissionEvent.BEGIN): AdmissionState.UPDATING,
    (AdmissionState.UPDATING, AdmissionEvent.PROVEN_NEW): AdmissionState.SERVING,
    (AdmissionState.UPDATING, AdmissionEvent.PROVEN_OLD): AdmissionState.SERVING,
    (AdmissionState.UPDATING, AdmissionEvent.UNPROVEN): AdmissionState.PENDING,
    (AdmissionState.UPDATING, AdmissionEvent.EXCLUDE): AdmissionState.EXCLUDED,
    (AdmissionState.PENDING, AdmissionEvent.EXCLUDE): AdmissionState.EXCLUDED,
    (AdmissionState.SERVING, AdmissionEvent.EXCLUDE): AdmissionState.EXCLUDED,
    (AdmissionState.EXCLUDED, AdmissionEvent.EXCLUDE): AdmissionState.EXCLUDED,
    (AdmissionState.EXCLUDED, AdmissionEvent.READMIT): AdmissionState.PENDING,
}


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """State of one replica. A new one is pending: it has proven nothing.

    version: of the weights that it serves, or served last and has proven; -1: none. While it is updating or pending
        they may no longer be there.
    reason: of the last event that took it out of traffic.
    """

    state: AdmissionState = AdmissionState.PENDING
    version: int = -1
    reason: str = "it has no weights yet"

    def __str__(self) -> str:
        return f"serving v{self.version}" if self.state is AdmissionState.SERVING else f"{self.state} ({self.reason})"

    @property
    def admitted(self) -> bool:
        """True if the replica may take requests."""
        return self.state is AdmissionState.SERVING

    def after(self, event: AdmissionEvent, *, version: int | None = None, reason: str = "") -> Admission:
        """Return the state after ``event``. Raises WeightsError if there is no transition.

        version: that was proven, for the two events that prove one.
        """
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            raise WeightsError(f"no transition for event {event.value!r} of a replica that is {self}")
        if (to is AdmissionState.SERVING) != (version is not None):
            raise WeightsError(f"{event.value!r} of a replica that is {self} with version {version}")
        return Admission(state=to, version=self.version if version is None else version, reason=reason)
