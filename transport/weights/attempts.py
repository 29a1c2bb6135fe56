"""Attempt: the record of a run by which all its ranks load a version, or none does. Pure; `advance` makes the writes.

    JOINING ──► SENDING ──► LANDED ──► LOADED      all ranks have joined; have landed the version; have loaded it
       └───────────┴───────────┴─────► FAILED      a rank failed, or waited too long

There is one such record in a run, and it is never forgotten: a rank that lost its way to the store asks it afterwards
what became of its attempt. The next attempt replaces it, and with it ends the one before; which attempt was loaded last
it goes on to say. No rank is in doubt about an earlier one: an attempt is loaded with every rank or not at all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from transport.store.decision import Next


class AttemptPhase(enum.StrEnum):
    """Phases that all ranks reach together, in this order."""

    JOINING = "joining"
    SENDING = "sending"
    LANDED = "landed"
    LOADED = "loaded"
    FAILED = "failed"


_ORDER = list(AttemptPhase)


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt of all ranks at a version.

    Attributes:
        name: random.
        why: it failed.
        kept: name of the attempt that all ranks have loaded last.
    """

    name: str = ""
    version: int = -1
    phase: AttemptPhase = AttemptPhase.JOINING
    why: str = ""
    kept: str = ""

    def has_reached(self, name: str, phase: AttemptPhase) -> bool:
        """Return whether all ranks of the attempt of this name have come so far."""
        if self.kept == name:
            return True
        return self.name == name and self.phase is not AttemptPhase.FAILED and self._is_at_least(phase)

    def _is_at_least(self, phase: AttemptPhase) -> bool:
        return _ORDER.index(self.phase) >= _ORDER.index(phase)

    def why_not(self, name: str) -> str:
        """Return why the version of the attempt of this name is not loaded; "": it is, or that is open."""
        if self.kept == name:
            return ""
        if self.name != name:
            return f"the first sender began another attempt, at version {self.version}"
        return self.why


NO_ATTEMPT = Attempt()
Step = Callable[[Attempt | None], Next[Attempt] | None]


def begin(name: str, version: int) -> Step:
    """Return the step that begins an attempt, whatever became of the one before."""
    return lambda found: Next(Attempt(name=name, version=version, kept=(found or NO_ATTEMPT).kept))


def reach(name: str, phase: AttemptPhase) -> Step:
    """Return the step that leads an attempt to its next phase, unless it failed or another one was begun."""

    def step(found: Attempt | None) -> Next[Attempt] | None:
        if found is None or found.name != name or _ORDER.index(phase) != _ORDER.index(found.phase) + 1:
            return None
        kept = name if phase is AttemptPhase.LOADED else found.kept
        return Next(msgspec.structs.replace(found, phase=phase, kept=kept))

    return step


def fail(name: str, why: str) -> Step:
    """Return the step that fails an attempt, unless all ranks have loaded it or another one was begun."""

    def step(found: Attempt | None) -> Next[Attempt] | None:
        if found is None or found.name != name or found.phase in (AttemptPhase.LOADED, AttemptPhase.FAILED):
            return None
        return Next(msgspec.structs.replace(found, phase=AttemptPhase.FAILED, why=why))

    return step
